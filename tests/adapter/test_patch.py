"""Install and undo without ranks: wrong modes, backward passes, tools that patch over z3ext."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import z3ext
from z3ext import _library
from z3ext.deepspeed.names import PRIVATE
from z3ext.deepspeed.releases import RELEASES

REPLACED = RELEASES[-1].replaced


def methods() -> dict[str, Any]:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    return {name: vars(DeepSpeedZeroOptimizer_Stage3)[name] for name in REPLACED}


@pytest.mark.parametrize("mode", ["", "AUTO", "ring", None, 3])
def test_wrong_mode(mode: Any) -> None:
    before = methods()
    with pytest.raises(ValueError, match=r"z3ext: mode is .*; expected one of 'auto'") as caught:
        z3ext.patch_deepspeed(mode=mode)
    assert repr(mode) in str(caught.value)
    assert not z3ext.is_patched()
    assert methods() == before


def test_wrong_mode_when_patched() -> None:
    with z3ext.patch_deepspeed():
        with pytest.raises(ValueError, match="mode is 'ring'"):
            z3ext.patch_deepspeed(mode="ring")
        assert z3ext.is_patched()


def test_undo_twice() -> None:
    before = methods()
    handle = z3ext.patch_deepspeed()
    assert z3ext.is_patched()
    assert all(methods()[name] is not before[name] for name in REPLACED)
    handle.undo()
    handle.undo()
    assert not z3ext.is_patched()
    assert methods() == before
    again = z3ext.patch_deepspeed()
    handle.undo()  # that of the first patch: nothing to undo
    assert z3ext.is_patched()
    again.undo()
    assert not z3ext.is_patched()


@pytest.mark.parametrize("name", REPLACED)
def test_replacements_are_named_like_stock(name: str) -> None:
    """And nothing takes one for the stock method."""
    stock = methods()[name]
    with z3ext.patch_deepspeed():
        method = methods()[name]
        assert method.__name__ == stock.__name__
        assert method.__qualname__ == stock.__qualname__
        assert method.__module__ == stock.__module__
        assert getattr(method, "__wrapped__", None) is not stock


def test_undo_within_backward() -> None:
    handle = z3ext.patch_deepspeed()
    installed = methods()
    errors: list[str] = []

    def undo(grad: torch.Tensor) -> None:
        for call in (handle.undo, z3ext.unpatch_deepspeed):
            with pytest.raises(RuntimeError) as caught:
                call()
            errors.append(str(caught.value))

    weight: Any = torch.ones(2, requires_grad=True)
    weight.register_hook(undo)
    weight.sum().backward()
    assert len(errors) == 2
    assert all("within a backward pass" in text and "; call it after" in text for text in errors)
    assert z3ext.is_patched()
    assert methods() == installed
    handle.undo()
    assert not z3ext.is_patched()


@pytest.mark.parametrize("name", REPLACED)
def test_something_patched_over(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    handle = z3ext.patch_deepspeed()
    with monkeypatch.context() as over:
        over.setattr(DeepSpeedZeroOptimizer_Stage3, name, lambda self, *args: None)
        mixed = methods()
        with pytest.raises(RuntimeError, match=r"replaced by something else.*; undo") as caught:
            handle.undo()
        assert name.removeprefix(PRIVATE) in str(caught.value)
        assert methods() == mixed
        assert z3ext.is_patched()
    handle.undo()
    assert not z3ext.is_patched()


def test_library_that_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise z3ext.BuildError("z3ext: no compiler; install one")

    before = methods()
    monkeypatch.setattr(_library, "load", fail)
    with pytest.raises(z3ext.BuildError, match="no compiler"):
        z3ext.patch_deepspeed()
    assert not z3ext.is_patched()
    assert methods() == before


# --- status --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "found"),
    [
        (None, "NoneType"),
        (3, "NoneType"),
        (SimpleNamespace(optimizer=None), "NoneType"),
        (SimpleNamespace(optimizer=torch.optim.SGD([torch.zeros(1)])), "SGD"),
    ],
    ids=str,
)
def test_status_of_other_objects(engine: object, found: str) -> None:
    for handle in (None, z3ext.patch_deepspeed()):
        status = z3ext.status(engine)
        assert (status.served, status.mode) == (False, "stock")
        assert status.reason == (
            f"the engine's optimizer is {found}; expected a ZeRO stage 3 optimizer"
        )
        assert (status.buckets, status.packs, status.collectives, status.bytes_reduced) == (0,) * 4
        if handle:
            handle.undo()


def test_status_says_why_nothing_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3

    engine = SimpleNamespace(optimizer=Stage3.__new__(Stage3))
    z3ext.patch_deepspeed().undo()
    assert "undone" in z3ext.status(engine).reason
    monkeypatch.setenv("Z3EXT_DISABLE", "1")
    z3ext.patch_deepspeed().undo()
    assert not z3ext.is_patched()
    assert "Z3EXT_DISABLE=1" in z3ext.status(engine).reason


# --- asking without DeepSpeed --------------------------------------------------------------------


def in_new_process(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_asking_does_not_import_deepspeed() -> None:
    in_new_process(
        "import sys, z3ext\n"
        "assert z3ext.is_patched() is False\n"
        "z3ext.unpatch_deepspeed()\n"
        "assert 'deepspeed' not in sys.modules\n"
        "assert 'z3ext.deepspeed.patch' not in sys.modules\n"
    )


def test_asking_while_another_thread_imports() -> None:
    """Importing DeepSpeed takes seconds; the module is in sys.modules before it is complete."""
    in_new_process(
        "import sys, types, z3ext\n"
        "sys.modules['z3ext.deepspeed.patch'] = types.ModuleType('z3ext.deepspeed.patch')\n"
        "assert z3ext.is_patched() is False\n"
    )
