"""Gradients that wait to be packed together, so that a small one costs a list append."""

from __future__ import annotations

from torch import Tensor

#: Bytes of gradients that may wait: bounds the extra memory.
PENDING_BYTES = 32 << 20
#: A gradient of this many bytes or more goes at once: one launch for it costs nothing.
LARGE_BYTES = 4 << 20


class PendingGradients:
    """The gradients noted since the last launch, in the order of arrival."""

    def __init__(self) -> None:
        self.grads: list[Tensor] = []
        self._params: list[Tensor] = []
        self._bytes = 0

    def add(self, param: Tensor, grad: Tensor, numel: int) -> bool:
        """Note a gradient; whether it is time to pack what waits."""
        self.grads.append(grad)
        self._params.append(param)
        size = numel * grad.element_size()
        self._bytes += size
        return size >= LARGE_BYTES or self._bytes >= PENDING_BYTES

    def release(self) -> None:
        """Forget what was packed; the parameters' gradients are dropped."""
        for param, grad in zip(self._params, self.grads, strict=True):
            if param.grad is grad:
                param.grad = None
        self.grads, self._params, self._bytes = [], [], 0
