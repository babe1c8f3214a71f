"""Compares the gradients of microbatches that two replicas have computed, to find a rank that
computes wrong results."""

from __future__ import annotations

import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lockstep.base.errors import WrongResultError, first_few
from lockstep.base.words import counted
from lockstep.hooks.checkpointing import Checkpointing
from lockstep.recomputed import RECEIVED, Computed, Recomputed, Reported, verdict
from lockstep.training.checksum import mixed
from lockstep.training.hook import ControlHook
from lockstep.training.recomputation import Recomputation
from lockstep.training.recovery import Recovery
from lockstep.training.run import Run
from lockstep.training.set_up import Remark


class RecomputationAudit(ControlHook):
    """Ends the run if two replicas compute different gradients of one microbatch. Deletes the
    checkpoints since the replicas last agreed. A recovery in place ends only the rank with the
    wrong gradient."""

    def __init__(self, checkpointing: Checkpointing, recovery: Recovery | None) -> None:
        self._checkpointing, self._recovery = checkpointing, recovery
        self._replicas: Sequence[Sequence[Sequence[int]]] | None = None

    def before_steps(self, run: Run) -> None:
        every, loop = run.context.recompute_every, run.training.loop
        if not every:
            return
        if loop.agreed is None:
            saved = (loop.resumed or {}).get("agreed")
            loop.agreed = run.step if saved is None else saved
        if run.context.mesh.data.size == 1:
            line = (
                f"warning: --recompute-every {every} with one replica; another one is needed to"
                " recompute its microbatches, so nothing is checked"
            )
            run.training.remark(Remark("not-recomputed", {"every": every}, line))

    def on_recomputation(self, run: Run, found: Recomputation) -> None:
        world, parameters = run.context.world, len(found.names)
        own, again = found.own.computed(parameters), found.again.computed(parameters)
        digests = torch.stack([_digest(own), _digest(again)]).reshape(1, 2)
        everyone = world.gather_rows(digests, [1] * world.size)
        replicas = self._replicas_in(run)
        if all(
            everyone[one, 0] == everyone[other, 1]
            for each in found.chosen
            for one, other in zip(*(chain(*replicas[data]) for data in each.ranks[:2]), strict=True)
        ):
            run.training.loop.agreed = run.step
            return
        mine = [own, again, found.decide().computed(parameters)]
        gathered = world.gather_values([_axes(run), socket.gethostname(), found.names, mine])
        axes, hosts, names, reported = zip(*gathered, strict=True)
        disagreement = Disagreement.of(
            found.chosen,
            [
                [
                    Reported(ranks, _join_results([reported[rank] for rank in ranks]))
                    for ranks in places
                ]
                for places in replicas
            ],
            names,
        )
        places = [", ".join([host, *several]) for host, several in zip(hosts, axes, strict=True)]
        self._end(run, disagreement, hosts, places)

    def _replicas_in(self, run: Run) -> Sequence[Sequence[Sequence[int]]]:
        """Every rank must call this method."""
        if self._replicas is None:
            data, stages = run.context.mesh.data, run.context.mesh.stages
            everyone = run.context.world.gather_values([data.rank, stages.rank])
            self._replicas = [
                [
                    [rank for rank, each in enumerate(everyone) if each == [replica, stage]]
                    for stage in range(stages.size)
                ]
                for replica in range(data.size)
            ]
        return self._replicas

    def _end(
        self, run: Run, disagreement: Disagreement, hosts: Sequence[str], places: Sequence[str]
    ) -> None:
        agreed = run.training.loop.agreed or 0
        deleted, not_deleted = self._checkpointing.delete_after(agreed)
        ranks = disagreement.ranks
        run.event(
            "microbatch-differs",
            microbatch=disagreement.microbatch,
            tensors=disagreement.tensors,
            first=disagreement.first,
            ranks=ranks,
            hosts=[hosts[rank] for rank in ranks],
            is_certain=disagreement.is_certain,
            agreed=agreed,
            deleted=deleted,
            not_deleted=not_deleted,
        )
        error = WrongResultError(disagreement.text(run.step, agreed, hosts, places, not_deleted))
        recovers = (
            self._recovery is not None and self._recovery.can_replace and disagreement.is_certain
        )
        if self._recovery is not None and recovers:
            self._recovery.distrust()
            if run.rank not in ranks:
                # the launcher makes these processes wait for new ranks
                raise error from ConnectionAbortedError("a rank leaves the run")
        raise error


def _join_results(reported: Sequence[Sequence[Sequence[Any]]]) -> list[Computed]:
    return [
        Computed(
            sorted(chain(*(exchanged for exchanged, _ in several))),
            list(chain(*(gradient for _, gradient in several))),
        )
        for several in zip(*reported, strict=True)
    ]


def _without_machines(wrong: Collection[str], hosts: Sequence[str]) -> str:
    others = [host for host in dict.fromkeys(hosts) if host not in wrong]
    if not others:
        return ""
    ranks = sum(host not in wrong for host in hosts)
    machines = f"--nnodes {len(others)}" if len(others) > 1 else "no --nnodes and no --rdzv"
    return (
        f", or without {' and '.join(sorted(wrong))}: give the same command on {first_few(others)}"
        f" alone, with {machines}, and a plan of {counted(ranks, 'process')}"
    )


def _digest(computed: Computed) -> Tensor:
    return mixed(torch.tensor([*(each for _, each in computed.exchanged), *computed.gradient]))


def _axes(run: Run) -> list[str]:
    mesh = run.context.mesh
    found = [f"{each.name} rank {mesh.axis(each.name).rank}" for each in mesh.larger]
    return found if len(found) > 1 else []


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Replicas have computed different gradients of the same microbatch."""

    microbatch: int
    tensors: int
    first: str
    """The first parameter whose gradient differs."""
    ranks: Sequence[int]
    """The ranks that computed wrong gradients. Unless `is_certain`, at least one of these ranks
    computed a wrong gradient."""
    is_certain: bool
    right: Sequence[int]
    """The ranks that computed this microbatch and are not in `ranks`."""
    has_third: bool = True
    """True if three replicas computed this microbatch and two of them agree."""
    was_received: bool = False
    """True if a rank in `ranks` received different values than the sending rank has recorded."""

    @classmethod
    def of(
        cls,
        chosen: Sequence[Recomputed],
        replicas: Sequence[Sequence[Reported]],
        names: Sequence[Sequence[str]],
    ) -> Disagreement:
        found = verdict(chosen, replicas)
        data = found.microbatch.ranks
        place, reported = next(
            (place, each)
            for place, each in enumerate(replicas[data[found.role]])
            if not set(found.ranks).isdisjoint(each.ranks)
        )
        gradients = [
            replicas[data[role]][place].computed[role].gradient for role in range(len(data))
        ]
        mine, other = gradients[found.role], gradients[found.other]
        columns = zip(chain(*(names[rank] for rank in reported.ranks)), mine, other, strict=True)
        differing = list(dict.fromkeys(name for name, one, two in columns if one != two))
        return cls(
            microbatch=found.microbatch.microbatch,
            tensors=len(differing),
            first=differing[0] if differing else "",
            ranks=found.ranks,
            is_certain=found.is_certain,
            right=sorted(
                {rank for each in data for rank in replicas[each][place].ranks}.difference(
                    found.ranks
                )
            ),
            has_third=found.has_third,
            was_received=found.position[1:2] == [RECEIVED],
        )

    def text(
        self,
        step: int,
        agreed: int,
        hosts: Sequence[str],
        places: Sequence[str],
        not_deleted: str | None,
    ) -> str:
        kept = (
            f"checkpoints after step {agreed}, where all agreed, are deleted: the same command"
            " resumes from the newest one that is left, or starts again"
            if not_deleted is None
            else f"checkpoints after step {agreed}, where all agreed, may be wrong, and cannot be"
            f" deleted ({not_deleted}): delete them before you resume"
        )
        finding, remedy = self._finding(places)
        if self.is_certain:
            remedy += _without_machines({hosts[rank] for rank in self.ranks}, hosts)
        return (
            f"after step {step}, microbatch {self.microbatch}: {finding}; with numerics=bitwise, a"
            f" microbatch has the same gradient on every device of one kind; {kept}; {remedy}"
        )

    def _finding(self, places: Sequence[str]) -> tuple[str, str]:
        what = f"gradient of {self.first}" if self.first else "output of its part of the model"
        if self.tensors > 1:
            what += f" and {self.tensors - 1} more tensor{'s' * (self.tensors > 2)}"
        who = " and ".join(f"rank {rank} ({places[rank]})" for rank in self.ranks)
        right = f"rank{'s' * (len(self.right) > 1)} {' and '.join(map(str, self.right))}"
        if self.was_received and self.has_third:
            return (
                f"{who} received other tensors than {right}, from a rank that sent the same: the"
                " connection between the two, or the memory of one of them, is wrong",
                "run without that connection",
            )
        if self.is_certain:
            subject = "it computes" if len(self.ranks) == 1 else "they compute"
            return (
                f"{who} computed another {what} than {right}: {subject} wrong results",
                "run without that device" + "s" * (len(self.ranks) > 1),
            )
        if self.has_third:
            return (
                f"{who} computed another {what} than {right}: one of them computes wrong results,"
                " and the others have computed with these",
                "run without these devices, or without each of them in turn",
            )
        return (
            f"{who} differ in the {what}: one of them computes wrong results, and no third rank"
            " agrees with one of them",
            "run with a third replica or shard, which decides, or without each of them in turn",
        )
