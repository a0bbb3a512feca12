"""The library that was compiled at install, and when it is not taken."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from build_support import (
    Bench,
    answer_of,
    make_bench,
)

from z3ext import _build


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return make_bench(tmp_path, monkeypatch)


@pytest.fixture
def prebuilt(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "_prebuilt"
    monkeypatch.setattr("z3ext._architectures.gpu_capabilities", list)
    _build.prebuild(folder)
    monkeypatch.setattr(_build, "_PREBUILT", folder)
    return folder


def test_the_library_compiled_at_install_is_taken(bench: Bench, prebuilt: Path) -> None:
    assert sorted(path.suffix for path in prebuilt.iterdir()) == [".json", ".so"]
    library = _build.library_path()
    assert library.parent == prebuilt
    assert answer_of(library) == 7
    assert not bench.cache.exists()


def test_it_needs_neither_compiler_nor_cache(
    prebuilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.setenv("Z3EXT_CACHE_DIR", os.devnull)
    monkeypatch.delenv("CXX")
    assert _build.library_path().parent == prebuilt


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("torch", "compiled for torch 2.* but here is 2.99.0"),
        ("sources", "compiled for sources .* but here is "),
        ("damage", "it is damaged"),
    ],
)
def test_it_is_not_taken(
    bench: Bench,
    change: str,
    reason: str,
    prebuilt: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if change == "torch":
        monkeypatch.setattr("torch.__version__", "2.99.0")
    elif change == "sources":
        (bench.sources / "answer.h").write_text("constexpr int kHalf = 20;\nint half();\n")
    else:
        next(prebuilt.glob("*.so")).write_bytes(b"")
    caplog.set_level("INFO", "z3ext")
    library = _build.library_path()
    assert library.is_relative_to(bench.cache)
    assert answer_of(library) == (23 if change == "sources" else 7)
    lines = [text for text in caplog.messages if "compiled at install is not used" in text]
    assert len(lines) == 1
    assert re.search(reason, lines[0])


def test_without_cuda_kernels_it_does_not_serve_a_gpu(
    bench: Bench, prebuilt: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("z3ext._architectures.gpu_capabilities", lambda: [(9, 0)])
    caplog.set_level("INFO", "z3ext")
    assert _build.library_path().is_relative_to(bench.cache)
    assert "it has kernels for no GPU, here are [(9, 0)]" in caplog.text
