"""Matches the tensors of a file of pretrained weights with the model's tensors, and loads each
rank's part."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lockstep.base.dtypes import TensorSpec, dtype_name, tensor_spec, torch_dtype
from lockstep.base.errors import RecipeError, first_few
from lockstep.checkpoint.manifest import hash_bytes
from lockstep.checkpoint.pretrained_files import TensorFiles, open_tensors
from lockstep.checkpoint.tensor_shards import ShardCopy, TensorShard, plan_copies
from lockstep.comm.agreed_errors import raise_on_all_ranks
from lockstep.comm.mesh import to_local
from lockstep.comm.world import World
from lockstep.model.consistency import tensor_checksum
from lockstep.recipe.recipe import Weights
from lockstep.training.state import aliases, list_names, named_tensors

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PretrainedWeights:
    """An open file of pretrained weights, whose tensors are matched with a model's tensors."""

    weights: Weights
    tensors: TensorFiles
    theirs: Mapping[str, Sequence[str]]
    """Maps a model's tensor to its names in the file. A tied tensor of the model may have several
    names in the file."""
    kept: Sequence[str]  # the model's tensors that are not in the file

    @classmethod
    def of(cls, weights: Weights, model: nn.Module, world: World) -> PretrainedWeights:
        """Every rank must call this method, before the model is parallelized."""
        with ExitStack() as stack:

            def opened() -> tuple[PretrainedWeights, Any]:
                tensors = open_tensors(weights.path)
                stack.callback(tensors.close)
                theirs, kept = match_tensors(weights, tensors.specs, model)
                specs = hash_bytes([json.dumps(sorted(tensors.specs.items())).encode()])
                return cls(weights, tensors, theirs, kept), specs

            made, everyone = _exchange(opened, world)
            if len(set(everyone)) > 1:
                raise RecipeError(_not_alike(weights.path))
            stack.pop_all()
        return made

    @torch.no_grad()
    def fill(self, model: nn.Module, world: World) -> dict[str, Any]:
        """Load this rank's part of the weights, and close the file. Every rank must call this
        method."""
        state = {
            name: tensor
            for name, tensor in named_tensors(model, self.theirs)
            if name in self.theirs
        }
        with closing(self.tensors):
            _, everyone = _exchange(lambda: (None, self._filled(state)), world)
        converted = Counter(
            f"{theirs} to {ours}"
            for name, tensor in state.items()
            if (theirs := self._kind(name)[0]) != (ours := dtype_name(tensor.dtype))
        )
        seen: dict[str, int] = {}
        for found in everyone:
            if any(seen.setdefault(key, value) != value for key, value in found.items()):
                raise RecipeError(_not_alike(self.weights.path))
        return {
            "path": self.weights.path,
            "tensors": len(self.theirs),
            "kept": list(self.kept),
            "converted": dict(converted),
        }

    def _kind(self, name: str) -> TensorSpec:
        return self.tensors.specs[self.theirs[name][0]]

    def _filled(self, state: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the checksum of each part of the file that this rank read."""
        kinds = {name: self._kind(name) for name in state}
        full = [
            TensorShard(name, dtype, shape, (0,) * len(shape), shape)
            for name, (dtype, shape) in kinds.items()
        ]
        checksums: dict[str, int] = {}
        filled: Counter[str] = Counter()
        for copy in plan_copies(state, full):
            part = self._read(copy)
            to_local(state[copy.shard.name])[copy.target].copy_(part)
            filled[copy.shard.name] += part.numel()
            checksums[_part_key(copy)] = tensor_checksum(part)
        for name, tensor in state.items():
            assert filled[name] == to_local(tensor).numel(), f"{name} was filled in part"
        return checksums

    def _read(self, copy: ShardCopy) -> Tensor:
        first, *others = self.theirs[copy.shard.name]
        part = self.tensors.read(first, copy.source)
        for other in others:
            if tensor_checksum(self.tensors.read(other, copy.source)) != tensor_checksum(part):
                raise RecipeError(
                    f"weights {self.weights.path!r} have different values for {first!r} and"
                    f" {other!r}, and the model has one parameter for both; leave one out,"
                    f" Weights(names={{{other!r}: None}}), or do not tie them"
                )
        return part


def match_tensors(
    weights: Weights, theirs: Mapping[str, TensorSpec], model: nn.Module
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the file's names for each tensor of the model, and the model's tensors that the file
    lacks."""
    there = {_renamed(weights.names, name) for name in theirs}
    # parameters outside the state dict are loaded if they are trainable or in the file
    also = {
        name
        for name, parameter in model.named_parameters()
        if name in there or parameter.requires_grad
    }
    ours = {name: tensor_spec(tensor) for name, tensor in named_tensors(model, also)}
    found = _match_names(weights, theirs, ours, aliases(model, also))
    return found, sorted(ours.keys() - found.keys())


def _match_names(
    weights: Weights,
    theirs: Mapping[str, TensorSpec],
    ours: Mapping[str, TensorSpec],
    tied: Mapping[str, str],
) -> dict[str, list[str]]:
    found: dict[str, str] = {}
    for name in theirs:
        if (target := _renamed(weights.names, name)) is None:
            continue
        if target in found:
            raise RecipeError(
                f"weights {weights.path!r}: {found[target]!r} and {name!r} are both mapped to"
                f" {target!r}; map at most one name in the file to each name in the model; change"
                " Weights.names"
            )
        found[target] = name
    for pattern in weights.names:
        if not any(_match(pattern, name) is not None for name in theirs):
            raise RecipeError(
                f"Weights.names has {pattern!r}, which matches no name in {weights.path!r}:"
                f" {first_few(sorted(theirs))}; change it"
            )
    firsts = {target: tied.get(target, target) for target in found}
    missing = sorted(ours.keys() - firsts.values())
    unexpected = sorted(target for target, first in firsts.items() if first not in ours)
    others = [
        "{} {}{}, in the file {}{}".format(target, *ours[firsts[target]], *theirs[name])
        for target, name in found.items()
        if firsts[target] in ours and not _fits(theirs[name], ours[firsts[target]])
    ]
    differences = {
        "not in the file": [] if weights.missing == "keep" else missing,
        "only in the file": unexpected,
        "different": others,
    }
    if any(differences.values()):
        raise RecipeError(
            f"weights {weights.path!r} are not this model's: "
            + list_names(differences)
            + f"; {_remedy(missing, unexpected)}"
        )
    result: dict[str, list[str]] = {}
    for target, name in found.items():
        result.setdefault(firsts[target], []).append(name)
    return result


def _renamed(names: Mapping[str, str | None], name: str) -> str | None:
    for pattern, target in names.items():
        if (text := _match(pattern, name)) is not None:
            return None if target is None else target.replace("*", text)
    return name


def _match(pattern: str, name: str) -> str | None:
    """Return the text that matches the `*` of the pattern, or None without a match."""
    before, star, after = pattern.partition("*")
    if not star:
        return "" if name == pattern else None
    fits = (
        name.startswith(before) and name.endswith(after) and len(name) >= len(before) + len(after)
    )
    return name[len(before) : len(name) - len(after)] if fits else None


def _fits(theirs: tuple[str, tuple[int, ...]], ours: tuple[str, tuple[int, ...]]) -> bool:
    return theirs[1] == ours[1] and (
        theirs[0] == ours[0] or (_is_float(theirs[0]) and _is_float(ours[0]))
    )


def _is_float(dtype: str) -> bool:
    return hasattr(torch, dtype) and torch_dtype(dtype).is_floating_point


def _remedy(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    wanted = set(missing)
    before = Counter(
        name[: -len(end)] for name in unexpected for end in _ends(name) if end in wanted
    )
    if before:
        prefix = before.most_common(1)[0][0]
        rest = {
            f"{name.partition('.')[0]}.*": None
            for name in unexpected
            if not name.startswith(prefix)
        }
        return f"the names would fit with ls.Weights(path, names={ {f'{prefix}*': '*', **rest} })"
    there = set(unexpected)
    before = Counter(name[: -len(end)] for name in missing for end in _ends(name) if end in there)
    if before:
        return (
            "the names would fit with ls.Weights(path,"
            f" names={ {'*': f'{before.most_common(1)[0][0]}*'} })"
        )
    return (
        "map names with ls.Weights(path, names={'theirs.*': 'ours.*'}), where None leaves a tensor"
        " out; missing='keep' keeps the factory's values of tensors that are not in the file"
    )


def _ends(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(1, len(parts))]


def _part_key(copy: ShardCopy) -> str:
    starts = [side.start for side in copy.source]
    lengths = [side.stop - side.start for side in copy.source]
    return TensorShard(
        copy.shard.name, copy.shard.dtype, copy.shard.shape, tuple(starts), tuple(lengths)
    ).key


def _not_alike(path: str) -> str:
    return (
        f"weights {path!r} is not the same file on all processes; all ranks must read the same"
        " values; give each machine the same file"
    )


def _exchange(call: Callable[[], tuple[T, Any]], world: World) -> tuple[T, list[Any]]:
    """Return the JSON values of all ranks. If any rank has a `RecipeError`, all ranks raise it."""
    mine, told = raise_on_all_ranks(world, call, RecipeError)
    return mine, world.gather_values(told)
