"""Ranges and strings that nobody reads cost nothing under the patch, and come back with undo."""

from __future__ import annotations

import types
from typing import Any

import pytest

import z3ext


@pytest.fixture(autouse=True)
def no_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID"):
        monkeypatch.delenv(name, raising=False)


def printing() -> list[Any]:
    from deepspeed.runtime.zero import partition_parameters, stage3

    return [partition_parameters, stage3]


def nvtx() -> Any:
    from deepspeed.utils import nvtx

    return nvtx


def test_undone() -> None:
    before = [nvtx().enable_nvtx, *(module.print_rank_0 for module in printing())]
    for _ in range(2):
        handle = z3ext.patch_deepspeed()
        assert nvtx().enable_nvtx is False
        during = [module.print_rank_0 for module in printing()]
        assert all(a is not b for a, b in zip(before[1:], during, strict=True))
        handle.undo()
        after = [nvtx().enable_nvtx, *(module.print_rank_0 for module in printing())]
        assert all(a is b for a, b in zip(before, after, strict=True))


def test_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """None under the patch, one for each call without it."""
    ranges: list[str] = []
    accelerator = types.SimpleNamespace(
        range_push=lambda name: ranges.append(name), range_pop=lambda: ranges.append("")
    )
    monkeypatch.setattr(nvtx(), "get_accelerator", lambda: accelerator)

    @nvtx().instrument_w_nvtx  # type: ignore[untyped-decorator]
    def work() -> int:
        return 7

    with z3ext.patch_deepspeed():
        assert work() == 7
        assert ranges == []
    assert work() == 7
    assert len(ranges) == 2


@pytest.mark.parametrize("name", ["NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID"])
def test_ranges_stay_where_a_profiler_listens(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "x")
    with z3ext.patch_deepspeed():
        assert nvtx().enable_nvtx is True
    assert nvtx().enable_nvtx is True


def test_what_the_user_sets_stays() -> None:
    with z3ext.patch_deepspeed():
        nvtx().enable_nvtx = True
    assert nvtx().enable_nvtx is True


def test_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock's function gets the lines that it prints, with their arguments, and no others."""
    for module in printing():
        seen: list[tuple[Any, ...]] = []
        monkeypatch.setattr(module, "print_rank_0", lambda *args, seen=seen: seen.append(args))
        with z3ext.patch_deepspeed():
            module.print_rank_0("not printed")
            module.print_rank_0("nor this", force=False)
            module.print_rank_0("forced", force=True)
            module.print_rank_0("debug", debug=True)
            module.print_rank_0("in order", False, True)
        assert seen == [
            ("forced", False, True),
            ("debug", True, False),
            ("in order", False, True),
        ]
