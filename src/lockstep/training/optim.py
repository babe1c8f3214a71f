"""A recipe's optimizers: that they cover the model, and that their state is there before the first step."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lockstep.base.errors import CheckpointError, RecipeError
from lockstep.base.garbage import collector_paused
from lockstep.base.torch_private import has_step_hooks, step_is_profiled

STATE_IS_ZERO_AT_FIRST = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.RMSprop, torch.optim.Adadelta)


def built(factory: Callable[[nn.Module], Any], model: nn.Module, *, in_part: bool = False) -> list[Optimizer]:
    """Call the recipe's factory. Raises `RecipeError` unless its optimizers share out the model's trainable parameters.

    State that they have not got yet is for `allocate_state`. `in_part`: this rank has some of the model's parameters; an optimizer of
    several may find none of its own among them.
    """
    with collector_paused():
        import_module("torch._dynamo")  # which the first optimizer imports
    with _of_nothing_too() if in_part else nullcontext():
        made = factory(model)
    optimizers = list(made) if isinstance(made, list | tuple) else [made]
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise RecipeError(
                f"the optimizer factory returned {optimizer!r} (a {type(optimizer).__name__}); it must return a torch.optim.Optimizer, "
                "or a list of them"
            )
        if _needs_a_closure(optimizer):
            raise RecipeError(
                f"the optimizer factory returned a {type(optimizer).__name__}, whose step() needs a closure that computes the loss again; "
                "a step takes one gradient; choose an optimizer whose step() needs none, such as torch.optim.AdamW"
            )
    if not optimizers:
        raise RecipeError("the optimizer factory returned an empty list; it must return at least one torch.optim.Optimizer")
    _check_cover(model, optimizers)
    return optimizers


@contextmanager
def _of_nothing_too() -> Iterator[None]:
    """Within it, an optimizer may be built of an empty list, which torch refuses, and steps nothing."""
    original: Any = Optimizer.__init__

    def made(self: Optimizer, params: Any, defaults: dict[str, Any]) -> None:
        given = params if isinstance(params, Tensor) else list(params)
        original(self, [{"params": []}] if isinstance(given, list) and not given else given, defaults)

    Optimizer.__init__ = made  # type: ignore[method-assign]
    try:
        yield
    finally:
        Optimizer.__init__ = original  # type: ignore[method-assign]


def trainable(model: Any) -> dict[str, nn.Parameter]:
    """The model's trainable parameters by name, tied ones once. Raises `RecipeError` where there is none."""
    if not isinstance(model, nn.Module):
        raise RecipeError(f"the model factory returned {model!r} (a {type(model).__name__}); it must return a torch.nn.Module")
    found = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if lazy := [name for name, parameter in found.items() if isinstance(parameter, UninitializedParameter)]:
        raise RecipeError(
            f"the model has lazy parameters without a shape ({_listed(lazy)}); the optimizer needs them before the first batch; run the "
            "model once on an example in the model's factory, or use layers with given sizes"
        )
    if not found:
        raise RecipeError(
            f"the model ({type(model).__name__}) has no trainable parameter; training needs one at least: check requires_grad, and that "
            "layers are registered (a plain list of layers is not; nn.ModuleList is)"
        )
    return found


def check_gradients(model: nn.Module, parameters: dict[str, nn.Parameter], *, bitwise: bool) -> None:
    """Raises `RecipeError` where the model's gradients will be of a kind that cannot be summed over ranks."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise RecipeError(
                f"the model's {name or 'embedding'!r} has sparse=True; gradients are summed over ranks and clipped as dense tensors; "
                "build it with sparse=False"
            )
    if bitwise and (found := [name for name, parameter in parameters.items() if parameter.is_complex()]):
        raise RecipeError(
            f"numerics=bitwise with complex parameters ({_listed(found)}); it sums real numbers; keep them as real tensors and use "
            "torch.view_as_complex in the forward, or choose numerics=fast"
        )


def unfuse(optimizers: Sequence[Optimizer]) -> bool:
    """Have fused optimizers compute tensor by tensor; whether there was one.

    A fused kernel rounds differently at a tensor's end than in its middle, so a part of a tensor would move otherwise than the whole.
    """
    groups = [group for optimizer in optimizers for group in (*optimizer.param_groups, optimizer.defaults) if group.get("fused")]
    for group in groups:
        group.update(fused=False, foreach=True)
    return bool(groups)


def allocate_state(optimizer: Optimizer) -> None:
    """Make the optimizer's state now, so that no step can run out of memory half-way through applying itself.

    A trial step with zero gradients and a zero learning rate makes it, and is then wiped out; so only for optimizers whose state starts
    at zero. The others allocate in their first step.
    """
    if type(optimizer) not in STATE_IS_ZERO_AT_FIRST or optimizer.state or any(not group.get("eps", 1) for group in optimizer.param_groups):
        return  # state that the factory has loaded is kept; without eps a trial step divides zero by zero
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter in parameters:
        parameter.grad = None
        for value in optimizer.state[parameter].values():
            if isinstance(value, Tensor):
                value.zero_()


def apply(optimizer: Optimizer) -> None:
    """`optimizer.step()`. Where nobody profiles and no hook waits for it, without torch's note to the profiler: that takes 8 µs."""
    step = type(optimizer).step
    if not getattr(step, "hooked", False) or "step" in vars(optimizer) or step_is_profiled() or has_step_hooks(optimizer):
        optimizer.step()
    else:
        step.__wrapped__(optimizer)  # type: ignore[attr-defined]


class Schedule:
    """Sets the learning rates of one step: base rate times multiplier, or a torch LRScheduler stepped once a step."""

    def __init__(self, schedule: Callable[[Any], Any] | None, optimizers: Sequence[Optimizer]) -> None:
        self._multiplier: Callable[[int], float] | None = None
        self._schedulers: list[LRScheduler] = []
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._rate: Tensor | float = self._groups[0]["lr"]
        if schedule is None:
            return
        try:
            multiplier = schedule(0)
        except Exception as error:
            self._schedulers = [_scheduler(schedule, optimizer, error) for optimizer in optimizers]
            return
        if isinstance(multiplier, bool) or not isinstance(multiplier, int | float):
            raise RecipeError(
                f"schedule(0) returned {multiplier!r} (a {type(multiplier).__name__}); a schedule is step -> multiplier of the learning "
                "rate, a number; or optimizer -> torch LRScheduler"
            )
        self._multiplier = schedule
        self._base = [float(group["lr"]) for group in self._groups]

    def before_step(self, step: int) -> None:
        if self._multiplier is not None:
            self._set(step, self._multiplier(step))
        rate = self._groups[0]["lr"]
        self._rate = rate.clone() if isinstance(rate, Tensor) else rate

    def _set(self, step: int, multiplier: float) -> None:
        if not math.isfinite(multiplier):
            raise RecipeError(f"schedule({step}) returned {multiplier}; a multiplier of the learning rate is finite; correct the schedule")
        for group, base in zip(self._groups, self._base, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(base * multiplier)
            else:
                group["lr"] = base * multiplier

    def after_step(self) -> None:
        for scheduler in self._schedulers:
            scheduler.step()

    def state_dict(self) -> list[dict[str, Any]]:
        """Of the torch schedulers; a function of the step needs none."""
        return [scheduler.state_dict() for scheduler in self._schedulers]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Raises `CheckpointError` where the schedule was of the other kind."""
        if len(states) != len(self._schedulers):
            raise CheckpointError(
                f"the checkpoint has {len(states)} torch LRSchedulers and this run has {len(self._schedulers)}; a schedule that is a "
                "function of the step needs none; go on with the schedule that it was saved with"
            )
        for scheduler, state in zip(self._schedulers, states, strict=True):
            scheduler.load_state_dict(state)

    def rate(self) -> float:
        """The first parameter group's learning rate, as it was in the last step."""
        return float(self._rate)


def _scheduler(factory: Callable[[Any], Any], optimizer: Optimizer, as_function: Exception) -> LRScheduler:
    try:
        made = factory(optimizer)
    except Exception as error:
        raise RecipeError(
            f"schedule is neither step -> multiplier (schedule(0) raised {type(as_function).__name__}: {as_function}) nor optimizer -> "
            f"torch LRScheduler (that raised {type(error).__name__}: {error})"
        ) from error
    if not isinstance(made, LRScheduler):
        raise RecipeError(f"schedule(optimizer) returned {made!r} (a {type(made).__name__}); it must return a torch LRScheduler")
    if isinstance(made, ReduceLROnPlateau):
        raise RecipeError(
            "schedule(optimizer) returned a ReduceLROnPlateau, whose step() needs a metric; a schedule is stepped once a step without one; "
            "choose another, or change the rates of run.optimizers in a hook's on_evaluation"
        )
    return made


def _needs_a_closure(optimizer: Optimizer) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _check_cover(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = Counter(id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    left_out = [name for name, parameter in trainable(model).items() if id(parameter) not in held]
    if left_out:
        raise RecipeError(
            f"the optimizer leaves out {_listed(left_out)}; every trainable parameter must be in exactly one optimizer: add them, or "
            "freeze them with requires_grad_(False)"
        )
    twice = [names.get(i, "(unnamed)") for i, times in held.items() if times > 1]
    if twice:
        raise RecipeError(f"{_listed(twice)} stand in two optimizers; each would move them; give every parameter to exactly one")
    strangers = sum(i not in names for i in held)
    if strangers:
        raise RecipeError(
            f"the optimizer holds {strangers} parameters that are not the model's; build it from the model it is given: "
            "optimizer=lambda model: torch.optim.AdamW(model.parameters())"
        )


def _listed(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
