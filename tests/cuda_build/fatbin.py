"""Which GPU architectures a library holds code for, read from its own bytes.

nvcc leaves one fat binary per source file: a header, then one entry per architecture. ``cuobjdump``
shows the same, but a pip-installed toolkit has none.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

_MAGIC = struct.pack("<I", 0xBA55ED50)
_HEADER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of the entries
_ENTRY = struct.Struct("<HHIQII HH I")  # kind, -, header, code, -, -, minor, major, architecture
_KINDS = {1: "ptx", 2: "elf"}


@dataclass(frozen=True)
class Code:
    """One entry: ``kind`` is "elf" (machine code) or "ptx"; ``architecture`` is 90 for sm_90."""

    kind: str
    architecture: int


def fat_binaries(library: Path) -> list[list[Code]]:
    """The entries of every fat binary in the file, in the file's order."""
    data = library.read_bytes()
    found = []
    begin = data.find(_MAGIC)
    while begin >= 0:
        _, _, header_bytes, entries_bytes = _HEADER.unpack_from(data, begin)
        end = begin + header_bytes + entries_bytes
        found.append(_entries(data[begin + header_bytes : end]))
        begin = data.find(_MAGIC, end)
    return found


def _entries(data: bytes) -> list[Code]:
    entries = []
    at = 0
    while at + _ENTRY.size <= len(data):
        kind, _, header_bytes, code_bytes, *_, architecture = _ENTRY.unpack_from(data, at)
        entries.append(Code(_KINDS.get(kind, str(kind)), architecture))
        at += header_bytes + code_bytes
    return entries
