"""The forwards of this rank's stages of a pipeline, one microbatch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.world import World
from lockstep.model.pipeline.boundary import Boundary, received_inputs
from lockstep.model.pipeline.microbatch import PipelineMicrobatch
from lockstep.model.pipeline.stages import Stages
from lockstep.model.random_streams import ModuleRandomStreams
from lockstep.model.sync_batchnorm import SyncBatchNormExchange


class StageForwards:
    """Calls a stage's parts one after another, with the microbatch's random streams. `shards`: as
    in `Pipeline`."""

    def __init__(
        self,
        model: nn.Module,
        stages: Stages,
        rank: int,
        streams: ModuleRandomStreams,
        shards: World | None,
    ) -> None:
        self.stages = stages
        self.own = list(stages.on_rank(rank))
        self.parts = {
            stage: [model.get_submodule(stages.parts[place]) for place in stages.ranges[stage]]
            for stage in self.own
        }
        self.exchange: SyncBatchNormExchange | None = None
        """The exchange among a microbatch's slices; None if microbatches are not split."""
        self.around: Callable[[int], AbstractContextManager[Any]] = lambda _: nullcontext()
        self.streams = streams
        self._shards = shards

    def output(
        self,
        stage: int,
        microbatch: PipelineMicrobatch,
        received: tuple[Tensor, ...],
        route: Sequence[Boundary],
    ) -> Any:
        """Return the stage's output. `received`: from the stage before. `route`: the known
        boundaries."""
        parts = self.parts[stage]
        self.streams.start(microbatch.position, self.stages.ranges[stage].start)
        if stage == 0:
            value = call_with(parts[0], microbatch.inputs())
            parts = parts[1:]
        else:
            arrived = received_inputs(received)
            value = arrived[0] if route[stage - 1].single else arrived
        for part in parts:
            value = part(value)
        return value

    @property
    def lockstep_ranks(self) -> World | None:
        """The ranks that must run the same forwards, because these have collectives; None if there
        are none."""
        exchange = self._exchange_in_training
        return self._shards if exchange is None else exchange.world

    @contextmanager
    def computing(self, microbatch: PipelineMicrobatch) -> Iterator[None]:
        """Tell SyncBatchNorm which microbatch is computed, in its forward and, for recomputation,
        in its backward."""
        exchange = self._exchange_in_training
        if exchange is None:
            yield
            return
        exchange.is_dummy = microbatch.is_dummy
        try:
            yield
        finally:
            exchange.is_dummy = None

    @property
    def _exchange_in_training(self) -> SyncBatchNormExchange | None:
        return self.exchange if torch.is_grad_enabled() else None


def call_with(function: Callable[..., Any], inputs: Any) -> Any:
    """Call the function with a tuple of arguments, a dict of keywords, or one argument."""
    return (
        function(**inputs)
        if isinstance(inputs, dict)
        else function(*inputs)
        if isinstance(inputs, tuple)
        else function(inputs)
    )


@contextmanager
def unchanged_buffers(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Restore the buffers of `parts` afterwards."""
    kept = [(buffer, buffer.clone()) for part in parts for buffer in part.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                # torch counts a version for each write, but for those of BatchNorm
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
