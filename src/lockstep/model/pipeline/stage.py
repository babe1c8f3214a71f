"""The forwards of a rank's pipeline stages, and a subclass of torch's `PipelineStage`. The subclass
of `PipelineStage` allows microbatches of different shapes, handles missing gradients, and frees
memory early. The import of torch's schedules takes long."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from lockstep.base.torch_private import keep_gradients, stage_input_gradients
from lockstep.comm.world import World
from lockstep.model.pipeline.boundary import (
    Arguments,
    Around,
    Boundary,
    PipelineMicrobatch,
    received_inputs,
)
from lockstep.model.pipeline.stages import Stages
from lockstep.model.pipeline.unused import clear_unused
from lockstep.model.random_streams import ModuleRandomStreams
from lockstep.model.shard import unreduced, weights_backward
from lockstep.model.sync_batchnorm import SyncBatchNormExchange
from lockstep.recomputed import RECEIVED, SENT

ONE_STAGE_A_RANK: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
SEVERAL_STAGES_A_RANK: dict[str, Any] = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}


class VariableShapeStage(PipelineStage):
    submod: Any
    routes: Sequence[Sequence[Boundary]]
    """For each microbatch in the present call of the schedule, the boundary after each stage except
    the last."""
    losses: list[Tensor]
    first: int
    """The first microbatch in the present call of the schedule, as an index in `Pipeline.run`."""
    around: Callable[[int], AbstractContextManager[Any]]
    """The context of a microbatch's backward. Takes the microbatch's index in the call of the
    schedule."""
    on_missing_gradient: Callable[[], None]
    on_gradient: Callable[[int], None] | None
    """Called with the microbatch's index in `Pipeline.run` after the gradient of the stage's
    weights is complete."""
    on_exchange: Callable[[int, Sequence[int], Sequence[Tensor]], None] | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        keep_gradients(self)
        self.received: dict[int, tuple[Tensor, ...]] = {}
        """Maps a microbatch's index in the call of the schedule to its received tensors. The
        received tensors of a microbatch are freed after its backward."""

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.is_first:
            before = self.routes[fwd_chunk_id][self.stage_index - 1]
            self._renew(self.args_recv_info[fwd_chunk_id], before)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_last:
            after = self.routes[bwd_chunk_id][self.stage_index]
            self._renew(self.grad_recv_info[bwd_chunk_id], after)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.submod.index = self.first + fwd_chunk_id
        self._note_received(fwd_chunk_id, self._forward_place, self.args_recv_info)
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        outputs = output if isinstance(output, tuple) else (output,)
        self._note_exchange(fwd_chunk_id, (self._forward_place, SENT), outputs)
        if self.has_backward:
            self.received[fwd_chunk_id] = self.submod.received
        else:
            self._free(self.args_recv_info[fwd_chunk_id])
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """If the output does not depend on an input, zeros are sent to the previous stage as the
        input's gradient. Torch's pipeline stage would deadlock if an input had no gradient."""
        received = self.received.pop(bwd_chunk_id, ())
        is_full = kwargs.get("full_backward", True)
        self._note_received(bwd_chunk_id, self._backward_place, self.grad_recv_info)
        with self.around(bwd_chunk_id), nullcontext() if is_full else unreduced(self.submod):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        sent = stage_input_gradients(self).get(bwd_chunk_id, ())
        self._note_exchange(bwd_chunk_id, (self._backward_place, SENT), sent)
        if is_full:
            self._note_gradient(bwd_chunk_id)
        self._free(self.args_recv_info[bwd_chunk_id])
        # evaluations have no gradient buffers
        self._free(self.grad_recv_info.get(bwd_chunk_id, ()))
        needed = [isinstance(tensor, Tensor) and tensor.requires_grad for tensor in received]
        gradients = stage_input_gradients(self)
        of_chunk = gradients.get(bwd_chunk_id, ())
        if any(
            needs and gradient is None for needs, gradient in zip(needed, of_chunk, strict=False)
        ):
            self.on_missing_gradient()
            gradients[bwd_chunk_id] = tuple(
                torch.zeros_like(tensor) if needs else gradient
                for tensor, needs, gradient in zip(received, needed, of_chunk, strict=False)
            )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Free the graph of the microbatch's loss, which torch's stage would keep until the end of
        the schedule."""
        # the first stage has no gradients of inputs: this is its whole backward
        split = nullcontext() if self.is_first else weights_backward(self.submod)
        with self.around(bwd_chunk_id), split:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
            clear_unused(self.submod.parameters())
        self._note_gradient(bwd_chunk_id)
        if self.is_last and self.has_backward:
            self.losses[bwd_chunk_id] = self.losses[bwd_chunk_id].detach()

    def _note_gradient(self, chunk: int) -> None:
        if self.has_backward and self.on_gradient is not None:
            self.on_gradient(self.first + chunk)

    @property
    def _forward_place(self) -> int:
        return int(self.stage_index)

    @property
    def _backward_place(self) -> int:
        return 2 * int(self.num_stages) - 1 - int(self.stage_index)

    def _note_received(self, chunk: int, part: int, received: Mapping[int, Sequence[Any]]) -> None:
        buffers = [info.buffer for info in received.get(chunk, ())]
        self._note_exchange(chunk, (part, RECEIVED), buffers)

    def _note_exchange(self, chunk: int, position: Sequence[int], tensors: Sequence[Any]) -> None:
        if self.has_backward and self.on_exchange is not None:
            exchanged = [each for each in tensors if isinstance(each, Tensor)]
            self.on_exchange(self.first + chunk, position, exchanged)

    def release(self) -> None:
        self.clear_runtime_states()
        self.received.clear()
        self.submod.received = ()
        for received in (*self.args_recv_info.values(), *self.grad_recv_info.values()):
            self._free(received)

    def _free(self, received: Sequence[Any]) -> None:
        for info in received:
            if info.buffer is not None:
                later = _allocates_at_receive(info)
                info.buffer = None if later else torch.empty(0, device=self.device)

    def _renew(self, received: Sequence[Any], boundary: Boundary) -> None:
        for info, tensor in zip(received, boundary.tensors("meta"), strict=True):
            if not _allocates_at_receive(info):
                if info.buffer is not None:
                    info.buffer = torch.empty_strided(
                        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device
                    )
            elif info.tensor_meta is not None:
                info.tensor_meta = replace(
                    info.tensor_meta, shape=tensor.shape, stride=tensor.stride(), dtype=tensor.dtype
                )


def _allocates_at_receive(info: Any) -> bool:
    """Return True for torch 2.15 and later. Earlier versions allocate a buffer for each
    microbatch."""
    return hasattr(info, "allocate_buffer")


class StageForwards:
    """Calls the parts of this rank's stages one after another, with the random numbers of the
    microbatch and the part."""

    def __init__(
        self,
        model: nn.Module,
        stages: Stages,
        rank: int,
        streams: ModuleRandomStreams,
        together: Sequence[World],
    ) -> None:
        self.stages = stages
        self._model = model
        self.own = list(stages.on_rank(rank))
        self.parts = {
            stage: [model.get_submodule(stages.parts[place]) for place in stages.ranges[stage]]
            for stage in self.own
        }
        self.exchange: SyncBatchNormExchange | None = None
        self.around: Around = lambda _: nullcontext()
        self.streams = streams
        self._together = together

    def output(
        self,
        stage: int,
        microbatch: PipelineMicrobatch,
        received: tuple[Tensor, ...],
        route: Sequence[Boundary],
    ) -> Any:
        """`route` has the boundary after each previous stage."""
        self.streams.start(microbatch.position, self.stages.ranges[stage].start)
        if stage == 0:
            arguments = microbatch.inputs()
        else:
            arguments = route[stage - 1].arguments(received_inputs(received))
        if microbatch.run is None:
            assert isinstance(arguments, Arguments), "only a `run` takes a sequence apart"
            return self.called(stage, arguments)
        return microbatch.run(stage, partial(self.called, stage), arguments)

    def called(self, stage: int, arguments: Arguments) -> Any:
        first, *others = self.parts[stage]
        value = first(*arguments.positional, **arguments.keywords)
        for part in others:
            value = part(value)
        return value

    @property
    def lockstep_ranks(self) -> Sequence[World]:
        """For each axis whose ranks call collectives in the forwards, the ranks along the axis."""
        if (exchange := self._exchange_in_training) is None:
            return self._together
        return () if exchange.world is None else (exchange.world,)

    @contextmanager
    def computing(self, microbatch: PipelineMicrobatch) -> Iterator[None]:
        """Tell SyncBatchNorm if the microbatch is a dummy, also in the recomputation of activation
        checkpointing."""
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
        return self.exchange if self._model.training else None
