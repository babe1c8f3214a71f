"""The `pipeline` axis: each rank holds some stages of the model; microbatches go through them one behind another.

Torch's pipelining runs the schedule: when which microbatch's forward or backward is computed, and what is sent. It is given the shapes that
its stages exchange: its own way to learn them computes every part and the loss once more, and hangs where a part fails on one rank. Ours
is: the loss belongs to the last stage's forward, with a scale of its own for each microbatch; microbatches of different shapes share a
schedule; each part draws from its own random stream; and where a forward fails, the schedule runs to its end, and every rank raises.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lockstep.base import errors
from lockstep.base.errors import LockstepError, RecipeError, UserError
from lockstep.comm.world import World
from lockstep.model.pipeline.boundary import Boundary, stage_inputs, stage_outputs
from lockstep.model.pipeline.sequential_check import SequentialCheck
from lockstep.model.pipeline.stages import Stages, calls
from lockstep.model.random_streams import ModuleRandomStreams
from lockstep.model.sync_batchnorm import SyncBatchNormExchange
from lockstep.plan import Schedule
from lockstep.train.reducers.step_stats import Number

if TYPE_CHECKING:
    from lockstep.model.pipeline.torch_stage import VariableShapeStage

STAGES_PER_RANK: dict[str, int] = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 1}
"""Stages that a schedule puts on each rank."""
FAILED = -1


class StageFailed(LockstepError):
    """Another rank of a pipeline failed, not by a mistake of the user's that has an error of its own."""


@dataclass(frozen=True, slots=True)
class PipelineLoss:
    """What becomes of the model's output for one microbatch. The gradient of `seed * total` belongs to it."""

    total: Tensor
    """Scalar with a gradient."""
    seed: Tensor
    """Scalar: its scale."""
    record: Sequence[Number]
    """Numbers that every rank is told: the loss's value, its weight."""


@dataclass(frozen=True, slots=True)
class PipelineMicrobatch:
    """One microbatch. Each rank has all of its own data rank's, in the same order; what it does not call may be anything."""

    position: tuple[int, ...]
    """Where its random streams start, see `ModuleRandomStreams.start`."""
    inputs: Callable[[], Any]
    """What the first part is called with: a tuple of arguments, a dict of keywords, or one tensor. Called twice, on the first rank."""
    score: Callable[[Any], Any]
    """(the last part's output) -> `PipelineLoss`; anything where only the forward is computed. Called on the last rank."""
    is_dummy: bool = False
    """True if it is computed only for other ranks' collectives."""


class Pipeline:
    """The stages of one model on one rank. Every rank of the pipeline makes one, and makes the same calls on it.

    `model`: this rank's parts have their values by the first call. `pipeline`: the ranks of the axis. `shards`: those whose forwards
    exchange something inside of a stage, as sharded parameters do: they must run alike. None: nobody.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Stages,
        pipeline: World,
        streams: ModuleRandomStreams,
        *,
        schedule: Schedule,
        shards: World | None = None,
    ) -> None:
        self.stages = stages
        self.world = pipeline
        self.schedule = schedule
        self._streams = streams
        self._shards = shards
        self.exchange: SyncBatchNormExchange | None = None
        """Where microbatches are split over pipelines, what their slices exchange with, in forwards and backwards. None: they are whole."""
        self._around: Callable[[int], AbstractContextManager[Any]] = lambda _: nullcontext()
        self._ran: Callable[[int], object] = lambda _: None
        self._group = pipeline.group or dist.group.WORLD
        self._own_stages = list(stages.on_rank(pipeline.rank))
        self._parts = {stage: [model.get_submodule(stages.parts[place]) for place in stages.cuts[stage]] for stage in self._own_stages}
        self.modules = [nn.ModuleList(self._parts[stage]) for stage in self._own_stages]
        """The parts of each of this rank's stages."""
        self._model = model
        self._sequential_check = SequentialCheck(model, stages.parts)
        self._checked_modes: set[bool] = set()
        """In which modes the model's forward was seen to call its parts as `run` does."""
        self._boundaries: dict[tuple[int, bool], list[Boundary]] = {}
        """By what the inputs look like, and whether there is a backward: what each stage but the last hands on."""
        self._built: dict[Any, tuple[Any, list[VariableShapeStage]]] = {}
        self._items: Sequence[PipelineMicrobatch] = ()
        self._routes: list[list[Boundary]] = []
        self._results: dict[int, Any] = {}
        self._failure: Exception | None = None

    def watch(self, around: Callable[[int], AbstractContextManager[Any]], ran: Callable[[int], object]) -> None:
        """`around`: entered around each stage's forward and the loss, autocast say. `ran`: called after each forward of `run` that
        counts, in the order of the microbatches. Both take the stage's place in `modules`."""
        self._around, self._ran = around, ran

    @property
    def last_rank(self) -> int:
        """Which rank of the pipeline has the model's output."""
        return (len(self.stages.cuts) - 1) % self.stages.ranks

    def run(self, items: Sequence[PipelineMicrobatch], columns: int = 1) -> Tensor:
        """Forward and backward of all microbatches: adds the gradient of Σ seed * total to this rank's parameters' `.grad`.

        Returns every microbatch's `PipelineLoss.record`, of `columns` numbers each: shape (items, columns), float64, the same on every rank.
        A failed forward raises on every rank, with the gradients then of no use.
        """
        if not items:
            return torch.zeros((0, columns), dtype=torch.float64, device=self.world.device)
        self._run_all(items, backward=True)
        flat = torch.zeros(len(items) * columns + 1, dtype=torch.float64, device=self.world.device)
        if self._failure is not None:
            flat[-1] = 1.0
        elif self.world.rank == self.last_rank:
            numbers = [number for place in range(len(items)) for number in self._results[place]]
            flat[:-1] = torch.stack([torch.as_tensor(number, dtype=torch.float64, device=flat.device) for number in numbers])
        dist.all_reduce(flat, group=self._group)
        if flat[-1]:
            self._raise()
        self._results = {}
        return flat[:-1].view(len(items), columns)

    @torch.no_grad()
    def forward(self, items: Sequence[PipelineMicrobatch]) -> list[Any]:
        """The forward alone. Returns what each item's `score` returned on the last rank, nothing on the others.

        All microbatches' boundaries are in memory together: hand in some at a time.
        """
        if not items:
            return []
        self._run_all(items, backward=False)
        self._raise_where_any_failed()
        results, self._results = self._results, {}
        return [results[place] for place in range(len(items))] if self.world.rank == self.last_rank else []

    def raise_on_all_ranks(self, compute: Callable[[], Any]) -> Any:
        """What `compute` returns here; where it fails on any rank, every rank raises. Every rank calls it."""
        self._failure, result = None, None
        try:
            result = compute()
        except Exception as error:
            self._failure = error
        self._raise_where_any_failed()
        return result

    def _run_all(self, items: Sequence[PipelineMicrobatch], *, backward: bool) -> None:
        self._items, self._results, self._failure = items, {}, None
        kinds = self._signatures()
        for place in self._undiscovered([(signature, backward) for signature in kinds]):
            self._boundaries[kinds[place], backward] = self._discover_boundaries(items[place], backward)
        self._routes = [self._boundaries[signature, backward] for signature in kinds]
        start = 0
        for stop in range(1, len(items) + 1):
            if stop == len(items) or _signatures_of(self._routes[stop]) != _signatures_of(self._routes[start]):
                for first, end, schedule in calls(stop - start, self.stages, self.schedule):
                    self._run_schedule(start + first, start + end, schedule, backward)
                start = stop
        self._items = ()

    def _run_schedule(self, start: int, stop: int, schedule: str, backward: bool) -> None:
        key = stop - start, schedule, _signatures_of(self._routes[start]), backward
        if key not in self._built:
            self._built[key] = self._build(stop - start, schedule, self._routes[start], backward)
        run, stages = self._built[key]
        for stage in stages:
            stage.routes, stage.losses = self._routes[start:stop], run._internal_losses
            stage.around = lambda chunk: self._marked_slice(self._items[start + chunk])
            stage.on_missing_gradient = partial(self._missing_gradient, stage.stage_index)
        places = torch.arange(start, stop)
        try:
            run.step(place=places, target=places if backward else None, return_outputs=False)
        except RuntimeError:
            if self._lockstep_ranks is None or self._failure is None:
                raise
        if self._lockstep_ranks is not None and self._failure is not None:
            raise self._failure  # and not the error that torch has raised from it
        for stage in stages:
            stage.release()

    def _build(self, count: int, schedule: str, route: list[Boundary], backward: bool) -> tuple[Any, list[VariableShapeStage]]:
        from lockstep.model.pipeline.torch_stage import ONE_STAGE_A_RANK, SEVERAL_STAGES_A_RANK, VariableShapeStage

        loss = (lambda output, _: output) if backward else None
        last = len(self.stages.cuts) - 1
        made = []
        for local, stage in enumerate(self._own_stages):
            made.append(
                VariableShapeStage(
                    _StageForward(self._parts[stage], _bound(self._forward, stage, local)),
                    stage,
                    len(self.stages.cuts),
                    self.world.device,
                    input_args=route[stage - 1].tensors("meta") if stage else (),
                    output_args=route[stage].tensors("meta") if stage < last else torch.empty((), device="meta", requires_grad=backward),
                    group=self._group,
                )
            )
        if schedule in ONE_STAGE_A_RANK:
            if not backward:
                schedule = "gpipe"
            return ONE_STAGE_A_RANK[schedule](made[0], count, loss, scale_grads=False), made
        return SEVERAL_STAGES_A_RANK[schedule](made, count, loss, scale_grads=False), made

    def _forward(self, stage: int, local: int, place: int, received: tuple[Tensor, ...]) -> Any:
        """A stage's forward of microbatch `place`, as torch's schedule calls it. Fails on no rank, so that no other rank waits for it."""
        try:
            return self._compute(stage, local, place, received)
        except Exception as error:
            self._failure = self._failure or error
            if self._lockstep_ranks is not None:  # whose exchanges nothing can stand in for
                raise
            return self._stand_in(stage, place, received)

    def _compute(self, stage: int, local: int, place: int, received: tuple[Tensor, ...]) -> Any:
        item, route = self._items[place], self._routes[place]
        with self._around(local), self._marked_slice(item):
            value = self._stage_output(stage, item, received, route)
            if stage == len(route):
                value = item.score(value)
                self._results[place] = value.record if torch.is_grad_enabled() else value  # the graph is torch's to let go of
        if torch.is_grad_enabled() and not item.is_dummy:
            self._ran(local)
        if stage < len(route):
            route[stage].check(value, self._name(stage))
            return stage_outputs(value)
        return value.total * value.seed if torch.is_grad_enabled() else torch.zeros((), device=self.world.device)

    def _missing_gradient(self, stage: int) -> None:
        first = self.stages.parts[self.stages.cuts[stage].start]
        self._failure = self._failure or RecipeError(
            f"what the parts of the model from {first!r} on return does not hang on what {first!r} is given, and parts before it have "
            "parameters to train, which no gradient would reach; freeze those (requires_grad_(False)), or use what they compute"
        )

    def _stage_output(self, stage: int, item: PipelineMicrobatch, received: tuple[Tensor, ...], route: Sequence[Boundary]) -> Any:
        """The output of the stage's last part."""
        parts = self._parts[stage]
        self._streams.start(item.position, self.stages.cuts[stage].start)
        if stage == 0:
            value = _call_with(parts[0], item.inputs())
            parts = parts[1:]
        else:
            arrived = stage_inputs(received)
            value = arrived[0] if route[stage - 1].single else arrived
        for part in parts:
            value = part(value)
        return value

    def _stand_in(self, stage: int, place: int, received: tuple[Tensor, ...]) -> Any:
        """Zeros in the place of a failed forward's output, whose gradient is zeros too."""
        arrived = stage_inputs(received) if received else ()
        link = sum((tensor.sum() * 0 for tensor in arrived if tensor.requires_grad), start=torch.zeros((), device=self.world.device))
        route = self._routes[place]
        if stage == len(route):
            return link if link.requires_grad or not torch.is_grad_enabled() else link.requires_grad_()
        outputs = []
        for tensor in route[stage].tensors(self.world.device):
            zeros = torch.zeros_like(tensor)
            if tensor.requires_grad:
                zeros = zeros + link.to(zeros.dtype) if link.requires_grad else zeros.requires_grad_()
            outputs.append(zeros)
        return tuple(outputs)

    def _undiscovered(self, kinds: Sequence[tuple[int, bool]]) -> list[int]:
        """Which microbatches to learn from: of each kind that is new the first; with others, those that are new to any of them."""
        if self._lockstep_ranks is None:
            firsts = {signature: place for place, signature in reversed(list(enumerate(kinds))) if signature not in self._boundaries}
            return sorted(firsts.values())
        new = torch.tensor([float(signature not in self._boundaries) for signature in kinds], device=self.world.device)
        dist.all_reduce(new, group=self._lockstep_ranks.group)
        return [place for place, flag in enumerate(new.tolist()) if flag]

    def _signatures(self) -> list[int]:
        """A number for what each microbatch's inputs look like, from the first rank."""
        numbers = torch.zeros(len(self._items), dtype=torch.int64, device=self.world.device)
        if self.world.rank == 0:
            try:
                numbers = torch.tensor([self._signature(item) for item in self._items], dtype=torch.int64, device=self.world.device)
            except Exception as error:
                self._failure = error
                numbers.fill_(FAILED)
        dist.broadcast(numbers, group=self._group, group_src=0)
        found: list[int] = numbers.tolist()
        if FAILED in found:
            self._raise()
        return found

    def _signature(self, item: PipelineMicrobatch) -> int:
        self._streams.start(item.position)
        inputs = item.inputs()
        if self._model.training not in self._checked_modes:
            self._sequential_check.check(lambda forward: _call_with(forward, inputs))
            self._checked_modes.add(self._model.training)
        leaves = tree_leaves(inputs)
        looks = [(list(leaf.shape), str(leaf.dtype)) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves]
        text = f"{looks} {self._model.training}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())

    def _discover_boundaries(self, item: PipelineMicrobatch, backward: bool) -> list[Boundary]:
        """What each stage but the last hands on for microbatches like this one, by computing them one after another. Every rank."""
        route: list[Boundary] = []
        value: tuple[Tensor, ...] = ()
        for stage in range(len(self.stages.cuts) - 1):
            said = None
            if stage in self._own_stages:
                local = self._own_stages.index(stage)
                try:
                    with (
                        self._around(local),
                        self._marked_slice(item),
                        _unchanged_buffers(self._parts[stage]),
                        torch.set_grad_enabled(backward),
                    ):
                        output = self._stage_output(stage, item, value, route)
                    said = Boundary.of(output, self._name(stage)).to_json()
                    value = tuple(tensor.detach() for tensor in stage_outputs(output))
                except Exception as error:
                    self._failure = error
            said = self.world.value_of(stage % self.stages.ranks, said)
            if said is None:
                self._raise()
            route.append(Boundary.read(said))
            if backward and not any(route[-1].gradients):  # every stage has something to train
                raise RecipeError(
                    f"the part {self._name(stage)!r} of the model hands on {route[-1].describe()}, and parts up to it have parameters to "
                    "train, which no gradient would ever reach; freeze those (requires_grad_(False)), or hand on what a gradient can go "
                    "through: no detach(), no whole numbers"
                )
            value = self._sent_to_next_stage(stage, value, route[-1])
        return route

    def _sent_to_next_stage(self, stage: int, value: tuple[Tensor, ...], boundary: Boundary) -> tuple[Tensor, ...]:
        source, target = stage % self.stages.ranks, (stage + 1) % self.stages.ranks
        if source == target or self.world.rank not in (source, target):
            return value
        if self.world.rank == source:
            for tensor in value:
                dist.send(tensor, group=self._group, group_dst=target)
            return ()
        value = boundary.tensors(self.world.device)
        for tensor in value:
            dist.recv(tensor.detach(), group=self._group, group_src=source)
        return value

    @property
    def _split_exchange(self) -> SyncBatchNormExchange | None:
        """What the slices at hand exchange with: in training alone."""
        return self.exchange if torch.is_grad_enabled() else None

    @property
    def _lockstep_ranks(self) -> World | None:
        """The ranks that must run alike, because their forwards exchange something. None: nobody."""
        return self._shards if self._split_exchange is None else self._split_exchange.world

    @contextmanager
    def _marked_slice(self, item: PipelineMicrobatch) -> Iterator[None]:
        """Around what is computed of a microbatch: recomputation in a backward takes its statistics as the forward did."""
        exchange = self._split_exchange
        if exchange is None:
            yield
            return
        exchange.is_dummy = item.is_dummy
        try:
            yield
        finally:
            exchange.is_dummy = None

    def _name(self, stage: int) -> str:
        return self.stages.parts[self.stages.cuts[stage].stop - 1]

    def _raise_where_any_failed(self) -> None:
        failed = torch.tensor([float(self._failure is not None)], device=self.world.device)
        dist.all_reduce(failed, group=self._group)
        if failed:
            self._raise()

    def _raise(self) -> None:
        """Raise what failed on any rank: there as it is, elsewhere with its text. Every rank."""
        mine, self._failure, self._items, self._results = self._failure, None, (), {}
        everyone = self.world.gather_values(None if mine is None else [type(mine).__name__, str(mine)])
        if mine is not None:
            raise mine
        rank, (name, text) = next((rank, said) for rank, said in enumerate(everyone) if said is not None)
        signature = getattr(errors, name, None)
        if isinstance(signature, type) and issubclass(signature, UserError):
            raise signature(text)
        raise StageFailed(f"rank {rank} of the pipeline failed: {name}: {text}")


class _StageForward(nn.Module):
    """A stage's forward, and the parameters that it uses."""

    def __init__(self, parts: Sequence[nn.Module], compute: Callable[[int, tuple[Tensor, ...]], Any]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.compute = compute

    def forward(self, *received: Tensor, place: Tensor) -> Any:
        return self.compute(int(place), received)


def _call_with(first: Callable[..., Any], inputs: Any) -> Any:
    return first(**inputs) if isinstance(inputs, dict) else first(*inputs) if isinstance(inputs, tuple) else first(inputs)


def _bound(forward: Callable[[int, int, int, tuple[Tensor, ...]], Any], stage: int, local: int) -> Callable[[int, tuple[Tensor, ...]], Any]:
    return lambda place, received: forward(stage, local, place, received)


def _signatures_of(route: Sequence[Boundary]) -> tuple[Any, ...]:
    return tuple(boundary.signature for boundary in route)


class _unchanged_buffers:
    """Within it, forwards leave no trace in the buffers of `parts`."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._kept = [(buffer, buffer.clone()) for part in parts for buffer in part.buffers()]

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        with torch.no_grad():
            for buffer, value in self._kept:
                if not torch.equal(buffer, value):  # torch counts a version for each write, but for those of BatchNorm
                    buffer.copy_(value)
