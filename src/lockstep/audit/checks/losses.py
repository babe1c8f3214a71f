"""The weight of each target in the gradient that is applied: it must be one number for all targets
of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from lockstep.audit.checks.area_result import AreaResult
from lockstep.audit.checks.gradients import Factors, factors, names_on_all_ranks
from lockstep.audit.finding import Area
from lockstep.audit.records import Rank, Records
from lockstep.audit.remedies import Cause
from lockstep.evidence.rows import Row
from lockstep.evidence.tensors import Vector, finite_projection

EVEN = 0.01
"""Relative difference of weights that counts as none."""
LEAST_ERROR = 0.005
"""Relative error of a gradient from which a mean of means is a finding."""
SCALE = 2e-3
"""Relative difference from a whole factor that counts as that factor."""
GATHERS = ("all_gather", "all_gather_into_tensor")
"""Collectives with which a loss is taken over the values of all ranks."""


@dataclass(frozen=True, slots=True)
class Term:
    """A call of a loss function in a step, on one rank."""

    rank: int
    backward: str
    place: tuple[str, int, str]
    """The line of the call, its number among those of the backward at that line, and its
    function."""
    reduction: str
    count: float
    """Targets, or elements."""
    microbatch: int
    """The backward that the loss function's output was in, if gradients of several are first seen
    together (FSDP2)."""
    unit: str
    """The name of what is counted."""
    weight: float
    """The weight of each target in the loss that the backward began from: not reduced yet."""


def check_losses(records: Records) -> AreaResult:
    result = AreaResult(Area.LOSS)
    if not records.steps:
        return result
    seen = judged = 0
    small = 0.0
    for rows in records.together():
        if rows[0]["several_closures"]:
            result.miss(f"{rows[0]['type']} computes several gradients in a step")
            continue
        found = _factors(rows)
        if found is not None:
            _check_gathered(result, records, rows, found)
        terms = [term for rank, row in enumerate(rows) for term in _terms(rank, row, result)]
        if not terms:
            continue
        if found is None:
            result.miss(
                f"step {rows[0]['index']}: how the reduction weighs the ranks' gradients was not"
                " seen"
            )
            continue
        places = sorted({term.place for term in terms})
        alone = len(places) == 1
        errors = [
            _check_weights(
                result, rows, [term for term in terms if term.place == place], found, alone=alone
            )
            for place in places
        ]
        known = [error for error in errors if error is not None]
        if len(known) == len(errors):
            seen += 1
            small = max([small, *known])
        if not alone:
            result.miss(
                f"{len(places)} loss functions are in the loss: the scale of their sum is not"
                " judged"
            )
        elif not result.findings:
            judged += _check_scale(result, records, rows, terms, found)
    if seen:
        result.right = f"in {seen} steps all targets have one weight"
        result.right += f", but for {small:.1g} of the gradient" if small else ""
        result.right += f"; in {judged} the weights of a step add up to 1" if judged else ""
    elif not result.findings and not result.unseen:
        result.miss(
            "no loss function of torch was seen whose weights could be told: the loss is the"
            " script's own, or compiled"
        )
    return result


def _factors(rows: Sequence[Row]) -> list[float] | None:
    """The factor of each rank's gradient in the reduced one; those of a single process are 1."""
    if len(rows) == 1:
        return [1.0]
    found: Factors | None = factors(rows, 0, names_on_all_ranks(rows))
    return found.values if found is not None and found.fits and not found.is_own_only(0) else None


def _terms(rank: int, row: Row, result: AreaResult) -> list[Term]:
    """The calls whose weight is one number; of `reduction="none"` those in which all targets that
    count weigh alike. The others are said in `result`."""
    numbers: dict[tuple[int, str], int] = {}
    terms = []
    for each in row["losses"]:
        key = (each["backward"], each["line"])
        numbers[key] = numbers.get(key, -1) + 1
        count, weight = each.get("count"), each.get("weight")
        if each["reduction"] == "none":
            low, high = each.get("weights", [0.0, 0.0])
            weight = low if high and abs(high - low) <= EVEN * abs(high) else None
            if high and weight is None:
                result.miss(f"{each['function']} weighs its targets by weights of the script's own")
        elif each["reduction"] == "mean" and weight is not None and count:
            weight = weight / count
        backward = next((number for number in row["added"] if int(number) >= each["backward"]), "")
        # gradients that are reduced later are seen with those of the backward that reduces
        is_together = bool(row["sharded"])
        if weight and count and backward and (is_together or int(backward) == each["backward"]):
            terms.append(
                Term(
                    rank=rank,
                    backward=backward,
                    place=(each["line"], numbers[key], each["function"]),
                    reduction=each["reduction"],
                    count=float(count),
                    microbatch=each["backward"],
                    unit="sums of class weights" if each.get("has_class_weights") else "targets",
                    weight=float(weight),
                )
            )
    return terms


def _check_weights(
    result: AreaResult,
    rows: Sequence[Row],
    terms: Sequence[Term],
    found: Sequence[float],
    *,
    alone: bool,
) -> float | None:
    """Find a mean of means.

    Returns the relative error of the gradient, which is 0 for equal weights, where that is no
    finding; None for a finding, and for weights that differ by the script's own factor.
    """
    weights = [abs(term.weight * found[term.rank]) for term in terms]
    counts = [term.count for term in terms]
    if max(weights) - min(weights) <= EVEN * max(weights):
        return 0.0
    if min(counts) == max(counts):
        times = f"{max(weights) / min(weights):.3g}" if min(weights) else "infinitely many"
        result.miss(
            f"targets of some microbatches count {times} times as much as those of others, by a"
            " factor of the script's own"
        )
        return None
    error = _error(rows, terms, found) if alone else None
    if error is not None and error < LEAST_ERROR:
        return error
    step = rows[0]["index"]
    off = "" if error is None else f"; the gradient is off by {error:.2g} of its size"
    result.find_worst(
        Cause.MEAN_OF_MEANS,
        f"step {step}: between {min(counts):.0f} and {max(counts):.0f} {terms[0].unit} a"
        " microbatch, each microbatch with its own mean: a target counts up to"
        f" {max(weights) / min(weights):.3g} times as much as another{off}",
        line=terms[0].place[0],
        step=step,
        badness=max(weights) / min(weights) - 1 if error is None else error,
    )
    return None


def _error(rows: Sequence[Row], terms: Sequence[Term], found: Sequence[float]) -> float | None:
    weight_of = {(term.rank, term.backward): term.weight for term in terms}
    if len(weight_of) != len(terms):
        return None
    total = sum(abs(found[term.rank] * term.weight) * term.count for term in terms) / sum(
        term.count for term in terms
    )
    names = names_on_all_ranks(rows)
    applied: Vector = np.zeros(8 * len(names))
    right: Vector = np.zeros(8 * len(names))
    for rank, row in enumerate(rows):
        for backward, sketches in row["added"].items():
            parts = [finite_projection(sketches.get(name)) for name in names]
            added = np.concatenate([np.zeros(8) if each is None else each for each in parts])
            if (rank, backward) not in weight_of:
                return None
            applied += found[rank] * added
            right += total / abs(weight_of[rank, backward]) * added
    size = float(np.linalg.norm(right))
    return float(np.linalg.norm(applied - right)) / size if size else None


def _check_scale(
    result: AreaResult,
    records: Records,
    rows: Sequence[Row],
    terms: Sequence[Term],
    found: Sequence[float],
) -> bool:
    """Find gradients of a mean that are a whole factor too large or too small. True if the scale is
    right."""
    scaled = any(row["clip"] is not None and row["clip"]["scaled"] for row in rows)
    total = sum(abs(found[term.rank] * term.weight) * term.count for term in terms)
    ranks, backwards = len(rows), len({term.microbatch for term in terms if term.rank == 0})
    step, line = rows[0]["index"], _backward_line(records, terms[0]) or rows[0]["line"]
    if scaled or not total:
        return False
    if _gathers_before(records, terms[0]):
        result.miss("the loss is taken over what all ranks gathered: its scale is not judged")
        return False
    is_mean = all(term.reduction == "mean" for term in terms)
    divided_by = None if is_mean else _denominator(terms, ranks, backwards)
    if not is_mean and divided_by is None:
        result.miss(
            "the loss is a sum over targets that is not divided by their number: its scale is the"
            f" script's own, and the reduction gives {found[0]:.3g} × the sum over all ranks"
        )
        return False
    plain = all(
        abs(term.weight * term.count - 1) < SCALE or term.weight * term.count > 1 for term in terms
    )
    if _is(total, 1.0):
        return True
    if backwards > 1 and _is(total, backwards) and plain:
        text = (
            f"a step adds up the means of {backwards} microbatches and does not divide: the"
            f" gradient is {backwards} times too large"
        )
    elif ranks > 1 and _is(total / ranks, 1.0):
        line = _reduction_line(records, terms[0]) or line
        text = (
            f"the {ranks} ranks' gradients are added up, and not divided: the gradient is {ranks}"
            " times too large"
        )
    elif backwards > 1 and _is(total, ranks * backwards):
        text = (
            f"the gradient is {ranks * backwards} times too large: {ranks} ranks and {backwards}"
            " microbatches are added up"
        )
    elif (
        ranks > 1
        and divided_by == "all"
        and _is(total * ranks, 1.0)
        and _knows_all_counts(records, terms)
    ):
        count = sum(term.count for term in terms)
        text = (
            f"each rank divides its sum by the {count:.0f} targets of all ranks, and the reduction"
            f" divides by {ranks} again: the gradient is {ranks} times too small"
        )
    elif (divisor := _divided_twice(records, total, ranks, backwards)) is not None:
        text = (
            f"the loss is divided by {divisor:g} once more than the reduction needs: the gradient"
            f" is {divisor:g} times too small"
        )
    else:
        result.miss(
            f"the weights of a step add up to {total:.3g}, by a factor of the script's own: its"
            " scale is not judged"
        )
        return False
    result.find(Cause.WRONG_SCALE, f"step {step}: {text}", line=line, step=step)
    return False


def _denominator(terms: Sequence[Term], ranks: int, backwards: int) -> str | None:
    """Name what each sum is divided by: the targets of its microbatch (also times the
    microbatches), of its rank, of all ranks (also divided by the ranks). None: by none of them."""
    of_rank = [sum(each.count for each in terms if each.rank == term.rank) for term in terms]
    count = sum(term.count for term in terms)
    kinds = {
        "microbatch": [term.count for term in terms],
        "microbatches": [term.count * backwards for term in terms],
        "rank": of_rank,
        "all": [count] * len(terms),
        "share": [count / ranks] * len(terms),
    }
    for kind, counts in kinds.items():
        if all(_is(abs(term.weight) * each, 1.0) for term, each in zip(terms, counts, strict=True)):
            return kind
    return None


def _knows_all_counts(records: Records, terms: Sequence[Term]) -> bool:
    """True if the sums are divided by the count of all ranks for sure: half of a mean has the same
    weight on two ranks, unless their counts differ."""
    counts = {term.count for term in terms}
    divisors = {each for row in records.ranks[0].of("backward") for each in row["divisors"]}
    return len(counts) > 1 or sum(term.count for term in terms) in divisors


def _check_gathered(
    result: AreaResult, records: Records, rows: Sequence[Row], found: Sequence[float]
) -> None:
    """Find a loss over what all ranks gathered, without a gradient to the rank that it was gathered
    from.

    All ranks compute one value, and each adds the gradient of its own part of it: the sum over
    ranks is right, and a mean is too small.
    """
    ranks = len(rows)
    if ranks < 2 or not all(_is(each, 1 / ranks) for each in found):
        return
    windows = [_windows(rank, row) for rank, row in zip(records.ranks, rows, strict=True)]
    for each in zip(*windows, strict=False):
        values = [value for value, _, _ in each]
        if None in values or not all(_is_same_loss(value, values[0]) for value in values):
            continue
        gathers = [
            [row for row in before if row["name"] in GATHERS and row["floats"] > 1]
            for _, before, _ in each
        ]
        if all(gathers) and not any(after for _, _, after in each):
            result.find_at(
                rows[0],
                Cause.WRONG_SCALE,
                f"all {ranks} ranks compute one loss over what they"
                " gathered, no gradient goes back to the rank that it is of, and the reduction"
                f" divides by {ranks}: the gradient is {ranks} times too small",
                line=str(gathers[0][-1]["line"]),
            )


def _windows(rank: Rank, step: Row) -> list[tuple[float | None, list[Row], list[Row]]]:
    found: list[tuple[float | None, list[Row], list[Row]]] = []
    before: list[Row] = []
    for row in rank.of("backward", "collective", "step"):
        if row["kind"] == "backward":
            if str(row["number"]) in step["added"]:
                found.append((row["value"], before, []))
            before = []
        elif row["kind"] == "step":
            before = []
        elif row["in_backward"] and found:
            found[-1][2].append(row)
        else:
            before.append(row)
        if row["place"] > step["place"]:
            break
    return found


def _is_same_loss(one: float | None, other: float | None) -> bool:
    return (
        one is not None
        and other is not None
        and abs(one - other) <= 1e-5 * max(abs(one), abs(other))
    )


def _is(value: float, factor: float) -> bool:
    return abs(value - factor) < SCALE * factor


def _divided_twice(records: Records, total: float, ranks: int, backwards: int) -> float | None:
    divisors = {each for row in records.ranks[0].of("backward") for each in row["divisors"]}
    for number in (ranks, backwards):
        if number > 1 and _is(total * number, 1.0) and float(number) in divisors:
            return float(number)
    return None


def _gathers_before(records: Records, term: Term) -> bool:
    """True if the forward of a term gathered tensors of other ranks, as a contrastive loss does,
    and not one number."""
    gathers = False
    for row in records.ranks[term.rank].of("backward", "collective", "step"):
        if row["kind"] == "backward" and str(row["number"]) == term.backward:
            return gathers
        gathers = row["kind"] == "collective" and (
            gathers or (row["name"] in GATHERS and row["floats"] > 1)
        )
    return False


def _backward_line(records: Records, term: Term) -> str:
    rows = [
        row
        for row in records.ranks[term.rank].of("backward")
        if str(row["number"]) == term.backward
    ]
    return str(rows[0]["line"]) if rows else ""


def _reduction_line(records: Records, term: Term) -> str:
    """The line of the first all-reduce after the backward, if the script reduces its gradients
    itself; else empty."""
    rows = records.ranks[term.rank].of("backward", "collective", "step")
    begin = next(
        (number for number, row in enumerate(rows) if str(row.get("number")) == term.backward),
        len(rows),
    )
    following = takewhile(lambda row: row["kind"] == "collective", rows[begin + 1 :])
    return next((str(row["line"]) for row in following if row["name"] == "all_reduce"), "")
