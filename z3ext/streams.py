"""In which order bucket work runs against the streams that wrote the gradients."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor


class BucketStream(Protocol):
    """Where pack, reduce and unpack run."""

    def note_writer(self) -> None:
        """A gradient was just written on the caller's current stream."""
        ...

    def wait_for_writers(self, grads: Iterable[Tensor]) -> None:
        """Order the bucket's work after every writer noted, and keep the gradients' memory."""
        ...

    def active(self) -> AbstractContextManager[object]:
        """Makes the bucket's stream the current one."""
        ...


class HostOrder:
    """CPU: the host runs everything in the order of the calls."""

    def note_writer(self) -> None:
        pass

    def wait_for_writers(self, grads: Iterable[Tensor]) -> None:
        pass

    def active(self) -> AbstractContextManager[object]:
        return nullcontext()


class ReductionStream:
    """CUDA: one stream for all buckets, beside the streams that autograd uses."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._writers: dict[torch.cuda.Stream, None] = {}

    def note_writer(self) -> None:
        writer = torch.cuda.current_stream(self._stream.device)
        if writer != self._stream:
            self._writers[writer] = None

    def wait_for_writers(self, grads: Iterable[Tensor]) -> None:
        for writer in self._writers:
            self._stream.wait_stream(writer)
        self._writers.clear()
        for grad in grads:
            # The gradient is dropped once packed; its memory must outlive the pack kernel.
            grad.record_stream(self._stream)

    def active(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)
