"""The hook that compares the gradients that several ranks computed of the same microbatches: it
finds a rank that computes wrong results."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lockstep.recomputed import Recomputed, ranks_at_fault
from lockstep.base.errors import WrongResultError
from lockstep.hooks.checkpointing import Checkpointing
from lockstep.training.checksum import mixed
from lockstep.training.hook import ControlHook
from lockstep.training.recomputation import Recomputation
from lockstep.training.recovery import Recovery
from lockstep.training.run import Run
from lockstep.training.set_up import Remark


class RecomputationAudit(ControlHook):
    """Compares recomputed gradients. If they differ, it deletes the checkpoints that may be wrong,
    and ends the run; with recovery in place, the rank that is wrong alone."""

    def __init__(self, checkpointing: Checkpointing, recovery: Recovery | None) -> None:
        self._checkpointing, self._recovery = checkpointing, recovery

    def before_steps(self, run: Run) -> None:
        every, loop = run.context.recompute_every, run.training.loop
        if not every:
            return
        if loop.agreed is None:
            saved = (loop.resumed or {}).get("agreed")
            loop.agreed = run.step if saved is None else saved
        if run.context.mesh.data.size == 1:
            line = (
                f"warning: --recompute-every {every} with one process; another one is needed to"
                " recompute its microbatches, so nothing is checked"
            )
            run.training.remark(Remark("not-recomputed", {"every": every}, line))

    def on_recomputation(self, run: Run, found: Recomputation) -> None:
        world, parameters = run.context.mesh.data, len(found.names)
        own, again = found.own.of(parameters), found.again.of(parameters)
        digests = torch.stack([mixed(own), mixed(again)]).reshape(1, 2)
        everyone = world.gather_rows(digests, [1] * world.size)
        if all(everyone[each.ranks[0], 0] == everyone[each.ranks[1], 1] for each in found.chosen):
            run.training.loop.agreed = run.step
            return
        third = found.decide().of(parameters)
        rows = [own.tolist(), again.tolist(), third.tolist()]
        gathered = world.gather_values([socket.gethostname(), rows])
        hosts = [host for host, _ in gathered]
        disagreement = Disagreement.of(
            found.chosen, {rank: rows for rank, (_, rows) in enumerate(gathered)}, found.names
        )
        self._end(run, disagreement, hosts)

    def _end(self, run: Run, disagreement: Disagreement, hosts: Sequence[str]) -> None:
        agreed = run.training.loop.agreed or 0
        deleted, not_deleted = self._checkpointing.delete_after(agreed)
        run.event(
            "microbatch-differs",
            microbatch=disagreement.microbatch,
            tensors=disagreement.tensors,
            first=disagreement.first,
            ranks=disagreement.ranks,
            hosts=[hosts[rank] for rank in disagreement.ranks],
            is_certain=disagreement.is_certain,
            agreed=agreed,
            deleted=deleted,
            not_deleted=not_deleted,
        )
        error = WrongResultError(disagreement.text(run.step, agreed, hosts, not_deleted))
        recovers = (
            self._recovery is not None and self._recovery.can_replace and disagreement.is_certain
        )
        if self._recovery is not None and recovers:
            self._recovery.distrust()
            if run.rank not in disagreement.ranks:
                # the launcher has these processes wait for new ranks
                raise error from ConnectionAbortedError("a rank leaves the run")
        raise error


@dataclass(frozen=True, slots=True)
class Disagreement:
    """The result of a comparison in which gradients differ."""

    microbatch: int
    """A microbatch whose gradients differ, of those that a named rank has computed."""
    tensors: int
    """Number of parameters whose gradients differ."""
    first: str
    """The name of the first one."""
    ranks: Sequence[int]
    """The ranks that are wrong; if not `is_certain`, the ranks of which one is."""
    is_certain: bool
    right: Sequence[int]
    """The ranks that computed the same gradient of the microbatch."""

    @classmethod
    def of(
        cls,
        chosen: Sequence[Recomputed],
        rows: Mapping[int, Sequence[Sequence[int]]],
        names: Sequence[str],
    ) -> Disagreement:
        """Return the disagreement on the `chosen` microbatches, of which at least one differs.
        `rows`: rank -> the checksums by parameter that it computed in each of its roles, which are
        the places in `Recomputed.ranks`."""
        votes = [
            (each, [rows[rank][role] for role, rank in enumerate(each.ranks)]) for each in chosen
        ]
        wrong, unclear = ranks_at_fault(votes)
        named = wrong or unclear
        each, gradients = next(
            (each, gradients)
            for each, gradients in votes
            if any(one != gradients[0] for one in gradients)
            and not set(named).isdisjoint(each.ranks)
        )
        columns = zip(names, zip(*gradients, strict=True), strict=True)
        differing = [name for name, column in columns if len(set(column)) > 1]
        return cls(
            microbatch=each.microbatch,
            tensors=len(differing),
            first=differing[0],
            ranks=named,
            is_certain=bool(wrong),
            right=sorted(set(each.ranks) - set(named)),
        )

    def text(self, step: int, agreed: int, hosts: Sequence[str], not_deleted: str | None) -> str:
        """Return the text of the error. `agreed`: steps done at the last comparison in which all
        gradients agreed. `hosts`: of each rank. `not_deleted`: the reason why later checkpoints
        could not be deleted."""
        tensors = self.first
        if self.tensors > 1:
            tensors += f" and {self.tensors - 1} more tensor{'s' * (self.tensors > 2)}"
        who = " and ".join(f"rank {rank} ({hosts[rank]})" for rank in self.ranks)
        if self.is_certain:
            right = f"rank{'s' * (len(self.right) > 1)} {' and '.join(map(str, self.right))}"
            subject = "it computes" if len(self.ranks) == 1 else "they compute"
            finding = (
                f"{who} computed another gradient of {tensors} than {right}: {subject} wrong"
                " results"
            )
            remedy = "run without that device"
        else:
            finding = (
                f"{who} computed different gradients of {tensors}: one of them computes wrong"
                " results, and no third rank agrees with one of them"
            )
            remedy = "run on three processes, which can tell, or without each of them in turn"
        kept = (
            f"checkpoints after step {agreed}, where all agreed, are deleted: the same command"
            " resumes from the newest one that is left, or starts again"
            if not_deleted is None
            else f"checkpoints after step {agreed}, where all agreed, may be wrong, and cannot be"
            f" deleted ({not_deleted}): delete them before you resume"
        )
        return (
            f"after step {step}, microbatch {self.microbatch}: {finding}; with numerics=bitwise, a"
            f" microbatch has the same gradient on every device of one kind; {kept}; {remedy}"
        )
