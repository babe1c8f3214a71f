"""The split of a model's sequential parts into pipeline stages of similar cost. No function here
communicates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import nn

from lockstep.base.errors import RecipeError, first_few
from lockstep.base.torch_private import BatchNormBase, own_buffers, own_modules, own_parameters
from lockstep.base.words import counted
from lockstep.model.blocks import check_not_nested, matching_names, module_tensors, numel, outermost

STAGES_PER_RANK: dict[str, int] = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 1}


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """A parameter that several parts of the model share. Gradients are summed over `ranks` in
    order. The first rank of `ranks` includes the parameter in the norm of the gradient."""

    name: str
    ranks: tuple[int, ...]
    """With bitwise numerics, a rank occurs once for each of its parts that has the parameter."""


@dataclass(frozen=True, slots=True)
class Stages:
    """The split of a model into stages of consecutive parts. Stage s is on rank s mod `ranks` of
    the pipeline."""

    parts: tuple[str, ...]
    ranges: tuple[range, ...]
    """For each stage, the indices of its parts in `parts`."""
    ranks: int
    shared_parameters: tuple[SharedParameter, ...]

    @classmethod
    def split(
        cls,
        model: nn.Module,
        patterns: Sequence[str] | None,
        *,
        ranks: int,
        per_rank: int = 1,
        bitwise: bool = False,
    ) -> Stages:
        """Call this method before any parameter is removed from `model`."""
        if not (parts := sequential_parts(model, patterns)):
            raise RecipeError(
                f"pipeline={ranks} and a model ({type(model).__name__}) that is not an"
                " nn.Sequential; a pipeline must know the model's parts in the order of their"
                " calls; name them, as in Recipe.stages=['embed', 'blocks.*', 'head']"
            )
        modules = [model.get_submodule(name) for name in parts]
        costs = [numel(module) for module in modules]
        units = _units([any(each.requires_grad for each in part.parameters()) for part in modules])
        count = ranks * per_rank
        if count > len(units):
            virtual = f" with {per_rank} stages a rank" if per_rank > 1 else ""
            names = first_few([parts[unit.start] for unit in units])
            raise RecipeError(
                f"pipeline={ranks}{virtual} makes {count} stages, and the model has trainable "
                f"parameters for {len(units)} (from {names}); each stage needs at least "
                "one; use a smaller pipeline, or name smaller parts in Recipe.stages"
            )
        runs = balanced_runs([sum(costs[place] for place in unit) for unit in units], count)
        ranges = tuple(range(units[run.start].start, units[run.stop - 1].stop) for run in runs)
        _check_statistics(model, parts, ranges)
        rank_of_part = [stage % ranks for stage, places in enumerate(ranges) for _ in places]
        shared = shared_parameters(model, parts, rank_of_part, each_part=bitwise)
        return cls(tuple(parts), ranges, ranks, shared)

    def on_rank(self, rank: int) -> range:
        return range(rank, len(self.ranges), self.ranks)

    def last_part(self, stage: int) -> str:
        return self.parts[self.ranges[stage].stop - 1]

    def parts_on_rank(self, rank: int) -> list[str]:
        return [self.parts[place] for stage in self.on_rank(rank) for place in self.ranges[stage]]


def sequential_parts(model: nn.Module, patterns: Sequence[str] | None) -> list[str]:
    """Return the names of the parts that the model's forward calls one after another, or an empty
    list if the order is unknown. The parts of an `nn.Sequential` are its members. `patterns` name
    the parts of a model of another class, in order."""
    if patterns is None:
        if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
            return []
        return list(own_modules(model))
    modules = dict(model.named_modules(remove_duplicate=False))
    modules.pop("", None)
    parts = [name for pattern in patterns for name in _parts_matching(pattern, modules)]
    for place, name in enumerate(parts):
        if name in parts[:place]:
            raise RecipeError(
                f"the recipe's stages match {name!r} twice; each part is called once, in the order"
                " given; drop a pattern"
            )
    check_not_nested(parts, "stages")
    _check_complete(model, parts)
    return parts


def balanced_runs(costs: Sequence[float], count: int) -> list[range]:
    """Return contiguous runs with the smallest maximum sum. Among equal maxima, the smallest sum of
    squares wins."""
    most = _best(costs, count, lambda cost: cost, max, math.inf)[-1][0]
    table = _best(costs, count, lambda cost: cost * cost, lambda one, other: one + other, most)
    runs: list[range] = []
    stop = len(costs)
    for row in range(count, 0, -1):
        start = table[row * (len(costs) + 1) + stop][1]
        runs.append(range(start, stop))
        stop = start
    return runs[::-1]


def schedule_calls(count: int, stages: Stages, schedule: str) -> list[tuple[int, int, str]]:
    """Return (first microbatch, index after the last, schedule) for consecutive calls of torch's
    schedules. Torch's 1F1B schedule needs at least as many microbatches as stages. With fewer
    microbatches than stages, the schedule is GPipe. Torch's interleaved schedules need a multiple
    of the number of rounds, so a second call runs the rest."""
    if schedule == "gpipe" or (schedule == "1f1b" and count >= len(stages.ranges)):
        return [(0, count, schedule)] if count else []
    if schedule == "1f1b":
        return [(0, count, "gpipe")] if count else []
    rounds = max(1, count // stages.ranks)
    even = count if count % rounds == 0 else rounds * stages.ranks
    return [(start, stop, schedule) for start, stop in ((0, even), (even, count)) if start < stop]


def check_microbatches(count: int, stages: Stages) -> None:
    if count < len(stages.ranges):
        raise RecipeError(
            f"{counted(count, 'microbatch')} per step in a pipeline of {len(stages.ranges)} stages;"
            " with fewer microbatches than stages some stages always wait; choose a smaller"
            f" microbatch, so that a step has at least {len(stages.ranges)} on each data rank, or"
            " fewer stages"
        )


def shared_parameters(
    model: nn.Module, parts: Sequence[str], ranks: Sequence[int], *, each_part: bool
) -> tuple[SharedParameter, ...]:
    """Return the parameters that parts on several ranks share. With `each_part`, parameters that
    several parts on one rank share are also returned."""
    holders: dict[int, list[int]] = {}
    for part, rank in zip(parts, ranks, strict=True):
        for parameter in model.get_submodule(part).parameters():
            holders.setdefault(id(parameter), []).append(rank)
    if not each_part:
        holders = {key: sorted(set(several)) for key, several in holders.items()}
    return tuple(
        SharedParameter(name, tuple(holders[id(parameter)]))
        for name, parameter in model.named_parameters()
        if len(holders[id(parameter)]) > 1
    )


def keep_only_parts(model: nn.Module, names: Sequence[str]) -> None:
    """Set the parameters and buffers outside of the named parts to None. All modules stay, so the
    names of the remaining tensors do not change."""
    held = {id(tensor) for name in names for tensor in module_tensors(model.get_submodule(name))}
    for module in model.modules():
        for tensors in (own_parameters(module), own_buffers(module)):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in held:
                    tensors[name] = None


def _parts_matching(pattern: str, modules: dict[str, nn.Module]) -> list[str]:
    matching = outermost(matching_names(list(modules), pattern, "the recipe's stages have"))
    for name in matching:
        if isinstance(modules[name], nn.ModuleList | nn.ModuleDict):
            raise RecipeError(
                f"the recipe's stages have {pattern!r}, and {name!r} is a"
                f" {type(modules[name]).__name__}, which cannot be called; name its members:"
                f" {name + '.*'!r}"
            )
    return matching


def _check_complete(model: nn.Module, parts: Sequence[str]) -> None:
    held = {id(tensor) for name in parts for tensor in module_tensors(model.get_submodule(name))}
    left_out = [
        name
        for named in (model.named_parameters, model.named_buffers)
        for name, tensor in named(remove_duplicate=False)
        if id(tensor) not in held
    ]
    if left_out:
        raise RecipeError(
            f"the recipe's stages leave out {first_few(left_out)}; a pipeline calls only "
            "the stages, so they must hold every parameter and buffer; name the modules that hold "
            "these too, or move them into one"
        )


def _check_statistics(model: nn.Module, parts: Sequence[str], ranges: Sequence[range]) -> None:
    holders: dict[int, tuple[int, str]] = {}
    for stage, places in enumerate(ranges):
        for place in places:
            for module in model.get_submodule(parts[place]).modules():
                first, part = holders.setdefault(id(module), (stage, parts[place]))
                if first == stage or not isinstance(module, BatchNormBase):
                    continue
                if module.running_mean is not None:
                    raise RecipeError(
                        f"the stages {part!r} and {parts[place]!r} share a "
                        f"{type(module).__name__}; its running statistics follow from all of its "
                        "calls in their order, but two stages of a pipeline compute separately; "
                        "give each its own BatchNorm"
                    )


def _units(trainable: Sequence[bool]) -> list[range]:
    """A split must not separate a part with trainable parameters from the following parts without
    trainable parameters."""
    starts = [place for place, can in enumerate(trainable) if can]
    if not starts:
        return []
    return [range(*bounds) for bounds in pairwise([0, *starts[1:], len(trainable)])]


def _best(
    costs: Sequence[float],
    count: int,
    value: Callable[[float], float],
    join: Callable[[float, float], float],
    most: float,
) -> list[tuple[float, int]]:
    """Dynamic programming over the number of runs. Entry row * (len(costs) + 1) + stop of the
    result is (least value, start of the last run) for costs[:stop] in `row` runs. A run with a sum
    above `most` is not allowed."""
    length, sums = len(costs), list(accumulate(costs, initial=0.0))
    table = [(math.inf, 0)] * ((count + 1) * (length + 1))
    table[0] = (0.0, 0)
    for row in range(1, count + 1):
        for stop in range(row, length - count + row + 1):
            before = (row - 1) * (length + 1)
            options = [
                (join(table[before + start][0], value(sums[stop] - sums[start])), start)
                for start in range(row - 1, stop)
                if sums[stop] - sums[start] <= most
            ]
            if options:
                table[row * (length + 1) + stop] = min(options)
    return table
