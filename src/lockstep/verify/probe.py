"""A hook that writes the trace of a run for `lockstep verify`, and functions that perturb the
run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.base.errors import RecipeError
from lockstep.base.nested import map_tensors
from lockstep.base.torch_private import BatchNormBase, TorchDispatchMode
from lockstep.comm.mesh import full_tensor
from lockstep.data.digests import sample_digests
from lockstep.data.loader import Microbatch
from lockstep.evidence.noise import add_noise, perturb_parameters
from lockstep.evidence.tracer import NamedTensors, Tracer
from lockstep.model.expert.find import ARGUMENTS, Experts, stacked_experts
from lockstep.model.expert.routers import router_beside
from lockstep.training.context import Overrides
from lockstep.training.hook import ControlHook
from lockstep.training.microbatches import StepLayout
from lockstep.training.run import Run
from lockstep.training.train_module import TrainModule
from lockstep.verify.jobs import TraceRequest
from lockstep.verify.sequence_output import SequenceOutput


def install(environ: Mapping[str, str]) -> tuple[Overrides, list[TraceHook]]:
    request = TraceRequest.read(environ)
    if request is None:
        return Overrides(), []
    hook, seed = TraceHook(request), request.noise_seed
    overrides = Overrides(
        # in float64 nothing is cast to a shorter dtype
        precision="fp32" if request.float64 else None,
        gradient_compression="none" if request.uncompressed or request.float64 else None,
        microbatch=request.microbatch,
        change_model=partial(change_model, request=request),
        change_loaded=None if seed is None else partial(perturb_parameters, seed=seed),
        change_batch=hook.see_batch,
        probe=hook,
        bare=True,
    )
    return overrides, [hook]


class TraceHook(ControlHook):
    """Writes a run's trace, and ends the process after the last requested step."""

    run: Run
    tracer: Tracer

    def __init__(self, request: TraceRequest) -> None:
        self._request = request
        self._finds_short_dtypes = request.float64
        self._steps: dict[int, int] = {}
        self._batches: dict[int, dict[str, str]] = {}
        self._results: dict[str, float] = {}
        """Numbers that the script has reduced over all ranks in this step, by name and number of
        the call."""
        self._together: list[int] = []
        """Ranks that divide the tokens of each microbatch. Empty if this rank computes all
        tokens."""
        self._outputs: dict[int, SequenceOutput] = {}
        self._layers: dict[str, tuple[Tensor, ...]] = {}
        """Tokens, chosen experts and output of each layer of experts in the latest forward."""
        self._in_microbatch = self._has_ended = False
        self._logged_steps = 0

    def before_steps(self, run: Run) -> None:
        self.run = run
        # done only now, because the models' initial values were drawn in the usual dtype
        if self._request.float64:
            torch.set_default_dtype(torch.float64)
        mesh, world, plan = run.context.mesh, run.context.world, str(run.context.plan)
        if not hasattr(self, "tracer"):
            self._is_whole = not run.context.plan.state_divided
            writes = all(
                mesh.axis(axis.name).rank == 0
                for axis in mesh.larger
                if "layers" not in axis.divides
            )
            self.tracer = Tracer(
                self._request.folder,
                self._request.steps,
                rank=world.rank,
                world_size=world.size,
                plan=plan,
                replicated=self._is_whole,
                writes=writes,
            )
            self._finds_short_dtypes &= world.size == 1
            if (tokens := mesh.loss_parts).size > 1:
                group = tokens.group or dist.group.WORLD
                self._together = dist.get_process_group_ranks(group)
        self.tracer.metadata(
            global_batch=run.global_batch,  # 0 if there is a batch_sampler
            microbatch=run.microbatch,
            precision=run.context.precision,
            gradient_compression=run.context.requested_compression,
            batchnorm=any(
                isinstance(part, BatchNormBase)
                for module in run.training.modules
                for part in module.model.modules()
            ),
        )
        for index, module in enumerate(run.training.modules):
            if index not in self._steps:
                self._begin(index, module)

    def _begin(self, index: int, module: TrainModule) -> None:
        self._steps[index] = 0
        self.tracer.start(
            index, _full(module.model.named_parameters()), _full(module.model.named_buffers())
        )
        self.tracer.watch(index, zip(module.names, module.parameters, strict=True))
        # in bitwise, a forward computes a single chunk
        if self._request.tokens and self.run.context.plan.numerics != "bitwise":
            module.model.register_forward_hook(partial(self._see_output, index))
        if module.balance is not None:
            module.balance.is_watched = True
        if self._request.experts:
            self._watch_experts(index, module)
        if self._request.eval_mode and module.parallel.streams is not None:
            # If there is no random stream per microbatch, a forward that draws random numbers
            # changes the default generators.
            module.parallel.streams.close()
            module.parallel.streams = None

    def see_batch(self, microbatch: Microbatch, batch: Any) -> Any:
        self._batches[microbatch.index] = sample_digests(batch)
        return map_tensors(batch, to_float64) if self._request.float64 else batch

    @contextmanager
    def forward(self) -> Iterator[None]:
        self.tracer.before_forward()
        self._layers = {}
        finds_short_dtypes, self._finds_short_dtypes = self._finds_short_dtypes, False
        self._in_microbatch = True
        try:
            with ShortDtypeOperations() if finds_short_dtypes else nullcontext() as operations:
                yield
        finally:
            self._in_microbatch = False
        if operations is not None:
            self.tracer.metadata(
                short_dtype_operations=sorted(operations.found), eps=operations.eps
            )

    def result(self, name: str, value: float) -> None:
        """Record a number that the script has reduced over all ranks. Calls for each microbatch are
        ignored, because their number on a rank depends on the plan."""
        if not self._in_microbatch:
            calls = sum(each.startswith(f"{name}, call ") for each in self._results)
            self._results[f"{name}, call {calls + 1}"] = value

    def before_backward(
        self, module: int, microbatch: int, total: Tensor, grad_output: Tensor
    ) -> None:
        """Record a microbatch with its gradient. Under SyncBatchNorm, a rank that has only some of
        the samples records no gradient."""
        each, gradients = self.run.training.modules[module], None
        parameters = each.leaves if self._is_whole and not self._slices else []
        output = self._outputs.pop(module, None)
        if wanted := [*parameters, *([] if output is None else [output.tensor])]:
            found = torch.autograd.grad(
                total, wanted, grad_output, retain_graph=True, allow_unused=True
            )
            if parameters:
                summed = each.by_parameter(found[: len(parameters)])
                gradients = _unscaled(each, summed.items())
            if output is not None:
                index, _ = self._layout.full_microbatch(microbatch)
                ((_, gradient),) = _unscaled(each, {"": found[-1]}.items())
                output.write(self.tracer, module, index, gradient)
        self._note_microbatch(module, microbatch, gradients)

    def _see_output(self, index: int, module: nn.Module, given: Any, output: Any) -> Any:
        """Keep a model's output in the first step. The hook returns views of the output, because
        FSDP's hooks on the output communicate."""
        if not self._in_microbatch or self._steps[index]:
            return None
        viewed = map_tensors(output, lambda each: each.view_as(each))
        cut = self.run.training.modules[index].parallel.cut
        found = SequenceOutput.of(viewed, 1 if cut is None else cut.dim)
        if found is None:
            return None
        self._outputs[index] = found
        return viewed

    def _watch_experts(self, index: int, module: TrainModule) -> None:
        mesh, parallel = self.run.context.mesh, module.parallel
        ranks = mesh.axis("expert").size
        layers: Mapping[str, Experts] = parallel.experts
        if ranks == 1:
            layers = stacked_experts(module.model, parallel.expert_patterns)
        for name, each in layers.items():
            each.module.register_forward_hook(
                partial(self._see_experts, index, name), with_kwargs=True
            )
        if ranks > 1:
            names = {
                name: {
                    "count": each.count,
                    "parameters": [key for key in module.names if key.startswith(f"{name}.")],
                    "router": _router(module, name, each),
                }
                for name, each in layers.items()
            }
            of_stages = mesh.stages.gather_values(names)
            every = {name: each for stage in of_stages for name, each in stage.items()}
            self.tracer.metadata(expert_ranks=ranks, experts=every)

    def _see_experts(
        self,
        index: int,
        name: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        given = [*args, *kwargs.values()]
        if self._in_microbatch and not self._steps[index] and len(given) == ARGUMENTS:
            self._layers[name] = given[0].detach(), given[1], output.detach()

    def without_backward(self, module: int, microbatch: int) -> None:
        self._note_microbatch(module, microbatch, None)

    @property
    def _slices(self) -> int:
        """Number of slices into which SyncBatchNorm splits a microbatch, or 0."""
        return self._layout.assignment.slices

    @property
    def _layout(self) -> StepLayout:
        return self.run.training.current.layout

    def _note_microbatch(
        self, module: int, microbatch: int, gradients: NamedTensors | None
    ) -> None:
        mesh = self.run.context.mesh
        if mesh.tokens.rank and mesh.loss_parts.size == 1:
            return  # rank 0 of the axis writes the same gradients
        index, samples = self._layout.full_microbatch(microbatch)
        balance = self.run.training.modules[module].balance
        batch = {} if self._slices else self._batches[microbatch]
        self.tracer.microbatch(
            module,
            self._steps[module],
            index,
            samples,
            batch,
            gradients,
            together=self._together,
            loads=None if balance is None else balance.counts_of_f(microbatch),
        )
        if self._layers:
            self.tracer.experts(module, index, self._layers)
            self._layers = {}

    def after_backward(self, run: Run, model: nn.Module) -> None:
        number, module = next(
            (number, each)
            for number, each in enumerate(run.training.modules)
            if each.model is model
        )
        pairs = zip(module.names, module.parameters, strict=True)
        gradients = _full(_unscaled(module, ((name, each.grad) for name, each in pairs)))
        self.tracer.gradients(number, self._steps[number], gradients, gain=float(module.gain))

    def after_step(self, run: Run) -> None:
        weights = None if run.training.source is None else run.training.source.weights
        weight = sum(weights.values()) if weights else None
        modules = enumerate(run.training.modules)
        ended = [self._note(number, module, weight) for number, module in modules]
        self._has_ended = all(ended)
        if self._request.float64:  # an evaluation would fail, because its data is not float64
            self._end_if_last(run)

    def between_steps(self, run: Run) -> None:
        at = run.metrics_at
        now = {name: value for name, value in run.metrics.items() if at.get(name) == run.step}
        self.tracer.logged(self._logged_steps, {**self._results, **now, **run.training.logged})
        self._results = {}
        self._logged_steps += 1
        self._end_if_last(run)

    def _end_if_last(self, run: Run) -> None:
        if self._has_ended:
            run.context.world.end_process()

    def _note(self, number: int, module: TrainModule, weight: float | None) -> bool:
        result = self.run.training.results.get(number)
        if result is None:  # skipped
            return self._request.steps is not None and self._steps[number] >= self._request.steps
        if result.weights is not None:
            weight = float(result.weights.double().sum())
        ended = self.tracer.step(
            number,
            self._steps[number],
            loss=result.loss(),
            terms=result.term_losses(),
            weight=weight,
            norm=None if result.clip_norm is None else float(result.norm),
            lr=module.schedule.rates().get("lr"),
            parameters=_full(module.model.named_parameters()),
            buffers=_full(module.model.named_buffers()),
            states=_full(_states(module)),
        )
        self._steps[number] += 1
        return ended

    def on_end(self, run: Run) -> None:
        if hasattr(self, "tracer"):
            self.tracer.close()


def _unscaled(module: TrainModule, gradients: NamedTensors) -> NamedTensors:
    scale = module.scale
    for name, gradient in gradients:
        yield name, gradient if gradient is None or scale == 1.0 else gradient / scale


def _router(module: TrainModule, name: str, experts: Experts) -> list[str]:
    try:
        router = router_beside(module.model, name, experts)
    except RecipeError:
        return []
    return [each for each in module.names if each.startswith(f"{router}.")]


def _states(module: TrainModule) -> NamedTensors:
    for name, parameter in zip(module.names, module.parameters, strict=True):
        for optimizer in module.optimizers:
            for what, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield f"{name}/{what}", value


def _full(tensors: NamedTensors) -> NamedTensors:
    """Yield each tensor with its shards gathered, one at a time. All ranks must iterate."""
    for name, tensor in tensors:
        yield name, tensor if tensor is None else full_tensor(tensor)


def change_model(model: nn.Module, request: TraceRequest) -> None:
    """Change a model that has just been built. In float64, the model keeps the initial values of
    its original dtype."""
    if request.float64:
        model.to(torch.float64)
    if request.eval_mode:
        model.eval()
        model.train = lambda mode=True: model  # type: ignore[method-assign]  # the script cannot leave eval mode
    if request.noise_seed is not None:
        add_noise(model, request.noise_seed)


def to_float64(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor


class ShortDtypeOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations of a float64 run that return a shorter dtype. After an operation with
    a shorter dtype, the run is only as exact as that dtype."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()
        self.eps = torch.finfo(torch.float64).eps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not any(isinstance(value, Tensor) and value.dtype is torch.float64 for value in args):
            return out
        for tensor in out if isinstance(out, list | tuple) else [out]:
            if (
                isinstance(tensor, Tensor)
                and tensor.is_floating_point()
                and tensor.dtype is not torch.float64
            ):
                self.found.add(str(func.overloadpacket))
                self.eps = max(self.eps, torch.finfo(tensor.dtype).eps)
        return out
