"""Compares what the ranks have done in a step, where all must do the same. The numbers that it
compares are summed together with the step's losses."""

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
    """Something that the ranks of a process group must do alike."""

    @property
    def count(self) -> int:
        """Number of values that `numbers` returns."""

    def numbers(self) -> list[float]:
        """Return numbers whose sums over all ranks are 0 if and only if the ranks agree. Every rank
        calls it."""

    def end_step(self) -> None:
        """Keep this rank's actions since the previous step, so that an error can name them."""

    def difference(self) -> str | None:
        """Return the first difference between the ranks in the last step; None if there is none.
        Every rank of the process group calls it."""

    def error(self, difference: str | None) -> RecipeError:
        """Return the error. `difference`: None if it cannot be named."""


class StepAgreement:
    """Compares the ranks' actions in each step of one model."""

    def __init__(
        self, summed: World, alike: Sequence[Alike] = (), counts: CountReads | None = None
    ) -> None:
        """`summed`: the ranks that sum the numbers of a step. `alike`: comparisons to make, in
        addition to the orders of exchanges. `counts`: counts that the model's forward has read; if
        ranks differ in them, they are checked later."""
        self._summed = summed
        self._alike = list(alike)
        self._counts = counts
        self._orders: dict[int, ExchangeOrder] = {}
        self.doing = Doing()
        """The part of the step; the reducer sets it, and each exchange reports it."""
        self._late: tuple[Tensor, torch.Event, StepCounts | None] | None = None
        """The previous step's two flags (the ranks' numbers differed; their counts differed) while
        they are copied to the host, the event of that copy, and this rank's counts."""
        self._unchecked: StepCounts | None = None
        """This rank's counts in a step in which the ranks' counts differed."""

    def over(self, world: World) -> ExchangeOrder | None:
        """Return the order of exchanges over `world`; None if nothing needs to be compared. Every
        rank of `summed` calls it."""
        if world.size == 1 or world.shared_memory is not None:
            return None
        if id(world) not in self._orders:
            order = self._orders[id(world)] = ExchangeOrder(world, self._summed, self.doing)
            self._alike.append(order)
        return self._orders[id(world)]

    @property
    def count(self) -> int:
        """Number of values that `numbers` returns."""
        return self._counted + sum(each.count for each in self._alike)

    @property
    def _counted(self) -> int:
        """Number of the values in `numbers` that belong to the counts; these come first."""
        return 0 if self._counts is None else self._counts.count

    def numbers(self) -> list[float]:
        """Return this rank's numbers. Their sums over `summed` are 0 if and only if the ranks
        agree."""
        of_counts = [] if self._counts is None else self._counts.numbers()
        return [*of_counts, *(number for each in self._alike for number in each.numbers())]

    def end_step(self) -> None:
        if self._counts is not None:
            self._counts.end_step()
        for each in self._alike:
            each.end_step()

    @property
    def seconds(self) -> float:
        """Seconds since the latest exchange began; 0 between steps. Any thread may read it."""
        return min(filter(None, (each.seconds for each in self._of_orders())), default=0.0)

    def told(self) -> list[Exchanges]:
        """Return the latest exchanges of this rank. Any thread may call it."""
        return [told for each in self._of_orders() for told in each.told() if told.calls]

    def _of_orders(self) -> list[ExchangeOrder]:
        return list(self._orders.values())

    def end_trial(self) -> None:
        """Note the end of a trial: a forward that belongs to no microbatch."""
        for each in self._of_orders():
            each.note(END)

    def settle(self) -> None:
        """Note that all ranks have ended the step, or the trial."""
        for each in self._of_orders():
            each.settle()

    def compare(self, sums: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        """Raise `RecipeError` if the ranks differ. On an accelerator, whose host need not wait,
        make a gradient of `parameters` NaN instead, and raise in the next step. Called after
        `end_step`. `sums`: the ranks' numbers, summed."""
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
        """Raise `RecipeError` if the ranks differ. Every rank of `summed` calls it. `unchecked`:
        this rank's counts, if the ranks' counts differ."""
        if differ:
            self._refuse()
        self._unchecked = unchecked

    def unchecked(self) -> StepCounts | None:
        """Return this rank's counts of the last step if the ranks' counts differed, and forget
        them. On an accelerator, they belong to the step before the last."""
        counts, self._unchecked = self._unchecked, None
        return counts

    def compare_now(self) -> None:
        """Raise `RecipeError` if the ranks differ. Every rank of `summed` calls it, outside of
        steps."""
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
        """Raise `RecipeError`, on every rank, if the ranks differed in the last step. Waits for the
        device."""
        before, self._late = self._late, None
        if before is not None:
            copied, event, latest = before
            event.synchronize()
            differ, counts_differ = copied.tolist()
            self._take(differ, latest if counts_differ else None)

    def _refuse(self) -> NoReturn:
        """Raise `RecipeError` with the first difference. Every rank of `summed` calls it, after
        `end_step`."""
        mine = [each.difference() for each in self._alike]
        everyone = self._summed.gather_values(mine)
        for each, texts in zip(self._alike, zip(*everyone, strict=True), strict=True):
            for text in filter(None, texts):
                raise each.error(text)
        raise self._alike[0].error(None)
