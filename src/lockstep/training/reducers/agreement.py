"""Checks that all ranks make the same collectives in the same order, and read the same token
counts. Each rank encodes its actions as numbers, which are summed over ranks together with the
step's losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn, Protocol

import torch
from torch import Tensor, nn

from lockstep.base import accelerator
from lockstep.base.errors import RecipeError
from lockstep.comm.mesh import to_local
from lockstep.comm.world import World
from lockstep.training.reducers.exchange_order import END, Doing, ExchangeOrder, Exchanges

if TYPE_CHECKING:
    from lockstep.model.context.count_reads import CountReads, StepCounts


class Alike(Protocol):
    """Records actions that must be the same on all ranks of a process group."""

    @property
    def count(self) -> int: ...

    def numbers(self) -> list[float]:
        """Return numbers whose sums over all ranks are 0 if and only if the ranks agree."""

    def end_step(self) -> None:
        """Keep this rank's actions since the previous step, for error messages."""

    def difference(self) -> str | None:
        """Return the first action of the last step in which two ranks differ. Every rank of the
        process group must call this method."""

    def error(self, difference: str | None) -> RecipeError: ...


class StepAgreement:
    """Compares the collectives and the token counts of the ranks in each step of one model."""

    def __init__(
        self, summed: World, alike: Sequence[Alike] = (), counts: CountReads | None = None
    ) -> None:
        self._summed = summed
        self._alike = list(alike)
        self._counts = counts
        self._orders: dict[int, ExchangeOrder] = {}
        self.doing = Doing()
        self._late: tuple[Tensor, torch.Event, StepCounts | None] | None = None
        self._unchecked: StepCounts | None = None

    def over(self, world: World) -> ExchangeOrder | None:
        """Return None if `world` has one rank or uses shared memory. Every rank must call this
        method."""
        if world.size == 1 or world.shared_memory is not None:
            return None
        if id(world) not in self._orders:
            order = self._orders[id(world)] = ExchangeOrder(world, self._summed, self.doing)
            self._alike.append(order)
        return self._orders[id(world)]

    @property
    def count(self) -> int:
        return self._counted + sum(each.count for each in self._alike)

    @property
    def _counted(self) -> int:
        return 0 if self._counts is None else self._counts.count

    def numbers(self) -> list[float]:
        of_counts = [] if self._counts is None else self._counts.numbers()
        return [*of_counts, *(number for each in self._alike for number in each.numbers())]

    def end_step(self) -> None:
        if self._counts is not None:
            self._counts.end_step()
        for each in self._alike:
            each.end_step()

    @property
    def seconds(self) -> float:
        """Seconds since this rank began its latest recorded collective; 0 between steps. Any thread
        may read this property."""
        return min(filter(None, (each.seconds for each in self._of_orders())), default=0.0)

    def recent(self) -> list[Exchanges]:
        """Return this rank's latest recorded collectives in the previous step and the current step.
        Any thread may call this method."""
        return [recent for each in self._of_orders() for recent in each.recent() if recent.calls]

    def _of_orders(self) -> list[ExchangeOrder]:
        return list(self._orders.values())

    def end_trial(self) -> None:
        """End a forward that belongs to no microbatch."""
        for each in self._of_orders():
            each.note(END)

    def settle(self) -> None:
        for each in self._of_orders():
            each.settle()

    def compare(self, sums: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        """Raise `RecipeError` if the ranks' actions differ. On an accelerator, set a gradient to
        NaN if the actions differ, and raise the error in the next step. The host does not wait for
        the accelerator."""
        self.settle()
        has_streams = accelerator.has_streams(sums.device)
        is_offloaded = to_local(parameters[0]).is_cpu
        counts, others = sums[: self._counted], sums[self._counted :]
        latest = None if self._counts is None else self._counts.latest
        if sums.is_cpu or (has_streams and is_offloaded):
            if bool(sums.any()):
                self._take(bool(others.any()), latest if bool(counts.any()) else None)
            return
        differ = others.any()
        gradients = (to_local(p.grad) for p in parameters if p.grad is not None)
        for gradient in [each for each in gradients if each.numel()][:1]:
            gradient.mul_(torch.where(differ, math.nan, 1.0))
        if has_streams:  # the planner has none
            copied = torch.stack([differ, counts.any()]).to("cpu", non_blocking=True)
            self._late = copied, accelerator.recorded_event(sums.device), latest

    def _take(self, differ: bool, unchecked: StepCounts | None) -> None:
        """Every rank must call this method."""
        if differ:
            self._refuse()
        self._unchecked = unchecked

    def unchecked(self) -> StepCounts | None:
        """Return the last step's token counts if they differ between ranks. A second call in the
        same step returns None. On an accelerator, the counts are from the step before the last."""
        counts, self._unchecked = self._unchecked, None
        return counts

    def compare_now(self) -> None:
        """Compare the ranks' actions at the end of an evaluation. Every rank must call this
        method."""
        if not self.count:
            return
        numbers = self.numbers()
        self.end_step()
        everyone = self._summed.gather_values(numbers)
        self.settle()
        sums = [*map(sum, zip(*everyone, strict=True))]
        latest = None if self._counts is None else self._counts.latest
        self._take(any(sums[self._counted :]), latest if any(sums[: self._counted]) else None)

    def refuse_late(self) -> None:
        """Raise the error that `compare` has deferred. Waits for the device."""
        before, self._late = self._late, None
        if before is not None:
            copied, event, latest = before
            event.synchronize()
            differ, counts_differ = copied.tolist()
            self._take(differ, latest if counts_differ else None)

    def _refuse(self) -> NoReturn:
        """Every rank must call this method, after `end_step`."""
        mine = [each.difference() for each in self._alike]
        everyone = self._summed.gather_values(mine)
        for each, texts in zip(self._alike, zip(*everyone, strict=True), strict=True):
            for text in filter(None, texts):
                raise each.error(text)
        raise self._alike[0].error(None)
