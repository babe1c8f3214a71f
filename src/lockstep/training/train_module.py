"""A model with its optimizers on one rank."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.assignment import MicrobatchAssignment
from lockstep.base import accelerator
from lockstep.base.errors import RecipeError
from lockstep.base.torch_private import divides_gradients, has_step_hooks, step_is_profiled
from lockstep.comm.mesh import to_local
from lockstep.logging.flops import Flops, peak_of
from lockstep.model.model_snapshot import ModelSnapshot
from lockstep.model.parallelize import Parallelized
from lockstep.model.running_statistics import RunningStatistics
from lockstep.model.shard import unsharded
from lockstep.model.tensor.apply import reduce_partial_gradients
from lockstep.recipe.checks import has_error_feedback
from lockstep.training import precision
from lockstep.training.balance import ExpertBalance
from lockstep.training.context import Context
from lockstep.training.executor import (
    Executor,
    PipelineExecutor,
    SequenceExecutor,
    SerialExecutor,
)
from lockstep.training.left_out import LeftOut, complete_state_dict
from lockstep.training.loss import Contribution, LossKind
from lockstep.training.optim import gradient_norm
from lockstep.training.optim.modes import OptimizerModes
from lockstep.training.optim.operands import align_operands, may_multiply
from lockstep.training.optim.optimizer_state import Settings, changed_settings, settings_of
from lockstep.training.optim.optimizers import needs_closure
from lockstep.training.optim.schedule import Schedule
from lockstep.training.reducers.agreement import StepAgreement
from lockstep.training.reducers.compression import compression_for
from lockstep.training.reducers.gradient_hooks import GradientHooks
from lockstep.training.reducers.reducer import (
    GradientReducer,
    ReducerChoice,
    build_reducer,
    choose_reducer,
)
from lockstep.training.reducers.step_stats import Number, StepStats
from lockstep.training.reducers.tied import TiedGradients


def held_by(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, nn.Parameter]:
    held = {
        id(parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return {
        name: parameter for name, parameter in model.named_parameters() if id(parameter) in held
    }


@dataclass(frozen=True, slots=True)
class HostValues:
    """The part of a `TrainModule`'s state in host memory. The values may be steps ahead of the
    device's tensors."""

    schedule: list[dict[str, Any]]
    prescale: Tensor | None
    trainable: list[str] | None
    groups: list[list[dict[str, Any]]]


Closure = Callable[[], Any]


class TrainModule:
    """Reduces, scales and clips a model's gradients, and steps its optimizers."""

    choice: ReducerChoice

    def __init__(
        self,
        model: nn.Module,
        parameters: dict[str, nn.Parameter],
        optimizers: Sequence[Optimizer],
        *,
        parallel: Parallelized,
        context: Context,
        schedule: Callable[[Any], Any] | None,
        steppers: Mapping[int, Callable[[], None]] | None = None,
    ) -> None:
        self._steppers = steppers or {}
        self.model = model
        self.optimizers = optimizers
        self.needs_closure = any(map(needs_closure, optimizers))
        self.may_draw = any(
            not type(each).step.__module__.startswith("torch.optim.") for each in optimizers
        )
        """True if an optimizer may draw random numbers."""
        self._aligns_operands = context.bitwise and may_multiply(optimizers)
        self.held = held_by(model, optimizers)
        """The parameters that optimizers hold, including frozen parameters, by name."""
        self.modes = OptimizerModes(optimizers, self.held)
        self.balance: ExpertBalance | None = None
        """None without `Recipe.balance`. Set after the model is built."""
        self.left_out: LeftOut | None = None
        """None if the run saves no checkpoints."""
        self.mesh = context.mesh
        self._sums_partial = any(axis.sums == "partial" for axis in context.mesh.larger)
        self.device = context.device
        self.parallel = parallel
        self._set_parameters(parameters)
        self.settings = settings_of(optimizers)
        self.schedule = Schedule(schedule, optimizers)
        self.norm = gradient_norm.GradientNorm(
            context.mesh, bitwise=context.bitwise, slices=context.plan.slices
        )
        self.flops = Flops(model, peak_of(context.device, context.precision))
        self.autocast = precision.autocast(
            context.precision, context.device, keep_casts=precision.keeps_casts(context.plan)
        )
        self._bitwise = context.bitwise
        self._compression = compression_for(
            context.gradient_compression, context.mesh.summed(), self.parameters, self.names
        )
        self._has_error_feedback = has_error_feedback(context.gradient_compression)
        self.forward_knows_weight: bool | None = None
        """True if the loss function returns an `ls.Loss`. None before the first commit."""
        self.terms: list[str] = []  # the names of the loss's terms if there are several
        # see `LossKind`
        self.repeats = 1
        self.counted: dict[str, list[tuple[float, bool]]] = {}
        self.prescale: Tensor | None = None
        """Divisor of an `ls.Loss` before its backward: a power of two near the latest step's sum of
        weights."""
        # the factor by which the latest step's summed gradient was multiplied
        self.gain: Tensor | float = 1.0
        self.snapshot = ModelSnapshot(model, optimizers)
        self.gradient_hooks = GradientHooks(model, in_pipeline=parallel.pipeline is not None)
        self.agreement = self._new_agreement()
        self._reducer: GradientReducer | None = None
        self._max_microbatches = 0
        self._chosen_trainable: list[str] | None = None  # the names last given to `set_trainable`
        self.executor = self._new_executor()
        stages = [model] if parallel.pipeline is None else parallel.pipeline.modules
        self.statistics = [RunningStatistics(stage, context.mesh) for stage in stages]
        if parallel.pipeline is not None:
            parallel.pipeline.watch(self._around_stage, self._after_stage)
        self.norm.begin(model, dict(self._counted))
        fused = all(
            group.get("fused") for optimizer in optimizers for group in optimizer.param_groups
        )
        # In fp16 the host must know if a step was skipped: torch schedulers must not count it, and
        # compression must discard its residuals.
        host_must_know = context.precision == "fp16" and (
            self._compression is not None or self.schedule.counts_updates
        )
        self._gates_on_device = (
            fused
            and not host_must_know
            and all(accelerator.has_streams(to_local(p).device) for p in self.parameters)
        )
        self.loss_scale = precision.loss_scale(
            context.precision, self.device if self._gates_on_device else None
        )
        is_plain = all(
            to_local(parameter) is parameter and parameter.dtype is torch.float32
            for parameter in self.parameters
        )
        self._optimizer_unscales = (
            fused and is_plain and not self._bitwise and all(map(divides_gradients, optimizers))
        )
        """True if the optimizers divide the gradients by the fp16 loss scale in their step. Always
        False with bitwise numerics."""

    def set_trainable(self, names: Collection[str]) -> None:
        """Every rank must call this method, between two steps. The optimizers keep the state of
        frozen parameters."""
        if self._compression is not None or self.parallel.pipeline is not None:
            what = "gradient compression" if self._compression is not None else "a pipeline"
            raise RecipeError(
                f"freezing or unfreezing with {what}, which is built for the parameters at the"
                " start; leave out one of the two"
            )
        with unsharded(self.model):
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(name in names)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in names)
            if name not in names:
                parameter.grad = None
        self._chosen_trainable = list(names)
        self._set_parameters({name: each for name, each in self.held.items() if name in names})
        self.snapshot.note_trainable()
        if self._reducer is not None:
            self._close_reducer()
            self.begin_loop(self._max_microbatches)

    def _set_parameters(self, trainable: dict[str, nn.Parameter]) -> None:
        self.names, self.parameters = list(trainable), list(trainable.values())
        self._complex = [each for each in self.parameters if each.is_complex()]
        self._tied: TiedGradients | None = None
        if self.parallel.shared_parameters:
            separate = self.parallel.separate
            self._tied = TiedGradients(
                trainable,
                self.parallel.shared_parameters,
                self.mesh.stages,
                {} if separate is None else separate.leaves,
            )
        # the parameters whose gradients this rank adds to the global norm
        self._counted = [
            (name, each)
            for name, each in trainable.items()
            if self._tied is None or self._tied.counts(each)
        ]

    def _new_executor(self) -> Executor:
        pipeline, cut = self.parallel.pipeline, self.parallel.cut
        if pipeline is not None:
            return PipelineExecutor(pipeline, self.autocast, cut)
        serial = (self.model, self.device, self.autocast, self.flops, self.parallel.streams)
        return SerialExecutor(*serial) if cut is None else SequenceExecutor(*serial, cut=cut)

    def _new_agreement(self) -> StepAgreement:
        cut = self.parallel.cut
        if cut is None:
            return StepAgreement(self.mesh.summed())
        return StepAgreement(self.mesh.summed(), [cut.reads], cut.counts)

    def check_counts(self) -> None:
        """Check that token counts that the forward reads on the host do not change its output.
        Every rank must call this method."""
        if (step := self.agreement.unchecked()) is None:
            return
        cut, streams = self.parallel.cut, self.parallel.streams
        assert cut is not None, "it alone reads counts"
        paused = nullcontext() if streams is None else streams.paused()
        with self.autocast, paused:
            cut.check_counts(step, self.mesh.summed())
        self.agreement.settle()

    def begin_loop(self, max_microbatches: int) -> None:
        """Every rank must call this method."""
        self.choice = choose_reducer(
            self.mesh,
            bitwise=self._bitwise,
            compressed=self._compression is not None,
            in_chunks=self._bitwise and self.parallel.cut is not None,
        )
        if self._reducer is None or max_microbatches > self._max_microbatches:
            self.agreement.refuse_late()
            self._close_reducer()
            self._max_microbatches = max_microbatches
            self.agreement = self._new_agreement()
            self._reducer = build_reducer(
                self.choice,
                self.model,
                self.parameters,
                self.mesh,
                bitwise=self._bitwise,
                max_microbatches=max_microbatches,
                compression=self._compression,
                complete=reduce_partial_gradients if self._sums_partial else None,
                leaves=self.parallel.expert_leaves,
                part_leaves=[] if self._tied is None else self._tied.leaves,
                pipeline=self.parallel.pipeline,
                agreement=self.agreement,
            )

    @property
    def names_of_leaves(self) -> list[str]:
        """The name of a tied parameter may occur several times."""
        return [*self.names, *(() if self._tied is None else self._tied.names_of_leaves)]

    @property
    def leaves(self) -> list[nn.Parameter]:
        """The parameters, followed by tensors that collect the gradients of tied parameters."""
        parts = [] if self._tied is None else self._tied.leaves
        return [*self.parameters, *(leaf.parameter for leaf in parts)]

    def by_parameter(self, gradients: Iterable[Tensor | None]) -> dict[str, Tensor | None]:
        """Sum a tied parameter's gradients over the parts of the model that use it."""
        summed: dict[str, Tensor | None] = {}
        for name, gradient in zip(self.names_of_leaves, gradients, strict=True):
            before = summed.get(name)
            if before is None or gradient is None:
                summed[name] = before if gradient is None else gradient
            else:
                summed[name] = before + gradient
        return summed

    @property
    def scale(self) -> float:
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    @property
    def overflows(self) -> int:
        """Number of consecutive steps with an overflow."""
        return 0 if self.loss_scale is None else self.loss_scale.overflows

    @property
    def overflowed_at(self) -> float:
        """Loss scale in the last step that overflowed."""
        return math.inf if self.loss_scale is None else 2.0 * self.loss_scale.value

    @property
    def reducer(self) -> GradientReducer:
        assert self._reducer is not None, "begin_loop comes first"
        return self._reducer

    def begin_step(self, count: int, samples: int, assignment: MicrobatchAssignment) -> None:
        if self.prescale is None:
            self.prescale = torch.tensor(
                2.0 ** round(math.log2(samples)),
                dtype=accelerator.wide_dtype(self.device),
                device=self.device,
            )
        if self._compression is not None and self._has_error_feedback:
            self._compression.begin(self.scale / self.prescale.item())
        self.reducer.begin_step(count, assignment)

    def reduce(
        self, values: Sequence[Number], weights: Sequence[Number] | None, *, flag: bool
    ) -> StepStats:
        self.agreement.refuse_late()
        for parameter in self._complex:
            if parameter.grad is not None:
                # torch may conjugate a gradient lazily, when it is read
                parameter.grad = parameter.grad.resolve_conj()
        stats = self.reducer.reduce(values, weights, flag=flag)
        if stats.agreement is not None:
            self.agreement.compare(stats.agreement, self.parameters)
            self.check_counts()
        if self._tied is not None:
            self._tied.sum()
        if self._aligns_operands:
            align_operands(self.parameters, self.optimizers)
        return stats

    def grad_output(self, part: Contribution) -> Tensor:
        return (
            part.grad_output
            if self.loss_scale is None
            else part.grad_output * self.loss_scale.divisor
        )

    def agree_on_loss(self, kinds: Sequence[LossKind]) -> None:
        """Every rank must call this method at the first commit."""
        everyone = self.mesh.world.gather_values(kinds[0] if kinds else None)
        self.forward_knows_weight, self.terms, self.repeats, self.counted = next(
            kind for kind in everyone if kind is not None
        )

    def divide_by_weight(self, weights: Tensor | None, values: Tensor | list[float]) -> None:
        """Divide the gradients by the sum of `weights`. If the sum of `weights` is 0, the gradients
        become 0 where the losses are 0, and NaN otherwise. Also chooses `prescale`, by which the
        next step divides the loss before its backward."""
        self.gain = 1.0
        if weights is None:
            return
        assert self.prescale is not None, "begin_step comes first"
        total = weights.double().sum()
        valid = (weights >= 0).all() & (total > 0) & torch.isfinite(total)
        nothing = (weights == 0).all() & (torch.as_tensor(values, device=weights.device) == 0).all()
        self.gain = torch.where(valid, self.prescale / total, torch.where(nothing, 0.0, math.nan))
        if gradients := self.gradients():
            gradient_norm.scale(gradients, self.gain.to(gradients[0].dtype))
        self.prescale = torch.where(
            valid, torch.exp2(torch.round(torch.log2(total))), self.prescale
        )

    def call_gradient_hooks(self) -> None:
        """Every rank must call this method."""
        self.gradient_hooks.call(1.0 if self.loss_scale is None else self.loss_scale.divisor)

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def counted_gradients(self) -> list[tuple[str, Tensor]]:
        """If several pipeline stages share a parameter, only the first stage counts its
        gradient."""
        return [(name, each.grad) for name, each in self._counted if each.grad is not None]

    def clip(self, clip_norm: float | None) -> None:
        if clip_norm is not None:
            norm = self.norm.of([parameter.grad for _, parameter in self._counted])
            gradient_norm.clip(self.gradients(), norm, clip_norm)

    def apply(
        self,
        step: int,
        clip_norm: float | None,
        *,
        measure: bool,
        closure: Callable[[], Closure] | None = None,
    ) -> tuple[Tensor | float, bool | None]:
        """Return `StepResult.norm` and `StepResult.applied`."""
        divisor: Tensor | float = 1.0
        if self.loss_scale is not None:
            if self._optimizer_unscales:
                divisor = self.loss_scale.divisor
            else:
                self.loss_scale.unscale(self.gradients())
        counted = [parameter.grad for _, parameter in self._counted]
        norm = (
            self.norm.of(counted) if measure or clip_norm is not None else self.norm.check(counted)
        ) / divisor
        if clip_norm is not None:
            if self._optimizer_unscales:
                divisor = divisor * gradient_norm.clip_divisor(norm, clip_norm)
            else:
                gradient_norm.clip(self.gradients(), norm, clip_norm)
        self.schedule.before_step(step)
        applied = self._step_optimizers(norm, divisor, closure)
        if applied is not False:
            self.schedule.after_step()
        return norm, applied

    def _step_optimizers(
        self, norm: Tensor | float, divisor: Tensor | float, closure: Callable[[], Closure] | None
    ) -> bool | None:
        if not isinstance(divisor, Tensor) and divisor == 1.0:
            return self._step_if_finite(norm, closure)
        grad_scale = torch.as_tensor(divisor, dtype=torch.float32, device=self.device)
        for optimizer in self.optimizers:
            optimizer.grad_scale = grad_scale  # type: ignore[attr-defined]  # read by torch's fused optimizers
        try:
            return self._step_if_finite(norm, closure)
        finally:
            for optimizer in self.optimizers:
                vars(optimizer).pop("grad_scale", None)

    def _step_if_finite(
        self, norm: Tensor | float, closure: Callable[[], Closure] | None
    ) -> bool | None:
        if self._gates_on_device:
            found_inf = (~torch.isfinite(torch.as_tensor(norm, device=self.device))).float()
            for optimizer in self.optimizers:
                optimizer.found_inf = found_inf  # type: ignore[attr-defined]  # read by torch's fused optimizers
                optimizer.step()
            if isinstance(self.loss_scale, precision.DeviceLossScale):
                self.loss_scale.update_by(found_inf)
            return None
        applied = math.isfinite(float(norm))
        if self._compression is not None and not applied:
            self._compression.forget()
        if self.loss_scale is not None:
            self.loss_scale.update(overflowed=not applied)
        if applied:
            given = None if closure is None else closure()
            for optimizer in self.optimizers:
                stepper = self._steppers.get(id(optimizer))
                if given is not None:
                    optimizer.step(given)
                else:
                    _step_without_closure(optimizer) if stepper is None else stepper()
        return applied

    @contextmanager
    def _around_stage(self, stage: int) -> Iterator[None]:
        self.statistics[stage].discard()  # undo updates by recomputation
        with self.autocast:
            yield

    def _after_stage(self, stage: int) -> None:
        self.statistics[stage].note_microbatch()

    def steps_whole_tensors(self, optimizer: Optimizer) -> bool:
        """True if the optimizer steps on full tensors, each on one rank."""
        return id(optimizer) in self._steppers

    def model_state(self) -> Mapping[str, Any]:
        """Includes tensors outside of the state dict that an optimizer holds or that have changed.
        Every rank must call this method."""
        changed = {} if self.left_out is None else self.left_out.changed()
        return self.mesh.union(complete_state_dict(self.model, self.held, changed, self.mesh.world))

    def host_values(self) -> HostValues:
        groups = [
            [_copied(group) for group in self.modes.groups_of(optimizer)]
            for optimizer in self.optimizers
        ]
        return HostValues(self.schedule.state_dict(), self.prescale, self._chosen_trainable, groups)

    def state_dict(self, host: HostValues) -> dict[str, Any]:
        return {
            "schedule": host.schedule,
            "loss_scale": (
                None
                if self.loss_scale is None
                else [self.loss_scale.value, self.loss_scale.in_a_row]
            ),
            "overflows": self.overflows,
            "prescale": None if host.prescale is None else host.prescale.item(),
            "trainable": host.trainable,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["trainable"] is not None:
            self.set_trainable(state["trainable"])
        self.schedule.load_state_dict(state["schedule"])
        if self.loss_scale is not None and state["loss_scale"] is not None:
            self.loss_scale.value, self.loss_scale.in_a_row = state["loss_scale"]
            self.loss_scale.overflows = state["overflows"]
        if state["prescale"] is not None:
            self.prescale = torch.tensor(
                state["prescale"], dtype=accelerator.wide_dtype(self.device), device=self.device
            )

    def keep_changed_settings(self, saved: Settings) -> None:
        """Apply the optimizer settings that the script has changed since the checkpoint."""
        for number, group, name in changed_settings(saved, self.settings):
            value = self.settings[number][group][name]
            if name == "lr":
                self.schedule.change_base(number, group, saved[number][group][name], value)
            else:
                self.optimizers[number].param_groups[group][name] = (
                    tuple(value) if isinstance(value, list) else value
                )

    def close(self) -> None:
        for statistics in self.statistics:
            statistics.close()
        for hooks in (self.parallel.streams, self.parallel.separate):
            if hooks is not None:
                hooks.close()
        if self.balance is not None:
            self.balance.close()
        self._close_reducer()
        self.gradient_hooks.close()
        for parameter in self.parameters:
            parameter.grad = None

    def _close_reducer(self) -> None:
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None


def step_optimizer(optimizer: Optimizer) -> None:
    """Call the optimizer's `step` without torch's profiler wrapper, which takes 8 µs."""
    step = type(optimizer).step
    if (
        not getattr(step, "hooked", False)
        or "step" in vars(optimizer)
        or step_is_profiled()
        or has_step_hooks(optimizer)
    ):
        optimizer.step()
    else:
        step.__wrapped__(optimizer)  # type: ignore[attr-defined]


_CALLED_NOTHING = "'nonetype' object is not callable"


def _step_without_closure(optimizer: Optimizer) -> None:
    kind = type(optimizer).__name__
    try:
        step_optimizer(optimizer)
    except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        if _is_of_distributed_tensors(error):
            raise RecipeError(
                f"{kind}.step() with sharded parameters (DTensors) raises {_told(error)}; torch"
                " cannot compute this step with them; use replicate, or another optimizer, such as"
                " AdamW"
            ) from error
        if not any(text in str(error).lower() for text in ("closure", _CALLED_NOTHING)):
            raise
        raise RecipeError(
            f"{kind}.step() without a closure raises {_told(error)}; if it computes the gradient"
            " more than once per step, as SAM does, say so in its class: needs_closure = True. Its"
            " step then gets a closure; the gradient of the step is in .grad already"
        ) from error


def _is_of_distributed_tensors(error: Exception) -> bool:
    return any(
        frame.f_globals.get("__name__", "").startswith("torch.distributed.tensor.")
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def _told(error: Exception) -> str:
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}{text and ': '}{text}"


def _copied(group: Mapping[str, Any]) -> dict[str, Any]:
    """Also copies CPU tensors, because a later step may change them."""
    return {
        key: value.clone() if isinstance(value, Tensor) and value.is_cpu else value
        for key, value in group.items()
    }
