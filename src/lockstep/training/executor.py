"""Executors compute a rank's microbatches of one model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from lockstep.base.errors import RecipeError
from lockstep.base.nested import map_tensors
from lockstep.data.device import to_device
from lockstep.data.generators import seed_generators
from lockstep.data.loader import Microbatch
from lockstep.keys import key
from lockstep.logging.flops import Flops
from lockstep.model.expert.routers import RoutingRecorder
from lockstep.model.pipeline.boundary import (
    Arguments,
    PipelineLoss,
    PipelineMicrobatch,
    StageTerm,
)
from lockstep.model.random_streams import ModuleRandomStreams
from lockstep.training.loss import Contribution

if TYPE_CHECKING:
    from lockstep.model.context.cut import SequenceCut
    from lockstep.model.pipeline.pipeline import Pipeline

T = TypeVar("T")
Inputs = Callable[[Any], Any] | None
Loss = Callable[[Any, Any], Any]
Score = Callable[[Microbatch, Any, Any, Any], T]
"""Function of (microbatch, batch, output, loss) that returns the microbatch's part of an
evaluation."""
EVALUATED_TOGETHER = 2
"""Number of microbatches that a pipeline stage evaluates before the next stage begins. A stage
keeps the activations of this number of microbatches in memory."""


class Accumulation(Protocol):
    """The methods of `Step` that executors call."""

    def batches(self) -> Iterator[tuple[Microbatch, Any]]:
        """Yields this rank's microbatches and their batches on the device. Seeds the random
        generators before each microbatch."""

    def accumulate(self, loss: Any) -> None: ...

    def fetched(self) -> list[tuple[Microbatch, Any]]: ...

    def random_position(self, microbatch: Microbatch) -> tuple[int, ...]:
        """Return the key that seeds the microbatch's random generators."""

    def comparing(self, microbatches: Sequence[Microbatch]) -> AbstractContextManager[None]: ...

    @property
    def is_recomputing(self) -> bool:
        """True while this rank recomputes another rank's microbatch."""

    def without_backward(self) -> AbstractContextManager[None]:
        """In this context, `LossError` is raised if the user's loss function calls `backward`."""

    def contribution(self, loss: Any, microbatch: Microbatch) -> Contribution: ...

    def grad_output(self, part: Contribution) -> Tensor:
        """Return the gradient that the backward of `part.total` starts with, times the loss
        scale."""

    def record(
        self, microbatch: Microbatch, value: Any, weight: Any, part: Contribution | None
    ) -> None: ...

    def count_choices(self, microbatch: Microbatch, batch: Any) -> None:
        """Count the tokens of each expert in the latest forward."""

    @property
    def balance_terms(self) -> Sequence[str]: ...

    def balance_part(self, microbatch: Microbatch, batch: Any) -> Contribution | None: ...


class Executor(Protocol):
    """Computes this rank's microbatches of one model. Every rank makes the same calls."""

    why_no_loop: str | None
    """Reason why the script cannot loop over `Step.microbatches`. None if it can."""
    recorder: RoutingRecorder | None
    """Records the experts that routers choose. None if the recipe has no `balance`."""

    def train(self, step: Accumulation, inputs: Inputs, loss: Loss) -> None: ...

    def forwards(self, step: Accumulation, inputs: Inputs, loss: Loss) -> None:
        """Compute forwards without gradients, and call `step.count_choices` after each."""

    def evaluate(
        self,
        items: Iterator[Microbatch],
        position: Callable[[Microbatch], tuple[int, ...]],
        inputs: Inputs,
        loss: Loss,
        score: Score[T],
    ) -> Iterable[tuple[Microbatch, T]]:
        """Yields each microbatch with its `score`, on ranks that have the model's output."""

    def whole(self, output: Any) -> Any:
        """Return a microbatch's output for all tokens, given this rank's part."""

    def on_output_rank(self, compute: Callable[[], Any]) -> Any:
        """Call `compute` on the rank that has the model's output. All ranks return the JSON value
        of `compute`, or raise its error."""


@dataclass(slots=True)
class SerialExecutor:
    """Computes one microbatch after another, for plans that split neither layers nor sequences over
    ranks."""

    model: nn.Module
    device: torch.device
    autocast: AbstractContextManager[Any]
    flops: Flops
    streams: ModuleRandomStreams | None
    why_no_loop: str | None = None
    recorder: RoutingRecorder | None = None

    def train(self, step: Accumulation, inputs: Inputs, loss: Loss) -> None:
        for microbatch, batch in step.batches():
            self._check(inputs, loss, batch)
            self._record()
            with self.autocast, self.flops.counting(microbatch.size):
                # no local variable for the output: it would stay in memory during the next
                # microbatch's forward
                value = self._computed(inputs, loss, batch)[1]
            step.accumulate(value)

    def forwards(self, step: Accumulation, inputs: Inputs, loss: Loss) -> None:
        for microbatch, batch in step.batches():
            self._check(inputs, loss, batch)
            # the model may change the batch in place
            copied = map_tensors(batch, Tensor.clone)
            self._record()
            with torch.no_grad(), self.autocast:
                output = self._output(inputs, copied)
                if inputs is None:  # the loss calls the model
                    loss(output, copied)
            step.count_choices(microbatch, batch)

    def _record(self) -> None:
        if self.recorder is not None:
            self.recorder.start()

    def evaluate(
        self,
        items: Iterator[Microbatch],
        position: Callable[[Microbatch], tuple[int, ...]],
        inputs: Inputs,
        loss: Loss,
        score: Score[T],
    ) -> Iterator[tuple[Microbatch, T]]:
        for item in items:
            batch = to_device(item.batch, self.device)
            at = position(item)
            seed_generators(key(*at), self.device)
            if self.streams is not None:
                self.streams.set_position(at)
            self._check(inputs, loss, batch)
            with self.autocast:
                output, value = self._computed(inputs, loss, batch)
            yield item, score(item, batch, output, value)
        if self.streams is not None:
            self.streams.stop()

    def whole(self, output: Any) -> Any:
        return output

    def on_output_rank(self, compute: Callable[[], Any]) -> Any:
        return compute()

    def _check(self, inputs: Inputs, loss: Loss, batch: Any) -> None: ...

    def _computed(self, inputs: Inputs, loss: Loss, batch: Any) -> tuple[Any, Any]:
        output = self._output(inputs, batch)
        return output, loss(output, batch)

    def _output(self, inputs: Inputs, batch: Any) -> Any:
        return call_model(inputs, self.model, batch)


@dataclass(slots=True, kw_only=True)
class SequenceExecutor(SerialExecutor):
    """Splits sequences: each rank of the `context` axis computes some tokens of every microbatch,
    and the tokens' part of the loss."""

    cut: SequenceCut
    why_no_loop: str | None = (
        "Recipe.sequence or context; lockstep calls the model itself, with parts of the sequences"
    )

    def whole(self, output: Any) -> Any:
        return self.cut.whole(output)

    def _check(self, inputs: Inputs, loss: Loss, batch: Any) -> None:
        if inputs is None:
            raise RecipeError(f"step.compute(None, loss) with {self.why_no_loop}; give inputs")
        if not self.cut.is_checked:
            paused = nullcontext() if self.streams is None else self.streams.paused()
            with self.autocast, paused:
                self.cut.check(model_arguments(inputs, batch), loss, batch)

    def _computed(self, inputs: Inputs, loss: Loss, batch: Any) -> tuple[Any, Any]:
        assert inputs is not None, "checked"
        return self.cut.output_and_loss(model_arguments(inputs, batch), loss, batch)

    def _output(self, inputs: Inputs, batch: Any) -> Any:
        assert inputs is not None, "checked"
        return self.cut.run(model_arguments(inputs, batch), batch)


class PipelineExecutor:
    """Runs microbatches through a pipeline's stages, in the order of its schedule."""

    def __init__(
        self,
        pipeline: Pipeline,
        autocast: AbstractContextManager[Any],
        cut: SequenceCut | None,
    ) -> None:
        self.why_no_loop: str | None = (
            f"pipeline={pipeline.world.size}; microbatches go through the stages one behind another"
        )
        self.recorder: RoutingRecorder | None = None
        self._pipeline = pipeline
        self._device = pipeline.world.device
        self._autocast = autocast
        self._cut = cut

    def train(self, step: Accumulation, inputs: Inputs, loss: Loss) -> None:
        if inputs is None:
            raise RecipeError(
                "step.compute(None, loss) with a pipeline; it calls the stages itself; give inputs"
            )
        fetched = step.fetched()
        parts: dict[int, Contribution] = {}
        added = step.balance_terms

        def score(microbatch: Microbatch, batch: Any, output: Any, of_output: Loss) -> PipelineLoss:
            with step.without_backward():
                value = of_output(output, batch)
            part = step.contribution(value, microbatch)
            if step.is_recomputing:
                pass
            elif microbatch.is_dummy:
                part = part._replace(grad_output=torch.zeros_like(part.grad_output))
            else:
                parts[microbatch.index] = part._replace(total=part.total.detach())
            record = [part.value, 0.0 if part.weight is None else part.weight]
            return PipelineLoss(part.total, step.grad_output(part), [*record, *[0.0] * len(added)])

        def term(microbatch: Microbatch, batch: Any) -> StageTerm | None:
            part = step.balance_part(microbatch, batch)
            if part is None:
                return None
            values = [part.terms[name] for name in added]
            return StageTerm(part.total * step.grad_output(part), [0.0, 0.0, *values])

        microbatches = [
            self._microbatch(
                step.random_position(microbatch),
                inputs,
                loss,
                batch,
                partial(score, microbatch, batch),
                is_dummy=microbatch.is_dummy and not step.is_recomputing,
                is_recomputed=step.is_recomputing,
                before=self._record,
                term=partial(term, microbatch, batch),
                around_loss=step.without_backward,
            )
            for microbatch, batch in fetched
        ]
        with step.comparing([microbatch for microbatch, _ in fetched]):
            rows = self._pipeline.run(microbatches, columns=2 + len(added))
        for (microbatch, _), (value, weight, *more) in zip(fetched, rows, strict=True):
            if microbatch.is_dummy:
                continue
            part = parts.get(microbatch.index)
            if added and part is not None:
                part = part.with_terms(dict(zip(added, more, strict=True)))
            value = torch.stack([value, *more]).sum() if added else value
            value = value.item() if value.is_cpu else value
            step.record(microbatch, value, weight, part)

    def forwards(self, step: Accumulation, inputs: Inputs, loss: Loss) -> None:
        assert inputs is not None, "a pipeline is refused without"
        fetched = iter(step.fetched())
        while several := list(islice(fetched, self._together)):
            copies = [(item, map_tensors(batch, Tensor.clone)) for item, batch in several]
            self._pipeline.forward(
                [
                    self._microbatch(
                        step.random_position(item),
                        inputs,
                        loss,
                        batch,
                        lambda _, __: None,
                        is_dummy=item.is_dummy,
                        before=self._record,
                        term=partial(step.count_choices, item, batch),
                    )
                    for item, batch in copies
                ]
            )

    def _record(self) -> None:
        if self.recorder is not None:
            self.recorder.start()

    @property
    def _together(self) -> int:
        return EVALUATED_TOGETHER * len(self._pipeline.stages.ranges)

    def evaluate(
        self,
        items: Iterator[Microbatch],
        position: Callable[[Microbatch], tuple[int, ...]],
        inputs: Inputs,
        loss: Loss,
        score: Score[T],
    ) -> Iterator[tuple[Microbatch, T]]:
        assert inputs is not None, "a pipeline is refused without"

        def scored(item: Microbatch, batch: Any, output: Any, of_output: Loss) -> T:
            value = of_output(output, batch)
            with torch.autocast(self._device.type, enabled=False):
                return score(item, batch, output, value)

        while several := list(islice(items, self._together)):
            batches = [to_device(item.batch, self._device) for item in several]
            results = self._pipeline.forward(
                [
                    self._microbatch(
                        position(item), inputs, loss, batch, partial(scored, item, batch)
                    )
                    for item, batch in zip(several, batches, strict=True)
                ]
            )
            yield from zip(several, results, strict=False)

    def _microbatch(
        self,
        position: tuple[int, ...],
        inputs: Callable[[Any], Any],
        loss: Loss,
        batch: Any,
        score: Callable[[Any, Loss], Any],
        *,
        is_dummy: bool = False,
        is_recomputed: bool = False,
        before: Callable[[], object] = lambda: None,
        term: Callable[[], StageTerm | None] = lambda: None,
        around_loss: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> PipelineMicrobatch:
        """If ranks split sequences, the first microbatch checks that splitting does not change the
        output."""
        microbatch = PipelineMicrobatch(
            position,
            lambda: Arguments.of(model_arguments(inputs, batch)),
            lambda output: score(output, loss),
            is_dummy=is_dummy,
            is_recomputed=is_recomputed,
            before=before,
            term=term,
        )
        cut = self._cut
        if cut is None:
            return microbatch
        seed_generators(key(*position), self._device)
        arguments = model_arguments(inputs, batch)
        if not cut.is_checked:
            with self._autocast:
                cut.check(arguments, loss, batch)
        own = cut.cut_of(arguments, batch)

        def scored_part(result: Any) -> Any:
            cut.current = own
            return cut.scored(score, loss, result)

        return replace(
            microbatch,
            inputs=lambda: cut.inputs_of(model_arguments(inputs, batch), own),
            score=scored_part,
            run=cut.run_of(own, loss, batch, around_loss),
        )

    def whole(self, output: Any) -> Any:
        return output if self._cut is None else self._cut.whole(output)

    def on_output_rank(self, compute: Callable[[], Any]) -> Any:
        world, last = self._pipeline.world, self._pipeline.last_rank
        value = self._pipeline.raise_on_all_ranks(compute if world.rank == last else lambda: None)
        return world.value_of(last, value)


def call_model(inputs: Inputs, model: nn.Module, batch: Any) -> Any:
    if inputs is None:
        return model
    arguments = model_arguments(inputs, batch)
    if isinstance(arguments, tuple):
        return model(*arguments)
    return model(**arguments) if isinstance(arguments, dict) else model(arguments)


def model_arguments(inputs: Callable[[Any], Any], batch: Any) -> Any:
    arguments = inputs(batch)
    if arguments is None or isinstance(arguments, list):
        returned = f"a list of {len(arguments)}" if isinstance(arguments, list) else "None"
        raise RecipeError(
            f"Recipe.inputs returned {returned}; the model is called with what it returns: a tuple"
            " of arguments, a dict of keywords, or one tensor; the batches of a TensorDataset are"
            " lists: return batch[0], or (batch[0], batch[1]); if the model takes a list as its"
            " one argument, return (that_list,)"
        )
    return arguments
