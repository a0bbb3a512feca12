"""Finds the family of releases whose sources are those at hand."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator

from z3ext.deepspeed.fingerprint import fingerprint, resolve
from z3ext.deepspeed.names import PRIVATE
from z3ext.deepspeed.releases import RELEASES
from z3ext.deepspeed.releases.release import Hashes, Release

_BUCKET = "IPGBucketZ3"


def closest(cls: type) -> tuple[Release, list[str]]:
    """The family that most of the sources at hand belong to, and those that don't.

    Args:
        cls: ``DeepSpeedZeroOptimizer_Stage3``.
    """
    method = functools.cache(lambda name: fingerprint(resolve(cls, name)))
    function = functools.cache(lambda name: _function_hash(cls, name))
    found = [(release, list(_unknown(release, cls, method, function))) for release in RELEASES]
    return min(reversed(found), key=lambda pair: len(pair[1]))


def unknown_functions(release: Release, cls: type) -> Iterator[str]:
    """What of the release's functions another function stands for, by name."""
    return _unlike(release.functions, lambda name: _function_hash(cls, name))


def describe(cls: type, names: list[str]) -> str:
    """What is missing or other than known, in words; the first few names."""
    module = vars(sys.modules[cls.__module__])
    absent = [n for n in names if resolve(cls, n) is None and n not in module]
    other = [n for n in names if n not in absent]
    parts = [f"no {_listed(absent)}"] * bool(absent)
    parts += [f"a source of {_listed(other)} that z3ext does not know"] * bool(other)
    return " and ".join(parts)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(name.removeprefix(PRIVATE) for name in names[:3]) + more


def _function_hash(cls: type, name: str) -> str:
    return fingerprint(vars(sys.modules[cls.__module__]).get(name))


def _unlike(known: Hashes, hash_of: Callable[[str], str]) -> Iterator[str]:
    return (name for name, hashes in known.items() if hash_of(name) not in hashes)


def _unknown(
    release: Release, cls: type, method: Callable[[str], str], function: Callable[[str], str]
) -> Iterator[str]:
    yield from _unlike(release.methods, method)
    yield from _unlike(release.functions, function)
    bucket = vars(sys.modules[cls.__module__]).get(_BUCKET)
    fields = None
    if dataclasses.is_dataclass(bucket):
        fields = tuple(field.name for field in dataclasses.fields(bucket))
    if fields != release.bucket_fields:
        yield _BUCKET
