"""``python -m z3ext.demo``: trains one small model twice, without and with z3ext.

A byte-level BERT learns the sources of Python's standard library with DeepSpeed ZeRO stage 3
in fp16, on two local ranks. The exit code is 0 when z3ext served the engine and every loss,
gradient norm and weight is the same bit for bit; 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from z3ext.demo.ranks import RankFailure, run_ranks
from z3ext.demo.report import table
from z3ext.demo.results import DemoResult

_EXIT_DECLINED = 3  # of z3ext.demo.training, which this process doesn't import: it is slow
_EXIT_INTERRUPTED = 130


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m z3ext.demo", description="Stock DeepSpeed and z3ext side by side."
    )
    parser.add_argument("--steps", type=int, default=24, help="training steps of each side")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of the timing after that")
    parser.add_argument("--ranks", type=int, help="default 2; at most one per GPU if there are any")
    parser.add_argument("--output", type=Path, default=Path("demo.png"), help="the picture")
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for all ranks' work")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, not {options.steps}")
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {options.rounds}")
    if options.ranks is not None and options.ranks < 1:
        parser.error(f"--ranks must be at least 1, not {options.ranks}")
    for path in (options.output, options.json):
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"{path}: there is no folder {path.absolute().parent}")
    return options


def _choose_ranks(asked: int | None) -> tuple[int, bool]:
    """``(ranks, cpu)``: NCCL takes one GPU per rank, so GPUs limit the ranks."""
    gpus = 0
    if os.environ.get("DS_ACCELERATOR") != "cpu" and torch.cuda.is_available():
        gpus = torch.cuda.device_count()
    if not gpus:
        return asked or 2, True
    ranks = min(asked or 2, gpus)
    if ranks < (asked or 2):
        print(
            f"{gpus} GPU{'s' * (gpus > 1)} here, so {ranks} rank{'s' * (ranks > 1)}: "
            "NCCL needs one GPU per rank."
        )
    return ranks, False


def _build_library() -> None:
    """Loads z3ext's library in a process of its own, which compiles it at its first use.

    Raises:
        subprocess.CalledProcessError: that failed; the reason is on standard error.
    """
    print(
        "Loading z3ext's native library (compiled at the first use, a minute or two) ...",
        flush=True,
    )
    started = time.monotonic()
    load = "import torch, z3ext; torch.ops.z3ext.pack_"
    subprocess.run([sys.executable, "-c", load], check=True)
    print(f"  ready after {time.monotonic() - started:.0f} s", flush=True)


def _run(options: argparse.Namespace) -> int:
    ranks, cpu = _choose_ranks(options.ranks)
    try:
        _build_library()
    except subprocess.CalledProcessError as failure:
        print(
            f"z3ext's library did not load (exit code {failure.returncode}), see above.",
            file=sys.stderr,
        )
        return 1
    with tempfile.TemporaryDirectory(prefix="z3ext-demo-") as name:
        folder = Path(name)
        result_file = folder / "result.json"
        print(
            f"Training the same model twice, {options.steps} steps each, on {ranks} "
            f"rank{'s' * (ranks > 1)} ({'CPU' if cpu else 'GPU'}) ...",
            flush=True,
        )
        arguments = ["--steps", str(options.steps), "--rounds", str(options.rounds)]
        arguments += ["--result", str(result_file)]
        try:
            run_ranks("z3ext.demo.training", arguments, ranks, folder, options.limit, cpu)
        except RankFailure as failure:
            if failure.exit_code == _EXIT_DECLINED and result_file.exists():
                reason = result_file.read_text(encoding="utf-8")
                print(f"\nFAILED: z3ext declined this engine: {reason}", file=sys.stderr)
            else:
                print(f"\nFAILED: {failure}", file=sys.stderr)
            return 1
        result = DemoResult.load(result_file)
    print(f"\n{table(result)}\n")
    from z3ext.demo.plot import draw

    draw(result, options.output)
    print(f"Picture: {options.output}")
    if options.json is not None:
        result.save(options.json)
        print(f"Figures: {options.json}")
    return 0 if result.passed else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo and returns its exit code."""
    options = _options(arguments)
    try:
        return _run(options)
    except KeyboardInterrupt:
        print("\ninterrupted; all ranks are ended", file=sys.stderr)
        return _EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
