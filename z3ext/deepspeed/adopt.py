"""Decides once per optimizer whether z3ext serves it, and chooses the policies that do.

The decision falls at the start of the optimizer's first backward, together on all ranks: a rank
served while another is not would wait for ever in a collective of its own.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

from deepspeed import comm as ds_comm
from torch import Tensor

from z3ext._log import log_rank0
from z3ext.agreement import Agreement, Alone
from z3ext.collectives import NativeSum, OneRank, SumOverRanks
from z3ext.deepspeed.diagnosis import Diagnosis, Reaction
from z3ext.deepspeed.gradient_step import GradientStep
from z3ext.deepspeed.offload import OffloadStep
from z3ext.deepspeed.paths import choose_path, config_mode
from z3ext.deepspeed.releases.release import Release
from z3ext.deepspeed.stage3 import ServedPath, StockPath
from z3ext.deepspeed.status import counters_of
from z3ext.deepspeed.support import is_destroyed
from z3ext.streams import BucketStream, HostOrder, ReductionStream

Method = Callable[..., Any]

#: The only attribute that z3ext adds to an optimizer; undo takes it away.
ATTRIBUTE = "_z3ext_adapter"


class Adoptions:
    """Every optimizer that was looked at, with the decision on it.

    Args:
        stock: DeepSpeed's own methods, by name.
        release: the family of releases at hand.
        refusal: why this rank does not serve an optimizer, "" when it does.
        agreement: how the ranks of an optimizer agree.
        mode: "auto" for the path of each optimizer's config, or the path for all of them.
        react: what follows an overflow.
    """

    def __init__(
        self,
        stock: dict[str, Method],
        release: Release,
        refusal: Callable[[Any], str],
        agreement: Callable[[Any], Agreement],
        mode: str,
        react: Reaction,
    ) -> None:
        self._mode = mode
        self._react = react
        self._stock = stock
        self._release = release
        self._refusal = refusal
        self._agreement = agreement
        self._adopted: weakref.WeakSet[Any] = weakref.WeakSet()

    def of(self, optimizer: Any) -> ServedPath | StockPath:
        """The decision on an optimizer, made when first asked for: by every rank, in one order."""
        decision: ServedPath | StockPath | None = vars(optimizer).get(ATTRIBUTE)
        return self._decide(optimizer) if decision is None else decision

    def outlook(self, optimizer: Any) -> tuple[str, str, str]:
        """Why an optimizer is not served ("" when it is), its mode and its note; decides nothing.

        Before the decision this is what the rank by itself would do.
        """
        if not is_destroyed(optimizer, self._release):
            decision: ServedPath | StockPath | None = vars(optimizer).get(ATTRIBUTE)
            if decision is not None:
                return decision.reason, decision.mode, decision.note
        reason = self._refusal(optimizer)
        return reason, "stock" if reason else self._mode_of(optimizer), ""

    def release_all(self) -> None:
        """Take z3ext's attribute away from every optimizer."""
        for optimizer in list(self._adopted):
            decision = vars(optimizer).pop(ATTRIBUTE, None)
            if isinstance(decision, ServedPath):
                dropped = decision.discard_buckets()
                if dropped:
                    log_rank0(
                        logging.WARNING,
                        f"undone with {dropped} gradients of an unfinished backward in a bucket; "
                        "they are dropped",
                    )
        self._adopted.clear()

    def _mode_of(self, optimizer: Any) -> str:
        return config_mode(optimizer) if self._mode == "auto" else self._mode

    def _decide(self, optimizer: Any) -> ServedPath | StockPath:
        served, objection, mode = self._look(optimizer)
        try:
            agreement = self._agreement(optimizer)
        except Exception:  # what names the ranks is missing: on every rank, by the same sources
            agreement = Alone()
        reason = agreement.reach(objection, mode)
        decision: ServedPath | StockPath
        if served is None or reason:
            decision = StockPath(optimizer, self._stock, self._release.begin, reason)
            log_rank0(logging.WARNING, f"not served: {reason}; DeepSpeed's own methods run")
        else:
            decision, wanted = served, config_mode(optimizer)
            asked = (
                "" if mode == wanted else f", by mode={mode!r} in place of the config's {wanted}"
            )
            log_rank0(
                logging.INFO,
                f"serving a ZeRO stage 3 optimizer on the {mode} path{asked}, world size "
                f"{ds_comm.get_world_size(self._release.group(optimizer))}",
            )
        setattr(optimizer, ATTRIBUTE, decision)
        self._adopted.add(optimizer)
        return decision

    def _look(self, optimizer: Any) -> tuple[ServedPath | None, str, str]:
        """What would serve an optimizer, or why nothing does, and the mode."""
        try:
            mode = self._mode_of(optimizer)
            reason = self._refusal(optimizer)
            if reason:
                return None, reason, mode
            return _make_adapter(optimizer, self._stock, self._release, mode, self._react), "", mode
        except Exception as error:  # not foreseen, and no reason to end a training
            return None, f"looking at it failed with {type(error).__name__}: {error}", "stock"


def _make_adapter(
    optimizer: Any, stock: dict[str, Method], release: Release, mode: str, react: Reaction
) -> ServedPath:
    group = release.group(optimizer)
    over = _sum_over(group)
    stream = _stream_of(optimizer)
    counters = counters_of(optimizer)
    in_step = OffloadStep if optimizer.offload_optimizer else GradientStep
    step = in_step(optimizer, stock, release, over, stream, counters)
    path = choose_path(mode, over, stream, counters)
    diagnosis = Diagnosis(optimizer, group, react)
    return ServedPath(optimizer, stock, release, path, stream, step, diagnosis, counters)


class DeepSpeedSum:
    """The sum through ``deepspeed.comm``, whose communication logger then sees it."""

    def __init__(self, group: Any) -> None:
        self.rank: int = ds_comm.get_rank(group=group)
        self.world_size: int = ds_comm.get_world_size(group=group)
        self._group = group

    def all_reduce_(self, buf: Tensor) -> bool:
        ds_comm.all_reduce(buf, group=self._group)
        return True

    def reduce_scatter_(self, rows: Tensor, row: Tensor) -> bool:
        ds_comm.reduce_scatter_fn(row, rows, group=self._group)
        return True


def _sum_over(group: Any) -> SumOverRanks:
    if ds_comm.get_world_size(group=group) == 1:
        return OneRank()
    return DeepSpeedSum(group) if ds_comm.comms_logger.enabled else NativeSum(group)


def _stream_of(optimizer: Any) -> BucketStream:
    stream = optimizer.reduce_and_partition_stream
    return HostOrder() if stream is None else ReductionStream(stream)
