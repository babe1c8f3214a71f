"""Calls the `Tracer` from inside `Session` and `Step`, from outside of both: for as long as they do not call it themselves.

`lockstep verify` starts `lockstep.verify.entry`, which installs this before the user's script runs. Once `Session` reads `Tracing` itself,
this module and the entry can go, and the script be started as it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.training import session as sessions
from lockstep.training import step as steps
from lockstep.training.pair import Pair
from lockstep.watch.trace import Named, Tracer
from lockstep.watch.tracing import Tracing
from lockstep.watch.twin import Islands, change_batch, change_defaults, change_model


@dataclass(slots=True)
class _Traced:
    """What is traced of one pair."""

    tracing: Tracing
    tracer: Tracer
    number: int
    whole: bool
    step: int = 0
    gain: float = 1.0
    done: bool = False
    islands: Islands | None = None


@dataclass(slots=True)
class _Under:
    """The backward that is under way."""

    stack: list[tuple[Any, Any]] = field(default_factory=list)


def install() -> None:
    """Wrap the methods, where a trace is asked for. Called once, before a session is made. Raises `LaunchError`."""
    tracing = Tracing.read(os.environ)
    if tracing is not None:
        _wrap_session(tracing)
        _wrap_step()
        _wrap_pair()


def _wrap_session(tracing: Tracing) -> None:
    session = sessions.Session
    init, prepare, run = session.__init__, session.prepare, session.steps

    def __init__(self: Any, **given: Any) -> None:
        init(self, **given)
        if tracing.float64:
            self.precision = "fp32"

    def prepared(self: Any, build_model: Any, build_optimizer: Any, **given: Any) -> Any:
        def build_twin() -> Any:
            model = build_model()
            if isinstance(model, nn.Module):
                change_model(model, tracing)
            return model

        made = prepare(self, build_twin, build_optimizer, **given)
        if not hasattr(self, "_tracer"):
            plan = self.plan
            self._whole = plan.shard == plan.tensor == plan.pipeline == 1
            writes = all(self.mesh.axis(axis).rank == 0 for axis in ("replicate", "shard", "tensor")) if hasattr(self, "mesh") else None
            self._tracer = Tracer(tracing, rank=self.rank, world_size=self.world_size, plan=str(plan), whole=self._whole, writes=writes)
        self._pairs[-1].traced = _Traced(tracing, self._tracer, len(self._pairs) - 1, self._whole)
        return made

    def traced_steps(self: Any, data: Any, *, global_batch: int, microbatch: int | None = None, **given: Any) -> Iterator[Any]:
        change_defaults(tracing)
        size = tracing.microbatch or microbatch
        made = run(self, data, global_batch=global_batch, microbatch=size, **given)
        return _steps(self, made, {"global_batch": global_batch, "microbatch": size, "precision": self.precision})

    session.__init__ = __init__  # type: ignore[method-assign]
    session.prepare = prepared  # type: ignore[method-assign]
    session.steps = traced_steps  # type: ignore[method-assign]


def _steps(session: Any, made: Iterator[Any], facts: dict[str, Any]) -> Iterator[Any]:
    tracer = session._tracer
    tracer.facts(**facts, batchnorm=any(isinstance(m, _BatchNorm) for pair in session.pairs for m in pair.model.modules()))
    for pair in session.pairs:
        if pair.traced.step == 0:
            tracer.start(pair.traced.number, _whole(pair.model.named_parameters()), _whole(pair.model.named_buffers()))
            tracer.watch(pair.traced.number, zip(pair.names, pair.parameters, strict=True))
    for step in made:
        yield step
        if all(pair.traced.done for pair in session.pairs):
            tracer.close()
            if dist.is_initialized():
                dist.barrier()
            raise SystemExit(0)


def _wrap_step() -> None:
    step = steps.Step
    microbatches, backward, commit, contribution = step.microbatches, step.backward, step.commit, vars(steps)["contribution"]
    under = _Under()

    def traced_microbatches(self: Any) -> Iterator[Any]:
        for batch in microbatches(self):
            traced = self._pairs[0].traced
            traced.tracer.generator()
            with _islands(traced):
                yield change_batch(batch, traced.tracing)

    def traced_backward(self: Any, loss: Any, optimizer: Any = None) -> None:
        under.stack.append((self, self._pairs[self._place(optimizer)]))
        try:
            backward(self, loss, optimizer)
        finally:
            under.stack.pop()

    def traced_contribution(*given: Any, **named: Any) -> Any:
        part = contribution(*given, **named)
        _microbatch(*under.stack[-1], part)
        return part

    def traced_commit(self: Any, optimizer: Any = None, *, clip_norm: float | None = None) -> None:
        commit(self, optimizer, clip_norm=clip_norm)
        number = self._place(optimizer)
        _applied(self._pairs[number], self.committed[number], self.source, clip_norm)

    step.microbatches = traced_microbatches  # type: ignore[method-assign]
    step.backward = traced_backward  # type: ignore[method-assign]
    step.commit = traced_commit  # type: ignore[method-assign]
    vars(steps)["contribution"] = traced_contribution


def _wrap_pair() -> None:
    pair = Pair
    apply, rescale = pair.apply, pair.rescale

    def traced_rescale(self: Any, weights: Tensor, prescale: Tensor) -> None:
        self.traced.gain = float(prescale) / float(weights.double().sum())
        rescale(self, weights, prescale)

    def traced_apply(self: Any, *given: Any, **named: Any) -> Any:
        traced = self.traced
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        gradients = ((name, _scaled(parameter.grad, scale)) for name, parameter in zip(self.names, self.parameters, strict=True))
        traced.tracer.gradients(traced.number, traced.step, _whole(gradients), gain=traced.gain)
        return apply(self, *given, **named)

    pair.rescale = traced_rescale  # type: ignore[method-assign]
    pair.apply = traced_apply  # type: ignore[method-assign]


class _islands:
    """Watches a float64 reference's first microbatch for shorter types, and tells the trace of them."""

    def __init__(self, traced: _Traced) -> None:
        wanted = traced.tracing.float64 and traced.islands is None and not dist.is_initialized()
        self._traced = traced
        self._mode = Islands() if wanted else None

    def __enter__(self) -> None:
        if self._mode is not None:
            self._traced.islands = self._mode
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        if self._mode is not None:
            self._mode.__exit__(*error)  # type: ignore[no-untyped-call]
            self._traced.tracer.facts(islands=sorted(self._mode.found), eps=self._mode.eps)


def _microbatch(step: Any, pair: Any, part: Any) -> None:
    """Its gradient, computed on the side: what the run does with the graph afterwards is its own."""
    traced, current = pair.traced, step._current
    if not getattr(current, "counts", True):
        return
    index = current.index if hasattr(current, "index") and not isinstance(current, tuple) else current[0]
    gradients = None
    if traced.whole:
        scale = 1.0 if pair.loss_scale is None else pair.loss_scale.value
        own = torch.autograd.grad(part.total, pair.parameters, part.seed * scale, retain_graph=True, allow_unused=True)
        gradients = [(name, _scaled(gradient, scale)) for name, gradient in zip(pair.names, own, strict=True)]
    traced.tracer.microbatch(traced.number, traced.step, index, step.source.layout.samples_of(index), gradients)


def _whole(tensors: Named) -> Named:
    """Gathered one at a time: every rank runs through them alike."""
    for name, tensor in tensors:
        yield name, tensor.full_tensor() if tensor is not None and hasattr(tensor, "full_tensor") else tensor


def _scaled(gradient: Tensor | None, scale: float) -> Tensor | None:
    return gradient if gradient is None or scale == 1.0 else gradient / scale


def _applied(pair: Any, outcome: Any, source: Any, clip_norm: float | None) -> None:
    traced = pair.traced
    weight = float(outcome.weights.double().sum()) if outcome.weights is not None else None
    if weight is None and source.weights is not None:
        weight = sum(source.weights.values())
    traced.done = traced.tracer.applied(
        traced.number,
        traced.step,
        loss=outcome.loss(),
        weight=weight,
        norm=None if clip_norm is None else float(outcome.norm),
        lr=pair.schedule.rate(),
        parameters=_whole(pair.model.named_parameters()),
        buffers=_whole(pair.model.named_buffers()),
        states=_whole(_states(pair)),
    )
    traced.step += 1
    traced.gain = 1.0


def _states(pair: Any) -> Named:
    for name, parameter in zip(pair.names, pair.parameters, strict=True):
        for optimizer in pair.optimizers:
            for what, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield f"{name}/{what}", value
