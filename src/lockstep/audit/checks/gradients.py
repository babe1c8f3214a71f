"""Checks the gradients that optimizers apply. An applied gradient is a weighted sum of the ranks'
gradients. The weights are fitted to random projections of the gradients."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lockstep.audit.finding import Area, AreaResult, Cause
from lockstep.audit.records import Records
from lockstep.base.errors import first_few
from lockstep.evidence.rows import Row
from lockstep.evidence.tensors import PROJECTIONS, Vector, finite_projection, fit, sketch_difference

FIT = 0.02
"""Largest relative residual of a fit of an applied gradient."""
NEGLIGIBLE = 1e-3
LEAST_ALIKE = 2
"""If gradients are equal on all ranks in this many steps, all ranks have the same batch."""
EVEN_TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class Factors:
    """The factor of each rank's gradient in the gradient that one rank applies."""

    values: list[float] = field(default_factory=list)
    """One factor for each rank; empty if the ranks' gradients are unknown or too similar."""
    residual: float = math.inf

    @property
    def fits(self) -> bool:
        return self.residual < FIT

    @property
    def even(self) -> float | None:
        """The factor of all ranks; None if it differs between ranks or is not positive."""
        if not self.fits or min(self.values) <= (1 - EVEN_TOLERANCE) * max(self.values):
            return None
        return float(np.mean(self.values)) if max(self.values) > 0 else None

    def uses(self, rank: int) -> bool:
        sizes = [abs(each) for each in self.values]
        return self.fits and sizes[rank] > NEGLIGIBLE * max(sizes)

    def mean_of(self, ranks: Sequence[int]) -> float | None:
        used = [rank for rank in range(len(self.values)) if self.uses(rank)]
        values = [self.values[rank] for rank in used]
        if (
            not used
            or not set(used) <= set(ranks)
            or min(values) <= (1 - EVEN_TOLERANCE) * max(values)
        ):
            return None
        return float(np.mean(values))

    def is_own_only(self, rank: int) -> bool:
        sizes = [abs(each) for each in self.values]
        return self.fits and all(
            (size > 0) if number == rank else (size < NEGLIGIBLE * sizes[rank])
            for number, size in enumerate(sizes)
        )


def check_applied_gradients(records: Records) -> AreaResult:
    result = AreaResult(Area.GRADIENTS)
    seen = steps = alike = 0
    for rows in records.together():
        steps += 1
        if rows[0]["several_closures"]:
            result.miss(f"{rows[0]['type']} computes several gradients in a step")
            continue
        if broken := _not_finite(rows, "applied"):
            step = rows[0]["index"]
            result.miss(f"gradients are NaN or infinite in step {step}: {first_few(broken)}")
            _check_finite(result, rows)
            break
        _check_stale(result, rows)
        _check_clipping(result, rows)
        if len(rows) > 1:
            _check_unused(result, rows)
            _check_local_clipping(result, rows)
        seen += _check_reduction(result, rows)
        alike += len(rows) > 1 and _are_alike(rows) and _have_equal_losses(records, rows)
        if alike == LEAST_ALIKE:
            result.find(
                Cause.SAME_SAMPLES,
                "the backwards of all ranks gave the same gradient, to the last digits: all ranks"
                " have the same batch",
                rows[0],
                line=rows[0]["backward_line"],
            )
    _check_wasted(result, records)
    _check_untrained(result, records)
    if not steps:
        if records.steps:
            result.miss("no optimizer step was taken by all ranks together")
        return result
    sketches = [
        each for rows in records.together() for row in rows for each in row["applied"].values()
    ]
    if not any(sketches):
        result.miss("no gradient was seen at the steps of the optimizer")
    elif not any(each[-1] for each in sketches if each):
        result.miss("every gradient is zero: the script learns nothing")
    if seen:
        several = records.world_size > 1
        result.right = (
            f"{seen}{'' if seen == steps else f' of {steps}'} steps apply the gradient"
            f"{'s of all ranks with one factor' if several else ' of their own backwards'}"
        )
    return result


def _not_finite(rows: Sequence[Row], kind: str) -> list[str]:
    named = (item for row in rows for item in row[kind].items())
    return list(dict.fromkeys(name for name, each in named if each and not _is_finite(each)))


def _is_finite(sketch: list[float]) -> bool:
    return bool(np.isfinite(sketch).all())


def _check_finite(result: AreaResult, rows: Sequence[Row]) -> None:
    step, line = rows[0]["index"], rows[0]["line"]
    for kind, when, at in (
        ("before", "before the first step", rows[0]["made_at"]),
        ("parameters", f"after step {step}, whose gradient was not finite,", line),
    ):
        if names := _not_finite(rows, kind):
            text = (
                f"{when} {len(names)} of {len(rows[0]['parameters'])} parameters are NaN or"
                f" infinite: {first_few(names)}"
            )
            result.find(Cause.NOT_FINITE, text, line=at or line, step=step, names=names)
            return


def own_sum(row: Row, name: str, backwards: slice = slice(None)) -> Vector:
    parts = (finite_projection(each.get(name)) for each in list(row["added"].values())[backwards])
    total: Vector = sum((each for each in parts if each is not None), np.zeros(PROJECTIONS))
    return total


def reduced_of(rows: Sequence[Row], rank: int, name: str) -> Vector | None:
    """Return the projection of the reduced gradient that a rank applies, if possible before
    clipping."""
    sketches = []
    for row in rows:
        sketch = row["applied"].get(name)
        if row["clip"] is not None:
            if name in row["sharded"]:
                sketch = row["reduced"].get(name)
            else:
                sketch = row["clip"]["reduced"].get(name) or sketch
        sketches.append(sketch)
    return whole_projection(rows, rank, name, sketches)


def whole_projection(
    rows: Sequence[Row], rank: int, name: str, sketches: Sequence[list[float] | None]
) -> Vector | None:
    """Return the projection of a tensor. For a sharded tensor, add the projections of all
    shards."""
    if name not in rows[rank]["sharded"]:
        return finite_projection(sketches[rank])
    shards = [each for sketch in sketches if (each := finite_projection(sketch)) is not None]
    return np.sum(shards, axis=0) if len(shards) == len(rows) else None


def factors(
    rows: Sequence[Row], rank: int, names: Sequence[str], parts: Sequence[slice] = (slice(None),)
) -> Factors:
    """Fit the gradient that `rank` applies by a linear combination of the gradients of all ranks.
    Each of `parts`, a slice of a rank's backward passes, has its own factor."""
    reduced = {name: each for name in names if (each := reduced_of(rows, rank, name)) is not None}
    if not reduced:
        return Factors()
    columns = [
        np.concatenate([own_sum(row, name, part) for name in reduced])
        for part in parts
        for row in rows
    ]
    fitted = fit(columns, np.concatenate(list(reduced.values())))
    return Factors() if fitted is None else Factors(fitted.factors, fitted.residual)


def last_factors(rows: Sequence[Row], rank: int, names: Sequence[str]) -> Factors:
    found = factors(rows, rank, names, [slice(-1, None), slice(-1)])
    return Factors(found.values[: len(rows)], found.residual)


def names_on_all_ranks(rows: Sequence[Row]) -> list[str]:
    return [
        name
        for name in rows[0]["applied"]
        if all(name in row["applied"] for row in rows)
        and any(row["applied"][name] is not None for row in rows)
    ]


def _check_reduction(result: AreaResult, rows: Sequence[Row]) -> bool:
    names = names_on_all_ranks(rows)
    is_right = True
    for rank, row in enumerate(rows):
        whole = factors(rows, rank, names)
        is_right = is_right and whole.even is not None
        local = [
            name
            for name in names
            if factors(rows, rank, [name]).is_own_only(rank) and _matters(rows, rank, name)
        ]
        has_several = all(len(each["added"]) > 1 for each in rows)
        if whole.values and not whole.fits and not local and has_several:
            local = names if last_factors(rows, rank, names).is_own_only(rank) else []
        if local and not all(_is_same(rows, name) for name in local):
            is_right = False
            if (clip := row["clip"]) is not None and _is_reduced_after_clip(rows, rank, local):
                result.find(
                    Cause.LOCAL_CLIPPING,
                    f"rank {rank} clipped its own gradient (norm {_text(clip.get('norm'))}),"
                    " reduced only afterwards",
                    rows[0],
                    line=clip["line"],
                )
                continue
            part = "every parameter" if len(local) == len(names) else first_few(local)
            result.find(
                Cause.NOT_REDUCED,
                f"the gradient that rank {rank} applies to {part} holds its own backward alone:"
                f" {_list(factors(rows, rank, local[:1]))}",
                row,
                line=row["backward_line"],
                names=local,
            )
        elif whole.even is None and any(
            each and each[-1] for other in rows for each in other["applied"].values()
        ):
            result.miss(_why_unclear(whole, rows))
    return is_right


def _why_unclear(whole: Factors, rows: Sequence[Row]) -> str:
    step = rows[0]["index"]
    if whole.fits:
        return (
            f"step {step}: the ranks' gradients are applied with factors of the script's own:"
            f" {_list(whole)}"
        )
    if whole.values:
        return (
            f"step {step}: {whole.residual:.2g} of the applied gradient is not a sum of what the"
            " backwards added"
        )
    if not any(row["added"] for row in rows):
        return "what backwards add to gradients was not seen"
    return "gradients before their reduction were not seen, or were the same on all ranks"


def _is_reduced_after_clip(rows: Sequence[Row], rank: int, names: Sequence[str]) -> bool:
    one, other = rows[0]["applied"], rows[rank]["applied"]
    return all(sketch_difference(one[name], other[name]) < 1e-4 for name in names)


def _are_alike(rows: Sequence[Row]) -> bool:
    names = names_on_all_ranks(rows)
    return any(own_sum(rows[0], name).any() for name in names) and all(
        _is_same(rows, name) for name in names
    )


def _have_equal_losses(records: Records, rows: Sequence[Row]) -> bool:
    """Return True if the last loss is equal on all ranks. Equal gradients alone do not show equal
    batches, because a hook may have reduced the gradients."""
    values = set()
    for rank, row in zip(records.ranks, rows, strict=True):
        last = max(int(number) for number in row["added"])
        of_backward = (each["value"] for each in rank.of("backward") if each["number"] == last)
        values.add(next(of_backward, None))
    return len(values) == 1


def _matters(rows: Sequence[Row], rank: int, name: str) -> bool:
    sizes = [float(np.linalg.norm(own_sum(row, name))) for row in rows]
    own = sizes.pop(rank)
    return max(sizes, default=0.0) > NEGLIGIBLE * own


def _is_same(rows: Sequence[Row], name: str) -> bool:
    first, *others = (own_sum(row, name) for row in rows)
    return all(np.linalg.norm(each - first) <= 1e-6 * np.linalg.norm(first) for each in others)


def _check_stale(result: AreaResult, rows: Sequence[Row]) -> None:
    for rank, row in enumerate(rows):
        if row["stale"]:
            result.find(
                Cause.STALE_GRADIENTS,
                f"on rank {rank} the gradients of {first_few(row['stale'])} still held those of the"
                " step before when the next backward added to them",
                row,
                names=row["stale"],
            )


def _check_clipping(result: AreaResult, rows: Sequence[Row]) -> None:
    for row in rows:
        clip = row["clip"]
        if clip is not None and clip["scaled"]:
            result.find(
                Cause.CLIPPED_SCALED,
                f"the norm was taken while gradients were multiplied by the loss scale"
                f" {row['scale']:g}: {_text(clip.get('norm'))}",
                row,
                line=clip["line"],
            )
        backwards = [int(number) for number, added in row["added"].items() if added]
        early = [each for each in row["clipped"] if each["backward"] in backwards[:-1]]
        if early:
            result.find(
                Cause.LOCAL_CLIPPING,
                f"gradients were clipped after {backwards.index(early[0]['backward']) + 1} of"
                f" {len(backwards)} microbatches, before they were reduced",
                rows[0],
                line=early[0]["line"],
            )


def _check_unused(result: AreaResult, rows: Sequence[Row]) -> None:
    for name in names_on_all_ranks(rows):
        missing = [
            rank
            for rank, row in enumerate(rows)
            if row["applied"][name] is None and name not in row["sharded"]
        ]
        if missing:
            result.find(
                Cause.UNUSED_PARAMETER,
                f"{name} has a gradient on some ranks, and none on rank {missing[0]}, which does"
                " not update it",
                rows[missing[0]],
                names=[name],
            )


def _check_local_clipping(result: AreaResult, rows: Sequence[Row]) -> None:
    line = rows[0]["clip"]["line"] if rows[0]["clip"] is not None else ""
    norms = [row["clip"].get("norm") for row in rows if row["clip"] is not None]
    is_sharded = any(row["sharded"] for row in rows)
    if _differ(norms, rows, 1e-4):
        names = names_on_all_ranks(rows)
        if not is_sharded and any(
            factors(rows, rank, names).is_own_only(rank) for rank in range(len(rows))
        ):
            # _check_reduction reports gradients that are not reduced, or only after clipping
            return
        result.find(
            Cause.LOCAL_CLIPPING,
            f"the norms by which the ranks clipped differ: {', '.join(map(_text, norms))}",
            rows[0],
            line=line,
        )
    ratios = [_clip_ratio(row) for row in rows]
    if _differ(ratios, rows, EVEN_TOLERANCE):
        texts = ", ".join(map(_text, ratios))
        result.find(
            Cause.LOCAL_CLIPPING,
            f"the ranks multiplied their shards of one gradient by different factors: {texts}",
            rows[0],
            line=line,
        )


def _differ(values: Sequence[object], rows: Sequence[Row], tolerance: float) -> bool:
    numbers = [each for each in values if isinstance(each, float)]
    return len(numbers) == len(rows) and max(numbers) - min(numbers) > tolerance * max(numbers)


def _clip_ratio(row: Row) -> float | None:
    one, other = row["reduced"], row["applied"]
    names = [name for name in row["sharded"] if one.get(name) and other.get(name)]
    before, after = (math.sqrt(sum(each[name][-1] for name in names)) for each in (one, other))
    return after / before if before else None


def _check_wasted(result: AreaResult, records: Records) -> None:
    for rank in records.ranks:
        reducing, line, counts, before = set[int](), "", Counter[int](), set[str]()
        for row in rank.rows:
            if row["kind"] == "ddp_forward":
                line = row["line"]
                reducing.discard(row["wrapper"])
                if row["reduces"]:
                    reducing.add(row["wrapper"])
            elif row["kind"] == "backward":
                counts.update(reducing)
                reducing.clear()
                before.add(str(row["number"]))
            elif row["kind"] == "step":
                count = max(counts.values(), default=0)
                several = sum(
                    bool(each) and number in before for number, each in row["added"].items()
                )
                if count > 1 and several > 1:
                    result.find(
                        Cause.REDUCED_EVERY_MICROBATCH,
                        f"rank {rank.rank} reduced its gradients {count} times in a step of"
                        f" {several} backwards",
                        row,
                        line=line,
                    )
                counts.clear()
                before.clear()


def _check_untrained(result: AreaResult, records: Records) -> None:
    for row in (row for rank in records.ranks for row in rank.steps):
        if names := row.get("untrained"):
            result.find(
                Cause.NOT_TRAINED,
                f"{len(names)} parameters of the model have gradients and are in no optimizer:"
                f" {first_few(names)}",
                line=row["line"],
                step=row["index"],
                names=names,
            )


def _list(found: Factors) -> str:
    if not found.fits:
        return "the gradient of its last microbatch is not reduced"
    return " + ".join(
        f"{0.0 if abs(value) < 1e-6 else value:.3g} × rank {number}'s"
        for number, value in enumerate(found.values)
    )


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "not seen"
