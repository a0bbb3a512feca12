"""Times the gradient path of an offloaded optimizer on CPU ranks, stock against z3ext.

    python scripts/offload_ratio.py [--ranks 2] [--rounds 7] [--layers 24] [--reduce-scatter]

One engine, on DeepSpeed's methods and on z3ext's in turn: every gradient goes through DeepSpeed's
own entry points (the hook's, the epilogue, the overflow check, the norms, the unscale), with one
thread for each rank.
Prints the median ratio with its range, and the bytes that a rank must move.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import time
from typing import Any

#: The parameters of one layer of a BERT of hidden size 512, by shape.
LAYER = (*((512, 512), (512,)) * 4, (2048, 512), (2048,), (512, 2048), *((512,),) * 5)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--reduce-scatter", action="store_true", help="DeepSpeed's default path")
    return parser.parse_args()


def _engine(options: argparse.Namespace) -> Any:
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # the arithmetic is there
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    shapes = LAYER * options.layers
    model = torch.nn.Module()
    model.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(s)) for s in shapes)
    zero = {
        "stage": 3,
        "reduce_scatter": options.reduce_scatter,
        "reduce_bucket_size": 10_000_000,
        "stage3_param_persistence_threshold": 0,
        "offload_optimizer": {"device": "cpu"},
    }
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "fp16": {"enabled": True, "loss_scale": 128.0},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def _path(optimizer: Any, params: list[Any], grads: list[Any]) -> float:
    """Seconds from the first hook to the last unscaled gradient."""
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    begin = time.perf_counter()
    optimizer.backward_prologue()
    for param in reversed(params):
        optimizer.reduce_ready_partitions_and_remove_grads(param)
    optimizer.independent_gradient_partition_epilogue()
    overflow = optimizer.has_overflow()
    norm = optimizer._get_norm_groups()[0]
    optimizer.unscale_and_clip_grads(0, norm)
    seconds = time.perf_counter() - begin
    if overflow:
        raise AssertionError("the gradients were finite")
    optimizer.reset_cpu_buffers()
    return seconds


def _rank(rank: int, port: int, options: argparse.Namespace) -> None:
    os.environ.update(
        DS_ACCELERATOR="cpu",
        OMP_NUM_THREADS="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        WORLD_SIZE=str(options.ranks),
        LOCAL_WORLD_SIZE=str(options.ranks),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
    )
    import torch
    import torch.distributed as dist

    import z3ext

    torch.set_num_threads(1)
    torch.ops.z3ext.flat_overflow(torch.zeros(1))  # compiles, if that was not done yet
    engine = _engine(options)
    optimizer = engine.optimizer
    params = [param for group in optimizer.fp16_groups for param in group]
    params[0].all_gather(params)
    generator = torch.Generator().manual_seed(rank)
    grads = [torch.randn(p.ds_shape, generator=generator).to(p.dtype) for p in params]
    cls = type(optimizer)
    stock = dict(vars(cls))
    z3ext.patch_deepspeed()
    ours = {name: method for name, method in vars(cls).items() if stock.get(name) is not method}
    ratios, times = [], []
    for round_ in range(options.rounds + 2):  # the first two warm up
        pair = []
        for patched in (False, True):
            for name, method in ours.items():
                setattr(cls, name, method if patched else stock[name])
            dist.barrier()
            pair.append(_path(optimizer, params, grads))
        if round_ >= 2:
            ratios.append(pair[0] / pair[1])
            times.append(pair)
    if rank == 0:
        numel = sum(param.ds_numel for param in params)
        # Gradients read, bucket written and reduced (read and written), partitions and fp32.
        moved = 2 * numel * 4 + numel // options.ranks * (2 + 2 + 2 + 4 + 8)
        medians = (statistics.median(column) for column in zip(*times, strict=True))
        before, after = medians
        path = "reduce-scatter" if options.reduce_scatter else "all-reduce"
        print(
            f"offloaded, {path}, {options.ranks} ranks, {len(params)} parameters, "
            f"{moved / 1e6:.0f} MB to move: "
            f"stock {before * 1e3:.0f} ms, z3ext {after * 1e3:.0f} ms, "
            f"{statistics.median(ratios):.2f} times as fast ({min(ratios):.2f} to "
            f"{max(ratios):.2f})"
        )
    dist.destroy_process_group()


def main() -> int:
    """Start the ranks; the exit status of the first one that failed."""
    options = _options()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=_rank, args=(rank, port, options)) for rank in range(options.ranks)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return next((int(p.exitcode or 0) for p in ranks if p.exitcode), 0)


if __name__ == "__main__":
    raise SystemExit(main())
