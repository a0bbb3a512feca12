"""The demo's model and its DeepSpeed engine."""

from __future__ import annotations

from types import MethodType
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

from z3ext.demo.corpus import PAD_ID, VOCABULARY

BATCH = 4  # sequences per rank and step
LENGTH = 64  # bytes per sequence
_HIDDEN = 128
_LAYERS = 24  # 394 parameter tensors: the gradient path's cost is per tensor
_HEADS = 4
_LEARNING_RATE = 5e-4

_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "zero_allow_untested_optimizer": True,  # torch's AdamW instead of DeepSpeed's own
    "steps_per_print": 1_000_000,
    # A start above what fp16 gradients bear and a short window: the run shows skipped steps, a
    # falling and a rising loss scale, which both sides must do at the same steps.
    "fp16": {
        "enabled": True,
        "initial_scale_power": 17,
        "hysteresis": 1,
        "loss_scale_window": 10,
    },
    "zero_optimization": {
        "stage": 3,
        "reduce_scatter": False,
        "contiguous_gradients": True,
        "overlap_comm": False,
        "reduce_bucket_size": 1_000_000,
        # No persistent parameters: stock DeepSpeed gathers each of those by a collective of its
        # own after every step, which would hide everything else behind gloo's latency.
        "stage3_param_persistence_threshold": 0,
    },
}


def _linear_fp32_accumulate(self: nn.Linear, value: Tensor) -> Tensor:
    """fp16 in, fp32 multiply-add, fp16 out: what a GPU's matrix units do.

    torch's own fp16 matrix product on the CPU is many times slower than its fp32 one.
    """
    bias = None if self.bias is None else self.bias.float()
    return F.linear(value.float(), self.weight.float(), bias).to(value.dtype)


def build_model(seed: int, device: torch.device) -> nn.Module:
    """A small byte-level BERT with freshly drawn fp32 weights, the same for equal seeds."""
    torch.manual_seed(seed)
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=_HIDDEN,
            num_hidden_layers=_LAYERS,
            num_attention_heads=_HEADS,
            intermediate_size=4 * _HIDDEN,
            max_position_embeddings=LENGTH,
            pad_token_id=PAD_ID,
            hidden_dropout_prob=0.0,  # far fewer steps than the text has bytes
            attention_probs_dropout_prob=0.0,
        )
    )
    if device.type == "cpu":
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.forward = MethodType(_linear_fp32_accumulate, module)  # type: ignore[method-assign]
    return model


def prepare_accelerator(device: torch.device) -> None:
    """Lets DeepSpeed train in fp16 on the CPU, which it refuses by default.

    Also skips DeepSpeed's shared-memory library: it is compiled for half a minute at the first
    use of the CPU and serves inference only.
    """
    if device.type == "cpu":
        get_accelerator().is_fp16_supported = lambda: True
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def build_engine(seed: int, device: torch.device) -> Any:
    """A fresh model in a fresh ZeRO stage 3 engine; equal seeds give equal engines."""
    model = build_model(seed, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=_CONFIG)
    return engine


def master_weights(engine: Any) -> list[Tensor]:
    """This rank's share of the fp32 weights: one flat tensor ``[numel]`` per sub-group."""
    return [flat.detach() for flat in engine.optimizer.fp32_partitioned_groups_flat]


def parameter_counts(engine: Any) -> tuple[int, int]:
    """``(tensors, elements)`` of the whole model, over all ranks."""
    parameters = list(engine.module.parameters())
    return len(parameters), sum(int(parameter.ds_numel) for parameter in parameters)
