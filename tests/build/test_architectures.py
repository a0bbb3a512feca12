"""Which GPU codes are compiled, and which GPUs a library serves."""

from __future__ import annotations

import pytest

from z3ext import _architectures
from z3ext._toolchain import BuildError

NVCC_13 = ("75", "80", "86", "87", "88", "89", "90", "100", "110", "103", "120", "121")
NVCC_12 = ("70", "75", "80", "86", "90", "100", "120")


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)


@pytest.mark.parametrize(
    ("gpus", "nvcc", "codes"),
    [
        ([], NVCC_13, "sm_80 sm_90 sm_100 compute_100"),
        ([], ("80", "86", "90"), "sm_80 sm_90 compute_90"),
        ([(9, 0)], NVCC_13, "sm_90"),
        ([(8, 0), (9, 0)], NVCC_13, "sm_80 sm_90"),
        ([(10, 3)], NVCC_12, "sm_100 compute_100"),
        ([(12, 1)], ("80", "90"), "sm_90 compute_90"),
    ],
)
def test_without_a_list(gpus: list[tuple[int, int]], nvcc: tuple[str, ...], codes: str) -> None:
    assert _architectures.compiled_codes(gpus, nvcc) == codes
    assert _architectures.serves(codes, gpus)


@pytest.mark.parametrize(
    ("asked", "codes"),
    [
        ("8.0", "sm_80"),
        ("9.0;8.0", "sm_80 sm_90"),
        ("8.0 9.0+PTX", "sm_80 sm_90 compute_90"),
        (" 8.0, 9.0a ", "sm_80 sm_90a"),
        ("10.0f", "sm_100f"),
    ],
)
def test_with_a_list(asked: str, codes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", asked)
    assert _architectures.compiled_codes([(8, 6)], NVCC_13) == codes


def test_one_spelling_of_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    spellings = set()
    for asked in ("8.0;9.0", "9.0 8.0", " 8.0,  9.0 "):
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", asked)
        spellings.add(_architectures.wanted([]).strip())
    assert spellings == {"8.0 9.0"}


@pytest.mark.parametrize("asked", ["Hopper", "7.0", "sm_90", "9.0+ptx", "90"])
def test_a_list_that_nvcc_does_not_know(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", asked)
    with pytest.raises(BuildError) as error:
        _architectures.compiled_codes([], NVCC_13)
    assert f"TORCH_CUDA_ARCH_LIST asks for {asked!r}" in str(error.value)
    assert "7.5, 8.0, 8.6" in str(error.value)
    assert "Z3EXT_REFERENCE=1" in str(error.value)


def test_a_gpu_that_is_too_old() -> None:
    with pytest.raises(BuildError, match=r"compute capability 6\.1 is older than .*7\.5"):
        _architectures.compiled_codes([(6, 1)], NVCC_13)


@pytest.mark.parametrize(
    ("codes", "gpus", "expected"),
    [
        ("", [], True),
        ("", [(8, 0)], False),
        ("sm_80", [], True),
        ("sm_80", [(8, 0)], True),
        ("sm_80", [(8, 6)], True),
        ("sm_86", [(8, 0)], False),
        ("sm_80", [(9, 0)], False),
        ("sm_80 compute_80", [(9, 0)], True),
        ("sm_90 compute_90", [(8, 0)], False),
        ("sm_90a", [(9, 0)], True),
        ("sm_100a", [(10, 3)], False),
        ("sm_80 sm_90", [(8, 0), (9, 0)], True),
        ("sm_80", [(8, 0), (9, 0)], False),
        ("sm_100 compute_100", [(12, 1)], True),
    ],
)
def test_serves(codes: str, gpus: list[tuple[int, int]], expected: bool) -> None:
    assert _architectures.serves(codes, gpus) is expected
