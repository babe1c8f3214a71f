"""The protocol of executors, which compute a rank's microbatches, and the call of a recipe's model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from lockstep.base.errors import RecipeError
from lockstep.data.loader import Microbatch
from lockstep.training.loss import Contribution

T = TypeVar("T")
Inputs = Callable[[Any], Any] | None
"""`Recipe.inputs`."""
Loss = Callable[[Any, Any], Any]
"""`Recipe.loss`."""
Score = Callable[[Microbatch, Any, Any, Any], T]
"""(microbatch, batch, output, loss) -> what an evaluation measures on the microbatch."""


class Accumulation(Protocol):
    """One model's gradient accumulation in a step on this rank, as an executor drives it."""

    def microbatches(self) -> Iterator[tuple[Microbatch, Any]]:
        """This rank's microbatches with their batches on the device, each under its own random generators. For `backward`."""

    def backward(self, loss: Any) -> None:
        """Accumulate the gradient of the latest microbatch's loss."""

    def fetched(self) -> list[tuple[Microbatch, Any]]:
        """All of this rank's microbatches and their batches at once. For `record`."""

    def random_position(self, microbatch: Microbatch) -> tuple[int, ...]:
        """The key of the microbatch's random streams."""

    def contribution(self, loss: Any, microbatch: Microbatch) -> Contribution:
        """Read what a loss function returned for a microbatch. Raises `LossError`."""

    def grad_output(self, part: Contribution) -> Tensor:
        """The gradient that the backward of `part.total` starts with, times the loss scale."""

    def record(self, microbatch: Microbatch, value: Any, weight: Any, part: Contribution | None) -> None:
        """Note a microbatch whose gradient has been accumulated. `part`: None if another rank has its loss."""


class Executor(Protocol):
    """Computes this rank's microbatches of one model. Every rank makes the same calls."""

    @property
    def why_no_loop(self) -> str | None:
        """The plan, and why a loop over microbatches in the user's code cannot compute them; None if it can."""

    def train(self, step: Accumulation, inputs: Inputs, loss: Loss) -> None:
        """Forward and backward of all microbatches of a step. `inputs`, `loss`: as in `Recipe`."""

    def evaluate(
        self, items: Iterator[Microbatch], position: Callable[[Microbatch], tuple[int, ...]], inputs: Inputs, loss: Loss, score: Score[T]
    ) -> Iterable[tuple[Microbatch, T]]:
        """Forward alone: each microbatch with its score, on the ranks that have the model's output. `position`: of its random streams."""

    def on_output_rank(self, compute: Callable[[], Any]) -> Any:
        """A JSON value computed on the rank that has the model's output, on every rank. Raises everywhere what is raised there."""


def call_model(inputs: Inputs, model: nn.Module, batch: Any) -> Any:
    """The model's output for a batch; the model itself if the recipe has no `inputs`, because its loss then calls the model."""
    if inputs is None:
        return model
    arguments = model_arguments(inputs, batch)
    if isinstance(arguments, tuple):
        return model(*arguments)
    return model(**arguments) if isinstance(arguments, dict) else model(arguments)


def model_arguments(inputs: Callable[[Any], Any], batch: Any) -> Any:
    """Call `inputs`: a tuple of arguments, a dict of keywords, or one argument. Raises `RecipeError` for anything else."""
    arguments = inputs(batch)
    if arguments is None or isinstance(arguments, list):
        made = f"a list of {len(arguments)}" if isinstance(arguments, list) else "None"
        raise RecipeError(
            f"Recipe.inputs returned {made}; the model is called with what it returns: a tuple of arguments, a dict of keywords, or one "
            "tensor; the batches of a TensorDataset are lists: return batch[0], or (batch[0], batch[1]); if the model takes a list as "
            "its one argument, return (that_list,)"
        )
    return arguments
