"""A model and its optimizers on one rank: what keeps their gradients, scales, clips and applies them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.comm.mesh import Mesh, to_local
from lockstep.logging.flops import Flops, peak_of
from lockstep.model.parallelize import Parallelized
from lockstep.model.running_statistics import RunningStatistics
from lockstep.recipe import Precision, keeps_rest
from lockstep.train import optim as applying
from lockstep.train import precision as precisions
from lockstep.train.loss import Contribution
from lockstep.train.optim import Schedule
from lockstep.train.reducers.compression import compression_for
from lockstep.train.reducers.reducer import Engine, engine_for, sum_factor
from lockstep.train.reducers.tied_gradients import TiedGradients


class Pair:
    """A model and its optimizers on one rank, with what one step of them leaves for the next."""

    def __init__(
        self,
        model: nn.Module,
        parameters: dict[str, nn.Parameter],
        optimizers: Sequence[Optimizer],
        *,
        laid: Parallelized,
        mesh: Mesh,
        precision: Precision,
        comm: str,
        schedule: Callable[[Any], Any] | None,
        bitwise: bool,
    ) -> None:
        self.model = model
        self.names = list(parameters)
        self.parameters = list(parameters.values())
        self.optimizers = optimizers
        self.mesh = mesh
        self.device = mesh.world.device
        self._compression = compression_for(comm, mesh.data, self.parameters, self.names)
        self._keeps_rest = keeps_rest(comm)
        factor = sum_factor(mesh, bitwise=bitwise, compression=self._compression)
        self._sum_factor = factor
        self._factor = 2.0 ** (factor - 1).bit_length()
        self.overflows = 0
        """Steps in a row, up to the latest one, in which the scaled gradient overflowed."""
        self.overflowed_at = math.inf
        """The loss scale in the latest of them."""
        self.norm = precisions.Norm(mesh, bitwise=bitwise)
        self.schedule = Schedule(schedule, optimizers)
        self.streams = laid.streams
        self.pipeline = laid.pipeline
        self.compute_in(precision)
        self._tied: TiedGradients | None = None
        if self.pipeline is None:
            self.statistics = [RunningStatistics(model, mesh)]
            """Of the model, or of each stage of a pipeline that is here."""
        else:
            self._tied = TiedGradients(parameters, laid.shared_parameters, self.pipeline.world)
            self.statistics = [RunningStatistics(module, mesh) for module in self.pipeline.modules]
            self.pipeline.watch(self._around, self._ran)
        self.forward_knows: bool | None = None
        """Whether only the forward knows the weight, as the first commit found. None before."""
        self.terms: list[str] = []
        """The names of the loss's terms where there are several, as the first commit found."""
        self.prescale: Tensor | None = None
        """Then: the power of two that a total is divided by before its backward, near the last step's weight. Scalar."""
        self._bitwise = bitwise
        self._engine: Engine | None = None
        self._room = 0
        fused = all(group.get("fused") for optimizer in optimizers for group in optimizer.param_groups)
        self._gates_on_device = fused and all(to_local(parameter).is_cuda for parameter in self.parameters)
        self._divides = (
            fused
            and all(getattr(optimizer, "_step_supports_amp_scaling", False) for optimizer in optimizers)
            and all(to_local(parameter) is parameter and parameter.dtype is torch.float32 for parameter in self.parameters)
        )
        """Whether the optimizers divide the gradient by a number while they read it, as for torch's GradScaler: a pass over it less."""

    def compute_in(self, precision: Precision) -> None:
        """From the first step on."""
        self.autocast = precisions.autocast(precision, self.device)
        """The context that forwards run in."""
        self.loss_scale = precisions.LossScale(factor=self._sum_factor) if precision == "fp16" else None
        self.flops = Flops(self.model, peak_of(self.device, precision))

    def engine(self, microbatches: int) -> Engine:
        """The gradients' keeper, made anew where a step has more microbatches than any before. Every rank calls it alike."""
        if self._engine is None or microbatches > self._room:
            self._close_engine()
            self._room = microbatches
            self._engine = engine_for(
                self.model,
                self.parameters,
                self.mesh,
                tied=self._tied,
                bitwise=self._bitwise,
                max_microbatches=microbatches,
                compression=self._compression,
            )
        return self._engine

    def begin_step(self, engine: Engine, count: int) -> None:
        """Start a step of `count` microbatches in all."""
        if self._compression is not None and self._keeps_rest:
            scale = 1.0 if self.loss_scale is None else self.loss_scale.value
            self._compression.begin(scale if self.prescale is None else scale / self.prescale.item())
        engine.begin(count)

    def deal(self, mesh: Mesh) -> None:
        """Another `mesh` of the same processes: who computes which microbatches from now on."""
        if mesh.assignment != self.mesh.assignment:
            self._close_engine()
            self.mesh = mesh
            for statistics in self.statistics:
                statistics.mesh = mesh

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def close(self) -> None:
        for statistics in self.statistics:
            statistics.close()
        if self.streams is not None:
            self.streams.close()
        self._close_engine()
        for parameter in self.parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """What steps have left for the next ones, besides what the model and the optimizers hold."""
        return {
            "schedule": self.schedule.state_dict(),
            "loss_scale": None if self.loss_scale is None else [self._factor * self.loss_scale.value, self.loss_scale.in_a_row],
            "overflows": self.overflows,
            "overflowed_at": self.overflowed_at,
            "prescale": None if self.prescale is None else self.prescale.item(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave, under another plan perhaps."""
        self.schedule.load_state_dict(state["schedule"])
        if self.loss_scale is not None and state["loss_scale"] is not None:
            scale, self.loss_scale.in_a_row = state["loss_scale"]
            self.loss_scale.value = scale / self._factor
        self.overflows, self.overflowed_at = state["overflows"], state["overflowed_at"]
        if state["prescale"] is not None:
            self.prescale = torch.tensor(state["prescale"], dtype=torch.float64, device=self.device)

    def agree_on_loss(self, parts: Sequence[Contribution]) -> None:
        """At the first commit, tell a rank without a microbatch what the others' losses look like. Every rank calls it."""
        mine = [parts[0].weight is not None, list(parts[0].terms)] if parts else None
        self.forward_knows, self.terms = next(kind for kind in self.mesh.world.gather_values(mine) if kind is not None)

    def from_last_stage(self, compute: Callable[[], Any]) -> Any:
        """A JSON value, computed where the last stage of the pipeline is; without a pipeline, here. Every rank calls it.

        Raises on every rank what is raised there.
        """
        if self.pipeline is None:
            return compute()
        world, last = self.pipeline.world, self.pipeline.last_rank
        value = self.pipeline.raise_on_all_ranks(compute if world.rank == last else lambda: None)
        return world.value_of(last, value)

    def rescale(self, weights: Tensor, prescale: Tensor) -> None:
        """Divide the summed gradient by the sum of weights, and choose the next step's power of two.

        Weights that count nothing make the gradient NaN, so that the step is not applied.
        """
        total = weights.double().sum()
        counts = (weights >= 0).all() & (total > 0) & torch.isfinite(total)
        gradients = self.gradients()
        if gradients:
            factor = torch.where(counts, prescale / total, math.nan).to(gradients[0].dtype)
            precisions.scale(gradients, factor)
        self.prescale = torch.where(counts, torch.exp2(torch.round(torch.log2(total))), prescale)

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def _counted(self, tied: TiedGradients) -> list[Tensor]:
        """The gradients that count in the norm here: a tied parameter's do on one of the stages that hold it."""
        return [p.grad for p in self.parameters if p.grad is not None and tied.counts(p)]

    @contextmanager
    def _around(self, stage: int) -> Iterator[None]:
        self.statistics[stage].discard()  # what a recomputation did since the last forward
        with self.autocast:
            yield

    def _ran(self, stage: int) -> None:
        self.statistics[stage].note_microbatch()

    def apply(self, step: int, clip_norm: float | None, *, measure: bool) -> tuple[Tensor | float, bool | None]:
        """Clip and step the optimizers, all or none.

        Returns the gradient's norm before clipping (where nobody clips, and not `measure`: a number that is finite as it is), and
        whether the step was applied: None where a GPU decides and nobody has asked it yet.
        """
        gradients = self.gradients()
        divisor: Tensor | float = 1.0
        if self.loss_scale is not None:
            if self._divides:
                divisor = self.loss_scale.value
            else:
                self.loss_scale.unscale(gradients)
        counted = gradients if self._tied is None else self._counted(self._tied)
        norm = (self.norm.of(counted) if measure or clip_norm is not None else self.norm.check(counted)) / divisor
        if clip_norm is not None:
            if self._divides:
                divisor = divisor * precisions.excess(norm, clip_norm)
            else:
                precisions.clip(gradients, norm, clip_norm)
        self.schedule.before_step(step)
        applied = self._step(norm, divisor)
        if applied is not False:
            self.schedule.after_step()
        return norm, applied

    def _step(self, norm: Tensor | float, divisor: Tensor | float) -> bool | None:
        if isinstance(divisor, Tensor) or divisor != 1.0:
            divided_by = torch.as_tensor(divisor, dtype=torch.float32, device=self.device)
            for optimizer in self.optimizers:
                optimizer.grad_scale = divided_by  # type: ignore[attr-defined]  # read by torch's fused optimizers
        try:
            return self._step_where_finite(norm)
        finally:
            for optimizer in self.optimizers:
                vars(optimizer).pop("grad_scale", None)

    def _step_where_finite(self, norm: Tensor | float) -> bool | None:
        if self._gates_on_device and self.loss_scale is None:
            stop = (~torch.isfinite(torch.as_tensor(norm, device=self.device))).float()
            for optimizer in self.optimizers:
                optimizer.found_inf = stop  # type: ignore[attr-defined]  # read by torch's fused optimizers
                optimizer.step()
            return None
        applied = math.isfinite(float(norm))
        self.overflows = 0 if applied else self.overflows + 1
        if self._compression is not None and not applied:
            self._compression.forget()
        if self.loss_scale is not None:
            if not applied:
                self.overflowed_at = self._factor * self.loss_scale.value
            self.loss_scale.update(overflowed=not applied)
        if applied:
            for optimizer in self.optimizers:
                applying.apply(optimizer)
        return applied
