"""The methods on DeepSpeed's optimizer class, z3ext's and stock's."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from z3ext.agreement import Agreement, agreement_of
from z3ext.deepspeed import support
from z3ext.deepspeed.adopt import Adoptions
from z3ext.deepspeed.diagnosis import Reaction
from z3ext.deepspeed.names import PRIVATE
from z3ext.deepspeed.quiet import Quiet
from z3ext.deepspeed.releases.policies import group_of_the_parameters
from z3ext.deepspeed.releases.release import Release

Method = Callable[..., Any]


class Installation:
    """What one patch puts in place of what.

    Args:
        cls: ``DeepSpeedZeroOptimizer_Stage3``.
        release: the family of releases that it belongs to.
        mode: as the user asked for it.
        react: what follows an overflow.
    """

    def __init__(self, cls: type, release: Release, mode: str, react: Reaction) -> None:
        self.cls = cls
        self._release = release
        self._mode = mode
        self._stock: dict[str, Method] = {name: vars(cls)[name] for name in release.replaced}
        self.adoptions = Adoptions(self._stock, release, self._refusal, _agreement, mode, react)
        self._replacements = _replacements(self.adoptions, release, self._stock)
        self._quiet = Quiet()

    def _refusal(self, optimizer: Any) -> str:
        return support.refusal(optimizer, self.cls, self._release, self._replacements, self._mode)

    def install(self) -> None:
        """Put z3ext's methods on the class: all of them, or none where one can't be put there."""
        try:
            for name, method in self._replacements.items():
                setattr(self.cls, name, method)
            self._quiet.install()
        except BaseException:
            self._restore()
            raise

    def remove(self) -> None:
        """Restore every attribute to the identical object.

        Raises:
            RuntimeError: within a backward pass, or something else was patched over z3ext.
        """
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "z3ext: undo() was called within a backward pass; expected no backward to be "
                "running; call it after engine.backward()"
            )
        for name, method in self._replacements.items():
            if vars(self.cls).get(name) is not method:
                raise RuntimeError(
                    f"z3ext: {name.removeprefix(PRIVATE)} was replaced by something else after "
                    "patch_deepspeed(); expected z3ext's own method there; undo that first"
                )
        self._restore()
        self.adoptions.release_all()

    def _restore(self) -> None:
        for name, method in self._stock.items():
            setattr(self.cls, name, method)
        self._quiet.remove()


def _agreement(optimizer: Any) -> Agreement:
    # DeepSpeed numbers the parameters of a process, in the same order on every rank.
    first = next(itertools.chain.from_iterable(optimizer.fp16_groups), None)
    number = getattr(first, "ds_id", "")
    return agreement_of(group_of_the_parameters(optimizer), f"engine{number}")


def _replacements(
    adoptions: Adoptions, release: Release, stock: dict[str, Method]
) -> dict[str, Method]:
    """What stands on the class: each hands over to the path of its optimizer."""

    def begin_backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        path = adoptions.of(self)  # every rank is at the same place: no gradient has come yet
        return path.begin(*args, **kwargs)

    def ready(self: Any, param: Any) -> None:
        adoptions.of(self).ready(param)

    def add_grad(self: Any, param: Any) -> None:
        adoptions.of(self).add_grad(param)

    def reduce_bucket(self: Any, *args: Any) -> None:
        adoptions.of(self).reduce_bucket(*args)

    @torch.no_grad()
    def has_overflow(self: Any, partition_gradients: bool = True) -> Any:
        return adoptions.of(self).has_overflow(partition_gradients)

    @torch.no_grad()
    def norm_groups(self: Any) -> Any:
        return adoptions.of(self).norm_groups()

    @torch.no_grad()
    def prepare(self: Any, sub_group_id: int) -> None:
        adoptions.of(self).prepare(sub_group_id)

    @torch.no_grad()
    def unscale(self: Any, sub_group_id: int, total_norm: Any) -> None:
        adoptions.of(self).unscale(sub_group_id, total_norm)

    def update_scale(self: Any, has_overflow: bool = False) -> None:
        adoptions.of(self).update_scale(has_overflow)

    def clean_up(self: Any, prev_scale: Any) -> None:
        adoptions.of(self).clean_up(prev_scale)

    @torch.no_grad()
    def post_step(self: Any, timer_names: Any) -> None:
        adoptions.of(self).post_step(timer_names)

    methods: tuple[Method, ...] = (
        begin_backward,
        ready,
        add_grad,
        reduce_bucket,
        has_overflow,
        norm_groups,
        prepare,
        unscale,
        update_scale,
        clean_up,
        post_step,
    )
    return {
        name: _named_like(stock[name], method)
        for name, method in zip(release.replaced, methods, strict=True)
    }


def _named_like(stock: Method, method: Method) -> Method:
    """Name, docstring and module of the stock method, so that tracebacks and profiles read alike.

    Without ``__wrapped__``: inspection must not take the replacement for the stock method.
    """
    functools.update_wrapper(method, stock)
    vars(method).pop("__wrapped__", None)
    return method
