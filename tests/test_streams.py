"""The order that bucket work takes against the streams that wrote the gradients."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch

from z3ext.streams import HostOrder, ReductionStream


class FakeStream:
    """Writes down for whom it waits."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.device = "cuda:1"
        self.waited: list[str] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.waited.append(other.name)

    # torch makes a new object for the current stream at every call; equal ones are one stream.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


class FakeGrad:
    def __init__(self) -> None:
        self.recorded: list[FakeStream] = []

    def record_stream(self, stream: FakeStream) -> None:
        self.recorded.append(stream)


class FakeCuda:
    """Stands for torch.cuda: the current stream of a device, and the context that sets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = FakeStream("default")
        monkeypatch.setattr(torch.cuda, "current_stream", self.current_stream)
        monkeypatch.setattr(torch.cuda, "stream", self.stream)

    def current_stream(self, device: str) -> FakeStream:
        assert device == "cuda:1"  # the reduction stream's device, not the current one
        return FakeStream(self.current.name)

    @contextmanager
    def stream(self, stream: FakeStream) -> Any:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def reduction(stream: FakeStream) -> ReductionStream:
    return ReductionStream(cast(torch.cuda.Stream, stream))


def grads(*found: FakeGrad) -> list[torch.Tensor]:
    return cast("list[torch.Tensor]", list(found))


def test_waits_for_every_writer_once(cuda: FakeCuda) -> None:
    own = FakeStream("reduction")
    order = reduction(own)
    for name in ("default", "side", "default", "side", "third"):
        cuda.current = FakeStream(name)
        order.note_writer()
    assert own.waited == []
    first, second = FakeGrad(), FakeGrad()
    order.wait_for_writers(grads(first, second))
    assert own.waited == ["default", "side", "third"]
    assert first.recorded == second.recorded == [own]


def test_writers_are_forgotten_once_waited_for(cuda: FakeCuda) -> None:
    own = FakeStream("reduction")
    order = reduction(own)
    order.note_writer()
    order.wait_for_writers(grads())
    order.wait_for_writers(grads(FakeGrad()))
    assert own.waited == ["default"]
    # A later gradient from the same stream is a later point on it.
    order.note_writer()
    order.wait_for_writers(grads())
    assert own.waited == ["default", "default"]


def test_does_not_wait_for_itself(cuda: FakeCuda) -> None:
    own = FakeStream("reduction")
    order = reduction(own)
    with order.active():
        assert cuda.current is own
        order.note_writer()
    assert cuda.current.name == "default"
    grad = FakeGrad()
    order.wait_for_writers(grads(grad))
    assert own.waited == []
    assert grad.recorded == [own]


def test_active_ends_after_an_error(cuda: FakeCuda) -> None:
    order = reduction(FakeStream("reduction"))
    with pytest.raises(KeyError), order.active():
        raise KeyError
    assert cuda.current.name == "default"


def test_host_order_does_nothing() -> None:
    order = HostOrder()
    order.note_writer()
    order.wait_for_writers([torch.ones(2)])
    with order.active():
        order.note_writer()


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_order_on_a_gpu(device: torch.device) -> None:
    """Two streams write late; what runs on the reduction stream sees both values."""
    new_stream: Any = torch.cuda.Stream
    side, own = new_stream(device), new_stream(device)
    order = ReductionStream(own)
    sleep: Any = torch.cuda._sleep
    written = [torch.zeros(1 << 20, device=device) for _ in range(2)]
    torch.cuda.synchronize(device)
    for value, stream in zip(written, (torch.cuda.current_stream(device), side), strict=True):
        with torch.cuda.stream(stream):
            sleep(50_000_000)
            value.fill_(3.0)
            order.note_writer()
    order.wait_for_writers(written)
    with order.active():
        assert torch.cuda.current_stream(device) == own
        total = written[0] + written[1]
    own.synchronize()
    assert total.eq(6.0).all()
