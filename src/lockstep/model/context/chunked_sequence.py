"""A model that computes each chunk of a sequence by itself, for numerics=bitwise: the result has
the same bits on any number of processes of `context`, also on one."""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.base.errors import DataError
from lockstep.base.nested import map_tensors, tensors_in
from lockstep.comm.world import World
from lockstep.model.chunked_logits import hidden_states, with_hidden
from lockstep.model.context.chunk_axis import ChunkAxis
from lockstep.model.context.chunk_sums import sum_losses
from lockstep.model.context.chunk_threads import ChunkThreads
from lockstep.model.context.cut import MOST_LAYOUTS, SequenceCut
from lockstep.model.context.exchange import TokenLayout
from lockstep.model.context.kernels import Chosen
from lockstep.model.context.label_shift import LossFunction, has_tokens
from lockstep.model.expert.leaves import Leaves, leaves_of
from lockstep.model.shard import reshard
from lockstep.recipe.sequence import Sequence


class ChunkedSequenceCut(SequenceCut):
    """A `SequenceCut` whose forward and loss are called once for each of this process's chunks, in
    threads. The chunks are the ranks of an axis, so each is computed as on a process of its own."""

    def __init__(
        self, model: nn.Module, processes: World, sequence: Sequence, leaves: Sequences[Leaves]
    ) -> None:
        """`leaves`: see `ParameterLeaves`."""
        super().__init__(model, processes, sequence, "keys")
        self._leaves = leaves_of(model, leaves)
        self._threads = ChunkThreads(processes.device)
        self._chunk_layouts: dict[int, list[TokenLayout]] = {}

    def output_and_loss(self, arguments: Any, loss: LossFunction, batch: Any) -> tuple[Any, Any]:
        """Return the outputs of this process's chunks, for `whole`, and the loss of all chunks of
        all processes."""
        reshard(self._model)  # a forward without a backward may have left parameters gathered
        self.current = self.cut_of(arguments, batch)
        layouts = self._layouts_of_chunks(self.current.layout.tokens)

        def compute(layout: TokenLayout) -> tuple[Any, Any]:
            cut = self.current._replace(layout=layout)
            output = self._output(arguments, cut, Chosen())
            return output, self._loss_of(loss, output, batch, cut)

        pairs = self._threads.run([partial(compute, layout) for layout in layouts])
        trained = (leaves for each, leaves in self._leaves.items() if each.requires_grad)
        tensors = [tensor for leaves in trained for tensor in leaves.tensors()]
        axis = layouts[0].world
        assert isinstance(axis, ChunkAxis)
        value = sum_losses([value for _, value in pairs], axis, tensors)
        return [output for output, _ in pairs], value

    def whole(self, output: Any) -> Any:
        layout = self.current.layout
        parts = zip(*map(tensors_in, output), strict=True)

        def whole(first: Tensor) -> Tensor:
            own = [*map(hidden_states, next(parts))]
            return with_hidden(first, lambda _: self._whole_tensor(layout, own))

        return map_tensors(output[0], whole)

    def _whole_tensor(self, layout: TokenLayout, parts: Sequences[Tensor]) -> Tensor:
        """Return a tensor of all tokens from the tensors of this process's chunks."""
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
    def _axis_of_trials(self) -> ChunkAxis:
        return ChunkAxis(0, 2, self._world, self._threads)

    def _proved(self, sample: Any, layout: TokenLayout, whole: TokenLayout) -> Any:
        prove = super()._proved
        layouts = self._layouts_of_chunks(layout.tokens)
        return self._threads.run([partial(prove, sample, each, whole) for each in layouts])[0]

    def _layout_of(self, tokens: int) -> TokenLayout:
        """Return the layout of this process's first chunk."""
        return self._layouts_of_chunks(tokens)[0]

    def _layouts_of_chunks(self, tokens: int) -> list[TokenLayout]:
        """Return the layout of each of this process's chunks."""
        if tokens not in self._chunk_layouts:
            if len(self._chunk_layouts) >= MOST_LAYOUTS:
                del self._chunk_layouts[next(iter(self._chunk_layouts))]
            self._chunk_layouts[tokens] = self._made_layouts(tokens)
        return self._chunk_layouts[tokens]

    def _made_layouts(self, tokens: int) -> list[TokenLayout]:
        # a sequence of few tokens has a token in each chunk
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
