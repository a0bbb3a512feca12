"""What .ci/run checks about itself: skipped tests, the README's commands, the totals.

checks.py skips ABSENT RESULTS         every skip in RESULTS/*.xml is declared in ABSENT
checks.py files TESTS RESULTS          every TESTS/**/test_*.py has a test in RESULTS/*.xml
checks.py readme README COMMANDS       every command of README is a line of COMMANDS
checks.py readme-command README START  the README's command that starts with START
checks.py total RESULTS                how many tests passed, failed and were skipped
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

# What has to be in each file of results: CMake leaves a tier out silently where its compiler is not
# there, so one test of it is named. "" stands for any test.
EXPECTED = {
    "ctest.xml": ("", "aarch64"),
    "cuda-build.xml": ("",),
    "pytest.xml": ("",),
    "pytest-alone.xml": ("",),
}

_CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class CheckFailure(Exception):
    """A check did not pass; the text says why."""


@dataclass(frozen=True)
class Outcome:
    """One test. ``outcome``: "passed", "failed" or "skipped"; ``reason``: of a skip."""

    name: str
    outcome: str
    reason: str


def outcomes(path: Path) -> list[Outcome]:
    """The tests in one JUnit file, as pytest and ctest write them."""
    found = []
    for case in ElementTree.parse(path).iter("testcase"):
        name = "::".join(part for part in (case.get("classname"), case.get("name")) if part)
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            found.append(Outcome(name, "failed", ""))
        elif skipped is not None:
            texts = (skipped.get("message"), skipped.text, case.findtext("system-out"))
            found.append(Outcome(name, "skipped", " ".join(filter(None, texts))))
        else:
            found.append(Outcome(name, "passed", ""))
    return found


def check_skips(absent: Path, results: Path) -> str:
    """Every test that nothing ran must belong to a tier that is declared absent."""
    problems = []
    everything: list[Outcome] = []
    for name, wanted in EXPECTED.items():
        path = results / name
        found = outcomes(path) if path.exists() else []
        passed_here = [test.name for test in found if test.outcome == "passed"]
        problems += [
            f"{name}: no test {part!r} passed, so this tier did not run"
            for part in wanted
            if not any(part in test for test in passed_here)
        ]
        everything += found
    declared = _declared(absent)
    # A test of one tier may be skipped where another tier runs it.
    passed = {test.name for test in everything if test.outcome == "passed"}
    skipped = [t for t in everything if t.outcome == "skipped" and t.name not in passed]
    used: Counter[str] = Counter()
    for test in skipped:
        line = f"{test.name}: {test.reason}"
        pattern = next((p for p in declared if re.search(p, line)), None)
        if pattern is None:
            problems.append(f"skipped, and not declared in {absent}: {line.strip()}")
        else:
            used[pattern] += 1
    if problems:
        raise CheckFailure("\n".join(problems))
    lines = [f"{count} skipped: {declared[pattern]}" for pattern, count in used.items()]
    return "\n".join(["every skipped test is of a tier that is declared absent", *lines])


def _declared(absent: Path) -> dict[str, str]:
    lines = (line.strip() for line in absent.read_text(encoding="utf-8").splitlines())
    pairs = (line.partition(" :: ") for line in lines if line and not line.startswith("#"))
    return {pattern.strip(): reason.strip() for pattern, _, reason in pairs}


def check_files(tests: Path, results: Path) -> str:
    """Every file of Python tests was collected: pytest passes folders by in silence."""
    names = [test.name for path in results.glob("*.xml") for test in outcomes(path)]
    files = sorted(tests.rglob("test_*.py"))
    modules = {
        file: ".".join(file.relative_to(tests.parent).with_suffix("").parts) for file in files
    }
    missing = [
        str(file)
        for file, module in modules.items()
        if not any(name.startswith((f"{module}::", f"{module}.")) for name in names)
    ]
    if missing or not files:
        raise CheckFailure(f"no test of these files ran: {missing}" if files else f"{tests}: empty")
    return f"a test of each of the {len(files)} files in {tests} ran"


def readme_commands(readme: Path) -> list[str]:
    """The lines after ``$`` in the console blocks."""
    blocks: list[str] = _CONSOLE.findall(readme.read_text(encoding="utf-8"))
    lines = [line for block in blocks for line in block.splitlines()]
    return [line.removeprefix("$ ").strip() for line in lines if line.startswith("$ ")]


def check_readme(readme: Path, commands: Path) -> str:
    """Every command of the README ran."""
    ran = set(commands.read_text(encoding="utf-8").splitlines())
    told = readme_commands(readme)
    missing = [command for command in told if command not in ran]
    if missing or not told:
        raise CheckFailure(f"{readme}: CI ran none of: {missing}" if told else f"{readme}: empty")
    return f"CI ran every one of the {len(told)} commands of {readme}"


def find_command(readme: Path, start: Path) -> str:
    """The README's only command with that beginning."""
    found = [c for c in readme_commands(readme) if c.startswith(str(start))]
    if len(found) != 1:
        raise CheckFailure(f"{readme}: {len(found)} commands start with {start}, expected 1")
    return found[0]


def total(results: Path) -> str:
    """One line over every file of results."""
    counts = Counter(t.outcome for path in sorted(results.glob("*.xml")) for t in outcomes(path))
    return f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"


def main(arguments: list[str]) -> int:
    """Runs one check; 1 when it fails, 2 for an unknown one."""
    checks: dict[str, Callable[..., str]] = {
        "skips": check_skips,
        "files": check_files,
        "readme": check_readme,
        "readme-command": find_command,
        "total": total,
    }
    if not arguments or arguments[0] not in checks:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        print(checks[arguments[0]](*map(Path, arguments[1:])))
    except CheckFailure as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
