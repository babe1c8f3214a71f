"""The step as a transaction: accumulate, reduce, scale, clip, apply. Nothing of the model changes before the reduced gradient is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lockstep.base.errors import DataError, LossError, RecipeError
from lockstep.logging.metrics import as_number
from lockstep.logging.phases import Phases
from lockstep.logging.recorder import NAMES_OF_A_ROW
from lockstep.model.pipeline.microbatch import PipelineLoss, PipelineMicrobatch
from lockstep.model.pipeline.pipeline import Pipeline
from lockstep.model.sync_batchnorm import SyncBatchNormExchange
from lockstep.recipe import check_clip_norm
from lockstep.train.forward import given_to, output_of
from lockstep.train.loss import Contribution, contribution
from lockstep.train.reducers.reducer import Engine
from lockstep.train.reducers.step_stats import Number
from lockstep.train.step_result import Outcome
from lockstep.train.train_module import Pair

if TYPE_CHECKING:
    from lockstep.data.loader import Microbatch
    from lockstep.train.microbatches import Microbatches


class Step:
    """One optimizer step under way, the same on all ranks. Made by `Session.steps`."""

    def __init__(
        self,
        index: int,
        source: Microbatches,
        pairs: Sequence[Pair],
        exchange: SyncBatchNormExchange,
        *,
        logs: bool,
        asks: Callable[[], bool],
        phases: Phases,
    ) -> None:
        self.index = index
        """0 for the first."""
        self.samples = source.samples
        """Samples of the global batch."""
        self.count = source.count
        """Microbatches of the global batch, over all ranks; their slices where SyncBatchNorm splits them."""
        self.committed: dict[int, Outcome] = {}
        """What each pair's commit came to, by its place in the session."""
        self.logged: dict[str, float] = {}
        self._pairs = pairs
        self.source = source
        self._mesh = pairs[0].mesh
        self._exchange = exchange
        self._statistics = [statistics for pair in pairs for statistics in pair.statistics]
        self._streams = [(pair.streams, place) for place, pair in enumerate(pairs) if pair.streams is not None]
        self._poll = self._mesh.world.device.type == "cpu"
        self._logs = logs
        self._compares = logs or index == 0
        self._asks = asks
        self._phases = phases
        self.touched = False
        """Whether a commit has begun to change the state."""
        self.ended = False
        """Whether all that the script does in the step is done."""
        self._computed = False
        self._phase: _Phase | None = None
        self._current: Microbatch | None = None

    def compute(self, inputs: Callable[[Any], Any] | None, loss: Callable[[Any, Any], Any]) -> None:
        """Forward and backward of this rank's whole share, under every plan; a pipeline has no other way. Every rank calls it.

        `inputs` and `loss`: as in `Recipe`. For the one pair that is prepared. Raises `LossError`, `RecipeError`.
        """
        pair = self._pairs[self._place(None)]
        if self._computed:
            raise LossError(
                f"step {self.index}: a second step.compute; one computes all microbatches; let its loss return the sum of both losses, or "
                "a dict of terms"
            )
        self._computed = True
        if pair.pipeline is not None:
            self._through_stages(pair, pair.pipeline, inputs, loss)
            return
        for batch in self.microbatches():
            assert self._current is not None
            with pair.autocast, pair.flops.counting(self._current.size):
                value = loss(output_of(inputs, pair.model, batch), batch)
            self.backward(value)

    def microbatches(self) -> Iterator[Any]:
        """This rank's share of the batch, one microbatch after another, each under its own random generators. Perhaps none.

        May be run through again after a `commit`, for another pair: the same batches then, with generators of their own.
        """
        for pair in self._pairs:
            self._check_loop(pair)
            pair.engine(self.source.most)  # which may have to see the first forward
        for statistics in self._statistics:
            statistics.begin(compare=self._compares)
        passes = len(self.committed)
        for current, batch in self._phases.during("data", self.source.batches(passes)):
            self._current = current
            self._exchange.is_dummy = current.is_dummy
            for statistics in self._statistics:
                statistics.discard()  # what no backward took down: recomputations, forwards without one
            for streams, place in self._streams:
                streams.set_position((*self.source.position(current, passes), place) if place else self.source.position(current, passes))
            yield batch

    def backward(self, loss: Any, optimizer: Any = None) -> None:
        """Add the gradient of this microbatch's loss. Called once for each microbatch, on the rank that has it.

        `loss`: a scalar (the mean over this microbatch's samples), an `ls.Loss`, or with `weight` given to `steps`, an `ls.Sum` or a
        dict. `optimizer`: which of several prepared pairs it is for; other models that the loss reaches get no gradient.
        Raises `LossError`.
        """
        pair = self._pairs[self._place(optimizer)]
        self._check_loop(pair)
        phase = self._begun(pair)
        if self._current is None:
            raise LossError(f"step {self.index}: backward outside of a loop over step.microbatches(); the loss is a microbatch's")
        current = self._current
        if not current.is_dummy and phase.seen and phase.seen[-1] >= current.index:
            raise LossError(
                f"step {self.index}, microbatch {current.index}: a second backward; each microbatch has one: "
                "add the losses, and call it on their sum"
            )
        part = self._contribution(pair, loss, current)
        if not current.is_dummy:
            for statistics in self._statistics:  # a forward of one model may run others
                statistics.note_microbatch()
            phase.take(current.index, part)
        seed = part.seed if pair.loss_scale is None else part.seed * pair.loss_scale.value
        phase.engine.backward(part.total, seed, only_these=len(self._pairs) > 1, is_dummy=current.is_dummy)

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
        if len(phase.seen) < self.source.mine:
            missing = [place for place in self._mesh.assignment.indices(self.count, self._mesh.data.rank) if place not in phase.seen]
            raise LossError(
                f"step {self.index}: commit without a backward for microbatches {missing} of this rank; call step.backward once for each "
                "microbatch; for one that is to count for nothing, give a loss multiplied by 0"
            )
        self._check_kind(pair, phase)
        self._phases.enter("exchange")
        _, values, weights, stops = phase.engine.finish(
            phase.values,
            [weight for weight in phase.weights if weight is not None] if pair.forward_knows else None,
            flag=self._asks(),
        )
        self._phases.enter("update")
        for statistics in self._statistics:
            statistics.check(compare=self._compares)
        if self._poll and not (all(map(math.isfinite, values)) if isinstance(values, list) else np.isfinite(values.numpy()).all()):
            # It need not show in the gradient: torch.where lets none through to what it leaves out.
            Outcome(self.source.layout, pair, values, weights, math.nan, False, stops, []).check()
        self.touched = True
        if weights is not None:
            pair.rescale(weights, self._prescale(pair))
        norm, applied = pair.apply(self.index, clip_norm, measure=self._logs)
        for statistics in self._statistics:
            statistics.commit(self.count, apply=torch.isfinite(torch.as_tensor(norm)) if applied is None else applied)
        outcome = Outcome(self.source.layout, pair, values, weights, norm, applied, stops, [part.terms for part in phase.parts])
        self.committed[number] = outcome
        self._phase = self._current = self._exchange.is_dummy = None
        if self._poll:
            outcome.check()
        self._phases.enter("compute" if len(self.committed) < len(self._pairs) else "script")

    def _check_loop(self, pair: Pair) -> None:
        """Raises `RecipeError` where the plan has no loop over microbatches."""
        if pair.pipeline is not None:
            raise RecipeError(
                f"step.microbatches or step.backward with pipeline={pair.pipeline.world.size}; microbatches go through the stages one "
                "behind another; call step.compute(inputs, loss), with inputs and loss as in a Recipe"
            )

    def _through_stages(self, pair: Pair, pipeline: Pipeline, inputs: Callable[[Any], Any] | None, loss: Callable[[Any, Any], Any]) -> None:
        """All microbatches' forwards and backwards, in the order of the pipeline's schedule."""
        if inputs is None:
            raise RecipeError("step.compute(None, loss) with a pipeline; it must call the model's parts itself; give inputs")
        phase = self._begun(pair)
        for statistics in self._statistics:
            statistics.begin(compare=self._compares)
        share = list(self._phases.during("data", self.source.batches(passes=0)))
        parts: dict[int, Contribution] = {}

        def score(current: Microbatch, batch: Any, output: Any) -> PipelineLoss:
            part = self._contribution(pair, loss(output, batch), current)
            if not current.is_dummy:
                parts[current.index] = part._replace(total=part.total.detach())
            seed = torch.zeros_like(part.seed) if current.is_dummy else part.seed
            seed = seed if pair.loss_scale is None else seed * pair.loss_scale.value
            return PipelineLoss(part.total, seed, [part.value, 0.0 if part.weight is None else part.weight])

        items = [
            PipelineMicrobatch(
                self.source.position(current, 0), partial(given_to, inputs, batch), partial(score, current, batch), current.is_dummy
            )
            for current, batch in share
        ]
        rows = pipeline.run(items, columns=2)
        for (current, _), (value, weight) in zip(share, rows, strict=True):
            if not current.is_dummy:
                phase.seen.append(current.index)
                phase.values.append(value.item() if self._poll else value)
                phase.weights.append(weight)
        phase.parts = [parts[place] for place in phase.seen if place in parts]

    def _contribution(self, pair: Pair, loss: Any, current: Microbatch) -> Contribution:
        return contribution(
            loss,
            samples=current.size,
            step_samples=self.samples,
            batch=current.batch,
            weights=self.source.weights,
            prescale=self._prescale(pair),
        )

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
            self._prescale(pair)
            pair.begin_step(engine, self.count)
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
        for place, part in zip(phase.seen, phase.parts, strict=False):  # where a later stage has the losses, none are here
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
    """This rank's microbatches, so far."""
    values: list[Number] = field(default_factory=list)
    weights: list[Tensor | None] = field(default_factory=list)
    """What is told of each of them."""
    parts: list[Contribution] = field(default_factory=list)
    """Of each where its loss is computed here: not on a pipeline's earlier stages."""

    def take(self, index: int, part: Contribution) -> None:
        """What a microbatch of this rank came to."""
        self.seen.append(index)
        self.values.append(part.value)
        self.weights.append(part.weight)
        self.parts.append(part)
