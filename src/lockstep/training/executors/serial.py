"""The executor without a pipeline: forward, loss and backward of one microbatch after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
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


class SerialExecutor:
    why_no_loop: str | None = None

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        autocast: AbstractContextManager[Any],
        flops: Flops,
        streams: ModuleRandomStreams | None,
    ) -> None:
        self._model = model
        self._device = device
        self._autocast = autocast
        self._flops = flops
        self._streams = streams

    def train(self, step: Accumulation, inputs: Inputs, loss: Loss) -> None:
        for microbatch, batch in step.microbatches():
            with self._autocast, self._flops.counting(microbatch.size):
                value = loss(call_model(inputs, self._model, batch), batch)
            step.backward(value)

    def evaluate(
        self, items: Iterator[Microbatch], position: Callable[[Microbatch], tuple[int, ...]], inputs: Inputs, loss: Loss, score: Score[T]
    ) -> Iterator[tuple[Microbatch, T]]:
        for item in items:
            batch = to_device(item.batch, self._device)
            at = position(item)
            seed_generators(key(*at), self._device)
            if self._streams is not None:
                self._streams.set_position(at)
            with self._autocast:
                output = call_model(inputs, self._model, batch)
                value = loss(output, batch)
            yield item, score(item, batch, output, value)

    def on_output_rank(self, compute: Callable[[], Any]) -> Any:
        return compute()
