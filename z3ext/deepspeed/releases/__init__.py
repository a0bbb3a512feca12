"""The releases of DeepSpeed that z3ext serves: one ``Release`` for each family of equal behaviour.

``v0_16.py`` to ``v0_19.py`` have everything that concerns those releases; ``release.py`` says what
a ``Release`` is, ``buckets.py`` and ``policies.py`` have the ways of which each chooses one.
"""

from __future__ import annotations

from z3ext.deepspeed.releases import v0_16, v0_17, v0_18, v0_19
from z3ext.deepspeed.releases.release import Release

#: Oldest first.
RELEASES: tuple[Release, ...] = (
    *v0_16.RELEASES,
    *v0_17.RELEASES,
    *v0_18.RELEASES,
    *v0_19.RELEASES,
)
