"""Small models that reach every corner of the ZeRO-3 gradient path.

Each model draws its own batch, so that a case names a model and nothing else, and returns the loss
from `forward`. `Draw.poison` is the non-finite value that a case plants in one gradient element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Draw:
    """What one micro-batch is drawn from: the generator is seeded by case, rank, step and micro."""

    generator: torch.Generator
    dtype: torch.dtype
    step: int
    micro: int
    rank: int
    world: int
    poison: float | None = None

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def index(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator)


def mean_square(x: Tensor) -> Tensor:
    """The mean of the squares, in fp32."""
    return x.float().square().mean()


class TrainingModel(nn.Module):
    """A model that makes its own batches."""

    def batch(self, draw: Draw) -> tuple[Any, ...]:
        raise NotImplementedError


class Toy(TrainingModel):
    """loss = sum_i <c_i, p_i> over the used parameters, so that grad(p_i) is c_i exactly.

    `unused` names (step, rank, parameter) triples that are left out, -1 standing for any;
    `constant` takes the place of random coefficients; `reverse_odd_ranks` makes the arrival order
    of the gradients differ between ranks.
    """

    def __init__(
        self,
        *shapes: Sequence[int],
        unused: Sequence[tuple[int, int, int]] = (),
        constant: float | None = None,
        reverse_odd_ranks: bool = False,
        poisoned: int = 0,
    ) -> None:
        super().__init__()
        # Direct parameters of one module: ZeRO-3 fetches all of them, used or not.
        for i, shape in enumerate(shapes):
            self.register_parameter(f"p{i}", nn.Parameter(torch.zeros(*shape)))
        self.shapes = [tuple(shape) for shape in shapes]
        self.unused = list(unused)
        self.constant = constant
        self.reverse_odd_ranks = reverse_odd_ranks
        self.poisoned = poisoned

    def batch(self, draw: Draw) -> tuple[Any, ...]:
        coefficients: list[Tensor | None] = []
        for i, shape in enumerate(self.shapes):
            c = draw.normal(*shape)
            if self.constant is not None:
                c = torch.full_like(c, self.constant)
            if i == self.poisoned and draw.poison is not None:
                c.view(-1)[c.numel() // 2] = draw.poison
            left_out = any(
                i == param and step in (-1, draw.step) and rank in (-1, draw.rank)
                for step, rank, param in self.unused
            )
            coefficients.append(None if left_out else c)
        order = list(range(len(self.shapes)))
        if self.reverse_odd_ranks and draw.rank % 2:
            order.reverse()
        return (order, *coefficients)

    def forward(self, order: Sequence[int], *coefficients: Tensor | None) -> Tensor:
        loss = torch.zeros(())
        for i in order:
            c = coefficients[i]
            if c is not None:
                loss = loss + (c.float() * getattr(self, f"p{i}").float()).sum()
        return loss


class Probe(nn.Module):
    """Adds <c, weight> to the loss: grad(weight) is c, the place to plant a non-finite value."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel = numel
        self.weight = nn.Parameter(torch.randn(numel) * 0.1)

    def forward(self, c: Tensor) -> Tensor:
        return (c.float() * self.weight.float()).sum()


class Mlp(TrainingModel):
    """Odd sizes, a one-element bias, optional frozen layers, optional checkpointing of the blocks.

    `checkpointing`: "" for none, "reentrant" or "non_reentrant". `rows` gives the batch size of
    each micro-batch in turn.
    """

    def __init__(
        self,
        *sizes: int,
        bias: bool = True,
        frozen: Sequence[int] = (),
        checkpointing: str = "",
        rows: Sequence[int] = (3,),
        probe: int = 11,
    ) -> None:
        super().__init__()
        self.sizes = sizes or (7, 13, 5, 1)
        self.blocks = nn.ModuleList(
            nn.Linear(a, b, bias=bias) for a, b in zip(self.sizes, self.sizes[1:], strict=False)
        )
        self.probe = Probe(probe)
        self.checkpointing = checkpointing
        self.rows = rows
        for i in frozen:
            self.blocks[i].requires_grad_(False)

    def batch(self, draw: Draw) -> tuple[Any, ...]:
        rows = self.rows[draw.micro % len(self.rows)]
        c = draw.normal(self.probe.numel)
        if draw.poison is not None:
            c[7] = draw.poison
        return draw.normal(rows, self.sizes[0]), draw.normal(rows, self.sizes[-1]), c

    def forward(self, x: Tensor, target: Tensor, c: Tensor) -> Tensor:
        if self.checkpointing == "reentrant":
            x.requires_grad_(True)
        for block in self.blocks:
            if self.checkpointing:
                reentrant = self.checkpointing == "reentrant"
                x = torch.tanh(checkpoint(block, x, use_reentrant=reentrant))
            else:
                x = torch.tanh(block(x))
        added: Tensor = self.probe(c)
        return mean_square(x.float() - target.float()) + added


class Tied(TrainingModel):
    """An embedding whose weight is also the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.middle = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def batch(self, draw: Draw) -> tuple[Any, ...]:
        tokens = draw.index(11, 2, 5)
        return tokens[:, :-1], tokens[:, 1:]

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.norm(self.middle(x))
        logits = self.head(x).float()
        return functional.cross_entropy(logits.reshape(-1, 11), target.reshape(-1))


class _ViewGradients(torch.autograd.Function):
    """<a, expand(bias) @ weight.T> whose backward returns an expanded and a transposed gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor, c: Tensor) -> Tensor:
        ctx.save_for_backward(c)
        return (weight.float() * c.float()).sum() + bias.float().sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None]:
        (c,) = ctx.saved_tensors
        grad = grads[0].to(c.dtype)
        transposed = (c.t().contiguous() * grad).t()
        expanded = grad.reshape(1).expand(c.shape[0])
        return transposed, expanded, None


class ViewGrad(TrainingModel):
    """Non-contiguous gradients out of a custom Function: transposed [5, 3] and expanded [5]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))
        self.bias = nn.Parameter(torch.randn(5))
        self.tail = Mlp(3, 2)

    def batch(self, draw: Draw) -> tuple[Any, ...]:
        return (draw.normal(5, 3), *self.tail.batch(draw))

    def forward(self, c: Tensor, *rest: Tensor) -> Tensor:
        loss: Tensor = _ViewGradients.apply(self.weight, self.bias, c)  # type: ignore[no-untyped-call]
        tail: Tensor = self.tail(*rest)
        return loss + tail


class ChannelsLast(TrainingModel):
    """A convolution fed channels_last, so that its weight gradient arrives in that layout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.tail = nn.Linear(5, 1)

    def batch(self, draw: Draw) -> tuple[Any, ...]:
        return (draw.normal(2, 3, 6, 6).contiguous(memory_format=torch.channels_last),)

    def forward(self, x: Tensor) -> Tensor:
        return mean_square(self.tail(self.conv(x).float().mean((2, 3)).to(x.dtype)))


class Branchy(TrainingModel):
    """A whole layer that only even steps use: odd steps find its partition stale."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(7, 5)
        self.branch = nn.Linear(5, 5)
        self.head = nn.Linear(5, 1)

    def batch(self, draw: Draw) -> tuple[Any, ...]:
        return draw.normal(3, 7), draw.step % 2 == 0

    def forward(self, x: Tensor, use_branch: bool) -> Tensor:
        x = torch.tanh(self.trunk(x))
        if use_branch:
            x = x + torch.tanh(self.branch(x))
        return mean_square(self.head(x))


class Experts(nn.Module):
    """Three experts, of which a rank runs one: to be marked as a ZeRO-3 leaf module."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: Tensor, chosen: int) -> Tensor:
        out: Tensor = self.experts[chosen](x)
        return out


class Moe(TrainingModel):
    """Different experts on different ranks behind one leaf module."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(7, 5)
        self.block = Experts()
        self.head = nn.Linear(5, 1)

    def batch(self, draw: Draw) -> tuple[Any, ...]:
        return draw.normal(3, 7), (draw.rank + draw.step) % 3

    def forward(self, x: Tensor, chosen: int) -> Tensor:
        x = torch.tanh(self.trunk(x))
        x = x + torch.tanh(self.block(x, chosen))
        return mean_square(self.head(x))


class Lora(TrainingModel):
    """fp32 adapters on a frozen bf16 base."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(7, 7).bfloat16().requires_grad_(False)
        self.down = nn.Linear(7, 2, bias=False)
        self.up = nn.Linear(2, 7, bias=False)

    def batch(self, draw: Draw) -> tuple[Any, ...]:
        return (draw.normal(3, 7),)

    def forward(self, x: Tensor) -> Tensor:
        out = self.base(x.bfloat16()).float() + self.up(self.down(x))
        return mean_square(out) / math.sqrt(7)
