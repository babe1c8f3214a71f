"""The hook protocol: the moments at which users' hooks and lockstep's own are called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from lockstep.base.errors import RecipeError, did_you_mean
from lockstep.base.events import Event
from lockstep.training.consensus import NOTHING, Request

if TYPE_CHECKING:
    from lockstep.training.recomputation import Recomputation
    from lockstep.training.run import Run


class Hook:
    """Base class of hooks. Each method is called on every rank, hook by hook in the given order,
    and does nothing unless overridden.

    A hook with `state_dict` and `load_state_dict` is saved with the run. `run.step` is the number
    of optimizer steps done.
    """

    def on_start(self, run: Run) -> None:
        """Before the first step, and before a checkpoint is loaded."""

    def before_step(self, run: Run) -> None:
        """Before the first forward of each step."""

    def after_backward(self, run: Run, model: nn.Module) -> None:
        """After the last backward of a step. Each `.grad` of `model` is the sum over all ranks, not
        yet clipped and, in fp16, not yet unscaled. Called once for each prepared model."""

    def after_step(self, run: Run) -> None:
        """After each step, even if fp16 overflowed and the model was not updated."""

    def before_evaluation(self, run: Run) -> None:
        """Before each evaluation."""

    def after_evaluation(self, run: Run, metrics: dict[str, float]) -> None:
        """After each evaluation, with its metrics, which are the same on every rank. A hook may add
        values to `metrics`: they appear in the run's result, and `Saving(best=...)` can name them.
        """

    def on_finish(self, run: Run) -> None:
        """After the last step and the last evaluation, before the result is written. Not called
        after an error."""

    def on_save(self, run: Run) -> None:
        """After the final weights were written to the run directory."""

    def on_event(self, run: Run, event: Event) -> None:
        """After an event was written to events.jsonl, but not before `on_start`."""

    def on_error(self, run: Run, error: BaseException) -> None:
        """When an error ends the run on this rank. Other ranks may be gone: do not call
        collectives."""

    def on_end(self, run: Run) -> None:
        """Called at the end of the run, even after an error. Do not call collectives."""


class ControlHook(Hook):
    """A hook of lockstep itself, which may also stop, save or end the run."""

    def request(self, run: Run) -> Request:
        """Return this rank's request, which is exchanged with the other ranks. Called in each
        step."""
        return NOTHING

    def before_steps(self, run: Run) -> None:
        """Before the first step of a loop, and after a checkpoint was loaded."""

    def on_recomputation(self, run: Run, found: Recomputation) -> None:
        """In a step in which ranks have recomputed each other's microbatches, before the summed
        gradients are used."""

    def between_steps(self, run: Run) -> None:
        """After each step, after all hooks' `after_step`."""

    def after_steps(self, run: Run) -> None:
        """After the last step of a loop of steps."""

    def on_agreement(self, run: Run, agreed: Request) -> None:
        """Called on every rank with the requests that all ranks agreed on."""


MOMENTS = ("on_", "before_", "after_", "between_")


def check_hooks(hooks: Any) -> None:
    """Also refuse a method that is named like a hook's and that nothing would call."""
    several = hooks if isinstance(hooks, Sequence) else [hooks]
    for hook in several:
        if not isinstance(hook, Hook):
            raise RecipeError(
                f"hooks has {hook!r}; a hook is an object of a subclass of ls.Hook; make it one"
            )
        kind = ControlHook if isinstance(hook, ControlHook) else Hook
        for name in dir(type(hook)):
            if name.startswith(MOMENTS) and not hasattr(kind, name):
                moments = [each for each in vars(Hook) if not each.startswith("_")]
                raise RecipeError(
                    f"{type(hook).__name__}.{name} would never be called; the methods of an ls.Hook"
                    f" are {', '.join(moments)}; use one of them, or a name with another beginning"
                    f"{did_you_mean(name, moments)}"
                )
    if several is not hooks:
        raise RecipeError(f"hooks={hooks!r}; it must be a list of hooks; give hooks=[...]")
