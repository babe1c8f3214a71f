from __future__ import annotations

from collections.abc import Callable, Sequence as Sequences
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from lockstep.base.errors import DataError
from lockstep.base.nested import map_tensors, tensors_in
from lockstep.comm.world import World
from lockstep.model.chunked_logits import hidden_states, with_hidden
from lockstep.model.context.chunk_axis import ChunkAxis
from lockstep.model.context.chunk_sums import ChunkInputs, join_outputs, sum_losses
from lockstep.model.context.chunk_threads import ChunkThreads
from lockstep.model.context.count_reads import KnownCounts, PartCounts
from lockstep.model.context.cut import MOST_LAYOUTS, MicrobatchCut, SequenceCut
from lockstep.model.context.exchange import TokenLayout
from lockstep.model.context.host_reads import PartReads
from lockstep.model.context.kernels import ChosenKernels
from lockstep.model.context.label_shift import LossFunction, has_tokens
from lockstep.model.context.proof import Trial
from lockstep.model.expert.leaves import Leaves, leaves_of
from lockstep.model.forwards import Forwards
from lockstep.model.pipeline.boundary import Arguments, Around, Chunks, Run, received_inputs
from lockstep.model.separate_parts import SeparateParts
from lockstep.model.shard import reshard
from lockstep.recipe.sequence import Sequence

T = TypeVar("T")


class ChunkedSequenceCut(SequenceCut):
    """A `SequenceCut` that computes each chunk of a sequence in a separate thread, for bitwise
    numerics. The chunks take the place of ranks of the axis `context`."""

    def __init__(
        self,
        model: nn.Module,
        processes: World,
        sequence: Sequence,
        leaves: Sequences[Leaves],
        separate: SeparateParts | None,
        forwards: Forwards | None,
        beside: Sequences[World],
        *,
        in_two: bool,
    ) -> None:
        super().__init__(model, processes, sequence, "keys", forwards, beside)
        self._in_two = in_two
        self._leaves = {
            stage: _leaves_of_stage(nn.ModuleList(parts), leaves, separate)
            for stage, parts in self._forwards.parts_by_stage().items()
        }
        self._threads = ChunkThreads(processes.device)
        if separate is not None:
            self._threads.around_others = separate.put_aside
        self._chunk_layouts: dict[int, list[TokenLayout]] = {}

    def output_and_loss(self, arguments: Any, loss: LossFunction, batch: Any) -> tuple[Any, Any]:
        reshard(self._model)  # a forward without a backward may have left parameters gathered
        cut = self.current = self.cut_of(arguments, batch)
        self.counts.begin_microbatch(arguments)
        run = self.run_of(cut, loss, batch, nullcontext)
        result: tuple[Any, Any] = run(
            0, lambda given: given.call(self._model), self.inputs_of(arguments, cut)
        )
        return result

    def inputs_of(self, arguments: Any, cut: MicrobatchCut) -> Chunks:
        layouts = self._layouts_of_chunks(cut.layout.tokens)
        cuts = [cut._replace(layout=layout) for layout in layouts]
        return Chunks(tuple(self.arguments_of(arguments, each) for each in cuts))

    def run_of(
        self,
        cut: MicrobatchCut,
        loss: LossFunction,
        batch: Any,
        around_loss: Callable[[], AbstractContextManager[Any]],
    ) -> Run:
        number = self.reads.begin()

        def loss_of(output: Any, of_chunk: MicrobatchCut) -> Any:
            with around_loss():
                return self._loss_of(loss, output, batch, of_chunk, number)

        return partial(self._run, cut, loss_of)

    def scored(self, score: Callable[[Any, LossFunction], T], loss: LossFunction, result: Any) -> T:
        output, value = result
        return score(output, lambda *_: value)

    def _run(
        self,
        cut: MicrobatchCut,
        loss_of: Callable[[Any, MicrobatchCut], Any],
        stage: int,
        forward: Callable[[Arguments], Any],
        arguments: Chunks,
    ) -> Any:
        is_last, is_first = stage == self._forwards.last_stage, stage == 0
        given = [(each, []) if is_first else _with_leaves(each) for each in arguments.each]

        number = self.reads.begin()

        def compute(place: int, of_chunk: MicrobatchCut) -> tuple[Any, Any]:
            with (
                self._noted_forward(of_chunk.layout, number) as part,
                self._mode(of_chunk, stage, chosen=ChosenKernels(), part=part),
            ):
                output = forward(given[place][0])
            return output, loss_of(output, of_chunk) if is_last else None

        pairs = self._in_chunks(cut, compute)
        axis = self._layouts_of_chunks(cut.layout.tokens)[0].world
        assert isinstance(axis, ChunkAxis)
        inputs = ChunkInputs(
            axis,
            self._trained(stage),
            () if is_first else tensors_in(arguments),
            [leaves for _, leaves in given],
            in_two=self._in_two and not is_first,
        )
        outputs = [output for output, _ in pairs]
        if not is_last:
            return Chunks(tuple(join_outputs(outputs, inputs)))
        return outputs, sum_losses([value for _, value in pairs], inputs)

    def _in_chunks(self, cut: MicrobatchCut, compute: Callable[[int, MicrobatchCut], T]) -> list[T]:
        layouts = self._layouts_of_chunks(cut.layout.tokens)
        return self._threads.run(
            [
                partial(compute, place, cut._replace(layout=layout))
                for place, layout in enumerate(layouts)
            ]
        )

    def _trained(self, stage: int) -> list[Tensor]:
        trained = (each for shared, each in self._leaves[stage] if shared.requires_grad)
        return [tensor for each in trained for tensor in each.tensors()]

    def whole(self, output: Any) -> Any:
        layout = self.current.layout
        parts = zip(*map(tensors_in, output), strict=True)

        def whole(first: Tensor) -> Tensor:
            own = [*map(hidden_states, next(parts))]
            return with_hidden(first, lambda _: self._whole_tensor(layout, own))

        return map_tensors(output[0], whole)

    def _whole_tensor(self, layout: TokenLayout, parts: Sequences[Tensor]) -> Tensor:
        """Return the tensor of all tokens in the sequence's order. Every process must call this
        method."""
        first, axis = parts[0].detach(), layout.world
        assert isinstance(axis, ChunkAxis)
        if not has_tokens(first, self.dim, layout.local):
            return first
        rows = torch.cat([part.detach().movedim(self.dim, 0) for part in parts]).contiguous()
        counts = [sum(layout.counts[share.start : share.stop]) for share in axis.shares]
        gathered = axis.processes.gather_rows(rows, counts)
        return gathered.index_select(0, layout.true_order).movedim(0, self.dim)

    @property
    def _is_cut(self) -> bool:
        return self._sequence.chunks > 1

    @property
    def _is_summed(self) -> bool:
        return False

    @property
    def _axis_of_trials(self) -> ChunkAxis:
        return ChunkAxis(0, 2, self._world, self._threads)

    def _cut_trial(self, sample: Any, tokens: int) -> Trial:
        cut = MicrobatchCut(1, self._layout_of(tokens), None)
        layouts = self._layouts_of_chunks(tokens)
        counts = [PartCounts(KnownCounts()) for _ in layouts]

        def compute(observers: Sequences[Around]) -> Sequences[Any]:
            def run(stage: int, forward: Callable[[Arguments], Any], arguments: Chunks) -> Chunks:
                def in_chunk(place: int, of_chunk: MicrobatchCut) -> Any:
                    part = PartReads(counts[place])
                    mode = self._mode(of_chunk, stage, chosen=ChosenKernels(), part=part)
                    with mode, observers[place](stage):
                        return forward(arguments.each[place])

                return Chunks(tuple(self._in_chunks(cut, in_chunk)))

            outputs = self._forwards.try_forward(self.inputs_of(sample, cut), run)
            return outputs.each if self._forwards.has_output else []

        return Trial(layouts, compute, counts)

    def _layout_of(self, tokens: int) -> TokenLayout:
        return self._layouts_of_chunks(tokens)[0]

    def _layouts_of_chunks(self, tokens: int) -> list[TokenLayout]:
        if tokens not in self._chunk_layouts:
            if len(self._chunk_layouts) >= MOST_LAYOUTS:
                del self._chunk_layouts[next(iter(self._chunk_layouts))]
            self._chunk_layouts[tokens] = self._made_layouts(tokens)
        return self._chunk_layouts[tokens]

    def _made_layouts(self, tokens: int) -> list[TokenLayout]:
        # every chunk has at least one token
        chunks, processes = min(self._sequence.chunks, tokens), self._world
        axis = ChunkAxis(0, chunks, processes, self._threads)
        if not axis.shares[-1]:
            raise DataError(
                f"a sequence of {tokens} tokens on context={processes.size}: a rank of the axis"
                f" would have none; give sequences of at least {processes.size} tokens, or a"
                " smaller context"
            )
        return [
            TokenLayout(tokens, chunks, ChunkAxis(place, chunks, processes, self._threads))
            for place in axis.own_share
        ]


class _HasLeaves(Protocol):
    def tensors(self) -> list[Tensor]: ...


def _leaves_of_stage(
    stage: nn.Module, leaves: Sequences[Leaves], separate: SeparateParts | None
) -> list[tuple[nn.Parameter, _HasLeaves]]:
    """A parameter that several parts of the stage share occurs once for each part."""
    found: list[tuple[nn.Parameter, _HasLeaves]] = [*leaves_of(stage, leaves).items()]
    if separate is not None:
        modules = set(stage.modules())
        of_parts = (leaf for several in separate.leaves.values() for leaf in several)
        found += [(leaf.shared, leaf) for leaf in of_parts if leaf.part in modules]
    return found


def _with_leaves(arguments: Arguments) -> tuple[Arguments, list[Tensor]]:
    """Replace the tensors in a stage's arguments by new autograd leaves. Each chunk gets separate
    gradients."""
    tensors = tensors_in(arguments)
    leaves = [each.detach().requires_grad_(each.requires_grad) for each in tensors]
    arrived = iter(received_inputs(tuple(leaves)))
    return map_tensors(arguments, lambda _: next(arrived)), leaves
