"""The executor for a pipeline: all microbatches go through its stages, in the order of its
schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch

from lockstep.base.errors import RecipeError
from lockstep.data.device import to_device
from lockstep.data.loader import Microbatch
from lockstep.model.pipeline.microbatch import PipelineLoss, PipelineMicrobatch
from lockstep.model.pipeline.pipeline import Pipeline
from lockstep.training.executors.executor import (
    Accumulation,
    Inputs,
    Loss,
    Score,
    T,
    model_arguments,
)
from lockstep.training.losses.loss import Contribution

EVALUATED_TOGETHER = 2
"""Microbatches of a stage in one forward of an evaluation; their activations between stages are all
in memory."""


class PipelineExecutor:
    """An `Executor` for a model whose stages are on several ranks."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.why_no_loop: str | None = (
            f"pipeline={pipeline.world.size}; microbatches go through the stages one behind another"
        )
        self._pipeline = pipeline
        self._device = pipeline.world.device

    def train(self, step: Accumulation, inputs: Inputs, loss: Loss) -> None:
        if inputs is None:
            raise RecipeError(
                "step.compute(None, loss) with a pipeline; it calls the stages itself; give inputs"
            )
        fetched = step.fetched()
        parts: dict[int, Contribution] = {}

        def score(microbatch: Microbatch, batch: Any, output: Any) -> PipelineLoss:
            part = step.contribution(loss(output, batch), microbatch)
            if not microbatch.is_dummy:
                parts[microbatch.index] = part._replace(total=part.total.detach())
            grad_output = step.grad_output(
                part._replace(grad_output=torch.zeros_like(part.grad_output))
                if microbatch.is_dummy
                else part
            )
            return PipelineLoss(
                part.total, grad_output, [part.value, 0.0 if part.weight is None else part.weight]
            )

        rows = self._pipeline.run(
            [
                PipelineMicrobatch(
                    step.random_position(microbatch),
                    partial(model_arguments, inputs, batch),
                    partial(score, microbatch, batch),
                    is_dummy=microbatch.is_dummy,
                )
                for microbatch, batch in fetched
            ],
            columns=2,
        )
        for (microbatch, _), (value, weight) in zip(fetched, rows, strict=True):
            if not microbatch.is_dummy:
                step.record(
                    microbatch,
                    value.item() if value.is_cpu else value,
                    weight,
                    parts.get(microbatch.index),
                )

    def evaluate(
        self,
        items: Iterator[Microbatch],
        position: Callable[[Microbatch], tuple[int, ...]],
        inputs: Inputs,
        loss: Loss,
        score: Score[T],
    ) -> Iterator[tuple[Microbatch, T]]:
        assert inputs is not None, "a pipeline is refused without"

        def scored(item: Microbatch, batch: Any, output: Any) -> T:
            value = loss(output, batch)
            with torch.autocast(self._device.type, enabled=False):
                return score(item, batch, output, value)

        while several := list(
            islice(items, EVALUATED_TOGETHER * len(self._pipeline.stages.ranges))
        ):
            batches = [to_device(item.batch, self._device) for item in several]
            results = self._pipeline.forward(
                [
                    PipelineMicrobatch(
                        position(item),
                        partial(model_arguments, inputs, batch),
                        partial(scored, item, batch),
                    )
                    for item, batch in zip(several, batches, strict=True)
                ]
            )
            yield from zip(several, results, strict=False)

    def on_output_rank(self, compute: Callable[[], Any]) -> Any:
        world, last = self._pipeline.world, self._pipeline.last_rank
        value = self._pipeline.raise_on_all_ranks(compute if world.rank == last else lambda: None)
        return world.value_of(last, value)
