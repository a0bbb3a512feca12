"""Puts a package of this environment, with all that it requires, into another one, by hard links.

link_package.py NAME SITE_PACKAGES    the other environment's folder, on the same file system
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement


def closure(name: str) -> dict[str, Distribution]:
    """A distribution and what it requires here, at any depth, by name."""
    found: dict[str, Distribution] = {}
    waiting = [name]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found[name] = distribution(name)
        for text in found[name].requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


def main(name: str, folder: str) -> None:
    """Links every file that lies in site-packages; what lies beside it are commands."""
    for package in closure(name).values():
        for file in package.files or ():
            source, target = Path(str(package.locate_file(file))), Path(folder) / file
            if ".." in file.parts or not source.exists():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                os.link(source, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
