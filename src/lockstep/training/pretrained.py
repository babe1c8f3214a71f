"""A model that starts from others' weights: which of a file's tensors are which of the model's, and each rank's part of them into place."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lockstep.base.errors import RecipeError
from lockstep.checkpoint.block_hashes import hash_bytes
from lockstep.checkpoint.pretrained_files import TensorFiles, open_tensors
from lockstep.checkpoint.tensor_shards import ShardCopy, TensorShard, plan_copies, torch_dtype
from lockstep.comm.mesh import to_local
from lockstep.comm.world import World
from lockstep.model.consistency import checksum
from lockstep.recipe import Weights
from lockstep.training.state import aliases, listed, tensors_of

T = TypeVar("T")
Kinds = Mapping[str, tuple[str, tuple[int, ...]]]
"""Of tensors, by name: dtype and shape."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where a model's first values are."""

    weights: Weights
    tensors: TensorFiles
    theirs: Mapping[str, Sequence[str]]
    """The model's tensors that the file has values for, each by its first name -> the file's names of it: several where it is tied."""
    kept: Sequence[str]
    """The model's first names that it has none for."""

    @classmethod
    def of(cls, weights: Weights, model: nn.Module, world: World) -> Start:
        """Open the file, and find each of the model's tensors in it. Every rank calls it, before the model is laid out.

        Raises `RecipeError` on every rank alike.
        """
        ours = {name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in tensors_of(model)}
        tied = aliases(model)

        def start() -> Start:
            tensors = open_tensors(weights.path)
            try:
                theirs = matched(weights, tensors.specs, ours, tied)
            except RecipeError:
                tensors.close()
                raise
            return cls(weights, tensors, theirs, sorted(ours.keys() - theirs.keys()))

        made, failure = _tried(start)
        seen = None if made is None else hash_bytes([json.dumps(sorted(made.tensors.specs.items())).encode()])
        everyone = world.gather_values([failure, seen])
        try:
            _raise_first(said for said, _ in everyone)
            if len({seen for _, seen in everyone}) > 1:
                raise RecipeError(_not_alike(weights.path))
        except RecipeError:
            if made is not None:
                made.tensors.close()
            raise
        assert made is not None
        return made

    @torch.no_grad()
    def fill(self, model: nn.Module, world: World) -> dict[str, Any]:
        """Give this rank's part of the model, laid out, its values, and close the file. Every rank calls it; returns what to say of it.

        At no moment is more in memory than the model's parts and one part of one tensor. Raises `RecipeError` on every rank alike.
        """
        state = {name: tensor for name, tensor in tensors_of(model) if name in self.theirs}
        checksums, failure = _tried(lambda: self._filled(state))
        converted = Counter(
            f"{theirs} to {ours}"
            for name, tensor in state.items()
            if (theirs := self._kind(name)[0]) != (ours := str(tensor.dtype).removeprefix("torch."))
        )
        self.tensors.close()
        everyone = world.gather_values([failure, checksums])
        _raise_first(said for said, _ in everyone)
        seen: dict[str, int] = {}
        for _, found in everyone:
            if any(seen.setdefault(key, value) != value for key, value in found.items()):
                raise RecipeError(_not_alike(self.weights.path))
        return {"path": self.weights.path, "tensors": len(self.theirs), "kept": list(self.kept), "converted": dict(converted)}

    def _kind(self, name: str) -> tuple[str, tuple[int, ...]]:
        return self.tensors.specs[self.theirs[name][0]]

    def _filled(self, state: Mapping[str, Tensor]) -> dict[str, int]:
        """The checksum of each part as it was read, by its place. Raises `RecipeError`."""
        whole = {}
        for name in state:
            dtype, shape = self._kind(name)
            whole[name] = TensorShard(name, dtype, shape, (0,) * len(shape), shape)
        checksums: dict[str, int] = {}
        filled: Counter[str] = Counter()
        for copy in plan_copies(state, list(whole.values())):
            part = self._read(copy)
            to_local(state[copy.shard.name])[copy.target].copy_(part)
            filled[copy.shard.name] += part.numel()
            checksums[_place(copy)] = checksum(part)
        for name, tensor in state.items():
            assert filled[name] == to_local(tensor).numel(), f"{name} was filled in part"
        return checksums

    def _read(self, copy: ShardCopy) -> Tensor:
        first, *others = self.theirs[copy.shard.name]
        part = self.tensors.read(first, copy.source)
        for other in others:
            if checksum(self.tensors.read(other, copy.source)) != checksum(part):
                raise RecipeError(
                    f"weights {self.weights.path!r} have other values as {first!r} than as {other!r}, and the model has one parameter for "
                    f"both; leave one out, Weights(names={{{other!r}: None}}), or do not tie them"
                )
        return part


def matched(weights: Weights, theirs: Kinds, ours: Kinds, tied: Mapping[str, str]) -> dict[str, list[str]]:
    """The model's tensors -> the names in the file that have their values.

    `ours`: by first names. `tied`: other names of the same -> the first. Raises `RecipeError` where one is missing, unexpected or other.
    """
    found: dict[str, str] = {}
    for name in theirs:
        if (target := _renamed(weights.names, name)) is None:
            continue
        if target in found:
            raise RecipeError(
                f"weights {weights.path!r}: {found[target]!r} and {name!r} are both mapped to {target!r}; each name in the model has one "
                "in the file; change Weights.names"
            )
        found[target] = name
    for pattern in weights.names:
        if not any(_match(pattern, name) is not None for name in theirs):
            raise RecipeError(f"Weights.names has {pattern!r}, which matches no name in {weights.path!r}: {_some(theirs)}; change it")
    firsts = {target: tied.get(target, target) for target in found}
    missing = sorted(ours.keys() - firsts.values())
    unexpected = sorted(target for target, first in firsts.items() if first not in ours)
    others = [
        f"{target} {_said(ours[firsts[target]])}, in the file {_said(theirs[name])}"
        for target, name in found.items()
        if firsts[target] in ours and not _fits(theirs[name], ours[firsts[target]])
    ]
    differences = {"not in the file": [] if weights.missing == "keep" else missing, "in the file alone": unexpected, "others": others}
    if any(differences.values()):
        raise RecipeError(f"weights {weights.path!r} are not this model's: " + listed(differences) + f"; {_remedy(missing, unexpected)}")
    result: dict[str, list[str]] = {}
    for target, name in found.items():
        result.setdefault(firsts[target], []).append(name)
    return result


def _renamed(names: Mapping[str, str | None], name: str) -> str | None:
    """What a name in the file is in the model; None where it is left out."""
    for pattern, target in names.items():
        if (text := _match(pattern, name)) is not None:
            return None if target is None else target.replace("*", text)
    return name


def _match(pattern: str, name: str) -> str | None:
    """The text that stands for the pattern's `*`; None where the name does not match it."""
    before, star, after = pattern.partition("*")
    if not star:
        return "" if name == pattern else None
    fits = name.startswith(before) and name.endswith(after) and len(name) >= len(before) + len(after)
    return name[len(before) : len(name) - len(after)] if fits else None


def _fits(theirs: tuple[str, tuple[int, ...]], ours: tuple[str, tuple[int, ...]]) -> bool:
    """Floating-point numbers become those of the model's type; anything else is of the same type."""
    return theirs[1] == ours[1] and (theirs[0] == ours[0] or (_is_float(theirs[0]) and _is_float(ours[0])))


def _is_float(dtype: str) -> bool:
    return hasattr(torch, dtype) and torch_dtype(dtype).is_floating_point


def _remedy(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """What to write. Where the names differ by what stands before them, that."""
    wanted = set(missing)
    before = Counter(name[: -len(end)] for name in unexpected for end in _ends(name) if end in wanted)
    if before:
        prefix = before.most_common(1)[0][0]
        rest = {f"{name.partition('.')[0]}.*": None for name in unexpected if not name.startswith(prefix)}
        return f"the names would fit with ls.Weights(path, names={ {f'{prefix}*': '*', **rest} })"
    there = set(unexpected)
    before = Counter(name[: -len(end)] for name in missing for end in _ends(name) if end in there)
    if before:
        return f"the names would fit with ls.Weights(path, names={ {'*': f'{before.most_common(1)[0][0]}*'} })"
    return (
        "map names with ls.Weights(path, names={'theirs.*': 'ours.*'}), where None leaves a tensor out; missing='keep' keeps the factory's "
        "values of what the file does not have"
    )


def _ends(name: str) -> list[str]:
    """What is left of a name behind each of its dots."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(1, len(parts))]


def _some(names: Iterable[str]) -> str:
    found = sorted(names)
    return ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")


def _said(kind: tuple[str, tuple[int, ...]]) -> str:
    return f"{kind[0]}{kind[1]}"


def _place(copy: ShardCopy) -> str:
    starts = [side.start for side in copy.source]
    lengths = [side.stop - side.start for side in copy.source]
    return TensorShard(copy.shard.name, copy.shard.dtype, copy.shard.shape, tuple(starts), tuple(lengths)).key


def _not_alike(path: str) -> str:
    return f"weights {path!r} are other files on some processes than on others; all read the same; give each machine the same file"


def _tried(call: Callable[[], T]) -> tuple[T | None, str | None]:
    """What it returns, or what it says is wrong."""
    try:
        return call(), None
    except RecipeError as error:
        return None, str(error)


def _raise_first(failures: Iterable[str | None]) -> None:
    if failure := next((failure for failure in failures if failure is not None), None):
        raise RecipeError(failure)
