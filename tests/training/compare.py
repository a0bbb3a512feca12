"""Comparison of two records of a training on their bits; a nan equals any nan."""

from __future__ import annotations

import math
import struct
from typing import Any

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(value: float) -> int:
    """The IEEE double of a Python float as an integer."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _tensor_difference(stock: Tensor, patched: Tensor) -> str | None:
    if stock.dtype != patched.dtype:
        return f"dtype {stock.dtype} became {patched.dtype}"
    if stock.shape != patched.shape:
        return f"shape {tuple(stock.shape)} became {tuple(patched.shape)}"
    if stock.numel() == 0:
        return None
    a, b = stock.contiguous().view(-1), patched.contiguous().view(-1)
    width = _BITS[a.element_size()]
    differs = a.view(width) != b.view(width)
    if a.is_floating_point():
        differs &= ~(torch.isnan(a) & torch.isnan(b))
    if not bool(differs.any()):
        return None
    k = int(differs.nonzero()[0])
    return (
        f"{int(differs.sum())} of {a.numel()} elements, first [{k}]: stock {a[k].item()!r} "
        f"(bits {a.view(width)[k].item():#x}), patched {b[k].item()!r} "
        f"(bits {b.view(width)[k].item():#x})"
    )


def difference(stock: Any, patched: Any) -> str | None:
    """How the two values differ in type, shape or bits; None when they do not."""
    if type(stock) is not type(patched):
        return (
            f"stock {type(stock).__name__} {stock!r}, patched {type(patched).__name__} {patched!r}"
        )
    if isinstance(stock, Tensor):
        return _tensor_difference(stock, patched)
    if isinstance(stock, float):
        if bits(stock) == bits(patched) or (math.isnan(stock) and math.isnan(patched)):
            return None
        return f"stock {stock!r}, patched {patched!r}"
    return None if stock == patched else f"stock {stock!r}, patched {patched!r}"


def differences(stock: dict[str, Any], patched: dict[str, Any], limit: int = 12) -> list[str]:
    """Every record that differs, in the order of the stock run; at most `limit` are spelled out."""
    found: list[str] = []
    for name, value in stock.items():
        if name not in patched:
            found.append(f"{name}: missing in the patched run")
            continue
        what = difference(value, patched[name])
        if what is not None:
            found.append(f"{name}: {what}")
    found.extend(f"{name}: only in the patched run" for name in patched if name not in stock)
    if len(found) > limit:
        found[limit:] = [f"... and {len(found) - limit} more"]
    return found
