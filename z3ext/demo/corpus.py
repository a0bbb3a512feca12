"""The text of the demo: the sources of Python's own standard library, read as bytes."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

MASK_ID = 256
PAD_ID = 257
VOCABULARY = 258

_SKIPPED_FOLDERS = frozenset({"test", "tests", "idlelib", "site-packages", "dist-packages"})
_SMALLEST_USEFUL_BYTES = 1 << 16
_MASKED_FRACTION = 0.15
_IGNORED_LABEL = -100


@dataclass(frozen=True)
class Corpus:
    """One rank's share of the text.

    Attributes:
        text: uint8 ``[bytes]``, the contents of this rank's files one after another.
        files: number of files in this share.
    """

    text: Tensor
    files: int


def standard_library_files() -> list[Path]:
    """The ``.py`` files of the standard library in a fixed order, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    found = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = (path for path in found if _SKIPPED_FOLDERS.isdisjoint(path.parts[:-1]))
    return [root / path for path in sorted(kept, key=lambda path: path.as_posix())]


def load_corpus(rank: int, world_size: int, limit: int = 4 << 20) -> Corpus:
    """Reads every ``world_size``-th file, from number ``rank`` on, up to ``limit`` bytes.

    Raises:
        RuntimeError: the standard library's sources aren't installed as plain files.
    """
    parts: list[bytes] = []
    size = 0
    for path in standard_library_files()[rank::world_size]:
        if size >= limit:
            break
        parts.append(path.read_bytes()[: limit - size])
        size += len(parts[-1])
    if size < _SMALLEST_USEFUL_BYTES:
        raise RuntimeError(
            f"only {size} bytes of Python sources under {sysconfig.get_path('stdlib')}; the demo "
            "reads the standard library as its text: use a Python that ships its sources"
        )
    return Corpus(torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8), len(parts))


def masked_batch(
    corpus: Corpus, batch: int, length: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """One batch for masked-language modelling, a pure function of ``generator``'s state.

    Of 15 % chosen positions four fifths show ``MASK_ID``, a tenth a random byte and a tenth
    the byte itself, as BERT was trained.

    Returns:
        ``(input_ids, labels)``, both int64 ``[batch, length]``; labels are -100 where nothing
        is to be predicted.
    """
    starts = torch.randint(corpus.text.numel() - length + 1, (batch, 1), generator=generator)
    original = corpus.text[starts + torch.arange(length)].long()
    chosen = torch.rand(original.shape, generator=generator) < _MASKED_FRACTION
    chosen[:, 0] = True  # a row without any label would make the mean loss of a batch undefined
    shown_as = torch.rand(original.shape, generator=generator)
    random_bytes = torch.randint(256, original.shape, generator=generator)
    input_ids = torch.where(chosen & (shown_as < 0.8), MASK_ID, original)
    input_ids = torch.where(chosen & (shown_as >= 0.9), random_bytes, input_ids)
    return input_ids, torch.where(chosen, original, _IGNORED_LABEL)
