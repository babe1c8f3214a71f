"""The protocol of executors, which compute a rank's microbatches, and the call of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from lockstep.base.errors import RecipeError
from lockstep.data.loader import Microbatch
from lockstep.training.losses.loss import Contribution

T = TypeVar("T")
Inputs = Callable[[Any], Any] | None
Loss = Callable[[Any, Any], Any]
Score = Callable[[Microbatch, Any, Any, Any], T]
"""(microbatch, batch, output, loss) -> the microbatch's part of an evaluation."""


class Accumulation(Protocol):
    """One model's gradient accumulation in a step on this rank, called by an executor."""

    def microbatches(self) -> Iterator[tuple[Microbatch, Any]]:
        """This rank's microbatches and batches, on the device, under their own random generators,
        for `backward`."""

    def backward(self, loss: Any) -> None:
        """Accumulate the gradient of the loss of the microbatch that `microbatches` gave last."""

    def fetched(self) -> list[tuple[Microbatch, Any]]:
        """All of this rank's microbatches and their batches at once. For `record`."""

    def random_position(self, microbatch: Microbatch) -> tuple[int, ...]:
        """The key of the microbatch's random streams."""

    def contribution(self, loss: Any, microbatch: Microbatch) -> Contribution:
        """Check the result of a loss function. Raises `LossError`."""

    def grad_output(self, part: Contribution) -> Tensor:
        """The gradient that the backward of `part.total` starts with, times the loss scale."""

    def record(
        self, microbatch: Microbatch, value: Any, weight: Any, part: Contribution | None
    ) -> None:
        """Record a microbatch whose gradient has been accumulated. `part`: None if another rank has
        its loss."""


class Executor(Protocol):
    """Computes this rank's microbatches of one model. Every rank makes the same calls."""

    why_no_loop: str | None
    """Why the script cannot loop over microbatches itself; None if it can."""

    def train(self, step: Accumulation, inputs: Inputs, loss: Loss) -> None:
        """Forward and backward of all microbatches of a step."""

    def evaluate(
        self,
        items: Iterator[Microbatch],
        position: Callable[[Microbatch], tuple[int, ...]],
        inputs: Inputs,
        loss: Loss,
        score: Score[T],
    ) -> Iterable[tuple[Microbatch, T]]:
        """Forward alone: each microbatch and its score, on ranks with the output. `position`:
        random streams' key."""

    def on_output_rank(self, compute: Callable[[], Any]) -> Any:
        """Compute a JSON value on the rank with the model's output, for all ranks. An error there
        is raised on all."""


def call_model(inputs: Inputs, model: nn.Module, batch: Any) -> Any:
    """The model's output for a batch; without `inputs` the model itself, because the loss then
    calls it."""
    if inputs is None:
        return model
    arguments = model_arguments(inputs, batch)
    if isinstance(arguments, tuple):
        return model(*arguments)
    return model(**arguments) if isinstance(arguments, dict) else model(arguments)


def model_arguments(inputs: Callable[[Any], Any], batch: Any) -> Any:
    """Call `inputs`, which returns a tuple of arguments, a dict of keyword arguments, or one.
    Raises `RecipeError`."""
    arguments = inputs(batch)
    if arguments is None or isinstance(arguments, list):
        found = f"a list of {len(arguments)}" if isinstance(arguments, list) else "None"
        raise RecipeError(
            f"Recipe.inputs returned {found}; the model is called with what it returns: a tuple of"
            " arguments, a dict of keywords, or one tensor; the batches of a TensorDataset are"
            " lists: return batch[0], or (batch[0], batch[1]); if the model takes a list as its"
            " one argument, return (that_list,)"
        )
    return arguments
