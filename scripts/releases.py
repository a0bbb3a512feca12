"""Trains the matrix of tests/training with other releases of DeepSpeed.

releases.py [V ...]     writes docs/releases.md: a row per release, torch and Python
releases.py --short     one release per family and a few cases; writes nothing; for CI
releases.py --new V     what changed in V against the nearest family, with hashes to paste

A release is installed into CACHE/V once and stands before the environment's own DeepSpeed. Results
are kept in CACHE/results, so that an interrupted run goes on where it was, and so that the runs of
several environments (--python) fill one table; --again forgets those of the releases given.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import difflib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from z3ext.deepspeed.releases import RELEASES

ROOT = Path(__file__).resolve().parent.parent

#: Every release of a minor version up to this one, and 0.15.4, whose sources are those of 0.16.0.
LATEST = {"0.16": 9, "0.17": 6, "0.18": 9, "0.19": 8}
SERVED = ("0.15.4", *(f"{m}.{p}" for m, last in LATEST.items() for p in range(last + 1)))
#: Older than what is promised, and a copy of the newest release with one other source.
OLD = ("0.14.0", "0.15.0")
FUTURE = "a-future-one"
#: The newest of each family.
FAMILIES = tuple(release.name.split()[-1] for release in RELEASES)
#: An overflow; accumulation and clipping; more than a bucket, all-reduce; reduce-scatter.
SHORT = (
    "fp16_inf_first_step",
    "bf16_accumulate_fp32_gas3",
    "bucket_16_params_4_40_4_4",
    "bf16_gas3__reduce_scatter",
)
#: For a release of a family whose newest one trains the whole matrix: their sources behave alike.
WIDE = (
    *SHORT,
    "fp32",
    "fp16",
    "bf16_gas3",
    "bf16_accumulate_and_comm_fp32_gas3",
    "sub_groups",
    "predivide_2",
    "persistent_small",
    "frozen_layers",
    "fp16_last_micro_of_three",
    "fp16_overflow_by_sum",
    "bf16_nan_last_rank",
    "fp16__reduce_scatter",
    "bf16_gas3__not_contiguous",
    "offload_bf16_gas2",
    "offload_fp16_scale_grows",
    "offload_first_micro_only",
)
ANY = "served_or_declined"


class NotInstalled(Exception):
    """pip failed; the text says why."""


@dataclass(frozen=True)
class Outcome:
    """Of one case: what differs, or why it was skipped."""

    problems: list[str]
    skipped: str


@dataclass(frozen=True)
class Site:
    """A release of DeepSpeed, installed for one Python with its torch."""

    version: str
    cache: Path
    python: str

    @property
    def folder(self) -> Path:
        return self.cache / self.version

    def install(self) -> None:
        if (self.folder / "deepspeed").is_dir():
            return
        if self.version == FUTURE:
            _make_future(Site(SERVED[-1], self.cache, self.python), self.folder)
            return
        # Moved when complete: a folder that is there is a whole one.
        part = Path(tempfile.mkdtemp(prefix=f"{self.version}-", dir=self.cache))
        options = ["--no-deps", "--no-build-isolation", "--no-compile", "--target", str(part)]
        pip = [self.python, "-m", "pip", "--disable-pip-version-check", "install", "-q", *options]
        env = {**os.environ, "DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
        command = [*pip, f"deepspeed=={self.version}"]
        done = subprocess.run(command, env=env, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            shutil.rmtree(part)
            errors = re.findall(r"^ *\w*Error: (.*)", done.stderr, re.MULTILINE)
            raise NotInstalled(errors[-1] if errors else done.stderr[-300:])
        part.rename(self.folder)

    def run(self, *command: str) -> Any:
        """Runs a program of the tests or scripts with this release; returns the JSON it prints."""
        # The own Python finds z3ext where this process does, another one where it is installed.
        own = sys.path[1:] if self.python == sys.executable else []
        first = [str(path) for path in (self.folder, ROOT / "scripts", ROOT / "tests")]
        env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        env["PYTHONPATH"] = os.pathsep.join([*first, *own])
        # How many CPUs count as devices: DeepSpeed 0.15 needs numactl to know, later ones take 1.
        env.setdefault("LOCAL_SIZE", "1")
        env["TORCH_EXTENSIONS_DIR"] = str(self.cache / "extensions" / self.version)
        with tempfile.TemporaryDirectory(prefix="z3ext-releases-") as folder:
            program = [self.python, "-m", *command]
            # DeepSpeed says much while it is imported: the JSON is the last line.
            done = subprocess.run(
                program, cwd=folder, env=env, stdout=subprocess.PIPE, text=True, check=True
            )
        return json.loads(done.stdout.splitlines()[-1])

    def probe(self, *arguments: str) -> dict[str, Any]:
        """What scripts/release_probe.py finds."""
        return dict(self.run("release_probe", *arguments))

    def train(self, world: int, seed: int, *cases: str) -> dict[str, Outcome]:
        """Trains cases, or those that `make test` has, in so many ranks."""
        found = self.run("training.matrix", str(world), str(seed), *cases)
        if not Path(found["deepspeed"]).is_relative_to(self.folder):
            raise RuntimeError(f"{found['deepspeed']} was imported, expected {self.folder}")
        return {name: Outcome(**fields) for name, fields in found["cases"].items()}


def _make_future(newest: Site, folder: Path) -> None:
    newest.install()
    shutil.copytree(newest.folder, folder)
    stage3 = folder / "deepspeed/runtime/zero/stage3.py"
    line = r"(    def has_overflow\(self.*:\n)"
    text, count = re.subn(line, r"\1        unknown = True\n", stage3.read_text())
    if count != 1:
        raise ValueError(f"{stage3}: has_overflow was expected once, found {count} times")
    stage3.write_text(text)


def _versions(python: str) -> dict[str, str]:
    program = "import platform, torch; print(torch.__version__, platform.python_version())"
    run = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    return dict(zip(("torch", "python"), run.stdout.split(), strict=True))


def short(sites: list[Site], seed: int) -> bool:
    """Trains the short list with each release, two releases at a time; True when all are equal."""

    def one(site: Site) -> bool:
        site.install()
        results = site.train(2, seed, *SHORT)
        lines = [f"  {name}: {line}" for name in SHORT for line in results[name].problems]
        lines += [f"  skipped {name}: {r.skipped}" for name, r in results.items() if r.skipped]
        equal = sum(not r.problems and not r.skipped for r in results.values())
        head = f"DeepSpeed {site.version}: {equal} of {len(SHORT)} cases equal"
        print("\n".join([head, *lines]), flush=True)
        return not any(r.problems for r in results.values())

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return all(list(pool.map(one, sites)))


def full(site: Site, versions: dict[str, str], worlds: list[int], seed: int, kept: Path) -> bool:
    """Trains the matrix with one release and keeps what came out; True when all are equal.

    Where there is one world size alone, the wide list.
    """
    try:
        site.install()
        found = site.probe()
    except NotInstalled as error:
        found = {"importable": False, "reason": str(error)}
    row = {
        **versions,
        **found,
        "release": site.version,
        "worlds": [],
        "equal": 0,
        "run": 0,
        "skipped": {},
    }
    problems: dict[str, list[str]] = {}
    if found["importable"]:
        cases = [ANY] if found["reason"] else [] if len(worlds) > 1 else WIDE
        for world in [2] if cases else worlds:
            outcome = site.train(world, seed, *cases)
            ran = {case: result for case, result in outcome.items() if not result.skipped}
            bad = {f"{c}-world{world}": r.problems for c, r in ran.items() if r.problems}
            row["worlds"].append(world)
            row["run"] += len(ran)
            row["equal"] += len(ran) - len(bad)
            row["skipped"] |= {c: r.skipped for c, r in outcome.items() if r.skipped}
            problems |= bad
    row["problems"] = problems
    kept.write_text(json.dumps(row, indent=1))
    says = found["reason"] or f"served as {found['family']}"
    print(f"DeepSpeed {site.version}: {says}; {row['equal']} of {row['run']} equal", flush=True)
    for case, lines in problems.items():
        print("\n".join([f"  {case}", *(f"    {line}" for line in lines)]), flush=True)
    return not problems


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    numbers = [int(part) if part.isdigit() else 1 << 20 for part in row["release"].split(".")]
    return (numbers, row["torch"], row["python"])


def _row(row: dict[str, Any]) -> str:
    reason = row["reason"].split(", so its own methods")[0].split("; its own methods")[0]
    if not row["importable"]:
        served = f"cannot be used here: {' '.join(reason.split())[:90]}"
    else:
        served = f"declined: {reason}" if reason else f"{row['family']}"
    names = [row["release"].replace("-", " "), row["torch"], row["python"], served]
    counts = [row["equal"], row["run"], len(row["skipped"])]
    cells = [*names, ", ".join(map(str, row["worlds"])) or "-", *counts]
    return f"| {' | '.join(map(str, cells))} |"


def table(results: Path) -> str:
    """docs/releases.md, out of all results that are kept."""
    rows = sorted((json.loads(p.read_text()) for p in results.glob("*.json")), key=_key)
    columns = [
        "DeepSpeed",
        "torch",
        "Python",
        "served as",
        "ranks",
        "cases equal",
        "run",
        "skipped",
    ]
    lines = [
        "# What was run with each release of DeepSpeed",
        "",
        "Written by `make releases`. Each case trains twice, stock and with z3ext, and every bit",
        "of losses, norms, gradients, weights and optimizer states is compared. A case is skipped",
        "where that DeepSpeed lacks what it is about. A declined DeepSpeed is left alone,",
        "and one training shows that the script goes on. `a future one` is a copy of the newest",
        "release in which one method differs.",
        "",
        "| " + " | ".join(columns) + " |",
        "|" + "---|" * len(columns),
        *map(_row, rows),
    ]
    return "\n".join([*lines, ""])


def new(site: Site) -> None:
    """Prints what differs from the nearest family, and hashes to paste."""
    site.install()
    found = site.probe()
    if not found["importable"]:
        sys.exit(f"DeepSpeed {site.version} cannot be imported: {found['reason']}")
    family = found["family"]
    known = Site(family.split()[-1], site.cache, site.python)
    known.install()
    before, after = known.probe(family)["sources"], site.probe(family)["sources"]
    changed = found["unknown"]
    print(f"DeepSpeed {site.version}: nearest is {family!r}; {len(changed)} sources are not known")
    for name in changed:
        old, text = (table.get(name, ["", ""])[1].splitlines() for table in (before, after))
        print(f"\n### {name}{'' if text else ' is gone'}")
        print(
            "\n".join(difflib.unified_diff(old, text, known.version, site.version, "", "", 5, ""))
        )
    print(f"\n# Hashes of DeepSpeed {site.version}")
    for name in changed:
        print(f'    "{name}": "{after.get(name, [""])[0]}",')


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("releases", nargs="*", metavar="V", help="releases; default: all")
    parser.add_argument("--short", action="store_true", help="one release per family, a few cases")
    parser.add_argument("--new", metavar="V", help="compare release V with the nearest family")
    parser.add_argument("--cache", type=Path, default=ROOT / "build/releases")
    parser.add_argument("--python", default=sys.executable, help="runs the ranks, with its torch")
    parser.add_argument("--wide", action="store_true", help="the wide list for each family too")
    parser.add_argument("--again", action="store_true", help="run what was run before, too")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    options = parser.parse_args()
    cache, seed = options.cache.resolve(), options.seed
    results = cache / "results"
    results.mkdir(parents=True, exist_ok=True)
    if options.new:
        new(Site(options.new, cache, options.python))
        return 0
    print(f"seed {seed}", flush=True)
    if options.short:
        wanted = options.releases or FAMILIES
        return 0 if short([Site(v, cache, options.python) for v in wanted], seed) else 1
    versions = _versions(options.python)
    equal = True
    for version in options.releases or (*FAMILIES, *OLD, FUTURE, *SERVED):
        kept = results / "{}-torch{torch}-python{python}.json".format(version, **versions)
        if kept.exists() and not options.again:
            continue
        worlds = [2, 3] if version in FAMILIES and not options.wide else [2]
        equal &= full(Site(version, cache, options.python), versions, worlds, seed, kept)
        (ROOT / "docs/releases.md").write_text(table(results))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
