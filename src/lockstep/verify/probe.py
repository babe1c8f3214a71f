"""Training as `lockstep verify` asks for it: the pairs and steps that write a trace, and what makes a run a twin.

`Session` turns to this where its environment asks for a trace (`lockstep.verify.trace_request`). In any other run nothing of it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.base.torch_private import BatchNormBase
from lockstep.comm.mesh import Mesh, full_tensor
from lockstep.plan import Plan
from lockstep.recipe import Precision
from lockstep.train.reducers.reducer import Engine
from lockstep.train.step import Step
from lockstep.train.step_result import Outcome
from lockstep.train.train_module import Pair
from lockstep.verify.perturb import Islands, change_batch, change_defaults, change_model, move_parameters
from lockstep.verify.trace import Named, Tracer
from lockstep.verify.trace_request import Tracing


class Traced:
    """One session's trace, and how the session is changed for it."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._tracer: Tracer | None = None
        self._looks_for_islands = tracing.float64

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Traced | None:
        """None where nobody asks for a trace. Raises `LaunchError`."""
        tracing = Tracing.read(environ)
        return None if tracing is None else cls(tracing)

    @property
    def tracer(self) -> Tracer:
        """There from `begin` on."""
        assert self._tracer is not None
        return self._tracer

    def precision(self, asked: Precision) -> Precision:
        """In float64 nothing is cast to a shorter type."""
        return "fp32" if self._tracing.float64 else asked

    def comm(self, asked: str) -> str:
        """Where no more than rounding is to be seen, nothing is compressed."""
        return "exact" if self._tracing.exact or self._tracing.float64 else asked

    def factory(self, build_model: Callable[[], Any]) -> Callable[[], Any]:
        """What builds the twin of the model that `build_model` builds."""

        def build_twin() -> Any:
            model = build_model()
            if isinstance(model, nn.Module):
                change_model(model, self._tracing)
            return model

        return build_twin

    def loaded(self, model: nn.Module) -> None:
        """The model of a twin has been given other values than `factory` changed."""
        if self._tracing.noise is not None:
            move_parameters(model, self._tracing.noise)

    def begin(self, pairs: Sequence[Pair], plan: Plan, microbatch: int | None, facts: Mapping[str, Any]) -> int | None:
        """Before the first step: write down the models as they are. Every rank calls it. Returns the microbatch to train with.

        `facts`: JSON values for whoever looks for causes.
        """
        change_defaults(self._tracing)
        microbatch = self._tracing.microbatch or microbatch
        mesh = pairs[0].mesh
        if self._tracer is None:
            rank, world_size = mesh.world.rank, mesh.world.size
            writes = all(mesh.axis(axis).rank == 0 for axis in ("replicate", "shard", "tensor"))
            self._tracer = Tracer(self._tracing, rank=rank, world_size=world_size, plan=str(plan), whole=_is_whole(mesh), writes=writes)
            self._looks_for_islands &= world_size == 1
        batchnorm = any(isinstance(module, BatchNormBase) for pair in pairs for module in pair.model.modules())
        self._tracer.facts(**facts, microbatch=microbatch, batchnorm=batchnorm)
        for number, pair in enumerate(_traced(pairs)):
            if pair.committed == 0:
                pair.begin(self, number)
                if self._tracing.eval_mode:
                    pair.draw_from_one_stream()
        return microbatch

    def batch(self, batch: Any) -> Any:
        """What a microbatch's forward and loss are computed from."""
        return change_batch(batch, self._tracing)

    @contextmanager
    def forward(self, batch: Any) -> Iterator[Any]:
        """Around the forward of a microbatch. Gives what it is computed from."""
        self.tracer.generator()
        batch = self.batch(batch)
        if not self._looks_for_islands:
            yield batch
            return
        self._looks_for_islands = False
        with Islands() as islands:
            yield batch
        self.tracer.facts(islands=sorted(islands.found), eps=islands.eps)

    def close(self) -> None:
        """At the session's end."""
        if self._tracer is not None:
            self._tracer.close()


class TracedPair(Pair):
    """A pair that writes down its microbatches' gradients, their sum, and what an update came to."""

    committed = 0
    """Its steps."""
    ended = False
    """Whether they are as many as were asked for."""
    _gain = 1.0

    def begin(self, traced: Traced, number: int) -> None:
        """Before its first step. `number`: its place in the session."""
        self.traced = traced
        self._number = number
        traced.tracer.start(number, _gathered(self.model.named_parameters()), _gathered(self.model.named_buffers()))
        traced.tracer.watch(number, zip(self.names, self.parameters, strict=True))

    def draw_from_one_stream(self) -> None:
        """So that whether a forward draws shows in the random generators: parts with streams of their own start them anew."""
        if self.streams is not None:
            self.streams.close()
            self.streams = None

    def engine(self, microbatches: int) -> Engine:
        return _TracedEngine(super().engine(microbatches), self)

    def rescale(self, weights: Tensor, prescale: Tensor) -> None:
        self._gain = float(prescale) / float(weights.double().sum())
        super().rescale(weights, prescale)

    def apply(self, step: int, clip_norm: float | None, *, measure: bool) -> tuple[Tensor | float, bool | None]:
        gradients = _gathered(self._unscaled(parameter.grad for parameter in self.parameters))
        self.traced.tracer.gradients(self._number, self.committed, gradients, gain=self._gain)
        return super().apply(step, clip_norm, measure=measure)

    def microbatch(self, index: int, samples: Sequence[int | str]) -> None:
        """The one that comes next."""
        self._index, self._samples = index, samples

    def take(self, total: Tensor, seed: Tensor) -> None:
        """Compute the gradient of this microbatch on the side: what the run does with the graph afterwards is its own.

        Not where this rank has no more than a slice of it.
        """
        gradients = None
        if _is_whole(self.mesh) and not self.mesh.assignment.slices:
            gradients = self._unscaled(torch.autograd.grad(total, self.parameters, seed, retain_graph=True, allow_unused=True))
        self.note_microbatch(self._index, self._samples, gradients)

    def note_microbatch(self, index: int, samples: Sequence[int | str], gradients: Named | None) -> None:
        """After its forward. `gradients`: its own, where this rank has them whole."""
        self.traced.tracer.microbatch(self._number, self.committed, index, samples, gradients)

    def note(self, outcome: Outcome, weight: float | None, clip_norm: float | None) -> None:
        """After the update. `weight`: the step's, where `weight` gave it."""
        if outcome.weights is not None:
            weight = float(outcome.weights.double().sum())
        self.ended = self.traced.tracer.applied(
            self._number,
            self.committed,
            loss=outcome.loss(),
            weight=weight,
            norm=None if clip_norm is None else float(outcome.norm),
            lr=self.schedule.rate(),
            parameters=_gathered(self.model.named_parameters()),
            buffers=_gathered(self.model.named_buffers()),
            states=_gathered(self._states()),
        )
        self.committed += 1

    def _unscaled(self, gradients: Iterable[Tensor | None]) -> Named:
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        for name, gradient in zip(self.names, gradients, strict=True):
            yield name, gradient if gradient is None or scale == 1.0 else gradient / scale

    def _states(self) -> Named:
        for name, parameter in zip(self.names, self.parameters, strict=True):
            for optimizer in self.optimizers:
                for what, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        yield f"{name}/{what}", value


class TracedStep(Step):
    """A step of `TracedPair`s. The commit that ends the last step asked for ends the process, with status 0."""

    def compute(self, inputs: Callable[[Any], Any] | None, loss: Callable[[Any, Any], Any]) -> None:
        pair = _traced(self._pairs)[0]
        if pair.pipeline is None and pair.threads is None:
            super().compute(inputs, loss)
            return
        twin = pair.traced.batch
        super().compute(None if inputs is None else lambda batch: inputs(twin(batch)), lambda output, batch: loss(output, twin(batch)))
        assert self._phase is not None
        for index in self._phase.seen:
            pair.note_microbatch(*self.source.layout.whole(index), None)

    def microbatches(self) -> Iterator[Any]:
        pairs = _traced(self._pairs)
        for batch in super().microbatches():
            assert self._current is not None
            index, samples = self.source.layout.whole(self._current.index)
            for pair in pairs:
                pair.microbatch(index, samples)
            with pairs[0].traced.forward(batch) as given:
                yield given

    def commit(self, optimizer: Any = None, *, clip_norm: float | None = None) -> None:
        super().commit(optimizer, clip_norm=clip_norm)
        pairs = _traced(self._pairs)
        number = self._place(optimizer)
        weights = self.source.weights
        pairs[number].note(self.committed[number], sum(weights.values()) if weights else None, clip_norm)
        if all(pair.ended for pair in pairs):
            if self._mesh.world.size > 1:
                dist.barrier()  # the first to end may take the rendezvous with it
            raise SystemExit(0)


class _TracedEngine:
    """An `Engine` whose pair sees each microbatch's loss before the engine does."""

    def __init__(self, engine: Engine, pair: TracedPair) -> None:
        self._engine = engine
        self._pair = pair
        self.begin = engine.begin
        self.finish = engine.finish
        self.close = engine.close

    def backward(self, total: Tensor, seed: Tensor, *, only_these: bool, is_dummy: bool) -> None:
        if not is_dummy:
            self._pair.take(total, seed)
        self._engine.backward(total, seed, only_these=only_these, is_dummy=is_dummy)


def _traced(pairs: Sequence[Pair]) -> list[TracedPair]:
    """A session that is traced has no others."""
    return [pair for pair in pairs if isinstance(pair, TracedPair)]


def _is_whole(mesh: Mesh) -> bool:
    """Whether every rank holds the whole model."""
    return all(mesh.axis(axis).size == 1 for axis in ("shard", "tensor", "pipeline"))


def _gathered(tensors: Named) -> Named:
    """One at a time, whole: every rank runs through them alike."""
    for name, tensor in tensors:
        yield name, tensor if tensor is None else full_tensor(tensor)
