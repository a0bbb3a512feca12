"""Whether a gradient's memory is its own, so that nobody writes there while it waits."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

_use_count: Any = torch._C._storage_Use_Count  # the only way from Python to a storage's count


def _measure(tensor: Tensor) -> tuple[int, int, bool]:
    storage = tensor.untyped_storage()
    # Who keeps the storage itself keeps its one Python object, which counts once for torch.
    return _use_count(storage._cdata), sys.getrefcount(storage), storage.resizable()


# What a tensor with memory of its own has: one reference from it, and those of the way here, which
# differ between the versions of torch and Python.
_OWN = _measure(torch.empty(1, device="cpu"))


def owns_memory(tensor: Tensor) -> bool:
    """Whether no other tensor, and no owner outside torch (numpy, dlpack), has the same memory.

    Views, gradients that autograd handed to two parameters and a custom function's cached workspace
    share theirs. True for sparse tensors, which have no memory of that kind.
    """
    if tensor.layout is not torch.strided:
        return True
    return _measure(tensor) == _OWN
