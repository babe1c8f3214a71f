"""Calls a model and its loss with only this rank's tokens of each sequence. The module implements
the axis `context` and `Recipe.sequence` (chunks, packed documents)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence as Sequences
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from lockstep.base.errors import DataError, RecipeError
from lockstep.base.nested import map_tensors, tensors_in
from lockstep.comm.world import World
from lockstep.model.context.active import ActiveSequence
from lockstep.model.context.calls import Dims, find_dims
from lockstep.model.context.chunk_axis import ChunkAxis
from lockstep.model.context.count_check import TriedGroup, TriedTokens, check_counts, short_rows
from lockstep.model.context.count_reads import CountReads, KnownCounts, PartCounts, StepCounts
from lockstep.model.context.document_check import check_labels, check_model, tried_tokens
from lockstep.model.context.documents import Documents
from lockstep.model.context.exchange import TokenLayout, gather_tokens
from lockstep.model.context.host_reads import HostReads, PartReads, noting
from lockstep.model.context.kernels import ChosenKernels
from lockstep.model.context.label_shift import (
    BatchCut,
    LossFunction,
    checked_terms,
    find_shift,
    has_tokens,
    loss_of_part,
    map_known,
    map_tokens,
    windows,
)
from lockstep.model.context.mode import SequenceMode
from lockstep.model.context.proof import Provers, Trial, check_modules, prove, relative_differences
from lockstep.model.context.transformers import check_call, open_transformers
from lockstep.model.forwards import Forwards, WholeModel
from lockstep.model.pipeline.boundary import Arguments, Around, Chunks, Run, within
from lockstep.model.shard import SHARDED
from lockstep.model.trial import all_in_use, nothing_dropped, unchanged
from lockstep.recipe.sequence import Sequence

T = TypeVar("T")
LENGTHS = (17, 19)
"""Numbers of tokens in two forwards. A comparison of the forwards shows which torch calls depend on
the sequence's length."""
COMPARED_TOKENS_PER_CHUNK = 8
COMPARED_SAMPLES = 4
"""Number of samples in the check. A model may keep only the half of a sample's tokens with the best
scores. On one sample, the halves that the ranks keep may by chance be the half that one process
keeps."""
WINDOWS = 8
"""Number of windows (runs of tokens) of a long sequence on which the loss is tried before all
windows."""
MOST_LOSSES = 16
"""Largest number of loss functions whose checks are remembered. A training loop may make a new loss
function for each step."""
MOST_LAYOUTS = 64


class _OfLosses(Generic[T]):
    """A dictionary with loss functions as keys, which keeps the latest `MOST_LOSSES`. Keys are
    compared by identity, because a loss function need not be hashable."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[LossFunction, T]] = {}

    def get(self, loss: LossFunction) -> T | None:
        entry = self._found.get(id(loss))
        return None if entry is None else entry[1]

    def put(self, loss: LossFunction, value: T) -> None:
        if len(self._found) >= MOST_LOSSES:
            del self._found[next(iter(self._found))]
        self._found[id(loss)] = loss, value


class MicrobatchCut(NamedTuple):
    """The division of one microbatch's tokens among the ranks of the axis `context`."""

    samples: int
    layout: TokenLayout
    documents: Documents | None


class SequenceCut:
    """Calls a model and its loss with this rank's tokens of each sequence. Every rank of the axis
    `context` and of a pipeline must create a `SequenceCut`, and call its methods in the same order.
    A single rank has all tokens, draws random numbers for each chunk, and keeps attention within
    documents."""

    def __init__(
        self,
        model: nn.Module,
        world: World,
        sequence: Sequence | None,
        exchange: Literal["auto", "keys", "heads"] = "auto",
        forwards: Forwards | None = None,
        beside: Sequences[World] = (),
    ) -> None:
        self.dim = (Sequence() if sequence is None else sequence).dim
        self._model = model
        self._world = world
        self._forwards = forwards or WholeModel(model, world)
        self._provers = Provers([*beside, world, self._forwards.world])
        self._draws_by_chunk = sequence is not None or world.size == 1
        self._sequence = Sequence() if sequence is None else sequence
        _check_positions(model, self._sequence.positions)
        self._exchange = exchange
        self._only_draws = open_transformers(model)
        self._compared = _OfLosses[bool]()
        """True for a loss that does not compare the last token of a document with the first token
        of the next document."""
        self._layouts: dict[int, TokenLayout] = {}
        self._dims: dict[bool, Mapping[int, Dims]] = {}
        self._checked: set[bool] = set()
        self._shifts = _OfLosses[int]()
        self._sequences: dict[int, list[bool]] = {}
        self._labels: dict[tuple[bool, int], list[bool]] = {}
        self.current: MicrobatchCut
        self.reads = HostReads(world, is_summed=self._is_summed)
        """The numbers that forwards and losses read from tensors into Python by `tensor.item()`.
        The numbers must be equal on all ranks."""
        self.counts = CountReads(world, is_summed=self._is_summed)
        """The counts of tokens that forwards read from tensors into Python. The counts may differ
        between ranks."""
        self.kernels = ChosenKernels()
        self._loss_counts = KnownCounts()

    def output_and_loss(self, arguments: Any, loss: LossFunction, batch: Any) -> tuple[Any, Any]:
        output = self.run(arguments, batch)
        return output, self.loss(loss, output, batch)

    def run(self, arguments: Any, batch: Any) -> Any:
        """Return the model's output for this rank's tokens."""
        self.current = self.cut_of(arguments, batch)
        self.counts.begin_microbatch(arguments)
        return self._output(arguments, self.current, self.kernels)

    def _output(self, arguments: Any, cut: MicrobatchCut, chosen: ChosenKernels) -> Any:
        with self._noting_mode(cut, 0, chosen=chosen):
            return self.arguments_of(arguments, cut).call(self._model)

    def cut_of(self, arguments: Any, batch: Any) -> MicrobatchCut:
        samples, tokens = size = self._size_of(arguments)
        self._know_sequences(arguments, tokens)
        self._know_dims(arguments)
        documents = self._documents_of(batch, size)
        return MicrobatchCut(samples, self._layout_of(tokens), documents)

    def arguments_of(self, arguments: Any, cut: MicrobatchCut) -> Arguments:
        dim, layout = self.dim, cut.layout
        known = self._know_sequences(arguments, layout.tokens)
        own = map_known(arguments, known, lambda tensor: layout.take(tensor, dim))
        return self.call_of(own, self._active(cut, ChosenKernels()).places())

    def inputs_of(self, arguments: Any, cut: MicrobatchCut) -> Arguments | Chunks:
        return self.arguments_of(arguments, cut)

    def run_of(
        self,
        cut: MicrobatchCut,
        loss: LossFunction,
        batch: Any,
        around_loss: Callable[[], AbstractContextManager[Any]],
    ) -> Run:
        return within(partial(self._noting_mode, cut, chosen=self.kernels))

    def scored(self, score: Callable[[Any, LossFunction], T], loss: LossFunction, result: Any) -> T:
        return score(result, partial(self.loss, loss))

    @contextmanager
    def _noting_mode(
        self, cut: MicrobatchCut, stage: int, *, chosen: ChosenKernels
    ) -> Iterator[None]:
        with (
            self._noted_forward(cut.layout, self.reads.begin()) as part,
            self._mode(cut, stage, chosen=chosen, part=part),
        ):
            yield

    @contextmanager
    def _noted_forward(self, layout: TokenLayout, forward: int) -> Iterator[PartReads]:
        # in a pipeline, the ranks of one stage cannot start a check by themselves
        counts = PartCounts(self.counts.known) if self._forwards.last_stage == 0 else None
        with self._recording(layout, forward, counts) as part:
            yield part
        if counts is not None:
            self.counts.end_part(forward, layout, counts)

    @contextmanager
    def _recording(
        self, layout: TokenLayout, forward: int, counts: PartCounts | None = None
    ) -> Iterator[PartReads]:
        part = PartReads(counts)
        yield part
        self.reads.end_part(forward, layout, part)

    def _mode(
        self,
        cut: MicrobatchCut,
        stage: int,
        *,
        chosen: ChosenKernels,
        part: PartReads | None = None,
    ) -> SequenceMode:
        return SequenceMode(
            self._active(cut, chosen),
            self._dims[self._model.training][stage],
            only_draws=self._only_draws,
            draws_by_chunk=self._draws_by_chunk,
            part=part,
        )

    def _active(self, cut: MicrobatchCut, chosen: ChosenKernels) -> ActiveSequence:
        return ActiveSequence(cut.layout, self._exchange, cut.documents, chosen=chosen)

    @property
    def hides_tokens(self) -> bool:
        """True if attention needs more than a causal mask, because a rank has only some of the
        tokens or because the recipe has documents."""
        return self._world.size > 1 or self._sequence.documents is not None

    @property
    def _is_cut(self) -> bool:
        return self._world.size > 1

    @property
    def _is_summed(self) -> bool:
        return True

    @property
    def _axis_of_trials(self) -> World | ChunkAxis:
        return self._world

    @property
    def is_checked(self) -> bool:
        return self._model.training in self._checked

    def check(self, arguments: Any, loss: LossFunction, batch: Any) -> None:
        """Check that the model and the loss give the same results if each rank has only some of the
        tokens. Every rank that communicates in the forward must call this method once in training
        mode and once in evaluation mode. All ranks raise the same error."""
        self._know_sequences(arguments, self._size_of(arguments)[1])
        self._know_dims(arguments)
        if self._is_cut:
            self._prove(arguments, loss, batch)
        self._check_documents(arguments, loss, batch)
        self._checked.add(self._model.training)

    def check_counts(self, step: StepCounts, summed: World) -> None:
        """Every rank of the axis and of `summed` must call this method, in the mode (training or
        evaluation) of the step. All ranks raise the same error."""
        with unchanged(self._model, self._world.device), all_in_use(self._model):
            check_counts(step, self.counts.known, self._tokens_tried, (self._world, summed))

    def _tokens_tried(self, arguments: Any) -> TriedTokens:
        """Return all tokens of a microbatch in groups of short sequences."""
        samples, tokens = self._size_of(arguments)
        known, layout = self._know_sequences(arguments, tokens), self._layout_of(tokens)
        rows = short_rows(tokens, layout.chunks, COMPARED_TOKENS_PER_CHUNK)
        compared = len(rows[0])
        together = max(1, layout.local // compared)
        groups = [rows[start : start + together] for start in range(0, len(rows), together)]
        whole = TokenLayout(compared, layout.chunks, self._world_of_one)

        def compute(group: int) -> TriedGroup:
            places = torch.tensor(groups[group], device=self._world.device)
            sample = self._rows(arguments, known, samples, places)
            trial = self._cut_trial(sample, compared)
            found = relative_differences(trial, self._trial(sample, whole), self.dim)
            noted = {
                self.counts.place(group, of_chunk): counts.by_line()
                for of_chunk, counts in zip(trial.layouts, trial.counts, strict=True)
            }
            return TriedGroup(found, noted)

        return TriedTokens(self._layout_of(compared), len(groups), compute)

    def _rows(self, arguments: Any, known: list[bool], samples: int, places: Tensor) -> Any:
        def taken(tensor: Tensor) -> Tensor:
            if len(tensor) != samples:  # the same for all samples
                tensor = tensor.expand(samples, *tensor.shape[1:])
            return torch.cat([tensor.index_select(self.dim, row) for row in places])

        def repeated(tensor: Tensor) -> Tensor:
            has_samples = tensor.shape[:1] == (samples,)
            return torch.cat([tensor] * len(places)) if has_samples else tensor

        sequences = iter(known)
        return map_tensors(arguments, lambda each: (taken if next(sequences) else repeated)(each))

    def loss(self, loss: LossFunction, output: Any, batch: Any) -> Any:
        """Return the loss of this rank's tokens. The sum over the ranks is the loss of all
        tokens."""
        return self._loss_of(loss, output, batch, self.current, self.reads.begin())

    def _loss_of(
        self, loss: LossFunction, output: Any, batch: Any, cut: MicrobatchCut, forward: int
    ) -> Any:
        layout = cut.layout
        self._check_labels(loss, output, layout.local, batch, cut)
        if layout.world.size == 1:
            return checked_terms(loss(output, batch))
        if (shift := self._shifts.get(loss)) is None:
            shift = self._find_shift(loss, output, layout, batch, cut)
        parts = BatchCut(layout, self.dim, self._know_labels(batch, layout.tokens))
        counts = PartCounts(self._loss_counts)
        with self._recording(layout, forward, counts) as part:
            watched_loss = noting(loss, part)
            value = loss_of_part(watched_loss, output, batch, parts, layout.world.rank, shift)
        if noted := counts.by_line():
            # a count may change the loss only where it is not 0, as in `if rare.any(): loss *= 2`
            self._find_shift(loss, output, layout, batch, cut, tries_all=True)
            for line, each in noted.items():
                self._loss_counts.add(line, [each], is_shown=True)
        return value

    def whole(self, output: Any) -> Any:
        """Return the output for all tokens, in the sequence's order, without a gradient. Every rank
        must call this method."""
        if self._world.size == 1:
            return output
        layout, dim = self.current.layout, self.dim

        def gathered(tensor: Tensor) -> Tensor:
            return gather_tokens(layout, tensor.detach(), dim)

        return map_tokens(output, dim, layout.local, gathered)

    def _tried(
        self,
        arguments: Any,
        cut: MicrobatchCut,
        observer: Around = lambda _: nullcontext(),
        part: PartReads | None = None,
    ) -> Any:
        @contextmanager
        def around(stage: int) -> Iterator[None]:
            with self._mode(cut, stage, chosen=ChosenKernels(), part=part), observer(stage):
                yield

        return self._forwards.try_forward(self.arguments_of(arguments, cut), within(around))

    def call_of(self, arguments: Any, places: Tensor | None = None) -> Arguments:
        given, name = Arguments.of(arguments), self._sequence.positions
        if name is not None and name not in given.keywords:
            samples, tokens = self._size_of(arguments)
            if places is None:
                places = torch.arange(tokens, device=self._world.device)
            given.keywords[name] = places.expand(samples, -1)
        return given

    def _prove(self, arguments: Any, loss: LossFunction, batch: Any) -> None:
        samples, tokens = self._size_of(arguments)
        compared = self._most_of(tokens)
        sample = self._first_tokens(arguments, compared, rows=COMPARED_SAMPLES)
        layout = self._layout_of(compared)
        check_modules(self._model, layout)
        whole = TokenLayout(compared, layout.chunks, self._world_of_one)
        # a forward of fewer tokens must not use a table that the model has cached for all tokens
        with unchanged(self._model, self._world.device):
            self._call_first(arguments, layout.local)
        with unchanged(self._model, self._world.device), all_in_use(self._model):
            cut_trial, whole_trial = self._cut_trial(sample, compared), self._trial(sample, whole)
            output = prove(cut_trial, whole_trial, self.dim, self._provers)

            def find_shift() -> None:
                if self._forwards.has_output and self._shifts.get(loss) is None:
                    cut = MicrobatchCut(samples, self._layout_of(tokens), None)
                    self._find_shift(loss, output, layout, batch, cut)

            self._provers.raise_on_all_ranks(find_shift)

    @property
    def _world_of_one(self) -> World:
        return replace(self._world, rank=0, size=1, group=None, owns_group=False)

    def _cut_trial(self, sample: Any, tokens: int) -> Trial:
        return self._trial(sample, self._layout_of(tokens))

    def _trial(self, sample: Any, layout: TokenLayout) -> Trial:
        counts = PartCounts(KnownCounts())

        def compute(observers: Sequences[Around]) -> list[Any]:
            cut = MicrobatchCut(1, layout, None)
            output = self._tried(sample, cut, observers[0], PartReads(counts))
            return [output] if self._forwards.has_output else []

        return Trial([layout], compute, [counts])

    def _size_of(self, arguments: Any) -> tuple[int, int]:
        dim = self.dim
        for leaf in tensors_in(arguments):
            if leaf.dim() > dim:
                return leaf.shape[0], leaf.shape[dim]
        raise RecipeError(
            f"Recipe.inputs returned no tensor with a dim {dim}, which is the tokens"
            f" (Recipe.sequence, or 1); return token ids of shape (samples, tokens), or give"
            " ls.Sequence(dim=...)"
        )

    def _layout_of(self, tokens: int) -> TokenLayout:
        if (cached := self._layouts.get(tokens)) is not None:
            return cached
        layout = TokenLayout(tokens, self._sequence.chunks, self._world)
        if not all(layout.counts):
            raise DataError(
                f"a sequence of {tokens} tokens, in {layout.chunks} chunks on"
                f" context={self._world.size}: rank {layout.counts.index(0)} of the axis would have"
                f" none; give sequences of at least {layout.chunks} tokens, fewer chunks"
                " (ls.Sequence(chunks=...)), or a smaller context"
            )
        if len(self._layouts) >= MOST_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        self._layouts[tokens] = layout
        return layout

    def _know_sequences(self, arguments: Any, tokens: int) -> list[bool]:
        """Return, for each tensor of the model's arguments, True if the tensor has a dim of tokens.
        The first batch decides which tensors have such a dim. In a later batch, a tensor may be as
        long as the sequence by chance."""
        leaves = tensors_in(arguments)
        are_sequences = [has_tokens(leaf, self.dim, tokens) for leaf in leaves]
        known = self._sequences.setdefault(len(leaves), are_sequences)
        for place, (leaf, was, now) in enumerate(zip(leaves, known, are_sequences, strict=True)):
            if was and not now:
                raise RecipeError(
                    f"Recipe.inputs: tensor {place} has the shape {tuple(leaf.shape)}, in a batch"
                    f" of {tokens} tokens, and had as many as the tokens in dim {self.dim} in an"
                    " earlier batch, which was taken as a sequence to cut; if it is none, return"
                    " tensor[:, None], and let the model take its [:, 0]; if it is one, give it as"
                    " many tokens as the first tensor"
                )
        return known

    def _know_labels(self, batch: Any, tokens: int) -> list[bool]:
        """Return, for each tensor of a batch, True if the tensor was as long as the sequence in
        every batch."""
        leaves = tensors_in(batch)
        kind = self._model.training, len(leaves)
        known = self._labels.get(kind, [True] * len(leaves))
        self._labels[kind] = [
            was and has_tokens(leaf, self.dim, tokens)
            for leaf, was in zip(leaves, known, strict=True)
        ]
        return self._labels[kind]

    def _first_tokens(self, arguments: Any, tokens: int, *, rows: int = 1) -> Any:
        samples, length = self._size_of(arguments)
        known = self._know_sequences(arguments, length)
        return self._sample(arguments, known, samples, 0, 0, tokens, rows=rows)

    def _sample(
        self,
        value: Any,
        known: list[bool],
        samples: int,
        row: int,
        start: int,
        tokens: int,
        *,
        rows: int = 1,
    ) -> Any:
        cut = map_known(value, known, lambda tensor: tensor.narrow(self.dim, start, tokens))

        def of_row(tensor: Tensor) -> Tensor:
            return tensor[row : row + rows] if tensor.shape[:1] == (samples,) else tensor

        return map_tensors(cut, of_row)

    def _documents_of(self, batch: Any, size: tuple[int, int]) -> Documents | None:
        if self._sequence.documents is None:
            return None
        try:
            ids = self._sequence.documents(batch)
        except (LookupError, TypeError, AttributeError) as error:
            raise RecipeError(
                f"Sequence.documents raised {type(error).__name__}: {error}; it was called with"
                f" {_described(batch)}; it must return the document of each token, a tensor of"
                " (samples, tokens); rows of ls.pack have it under batch['document_ids']"
            ) from error
        documents = Documents.of(ids, self._world.device)
        if documents.ids.shape != size:
            raise DataError(
                f"Sequence.documents returned ids of shape {tuple(documents.ids.shape)} for inputs"
                f" of {size[0]} samples and {size[1]} tokens; return the document of each token of"
                " what Recipe.inputs returns"
            )
        return documents

    def _check_documents(self, arguments: Any, loss: LossFunction, batch: Any) -> None:
        """Check that a document does not change the output or the loss of another document. Every
        rank must call this method."""
        cut = self.cut_of(arguments, batch)
        if (documents := cut.documents) is None:
            return

        def call(arguments: Any, documents: Documents) -> Any:
            layout = TokenLayout(documents.tokens, self._sequence.chunks, self._world_of_one)
            return self._tried(arguments, MicrobatchCut(len(documents.ids), layout, documents))

        def check() -> None:
            output = check_model(call, arguments, documents)
            if output is not None:
                self._check_labels(loss, output, tried_tokens(documents), batch, cut)

        with (
            unchanged(self._model, self._world.device),
            nothing_dropped(self._model),
            all_in_use(self._model),
        ):
            self._know_dims(arguments)
            self._provers.raise_on_all_ranks(check)

    def _check_labels(
        self, loss: LossFunction, output: Any, has: int, batch: Any, cut: MicrobatchCut
    ) -> None:
        if cut.documents is None or self._compared.get(loss):
            return
        tokens = cut.layout.tokens
        most, known = self._most_of(tokens), self._know_labels(batch, tokens)
        zeros = self._zeros(output, has, most)

        def part(batch: Any, row: int, start: int) -> tuple[Any, Any]:
            return zeros, self._sample(batch, known, cut.samples, row, start, most)

        if check_labels(loss, part, most, batch, cut.documents):
            self._compared.put(loss, True)

    def _know_dims(self, arguments: Any) -> None:
        if self._model.training in self._dims:
            return
        check_call(self._model, *self.call_of(arguments))
        _, tokens = self._size_of(arguments)
        if tokens < 2:
            raise DataError(
                f"a sequence of {tokens} token; two lengths are needed to see what depends on the"
                " length; give sequences of several tokens"
            )
        lengths = min(LENGTHS[0], tokens - 1), min(LENGTHS[1], tokens)
        with unchanged(self._model, self._world.device):
            dims = find_dims(partial(self._call_first, arguments), lengths)
        self._dims[self._model.training] = dims

    def _call_first(
        self, arguments: Any, tokens: int, around: Around = lambda _: nullcontext()
    ) -> None:
        _, length = self._size_of(arguments)

        @contextmanager
        def with_reason(stage: int) -> Iterator[None]:
            try:
                with around(stage):
                    yield
            except (RuntimeError, ValueError, IndexError) as error:
                if SHARDED.search(str(error)):
                    raise  # the error does not come from the length
                raise RecipeError(
                    f"the model cannot compute the first {tokens} of {length} tokens:"
                    f" {error}; a model of sequences takes any length: slice its tables, such as"
                    " self.positions[:, :tokens]; or it fails with whole sequences too"
                ) from error

        given = self.call_of(self._first_tokens(arguments, tokens))
        self._forwards.try_forward(given, within(with_reason))

    def _find_shift(
        self,
        loss: LossFunction,
        output: Any,
        layout: TokenLayout,
        batch: Any,
        cut: MicrobatchCut,
        *,
        tries_all: bool = False,
    ) -> int:
        """Return 1 if the loss compares a token's output with the next token's label, else 0. If
        the batch does not show the shift, 0 and 1 are both right. Raises `LossError` if the loss of
        a tried window is not a sum over tokens."""
        samples, tokens = cut.samples, cut.layout.tokens
        known, most = self._know_labels(batch, tokens), self._most_of(tokens)
        most -= most > 2 and most % 2 == 0  # odd, so that a rank has no two consecutive tokens
        zeros = self._zeros(output, layout.local, most)
        parts = BatchCut(TokenLayout(most, most, self._axis_of_trials), self.dim, known)
        # a few windows far apart nearly always show the shift
        few = [(0, start) for start in windows(tokens, most)[:: -(-tokens // (most * WINDOWS))]]
        every = product(range(samples), windows(tokens, most))
        for row, start in dict.fromkeys([*few, *every]):
            part = self._sample(batch, known, samples, row, start, most)
            shift = find_shift(loss, zeros, part, parts)
            if shift is not None and not tries_all:
                self._shifts.put(loss, shift)
                return shift
        return 0

    def _most_of(self, tokens: int) -> int:
        return min(tokens, COMPARED_TOKENS_PER_CHUNK * self._sequence.chunks)

    def _zeros(self, output: Any, has: int, tokens: int) -> Any:
        dim = self.dim

        def zeros(like: Tensor) -> Tensor:
            return like.new_zeros(1, *like.shape[1:dim], tokens, *like.shape[dim + 1 :])

        return map_tokens(output, dim, has, zeros)


def _check_positions(model: nn.Module, name: str | None) -> None:
    if name is None:
        return
    arguments = inspect.signature(model.forward).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in arguments.values())
    if name not in arguments and not takes_any:
        raise RecipeError(
            f"Sequence.positions is {name!r}, but the model's forward takes"
            f" {', '.join(arguments) or 'no argument'}; name the argument that takes positions, or"
            " leave positions out if the model computes them with torch.arange"
        )


def _described(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"a batch with the keys {[*batch]}"
    if isinstance(batch, list | tuple):
        return f"a {type(batch).__name__} of {len(batch)}"
    return f"a {type(batch).__name__}"
