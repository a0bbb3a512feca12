"""Finds the family of releases whose sources are those at hand."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator

from z3ext.deepspeed.fingerprint import fingerprint, resolve
from z3ext.deepspeed.names import PRIVATE
from z3ext.deepspeed.releases import RELEASES
from z3ext.deepspeed.releases.release import Release

_BUCKET = "IPGBucketZ3"


def closest(cls: type) -> tuple[Release, list[str]]:
    """The family that most of the sources at hand belong to, and those that don't.

    Args:
        cls: ``DeepSpeedZeroOptimizer_Stage3``.
    """
    hash_of = functools.cache(lambda name: fingerprint(resolve(cls, name)))
    found = [(release, list(_unknown(release, cls, hash_of))) for release in RELEASES]
    return min(reversed(found), key=lambda pair: len(pair[1]))


def unknown_functions(release: Release, cls: type) -> Iterator[str]:
    """What of the release's functions another function stands for, by name."""
    module = vars(sys.modules[cls.__module__])
    for name, hashes in release.functions.items():
        if fingerprint(module.get(name)) not in hashes:
            yield name


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


def _unknown(release: Release, cls: type, hash_of: Callable[[str], str]) -> Iterator[str]:
    for name, hashes in release.methods.items():
        if hash_of(name) not in hashes:
            yield name
    yield from unknown_functions(release, cls)
    bucket = vars(sys.modules[cls.__module__]).get(_BUCKET)
    fields = None
    if dataclasses.is_dataclass(bucket):
        fields = tuple(field.name for field in dataclasses.fields(bucket))
    if fields != release.bucket_fields:
        yield _BUCKET
