"""Memory for large tensors that are made anew in every step."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable

import torch
from torch import Tensor

_HUGE = 2 << 20
#: Bytes from which huge pages are asked for. The allocator keeps smaller tensors for the next step.
_WORTH_IT = 2 * _HUGE


def empty_like(tensor: Tensor) -> Tensor:
    """An uninitialised tensor like ``tensor``, contiguous; on CPU in huge pages if there are any.

    The system maps fresh CPU memory page by page as it is written, which for pages of 4 KiB takes
    longer than the writing. Linux gives pages of 2 MiB on request (its setting "madvise", the usual
    one, or "always"); no request changes what is stored, or how much.
    """
    fresh = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    if fresh.device.type == "cpu" and fresh.nbytes >= _WORTH_IT:
        begin = -(-fresh.data_ptr() // _HUGE) * _HUGE
        end = (fresh.data_ptr() + fresh.nbytes) // _HUGE * _HUGE
        _ask_for_huge_pages()(begin, end - begin)
    return fresh


@functools.cache
def _ask_for_huge_pages() -> Callable[[int, int], object]:
    """What tells the system about an address range; nothing where it takes no such advice."""
    advice: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError, TypeError):
        advice = None
    if advice is None:
        return lambda begin, length: None
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return lambda begin, length: madvise(begin, length, advice)  # refused: it was only a wish
