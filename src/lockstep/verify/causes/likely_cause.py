"""The causes that are tried for each check, in their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lockstep.verify.causes import gradients, microbatches, updates
from lockstep.verify.causes.evidence import Evidence
from lockstep.verify.compare import Check

Cause = Callable[[Evidence], str | None]
"""Returns the cause in words with the numbers that show it; None if the evidence does not fit."""

_CAUSES: Mapping[Check, tuple[Cause, ...]] = {
    "initial": (microbatches.initial_weights,),
    "samples": (microbatches.samples,),
    "batch": (microbatches.other_data,),
    "microbatch": (
        updates.earlier_update,
        microbatches.random_state,
        microbatches.scaled_microbatches,
        microbatches.kept_state,
        microbatches.batchnorm_of_microbatch,
        microbatches.other_input,
    ),
    "missing": (gradients.missing_gradient,),
    "gradients": (
        updates.earlier_update,
        gradients.wrong_sum,
        microbatches.random_state,
        gradients.short_dtype,
        gradients.few_elements,
    ),
    "sum": (gradients.wrong_sum,),
    "norm": (updates.clipping,),
    "lr": (updates.learning_rate,),
    "states": (updates.optimizer_state,),
    "parameters": (updates.parameter_update,),
    "buffers": (updates.buffer,),
    "ranks": (updates.ranks_disagree,),
    "loss": (updates.logged_loss,),
    "weight": (updates.loss_weight,),
    "logged": (updates.logged_value,),
}


def likely_cause(evidence: Evidence) -> str | None:
    """Return the likely cause in words; None if no known fault leaves this evidence."""
    for cause in _CAUSES[evidence.first.check]:
        if found := cause(evidence):
            return found
    return None
