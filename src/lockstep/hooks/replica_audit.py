"""The hook that compares a checksum of each replica: flipped bits and changed models are found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lockstep.base.errors import DivergenceError
from lockstep.comm.mesh import Mesh, to_local
from lockstep.training.hook import ControlHook, Run
from lockstep.training.state import state_of

_WORD_BYTES = 8
_MIX = 0x9E3779B97F4A7C15 - 2**64
"""An odd number, so that every tensor's sum counts, each by its place."""


class ReplicaAudit(ControlHook):
    """Compares the ranks that stand at the same place of all axes but `replicate`."""

    def __init__(self, *, every: int) -> None:
        """`every`: steps from one comparison to the next; 0: never."""
        self._every = every
        self._agreed = 0
        """Steps done when they were the same the last time."""

    def between_steps(self, run: Run) -> None:
        if self._every and run.step % self._every == 0:
            self.compare(run)

    def compare(self, run: Run) -> None:
        """Compare now, unless it is done. Every rank calls it, and each raises `DivergenceError` if any differs from its replicas."""
        mesh = run.context.mesh
        replicas = mesh.axis("replicate")
        if replicas.size == 1 or not self._every or self._agreed == run.step:
            return
        state = state_of(run.modules, {}).tensors
        sums = torch.stack([checksum(to_local(tensor)) for tensor in state.values()]).cpu()
        everyone = replicas.gather_rows(mixed(sums).reshape(1), [1] * replicas.size)
        differs = bool((everyone != everyone[0]).any())
        if mesh.world.any(differs):
            raise DivergenceError(self._message(run.step, mesh, list(state), sums, differs))
        self._agreed = run.step

    def _message(self, step: int, mesh: Mesh, names: Sequence[str], sums: Tensor, differs: bool) -> str:
        """The same words on every rank."""
        replicas = mesh.axis("replicate")
        everyone = replicas.gather_rows(sums.reshape(1, -1), [1] * replicas.size)
        ranks = replicas.gather_values(mesh.world.rank)
        mine = difference(names, dict(zip(ranks, everyone.tolist(), strict=True))) if differs else ""
        found = next(text for text in mesh.world.gather_values(mine) if text)
        return (
            f"replicas differ after step {step}, and were the same after step {self._agreed}: {found}; a bit of memory has flipped, or a "
            "machine computes otherwise than the others, or a script changed the model on some ranks only; replicas are compared before a "
            "save: the same command goes on from the last one; leave out a machine that is named again"
        )


def difference(names: Sequence[str], sums: Mapping[int, Sequence[int]]) -> str:
    """In words, who differs from the most of them, in which tensor first. `sums`: of each rank, by tensor. Empty where all are the same."""
    for place, name in enumerate(names):
        counts = Counter(row[place] for row in sums.values())
        if len(counts) == 1:
            continue
        usual, most = counts.most_common(1)[0]
        odd = [rank for rank, row in sums.items() if row[place] != usual]
        several = sum(len({row[each] for row in sums.values()}) > 1 for each in range(len(names)))
        if 2 * most <= len(sums):
            who = f"ranks {', '.join(map(str, sums))} have {len(counts)} different values of"
        else:
            who = f"rank{'' if len(odd) == 1 else 's'} {', '.join(map(str, odd))} differ{'s' if len(odd) == 1 else ''} from the others in"
        return f"{who} {name}" + (f", the first of {several} tensors" if several > 1 else "")
    return ""


def checksum(tensor: Tensor) -> Tensor:
    """The sum of a tensor's bytes, taken as 64-bit numbers, and of the rest: one flipped bit changes it. A scalar, where the tensor is."""
    raw = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    whole = raw.numel() // _WORD_BYTES * _WORD_BYTES
    words = raw[:whole].view(torch.int64) if whole and raw.storage_offset() % _WORD_BYTES == 0 else raw[:whole].clone().view(torch.int64)
    return words.sum() + raw[whole:].sum(dtype=torch.int64)


def mixed(sums: Tensor) -> Tensor:
    """Combine several checksums into one."""
    total = torch.zeros((), dtype=torch.int64)
    for each in sums:
        total = total * _MIX + each
    return total
