"""Fingerprints: equal for equal code however it is written, different for any other code."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from z3ext.deepspeed import support
from z3ext.deepspeed.fingerprint import fingerprint
from z3ext.deepspeed.names import PRIVATE
from z3ext.deepspeed.recognise import closest, describe
from z3ext.deepspeed.releases import RELEASES
from z3ext.deepspeed.releases.release import Release

Load = Callable[[str], Any]

INSTALLED = RELEASES[-1]

PLAIN = '''
def method(self, x, scale=2):
    """Scale, then add."""
    # a comment
    y = x * scale
    if y > 3:
        y += 1
    return f"{y}: {self!r:>8}", [y, "text"], -0.5
'''


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """`load(source)` is the `method` that the source defines, from a file of its own."""
    numbers = itertools.count()

    def load_source(source: str) -> Any:
        path = tmp_path / f"source{next(numbers)}.py"
        path.write_text(source, encoding="utf-8")
        module = types.ModuleType(path.stem)
        exec(compile(source, str(path), "exec"), vars(module))
        return module.method

    return load_source


@pytest.mark.parametrize(
    "source",
    [
        PLAIN,
        "\n\n# moved down\n" + PLAIN,
        PLAIN.replace('"""Scale, then add."""', '"""Other\n    words."""'),
        PLAIN.replace('    """Scale, then add."""\n', ""),
        PLAIN.replace("# a comment", "# another one"),
        PLAIN.replace("x * scale", "(x\n        * scale)"),
        PLAIN.replace("x * scale", "(((x))*scale)"),
        PLAIN.replace('"text"', "'text'").replace("[y, ", "[y  ,\n        "),
        PLAIN.replace("    ", "\t"),
        PLAIN.replace("scale=2", "scale=0x2"),
        "class Owner:\n" + PLAIN.replace("\n", "\n    ") + "\nmethod = Owner.method\n",
    ],
)
def test_same_code(load: Load, source: str) -> None:
    assert fingerprint(load(source)) == fingerprint(load(PLAIN))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("scale=2", "scale=3"),
        ("scale=2", "scale=2.0"),
        ("scale=2", "scale=True"),
        ("scale=2", "*, scale=2"),
        ("x * scale", "x / scale"),
        ("x * scale", "scale * x"),
        ("y > 3", "y >= 3"),
        ("y += 1", "y = y + 1"),
        ("y += 1", "y += 1; y += 0"),
        ("y += 1", "pass"),
        ('"text"', '"Text"'),
        ('"text"', 'b"text"'),
        ("-0.5", "0.5"),
        ("self!r:>8", "self!s:>8"),
        ("self!r:>8", "self!r:>9"),
        ("[y, ", "[*y, "),
        ('[y, "text"]', '(y, "text")'),
        ("def method(self", "def method(this"),
        ("def method", "async def method"),
        ("\ndef method", "\n@staticmethod\ndef method"),
    ],
)
def test_other_code(load: Load, old: str, new: str) -> None:
    other = PLAIN.replace(old, new)
    assert other != PLAIN
    found = fingerprint(load(other))
    assert len(found) == 16
    assert found != fingerprint(load(PLAIN))


def test_is_a_constant_of_the_code(load: Load) -> None:
    """The same hash on every machine and under every Python version."""
    assert fingerprint(load(PLAIN)) == "00b003e17fe14dab"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('def method(a, w): return f"{a:>{w}}", f"{a!r:^{w}.{w}} {{}}"', "fc8b8fc1def271f4"),
        ('def method(a, w): return f"{a=}" "b" f"{w}" f"", 1e400, 1_000, u"c"', "04c3da0570e4c3a1"),
        ("def method(a, /, *b, c: int = 1, **d) -> int: return a[1:, ...]", "50d112f9f70dc8fa"),
    ],
)
def test_syntax_trees_that_differ_between_pythons(load: Load, source: str, expected: str) -> None:
    """Python 3.12 puts an empty constant into a format; other versions differ in other fields."""
    assert fingerprint(load(source)) == expected


# --- wrappers ------------------------------------------------------------------------------------

WRAPPED = f"""
import functools
{PLAIN}
original = method

def wraps(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)
    return inner

def closure(function):
    def inner(*args, **kwargs):
        return function(*args, **kwargs)
    return inner

method = WRAPPER
"""


def wrapped(load: Load, expression: str, source: str = WRAPPED) -> str:
    return fingerprint(load(source.replace("WRAPPER", expression)))


def test_wrappers_show(load: Load) -> None:
    expressions = (
        "original",
        "wraps(original)",
        "closure(original)",
        "wraps(wraps(original))",
        "closure(wraps(original))",
        "wraps(closure(original))",
        "lambda *args: original(*args)",
    )
    found = [wrapped(load, expression) for expression in expressions]
    assert "" not in found
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("wrapper", ["wraps", "closure", "staticmethod", "classmethod"])
def test_what_is_wrapped_counts(load: Load, wrapper: str) -> None:
    expression = f"{wrapper}(original)"
    before = wrapped(load, expression)
    assert before
    assert wrapped(load, expression) == before
    assert wrapped(load, expression, WRAPPED.replace("y > 3", "y > 4")) != before
    if wrapper in ("wraps", "closure"):
        other = WRAPPED.replace("return function(*args", "return None or function(*args")
        assert wrapped(load, expression, other) != before


def test_static_and_class_methods_are_looked_into(load: Load) -> None:
    """As they are stored in a class: the function inside is what counts."""
    plain = fingerprint(load(PLAIN))
    assert fingerprint(staticmethod(load(PLAIN))) == plain
    assert fingerprint(classmethod(load(PLAIN))) == plain


def test_torchs_wrapper_by_whatever_name(load: Load) -> None:
    """Before torch 2.15 it is decorate_context, since then it has the decorator's name."""
    function = load(PLAIN)
    source = "def wrap(f):\n    def NAME(*args):\n        return f(*args)\n    return NAME\n"
    found = set()
    for name in ("decorate_context", "no_grad"):
        scope: dict[str, Any] = {"__name__": "torch.utils._contextlib"}
        exec(source.replace("NAME", name), scope)
        found.add(fingerprint(scope["wrap"](function)))
    assert found == {fingerprint(torch.no_grad()(function))}


def test_torch_decorators_show_by_name(load: Load) -> None:
    """Their sources differ between torch versions; that they are there matters, and which."""
    found = fingerprint(torch.no_grad()(load(PLAIN)))
    assert found not in ("", fingerprint(load(PLAIN)))
    assert found == fingerprint(torch.no_grad()(load(PLAIN)))
    assert found != fingerprint(torch.no_grad()(load(PLAIN.replace("y > 3", "y > 4"))))
    decorated = "import torch\n\n@torch.no_grad()" + PLAIN
    assert fingerprint(load(decorated)) != fingerprint(
        load(decorated.replace("no_grad", "enable_grad"))
    )


def test_wrappers_in_a_cycle(load: Load) -> None:
    """A function that reaches itself through its closure."""
    lines = "def make():", " def method(n):", "  return n and method(n - 1)", " return method"
    assert fingerprint(load("\n".join((*lines, "method = make()"))))


class Callable_:
    def __call__(self) -> None: ...


@pytest.mark.parametrize(
    "nothing",
    [
        len,
        [].append,
        None,
        3,
        int,
        Callable_(),
        functools.partial(fingerprint, len),
        property(fingerprint),
        torch.add,
    ],
    ids=lambda value: type(value).__name__,  # no address: xdist compares ids
)
def test_nothing_to_read(nothing: object) -> None:
    assert fingerprint(nothing) == ""


def test_source_that_is_gone(load: Load, tmp_path: Path) -> None:
    """A function without a file, and one in a wrapper around it that has one."""
    namespace: dict[str, Any] = {}
    exec("def method(self): return 1", namespace)
    assert fingerprint(namespace["method"]) == ""

    @functools.wraps(namespace["method"])
    def wrapper() -> None: ...

    assert fingerprint(wrapper) == ""


# --- DeepSpeed -----------------------------------------------------------------------------------


def stage3() -> Any:
    from deepspeed.runtime.zero import stage3 as module

    return module


def unknown(cls: Any = None) -> list[str]:
    """What of DeepSpeed's stage3 module z3ext does not know, in whichever release is closest."""
    release, names = closest(cls or stage3().DeepSpeedZeroOptimizer_Stage3)
    assert release is INSTALLED
    return names


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: str(release.name))
def test_the_tables_cover_what_is_replaced(release: Release) -> None:
    assert set(release.replaced) <= release.methods.keys()
    assert not set(release.replaced) & set(support._BYPASSED)
    for hashes in (*release.methods.values(), *release.functions.values()):
        assert hashes
        assert all(len(digits) == 16 and int(digits, 16) >= 0 for digits in hashes)


def test_the_tables_cover_what_is_passed_by() -> None:
    assert set(support._BYPASSED) <= INSTALLED.methods.keys()
    assert set(support._SHORT_CUTS) <= {n for release in RELEASES for n in release.replaced}
    for name in INSTALLED.methods:
        assert hasattr(stage3().DeepSpeedZeroOptimizer_Stage3, name)


def test_releases_are_told_apart() -> None:
    """No source of one family passes for that of another."""
    names = [release.name for release in RELEASES]
    assert len(set(names)) == len(names)
    for one, other in itertools.combinations(RELEASES, 2):
        shared = one.methods.keys() & other.methods.keys()
        assert (
            one.methods.keys() != other.methods.keys()
            or any(not one.methods[name] & other.methods[name] for name in shared)
            or one.functions != other.functions
            or one.bucket_fields != other.bucket_fields
        )


def test_deepspeed_is_known() -> None:
    assert unknown() == []


@pytest.mark.parametrize("name", INSTALLED.functions)
def test_each_function_is_looked_at(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage3(), name, lambda *args: None)
    assert unknown() == [name]


@pytest.mark.parametrize("name", INSTALLED.methods)
def test_each_method_is_looked_at(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(stage3().DeepSpeedZeroOptimizer_Stage3, name, lambda self, *args: None)
        assert unknown() == [name]


def test_the_bucket_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    for bucket in (None, int, dataclasses.make_dataclass("Bucket", ["buffer", "params"])):
        monkeypatch.setattr(stage3(), "IPGBucketZ3", bucket)
        assert unknown() == ["IPGBucketZ3"]
    fields = INSTALLED.bucket_fields
    assert fields is not None
    monkeypatch.setattr(stage3(), "IPGBucketZ3", dataclasses.make_dataclass("Bucket", fields))
    assert unknown() == []


def test_nothing_is_there() -> None:
    class DeepSpeedZeroOptimizer_Stage3:
        pass

    release, names = closest(DeepSpeedZeroOptimizer_Stage3)
    assert len(names) == len(release.methods) + len(release.functions) + (
        release.bucket_fields is not None
    )


# --- in words ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["gone"], "no gone"),
        (["gone", "IPGBucketX"], "no gone, IPGBucketX"),
        (["step"], "a source of step that z3ext does not know"),
        (["IPGBucketZ3"], "a source of IPGBucketZ3 that z3ext does not know"),
        (
            [f"{PRIVATE}__avg_scatter_grads"],
            "a source of __avg_scatter_grads that z3ext does not know",
        ),
        (["step", "gone"], "no gone and a source of step that z3ext does not know"),
        (["a", "b", "c"], "no a, b, c"),
        (["a", "b", "c", "d", "e"], "no a, b, c and 2 more"),
    ],
)
def test_described(names: list[str], expected: str) -> None:
    assert describe(stage3().DeepSpeedZeroOptimizer_Stage3, names) == expected
