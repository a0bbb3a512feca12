"""The demo's text and batches."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch

from z3ext.demo import corpus as demo_corpus
from z3ext.demo.corpus import MASK_ID, VOCABULARY, Corpus, load_corpus, masked_batch


def test_files_are_the_standard_library_in_a_fixed_order() -> None:
    files = demo_corpus.standard_library_files()
    names = [path.name for path in files]
    assert {"abc.py", "argparse.py", "typing.py"} <= set(names)
    assert files == demo_corpus.standard_library_files()
    assert not any("site-packages" in path.parts for path in files)


def test_ranks_read_different_files() -> None:
    whole = demo_corpus.standard_library_files()
    first, second = (load_corpus(rank, 2, limit=1 << 18) for rank in (0, 1))
    assert bytes(first.text[:64].tolist()) == whole[0].read_bytes()[:64]
    assert bytes(second.text[:20].tolist()) == whole[1].read_bytes()[:20]
    assert first.text.numel() == second.text.numel() == 1 << 18


def test_a_python_without_sources_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(RuntimeError, match=r"only 0 bytes of Python sources.*ships its sources"):
        load_corpus(0, 1)


def test_batches_repeat_and_mask_what_they_say(generator: torch.Generator) -> None:
    text = torch.randint(256, (100_000,), generator=generator, dtype=torch.uint8)
    corpus = Corpus(text, files=1)
    inputs, labels = masked_batch(corpus, 64, 128, torch.Generator().manual_seed(5))
    again, labels_again = masked_batch(corpus, 64, 128, torch.Generator().manual_seed(5))
    assert torch.equal(inputs, again) and torch.equal(labels, labels_again)

    chosen = labels >= 0
    assert bool(chosen[:, 0].all())
    assert 0.12 < chosen.float().mean().item() < 0.18
    assert bool((inputs[~chosen] < 256).all()) and int(inputs.max()) < VOCABULARY
    assert 0.72 < (inputs[chosen] == MASK_ID).float().mean().item() < 0.88
    # Every row, unmasked, is a piece of the text.
    original = torch.where(chosen, labels, inputs)
    windows = text.long().unfold(0, 128, 1)
    for row in original[:4]:
        assert bool((windows == row).all(1).any())
