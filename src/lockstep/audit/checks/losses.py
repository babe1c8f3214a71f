"""Checks that all targets of a step, such as the labels of tokens, have the same weight in the
applied gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from lockstep.audit.checks.gradients import factors, names_on_all_ranks
from lockstep.audit.finding import Area, AreaResult, Cause
from lockstep.audit.records import Rank, Records, first_line
from lockstep.evidence.rows import Row
from lockstep.evidence.tensors import PROJECTIONS, Vector, finite_projection

WEIGHT_TOLERANCE = 0.01
LEAST_ERROR = 0.005
"""Smallest relative error of a gradient that is reported as a mean of means over microbatches."""
FACTOR_TOLERANCE = 2e-3
GATHERS = ("all_gather", "all_gather_into_tensor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A call of a loss function on one rank, whose output is part of the final loss."""

    rank: int
    backward: str
    place: tuple[str, int, str]
    """Line of the script, number of the call at this line, and name of the function."""
    reduction: str
    count: float
    microbatch: int
    """Number of the backward pass that computed the output's gradient. Under FSDP2, a later
    backward pass may reduce the gradient."""
    unit: str
    weight: float
    """Derivative of the final loss with respect to the loss of one target."""


def check_losses(records: Records) -> AreaResult:
    result = AreaResult(Area.LOSS)
    seen = judged = 0
    small = 0.0
    for rows in records.together():
        if rows[0]["several_closures"]:
            result.miss(f"{rows[0]['type']} computes several gradients in a step")
            continue
        weights = _factors(rows)
        if weights is not None:
            _check_gathered(result, records, rows, weights)
        terms = [term for rank, row in enumerate(rows) for term in _terms(rank, row, result)]
        if not terms:
            continue
        if weights is None:
            result.miss(
                f"step {rows[0]['index']}: how the reduction weighs the ranks' gradients was not"
                " seen"
            )
            continue
        places = sorted({term.place for term in terms})
        alone = len(places) == 1
        errors = []
        for place in places:
            here = [term for term in terms if term.place == place]
            errors.append(_check_weights(result, rows, here, weights, alone=alone))
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
            judged += _check_scale(result, records, rows, terms, weights)
    if seen:
        result.right = f"in {seen} steps all targets have one weight"
        result.right += f", but for {small:.1g} of the gradient" if small else ""
        result.right += f"; in {judged} the weights of a step add up to 1" if judged else ""
    elif records.steps and not result.findings and not result.unseen:
        result.miss(
            "no loss function of torch was seen whose weights could be told: the loss is the"
            " script's own, or compiled"
        )
    return result


def _factors(rows: Sequence[Row]) -> list[float] | None:
    if len(rows) == 1:
        return [1.0]
    found = factors(rows, 0, names_on_all_ranks(rows))
    return found.values if found.fits and not found.is_own_only(0) else None


def _terms(rank: int, row: Row, result: AreaResult) -> Iterator[Term]:
    numbers: dict[tuple[int, str], int] = {}
    for each in row["losses"]:
        key = (each["backward"], each["line"])
        numbers[key] = numbers.get(key, -1) + 1
        count, weight = each.get("count"), each.get("weight")
        if each["reduction"] == "none":
            low, high = each.get("weights", [0.0, 0.0])
            weight = low if high and abs(high - low) <= WEIGHT_TOLERANCE * abs(high) else None
            if high and weight is None:
                result.miss(f"{each['function']} weighs its targets by weights of the script's own")
        elif each["reduction"] == "mean" and weight is not None and count:
            weight = weight / count
        backward = next((number for number in row["added"] if int(number) >= each["backward"]), "")
        # gradients that are reduced later are seen at the backward that reduces them
        is_seen = backward and (row["sharded"] or int(backward) == each["backward"])
        if weight and count and is_seen:
            yield Term(
                rank=rank,
                backward=backward,
                place=(each["line"], numbers[key], each["function"]),
                reduction=each["reduction"],
                count=float(count),
                microbatch=each["backward"],
                unit="sums of class weights" if each.get("has_class_weights") else "targets",
                weight=float(weight),
            )


def _check_weights(
    result: AreaResult,
    rows: Sequence[Row],
    terms: Sequence[Term],
    found: Sequence[float],
    *,
    alone: bool,
) -> float | None:
    """Find a mean of means: microbatches with unequal numbers of targets, each with its own mean.
    Return the relative error of the gradient if the error is too small to report."""
    weights = [abs(term.weight * found[term.rank]) for term in terms]
    least, most = min(weights), max(weights)
    if most - least <= WEIGHT_TOLERANCE * most:
        return 0.0
    counts = [term.count for term in terms]
    if min(counts) == max(counts):
        times = f"{most / least:.3g}" if least else "infinitely many"
        result.miss(
            f"targets of some microbatches count {times} times as much as those of others, by a"
            " factor of the script's own"
        )
        return None
    error = _error(rows, terms, found) if alone else None
    if error is not None and error < LEAST_ERROR:
        return error
    badness = most / least - 1 if error is None else error
    if math.isnan(badness):  # so is the loss
        return None
    off = "" if error is None else f"; the gradient is off by {error:.2g} of its size"
    result.find(
        Cause.MEAN_OF_MEANS,
        f"between {min(counts):.0f} and {max(counts):.0f} {terms[0].unit} a microbatch, each"
        f" microbatch with its own mean: a target counts up to {most / least:.3g} times as much as"
        f" another{off}",
        rows[0],
        line=terms[0].place[0],
        badness=badness,
    )
    return None


def _error(rows: Sequence[Row], terms: Sequence[Term], found: Sequence[float]) -> float | None:
    """Return the relative error of the applied gradient, compared with equal weights of all
    targets."""
    weight_of = {(term.rank, term.backward): term.weight for term in terms}
    if len(weight_of) != len(terms):
        return None
    total = _total(terms, found) / sum(term.count for term in terms)
    names = names_on_all_ranks(rows)
    applied: Vector = np.zeros(PROJECTIONS * len(names))
    right = applied.copy()
    for rank, row in enumerate(rows):
        for backward, sketches in row["added"].items():
            if (rank, backward) not in weight_of:
                return None
            parts = [finite_projection(sketches.get(name)) for name in names]
            added = np.concatenate(
                [np.zeros(PROJECTIONS) if each is None else each for each in parts]
            )
            applied += found[rank] * added
            right += total / abs(weight_of[rank, backward]) * added
    size = float(np.linalg.norm(right))
    return float(np.linalg.norm(applied - right)) / size if size else None


def _total(terms: Sequence[Term], found: Sequence[float]) -> float:
    return sum(abs(found[term.rank] * term.weight) * term.count for term in terms)


def _check_scale(
    result: AreaResult,
    records: Records,
    rows: Sequence[Row],
    terms: Sequence[Term],
    found: Sequence[float],
) -> bool:
    """Find gradients that are wrong by an integer factor."""
    total = _total(terms, found)
    if not total or any(row["clip"] is not None and row["clip"]["scaled"] for row in rows):
        return False
    if _gathers_before(records, terms[0]):
        result.miss("the loss is taken over what all ranks gathered: its scale is not judged")
        return False
    ranks, backwards = len(rows), len({term.microbatch for term in terms if term.rank == 0})
    is_mean = all(term.reduction == "mean" for term in terms)
    divided_by = None if is_mean else _denominator(terms, ranks, backwards)
    if not is_mean and divided_by is None:
        result.miss(
            "the loss is a sum over targets that is not divided by their number: its scale is the"
            f" script's own, and the reduction gives {found[0]:.3g} × the sum over all ranks"
        )
        return False
    if _is(total, 1.0):
        return True
    plain = all(term.weight * term.count > 1 - FACTOR_TOLERANCE for term in terms)
    divisors = {each for row in records.ranks[0].of("backward") for each in row["divisors"]}
    twice = next(
        (n for n in (ranks, backwards) if n > 1 and _is(total * n, 1.0) and n in divisors), 0
    )
    count = sum(term.count for term in terms)
    # with equal counts on two ranks, half of a mean is the same as a sum divided by both counts
    knows_count = len({term.count for term in terms}) > 1 or count in divisors
    line = ""
    if backwards > 1 and _is(total, backwards) and plain:
        text = (
            f"a step adds up the means of {backwards} microbatches and does not divide: the"
            f" gradient is {backwards} times too large"
        )
    elif ranks > 1 and _is(total / ranks, 1.0):
        line = _reduction_line(records, terms[0])
        text = (
            f"the {ranks} ranks' gradients are added up, and not divided: the gradient is {ranks}"
            " times too large"
        )
    elif backwards > 1 and _is(total, ranks * backwards):
        text = (
            f"the gradient is {ranks * backwards} times too large: {ranks} ranks and {backwards}"
            " microbatches are added up"
        )
    elif ranks > 1 and divided_by == "all" and _is(total * ranks, 1.0) and knows_count:
        text = (
            f"each rank divides its sum by the {count:.0f} targets of all ranks, and the reduction"
            f" divides by {ranks} again: the gradient is {ranks} times too small"
        )
    elif twice:
        text = (
            f"the loss is divided by {twice} once more than the reduction needs: the gradient is"
            f" {twice} times too small"
        )
    else:
        result.miss(
            f"the weights of a step add up to {total:.3g}, by a factor of the script's own: its"
            " scale is not judged"
        )
        return False
    line = line or first_line(_rows_from(records, terms[0]))
    result.find(Cause.WRONG_SCALE, text, rows[0], line=line)
    return False


def _denominator(terms: Sequence[Term], ranks: int, backwards: int) -> str | None:
    """Return the kind of number by which each sum over targets is divided, such as the targets of
    the microbatch or of all ranks."""
    count = sum(term.count for term in terms)
    kinds = {
        "microbatch": [term.count for term in terms],
        "microbatches": [term.count * backwards for term in terms],
        "rank": [sum(each.count for each in terms if each.rank == term.rank) for term in terms],
        "all": [count] * len(terms),
        "share": [count / ranks] * len(terms),
    }
    for kind, counts in kinds.items():
        if all(_is(abs(term.weight) * each, 1.0) for term, each in zip(terms, counts, strict=True)):
            return kind
    return None


def _check_gathered(
    result: AreaResult, records: Records, rows: Sequence[Row], found: Sequence[float]
) -> None:
    """Find a loss over values that were gathered without gradients.

    All ranks compute the same loss, but each rank has only the gradient of its own values. The sum
    of the gradients over the ranks is right, and their mean is too small.
    """
    ranks = len(rows)
    if ranks < 2 or not all(_is(each, 1 / ranks) for each in found):
        return
    windows = [_windows(rank, row) for rank, row in zip(records.ranks, rows, strict=True)]
    for each in zip(*windows, strict=False):
        values = [value for value, _, _ in each]
        if not all(_is_same_loss(value, values[0]) for value in values):
            continue
        gathers = [list(filter(_gathers_values, before)) for _, before, _ in each]
        if all(gathers) and not any(after for _, _, after in each):
            result.find(
                Cause.WRONG_SCALE,
                f"all {ranks} ranks compute one loss over what they gathered, no gradient goes back"
                f" to the rank that it is of, and the reduction divides by {ranks}: the gradient is"
                f" {ranks} times too small",
                rows[0],
                line=gathers[0][-1]["line"],
            )


def _windows(rank: Rank, step: Row) -> list[tuple[float | None, list[Row], list[Row]]]:
    """Return, for each backward pass, its loss, the collectives called before it, and the
    collectives called in it."""
    found: list[tuple[float | None, list[Row], list[Row]]] = []
    before: list[Row] = []
    for row in rank.of("backward", "collective", "step"):
        if row["kind"] != "collective":
            if str(row.get("number")) in step["added"]:
                found.append((row["value"], before, []))
            before = []
        elif row["in_backward"] and found:
            found[-1][2].append(row)
        else:
            before.append(row)
        if row["place"] > step["place"]:
            break
    return found


def _is_same_loss(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return False
    return abs(one - other) <= 1e-5 * max(abs(one), abs(other))


def _is(value: float, factor: float) -> bool:
    return abs(value - factor) < FACTOR_TOLERANCE * factor


def _gathers_values(row: Row) -> bool:
    return row["name"] in GATHERS and row["floats"] > 1


def _gathers_before(records: Records, term: Term) -> bool:
    gathers = False
    for row in records.ranks[term.rank].of("backward", "collective", "step"):
        if str(row.get("number")) == term.backward:
            return gathers
        gathers = row["kind"] == "collective" and (gathers or _gathers_values(row))
    return False


def _rows_from(records: Records, term: Term) -> list[Row]:
    rows = records.ranks[term.rank].of("backward", "collective", "step")
    numbers = [str(row.get("number")) for row in rows]
    return rows[numbers.index(term.backward) :] if term.backward in numbers else []


def _reduction_line(records: Records, term: Term) -> str:
    following = takewhile(lambda row: row["kind"] == "collective", _rows_from(records, term)[1:])
    return first_line(row for row in following if row["name"] == "all_reduce")
