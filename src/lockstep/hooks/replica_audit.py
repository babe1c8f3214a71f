"""The hook that compares replicas by checksums, and the state of users' hooks: it finds flipped
bits and changed models."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.base.errors import CheckpointError, DivergenceError
from lockstep.checkpoint.json_state import encode
from lockstep.comm.mesh import Mesh, to_local
from lockstep.hooks.unsaved_state import UnsavedState
from lockstep.training.hook import ControlHook, Hook
from lockstep.training.run import Run
from lockstep.training.state import extra_state, state_of

_WORD_BYTES = 8
_MIX = 0x9E3779B97F4A7C15 - 2**64
"""Odd, so that the combined checksum depends on each tensor and on their order."""


class ReplicaAudit(ControlHook):
    """Compares replicas: ranks that differ in their position on the `replicate` axis only."""

    def __init__(self, *, every: int, hooks: Sequence[Hook]) -> None:
        """`every`: steps between comparisons; 0: never. `hooks`: the user's."""
        self._every = every
        self._unsaved = UnsavedState(hooks)
        self._agreed = 0  # steps done at the last comparison

    def on_start(self, run: Run) -> None:
        self._unsaved.begin(run)

    def between_steps(self, run: Run) -> None:
        if self._every and run.step % self._every == 0:
            self.compare(run)

    def compare(self, run: Run) -> None:
        """Compare, unless that was done after this step. Every rank calls it, and raises
        `DivergenceError` if replicas differ, `CheckpointError` if a hook's state does."""
        self._unsaved.tell(run)
        mesh = run.context.mesh
        for module in run.modules:
            if module.left_out is not None:
                module.left_out.agree(mesh.world)
        replicas = mesh.replicas
        if not self._every or self._agreed == run.step:
            return
        _compare_hooks(run)
        if replicas.size == 1:
            self._agreed = run.step
            return
        state = state_of(run.modules, {}).tensors
        sums = _checksums([to_local(tensor) for tensor in state.values()])
        everyone = replicas.gather_rows(mixed(sums).reshape(1), [1] * replicas.size)
        differs = bool((everyone != everyone[0]).any())
        if mesh.world.any(differs):
            raise DivergenceError(self._message(run.step, mesh, list(state), sums, differs))
        self._agreed = run.step

    def _message(
        self, step: int, mesh: Mesh, names: Sequence[str], sums: Tensor, differs: bool
    ) -> str:
        """Return the same words on every rank."""
        replicas = mesh.replicas
        everyone = replicas.gather_rows(sums.reshape(1, -1), [1] * replicas.size)
        ranks = replicas.gather_values(mesh.world.rank)
        mine = (
            replica_difference(names, dict(zip(ranks, everyone.tolist(), strict=True)))
            if differs
            else ""
        )
        found = next(text for text in mesh.world.gather_values(mine) if text)
        return (
            f"replicas differ after step {step}, and were the same after step {self._agreed}:"
            f" {found}; a bit of memory has flipped, or a machine computes wrong results, or a"
            " script changed the model on some ranks only; replicas are compared before each save:"
            " the same command resumes from the last one; leave out a machine that is named again"
        )


def _checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Return each checksum on the CPU."""
    sums = [checksum(tensor) for tensor in tensors]
    found = torch.empty(len(sums), dtype=torch.int64)
    for device in {each.device for each in sums}:
        places = [place for place, each in enumerate(sums) if each.device == device]
        found[places] = torch.stack([sums[place] for place in places]).cpu()
    return found


def _compare_hooks(run: Run) -> None:
    """Compare the states of users' hooks, included objects and modules' extra states."""
    others: dict[str, Callable[[], Any]] = {
        name: other.state_dict for name, other in run.stateful.items() if other is not run
    }
    for number, module in enumerate(run.modules):
        others[f"get_extra_state of model {number}"] = partial(extra_state, module.model)
    if run.context.world.size == 1:
        return
    # a stage has the state of its own part of the model
    stage = run.context.mesh.stages.rank
    everyone = run.context.world.gather_values(
        [stage, {name: _digest(name, other) for name, other in others.items()}]
    )
    firsts: dict[int, int] = {}
    for rank, (stage, digests) in enumerate(everyone):
        first = firsts.setdefault(stage, rank)
        if name := next(
            (name for name in others if digests[name] != everyone[first][1][name]), None
        ):
            raise CheckpointError(
                f"after step {run.step}: the state of {name!r} differs between rank {first} and"
                f" rank {rank}; a checkpoint holds one for all ranks; change it by what is alike on"
                " all of them (run.loss, metrics, the model's parameters, session.gather(rows)),"
                " not by a rank's own microbatches"
            )


def _digest(name: str, read: Callable[[], Any]) -> str:
    """Hash all that is not sharded; "" for a state that cannot be saved, as the save says."""
    tensors: dict[str, Tensor] = {}
    try:
        encoded = encode(read(), name, tensors)
    except CheckpointError:
        return ""
    whole = {path: tensor for path, tensor in tensors.items() if to_local(tensor) is tensor}
    sums = [int(checksum(tensor).item()) for tensor in whole.values()]
    return hashlib.sha256(json.dumps([encoded, sums], sort_keys=True).encode()).hexdigest()


def replica_difference(names: Sequence[str], sums: Mapping[int, Sequence[int]]) -> str:
    """Name the ranks that differ from the majority, and the first tensor; "" if all agree. `sums`:
    rank -> checksum of each tensor."""
    for place, name in enumerate(names):
        counts = Counter(row[place] for row in sums.values())
        if len(counts) == 1:
            continue
        usual, most = counts.most_common(1)[0]
        others = [rank for rank, row in sums.items() if row[place] != usual]
        several = sum(len({row[each] for row in sums.values()}) > 1 for each in range(len(names)))
        if 2 * most <= len(sums):
            who = f"ranks {', '.join(map(str, sums))} have {len(counts)} different values of"
        else:
            one = len(others) == 1
            who = (
                f"rank{'' if one else 's'} {', '.join(map(str, others))} differ{'s' if one else ''}"
                " from the others in"
            )
        return f"{who} {name}" + (f", the first of {several} tensors" if several > 1 else "")
    return ""


def checksum(tensor: Tensor) -> Tensor:
    """Sum a tensor's bytes as 64-bit numbers, on its device."""
    raw = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    whole = raw.numel() // _WORD_BYTES * _WORD_BYTES
    words = (
        raw[:whole].view(torch.int64)
        if whole and raw.storage_offset() % _WORD_BYTES == 0
        else raw[:whole].clone().view(torch.int64)
    )
    return words.sum() + raw[whole:].sum(dtype=torch.int64)


def mixed(sums: Tensor) -> Tensor:
    """Combine several checksums into one."""
    total = torch.zeros((), dtype=torch.int64)
    for each in sums:
        total = total * _MIX + each
    return total
