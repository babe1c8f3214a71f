"""The executor without a pipeline: forward, loss and backward of one microbatch after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.data.device import to_device
from lockstep.data.generators import seed_generators
from lockstep.data.loader import Microbatch
from lockstep.keys import key
from lockstep.logging.flops import Flops
from lockstep.model.random_streams import ModuleRandomStreams
from lockstep.training.executors.executor import Accumulation, Inputs, Loss, Score, T, call_model


@dataclass(slots=True)
class SerialExecutor:
    """An `Executor` for every plan without a pipeline."""

    model: nn.Module
    device: torch.device
    autocast: AbstractContextManager[Any]
    flops: Flops
    streams: ModuleRandomStreams | None
    why_no_loop: str | None = None

    def train(self, step: Accumulation, inputs: Inputs, loss: Loss) -> None:
        for microbatch, batch in step.microbatches():
            with self.autocast, self.flops.counting(microbatch.size):
                value = loss(call_model(inputs, self.model, batch), batch)
            step.backward(value)

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
            with self.autocast:
                output = call_model(inputs, self.model, batch)
                value = loss(output, batch)
            yield item, score(item, batch, output, value)

    def on_output_rank(self, compute: Callable[[], Any]) -> Any:
        return compute()
