"""Which samples each rank was given, in each pass over the data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import Any

from lockstep.audit.checks.area_result import AreaResult
from lockstep.audit.finding import Area, Cause
from lockstep.audit.records import Records, Row, training_passes

LEAST_SAMPLES = 4
"""Samples of a pass from which its order can be told from another one."""
SAMPLERS = {
    *("RandomSampler", "SequentialSampler", "SubsetRandomSampler", "WeightedRandomSampler", "DistributedSampler"),
    *("_InfiniteConstantSampler", "SeedableRandomSampler", "LengthGroupedSampler", "DistributedLengthGroupedSampler"),
    *("UnrepeatedDistributedSampler", "DistributedSamplerWrapper", "UnrepeatedDistributedSamplerWrapper"),
}
"""Types of samplers that give each sample once in a pass, or say that they do not: torch's and libraries'."""
PARTS = {"SubsetRandomSampler", "list", "tuple", "range", "ndarray", "Tensor"}
"""Types of samplers that are given the samples of a part, such as a fold."""
BATCH_SAMPLERS = {"BatchSampler", "BatchSamplerShard", "NoneType"}
MANY = 0.1
"""Share of equal contents that is no accident of the data: different samples may look alike."""


@dataclass(slots=True)
class Pass:
    """One rank's pass over the data of a loader."""

    begin: Row
    indices: list[int] | None = field(default_factory=list)
    contents: list[str] = field(default_factory=list)
    batches: int = 0
    is_complete: bool = False
    is_training: bool = False


@dataclass(slots=True)
class LoaderPasses:
    """The passes of one loader, by their number and rank."""

    dataset: list[dict[str, Any]]
    """The dataset on each rank that reads it."""
    passes: list[list[Pass]]
    world_size: int

    @property
    def line(self) -> str:
        return str(self.passes[0][0].begin["line"])

    @property
    def is_training(self) -> bool:
        return any(each.is_training for ranks in self.passes for each in ranks)

    @property
    def has_own_sampler(self) -> bool:
        """True if the sampler is not torch's or a library's: it may leave out, repeat, and go on without an end."""
        return self.sampler["type"] not in SAMPLERS or self.sampler["batch_type"] not in BATCH_SAMPLERS

    @property
    def sampler(self) -> Row:
        sampler: Row = self.passes[0][0].begin["sampler"]
        return sampler

    def samples(self, ranks: Sequence[Pass]) -> tuple[list[list[Any]], bool]:
        """The samples of each rank, and whether they are places in one dataset, which tell them apart for sure."""
        wholes = {each.get("whole", each["digest"]) for each in self.dataset}
        if len(wholes) == 1 and all(wholes) and not self.dataset[0]["iterable"] and all(each.indices is not None for each in ranks):
            return [_places(each.indices or [], data.get("subset")) for each, data in zip(ranks, self.dataset, strict=True)], True
        return [list(each.contents) for each in ranks], False


def check_samples(records: Records) -> AreaResult:
    result = AreaResult(Area.SAMPLES)
    loaders = loader_passes(records)
    if not loaders:
        result.unseen.append("no DataLoader gave batches: samples that a script takes by itself are not seen")
        return result
    seen, judged = 0, True
    for loader in loaders:
        for ranks in loader.passes:
            seen += sum(len(each.contents) for each in ranks)
            if loader.is_training:
                if any(each.is_training for each in ranks):  # a script may look at a first batch, and begin again
                    judged = _check_training_pass(result, loader, ranks) and judged
            elif all(each.is_complete for each in ranks):
                _check_evaluation_pass(result, records, loader, ranks)
        if loader.is_training:
            _check_orders(result, loader)
    if all(len(loader.passes) < 2 for loader in loaders if loader.is_training):
        result.unseen.append("one epoch at most was begun: its order cannot be compared with the next one's (more --steps)")
    passes = sum(len(loader.passes) for loader in loaders)
    if judged:
        result.right = f"{seen} samples, in passes over the data: {passes}; none on two ranks, and none twice in a pass"
    return result


def loader_passes(records: Records) -> list[LoaderPasses]:
    """The passes of each loader that all ranks have, or that one rank reads for the training of all (Accelerate does so
    with streams)."""
    by_rank = [_passes_of(rank.rows) for rank in records.ranks]
    found = []
    for loader in by_rank[0] if by_rank else ():
        readers = [each[loader] for each in by_rank if any(one.batches or one.is_complete for one in each.get(loader, ()))]
        if len(readers) < len(by_rank) and (len(readers) > 1 or not any(each.is_training for each in readers[0])):
            continue
        passes = [list(ranks) for ranks in zip(*readers, strict=False)]
        passes = [ranks for ranks in passes if any(each.batches for each in ranks)]
        datasets = [each[0].begin["dataset"] for each in readers]
        if passes and all(datasets):
            found.append(LoaderPasses(datasets, passes, records.world_size))
    return found


def _passes_of(rows: Sequence[Row]) -> dict[tuple[str, int], list[Pass]]:
    """The passes of each loader, by the line that made it and its number among those of that line."""
    found: dict[int, list[Pass]] = {}
    by_key: dict[tuple[int, int], Pass] = {}
    for row in rows:
        if row["kind"] == "pass":
            by_key[row["loader"], row["number"]] = made = Pass(row)
            found.setdefault(row["loader"], []).append(made)
        elif row["kind"] == "batch" and (current := by_key.get((row["loader"], row["number"]))) is not None:
            current.batches += 1
            current.is_complete = current.is_complete or current.batches == current.begin["batches"]
            current.contents += row["samples"]
            current.indices = current.indices + row["indices"] if current.indices is not None and row["indices"] is not None else None
        elif row["kind"] == "pass_end" and (row["loader"], row["number"]) in by_key:
            by_key[row["loader"], row["number"]].is_complete = True
    for place in training_passes(rows):
        if (current := by_key.get(place)) is not None:
            current.is_training = True
    numbers: Counter[str] = Counter()
    by_line = {}
    for passes in found.values():
        line = str(passes[0].begin["line"])
        by_line[line, numbers[line]] = passes
        numbers[line] += 1
    return by_line


def _first_epoch(loader: LoaderPasses, samples: Sequence[list[Any]]) -> list[list[Any]]:
    """Each rank's samples of the first epoch: a sampler of the script's own may go on into the next one."""
    length = loader.dataset[0].get("whole_length", loader.dataset[0]["length"]) or 0
    return [one[: max(1, length // len(samples))] for one in samples]


def _look_alike(ranks: Sequence[Pass], samples: Sequence[Sequence[Any]]) -> bool:
    """True if a rank was given one content more often than loader workers explain."""
    most = max(2, *(int(each.begin["workers"]) for each in ranks))
    return any(max(Counter(one).values(), default=0) > most for one in samples)


def _places(indices: Sequence[int], subset: Sequence[int] | None) -> list[int]:
    return list(indices) if subset is None else [subset[each] for each in indices if each < len(subset)]


def _check_training_pass(result: AreaResult, loader: LoaderPasses, ranks: Sequence[Pass]) -> bool:
    """Find samples that come twice, or not at all. False if they cannot be judged, which is said."""
    samples, are_places = loader.samples(ranks)
    if loader.has_own_sampler and are_places:
        samples = _first_epoch(loader, samples)
    repeats = loader.has_own_sampler and any(len(set(one)) < len(one) for one in samples)
    if (repeats or _draws_with_replacement(loader)) and not _all_equal(samples):
        result.unseen.append(f"{loader.sampler['type']} repeats samples, on purpose perhaps: those of the training are not compared")
        return False
    if not are_places and _look_alike(ranks, samples):
        result.unseen.append("samples of the training data look alike: they cannot be told apart")
        return False
    if not are_places and not loader.dataset[0]["iterable"]:
        result.unseen.append("what the dataset holds cannot be read: samples are compared by their contents, and missing ones not seen")
    number = ranks[0].begin["number"]
    for (first, one), (second, other) in combinations(enumerate(samples), 2):
        both = set(one) & set(other)
        if len(both) > _allowed(len(set(one)), are_places, loader, ranks):
            result.find(
                Cause.SAME_SAMPLES,
                f"pass {number} over the training data: {len(both)} of the {len(set(one))} samples of rank {first} are also rank {second}'s"
                f" (sampler: {loader.sampler['type']})",
                line=loader.line,
            )
    for rank, one in enumerate(samples):
        twice = sum(count - 1 for count in Counter(one).values())
        if twice > _allowed(len(one), are_places, loader, ranks) and not _draws_with_replacement(loader):
            workers = ranks[rank].begin["workers"]
            result.find(
                Cause.SAMPLES_REPEATED,
                f"pass {number} over the training data: rank {rank} was given {twice} of {len(one)} samples that it had already"
                + (f" ({workers} loader workers)" if workers else ""),
                line=loader.line,
            )
    if are_places and all(each.is_complete for each in ranks):
        _check_missing(result, loader, ranks, loader.samples(ranks)[0])
    elif loader.dataset[0]["iterable"] and all(each.is_complete for each in ranks):
        _check_stream(result, loader, ranks, samples)
    return True


def _allowed(count: int, are_places: bool, loader: LoaderPasses, ranks: Sequence[Pass]) -> int:
    """The number of equal samples that is no fault: padding to a multiple of the ranks, or data that look alike."""
    if not are_places:
        return int(MANY * count)
    length = loader.dataset[0]["length"] or 0
    total = loader.sampler.get("total_size", length)
    if loader.sampler["batch_type"] == "BatchSamplerShard":  # Accelerate's, which pads with whole batches
        return max(len(each.contents) // max(1, each.batches) for each in ranks) * len(ranks)
    return max(0, int(total) - int(length)) if loader.sampler.get("num_replicas") else 0


def _check_missing(result: AreaResult, loader: LoaderPasses, ranks: Sequence[Pass], samples: Sequence[Sequence[Any]]) -> None:
    whole = loader.dataset[0].get("whole_length", loader.dataset[0]["length"])
    seen = {each for one in samples for each in one}
    if len({each["digest"] for each in loader.dataset}) == 1:
        whole = loader.dataset[0]["length"]
    batch = ranks[0].begin["batch_size"] or max((len(one) for one in samples), default=1)
    sampler, own = loader.sampler, loader.dataset[0]["length"] or 0
    is_drawn = sampler.get("num_samples", own) * sampler.get("num_replicas", 1) < own
    is_part = sampler["type"] in PARTS or is_drawn
    drops = ranks[0].begin["drop_last"] or sampler.get("drop_last") or ranks[0].begin["batch_size"] is None
    allowed = batch * len(ranks) - 1 if drops else 0
    missing = sorted(set(range(whole or 0)) - seen)
    may_choose = loader.has_own_sampler or len({each["digest"] for each in loader.dataset}) > 1
    is_chosen = may_choose and missing and missing[-1] - missing[0] >= len(missing)
    if whole and len(missing) > allowed and not is_part and not is_chosen:  # scattered ones are left out on purpose
        result.find(
            Cause.SAMPLES_MISSING,
            f"pass {ranks[0].begin['number']} over the training data: {len(missing)} of {whole} samples were given to no rank",
            line=loader.line,
        )


def _check_stream(result: AreaResult, loader: LoaderPasses, ranks: Sequence[Pass], samples: Sequence[Sequence[Any]]) -> None:
    """Find streams that are split over the ranks twice: a library does so, and the dataset itself too."""
    held, seen = loader.dataset[0]["held"], len({each for one in samples for each in one})
    batch = max((len(one) // max(1, each.batches) for one, each in zip(samples, ranks, strict=True)), default=1)
    if held and abs(seen - held / loader.world_size) <= batch and seen < held - batch * loader.world_size:
        result.find(
            Cause.SAMPLES_MISSING,
            f"pass {ranks[0].begin['number']} over a stream: the dataset holds {held} samples, and the ranks were given {seen} of "
            f"them together, one in {loader.world_size}: it is split over the ranks twice",
            line=loader.line,
        )


def _check_evaluation_pass(result: AreaResult, records: Records, loader: LoaderPasses, ranks: Sequence[Pass]) -> None:
    samples, are_places = loader.samples(ranks)
    if not are_places or _all_equal(samples):  # every rank evaluates all: that counts each once too
        return
    counts = Counter(each for one in samples for each in one)
    twice = sum(count - 1 for count in counts.values())
    dropped = any(row["place"] > ranks[0].begin["place"] for row in records.ranks[0].of("gather_for_metrics"))
    if twice and not dropped:
        total = sum(counts.values())
        result.find(
            Cause.EVALUATION_REPEATS,
            f"an evaluation over {len(counts)} samples counted {total}: {twice} of them twice, to give all ranks the same number",
            line=loader.line,
        )


def _check_orders(result: AreaResult, loader: LoaderPasses) -> None:
    """Shuffled data must be in another order in each epoch."""
    passes = [ranks[0] for ranks in loader.passes if ranks[0].is_training]
    orders = [each.indices if each.indices is not None else each.contents for each in passes]
    sampler = loader.sampler
    shuffles = sampler.get("shuffle", sampler["type"] == "RandomSampler") or "Random" in sampler["type"]
    for number, (one, other) in enumerate(pairwise(orders)):
        count = min(len(one), len(other))
        if shuffles and count >= LEAST_SAMPLES and list(one[:count]) == list(other[:count]):
            begin = passes[number + 1].begin
            result.find(
                Cause.SAME_ORDER,
                f"the first {count} samples of rank 0 are the same in epochs {number} and {number + 1}, in the same order"
                + (f"; the sampler's epoch was {begin['sampler']['epoch']} in both" if "epoch" in sampler else ""),
                line=begin["loop"] or loader.line,
            )


def _draws_with_replacement(loader: LoaderPasses) -> bool:
    return bool(loader.sampler.get("replacement")) or loader.sampler["type"] == "WeightedRandomSampler"


def _all_equal(samples: Sequence[Sequence[Any]]) -> bool:
    return all(sorted(map(str, one)) == sorted(map(str, samples[0])) for one in samples)
