"""Checks gradients: the factors with which those of all ranks enter the applied one, read from
linear sketches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.audit.checks.area_result import AreaResult
from lockstep.audit.finding import Area
from lockstep.audit.records import Records
from lockstep.audit.remedies import Cause
from lockstep.base.errors import first_few
from lockstep.evidence.fit import fit
from lockstep.evidence.rows import Row
from lockstep.evidence.tensors import PROJECTIONS, Vector, finite_projection, sketch_difference

FIT = 0.02
"""Largest part of a gradient that is left unexplained by the ranks' own."""
NEGLIGIBLE = 1e-3
"""Factors relative to the largest one that count as zero; and gradients relative to the whole."""
LEAST_ALIKE = 2
"""Steps with equal gradients on all ranks from which they are no accident."""
EVEN = 0.02
"""Relative difference of factors that counts as none."""


@dataclass(frozen=True, slots=True)
class Factors:
    """The factors with which one rank's gradient holds those of all ranks, of the same names."""

    values: list[float]
    residual: float

    @property
    def fits(self) -> bool:
        return self.residual < FIT

    @property
    def even(self) -> float | None:
        """The factor of all ranks if they have one; else None."""
        largest, smallest = max(self.values), min(self.values)
        return (
            float(np.mean(self.values)) if largest > 0 and smallest > (1 - EVEN) * largest else None
        )

    def is_own_only(self, rank: int) -> bool:
        """True if only this rank's own gradient is in it."""
        own = abs(self.values[rank])
        return own > 0 and all(
            abs(each) < NEGLIGIBLE * own
            for number, each in enumerate(self.values)
            if number != rank
        )


def check_applied_gradients(records: Records) -> AreaResult:
    result = AreaResult(Area.GRADIENTS)
    seen = steps = alike = 0
    for rows in records.together():
        steps += 1
        step = rows[0]["index"]
        if rows[0]["several_closures"]:
            result.miss(f"{rows[0]['type']} computes several gradients in a step")
            continue
        if broken := _not_finite(rows, "applied"):
            result.miss(f"gradients are NaN or infinite in step {step}: {first_few(broken)}")
            _check_finite(result, rows, step)
            break
        _check_stale(result, rows)
        _check_clipping(result, rows)
        if len(rows) > 1:
            _check_unused(result, rows)
            _check_local_clipping(result, rows)
        seen += _check_reduction(result, rows, step)
        if len(rows) < 2:
            continue
        alike += _are_alike(rows) and _have_equal_losses(records, rows)
        if alike == LEAST_ALIKE:
            result.find_at(
                rows[0],
                Cause.SAME_SAMPLES,
                "the backwards of all ranks gave the same gradient, to the last"
                " digits: all ranks have the same batch",
                line=rows[0]["backward_line"],
            )
    _check_wasted(result, records)
    _check_untrained(result, records)
    if records.steps and not steps:
        result.miss("no optimizer step was taken by all ranks together")
    sketches = [
        sketch
        for rows in records.together()
        for row in rows
        for sketch in row["applied"].values()
        if sketch
    ]
    if steps and not sketches:
        result.miss("no gradient was seen at the steps of the optimizer")
    elif steps and not any(sketch[-1] for sketch in sketches):
        result.miss("every gradient is zero: the script learns nothing")
    if seen:
        whose = (
            "the gradients of all ranks with one factor"
            if records.world_size > 1
            else "the gradient of their own backwards"
        )
        result.right = f"{seen}{'' if seen == steps else f' of {steps}'} steps apply {whose}"
    return result


def _not_finite(rows: Sequence[Row], sketches: str) -> list[str]:
    return list(
        dict.fromkeys(
            name
            for row in rows
            for name, each in row[sketches].items()
            if each and not np.isfinite(each).all()
        )
    )


def _check_finite(result: AreaResult, rows: Sequence[Row], step: int) -> None:
    for sketches, when, line in (
        ("before", "before the first step", rows[0]["made_at"]),
        ("parameters", f"after step {step}, whose gradient was not finite,", rows[0]["line"]),
    ):
        if names := _not_finite(rows, sketches):
            text = (
                f"{when} {len(names)} of {len(rows[0]['parameters'])} parameters are NaN or"
                f" infinite: {first_few(names)}"
            )
            result.find(
                Cause.NOT_FINITE, text, line=line or rows[0]["line"], step=step, names=names
            )
            return


def before_clipping(row: Row, name: str) -> list[float] | None:
    """The sketch of a gradient as it was reduced: before it was clipped, where that was seen."""
    clip = row["clip"]
    if clip is not None and clip["reduced"].get(name) is not None:
        sketch: list[float] = clip["reduced"][name]
        return sketch
    return row["applied"].get(name)  # type: ignore[no-any-return]


def own_sums(row: Row, names: Iterable[str], backwards: slice = slice(None)) -> dict[str, Vector]:
    """The sum of what this rank's backwards, or some of them, added to each gradient since the last
    step."""
    sums: dict[str, Vector] = {}
    for name in names:
        parts = [
            part
            for each in list(row["added"].values())[backwards]
            if (part := finite_projection(each.get(name))) is not None
        ]
        sums[name] = np.sum(parts, axis=0) if parts else np.zeros(PROJECTIONS)
    return sums


def reduced_of(rows: Sequence[Row], rank: int, name: str) -> Vector | None:
    """The reduced gradient that a rank applies, whole."""
    shards = [
        before_clipping(row, name)
        if row["clip"] is None or name not in row["sharded"]
        else row["reduced"].get(name)
        for row in rows
    ]
    return whole_projection(rows, rank, name, shards)


def whole_projection(
    rows: Sequence[Row], rank: int, name: str, sketches: Sequence[list[float] | None]
) -> Vector | None:
    """The projection of a rank's tensor, given all ranks' sketches; of a sharded one the sum of the
    shards. None if one is missing or not finite."""
    if name not in rows[rank]["sharded"]:
        return finite_projection(sketches[rank])
    shards = [each for sketch in sketches if (each := finite_projection(sketch)) is not None]
    return np.sum(shards, axis=0) if len(shards) == len(rows) else None


def factors(rows: Sequence[Row], rank: int, names: Sequence[str]) -> Factors | None:
    """Fit the reduced gradients of these names by the ranks' own. None if those are too alike, or
    there are none."""
    sums = [own_sums(row, names) for row in rows]
    return _fit(rows, rank, names, sums)


def last_factors(rows: Sequence[Row], rank: int, names: Sequence[str]) -> Factors | None:
    """The same for the last backward of each rank alone, fitted together with those before it."""
    sums = [
        own_sums(row, names, backwards)
        for backwards in (slice(-1, None), slice(0, -1))
        for row in rows
    ]
    found = _fit(rows, rank, names, sums)
    return None if found is None else Factors(found.values[: len(rows)], found.residual)


def _fit(
    rows: Sequence[Row], rank: int, names: Sequence[str], sums: Sequence[dict[str, Vector]]
) -> Factors | None:
    reduced = {name: reduced_of(rows, rank, name) for name in names}
    applied = {name: each for name, each in reduced.items() if each is not None}
    if not applied:
        return None
    columns = [np.concatenate([each[name] for name in applied]) for each in sums]
    found = fit(columns, np.concatenate(list(applied.values())))
    return None if found is None else Factors(found.factors, found.residual)


def names_on_all_ranks(rows: Sequence[Row]) -> list[str]:
    """The parameters that every rank has, with a gradient on one of them at least."""
    common = set.intersection(*(set(row["applied"]) for row in rows))
    return [
        name
        for name in rows[0]["applied"]
        if name in common and any(row["applied"][name] is not None for row in rows)
    ]


def _check_reduction(result: AreaResult, rows: Sequence[Row], step: int) -> bool:
    """Find parameters whose gradient is not that of all ranks.

    True if all ranks' gradients have one factor. Why that was not seen is added to `result`.
    """
    names = names_on_all_ranks(rows)
    is_right = True
    for rank in range(len(rows)):
        whole = factors(rows, rank, names)
        is_even = whole is not None and whole.fits and whole.even is not None
        is_right = is_right and is_even
        local = [
            name for name in names if _is_own_only(rows, rank, name) and _matters(rows, rank, name)
        ]
        if (
            whole is not None
            and not whole.fits
            and not local
            and all(len(row["added"]) > 1 for row in rows)
        ):
            last = last_factors(rows, rank, names)
            if last is not None and last.fits and last.is_own_only(rank):
                local = names
        if local and not all(_is_same(rows, name) for name in local):
            is_right = False
            clip = rows[rank]["clip"]
            if clip is not None and _is_reduced_after_clip(rows, rank, local):
                result.find_at(
                    rows[0],
                    Cause.LOCAL_CLIPPING,
                    f"rank {rank} clipped its own gradient (norm"
                    f" {_text(clip.get('norm'))}), reduced only afterwards",
                    line=clip["line"],
                )
                continue
            part = "every parameter" if len(local) == len(names) else first_few(local)
            result.find_at(
                rows[rank],
                Cause.NOT_REDUCED,
                f"the gradient that rank {rank} applies to {part} holds its own"
                f" backward alone: {_list(factors(rows, rank, local[:1]))}",
                line=rows[rank]["backward_line"],
                names=local,
            )
        elif not is_even and any(
            each and each[-1] for row in rows for each in row["applied"].values()
        ):
            result.miss(_why_unclear(whole, rows, step))
    return is_right


def _why_unclear(whole: Factors | None, rows: Sequence[Row], step: int) -> str:
    if whole is None:
        if not any(row["added"] for row in rows):
            return "what backwards add to gradients was not seen"
        return "gradients before their reduction were not seen, or were the same on all ranks"
    if whole.fits:
        return (
            f"step {step}: the ranks' gradients are applied with factors of the script's own:"
            f" {_list(whole)}"
        )
    return (
        f"step {step}: {whole.residual:.2g} of the applied gradient is not a sum of what the"
        " backwards added"
    )


def _is_own_only(rows: Sequence[Row], rank: int, name: str) -> bool:
    found = factors(rows, rank, [name])
    return found is not None and found.fits and found.is_own_only(rank)


def _is_reduced_after_clip(rows: Sequence[Row], rank: int, names: Sequence[str]) -> bool:
    return (
        all(
            sketch_difference(rows[0]["applied"][name], rows[rank]["applied"][name]) < 1e-4
            for name in names
        )
        and len(rows) > 1
    )


def _are_alike(rows: Sequence[Row]) -> bool:
    names = names_on_all_ranks(rows)
    return (
        bool(names)
        and any(own_sums(rows[0], names)[name].any() for name in names)
        and all(_is_same(rows, name) for name in names)
    )


def _have_equal_losses(records: Records, rows: Sequence[Row]) -> bool:
    """True if the last backwards of all ranks began from one value. (A hook of the script may
    reduce gradients before they are seen: then they are alike, although the batches are not.)"""
    values = []
    for rank, row in zip(records.ranks, rows, strict=True):
        last = max(int(number) for number in row["added"])
        values.append(
            next((each["value"] for each in rank.of("backward") if each["number"] == last), None)
        )
    return all(each == values[0] for each in values)


def _matters(rows: Sequence[Row], rank: int, name: str) -> bool:
    """True if other ranks added to this gradient too: else the rank's own is all there is."""
    own = [np.linalg.norm(own_sums(row, [name])[name]) for row in rows]
    return bool(
        max((each for number, each in enumerate(own) if number != rank), default=0.0)
        > NEGLIGIBLE * own[rank]
    )


def _is_same(rows: Sequence[Row], name: str) -> bool:
    sums = [own_sums(row, [name])[name] for row in rows]
    return all(np.linalg.norm(each - sums[0]) <= 1e-6 * np.linalg.norm(sums[0]) for each in sums)


def _check_stale(result: AreaResult, rows: Sequence[Row]) -> None:
    for rank, row in enumerate(rows):
        if row["stale"]:
            result.find_at(
                row,
                Cause.STALE_GRADIENTS,
                f"on rank {rank} the gradients of {first_few(row['stale'])} still held"
                " those of the step before when the next backward added to them",
                names=row["stale"],
            )


def _check_clipping(result: AreaResult, rows: Sequence[Row]) -> None:
    for row in rows:
        if row["clip"] is not None and row["clip"]["scaled"]:
            result.find_at(
                row,
                Cause.CLIPPED_SCALED,
                f"the norm was taken while gradients were multiplied by the loss scale"
                f" {row['scale']:g}: {_text(row['clip'].get('norm'))}",
                line=row["clip"]["line"],
            )
        backwards = [int(number) for number, added in row["added"].items() if added]
        early = [
            each
            for each in row["clipped"]
            if each["backward"] in backwards and each["backward"] < backwards[-1]
        ]
        if early:
            result.find_at(
                rows[0],
                Cause.LOCAL_CLIPPING,
                f"gradients were clipped after"
                f" {backwards.index(early[0]['backward']) + 1} of {len(backwards)} microbatches,"
                " before they were reduced",
                line=early[0]["line"],
            )


def _check_unused(result: AreaResult, rows: Sequence[Row]) -> None:
    common = set.intersection(*(set(row["applied"]) for row in rows))
    for name in (name for name in rows[0]["applied"] if name in common):
        missing = [
            rank
            for rank, row in enumerate(rows)
            if row["applied"][name] is None and name not in row["sharded"]
        ]
        if missing and len(missing) < len(rows):
            result.find_at(
                rows[missing[0]],
                Cause.UNUSED_PARAMETER,
                f"{name} has a gradient on some ranks, and none on rank {missing[0]},"
                " which does not update it",
                names=[name],
            )


def _check_local_clipping(result: AreaResult, rows: Sequence[Row]) -> None:
    """Find norms of a part of the gradient: ranks then clip by different factors."""
    norms = [
        norm
        for row in rows
        if row["clip"] is not None and isinstance(norm := row["clip"].get("norm"), float)
    ]
    line = rows[0]["clip"]["line"] if rows[0]["clip"] is not None else rows[0]["line"]
    if len(norms) == len(rows) and max(norms) - min(norms) > 1e-4 * max(norms):
        if not any(row["sharded"] for row in rows) and _is_local(rows):
            return  # not reduced, or reduced after it: that is said elsewhere
        texts = ", ".join(f"{each:.4g}" for each in norms)
        result.find_at(
            rows[0],
            Cause.LOCAL_CLIPPING,
            f"the norms by which the ranks clipped differ: {texts}",
            line=line,
        )
    ratios = [ratio for row in rows if (ratio := _clip_ratio(row)) is not None]
    if len(ratios) == len(rows) and max(ratios) - min(ratios) > EVEN * max(ratios):
        texts = ", ".join(f"{each:.4g}" for each in ratios)
        result.find_at(
            rows[0],
            Cause.LOCAL_CLIPPING,
            f"the ranks multiplied their shards of one gradient by different factors: {texts}",
            line=line,
        )


def _is_local(rows: Sequence[Row]) -> bool:
    found = [factors(rows, rank, names_on_all_ranks(rows)) for rank in range(len(rows))]
    return any(
        each is not None and each.fits and each.is_own_only(rank) for rank, each in enumerate(found)
    )


def _clip_ratio(row: Row) -> float | None:
    names = [
        name for name in row["sharded"] if row["reduced"].get(name) and row["applied"].get(name)
    ]
    before = np.sqrt(sum(row["reduced"][name][-1] for name in names))
    after = np.sqrt(sum(row["applied"][name][-1] for name in names))
    return float(after / before) if before else None


def _check_wasted(result: AreaResult, records: Records) -> None:
    for rank in records.ranks:
        reducing, line, counts, before = set[int](), "", Counter[int](), set[str]()
        for row in rank.rows:
            if row["kind"] == "ddp_forward":
                line = row["line"]
                reducing = (
                    reducing | {row["wrapper"]} if row["reduces"] else reducing - {row["wrapper"]}
                )
            elif row["kind"] == "backward":
                counts.update(reducing)
                reducing = set()
                before.add(str(row["number"]))
            elif row["kind"] == "step":
                count = max(counts.values(), default=0)
                several = sum(
                    1 for number, each in row["added"].items() if each and number in before
                )
                if count > 1 and several > 1:
                    result.find_at(
                        row,
                        Cause.REDUCED_EVERY_MICROBATCH,
                        f"rank {rank.rank} reduced its gradients {count} times"
                        f" in a step of {several} backwards",
                        line=line,
                    )
                counts, before = Counter(), set()


def _check_untrained(result: AreaResult, records: Records) -> None:
    for rank in records.ranks:
        for row in rank.steps:
            if names := row.get("untrained"):
                result.find(
                    Cause.NOT_TRAINED,
                    f"{len(names)} parameters of the model have gradients and are in no optimizer:"
                    f" {first_few(names)}",
                    line=row["line"],
                    step=row["index"],
                    names=names,
                )


def _list(found: Factors | None) -> str:
    if found is None or not found.fits:
        return "that of its last microbatch is not reduced"
    return " + ".join(
        f"{0.0 if abs(value) < 1e-6 else value:.3g} × rank {number}'s"
        for number, value in enumerate(found.values)
    )


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "not seen"
