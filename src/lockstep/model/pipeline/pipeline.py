"""The `pipeline` axis. Each rank has some stages of the model.

This module adds to torch's schedules: a loss factor for each microbatch, microbatches of different
shapes in one call of a schedule, and a random stream for each part of the model. If a forward
fails, the schedule runs to its end before every rank raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.base import accelerator
from lockstep.base.errors import RecipeError
from lockstep.base.torch_private import schedule_losses
from lockstep.comm.world import World
from lockstep.model.expert.leaves import Leaves
from lockstep.model.pipeline.boundary import (
    Around,
    Boundary,
    PipelineMicrobatch,
    received_inputs,
    sendable_outputs,
)
from lockstep.model.pipeline.boundary_discovery import BoundaryDiscovery, PipelineFailure
from lockstep.model.pipeline.stage import (
    ONE_STAGE_A_RANK,
    SEVERAL_STAGES_A_RANK,
    StageForwards,
    VariableShapeStage,
)
from lockstep.model.pipeline.stages import Stages, schedule_calls
from lockstep.model.random_streams import ModuleRandomStreams
from lockstep.model.separate_parts import PartLeaf
from lockstep.model.shard import gathered_parameters
from lockstep.plan import Schedule


class Pipeline:
    """The stages of one model on one rank. Every rank of the pipeline must create a `Pipeline`, and
    call its methods in the same order."""

    def __init__(
        self,
        model: nn.Module,
        stages: Stages,
        pipeline: World,
        streams: ModuleRandomStreams,
        *,
        schedule: Schedule,
        together: Sequence[World] = (),
    ) -> None:
        self.stages = stages
        self.world = pipeline
        self.schedule = schedule
        self._group = pipeline.group or dist.group.WORLD
        self.forwards = StageForwards(model, stages, pipeline.rank, streams, together)
        self.modules = [nn.ModuleList(self.forwards.parts[stage]) for stage in self.forwards.own]
        self._failure = PipelineFailure(pipeline)
        self.raise_on_all_ranks = self._failure.raise_on_all_ranks
        self._discovery = BoundaryDiscovery(model, self.forwards, pipeline, self._failure)
        self.try_forward = self._discovery.try_forward
        self._after: Callable[[int], object] = lambda _: None
        self.on_gradient: Callable[[int, int], None] | None = None
        """Called with the stage's index in `modules` and the microbatch's index after the gradient
        of the stage's weights is complete."""
        self.on_exchange: Callable[[int, Sequence[int], Sequence[Tensor]], None] | None = None
        """Called with the microbatch's index, the position of the exchange, and the tensors. The
        loss of a microbatch counts as a sent tensor."""
        self.leaves: Sequence[PartLeaf] = ()
        self.expert_leaves: Sequence[Leaves] = ()
        """For each divided module of experts, the tensors that get the gradients of each rank's
        rows."""
        self._schedules: dict[Any, tuple[Any, list[VariableShapeStage]]] = {}
        self._microbatches: Sequence[PipelineMicrobatch] = ()
        self._routes: list[list[Boundary]] = []
        self._results: dict[int, Any] = {}
        self._rows: dict[int, list[Sequence[Tensor | float]]] = {}

    def watch(self, around: Around, after: Callable[[int], object]) -> None:
        """`run` calls `after` after each forward, in the order of microbatches. `run` does not call
        `after` for dummy microbatches. `around` and `after` take the stage's index in `modules`."""
        self.forwards.around, self._after = around, after

    @property
    def last_rank(self) -> int:
        """The rank of the pipeline that has the model's output."""
        return self.last_stage % self.stages.ranks

    @property
    def has_output(self) -> bool:
        return self.world.rank == self.last_rank

    @property
    def last_stage(self) -> int:
        return len(self.stages.ranges) - 1

    def parts_by_stage(self) -> dict[int, list[nn.Module]]:
        return self.forwards.parts

    def run(self, microbatches: Sequence[PipelineMicrobatch], columns: int = 1) -> Tensor:
        """Compute forward and backward of all microbatches. Returns every microbatch's
        `PipelineLoss.record` as a float64 tensor of shape (microbatches, columns). The returned
        tensor is the same on every rank. If a forward fails, every rank raises, and the gradients
        are invalid."""
        if not microbatches:
            return torch.zeros((0, columns), dtype=torch.float64, device=self.world.device)
        self._run_all(microbatches, backward=True)
        if accelerator.is_accelerator(self.world.device):
            self._failure.raise_if_any()
        size, device = len(microbatches) * columns + 1, self.world.device
        flat = torch.zeros(size, dtype=torch.float64, device=device)
        if self._failure.error is not None:
            flat[-1] = 1.0
        elif self._rows:
            nothing = [[0.0] * columns]
            rows = [self._rows.get(index, nothing) for index in range(len(microbatches))]
            numbers = [_sum(column, device) for each in rows for column in zip(*each, strict=True)]
            flat[:-1] = torch.stack(numbers)
        self._microbatches, self._rows = (), {}
        dist.all_reduce(flat, group=self._group)
        if flat.is_cpu and flat[-1]:
            self._failure.raise_known()
        return flat[:-1].view(len(microbatches), columns)

    @torch.no_grad()
    def forward(self, microbatches: Sequence[PipelineMicrobatch]) -> list[Any]:
        """Return each microbatch's `score` on the last rank, and an empty list on every other rank.
        All activations between stages are in memory at once, so pass only a few microbatches at a
        time."""
        if not microbatches:
            return []
        self._run_all(microbatches, backward=False)
        results, self._microbatches, self._results = self._results, (), {}
        self._failure.raise_if_any()
        if not self.has_output:
            return []
        return [results[index] for index in range(len(microbatches))]

    def _run_all(self, microbatches: Sequence[PipelineMicrobatch], *, backward: bool) -> None:
        self._microbatches, self._results, self._rows = microbatches, {}, {}
        self._failure.error = None
        self._routes = self._discovery.routes(microbatches, backward=backward)
        for start, stop in pairwise([*self._starts(), len(microbatches)]):
            for first, end, schedule in schedule_calls(stop - start, self.stages, self.schedule):
                self._run_schedule(start + first, start + end, schedule, backward)

    def _starts(self) -> list[int]:
        """Return the indices of the microbatches at which a new call of the schedule begins. Within
        one call of the schedule, the tensors between stages differ only in size."""
        kinds = list(map(_signatures, self._routes))
        starts = [
            0,
            *(place for place, (one, other) in enumerate(pairwise(kinds), 1) if one != other),
        ]
        for world in self.forwards.lockstep_ranks:
            starts = sorted(set(chain(*world.gather_values(starts))))
        return starts

    def _run_schedule(self, start: int, stop: int, schedule: str, backward: bool) -> None:
        key = stop - start, schedule, _signatures(self._routes[start]), backward
        if key not in self._schedules:
            self._schedules[key] = self._build_schedule(
                stop - start, schedule, self._routes[start], backward
            )
        run, stages = self._schedules[key]
        for stage in stages:
            stage.first, stage.routes = start, self._routes[start:stop]
            stage.losses = schedule_losses(run)
            stage.around = lambda chunk: self.forwards.computing(self._microbatches[start + chunk])
            stage.on_missing_gradient = partial(self._missing_gradient, stage.stage_index)
            local = self.forwards.own.index(stage.stage_index)
            stage.on_gradient = (
                None if self.on_gradient is None else partial(self.on_gradient, local)
            )
            stage.on_exchange = self.on_exchange
        try:
            run.step(target=torch.arange(stop - start) if backward else None, return_outputs=False)
        except RuntimeError:
            if not self.forwards.lockstep_ranks or self._failure.error is None:
                raise
        if self.forwards.lockstep_ranks and self._failure.error is not None:
            raise self._failure.error  # instead of the error that torch has raised from it
        for stage in stages:
            stage.release()

    def _build_schedule(
        self, count: int, schedule: str, route: list[Boundary], backward: bool
    ) -> tuple[Any, list[VariableShapeStage]]:
        loss = (lambda output, _: output) if backward else None
        last = self.last_stage
        stages = [
            VariableShapeStage(
                _StageModule(
                    self.forwards.parts[stage],
                    self._leaves_of(local),
                    partial(self._expert_leaves_of, local),
                    partial(self._forward, stage, local),
                ),
                stage,
                len(self.stages.ranges),
                self.world.device,
                input_args=route[stage - 1].tensors("meta") if stage else (),
                output_args=(
                    route[stage].tensors("meta")
                    if stage < last
                    else torch.empty((), device="meta", requires_grad=backward)
                ),
                group=self._group,
            )
            for local, stage in enumerate(self.forwards.own)
        ]
        if schedule in ONE_STAGE_A_RANK:
            kind = ONE_STAGE_A_RANK[schedule if backward else "gpipe"]
            return kind(stages[0], count, loss, scale_grads=False), stages
        return SEVERAL_STAGES_A_RANK[schedule](stages, count, loss, scale_grads=False), stages

    def weights(self) -> list[list[nn.Parameter]]:
        """Return the tensors that get gradients in each stage's backward. A leaf stands for a
        parameter that an earlier part of the model also has."""
        seen: set[nn.Parameter] = set()
        leaves = []
        for stage, module in enumerate(self.modules):
            own = [each for each in module.parameters() if each not in seen]
            seen.update(own)
            leaves.append([*own, *self._leaves_of(stage)])
        return leaves

    def _leaves_of(self, stage: int) -> list[nn.Parameter]:
        parts = set(self.modules[stage].children())
        return [leaf.parameter for leaf in self.leaves if leaf.part in parts]

    def _expert_leaves_of(self, stage: int) -> list[nn.Parameter]:
        modules = set(self.modules[stage].modules())
        return [each for leaves in self.expert_leaves for each in leaves.within(modules)]

    def _forward(self, stage: int, local: int, index: int, received: tuple[Tensor, ...]) -> Any:
        """Return zeros if the forward fails. The zeros keep other ranks from waiting for the
        output. If the forward has collectives, the error is raised at once, because the other ranks
        wait in the collectives."""
        try:
            return self._compute(stage, local, index, received)
        except Exception as error:
            self._failure.error = self._failure.error or error
            if self.forwards.lockstep_ranks:
                raise
            return self._zeros_with_gradient(stage, index, received)

    def _compute(self, stage: int, local: int, index: int, received: tuple[Tensor, ...]) -> Any:
        microbatch, route = self._microbatches[index], self._routes[index]
        is_last, has_backward = stage == len(route), torch.is_grad_enabled()
        with self.forwards.around(local), self.forwards.computing(microbatch):
            microbatch.before()
            value = self.forwards.output(stage, microbatch, received, route)
            if is_last:
                value = microbatch.score(value)
        term = microbatch.term()
        if has_backward and not (microbatch.is_dummy or microbatch.is_recomputed):
            self._after(local)
        if term is not None:
            self._rows.setdefault(index, []).append(term.record)
        if not is_last:
            route[stage].check(value, self.stages.last_part(stage))
            return sendable_outputs(value, None if term is None else term.scaled)
        if not has_backward:
            self._results[index] = value
            return torch.zeros((), device=self.world.device)
        # the record has no graph, so that torch can free the graph
        self._rows.setdefault(index, []).append(value.record)
        total = value.total * value.grad_output
        return total if term is None else total + term.scaled

    def _missing_gradient(self, stage: int) -> None:
        first = self.stages.parts[self.stages.ranges[stage].start]
        self._failure.error = self._failure.error or RecipeError(
            f"the output of the model's parts from {first!r} on does not depend on the input of "
            f"{first!r}, so no gradient reaches the trainable parameters before it; freeze them "
            "(requires_grad_(False)), or use their output"
        )

    def _zeros_with_gradient(self, stage: int, index: int, received: tuple[Tensor, ...]) -> Any:
        """Return a stage output of zeros, whose backward gives the received tensors zero
        gradients."""
        arrived = received_inputs(received) if received else ()
        link = sum(
            (tensor.sum() * 0 for tensor in arrived if tensor.requires_grad),
            start=torch.zeros((), device=self.world.device),
        )
        route = self._routes[index]
        if stage == len(route):
            has_gradient = link.requires_grad or not torch.is_grad_enabled()
            return link if has_gradient else link.requires_grad_()
        outputs = []
        for tensor in route[stage].tensors(self.world.device):
            zeros = torch.zeros_like(tensor)
            if tensor.requires_grad and link.requires_grad:
                zeros = zeros + link.to(zeros.dtype)
            elif tensor.requires_grad:
                zeros.requires_grad_()
            outputs.append(zeros)
        return tuple(outputs)


class _StageModule(nn.Module):
    """The module that torch's pipelining calls for a stage. Torch's zero-bubble schedule computes
    gradients for the module's parameters."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        leaves: Sequence[nn.Parameter],
        expert_leaves: Callable[[], Sequence[nn.Parameter]],
        compute: Callable[[int, tuple[Tensor, ...]], Any],
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.leaves = nn.ParameterList(leaves)
        self.expert_leaves = expert_leaves
        """Returns the leaves of experts after the forward, because sharded parameters exist only
        then."""
        self.compute = compute
        self.received: tuple[Tensor, ...] = ()
        self.index = 0
        """The microbatch that the next forward computes, as an index in `Pipeline.run`."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the leaves of autograd's graph in the stage: all-gathered parameters, and tensors
        that replace parameters."""
        yield from gathered_parameters(self) or super().parameters(recurse)
        yield from self.expert_leaves()

    def forward(self, *received: Tensor) -> Any:
        self.received = received
        return self.compute(self.index, received)


def _sum(numbers: Sequence[Tensor | float], device: torch.device) -> Tensor:
    first, *others = (_float64(number, device) for number in numbers)
    return sum(others, start=first)


def _float64(number: Tensor | float, device: torch.device) -> Tensor:
    if isinstance(number, Tensor):
        return number.to(device, torch.float64)
    # torch.tensor would make the host wait for the copy
    return torch.full((), number, dtype=torch.float64, device=device)


def _signatures(route: Sequence[Boundary]) -> tuple[Any, ...]:
    return tuple(boundary.signature for boundary in route)
