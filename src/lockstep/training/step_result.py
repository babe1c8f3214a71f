"""The result of a step for one model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lockstep.base.errors import LossError
from lockstep.comm.mesh import to_local
from lockstep.comm.world import exact_sum
from lockstep.training.loss import no_weight
from lockstep.training.microbatches import StepLayout
from lockstep.training.train_module import TrainModule


@dataclass(slots=True)
class StepResult:
    """The numbers of a step for one model. The numbers stay on the device until they are read."""

    layout: StepLayout
    module: TrainModule
    values: Tensor | list[float]
    """Each microbatch's part of the step's loss, in the shape (microbatches,). With `weights`, each
    microbatch's total before the division."""
    # shape (microbatches,), the weights that the forward returned with `ls.Loss`; None if
    # `Recipe.weight` or the number of samples gives the denominators
    weights: Tensor | None
    flags: Tensor | bool  # see `StepStats`
    clip_norm: float | None
    norm: Tensor | float = math.nan
    """Global norm before clipping. If the recipe does not need the norm, any number that is finite
    if and only if the norm is finite."""
    # True if the model was updated. None if that depends on a value on the device; see
    # `was_applied`
    applied: bool | None = False
    terms: list[dict[str, Tensor]] = field(default_factory=list)
    """Maps loss terms to their parts of the step's loss, for each microbatch of this rank. Each
    dict is empty if the loss has one term."""

    @property
    def was_applied(self) -> bool:
        """Waits for the device."""
        return math.isfinite(float(self.norm)) if self.applied is None else self.applied

    @property
    def is_settled(self) -> bool:
        """True if the host knows, without waiting for the device, that `check` cannot fail."""
        return self.applied is True and self.weights is None

    def loss(self) -> float:
        """Σ total / Σ weight over the global batch, the same on every rank."""
        total = exact_sum(as_floats(self.values))
        if self.weights is None:
            return total
        weight = exact_sum(self.weights.tolist())
        if not weight:
            return 0.0 if not total else math.nan
        return total / weight

    @property
    def is_without_weight(self) -> bool:
        return self.weights is not None and not any(self.weights.tolist())

    def term_losses(self) -> dict[str, float]:
        """Return an empty dict unless the loss has several terms. Every rank must call this
        method."""
        if not self.module.terms:
            return {}
        parts = torch.tensor(
            [[float(terms[name]) for name in self.module.terms] for terms in self.terms],
            dtype=torch.float64,
        )
        self.module.mesh.loss_parts.all_reduce(parts)
        rows = parts.tolist()
        on_output_rank = self.module.executor.on_output_rank
        everyone = [
            row
            for theirs in self.module.mesh.data.gather_values(on_output_rank(lambda: rows))
            for row in theirs
        ]
        return {
            name: exact_sum([row[place] for row in everyone])
            for place, name in enumerate(self.module.terms)
        }

    def check(self) -> None:
        """Raise on every rank if the loss, a weight or the gradient is not valid. In fp16, an
        overflow is an error only at a loss scale below 1. Waits for the device."""
        if self.was_applied and self.weights is None:
            return
        self.module.agreement.refuse_late()
        layout = self.layout
        for place, value in enumerate(as_floats(self.values)):
            if not math.isfinite(value):
                raise LossError(
                    f"after step {layout.step}: the loss is {value} in {layout.name(place)},"
                    f" computed by {layout.owner(place)} from {layout.words(place)}; a step needs a"
                    " finite loss; the model was not changed by this step: check those samples,"
                    " the learning rate, and divisions, logarithms and roots in the model",
                    not_finite_in=layout.step + 1,
                )
        if self.weights is not None:
            self._check_weights(self.weights.tolist())
        if not self.was_applied and self.module.overflowed_at < 1:
            raise LossError(
                f"after step {layout.step}: every loss is finite and the gradient is not, first in"
                f" {self._not_finite()}, after {self.module.overflows} steps in a row, at a loss"
                f" scale of {self.module.overflowed_at:g}; at a scale of at most 1 the scale is not"
                " the cause; the model was not changed by these steps: look for square roots and"
                " norms at 0, and try precision='bf16' or 'fp32'",
                not_finite_in=layout.step + 1,
            )
        if not math.isfinite(float(self.norm)) and self.module.loss_scale is None:
            raise LossError(
                f"after step {layout.step}: every loss is finite and the gradient is not, first in"
                f" {self._not_finite()}; a step needs a finite gradient; the model was not changed"
                " by this step: look for square roots and norms at 0, and for overflow",
                not_finite_in=layout.step + 1,
            )

    def _check_weights(self, weights: list[float]) -> None:
        for place, weight in enumerate(weights):
            if not 0 <= weight < math.inf:
                raise LossError(
                    f"after step {self.layout.step}: the weight of microbatch {place} is {weight};"
                    " it divides the summed loss, and must be finite and not negative"
                )
        if not any(weights) and (total := exact_sum(as_floats(self.values))):
            raise LossError(f"after step {self.layout.step}: {no_weight('loss', total)}")

    def _not_finite(self) -> str:
        module = self.module
        # every rank of a pipeline has the names of all modules
        order = {name: place for place, (name, _) in enumerate(module.model.named_modules())}
        not_finite = [
            (order[name.rpartition(".")[0]], place, name)
            for place, (name, parameter) in enumerate(
                zip(module.names, module.parameters, strict=True)
            )
            if parameter.grad is not None
            and not bool(torch.isfinite(to_local(parameter.grad)).all())
        ]
        everyone = [
            first for firsts in module.mesh.world.gather_values(not_finite[:1]) for first in firsts
        ]
        return (
            f"parameter {min(everyone)[-1]!r}"
            if everyone
            else "the norm over all parameters (it overflows)"
        )


def as_floats(values: Tensor | list[float]) -> list[float]:
    return values if isinstance(values, list) else values.tolist()
