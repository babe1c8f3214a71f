"""Causes of a difference when the gradient is right: clipping, learning rate, optimizer, buffers,
logged numbers."""

from __future__ import annotations

import math

import numpy as np

from lockstep.evidence.tensors import BATCHNORM_BUFFERS, EXACT, PROJECTIONS, Vector, exact_ratio
from lockstep.verify.causes.evidence import Evidence, stacked, update
from lockstep.verify.causes.gradients import sums_by_rank

NORM_TOLERANCE = 0.2
"""Largest relative error of a gradient norm that is estimated from random projections."""
WRONG_UPDATE = 0.05
"""Relative error of an update above which rounding is not the cause, if the gradients agree a
hundred times better."""


def clipping(evidence: Evidence) -> str:
    first = evidence.first
    entry = evidence.plan.ranks[first.rank].steps[first.step]
    gradients = {
        name: each for name, each in entry.tensors["gradients"].items() if each is not None
    }
    expected = math.sqrt(sum(each.norm**2 for each in gradients.values()))
    norm = entry.norm or 0.0
    text = (
        f"rank {first.rank} clips by {norm:.6g}, but the norm of the whole gradient is"
        f" {expected:.6g}"
    )
    own = sums_by_rank(evidence, list(gradients), entry.gain).get(first.rank)
    own_norm = math.inf if own is None else float(np.linalg.norm(own)) / math.sqrt(PROJECTIONS)
    if abs(own_norm - norm) < NORM_TOLERANCE * norm:
        return (
            f"a local clipping norm: {text}; it is about the norm of the rank's own gradient,"
            " before the reduction"
        )
    if norm < expected:
        return (
            f"a local clipping norm: {text}; the norm is that of a part of the gradient (a shard, a"
            " stage), not summed over ranks"
        )
    return (
        f"a wrong clipping norm: {text}; parts of the gradient were counted more than once, or"
        " before they were scaled"
    )


def learning_rate(evidence: Evidence) -> str:
    step, rank = evidence.step, evidence.first.rank
    expected = [entry.lr for entry in evidence.reference.rank_0.steps]
    actual = evidence.plan.ranks[rank].steps[step].lr
    if actual in expected:
        return (
            f"the learning rate {actual:.6g} is that of step {expected.index(actual)}: the schedule"
            " was stepped too often or too seldom"
        )
    return f"another learning rate: {actual} instead of {expected[step]}"


def parameter_update(evidence: Evidence) -> str | None:
    first = evidence.first
    names = evidence.names("parameters")
    expected = update(evidence.reference.rank_0, first.step, names)
    actual = update(evidence.plan.ranks[first.rank], first.step, names)
    if not np.any(actual):
        return (
            f"the update was not applied on rank {first.rank}: the gradient is right, but"
            f" {first.name!r} did not change"
        )
    factor = exact_ratio(expected, actual)
    if factor is not None and abs(factor - 1) > EXACT:
        return (
            f"the gradient is right, but the update is {factor:.4g} times the reference's: another"
            " learning rate or clipping norm"
        )
    return (
        "the gradient and the optimizer's state are right, but the update is not: other settings"
        " (weight decay, betas), or an optimizer whose update of a shard is not the shard of its"
        " update"
    )


def earlier_update(evidence: Evidence) -> str | None:
    """Find an earlier update that was wrong by less than the tolerance of parameters."""
    for step in range(evidence.step):
        actual, expected = evidence.plan.ranks[evidence.first.rank], evidence.reference.rank_0
        names = list(expected.initial["parameters"])
        off = _relative(update(actual, step, names), update(expected, step, names))
        gradients = [
            stacked(entry.steps[step].tensors["gradients"], names) for entry in (actual, expected)
        ]
        if off > WRONG_UPDATE and off > 100 * _relative(*gradients):
            return (
                f"the optimizer: its update in step {step} is off by {off:.2g} of its size, from a"
                " gradient that is right; its update of a shard is not the shard of its update, or"
                " it has other settings on some ranks"
            )
    return None


def _relative(found: Vector, expected: Vector) -> float:
    size, away = float(np.linalg.norm(expected)), float(np.linalg.norm(found - expected))
    return away / size if size and np.isfinite(away) else 0.0


def optimizer_state(evidence: Evidence) -> str:
    until_then = "; the states were equal until then" if evidence.step else ""
    return (
        f"the optimizer's state {evidence.first.name!r} differs while the gradient is"
        f" right{until_then}: it was reset, loaded from elsewhere, or updated with another gradient"
    )


def buffer(evidence: Evidence) -> str:
    first = evidence.first
    wrong = {difference.rank for difference in evidence.of("buffers")}
    on_all = len(wrong) == len(evidence.plan.ranks) > 1
    where = "every rank" if on_all else f"rank {first.rank}"
    if first.name.rpartition(".")[2] in BATCHNORM_BUFFERS:
        return (
            f"BatchNorm statistics out of sync: the running statistics on {where} are not those of"
            " all microbatches in their order; they were updated from the rank's own microbatches"
            " alone, or averaged"
        )
    return (
        f"a buffer out of sync: {first.name!r} on {where} was changed by what that rank computed,"
        " not by all microbatches in their order"
    )


def ranks_disagree(evidence: Evidence) -> str:
    first = evidence.first
    text = (
        f"ranks 0 and {first.rank} hold different values of {first.name!r}, each within the"
        " tolerance"
    )
    one, other = (
        evidence.plan.ranks[rank].steps[first.step].tensors["gradients"].get(first.name)
        for rank in (0, first.rank)
    )
    if one is not None and other is not None and one.sha256 == other.sha256:
        return (
            f"{text}, from the same gradient: the optimizer has other settings on one of them, or"
            " its updates are not deterministic"
        )
    return f"{text}: the reduction does not give every rank the same bits"


def logged_loss(evidence: Evidence) -> str:
    return (
        f"the gradient is right, but the loss that rank {evidence.first.rank} logs is not: it is"
        " the loss of its own microbatches, or a mean of means"
    )


def logged_value(evidence: Evidence) -> str:
    return (
        f"the model is the same, and {evidence.first.name!r} is not: the script computes it from"
        " one rank's microbatches alone, or counts dummies (step.is_dummy), or takes a mean of"
        " means; use session.mean, or session.gather"
    )


def loss_weight(_: Evidence) -> str:
    return "the weight is not that of the whole global batch: it was not summed over ranks"
