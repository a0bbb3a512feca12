"""The demo's table, picture and exit status, from planted results."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from z3ext.demo import timing
from z3ext.demo.plot import draw
from z3ext.demo.report import table
from z3ext.demo.results import Comparison, DemoResult, Side

_SAME = {"loss": None, "gradient norm": None, "loss scale": None}


def _side(gradient_ms: float, collectives: int) -> Side:
    phases = dict.fromkeys(timing.PHASES, 20.0) | {timing.GRADIENT: gradient_ms}
    return Side(
        losses=[5.5, 5.25, 4.125],
        norms=[math.inf, 2.0, 1.0],
        loss_scales=[512.0, 512.0, 512.0],
        skipped=[1],
        samples_per_second=12.5,
        phases_ms=phases,
        gradient_half_ms=(gradient_ms - 2.5, gradient_ms + 3.5),
        collectives={"allreduce_": collectives, "_allgather_base_": 3},
        gradient_collectives=collectives,
    )


def _result(**changes: Any) -> DemoResult:
    fields: dict[str, Any] = {
        "device": "cpu",
        "backend": "gloo",
        "ranks": 2,
        "files": 541,
        "text_bytes": 8_400_000,
        "tensors": 394,
        "parameters": 4_817_282,
        "steps": 3,
        "batch": 4,
        "length": 64,
        "stock": _side(118.0, 8),
        "z3ext": _side(59.0, 6),
        "comparison": Comparison(3, dict(_SAME), 0),
        "status": {"served": True, "reason": ""},
        "seconds": 100.0,
    }
    return DemoResult(**(fields | changes))


def _line(text: str, start: str) -> list[str]:
    (found,) = (line for line in text.splitlines() if line.strip().startswith(start))
    return found.strip().removeprefix(start).split()


def test_table_shows_both_sides() -> None:
    text = table(_result())
    assert _line(text, "loss after 3 steps") == ["4.1250", "4.1250"]
    for what in ("every loss  ", "every gradient norm", "every loss scale", "final fp32 weights"):
        assert _line(text, what)[-1] == "identical", what
    assert _line(text, "samples per second") == ["12.50", "12.50", "1.00", "x"]
    assert _line(text, "gradient path ") == ["118.0", "59.0", "2.00", "x"]
    halves = _line(text, "gradient path, middle half of the steps")
    assert halves == ["116", "to", "122", "56", "to", "62"]
    assert "NOTE" not in text
    assert _line(text, "collectives per step in the gradient path")[:2] == ["8", "6"]
    assert _line(text, "other collectives per step") == ["3", "3"]
    assert "59.0 ms a step instead of 118.0 ms" in text.splitlines()[-1]
    assert "DIFFERENT" not in text


@pytest.mark.parametrize("noisy", ["stock", "z3ext"])
def test_a_busy_machine_is_named(noisy: str) -> None:
    side = dataclasses.replace(_side(100.0, 6), gradient_half_ms=(90.0, 111.0))
    text = table(_result(**{noisy: side}))
    assert "NOTE: the gradient path's times spread by 21%" in text.splitlines()[-2]


@pytest.mark.parametrize(
    ("comparison", "shown"),
    [
        (Comparison(3, _SAME | {"gradient norm": 2}, 0), "DIFFERENT (first at step 2)"),
        (Comparison(3, dict(_SAME), 17), "DIFFERENT (17 elements)"),
    ],
)
def test_a_difference_fails_and_is_shown(comparison: Comparison, shown: str) -> None:
    result = _result(comparison=comparison)
    assert not result.passed
    assert shown in table(result)
    assert table(result).splitlines()[-1].startswith("FAILED: training with z3ext differs")


def test_a_declined_engine_fails() -> None:
    result = _result(status={"served": False, "reason": "qgZ is on"})
    assert not result.passed
    assert table(result).splitlines()[-1] == "FAILED: z3ext declined this engine: qgZ is on"


def test_save_and_load_are_inverses(tmp_path: Path) -> None:
    result = _result()
    result.save(tmp_path / "result.json")
    loaded = DemoResult.load(tmp_path / "result.json")
    assert dataclasses.asdict(loaded) == dataclasses.asdict(result)
    assert loaded.passed


def test_picture_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "demo.png"
    draw(_result(), path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 20_000
