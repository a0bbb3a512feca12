"""The demo's clock, and its fit to DeepSpeed and to z3ext's patch."""

from __future__ import annotations

import time

import pytest
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from z3ext.demo import timing
from z3ext.demo.timing import COMPUTE, GRADIENT, PHASES, REFRESH, PhaseClock

# What z3ext's patch replaces; it declines an optimizer whose instance overrides one of these.
_PRIVATE = "_DeepSpeedZeroOptimizer_Stage3__"
REPLACED = {
    f"{_PRIVATE}add_grad_to_ipg_bucket",
    f"{_PRIVATE}reduce_and_partition_ipg_grads",
    "has_overflow",
    "_get_norm_groups",
    "_prepare_fp32_grad_for_sub_group",
    "unscale_and_clip_grads",
}


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, as the only element; a test moves it."""
    reading = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: reading[0])
    return reading


def test_time_counts_for_the_innermost_phase(now: list[float]) -> None:
    clock = PhaseClock()
    clock.start()
    now[0] += 1
    with clock.phase(COMPUTE):
        now[0] += 10
        with clock.phase(GRADIENT):
            now[0] += 100
        now[0] += 20
    now[0] += 2
    found = clock.stop()
    assert found == {COMPUTE: 30.0, GRADIENT: 100.0, "optimizer update": 0.0, REFRESH: 3.0}
    assert set(found) == set(PHASES)


def test_a_phase_ends_with_an_exception_too(now: list[float]) -> None:
    clock = PhaseClock()
    clock.start()
    with pytest.raises(ValueError, match="planted"), clock.phase(GRADIENT):
        now[0] += 4
        raise ValueError("planted")
    now[0] += 1
    assert clock.stop()[GRADIENT] == 4.0


def test_a_stopped_clock_measures_nothing() -> None:
    clock = PhaseClock()
    with clock.phase(GRADIENT):
        pass
    assert not clock.running


def test_the_device_is_waited_for_at_every_reading() -> None:
    waits: list[None] = []
    clock = PhaseClock(lambda: waits.append(None))
    clock.start()
    with clock.phase(COMPUTE):
        pass
    clock.stop()
    assert len(waits) == 4


def test_timed_methods_exist_and_are_none_that_the_patch_replaces() -> None:
    for name in timing._TIMED_METHODS:
        assert callable(getattr(DeepSpeedZeroOptimizer_Stage3, name))
    assert all(callable(getattr(DeepSpeedZeroOptimizer_Stage3, name)) for name in REPLACED)
    assert REPLACED.isdisjoint(timing._TIMED_METHODS)


def test_a_timed_method_runs_what_is_on_the_class_now(now: list[float]) -> None:
    methods = dict.fromkeys(timing._TIMED_METHODS, lambda self: "before")
    owner_class = type("Owner", (), methods)
    owner = owner_class()
    clock = PhaseClock()
    timing.time_optimizer(owner, clock)
    assert owner.step() == "before"

    def replaced(self: object) -> str:
        now[0] += 7
        return "after"

    owner_class.step = replaced  # type: ignore[attr-defined]
    clock.start()
    assert owner.step() == "after"
    assert clock.stop()[GRADIENT] == 7.0


def test_gradient_collectives_leave_out_the_fetches() -> None:
    counts = {"allreduce_": 7, "_allgather_base_": 3, "_reduce_scatter_base_": 2, "barrier": 1}
    assert timing.gradient_collectives(counts) == 9
