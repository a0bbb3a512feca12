"""The library with CUDA compiles, loads and holds what it should. No GPU is needed.

The tests need a torch built with CUDA and its nvcc; without them they are skipped, or fail if
Z3EXT_REQUIRE_CUDA_BUILD=1.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fatbin import Code, fat_binaries

ROOT = Path(__file__).resolve().parents[2]
CUDA_SOURCES = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
ARCHITECTURES = (80, 90, 100)
#: Of no device: c10d chooses the backend, or no element is looked at.
EVERY_DEVICE = {"all_reduce_", "reduce_scatter_", "first_node_hook"}
BUILD_LIMIT_S = 1800

# The first test also pays for the build.
pytestmark = pytest.mark.timeout(BUILD_LIMIT_S)

_LIST_KERNELS = """
import json, sys
import torch
torch.ops.load_library(sys.argv[1])
has = torch._C._dispatch_has_kernel_for_dispatch_key
names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("z3ext::")]
keys = ("CPU", "CUDA", "CompositeExplicitAutograd")
print(json.dumps({n.partition("::")[2]: [k for k in keys if has(n, k)] for n in names}))
"""

_USE_CPU_OPS = """
import json, sys
import torch
torch.ops.load_library(sys.argv[1])
found = []
for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
    for bad in (0.0, torch.inf, -torch.inf, torch.nan):
        buf = torch.ones(1000, dtype=dtype)
        buf[999] = bad
        found.append(torch.ops.z3ext.flat_overflow(buf).item())
bucket, flag = torch.zeros(6), torch.zeros((), dtype=torch.bool)
grads = [torch.tensor([1.0, 3.0], dtype=torch.float16), torch.tensor([5.0])]
torch.ops.z3ext.pack_(grads, [1, 4], bucket, flag, [2.0])
print(json.dumps([found, bucket.tolist(), flag.item()]))
"""


def missing() -> str | None:
    """What this machine lacks for a CUDA build, or None."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if nvcc() is None:
        return "no nvcc in CUDA_HOME/bin and none on PATH"
    return None


def nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")


@pytest.fixture(scope="module", autouse=True)
def cuda_build() -> None:
    reason = missing()
    if reason is not None:
        if os.environ.get("Z3EXT_REQUIRE_CUDA_BUILD") == "1":
            pytest.fail(f"Z3EXT_REQUIRE_CUDA_BUILD=1 but {reason}")
        pytest.skip(f"{reason}; Z3EXT_REQUIRE_CUDA_BUILD=1 makes this a failure")


def run_python(code: str, *arguments: str, limit_s: int = 300, **environment: str) -> str:
    """The standard output of a fresh interpreter, which finds z3ext in this checkout."""
    finished = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library as the package builds it, in a cache of its own; the log lies beside it.

    Every warning of nvcc is an error, and ptxas tells the log what each kernel takes.
    """
    output = run_python(
        "from z3ext import _build; print(_build.library_path())",
        limit_s=BUILD_LIMIT_S,
        Z3EXT_CACHE_DIR=str(tmp_path_factory.mktemp("cache")),
        TORCH_CUDA_ARCH_LIST=";".join(f"{a // 10}.{a % 10}" for a in ARCHITECTURES),
        NVCC_APPEND_FLAGS="-Werror all-warnings -Xptxas -v",
    )
    path = Path(output.strip().splitlines()[-1])
    assert path.is_file()
    return path


def test_every_op_has_its_kernels(library: Path) -> None:
    kernels = json.loads(run_python(_LIST_KERNELS, str(library)))
    defined = set(re.findall(r'm\.def\(\s*"(\w+)\(', (ROOT / "csrc" / "ops.cpp").read_text()))
    assert set(kernels) == defined
    assert len(defined) == 10
    for op, keys in kernels.items():
        expected = ["CompositeExplicitAutograd"] if op in EVERY_DEVICE else ["CPU", "CUDA"]
        assert keys == expected, op


def test_code_for_every_architecture(library: Path) -> None:
    binaries = fat_binaries(library)
    assert len(binaries) == len(CUDA_SOURCES)
    for entries in binaries:
        for architecture in ARCHITECTURES:
            assert Code("elf", architecture) in entries


def test_cpu_ops_of_a_cuda_library(library: Path) -> None:
    found, bucket, flag = json.loads(run_python(_USE_CPU_OPS, str(library)))
    assert found == [False, True, True, True] * 4
    assert bucket == [0.0, 0.5, 1.5, 0.0, 2.5, 0.0]
    assert flag is False


@pytest.mark.parametrize("source", CUDA_SOURCES, ids=lambda source: source.stem)
def test_no_warning_and_no_spill(library: Path, source: Path) -> None:
    """No kernel keeps registers in device memory."""
    [log] = library.parent.glob("*.log")
    # Each step of the log begins with its number; this is the one that compiled the source.
    steps = re.split(r"^\[\d+/\d+\] ", log.read_text(), flags=re.MULTILINE)
    [report] = [step for step in steps if step.startswith(f"nvcc cuda-{source.name}.o\n")]
    assert "warning" not in report.lower()
    kernels = re.findall(r"Compiling entry function '\w+' for 'sm_(\d+)'", report)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert set(kernels) == {str(architecture) for architecture in ARCHITECTURES}
    assert len(spills) == len(kernels)
    assert set(spills) == {("0", "0")}, report
