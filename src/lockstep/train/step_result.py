"""What a step came to: its loss, and whether a step could be taken at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lockstep.base.errors import LossError
from lockstep.comm.mesh import to_local
from lockstep.comm.world import exact_sum
from lockstep.train.microbatches import Layout

if TYPE_CHECKING:
    from lockstep.train.train_module import Pair


@dataclass(slots=True)
class Outcome:
    """What a commit came to. Numbers stay on the device until somebody reads them."""

    layout: Layout
    pair: Pair
    values: Tensor | list[float]
    """(microbatches,): each one's part of the loss; its raw total where `weights` is there."""
    weights: Tensor | None
    norm: Tensor | float
    """Scalar: the gradient's global norm before clipping; at a step that is not logged, perhaps only a number that is finite as it is."""
    applied: bool | None
    """Whether the model was updated. None: a GPU decided; `check` finds out."""
    asks: Tensor | bool
    """How many of the ranks that share out the microbatches had something to tell the others."""
    terms: list[dict[str, Tensor]]
    """Of this rank's microbatches, each term's part of the loss, where there are several."""

    def loss(self) -> float:
        """Σ total / Σ weight over the step's microbatches: the same on every rank; in bitwise numerics, at any world size too."""
        total = exact_sum(self._values())
        if self.weights is None:
            return total
        weight = exact_sum(self.weights.tolist())
        return total / weight if weight else math.nan

    def term_losses(self) -> dict[str, float]:
        """Each term's part of the loss, where there are several. Every rank calls it, when all do."""
        if not self.pair.terms:
            return {}
        rows = [{name: float(value) for name, value in terms.items()} for terms in self.terms]
        everyone = [row for rank_rows in self.pair.mesh.data.gather_values(self.pair.from_last_stage(lambda: rows)) for row in rank_rows]
        return {name: exact_sum([row[name] for row in everyone]) for name in self.pair.terms}

    def check(self) -> None:
        """Raise `LossError` where no step can be taken from this one's loss or gradient: alike on every rank, before anything is lost."""
        if math.isfinite(float(self.norm)) and self.applied is not False and self.weights is None:
            return
        layout = self.layout
        for place, value in enumerate(self._values()):
            if not math.isfinite(value):
                raise LossError(
                    f"step {layout.step}: the loss is {value} in {layout.name(place)}, computed by {layout.owner(place)} from "
                    f"{layout.words(place)}; a step needs a finite loss; the model was not changed by this step: "
                    "look at those samples, the learning rate, and divisions, logarithms and roots in the model"
                )
        if self.weights is not None:
            self._check_weights(self.weights.tolist())
        if self.applied is False and self.pair.overflowed_at < 1:
            raise LossError(
                f"step {layout.step}: every loss is finite and the gradient is not, first in {self._not_finite()}, after "
                f"{self.pair.overflows} steps in a row, at a loss scale of {self.pair.overflowed_at:g}; only a scale above 1 can be why "
                "a gradient overflows; the model was not changed by these steps: look for square roots and norms at 0, and try "
                "precision='bf16' or 'fp32'"
            )
        if not math.isfinite(float(self.norm)) and self.pair.loss_scale is None:
            raise LossError(
                f"step {layout.step}: every loss is finite and the gradient is not, first in {self._not_finite()}; a step needs a finite "
                "gradient; the model was not changed by this step: look for square roots and norms at 0, and for overflow"
            )

    def _values(self) -> list[float]:
        return self.values if isinstance(self.values, list) else self.values.cpu().numpy().tolist()

    def _check_weights(self, weights: list[float]) -> None:
        for place, weight in enumerate(weights):
            if not 0 <= weight < math.inf:
                raise LossError(
                    f"step {self.layout.step}: the weight of microbatch {place} is {weight}; a weight counts what was summed and is "
                    "finite and not negative"
                )
        if not any(weights):
            raise LossError(no_weight(self.layout.step, "loss"))

    def _not_finite(self) -> str:
        pair = self.pair
        modules = {name: place for place, (name, _) in enumerate(pair.model.named_modules())}  # each stage's rank has them all
        found = [
            (modules[name.rpartition(".")[0]], place, name)
            for place, (name, parameter) in enumerate(zip(pair.names, pair.parameters, strict=True))
            if parameter.grad is not None and not bool(torch.isfinite(to_local(parameter.grad)).all())
        ]
        everyone = [first for firsts in pair.mesh.world.gather_values(found[:1]) for first in firsts]
        return f"parameter {min(everyone)[-1]!r}" if everyone else "the norm over all parameters (it overflows)"


class Flag:
    """Whether any rank had something to tell the others, as of a step: known without waiting for a GPU that is still at it."""

    def __init__(self) -> None:
        self._before: tuple[Tensor, torch.cuda.Event] | None = None

    def raised(self, outcomes: Sequence[Outcome], *, now: bool) -> bool:
        """After each step, with its outcomes. On a GPU it tells of the step before; where `now`, it waits, and tells of this one."""
        flags = [outcome.asks for outcome in outcomes]
        on_gpu = [flag for flag in flags if isinstance(flag, Tensor) and flag.is_cuda]
        if now or not on_gpu:
            self._before = None
            return any(map(bool, flags))
        before = self._before
        copied = torch.stack(on_gpu).to("cpu", non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._before = copied, event
        if before is None:
            return False
        before[1].synchronize()
        return bool(before[0].any())


def no_weight(step: int, term: str) -> str:
    return (
        f"step {step}: the weights of term {term!r} add up to 0 over the whole global batch; the loss is divided by their sum; check the "
        "labels (are all ignored?) or use a larger global_batch"
    )
