"""Checks that each rank, loader worker and step draws new random numbers. Also checks train and
eval mode."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from lockstep.audit.finding import Area, AreaResult, Cause
from lockstep.audit.records import Rank, Records, first_line, training_passes
from lockstep.base.words import counted
from lockstep.evidence.rows import Row

LEAST_BACKWARDS = 2
"""If random states are equal in this many backward passes, they are not equal by chance."""


def check_randomness(records: Records) -> AreaResult:
    result = AreaResult(Area.RANDOM)
    drawing = [_forwards(rank) for rank in records.ranks]
    _check_reset(result, records, drawing)
    compared = _check_ranks(result, records, drawing, is_said=not result.findings)
    _check_fetches(result, records)
    if records.steps:
        seen = [_forwards_text(result, records, drawing, compared), _fetches_text(result, records)]
        result.right = ", and ".join(filter(None, seen))
    return result


def _forwards_text(
    result: AreaResult, records: Records, drawing: Sequence[Sequence[Row]], compared: bool
) -> str:
    backwards = [len(rank.of("backward")) for rank in records.ranks]
    if any(
        not rows and _may_have_drawn(rank)
        for rows, rank in zip(drawing, records.ranks, strict=True)
    ):
        result.miss(
            "random numbers of torch were drawn between backwards, by the forward or for the data:"
            " which was not seen"
        )
    elif any(drawing):
        if compared:
            return f"{sum(map(len, drawing))} forwards drew random numbers, each its own"
        if not result.findings:
            result.miss(
                "too few forwards drew random numbers on all ranks to tell whether they are the"
                " same"
            )
    elif all(count > 1 for count in backwards):
        return f"none of {sum(backwards)} forwards drew random numbers of torch"
    else:
        result.miss("whether the forward draws random numbers shows from the second backward on")
    return ""


def _fetches_text(result: AreaResult, records: Records) -> str:
    if not any(rank.of("batch") for rank in records.ranks):
        result.miss(
            "no DataLoader gave batches: random numbers of what makes the data are not seen"
        )
        return ""
    if not records.fetches:
        return "no read of data drew any"
    if len({(row["rank"], row["pid"]) for row in records.fetches}) > 1:
        return f"{len(records.fetches)} reads of data drew random numbers, each its own"
    result.miss(
        "reads of data drew random numbers in one process only: there was none to compare them with"
    )
    return ""


def check_modes(records: Records) -> AreaResult:
    result = AreaResult(Area.MODE)
    backwards = evaluations = 0
    for rank in records.ranks:
        evaluations += _check_evaluation_mode(result, rank)
        backwards += _check_training_mode(result, rank)
    if not records.steps:
        return result
    if not backwards:
        result.miss("no dropout or BatchNorm of torch was in a backward")
    if not evaluations:
        result.miss("no evaluation with dropout or BatchNorm of torch was seen")
    seen = [f"in {backwards} backwards they are in the mode of the first one"] if backwards else []
    seen += [f"in {evaluations} passes without gradients in eval mode"] if evaluations else []
    result.right = f"dropout and BatchNorm: {', '.join(seen)}" if seen else ""
    return result


def _check_evaluation_mode(result: AreaResult, rank: Rank) -> int:
    training = {loader for loader, _ in training_passes(rank.rows)}
    reached = {row["mode"] for row in rank.of("mode_reached")}
    last_step = max((row["place"] for row in rank.steps), default=-1)
    evaluations = set()
    for row in rank.of("mode"):
        is_other = row["loader"] is not None and row["loader"] not in training
        if not row["training"]:
            if not row["grad"] or is_other:
                evaluations.add((row["loader"], row["number"]))
        elif row["mode"] in reached or (row["grad"] and row["place"] > last_step):
            continue
        elif is_other and (training or not row["grad"]):
            result.find(
                Cause.EVALUATION_IN_TRAIN_MODE,
                f"rank {rank.rank}: {row['what']} ran in train mode on batches that no backward"
                " followed",
                line=row["line"],
            )
        elif row["loader"] is None and not row["grad"]:
            result.miss(
                "a forward without gradients ran in train mode, and not on batches of a DataLoader:"
                " it may be an evaluation"
            )
    return len(evaluations)


def _check_training_mode(result: AreaResult, rank: Rank) -> int:
    backwards = rank.of("modes")
    for calls in backwards:
        fewer = calls["train"] < backwards[0]["train"]
        if (calls["off"] and not calls["train"]) or (
            calls["eval"] > backwards[0]["eval"] and fewer
        ):
            before = [each for each in rank.rows if each["place"] < calls["place"]]
            step = sum(each["kind"] == "step" for each in before)
            modes = (
                each
                for each in reversed(before)
                if each["kind"] == "mode" and each["grad"] and not each["training"]
            )
            why = (
                "which the first step ran in train mode"
                if fewer
                else "behind layers that are trained"
            )
            result.find(
                Cause.TRAINING_IN_EVAL_MODE,
                f"rank {rank.rank}: step {step} ran {counted(calls['eval'], 'call')} of dropout and"
                f" BatchNorm in eval mode, {why}",
                line=first_line(modes) or calls["line"],
                step=step,
            )
            break
    return len(backwards)


def _forwards(rank: Rank) -> list[Row]:
    """Return the backward pass after each forward that drew random numbers. `drawn` of a backward
    pass identifies the state of the generator."""
    found: list[Row] = []
    state, has_batch = None, False
    for row in rank.of("batch", "backward"):
        if row["kind"] == "batch":
            state, has_batch = None, has_batch or row["grad"]
        else:
            is_after_batch = has_batch and row["state"] not in (row["state_at_batch"], state)
            if row["drawn"] or is_after_batch:
                found.append(row | {"drawn": row["drawn"] or row["state"]})
            state, has_batch = row["state"], False
    return found


def _may_have_drawn(rank: Rank) -> bool:
    """Return True if a forward, and not the data, may have drawn random numbers."""
    first = min((row["place"] for row in rank.of("backward")), default=0)
    batches = sum(1 for row in rank.of("batch") if row["grad"] and row["place"] < first)
    return batches != 1 and any(row["other_draws"] for row in rank.of("backward"))


def _check_reset(result: AreaResult, records: Records, drawing: Sequence[Sequence[Row]]) -> None:
    for rank, rows in zip(records.ranks, drawing, strict=True):
        again = len(rows) - len({row["drawn"] for row in rows})
        if again >= LEAST_BACKWARDS:
            seeds = [row for row in reversed(rank.of("seed")) if row["step"] > 0]
            text = (
                f"rank {rank.rank}: {again} of {len(rows)} forwards drew the same random numbers as"
                " one before"
            )
            if seeds:
                text += f"; torch.manual_seed({seeds[0]['seed']}) is called again and again"
            result.find(Cause.SEED_RESET, text, line=first_line([*seeds, *rows]))


def _check_ranks(
    result: AreaResult, records: Records, drawing: Sequence[Sequence[Row]], *, is_said: bool
) -> bool:
    drew = [(number, rows) for number, rows in enumerate(drawing) if rows]
    is_compared = True
    for (first, one), (second, other) in combinations(drew, 2):
        states = {row["number"]: row["drawn"] for row in other}
        both = [row for row in one if states.get(row["number"]) == row["drawn"]]
        is_compared = is_compared and not both and any(row["number"] in states for row in one)
        if len(both) >= LEAST_BACKWARDS and is_said:
            seeds = [r for r in reversed(records.ranks[first].of("seed")) if r["step"] == 0]
            text = (
                f"in {len(both)} of {len(one)} forwards ranks {first} and {second} drew the same"
                " random numbers, such as dropout masks"
            )
            if seeds:
                text += f", since torch.manual_seed({seeds[0]['seed']}) on both"
            result.find(Cause.SAME_RANDOM_NUMBERS, text, line=first_line([*seeds, *both]))
    return is_compared


def _check_fetches(result: AreaResult, records: Records) -> None:
    by_source: dict[tuple[int, int | None, int, int], Row] = {}
    processes: dict[tuple[int, int | None], dict[int, int]] = {}
    for row in records.fetches:
        key = (row["rank"], row["worker"])
        known = processes.setdefault(key, {})  # a worker is a new process in each epoch
        epoch = 0 if row["worker"] is None else known.setdefault(row["pid"], len(known))
        by_source[*key, epoch, row["number"]] = row
    for (one, first), (other, second) in combinations(by_source.items(), 2):
        if one[1] is None and one[0] == other[0]:
            continue  # one process keeps drawing; a seed that is set again shows in its forwards
        same = (
            name for name, state in first["drawn"].items() if second["drawn"].get(name) == state
        )
        if library := next(same, ""):
            passes = records.ranks[0].of("pass") if records.ranks else []
            has_workers = one[1] is not None
            result.find(
                Cause.SAME_AUGMENTATION,
                f"{_source(*one)} and {_source(*other)} drew the same numbers of {library}",
                line=first_line(row for row in passes if bool(row["workers"]) == has_workers),
            )
            return


def _source(rank: int, worker: int | None, epoch: int, _: int) -> str:
    where = f"rank {rank}" if worker is None else f"rank {rank}'s loader worker {worker}"
    return f"{where} (epoch {epoch})" if epoch else where
