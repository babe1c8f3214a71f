"""The hook protocol: methods that lockstep calls at fixed moments of a run."""

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
    """Base class of hooks. Each method is called on every rank, and does nothing unless overridden.
    Hooks are called in the given order. A hook with `state_dict` and `load_state_dict` is saved
    with the run. `run.step` is the number of optimizer steps done."""

    def on_start(self, run: Run) -> None:
        """Called before the first step, and before a checkpoint is loaded."""

    def before_step(self, run: Run) -> None:
        """Called before the first forward of each step."""

    def after_backward(self, run: Run, model: nn.Module) -> None:
        """Called after the last backward of a step, once for each prepared model. Each `.grad` of
        `model` is the sum over all ranks. The gradients are not yet clipped and, in fp16, not yet
        unscaled."""

    def after_step(self, run: Run) -> None:
        """Called after each step, even if fp16 overflowed and the model was not updated."""

    def before_evaluation(self, run: Run) -> None:
        """Called before each evaluation."""

    def after_evaluation(self, run: Run, metrics: dict[str, float]) -> None:
        """Called after each evaluation. `metrics` is the same on every rank. Values that a hook
        adds to `metrics` appear in the run's result, and `Saving(best=...)` can name them."""

    def on_finish(self, run: Run) -> None:
        """Called after the last step and the last evaluation, before the result is written. Not
        called after an error."""

    def on_save(self, run: Run) -> None:
        """Called after the final weights were written to the run directory."""

    def on_event(self, run: Run, event: Event) -> None:
        """Called after an event was written to events.jsonl, but not before `on_start`."""

    def on_error(self, run: Run, error: BaseException) -> None:
        """Called when an error ends the run on this rank. Do not call collectives in this method,
        because other ranks may be gone."""

    def on_end(self, run: Run) -> None:
        """Called at the end of the run, even after an error. Do not call collectives in
        `on_end`."""


class ControlHook(Hook):
    """A hook of lockstep that can also stop, save or end the run."""

    def request(self, run: Run) -> Request:
        """Called in each step. Return this rank's request, which is exchanged with the other
        ranks."""
        return NOTHING

    def before_steps(self, run: Run) -> None:
        """Called before the first step of a loop, and after a checkpoint was loaded."""

    def on_recomputation(self, run: Run, found: Recomputation) -> None:
        """Called in a step in which ranks recompute each other's microbatches, before the summed
        gradients are used."""

    def between_steps(self, run: Run) -> None:
        """Called after each step, after the `after_step` of all hooks."""

    def after_steps(self, run: Run) -> None:
        """Called after the last step of a loop of steps."""

    def on_agreement(self, run: Run, agreed: Request) -> None:
        """Called on every rank with the requests that all ranks agreed on."""


MOMENTS = ("on_", "before_", "after_", "between_")


def check_hooks(hooks: Any) -> None:
    """Check that `hooks` is a list of hooks. Refuse a method with a hook's prefix, such as `on_`,
    that lockstep would never call."""
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
