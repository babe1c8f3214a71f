"""Causes of differences under expert parallelism.

If the input and the routing of a layer are right and its output is not, the fault is in the
exchange of tokens. If a layer's input or routing is wrong, the names of the wrong gradients show
the fault.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from lockstep.base.words import enumerated
from lockstep.evidence.tensors import EXACT, exact_ratio
from lockstep.evidence.trace import LayerTrace
from lockstep.verify.causes.evidence import Evidence, Wrong, differ, listed_places, stacked

MOSTLY = 0.9
"""If at least this fraction of the wrong outputs equal the outputs of other tokens, the cause is
that outputs went to the wrong tokens."""


def rows(evidence: Evidence) -> str | None:
    """Find a layer of experts with right input and routing, but a wrong output."""
    for index in sorted(evidence.expected_microbatches) if not evidence.step else ():
        ours, theirs = evidence.reference.experts_of(index), evidence.plan.experts_of(index)
        if len(ours) != 1 or not theirs:
            continue
        (expected_layers,) = ours.values()
        ranks = f"rank{'s' if len(theirs) > 1 else ''} {enumerated(list(theirs))}"
        where = f"in microbatch {index} on {ranks}"
        for name in _layers(evidence):
            expected = expected_layers.get(name)
            parts = [each[name] for each in theirs.values() if name in each]
            if expected is None or len(parts) < len(theirs):
                break
            actual = _in_order(expected, parts)
            if not _same_input(expected, actual, evidence):
                break
            wrong = differ(expected.output, actual.output, evidence.token_tolerance)
            if wrong.any():
                layer = _Layer.of(evidence, name)
                return _misplaced(expected, actual, wrong, name, where) or _lost(
                    layer, expected, wrong, where
                )
    return None


def _in_order(expected: LayerTrace, parts: Sequence[LayerTrace]) -> LayerTrace:
    """Put the tokens of all ranks into the order of `expected`. The function matches each token
    with the nearest expected token."""
    whole = LayerTrace(
        *(
            np.concatenate([getattr(part, each.name) for part in parts])
            for each in fields(LayerTrace)
        )
    )
    if len(parts) == 1 or whole.tokens.shape != expected.tokens.shape:
        return whole
    is_free = np.ones(len(expected.tokens), dtype=bool)
    order = np.zeros(len(expected.tokens), dtype=int)
    for place, token in enumerate(whole.tokens):
        away = np.linalg.norm(expected.tokens - token, axis=-1)
        nearest = int(np.where(is_free, away, np.inf).argmin())
        is_free[nearest], order[nearest] = False, place
    return LayerTrace(*(getattr(whole, each.name)[order] for each in fields(LayerTrace)))


def _same_input(expected: LayerTrace, found: LayerTrace, evidence: Evidence) -> bool:
    return (
        expected.tokens.shape == found.tokens.shape
        and expected.choices.shape == found.choices.shape
        and not differ(expected.tokens, found.tokens, evidence.token_tolerance).any()
        and bool((expected.choices == found.choices).all())
    )


def _misplaced(
    expected: LayerTrace, found: LayerTrace, wrong: Wrong, name: str, where: str
) -> str | None:
    """Find tokens that have the output of another token."""
    at = np.flatnonzero(wrong)
    away = np.linalg.norm(found.output[at, None] - expected.output[None], axis=-1)
    nearest = away.argmin(1)
    same = away.min(1) <= EXACT * np.linalg.norm(found.output[at], axis=-1)
    if same.mean() < MOSTLY:
        return None
    first = int(np.flatnonzero(same)[0])
    return (
        f"rows returned to the wrong token: {where} the input of {name!r} and its choices are"
        f" right, and token {at[first]} has the output of token {nearest[first]}"
        f" ({len(at)} of {len(wrong)} tokens have another's)"
    )


def _lost(layer: _Layer, expected: LayerTrace, wrong: Wrong, where: str) -> str:
    at = f"{where} the input of {layer.name!r} and its choices are right, and its output is wrong"
    for experts in layer.groups():
        chose = np.isin(expected.choices, experts).any(1)
        if chose.all() or (wrong & ~chose).any():
            continue
        right = np.flatnonzero(chose & ~wrong)
        over = "" if right.size else "; none of them is right"
        if right.size:
            over = f"; the outputs of {len(right)} others that chose it are right"
            if right.max() < np.flatnonzero(wrong).min():
                over += ", the first ones: its rows over a capacity were dropped"
        tokens = listed_places([int(each) for each in np.flatnonzero(wrong)])
        return (
            f"rows of {layer.named(experts)} lost: {at} for tokens {tokens}, all of which chose"
            f" it{over}"
        )
    return (
        f"rows returned to the wrong token, or weighted by another token's weights: {at} for"
        f" {int(wrong.sum())} of {len(wrong)} tokens, whichever experts they chose"
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer of experts that the ranks of an `expert` axis divide."""

    name: str
    count: int
    ranks: int

    @classmethod
    def of(cls, evidence: Evidence, name: str) -> _Layer:
        ranks = evidence.plan.metadata["expert_ranks"]
        return cls(name, _layers(evidence)[name]["count"], ranks)

    def groups(self) -> list[list[int]]:
        return [[each] for each in range(self.count)] + [
            list(self.held(rank)) for rank in range(self.ranks)
        ]

    def held(self, rank: int) -> range:
        each = self.count // self.ranks
        return range(rank * each, (rank + 1) * each)

    def named(self, experts: Sequence[int]) -> str:
        rank = experts[0] // (self.count // self.ranks)
        plural = "s" if len(experts) > 1 else ""
        return f"expert{plural} {enumerated(experts)} (of rank {rank} of expert)"


def router_gradient(evidence: Evidence) -> str | None:
    wrong = set(evidence.names("missing", "gradients"))
    first = evidence.first
    for name, layer in _layers(evidence).items():
        if first.name not in layer["router"] or evidence.of("loss"):
            continue
        if wrong.intersection(layer["parameters"]):
            continue
        gradient = evidence.plan.rank_0.steps[evidence.step].tensors["gradients"].get(first.name)
        is_lost = gradient is None or not gradient.norm
        return (
            f"a router's gradient: the loss and the gradients of the experts of {name!r} are right,"
            f" and the gradient of {first.name!r} is {'lost' if is_lost else 'wrong'}; it comes"
            " from the weights of the chosen experts: multiply the experts' outputs by the router's"
            " own weights, not by detached ones, where the tokens are"
        )
    return None


def wrong_expert_factor(evidence: Evidence) -> str | None:
    """Find gradients of experts that are multiplied or divided by a number of ranks."""
    names, layers = evidence.names("gradients", "sum"), _layers(evidence)
    if not names or not set(names) <= _parameters(evidence):
        return None
    tensors = (
        trace.rank_0.steps[evidence.step].tensors["gradients"]
        for trace in (evidence.reference, evidence.plan)
    )
    expected, actual = (stacked(each, names) for each in tensors)
    of = [layer for layer in layers if any(name.startswith(f"{layer}.") for name in names)]
    where = f"of {enumerated([repr(layer) for layer in of])}"
    if len(of) > 2:
        where = f"of {len(of)} layers, {of[0]!r} the first"
    if factor := exact_ratio(expected, actual):
        return _times(evidence, factor, f"the gradients of the experts {where} are")
    return _of_some_experts(evidence, names[0])


def _times(evidence: Evidence, factor: float, what: str) -> str | None:
    sizes = {
        evidence.plan.world_size: "the world size",
        evidence.plan.metadata["expert_ranks"]: "the number of ranks of expert",
    }
    for size, name in sizes.items():
        for power, times, reason in ((1, f"{size}", "multiplied"), (-1, f"1/{size}", "divided")):
            if abs(factor / float(size) ** power - 1) < EXACT:
                return (
                    f"expert gradient {times} times: {what} {factor:.4g} times what they should be,"
                    f" {reason} by {name}, and all other gradients are right; an expert's gradient"
                    " is complete when the rows of all ranks have gone backward: divide or sum"
                    " nothing over expert"
                )
    return None


def _of_some_experts(evidence: Evidence, name: str) -> str | None:
    of = next(key for key, each in _layers(evidence).items() if name in each["parameters"])
    layer = _Layer.of(evidence, of)
    both = evidence.tensors("gradients", name)
    if both is None:
        return None
    expected, actual = (each.reshape(layer.count, -1) for each in both)
    ratios = [exact_ratio(*pair) for pair in zip(expected, actual, strict=True)]
    sizes = np.linalg.norm(expected, axis=1)
    wrong = np.flatnonzero(np.linalg.norm(actual - expected, axis=1) > EXACT * sizes)
    if not 0 < len(wrong) < layer.count:
        return None
    factors = [ratios[each] for each in wrong]
    some = enumerated([int(each) for each in wrong])
    what = f"the gradients of experts {some} of {name!r} are"
    known = [factor for factor in factors if factor is not None]
    if len(known) == len(factors) and np.ptp(known) < EXACT:
        return _times(evidence, known[0], what)
    held = {int(each) // (layer.count // layer.ranks) for each in wrong}
    return (
        f"gradients of some experts: {what} wrong, and those of the other experts are right; they"
        f" are on rank {enumerated(sorted(held))} of expert: rows, or their gradients, of other"
        " ranks' microbatches are missing or twice there"
    )


def expert_clipping(evidence: Evidence) -> str | None:
    step, layers = evidence.step, _layers(evidence)
    entry = evidence.plan.ranks[evidence.first.rank].steps[step]
    sizes = {name: each.norm for name, each in entry.tensors["gradients"].items() if each}
    of_experts = [name for layer in layers.values() for name in layer["parameters"]]
    norm, whole = entry.norm or 0.0, math.hypot(*sizes.values())
    dense = math.hypot(*(size for name, size in sizes.items() if name not in of_experts))
    if not of_experts or not norm < whole:
        return None
    text = (
        f"norm without other ranks' experts: rank {evidence.first.rank} clips by {norm:.6g}, but"
        f" the norm of the whole gradient is {whole:.6g}"
    )
    ranks = evidence.plan.metadata["expert_ranks"]
    for rank in range(ranks):
        if abs(_norm_of(evidence, rank, dense) / norm - 1) < EXACT:
            return (
                f"{text}; it is that of the experts of rank {rank} of expert and of all other"
                " parameters: sum the experts' squares over expert"
            )
    if abs(dense / norm - 1) < EXACT:
        return f"{text}; it is that of the other parameters alone: the experts' squares are missing"
    return None


def _norm_of(evidence: Evidence, rank: int, dense: float) -> float:
    total = dense**2
    for name, of in _layers(evidence).items():
        layer = _Layer.of(evidence, name)
        for parameter in of["parameters"]:
            both = evidence.tensors("gradients", parameter)
            if both is None:
                return math.nan
            by_expert = both[1].reshape(layer.count, -1)
            total += float(np.square(by_expert[list(layer.held(rank))]).sum())
    return math.sqrt(total)


def initial_values(evidence: Evidence) -> str | None:
    names = evidence.names("initial")
    if not set(names) <= _parameters(evidence):
        return None
    return (
        f"the experts' initial values: only experts ({names[0]!r}) do not start from the"
        " reference's values: each rank drew its own experts, from one seed on all ranks, so that"
        " they are alike, or from a seed of the rank; draw all experts on every rank, and keep the"
        " rank's own"
    )


def expert_optimizer_state(evidence: Evidence) -> str | None:
    names = [name.rpartition("/")[0] for name in evidence.names("states")]
    if not set(names) <= _parameters(evidence):
        return None
    return (
        f"the optimizer's state of experts ({evidence.first.name!r}) differs while the gradient and"
        " the state of all other parameters are right: it was reset, or it is that of another"
        " rank's experts"
    )


def _layers(evidence: Evidence) -> Mapping[str, Any]:
    layers: Mapping[str, Any] = evidence.plan.metadata.get("experts", {})
    return layers


def _parameters(evidence: Evidence) -> set[str]:
    return {name for layer in _layers(evidence).values() for name in layer["parameters"]}
