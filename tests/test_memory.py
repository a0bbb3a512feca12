"""Fresh memory: a tensor like any other, whatever the system makes of the advice."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from z3ext import memory

SIZES = (0, 1, 1000, (4 << 20) // 4 - 1, (4 << 20) // 4, 3_000_001)


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The ranges that advice was asked for."""
    ranges: list[tuple[int, int]] = []
    monkeypatch.setattr(
        memory, "_ask_for_huge_pages", lambda: lambda begin, length: ranges.append((begin, length))
    )
    return ranges


@pytest.mark.parametrize("numel", SIZES)
def test_like(numel: int) -> None:
    like = torch.zeros(2, numel, dtype=torch.float32).t()
    fresh = memory.empty_like(like)
    assert (fresh.shape, fresh.dtype, fresh.device) == (like.shape, like.dtype, like.device)
    assert fresh.is_contiguous()
    fresh.fill_(3.0)
    assert bool((fresh == 3.0).all())


@pytest.mark.parametrize("numel", SIZES)
def test_advice_stays_within_the_tensor(numel: int, advised: list[tuple[int, int]]) -> None:
    fresh = memory.empty_like(torch.empty(numel))
    assert len(advised) == (fresh.nbytes >= 4 << 20)
    for begin, length in advised:
        assert begin % (2 << 20) == length % (2 << 20) == 0
        assert length >= 2 << 20
        assert fresh.data_ptr() <= begin
        assert begin + length <= fresh.data_ptr() + fresh.nbytes


def test_a_system_without_the_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    for missing in (lambda m: m.delattr(mmap, "MADV_HUGEPAGE", raising=False), _no_libc):
        with monkeypatch.context() as patch:
            missing(patch)
            memory._ask_for_huge_pages.cache_clear()
            fresh = memory.empty_like(torch.empty(3_000_001))
            assert bool((fresh.fill_(1.0) == 1.0).all())
    memory._ask_for_huge_pages.cache_clear()


def _no_libc(patch: pytest.MonkeyPatch) -> None:
    def refuse(name: object) -> object:
        raise OSError("no libc")

    patch.setattr(ctypes, "CDLL", refuse)
