"""A pipeline's microbatches, and descriptions of the tensors that a stage passes to the next
stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.base.dtypes import dtype_name, torch_dtype
from lockstep.base.errors import RecipeError

Around = Callable[[int], AbstractContextManager[Any]]
"""Maps a pipeline stage's index to the context in which the stage's forward runs. Without a
pipeline, the whole model is stage 0."""
Run = Callable[[int, Callable[["Arguments"], Any], Any], Any]


class Arguments(NamedTuple):
    positional: tuple[Any, ...]
    keywords: dict[str, Any]

    @classmethod
    def of(cls, inputs: Any) -> Arguments:
        """`inputs` is a result of `Recipe.inputs`: a tuple of arguments, a dict of keywords, or one
        argument."""
        if isinstance(inputs, dict):
            return cls((), dict(inputs))
        return cls(inputs if isinstance(inputs, tuple) else (inputs,), {})

    def call(self, function: Callable[..., Any]) -> Any:
        return function(*self.positional, **self.keywords)


class Chunks(NamedTuple):
    """A stage's arguments or outputs for each chunk of a sequence. With bitwise numerics, the stage
    computes each chunk separately."""

    each: tuple[Any, ...]


def within(around: Around) -> Run:
    def run(stage: int, forward: Callable[[Arguments], Any], arguments: Arguments) -> Any:
        with around(stage):
            return forward(arguments)

    return run


@dataclass(frozen=True, slots=True)
class PipelineLoss:
    """The loss of a microbatch in a pipeline. `total` and `grad_output` are scalars. The backward
    accumulates the gradient of `grad_output * total`."""

    total: Tensor
    grad_output: Tensor
    record: Sequence[Tensor | float]
    """Numbers that `Pipeline.run` returns on every rank, such as the value and the weight of the
    loss."""


class StageTerm(NamedTuple):
    scaled: Tensor
    record: Sequence[Tensor | float]
    """Numbers that are added to the microbatch's `PipelineLoss.record`."""


@dataclass(frozen=True, slots=True)
class PipelineMicrobatch:
    """One microbatch, and the functions with which a pipeline computes it. Every rank has the same
    microbatches in the same order."""

    position: tuple[int, ...]
    inputs: Callable[[], Arguments | Chunks]
    """Called twice on the first rank: for the shapes, and in the first stage's forward."""
    score: Callable[[Any], Any]
    """Computes the loss from the model's output, on the last rank."""
    is_dummy: bool = False
    """True if this rank computes the microbatch only because all ranks must call the forwards'
    collectives. The gradient of a dummy microbatch is zero."""
    is_recomputed: bool = False
    """True if another pipeline also computes the microbatch, and the gradients are compared."""
    run: Run | None = None
    before: Callable[[], object] = lambda: None
    term: Callable[[], StageTerm | None] = lambda: None
    """Called on the stage's rank after each stage's forward. Returns the part of the loss that the
    stage has computed, or None."""


class Boundary(NamedTuple):
    """Describes the tensors that a stage passes to the next stage. Every rank has an equal
    description of each boundary."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    gradients: tuple[bool, ...]
    """For each tensor, True if the next stage sends back a gradient."""
    single: bool
    """True if the stage's output is a tensor, False if it is a tuple."""
    chunks: int | None
    """Number of the sequence's chunks, if a stage computes each chunk separately."""

    @classmethod
    def of(cls, value: Any, part: str) -> Boundary:
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
            tuple(dtype_name(tensor.dtype) for tensor in tensors),
            tuple(tensor.requires_grad for tensor in tensors),
            isinstance(value, Tensor),
            None,
        )

    @classmethod
    def joined(cls, boundary: Boundary | Chunks, part: str) -> Boundary:
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
        if self.chunks is None:
            return self._arguments_of_one(tensors)
        width = len(tensors) // self.chunks
        starts = range(0, len(tensors), width)
        return Chunks(tuple(self._arguments_of_one(tensors[at : at + width]) for at in starts))

    def _arguments_of_one(self, tensors: tuple[Tensor, ...]) -> Arguments:
        return Arguments((tensors[0] if self.single else tensors,), {})

    @property
    def signature(self) -> tuple[Any, ...]:
        """The properties of the tensors except their sizes. All microbatches in one call of a
        schedule have the same signature."""
        sizes = tuple(map(len, self.shapes))
        return self.dtypes, self.gradients, self.single, self.chunks, sizes

    def tensors(self, device: torch.device | str) -> tuple[Tensor, ...]:
        return tuple(
            torch.empty(shape, dtype=torch_dtype(dtype), device=device, requires_grad=gradient)
            for shape, dtype, gradient in zip(self.shapes, self.dtypes, self.gradients, strict=True)
        )

    def check(self, value: Any, part: str) -> None:
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
    """A stage may change the result in place."""
    return _StageInputs.apply(*tensors)  # type: ignore[no-untyped-call, no-any-return]


def sendable_outputs(value: Any, scaled: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return contiguous tensors that are not views. The backward of the returned tensors also
    computes the gradient of `scaled`, a scalar loss of the stage."""
    chunks = value.each if isinstance(value, Chunks) else (value,)
    tensors = [each for one in chunks for each in (one if isinstance(one, tuple) else (one,))]
    return _StageOutputs.apply(scaled, *tensors)  # type: ignore[no-untyped-call, no-any-return]


class _StageInputs(torch.autograd.Function):
    """The identity. The backward makes the gradients contiguous."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return _identity(ctx, tuple(tensor.detach() for tensor in tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        needed = zip(gradients, ctx.needs_input_grad, strict=True)
        return tuple(gradient.contiguous() if needs else None for gradient, needs in needed)


class _StageOutputs(torch.autograd.Function):
    """The identity. The backward passes the gradient 1 to the scalar."""

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
