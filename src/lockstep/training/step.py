"""The step as a transaction: accumulate, reduce, scale, clip, apply. Nothing of the model changes before the reduced gradient is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep import precision as precisions
from lockstep.comm.mesh import Mesh, held
from lockstep.errors import DataError, LossError
from lockstep.parallel.engine import Engine, engine_for, sum_factor
from lockstep.parallel.statistics import RunningStatistics
from lockstep.recipe import Precision, check_clip_norm
from lockstep.training import optimizers
from lockstep.training.loss import Contribution, contribution
from lockstep.training.optimizers import Schedule
from lockstep.training.outcome import Outcome
from lockstep.training.recorder import NAMES_OF_A_ROW
from lockstep.watch.metrics import as_number

if TYPE_CHECKING:
    from lockstep.data.loader import Microbatch
    from lockstep.training.source import Microbatches


class Pair:
    """A model and its optimizers on one rank, with what one step of them leaves for the next."""

    def __init__(
        self,
        model: nn.Module,
        parameters: dict[str, nn.Parameter],
        optimizers: Sequence[Optimizer],
        *,
        mesh: Mesh,
        precision: Precision,
        schedule: Callable[[Any], Any] | None,
        bitwise: bool,
    ) -> None:
        self.model = model
        self.names = list(parameters)
        self.parameters = list(parameters.values())
        self.optimizers = optimizers
        self.mesh = mesh
        self.device = mesh.world.device
        factor = sum_factor(mesh, bitwise=bitwise)
        self.scaler = precisions.loss_scaler(precision, self.device, factor=factor)
        self._factor = 2.0 ** (factor - 1).bit_length()
        self.overflows = 0
        """Steps in a row, up to the latest one, in which the scaled gradient overflowed."""
        self.overflowed_at = math.inf
        """The loss scale in the latest of them."""
        self.norm = precisions.Norm(mesh, bitwise=bitwise)
        self.schedule = Schedule(schedule, optimizers)
        self.statistics = RunningStatistics(model, mesh)
        self.forward_knows: bool | None = None
        """Whether only the forward knows the weight, as the first commit found. None before."""
        self.terms: list[str] = []
        """The names of the loss's terms where there are several, as the first commit found."""
        self.prescale: Tensor | None = None
        """Then: the power of two that a total is divided by before its backward, near the last step's weight. Scalar."""
        self._bitwise = bitwise
        self._engine: Engine | None = None
        self._room = 0
        self._gates_on_device = self.device.type == "cuda" and all(group.get("fused") for o in optimizers for group in o.param_groups)

    def engine(self, microbatches: int) -> Engine:
        """The gradients' keeper, made anew where a step has more microbatches than any before. Every rank calls it alike."""
        if self._engine is None or microbatches > self._room:
            if self._engine is not None:
                self._engine.close()
            self._room = microbatches
            self._engine = engine_for(self.model, self.parameters, self.mesh, bitwise=self._bitwise, max_microbatches=microbatches)
        return self._engine

    def close(self) -> None:
        self.statistics.close()
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        for parameter in self.parameters:
            parameter.grad = None

    def agree_on_loss(self, parts: Sequence[Contribution]) -> None:
        """At the first commit, tell a rank without a microbatch what the others' losses look like. Every rank calls it."""
        mine = [parts[0].weight is not None, list(parts[0].terms)] if parts else None
        self.forward_knows, self.terms = next(kind for kind in self.mesh.data.gather_values(mine) if kind is not None)

    def rescale(self, weights: Tensor, prescale: Tensor) -> None:
        """Divide the summed gradient by the sum of weights, and choose the next step's power of two.

        Weights that count nothing make the gradient NaN, so that the step is not applied.
        """
        total = weights.double().sum()
        counts = (weights >= 0).all() & (total > 0) & torch.isfinite(total)
        gradients = self.gradients()
        if gradients:
            factor = torch.where(counts, prescale / total, math.nan).to(gradients[0].dtype)
            torch._foreach_mul_([held(gradient) for gradient in gradients], factor)
        self.prescale = torch.where(counts, torch.exp2(torch.round(torch.log2(total))), prescale)

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def apply(self, step: int, clip_norm: float | None, *, measure: bool) -> tuple[Tensor | float, bool | None]:
        """Clip and step the optimizers, all or none.

        Returns the gradient's norm before clipping (where nobody clips, and not `measure`: a number that is finite as it is), and
        whether the step was applied: None where a GPU decides and nobody has asked it yet.
        """
        gradients = self.gradients()
        if self.scaler is not None and gradients:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        norm = self.norm.of(gradients) if measure or clip_norm is not None else self.norm.check(gradients)
        if clip_norm is not None:
            precisions.clip(gradients, norm, clip_norm)
        self.schedule.before_step(step)
        applied = self._step(norm)
        if applied is not False:
            self.schedule.after_step()
        return norm, applied

    def _step(self, norm: Tensor | float) -> bool | None:
        if self._gates_on_device and self.scaler is None:
            stop = (~torch.isfinite(torch.as_tensor(norm, device=self.device))).float()
            for optimizer in self.optimizers:
                optimizer.found_inf = stop  # type: ignore[attr-defined]  # read by torch's fused optimizers
                optimizer.step()
            return None
        applied = math.isfinite(float(norm))
        if self.scaler is not None and self.gradients():
            self.scaler.update()  # its own step would leave out only the optimizers whose gradients overflowed
        self.overflows = 0 if applied else self.overflows + 1
        if self.scaler is not None and not applied:
            self.overflowed_at = self._factor * self.scaler.get_scale() / self.scaler.get_backoff_factor()
        if applied:
            for optimizer in self.optimizers:
                optimizers.apply(optimizer)
        return applied


class Step:
    """One optimizer step under way, the same on all ranks. Made by `Session.steps`."""

    def __init__(
        self, index: int, source: Microbatches, pairs: Sequence[Pair], mesh: Mesh, *, logs: bool, wants_to_stop: Callable[[], bool]
    ) -> None:
        self.index = index
        """0 for the first."""
        self.samples = source.samples
        """Samples of the global batch."""
        self.count = source.count
        """Microbatches of the global batch, over all ranks."""
        self.committed: dict[int, Outcome] = {}
        """What each pair's commit came to, by its place in the session."""
        self.logged: dict[str, float] = {}
        self._pairs = pairs
        self.source = source
        self._mesh = mesh
        self._poll = mesh.world.device.type == "cpu"
        self._logs = logs
        self._compares = logs or index == 0
        self._wants_to_stop = wants_to_stop
        self._phase: _Phase | None = None
        self._current: Microbatch | None = None

    def microbatches(self) -> Iterator[Any]:
        """This rank's share of the batch, one microbatch after another, each under its own random generators. Perhaps none.

        May be run through again after a `commit`, for another pair: the same batches then, with generators of their own.
        """
        for pair in self._pairs:
            pair.engine(self.source.most)  # which may have to see the first forward
            pair.statistics.begin(compare=self._compares)
        for current, batch in self.source.batches(passes=len(self.committed)):
            self._current = current
            for pair in self._pairs:
                pair.statistics.discard()  # what no backward took down: recomputations, forwards without one
            yield batch

    def backward(self, loss: Any, optimizer: Any = None) -> None:
        """Add the gradient of this microbatch's loss. Called once for each microbatch, on the rank that has it.

        `loss`: a scalar (the mean over this microbatch's samples), an `ls.Loss`, or with `weight` given to `steps`, an `ls.Sum` or a
        dict. `optimizer`: which of several prepared pairs it is for; other models that the loss reaches get no gradient.
        Raises `LossError`.
        """
        pair = self._pairs[self._place(optimizer)]
        phase = self._begun(pair)
        if self._current is None:
            raise LossError(f"step {self.index}: backward outside of a loop over step.microbatches(); the loss is a microbatch's")
        current = self._current
        if current.counts and phase.seen and phase.seen[-1] >= current.index:
            raise LossError(
                f"step {self.index}, microbatch {current.index}: a second backward; each microbatch has one: "
                "add the losses, and call it on their sum"
            )
        part = contribution(
            loss,
            samples=current.size,
            step_samples=self.samples,
            batch=current.batch,
            weights=self.source.weights,
            prescale=self._prescale(pair),
        )
        if current.counts:
            for each in self._pairs:  # a forward of one model may run others
                each.statistics.note_microbatch()
            phase.seen.append(current.index)
            phase.parts.append(part)
        seed = part.seed if pair.scaler is None else pair.scaler.scale(part.seed)
        phase.engine.backward(part.total, seed, only_these=len(self._pairs) > 1, counts=current.counts)

    def commit(self, optimizer: Any = None, *, clip_norm: float | None = None) -> None:
        """Reduce, scale, clip, apply: on all ranks or on none. Every rank calls it once a step, for each prepared pair.

        `clip_norm`: largest global norm of the gradient. Raises `LossError` where the loss or gradient is not finite (at the next logging
        step on a GPU, with the model not updated by such a step where the optimizer is `fused`).
        """
        check_clip_norm(clip_norm)
        number = self._place(optimizer)
        if number in self.committed:
            raise LossError(f"step {self.index}: a second commit for one pair; each pair has one commit a step; leave the second one out")
        pair = self._pairs[number]
        phase = self._begun(pair)
        missing = [place for place in self._mesh.deal.share(self.count, self._mesh.data.rank) if place not in phase.seen]
        if missing:
            raise LossError(
                f"step {self.index}: commit without a backward for microbatches {missing} of this rank; call step.backward once for each "
                "microbatch; for one that is to count for nothing, give a loss multiplied by 0"
            )
        self._check_kind(pair, phase)
        _, values, weights, stops = phase.engine.finish(
            [part.value for part in phase.parts],
            [part.weight for part in phase.parts if part.weight is not None] if pair.forward_knows else None,
            flag=self._wants_to_stop(),
        )
        for each in self._pairs:
            each.statistics.check(compare=self._compares)
        if self._poll and not all(map(math.isfinite, values if isinstance(values, list) else values.tolist())):
            # It need not show in the gradient: torch.where lets none through to what it leaves out.
            Outcome(self.source.layout, pair, values, weights, math.nan, False, stops, []).check()
        if weights is not None:
            pair.rescale(weights, self._prescale(pair))
        norm, applied = pair.apply(self.index, clip_norm, measure=self._logs)
        for each in self._pairs:
            each.statistics.commit(self.count, apply=torch.isfinite(torch.as_tensor(norm)) if applied is None else applied)
        outcome = Outcome(self.source.layout, pair, values, weights, norm, applied, stops, [part.terms for part in phase.parts])
        self.committed[number] = outcome
        self._phase = self._current = None
        if self._poll:
            outcome.check()

    def log(self, values: dict[str, float]) -> None:
        """Numbers of the user's own for this step's line in metrics.jsonl and the progress display; rank 0's are written.

        Raises `DataError` for a value that is no number, or a name that the line has already.
        """
        for name, value in values.items():
            if name in NAMES_OF_A_ROW:
                raise DataError(f"step.log({{{name!r}: ...}}); the run itself writes {name!r} in every line; choose another name")
            self.logged[name] = as_number(name, value)

    def _begun(self, pair: Pair) -> _Phase:
        if self._phase is None:
            engine = pair.engine(self.source.most)
            engine.begin(self.count)
            self._phase = _Phase(pair, engine)
        if self._phase.pair is not pair:
            raise LossError(
                f"step {self.index}: backward for a second model before the first one's commit; run through step.microbatches() and commit "
                "for one (model, optimizer) pair, then for the next"
            )
        return self._phase

    def _prescale(self, pair: Pair) -> Tensor:
        if pair.prescale is None:
            pair.prescale = torch.tensor(2.0 ** round(math.log2(self.samples)), dtype=torch.float64, device=pair.device)
        return pair.prescale

    def _check_kind(self, pair: Pair, phase: _Phase) -> None:
        kinds = {part.weight is not None for part in phase.parts}
        if pair.forward_knows is None:
            pair.agree_on_loss(phase.parts)
        if kinds - {pair.forward_knows}:
            raise LossError(
                f"step {self.index}: the loss is an ls.Loss for some microbatches and not for others; it must be the same kind for all: "
                "return ls.Loss(total, weight) always, or never"
            )
        for place, part in zip(phase.seen, phase.parts, strict=True):
            if part.terms.keys() != set(pair.terms):
                raise LossError(
                    f"step {self.index}, microbatch {place}: the loss has terms {list(part.terms)} and had {pair.terms} before; it must "
                    "have the same terms for every microbatch: give one that does not apply as a zero, (output * 0).sum()"
                )

    def _place(self, optimizer: Any) -> int:
        if optimizer is None and len(self._pairs) == 1:
            return 0
        for place, pair in enumerate(self._pairs):
            if optimizer is pair.optimizers or any(optimizer is o for o in pair.optimizers):
                return place
        given = "no optimizer" if optimizer is None else f"an optimizer ({type(optimizer).__name__}) that this session did not prepare"
        raise LossError(f"step {self.index}: {given}, with {len(self._pairs)} pairs prepared; name one that session.prepare returned")


@dataclass(slots=True)
class _Phase:
    """One pair's part of a step, from its first backward to its commit."""

    pair: Pair
    engine: Engine
    seen: list[int] = field(default_factory=list)
    parts: list[Contribution] = field(default_factory=list)
