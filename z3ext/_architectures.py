"""Which GPUs the CUDA kernels are compiled for."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import torch

from z3ext._toolchain import build_error

_DEFAULT = ("8.0", "9.0", "10.0")  # where no GPU is visible and nothing is asked for


def gpu_capabilities() -> list[tuple[int, int]]:
    """The compute capabilities of the visible GPUs, without duplicates."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return []
    devices = range(torch.cuda.device_count())
    return sorted({torch.cuda.get_device_capability(device) for device in devices})


def wanted(gpus: Sequence[tuple[int, int]]) -> str:
    """TORCH_CUDA_ARCH_LIST in one spelling, else the GPUs' capabilities, else the default's name.

    Like "8.0 9.0+PTX".
    """
    asked = sorted(re.split(r"[\s;,]+", os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip()))
    if any(asked):
        return " ".join(asked)
    return " ".join(f"{major}.{minor}" for major, minor in gpus) or "default"


def compiled_codes(gpus: Sequence[tuple[int, int]], codes: Sequence[str]) -> str:
    """The machine codes (sm_...) and intermediate codes (compute_...) to compile, as one string.

    Args:
        gpus: the visible GPUs.
        codes: what nvcc compiles for, such as ("80", "90", "90a").

    Returns:
        Like "sm_80 sm_90 compute_90".

    Raises:
        BuildError: nvcc compiles for none of them, or TORCH_CUDA_ARCH_LIST is not understood.
    """
    if os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip():
        return _asked_codes(wanted(gpus), codes)
    if gpus:
        return _gpu_codes(gpus, codes)
    chosen = [c for c in (name.replace(".", "") for name in _DEFAULT) if c in codes]
    if not chosen:
        raise build_error(
            f"nvcc compiles for none of {', '.join(_DEFAULT)}",
            "name one of its architectures in TORCH_CUDA_ARCH_LIST",
        )
    return " ".join([*(f"sm_{code}" for code in chosen), f"compute_{chosen[-1]}"])


def _asked_codes(asked: str, codes: Sequence[str]) -> str:
    chosen: list[str] = []
    for name in asked.split():
        match = re.fullmatch(r"(\d+)\.(\d+[af]?)(\+PTX)?", name)
        code = match[1] + match[2] if match else ""
        if match is None or code not in _with_variants(codes):
            raise build_error(
                f"TORCH_CUDA_ARCH_LIST asks for {name!r}, which nvcc does not compile for; "
                f"it knows {', '.join(_dotted(c) for c in codes)}",
                "change TORCH_CUDA_ARCH_LIST",
            )
        chosen.append(f"sm_{code}")
        if match[3]:
            chosen.append(f"compute_{code}")
    return " ".join(dict.fromkeys(chosen))


def _gpu_codes(gpus: Sequence[tuple[int, int]], codes: Sequence[str]) -> str:
    chosen: list[str] = []
    plain = sorted(int(code) for code in codes if code.isdecimal())
    for major, minor in gpus:
        exact = 10 * major + minor
        below = [code for code in plain if code <= exact]
        if not below:
            raise build_error(
                f"a GPU of compute capability {major}.{minor} is older than what nvcc compiles "
                f"for ({', '.join(_dotted(str(c)) for c in plain)})",
                "hide it with CUDA_VISIBLE_DEVICES, install an older CUDA toolkit and torch",
            )
        chosen.append(f"sm_{below[-1]}")
        if below[-1] != exact:
            chosen.append(f"compute_{below[-1]}")  # the driver compiles the rest
    return " ".join(dict.fromkeys(chosen))


def serves(codes: str, gpus: Sequence[tuple[int, int]]) -> bool:
    """Whether code that was compiled for ``codes`` runs on all of these GPUs."""
    return all(any(_runs(code, gpu) for code in codes.split()) for gpu in gpus)


def _runs(code: str, gpu: tuple[int, int]) -> bool:
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", code)
    if match is None:
        return False
    major, minor = int(match[2]), int(match[3])
    if match[4]:
        return (major, minor) == gpu
    return (major, minor) <= gpu and (match[1] == "compute" or major == gpu[0])


def _with_variants(codes: Sequence[str]) -> set[str]:
    """nvcc does not list the codes for one architecture or family alone: 90a, 100f."""
    return {code + suffix for code in codes for suffix in ("", "a", "f")}


def _dotted(code: str) -> str:
    match = re.fullmatch(r"(\d+)(\d\w?)", code)
    return f"{match[1]}.{match[2]}" if match else code
