"""Checks mixtures of experts: experts that ranks divide among them, routers, and balance losses.

Ranks that divide experts exchange tokens by `all_to_all`. A rank's experts compute tokens of all
ranks, so the experts' gradient is a sum over all ranks. The gradient of experts must be scaled like
the other gradients, which are summed by a reduction.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.audit.checks.gradients import (
    EVEN_TOLERANCE,
    Factors,
    factors,
    names_on_all_ranks,
)
from lockstep.audit.finding import Area, AreaResult, Cause
from lockstep.audit.records import Rank, Records
from lockstep.base.errors import first_few
from lockstep.evidence.rows import Row
from lockstep.evidence.tensors import sketch_difference

ROUNDING_TOLERANCE = 1e-5
"""Largest relative difference of tensors that differ only by rounding."""
NORM_TOLERANCE = 1e-3
LIMIT_TOLERANCE = 1e-4
"""Largest relative difference between gradient norms that were clipped to the same limit."""
REPEATED = 3
"""A gradient norm that is equal in this many steps was clipped."""
BALANCE = 5e-3
"""A balance loss is reported if the ranks' loads of experts differ by at least this fraction."""
NAMED = "expert"
"""The name of an expert's parameter contains this word."""
Norms = NDArray[np.float64]
_ROUTER = re.compile(r"^(?P<layer>.*?)\.?(?:router|gate|gating|wg)(?:\.|$)(?!.*_proj)")
_SKETCHES = ("applied", "reduced", "before", "parameters", "states", "states_before")
_LISTS = ("sharded", "stale", "unused")


@dataclass(frozen=True, slots=True)
class Divided:
    """The records of a run, split into the parameters of divided experts and all other
    parameters."""

    experts: Records
    others: Records
    groups: Sequence[tuple[int, ...]]
    """Groups of ranks that exchange tokens by `all_to_all`; empty without divided experts."""

    def group_of(self, rank: int) -> tuple[int, ...]:
        return next((group for group in self.groups if rank in group), (rank,))

    def copies_of(self, rank: int) -> list[int]:
        place = self.group_of(rank).index(rank)
        return [group[place] for group in self.groups if len(group) > place] or [rank]

    @property
    def names(self) -> list[str]:
        rows = [row for rank in self.experts.ranks for row in rank.steps]
        return list(dict.fromkeys(name for row in rows for name in row["applied"]))


def divided(records: Records) -> Divided:
    calls = (row for rank in records.ranks for row in rank.of("collective"))
    exchanges = {
        tuple(row["ranks"])
        for row in calls
        if row["name"].startswith("all_to_all") and len(row["ranks"]) > 1
    }
    groups = sorted(exchanges, key=lambda group: (len(group), group))
    groups = [each for each in groups if len(each) == len(groups[0])]
    names = _experts(records, groups) if groups else set[str]()
    return Divided(
        _only(records, names, kept=True), _only(records, names, kept=False), groups if names else []
    )


def _experts(records: Records, groups: Sequence[tuple[int, ...]]) -> set[str]:
    """Return the names of the experts' parameters.

    An expert exists on some ranks only, or differs between ranks and is not reduced over `groups`.
    An expert that is wrongly reduced is found by its name.
    """
    experts: set[str] = set()
    for rows in (rows for rows in records.together() if rows[0]["index"] == 0):
        for name in dict.fromkeys(name for row in rows for name in row["applied"]):
            held = [rank for rank, row in enumerate(rows) if name in row["applied"]]
            if any(name in rows[rank]["sharded"] for rank in held):
                continue
            if len(held) < len(rows):
                experts.add(name)
                continue
            differs = any(_differ(rows[0], row, "before", name) for row in rows[1:])
            of = factors(rows, 0, [name])
            group = next((each for each in groups if 0 in each), ())
            is_own = not of.fits or not any(of.uses(rank) for rank in group if rank)
            is_named = NAMED in name.lower() and "shared" not in name.lower()
            # A parameter that is equal on all ranks, has the rank's own gradient only, and is not
            # named like an expert is no expert: its gradient was not reduced.
            if (differs and (is_own or is_named)) or (is_named and of.fits and is_own):
                experts.add(name)
    return experts


def _differ(one: Row, other: Row, kind: str, name: str) -> bool:
    return sketch_difference(one[kind].get(name), other[kind].get(name)) > ROUNDING_TOLERANCE


def _only(records: Records, names: set[str], *, kept: bool) -> Records:
    if not names and not kept:
        return records

    def chosen(sketches: Mapping[str, object]) -> dict[str, object]:
        return {
            name: each
            for name, each in sketches.items()
            if (name.partition("/")[0] in names) == kept
        }

    def changed(row: Row) -> Row:
        if row["kind"] != "step":
            return row
        clip = row["clip"]
        return {
            **row,
            **{kind: chosen(row[kind]) for kind in _SKETCHES if kind in row},
            **{kind: [each for each in row[kind] if (each in names) == kept] for kind in _LISTS},
            "added": {backward: chosen(each) for backward, each in row["added"].items()},
            "clip": None if clip is None else {**clip, "reduced": chosen(clip["reduced"])},
        }

    ranks = [Rank(rank.rank, [changed(row) for row in rank.rows]) for rank in records.ranks]
    return Records(ranks, records.fetches, records.problems)


def check_experts(records: Divided) -> AreaResult:
    result = AreaResult(Area.EXPERTS)
    names = records.names
    if names:
        others = {
            (rows[0]["index"], rank): factors(rows, rank, names_on_all_ranks(rows)).even
            for rows in records.others.together()
            for rank in range(len(rows))
        }
        are_even = []
        for rows in records.experts.together():
            _check_copies(result, records, rows)
            _check_alike(result, records, rows)
            are_even.append(_check_factor(result, records, rows, others))
        for rows, of_others in zip(
            records.experts.together(), records.others.together(), strict=False
        ):
            _check_norm(result, records, rows, of_others)
        _check_scaled_norm(result, records, are_even)
        if any(are_even):
            result.right = (
                f"{len(names)} parameters of experts are divided among ranks"
                f" {', '.join(map(str, records.groups[0]))}; {sum(are_even)} steps apply their"
                " gradients with the factor of all others"
            )
    _check_routers(result, records)
    _check_balance(result, records.others)
    return result


def _check_factor(
    result: AreaResult,
    records: Divided,
    rows: Sequence[Row],
    others: Mapping[tuple[int, int], float | None],
) -> bool:
    is_right = True
    for rank, row in enumerate(rows):
        expected = others.get((row["index"], rank))
        for name in (name for name, each in row["applied"].items() if each and each[-1]):
            found = factors(rows, rank, [name])
            mixed = [each for each in records.group_of(rank) if each != rank and found.uses(each)]
            if found.fits and mixed:
                result.find(
                    Cause.EXPERTS_MIXED,
                    f"rank {rank} applies to {name} {_sum_text(found)}, whose experts are others",
                    row,
                    line=row["backward_line"],
                    names=[name],
                )
                return False
            factor = found.mean_of(records.copies_of(rank))
            if factor is None or expected is None:
                is_right = False
                result.miss(_why_no_factor(found, row, name, expected))
                continue
            is_right &= _is_expected(result, rows, rank, name, factor / expected, expected)
    return is_right and any(row["applied"] for row in rows)


def _why_no_factor(found: Factors, row: Row, name: str, expected: float | None) -> str:
    step = row["index"]
    if expected is None:
        return f"step {step}: the factor of gradients that are not of experts was not seen"
    if not found.values:
        return f"what backwards add to the gradient of experts ({name}) was not seen"
    return f"step {step}: the gradient of {name} is no sum of what its copies' backwards added"


def _is_expected(
    result: AreaResult, rows: Sequence[Row], rank: int, name: str, ratio: float, expected: float
) -> bool:
    if abs(ratio - 1) <= EVEN_TOLERANCE:
        return True
    row = rows[rank]
    times = ratio if ratio > 1 else 1 / ratio
    if abs(times - round(times)) > EVEN_TOLERANCE * times or not 1 < round(times) <= len(rows) ** 2:
        result.miss(
            f"the gradients of experts count {ratio:.3g} times as much as others, by a factor of"
            " the script's own"
        )
        return False
    text = f"{round(times)}" if ratio > 1 else f"1/{round(times)}"
    result.find(
        Cause.EXPERT_GRADIENT_SCALE,
        f"rank {rank} applies the gradient of {name}, which holds the rows of all ranks,"
        f" {ratio * expected:.3g} times, and all other gradients {expected:.3g} times: that of"
        f" experts is {text} times what it should be",
        row,
        line=row["backward_line"],
        names=[name],
    )
    return False


def _sum_text(found: Factors) -> str:
    terms = enumerate(found.values)
    return " + ".join(f"{value:.3g} × rank {rank}'s" for rank, value in terms if found.uses(rank))


def _check_copies(result: AreaResult, records: Divided, rows: Sequence[Row]) -> None:
    for rank, row in enumerate(rows):
        for copy in (each for each in records.copies_of(rank) if each < rank):
            for kind, when in (
                ("before", "before the first step"),
                ("parameters", "after the step"),
            ):
                for name in row[kind]:
                    if not _differ(rows[copy], row, kind, name):
                        continue
                    group = records.group_of(rank)
                    result.find(
                        Cause.EXPERT_COPIES_DIFFER,
                        f"{when} {name} differs between ranks {copy} and {rank}, which are both"
                        f" number {group.index(rank)} of the {len(group)} ranks that exchange"
                        " tokens",
                        row,
                        line=row["made_at"] if kind == "before" else row["line"],
                        names=[name],
                    )
                    return


def _check_alike(result: AreaResult, records: Divided, rows: Sequence[Row]) -> None:
    if rows[0]["index"]:
        return
    for group in records.groups:
        first, *others = [rows[rank] for rank in group]
        names = [name for name, values in first["before"].items() if values and values[-1]]
        if names and not any(
            name not in row["before"] or _differ(first, row, "before", name)
            for name in names
            for row in others
        ):
            result.find(
                Cause.EXPERTS_ALIKE,
                f"before the first step {first_few(names)} have the same values on ranks"
                f" {', '.join(map(str, group))}, each of which holds experts of its own",
                first,
                line=first["made_at"],
                names=names,
            )


def _check_norm(
    result: AreaResult, records: Divided, rows: Sequence[Row], others: Sequence[Row]
) -> None:
    clips = [row["clip"] for row in rows]
    if any(clip is None or clip.get("norm") is None for clip in clips):
        return
    calls = [each["backward"] for each in rows[0]["clipped"]]
    if calls.count(clips[0]["backward"]) > 1 or any(row["sharded"] for row in others):
        result.miss("the norm of shards, or of several calls of clipping, is not judged")
        return
    own = [
        _square(clip["reduced"] or row["applied"]) for row, clip in zip(rows, clips, strict=True)
    ]
    for rank, (clip, of_others) in enumerate(zip(clips, others, strict=True)):
        dense, group = _square(of_others["clip"]["reduced"]), records.group_of(rank)
        whole = math.sqrt(dense + sum(own[each] for each in group))
        for square, what in (
            (dense + own[rank], "of its own experts and of all other parameters"),
            (dense, "of the parameters that are no experts"),
        ):
            part = math.sqrt(square)
            if (
                abs(clip["norm"] - part) <= NORM_TOLERANCE * part
                and whole > (1 + NORM_TOLERANCE) * part
            ):
                result.find(
                    Cause.NORM_WITHOUT_EXPERTS,
                    f"rank {rank} clips by {clip['norm']:.4g}, the norm {what}; that of the whole"
                    f" gradient, with the experts of ranks {', '.join(map(str, group))}, is"
                    f" {whole:.4g}",
                    rows[rank],
                    line=clip["line"],
                )
                return


def _check_scaled_norm(result: AreaResult, records: Divided, are_even: Sequence[bool]) -> None:
    """Find gradients that the script clips by a norm without some experts.

    After clipping, the clipped norm has the same value in several steps, and the norm of all
    gradients varies.
    """
    seen: list[Sequence[Row]] = []
    whole: list[Norms] = []
    own: list[Norms] = []
    dense: list[Norms] = []
    steps = zip(records.experts.together(), records.others.together(), are_even, strict=False)
    for rows, others, is_even in steps:
        if any(row["clip"] is not None or row["sharded"] for row in (*rows, *others)):
            return
        if not is_even:
            continue
        seen.append(rows)
        of_others = [_square(row["applied"]) for row in others]
        of_each = [_square(row["applied"]) for row in rows]
        of_all = [
            sum(of_each[each] for each in records.group_of(rank)) for rank in range(len(rows))
        ]
        whole.append(np.sqrt(np.add(of_others, of_all)))
        own.append(np.sqrt(np.add(of_others, of_each)))
        dense.append(np.sqrt(of_others))
    if _steps_alike(whole):
        return
    for norms, what in (
        (own, "of its own experts and of all other parameters"),
        (dense, "of the parameters that are no experts"),
    ):
        if not (alike := _steps_alike(norms)):
            continue
        first = alike[0]
        of_ranks = np.asarray(norms[first])
        # the first rank of those whose norms differ by rounding
        rank = int(np.isclose(of_ranks, of_ranks.max(), atol=0).argmax())
        of_whole = [whole[step][rank] for step in alike]
        result.find(
            Cause.NORM_WITHOUT_EXPERTS,
            f"in {len(alike)} steps the norm {what} of rank {rank} is"
            f" {norms[first][rank]:.4g} when gradients are applied: they are scaled by it; that"
            " of the whole gradient, with the experts of ranks"
            f" {', '.join(map(str, records.group_of(rank)))}, is {min(of_whole):.4g} to"
            f" {max(of_whole):.4g}",
            seen[first][rank],
        )
        return


def _steps_alike(norms: Sequence[Norms]) -> list[int]:
    most = max((float(each.max()) for each in norms), default=0.0)
    found = [
        step
        for step, each in enumerate(norms)
        if most and most - each.max() <= LIMIT_TOLERANCE * most
    ]
    return found if len(found) >= REPEATED else []


def _square(gradients: Mapping[str, list[float] | None]) -> float:
    return sum(each[-1] for each in gradients.values() if each)


def _check_routers(result: AreaResult, records: Divided) -> None:
    sizes: dict[str, float] = {}
    first: dict[str, Row] = {}
    ranks = [*records.others.ranks, *records.experts.ranks]
    for row in (row for rank in ranks for row in rank.steps):
        for name, sketch in row["applied"].items():
            if sketch is not None or name in row["unused"]:
                sizes[name] = max(sizes.get(name, 0.0), sketch[-1] if sketch else 0.0)
                first.setdefault(name, row)
    lost = [
        name
        for name, size in sizes.items()
        if not size and (layer := _ROUTER.match(name)) and _has_experts(layer["layer"], sizes)
    ]
    if lost:
        row = first[lost[0]]
        result.find(
            Cause.ROUTER_WITHOUT_GRADIENT,
            f"{first_few(lost)} had no gradient in any step, or zeros, although the experts beside"
            " had one",
            row,
            line=row["backward_line"],
            names=lost,
        )


def _has_experts(layer: str, sizes: Mapping[str, float]) -> bool:
    start = f"{layer}." if layer else ""
    return any(
        size and name.startswith(start) and NAMED in name[len(start) :].lower()
        for name, size in sizes.items()
    )


def _check_balance(result: AreaResult, records: Records) -> None:
    """Find balance losses in which each rank counts only its own tokens."""
    seen = 0
    for rows in zip(*(rank.of("balance") for rank in records.ranks), strict=False):
        for loads in zip(*(row["loads"] for row in rows), strict=False):
            shares = [np.asarray(load) / max(sum(load), 1e-30) for load in loads]
            if len(shares) < 2 or len({len(share) for share in shares}) > 1:
                continue
            seen += 1
            mean = np.mean(shares, axis=0)
            off = max(float(np.linalg.norm(each - mean) / np.linalg.norm(mean)) for each in shares)
            if off > BALANCE:
                most = int(np.abs(shares[0] - mean).argmax())
                result.find(
                    Cause.BALANCE_OF_OWN_TOKENS,
                    f"the balance loss of backward {rows[0]['number']} takes the load of experts"
                    f" from each rank's own tokens: expert {most} has"
                    f" {', '.join(f'{each[most]:.3g}' for each in shares)} of the choices on ranks"
                    f" 0 to {len(shares) - 1}; the ranks' loads differ by up to {off:.2g} of their"
                    " size from their mean",
                    line=rows[0]["line"],
                    badness=off,
                )
    if seen and not result.findings:
        text = f"{seen} balance losses take one load of experts on all ranks"
        result.right = f"{result.right}; {text}" if result.right else text
