"""The probe of `lockstep verify`: a hook that writes a run's trace, and the overrides that perturb the run.

A process that `lockstep verify` starts finds this module's name in LOCKSTEP_PROBE, and calls `install`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.base.torch_private import BatchNormBase
from lockstep.comm.mesh import Mesh, full_tensor
from lockstep.training.context import Overrides
from lockstep.training.hook import ControlHook, Run
from lockstep.training.train_module import TrainModule
from lockstep.verify.perturb import Islands, change_batch, change_defaults, change_model, move_parameters
from lockstep.verify.trace import Named, Tracer
from lockstep.verify.trace_request import Tracing


def install(environ: Mapping[str, str]) -> tuple[Overrides, list[TraceHook]]:
    """The overrides and hooks that the environment asks for. Raises `LaunchError`."""
    request = Tracing.read(environ)
    if request is None:
        return Overrides(), []
    hook = TraceHook(request)
    overrides = Overrides(
        precision="fp32" if request.float64 else None,  # in float64 nothing is cast to a shorter type
        gradient_compression="none" if request.exact or request.float64 else None,
        microbatch=request.microbatch,
        change_model=partial(change_model, tracing=request),
        change_loaded=None if request.noise is None else partial(move_parameters, seed=request.noise),
        change_batch=partial(change_batch, tracing=request) if request.float64 else None,
        probe=hook,
        bare=True,
    )
    return overrides, [hook]


class TraceHook(ControlHook):
    """Writes each microbatch's gradient, their sum, and the update. After the last step asked for it ends the process with status 0."""

    def __init__(self, request: Tracing) -> None:
        self._request = request
        self._tracer: Tracer | None = None
        self._looks_for_islands = request.float64
        self._run: Run | None = None
        self._committed: dict[int, int] = {}
        """Steps of each model, by its number."""

    @property
    def tracer(self) -> Tracer:
        assert self._tracer is not None, "before_steps has made it"
        return self._tracer

    @property
    def run(self) -> Run:
        assert self._run is not None, "before_steps has set it"
        return self._run

    def before_steps(self, run: Run) -> None:
        """Write the models as they are before the first step."""
        self._run = run
        change_defaults(self._request)
        mesh, world = run.context.mesh, run.context.world
        if self._tracer is None:
            writes = all(mesh.axis(axis).rank == 0 for axis in ("replicate", "shard", "tensor"))
            self._tracer = Tracer(
                self._request, rank=world.rank, world_size=world.size, plan=str(run.context.plan), whole=_is_whole(mesh), writes=writes
            )
            self._looks_for_islands &= world.size == 1
        batchnorm = any(isinstance(module, BatchNormBase) for each in run.modules for module in each.model.modules())
        self.tracer.facts(
            global_batch=run.global_batch,
            microbatch=run.microbatch,
            precision=run.context.precision,
            gradient_compression=run.context.requested_compression,
            batchnorm=batchnorm,
        )
        for number, module in enumerate(run.modules):
            if number not in self._committed:
                self._begin(number, module)

    def _begin(self, number: int, module: TrainModule) -> None:
        self._committed[number] = 0
        self.tracer.start(number, _gathered(module.model.named_parameters()), _gathered(module.model.named_buffers()))
        self.tracer.watch(number, zip(module.names, module.parameters, strict=True))
        if self._request.eval_mode and module.parallel.streams is not None:
            # One stream for all parts: that a forward draws then shows in the default generators.
            module.parallel.streams.close()
            module.parallel.streams = None

    @contextmanager
    def forward(self) -> Iterator[None]:
        """See `Probe`."""
        self.tracer.generator()
        if not self._looks_for_islands:
            yield
            return
        self._looks_for_islands = False
        with Islands() as islands:
            yield
        self.tracer.facts(islands=sorted(islands.found), eps=islands.eps)

    def before_backward(self, module: int, microbatch: int, total: Tensor, grad_output: Tensor) -> None:
        """See `Probe`. Computes the gradient of this microbatch on the side; not if this rank has only a slice of it."""
        traced, gradients = self.run.modules[module], None
        if _is_whole(traced.mesh) and not traced.mesh.assignment.slices:
            found = torch.autograd.grad(total, traced.parameters, grad_output, retain_graph=True, allow_unused=True)
            gradients = _unscaled(traced, found)
        self._note_microbatch(module, microbatch, gradients)

    def without_backward(self, module: int, microbatch: int) -> None:
        """See `Probe`."""
        self._note_microbatch(module, microbatch, None)

    def _note_microbatch(self, module: int, microbatch: int, gradients: Named | None) -> None:
        assert self.run.source is not None, "a step has begun"
        index, samples = self.run.source.layout.full_microbatch(microbatch)
        self.tracer.microbatch(module, self._committed[module], index, samples, gradients)

    def after_backward(self, run: Run, model: nn.Module) -> None:
        number = next(number for number, each in enumerate(run.modules) if each.model is model)
        module = run.modules[number]
        gradients = _gathered(_unscaled(module, (parameter.grad for parameter in module.parameters)))
        self.tracer.gradients(number, self._committed[number], gradients, gain=float(module.gain))

    def after_step(self, run: Run) -> None:
        weights = None if run.source is None else run.source.weights
        weight = sum(weights.values()) if weights else None
        ended = [self._note(number, module, weight) for number, module in enumerate(run.modules)]
        if all(ended):
            if run.context.world.size > 1:
                dist.barrier()  # the first process to end may take the rendezvous with it
            raise SystemExit(0)

    def _note(self, number: int, module: TrainModule, weight: float | None) -> bool:
        """Write a model's update. Returns True after the last step asked for. `weight`: the step's, if `Recipe.weight` gives it."""
        result = self.run.results[number]
        if result.weights is not None:
            weight = float(result.weights.double().sum())
        ended = self.tracer.applied(
            number,
            self._committed[number],
            loss=result.loss(),
            weight=weight,
            norm=None if result.clip_norm is None else float(result.norm),
            lr=module.schedule.rate(),
            parameters=_gathered(module.model.named_parameters()),
            buffers=_gathered(module.model.named_buffers()),
            states=_gathered(_states(module)),
        )
        self._committed[number] += 1
        return ended

    def on_end(self, run: Run) -> None:
        if self._tracer is not None:
            self._tracer.close()


def _unscaled(module: TrainModule, gradients: Iterable[Tensor | None]) -> Named:
    """The gradients by name, divided by the loss scale."""
    scale = 1.0 if module.loss_scale is None else module.loss_scale.value
    for name, gradient in zip(module.names, gradients, strict=True):
        yield name, gradient if gradient is None or scale == 1.0 else gradient / scale


def _states(module: TrainModule) -> Named:
    """The optimizers' state tensors, named parameter/state."""
    for name, parameter in zip(module.names, module.parameters, strict=True):
        for optimizer in module.optimizers:
            for what, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield f"{name}/{what}", value


def _is_whole(mesh: Mesh) -> bool:
    """True if every rank holds the whole model."""
    return all(mesh.axis(axis).size == 1 for axis in ("shard", "tensor", "pipeline"))


def _gathered(tensors: Named) -> Named:
    """Each tensor whole, one at a time. Every rank iterates over them."""
    for name, tensor in tensors:
        yield name, tensor if tensor is None else full_tensor(tensor)
