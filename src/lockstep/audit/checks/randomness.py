"""Checks random numbers, of which each rank, worker and step draws its own, and train and eval mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from lockstep.audit.checks.area_result import AreaResult
from lockstep.audit.finding import Area, Cause
from lockstep.audit.records import Rank, Records, Row, training_passes

LEAST = 2
"""Backwards with equal random states from which they are no accident."""


def check_randomness(records: Records) -> AreaResult:
    result = AreaResult(Area.RANDOM)
    drawing = [_forwards(rank) for rank in records.ranks]
    _check_reset(result, records, drawing)
    if not result.findings:
        _check_ranks(result, records, drawing)
    _check_fetches(result, records)
    if any(drawing) or records.fetches:
        result.right = f"{sum(map(len, drawing))} forwards and {len(records.fetches)} reads of data drew random numbers, each its own"
    elif records.steps:
        result.right = "no forward drew random numbers of torch, and no read of data any"
    return result


def check_modes(records: Records) -> AreaResult:
    """Look for dropout and BatchNorm in the wrong mode: without them the mode changes nothing."""
    result = AreaResult(Area.MODE)
    seen = False
    for rank in records.ranks:
        training = {loader for loader, _ in training_passes(rank.rows)}
        for row in rank.of("mode"):
            seen = True
            if row["training"] and row["loader"] is not None and row["loader"] not in training and training:
                result.find(
                    Cause.EVALUATION_IN_TRAIN_MODE,
                    f"rank {rank.rank}: {row['what']} ran in train mode on batches that no backward followed",
                    line=row["line"],
                )
        backwards = [row for row in rank.of("backward") if row["calls"]["train"] or row["calls"]["eval"]]
        seen = seen or bool(backwards)
        if backwards:
            _check_training_mode(result, rank, backwards)
    if seen:
        result.right = "dropout and BatchNorm run in train mode in training, and in eval mode in evaluations"
    return result


def _check_training_mode(result: AreaResult, rank: Rank, backwards: Sequence[Row]) -> None:
    """Find steps with more layers in eval mode than the first one had, or with dropout off behind trained layers."""
    first = backwards[0]["calls"]
    for row in backwards:
        calls = row["calls"]
        if (calls["off"] and not calls["train"]) or (calls["eval"] > first["eval"] and calls["train"] < first["train"]):
            step = sum(1 for each in rank.steps if each["place"] < row["place"])
            modes = [each for each in rank.of("mode") if each["place"] < row["place"] and each["grad"] and not each["training"]]
            text = f"rank {rank.rank}: step {step} ran {calls['eval']} calls of dropout and BatchNorm in eval mode"
            text += ", which the first step ran in train mode" if calls["train"] < first["train"] else ", behind layers that are trained"
            result.find(Cause.TRAINING_IN_EVAL_MODE, text, line=modes[-1]["line"] if modes else row["line"], step=step)
            return


def _forwards(rank: Rank) -> list[Row]:
    """The backwards between whose batch and which random numbers were drawn; of several after one forward the first."""
    found: list[Row] = []
    state = None
    for row in rank.of("batch", "backward"):
        if row["kind"] == "batch":
            state = None
        elif row["state"] != state:
            state = row["state"]
            if row["state_at_batch"] and row["state"] != row["state_at_batch"]:
                found.append(row)
    return found


def _check_reset(result: AreaResult, records: Records, drawing: Sequence[Sequence[Row]]) -> None:
    """Find random states that come again on one rank."""
    for rank, rows in zip(records.ranks, drawing, strict=True):
        states = [row["state"] for row in rows]
        again = len(states) - len(set(states))
        if again >= LEAST:
            seeds = [row for row in rank.of("seed") if row["step"] > 0]
            result.find(
                Cause.SEED_RESET,
                f"rank {rank.rank}: {again} of {len(states)} forwards drew the same random numbers as one before"
                + (f"; torch.manual_seed({seeds[-1]['seed']}) is called again and again" if seeds else ""),
                line=seeds[-1]["line"] if seeds else rows[0]["line"],
            )


def _check_ranks(result: AreaResult, records: Records, drawing: Sequence[Sequence[Row]]) -> None:
    for (first, one), (second, other) in combinations(enumerate(drawing), 2):
        states = {row["number"]: row["state"] for row in other}
        both = [row for row in one if states.get(row["number"]) == row["state"]]
        if len(both) >= LEAST:
            seeds = [row for row in records.ranks[first].of("seed") if row["step"] == 0]
            result.find(
                Cause.SAME_RANDOM_NUMBERS,
                f"in {len(both)} of {len(one)} forwards ranks {first} and {second} drew the same random numbers, such as dropout masks"
                + (f", since torch.manual_seed({seeds[-1]['seed']}) on both" if seeds else ""),
                line=seeds[-1]["line"] if seeds else both[0]["line"],
            )


def _check_fetches(result: AreaResult, records: Records) -> None:
    """Find reads of different samples that drew the same random numbers: in workers, on ranks, in epochs."""
    by_source: dict[tuple[int, int, int], Row] = {}
    passes: dict[tuple[int, object], dict[int, int]] = {}
    for row in records.fetches:
        numbers = passes.setdefault((row["rank"], row["worker"]), {})
        number = numbers.setdefault(row["pid"], len(numbers)) if row["worker"] is not None else 0
        by_source[row["rank"], -1 if row["worker"] is None else row["worker"], number * 1000 + row["number"]] = row
    for (one, first), (other, second) in combinations(by_source.items(), 2):
        if one[1] == -1 and one[0] == other[0]:
            continue  # one process draws on and on; a seed that is set again shows in its forwards
        if library := _same(first["drawn"], second["drawn"]):
            line = _loader_line(records, workers=one[1] != -1)
            result.find(Cause.SAME_AUGMENTATION, f"{_source(one)} and {_source(other)} drew the same numbers of {library}", line=line)
            return


def _same(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    return next((name for name, state in one.items() if other.get(name) == state), "")


def _source(source: tuple[int, int, int]) -> str:
    rank, worker, number = source
    where = f"rank {rank}" if worker == -1 else f"rank {rank}'s loader worker {worker}"
    return f"{where} (epoch {number // 1000})" if number >= 1000 else where


def _loader_line(records: Records, *, workers: bool) -> str:
    rows = [row for row in records.ranks[0].of("pass") if bool(row["workers"]) == workers] if records.ranks else []
    return str(rows[0]["line"]) if rows else ""
