"""z3ext breaks no script: a DeepSpeed that it does not serve is left alone, with one warning.

A DeepSpeed of the future is the installed one with something gone, renamed or changed.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.abc
import logging
import re
import subprocess
import sys
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3

import z3ext
from z3ext.deepspeed import recognise
from z3ext.deepspeed.fingerprint import fingerprint
from z3ext.deepspeed.names import NEEDED, PRIVATE
from z3ext.deepspeed.patch import UnsupportedDeepSpeedError
from z3ext.deepspeed.releases import RELEASES

RELEASE = RELEASES[-1]
STAGE3 = "deepspeed.runtime.zero.stage3"
NVTX = "deepspeed.utils.nvtx"
HEAD = f"declined: DeepSpeed {deepspeed.__version__}"
LEFT = "its own methods stay; z3ext serves DeepSpeed 0.15.4 to 0.19.8"
UNDO = f"so {LEFT}, or undo what replaced a method"

cached_fingerprint = functools.cache(fingerprint)

#: Gives DeepSpeed what it is to have in a test.
Change = Callable[[pytest.MonkeyPatch], None]


def attributes() -> dict[str, dict[str, Any]]:
    """Everything that a patch changes, by module."""
    modules = {path: dict(vars(sys.modules[path])) for path in NEEDED if sys.modules.get(path)}
    return {**modules, "class": dict(vars(Stage3))}


def assert_declined(caplog: pytest.LogCaptureFixture, line: str) -> None:
    """One warning, DeepSpeed as it was, the reason in the status; an error if strict."""
    before = attributes()
    engine = SimpleNamespace(optimizer=Stage3.__new__(Stage3))
    handle = z3ext.patch_deepspeed()
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, line)
    ]
    status = z3ext.status(engine)
    assert (status.served, status.reason, status.mode) == (False, line, "stock")
    with pytest.raises(UnsupportedDeepSpeedError, match=f"^z3ext: {re.escape(line)}$"):
        z3ext.patch_deepspeed(strict=True)
    assert not z3ext.is_patched()
    handle.undo()
    z3ext.unpatch_deepspeed()
    after = attributes()
    assert after.keys() == before.keys()
    for owner, found in after.items():
        assert found.keys() == before[owner].keys()
        assert all(found[name] is value for name, value in before[owner].items())
    assert len(caplog.records) == 1


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each source is read once for all tests."""
    monkeypatch.setattr(recognise, "fingerprint", cached_fingerprint)


def rename(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    patch.setattr(owner, f"{name}_renamed", vars(owner)[name], raising=False)
    patch.delattr(owner, name)


# --- something is gone ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", [f"{path}:{name}" for path in NEEDED for name in NEEDED[path]])
def test_needed_name_is_renamed(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, _, attribute = name.partition(":")
    with monkeypatch.context() as patch:
        rename(patch, importlib.import_module(path), attribute)
        assert_declined(caplog, f"{HEAD} has no {path}.{attribute}, so {LEFT}")


@pytest.mark.parametrize("path", NEEDED)
def test_module_is_gone(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, path, None)
    assert_declined(caplog, f"{HEAD} has no {path}, so {LEFT}")


def test_package_is_gone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    package = "deepspeed.runtime.swap_tensor"
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"{package}.partitioned_param_swapper")
    assert_declined(caplog, f"{HEAD} has no {package}.partitioned_param_swapper, so {LEFT}")


def test_much_is_gone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, NVTX, None)
    rename(monkeypatch, stage3, "print_rank_0")
    assert_declined(caplog, f"{HEAD} has no {STAGE3}.print_rank_0, {NVTX}, so {LEFT}")


@pytest.mark.parametrize("name", [*RELEASE.methods, *RELEASE.functions, "IPGBucketZ3"])
def test_source_is_renamed(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shown = name.removeprefix(PRIVATE)
    with monkeypatch.context() as patch:
        if name in RELEASE.methods:
            rename(patch, next(cls for cls in Stage3.__mro__ if name in vars(cls)), name)
            found = f"a source of {shown} that z3ext does not know" if hasattr(Stage3, name) else ""
        else:
            rename(patch, stage3, name)
            found = ""
        # A base class of DeepSpeed's may have one of that name as well.
        assert_declined(caplog, f"{HEAD} has {found or f'no {shown}'}, {UNDO}")


# --- something is another ------------------------------------------------------------------------


def another(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise AssertionError("not to be called")


@pytest.mark.parametrize("name", [*RELEASE.methods, *RELEASE.functions])
def test_source_is_another(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = f"a source of {name.removeprefix(PRIVATE)} that z3ext does not know"
    with monkeypatch.context() as patch:
        patch.setattr(Stage3 if name in RELEASE.methods else stage3, name, another)
        assert_declined(caplog, f"{HEAD} has {found}, {UNDO}")


def test_bucket_is_another(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fields = [*(RELEASE.bucket_fields or ()), "stream"]
    monkeypatch.setattr(stage3, "IPGBucketZ3", dataclasses.make_dataclass("IPGBucketZ3", fields))
    found = "a source of IPGBucketZ3 that z3ext does not know"
    assert_declined(caplog, f"{HEAD} has {found}, {UNDO}")


def test_gone_and_another(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        rename(patch, Stage3, "has_overflow")
        patch.setattr(Stage3, "_post_step", another)
        found = "no has_overflow and a source of _post_step that z3ext does not know"
        assert_declined(caplog, f"{HEAD} has {found}, {UNDO}")


def test_class_is_another(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A function that makes the optimizer: none of the methods is there."""
    monkeypatch.setattr(stage3, "DeepSpeedZeroOptimizer_Stage3", another)
    z3ext.patch_deepspeed()
    (line,) = caplog.messages
    assert re.match(rf"{HEAD} has no \w+, \w+, \w+ and \d+ more, so ", line)
    caplog.clear()
    assert_declined(caplog, line)


# --- looking at it fails -------------------------------------------------------------------------


def import_fails_with(error: Exception) -> Change:
    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, *args: object) -> None:
            if name == NVTX:
                raise error

    def change(patch: pytest.MonkeyPatch) -> None:
        patch.delitem(sys.modules, NVTX)
        patch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])

    return change


def module_fails(patch: pytest.MonkeyPatch) -> None:
    class Module(types.ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError("the module is made up later")

    patch.setitem(sys.modules, NVTX, Module(NVTX))


def class_fails(patch: pytest.MonkeyPatch) -> None:
    class Meta(type):
        def __getattribute__(cls, name: str) -> Any:
            raise RuntimeError(f"{name} is\nmade up later")

    patch.setattr(stage3, "DeepSpeedZeroOptimizer_Stage3", Meta("Stage3", (), {}))


def inherited(patch: pytest.MonkeyPatch) -> None:
    """The known sources, but the class only inherits them: nothing there to put back later."""
    heir = type(Stage3.__name__, (Stage3,), {"__module__": STAGE3})
    patch.setattr(stage3, "DeepSpeedZeroOptimizer_Stage3", heir)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (import_fails_with(OSError("no space left")), "OSError: no space left"),
        (import_fails_with(ImportError("cannot import name 'x'")), "ImportError: cannot import"),
        (import_fails_with(ValueError("CCL_ROOT is not set")), "ValueError: CCL_ROOT is not set"),
        (
            import_fails_with(ModuleNotFoundError("No module named 'nvtx'", name="nvtx")),
            "ModuleNotFoundError: No module named 'nvtx'",
        ),
        (module_fails, "RuntimeError: the module is made up later"),
        (class_fails, "RuntimeError: __dict__ is made up later"),
        (inherited, "KeyError: 'backward_prologue'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_looking_fails(change: Change, text: str, caplog: pytest.LogCaptureFixture) -> None:
    before = attributes()
    with pytest.MonkeyPatch.context() as patch:
        change(patch)
        z3ext.patch_deepspeed().undo()
        (line,) = caplog.messages
        assert line.startswith(f"declined: looking at DeepSpeed {deepspeed.__version__} failed ")
        assert f"failed with {text}" in line
        assert line.endswith(f"; {LEFT}")
        assert z3ext.status(SimpleNamespace(optimizer=Stage3.__new__(Stage3))).reason == line
        with pytest.raises(UnsupportedDeepSpeedError, match=re.escape(text)):
            z3ext.patch_deepspeed(strict=True)
        assert not z3ext.is_patched()
    after = attributes()
    assert all(found.items() <= before[owner].items() for owner, found in after.items())


@pytest.mark.parametrize("version", [None, "9.9.9"])
def test_any_version(
    version: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What counts is the source; a fork may call itself as it likes, or not at all."""
    if version is None:
        monkeypatch.delattr(deepspeed, "__version__")
    else:
        monkeypatch.setattr(deepspeed, "__version__", version)
    with caplog.at_level(logging.INFO, "z3ext"), z3ext.patch_deepspeed(strict=True):
        assert caplog.messages == [f"patched DeepSpeed {version or 'of unknown version'}"]


def test_known_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """What was declined before is patched once DeepSpeed is as it was."""
    with monkeypatch.context() as patch:
        patch.setattr(Stage3, "step", another)
        z3ext.patch_deepspeed()
    with z3ext.patch_deepspeed(strict=True):
        assert z3ext.is_patched()
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


# --- the status of anything ----------------------------------------------------------------------


class Closed:
    """An engine that answers nothing."""

    @property
    def optimizer(self) -> Any:
        raise RuntimeError("the engine\nis closed")


class Unhashable(Stage3):  # type: ignore[misc]  # DeepSpeed brings no types
    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (Closed(), "looking at the engine failed with RuntimeError: the engine is closed"),
        (
            SimpleNamespace(optimizer=Stage3.__new__(Stage3)),
            "looking at the engine failed with AttributeError: 'DeepSpeedZeroOptimizer_Stage3' "
            "object has no attribute 'ipg_buckets'",
        ),
        (SimpleNamespace(optimizer=Unhashable.__new__(Unhashable)), "TypeError: unhashable"),
    ],
    ids=["closed", "bare", "unhashable"],
)
def test_status_never_fails(engine: Any, reason: str) -> None:
    with z3ext.patch_deepspeed():
        status = z3ext.status(engine)
    assert (status.served, status.mode) == (False, "stock")
    assert reason in status.reason


# --- no DeepSpeed --------------------------------------------------------------------------------

WITHOUT = """
import sys

class Hidden:
    def find_spec(self, name, *args):
        if name.partition(".")[0] == "deepspeed":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
import z3ext
engine = type("Engine", (), {"optimizer": None})()
for strict in (False, True):
    try:
        z3ext.patch_deepspeed(strict=strict)
    except ImportError as error:
        print(error)
        assert error.name == "deepspeed" and error.__cause__ is None and error.__suppress_context__
assert not z3ext.is_patched()
z3ext.unpatch_deepspeed()
print(z3ext.status(engine).reason)
"""


def test_without_deepspeed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    line = (
        "z3ext.patch_deepspeed() found no DeepSpeed in this Python environment; expected DeepSpeed "
        "0.15.4 to 0.19.8; pip install deepspeed, or leave the call out"
    )
    status = "the engine's optimizer is NoneType; expected a ZeRO stage 3 optimizer"
    assert done.stdout.splitlines() == [line, line, status]


def test_patching_that_fails_halfway(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every method is as it was, and one line says what happened."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3

    def fail(self: object) -> None:
        raise OSError("no room")

    before = dict(vars(Stage3))
    monkeypatch.setattr("z3ext.deepspeed.quiet.Quiet.install", fail)
    with caplog.at_level(logging.WARNING, "z3ext"):
        z3ext.patch_deepspeed()
    assert not z3ext.is_patched()
    assert dict(vars(Stage3)) == before
    (line,) = caplog.messages
    assert "failed with OSError: no room" in line
