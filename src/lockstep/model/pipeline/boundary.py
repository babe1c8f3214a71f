"""A pipeline's microbatches, and the boundary between stages: a tensor or a tuple of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.base.errors import RecipeError

Around = Callable[[int], AbstractContextManager[Any]]
"""(stage) -> the context of the stage's forward. A whole model is stage 0."""
Run = Callable[[int, Callable[["Arguments"], Any], Any], Any]
"""(stage, its forward, `Arguments` or `Chunks` of them) -> the stage's output, or `Chunks` of
outputs. The last stage's result is passed to `PipelineMicrobatch.score`."""


class Arguments(NamedTuple):
    """Positional and keyword arguments."""

    positional: tuple[Any, ...]
    keywords: dict[str, Any]

    @classmethod
    def of(cls, inputs: Any) -> Arguments:
        """Return the arguments that a result of `Recipe.inputs` describes: a tuple of arguments, a
        dict of keywords, or one argument."""
        if isinstance(inputs, dict):
            return cls((), dict(inputs))
        return cls(inputs if isinstance(inputs, tuple) else (inputs,), {})

    def call(self, function: Callable[..., Any]) -> Any:
        return function(*self.positional, **self.keywords)


class Chunks(NamedTuple):
    """A value for each chunk of a sequence, if a stage computes each chunk by itself."""

    each: tuple[Any, ...]


def within(around: Around) -> Run:
    """Return a `Run` that calls the forward in a context."""

    def run(stage: int, forward: Callable[[Arguments], Any], arguments: Arguments) -> Any:
        with around(stage):
            return forward(arguments)

    return run


@dataclass(frozen=True, slots=True)
class PipelineLoss:
    """The loss of a microbatch, as scalars. The backward accumulates the gradient of `grad_output *
    total`."""

    total: Tensor
    grad_output: Tensor
    record: Sequence[Tensor | float]
    """Numbers that are sent to every rank, such as the value and the weight of the loss."""


class StageTerm(NamedTuple):
    """A part of a microbatch's loss that is computed in a stage's forward."""

    scaled: Tensor
    """Scalar. The backward accumulates its gradient."""
    record: Sequence[Tensor | float]
    """Further numbers to send, after those of `PipelineLoss.record`."""


@dataclass(frozen=True, slots=True)
class PipelineMicrobatch:
    """One microbatch. Every rank has the same microbatches in the same order. Functions that only
    other ranks call may be anything."""

    position: tuple[int, ...]
    """The key of its random streams, see `ModuleRandomStreams.start`."""
    inputs: Callable[[], Arguments | Chunks]
    """Returns the arguments of the first part. Called twice, on the first rank."""
    score: Callable[[Any], Any]
    """(output) -> `PipelineLoss`; in a forward without backward it may return anything. Called on
    the last rank."""
    is_dummy: bool = False
    """True if the microbatch is computed only because of other ranks' collectives."""
    is_recomputed: bool = False
    """True if another pipeline's microbatch is computed, to compare its gradient."""
    run: Run | None = None
    """Computes this microbatch in a stage. None: call the stage's forward."""
    before: Callable[[], object] = lambda: None
    """Called before each stage's forward, on its rank."""
    term: Callable[[], StageTerm | None] = lambda: None
    """Called after each stage's forward, on its rank. Returns a part of the loss, or None; always
    None in a forward without backward."""


class Boundary(NamedTuple):
    """The output of a stage for microbatches of one shape. The same on every rank."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    gradients: tuple[bool, ...]
    """True for each tensor that gets a gradient from the next stage."""
    single: bool
    """True for a tensor, False for a tuple."""
    chunks: int | None
    """Number of chunks, each with such tensors; None if the sequence is not in chunks."""

    @classmethod
    def of(cls, value: Any, part: str) -> Boundary:
        """Return the boundary of `value`, the output of `part`. Raises `RecipeError` if a member of
        it is not a tensor."""
        if isinstance(value, Chunks):
            return cls.joined(Chunks(tuple(cls.of(each, part) for each in value.each)), part)
        tensors = value if isinstance(value, tuple) else (value,)
        if not tensors:
            raise RecipeError(
                f"the part {part!r} of the model returns an empty tuple, and the next one is on"
                " another rank; a stage of a pipeline passes on a tensor or a tuple of tensors;"
                " return the next part's input"
            )
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                inside = " in a tuple" if isinstance(value, tuple) else ""
                raise RecipeError(
                    f"the part {part!r} of the model returns a {type(tensor).__name__}{inside},"
                    " and the next one is on another rank; a stage of a pipeline passes on a"
                    " tensor or a tuple of tensors; return those, or put both parts into one"
                    " module"
                )
            if hasattr(tensor, "placements"):
                raise RecipeError(
                    f"the part {part!r} of the model returns a distributed tensor, sharded over"
                    " the tensor axis, and the next one is on another rank; a stage of a pipeline"
                    " passes on whole tensors; let the part's last layer gather its output"
                )
        return cls(
            tuple(tuple(tensor.shape) for tensor in tensors),
            tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors),
            tuple(tensor.requires_grad for tensor in tensors),
            isinstance(value, Tensor),
            None,
        )

    @classmethod
    def joined(cls, boundary: Boundary | Chunks, part: str) -> Boundary:
        """Return the boundary of all chunks. `boundary`: the boundary of each chunk, or that of
        whole sequences."""
        if isinstance(boundary, Boundary):
            return boundary
        chunks: Sequence[Boundary] = boundary.each
        for each in chunks:
            if each.signature != chunks[0].signature:
                raise RecipeError(
                    f"the part {part!r} of the model returns {chunks[0].describe()} for one chunk"
                    f" of a sequence, and {each.describe()} for another; return the same tensors"
                    " for any tokens"
                )
        return cls(
            tuple(shape for each in chunks for shape in each.shapes),
            tuple(dtype for each in chunks for dtype in each.dtypes),
            tuple(gradient for each in chunks for gradient in each.gradients),
            chunks[0].single,
            len(chunks),
        )

    @classmethod
    def from_json(cls, described: Any) -> Boundary:
        shapes, dtypes, gradients, single, chunks = described
        return cls(tuple(map(tuple, shapes)), tuple(dtypes), tuple(gradients), single, chunks)

    def arguments(self, tensors: tuple[Tensor, ...]) -> Arguments | Chunks:
        """Return the arguments of the next stage. `tensors`: the received tensors."""
        if self.chunks is None:
            return self._arguments_of_one(tensors)
        width = len(tensors) // self.chunks
        starts = range(0, len(tensors), width)
        return Chunks(tuple(self._arguments_of_one(tensors[at : at + width]) for at in starts))

    def _arguments_of_one(self, tensors: tuple[Tensor, ...]) -> Arguments:
        return Arguments((tensors[0] if self.single else tensors,), {})

    @property
    def signature(self) -> tuple[Any, ...]:
        """The boundary without its shapes. It is the same for all microbatches in one call of a
        schedule."""
        sizes = tuple(map(len, self.shapes))
        return self.dtypes, self.gradients, self.single, self.chunks, sizes

    def tensors(self, device: torch.device | str) -> tuple[Tensor, ...]:
        return tuple(
            torch.empty(shape, dtype=getattr(torch, dtype), device=device, requires_grad=gradient)
            for shape, dtype, gradient in zip(self.shapes, self.dtypes, self.gradients, strict=True)
        )

    def check(self, value: Any, part: str) -> None:
        """Raise `RecipeError` if a microbatch's output differs from this boundary."""
        boundary = Boundary.of(value, part)
        if boundary != self:
            raise RecipeError(
                f"the part {part!r} of the model returns {boundary.describe()}, and returned "
                f"{self.describe()} for another microbatch with inputs of the same shapes; the "
                "shapes of the inputs must determine a stage's output; return one shape, or put "
                "the part and the next one into one module"
            )

    def describe(self) -> str:
        listed = ", ".join(
            f"{dtype} {list(shape)}{'' if gradient else ' without gradient'}"
            for dtype, shape, gradient in zip(self.dtypes, self.shapes, self.gradients, strict=True)
        )
        return listed if self.single else f"({listed})"


def received_inputs(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return received tensors in a form that the first part may change in place, with gradients
    that can be sent back."""
    return _StageInputs.apply(*tensors)  # type: ignore[no-untyped-call, no-any-return]


def sendable_outputs(value: Any, scaled: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return a stage's output as tensors that can be sent and detached: contiguous, and no views.
    `scaled`: a scalar whose gradient the same backward accumulates."""
    chunks = value.each if isinstance(value, Chunks) else (value,)
    tensors = [each for one in chunks for each in (one if isinstance(one, tuple) else (one,))]
    return _StageOutputs.apply(scaled, *tensors)  # type: ignore[no-untyped-call, no-any-return]


class _StageInputs(torch.autograd.Function):
    """The identity on tensors; the results share memory with the leaves. Gradients become
    contiguous."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return _identity(ctx, tuple(tensor.detach() for tensor in tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        needed = zip(gradients, ctx.needs_input_grad, strict=True)
        return tuple(gradient.contiguous() if needs else None for gradient, needs in needed)


class _StageOutputs(torch.autograd.Function):
    """The identity on tensors; the results are not views. The gradient of the scalar is 1."""

    @staticmethod
    def forward(ctx: Any, scaled: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.one = None if scaled is None else torch.ones_like(scaled)
        return _identity(ctx, tuple(tensor.detach().contiguous() for tensor in tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        needed = zip(gradients, ctx.needs_input_grad[1:], strict=True)
        return ctx.one, *(gradient if needs else None for gradient, needs in needed)


def _identity(ctx: Any, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    needed = zip(outputs, ctx.needs_input_grad[-len(outputs) :], strict=True)
    ctx.mark_non_differentiable(*(output for output, needs in needed if not needs))
    return outputs
