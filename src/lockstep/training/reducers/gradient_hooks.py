"""The user's hooks on gradients of parameters (`Tensor.register_hook`). Each hook is called once
per step, with the full gradient. Autograd would call the hook in each microbatch's backward. The
result of a nonlinear hook would depend on the split into microbatches. Under FSDP2, autograd would
call no hook, because the graph contains all-gathered copies of the parameters."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.base.errors import RecipeError
from lockstep.base.torch_private import (
    gradient_hook_counts,
    gradient_hooks,
    post_accumulate_hooks,
    set_gradient_hooks,
)
from lockstep.comm.mesh import full_tensor, shard_as, to_local
from lockstep.comm.world import World

_NOT_OF_USER = ("lockstep.", "torch.distributed.fsdp.")
"""Modules whose hooks are not the user's. FSDP2 registers hooks on what a forward returns, which
may be a parameter."""
AFTER_BACKWARD = "change .grad in after_backward of an ls.Hook"
BEFORE = (
    "register them before the first step: in the factory of the model or of the optimizer, or in"
    " on_start"
)


@dataclass(eq=False, slots=True)
class _OncePerStep:
    function: Callable[[Tensor], Any]
    owner: GradientHooks

    def __call__(self, gradient: Tensor) -> Any:
        return None if self.owner.is_accumulating else self.function(gradient)


@contextmanager
def carried_over(model: nn.Module, plan: object) -> Iterator[None]:
    """In this context, `plan` parallelizes the model and replaces its parameters. On exit, the
    user's gradient hooks are moved to the new parameters. Raises `RecipeError` if an object,
    perhaps a hook, still refers to a replaced parameter."""
    refuse_post_accumulate_hooks(model.named_parameters())
    hooked = {
        name: hooks
        for name, parameter in model.named_parameters()
        if (hooks := gradient_hooks(parameter))
    }
    made = (
        {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}
        if hooked
        else {}
    )
    yield
    replaced = {
        name: new
        for name, new in model.named_parameters()
        if name in made and made[name]() is not new
    }
    for name in hooked.keys() & replaced.keys():
        set_gradient_hooks(replaced[name], hooked[name])
    if replaced:
        gc.collect()
    if alive := [name for name in replaced if made[name]() is not None]:
        raise RecipeError(
            f"parameter {next(iter(hooked))!r} has a hook on its gradient, and something, perhaps"
            f" the hook, refers to the parameter {alive[0]!r} that the factory made; {plan}"
            " replaces that parameter, so it would keep its initial value; leave the hook out,"
            f" and {AFTER_BACKWARD}"
        )


def refuse_post_accumulate_hooks(named: Iterable[tuple[str, Tensor]]) -> None:
    for name, parameter in named:
        if _of_user(post_accumulate_hooks(parameter)):
            raise RecipeError(
                f"parameter {name!r} has a post-accumulate-grad hook, which is called in each"
                " microbatch's backward, before its gradient is summed over microbatches and"
                f" processes; {AFTER_BACKWARD}, or with parameter.register_hook, whose hooks are"
                " called once per step; let the factory return optimizers that step in the"
                " backward without their hooks: lockstep steps them after the last backward"
            )


def refuse_gradient_hooks(named: Iterable[tuple[str, Tensor]]) -> None:
    for name, parameter in named:
        if any(not isinstance(hook, _OncePerStep) for hook in _of_user(gradient_hooks(parameter))):
            raise _changed(name)


class GradientHooks:
    """The user's hooks on the gradients of a model's parameters. A context manager around the
    backwards of a step."""

    def __init__(self, model: nn.Module, *, in_pipeline: bool) -> None:
        self.is_accumulating = in_pipeline
        """True in the backwards of a step. While the flag is True, the user's hooks do nothing."""
        self._in_pipeline = in_pipeline
        self._named = dict(model.named_parameters())
        self._parameters = list(self._named.values())
        self._counts: list[int] = []
        self._hooks: dict[str, list[Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def begin_loop(self, world: World) -> None:
        """Take over the user's gradient hooks from autograd, before the first step of a loop. Every
        rank must call this method."""
        refuse_post_accumulate_hooks(self._named.items())
        for name, parameter in self._named.items():
            hooks = gradient_hooks(parameter)
            for number, hook in list(hooks.items()):
                if getattr(hook, "__module__", "") == "torch.autograd.graph":
                    raise RecipeError(
                        f"parameter {name!r} has a hook of register_multi_grad_hook, which torch"
                        f" calls during a backward; {AFTER_BACKWARD}, or use"
                        " parameter.register_hook for each parameter, whose hooks are called once"
                        " per step"
                    )
                if _is_of_user(hook) and not isinstance(hook, _OncePerStep):
                    hooks[number] = _OncePerStep(hook, self)
        self._hooks = self._hooks_now()
        self._counts = gradient_hook_counts(self._parameters)
        self._compare(world)

    def __enter__(self) -> None:
        self.is_accumulating = True

    def __exit__(self, *_: object) -> None:
        self.is_accumulating = self._in_pipeline

    def check(self) -> None:
        """Refuse changed hooks: torch may have called a new hook in a microbatch's backward,
        perhaps on some ranks only."""
        counts = gradient_hook_counts(self._parameters)
        if counts == self._counts and not self._hooks:
            return
        self._counts, now = counts, self._hooks_now()
        for name in [*now, *self._hooks]:
            if now.get(name) != self._hooks.get(name):
                raise _changed(name)
        refuse_post_accumulate_hooks(self._named.items())

    @torch.no_grad()
    def call(self, loss_scale: Tensor | float) -> None:
        """Every rank must call this method, after the gradients are summed over ranks."""
        for name, hooks in self._hooks.items():
            kept = self._named[name].grad
            if kept is None:
                continue
            gradient = full_tensor(kept) / loss_scale
            is_finite = torch.isfinite(gradient).all()
            for hook in hooks:
                gradient = _changed_by(hook.function, name, gradient)
            # A hook could make an infinite gradient finite, and the step would then be applied.
            gradient = torch.where(is_finite, gradient, math.nan) * loss_scale
            to_local(kept).copy_(shard_as(kept, gradient))

    def close(self) -> None:
        for parameter in self._parameters:
            hooks = gradient_hooks(parameter)
            hooks.update(
                {
                    number: hook.function
                    for number, hook in hooks.items()
                    if isinstance(hook, _OncePerStep)
                }
            )

    def _hooks_now(self) -> dict[str, list[Any]]:
        by_name = {
            name: _of_user(gradient_hooks(parameter)) for name, parameter in self._named.items()
        }
        return {name: hooks for name, hooks in by_name.items() if hooks}

    def _compare(self, world: World) -> None:
        """Every rank must call this method."""
        everyone = world.gather_values(
            {name: [_name(hook.function) for hook in hooks] for name, hooks in self._hooks.items()}
        )
        if not any(everyone):
            return
        held = world.gather_values(list(self._named))
        for name in sorted({name for theirs in everyone for name in theirs}):
            first, *others = (rank for rank, names in enumerate(held) if name in names)
            for rank in others:
                one, other = (everyone[each].get(name, []) for each in (first, rank))
                if one != other:
                    raise RecipeError(
                        f"parameter {name!r} has the hooks {one} on its gradient on rank {first},"
                        f" and {other} on rank {rank}; hooks are called with the gradient of all"
                        " ranks; register the same hooks on every rank"
                    )


def _changed(name: str) -> RecipeError:
    return RecipeError(
        f"the hooks on the gradient of parameter {name!r} have changed since the first step, in a"
        f" forward for instance; all ranks call the same hooks in every step; {BEFORE}; and let a"
        " hook return None where it should not change the gradient"
    )


def _changed_by(hook: Callable[[Tensor], Any], name: str, gradient: Tensor) -> Tensor:
    try:
        changed = hook(gradient)
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise RecipeError(
            f"a hook on the gradient of parameter {name!r} computes with a sharded parameter, but"
            f" is called with the whole gradient; leave the hook out, and {AFTER_BACKWARD}, where"
            " parameter and gradient are sharded alike"
        ) from error
    if changed is None:
        return gradient
    if not isinstance(changed, Tensor) or (changed.shape, changed.dtype) != (
        gradient.shape,
        gradient.dtype,
    ):
        returned = (
            f"{tuple(changed.shape)} and {changed.dtype}"
            if isinstance(changed, Tensor)
            else f"a {type(changed).__name__}"
        )
        raise RecipeError(
            f"a hook on the gradient of parameter {name!r} returned {returned}; the gradient is"
            f" {tuple(gradient.shape)} and {gradient.dtype}; return a tensor like it, or None"
        )
    return changed


def _of_user(hooks: Mapping[int, Any]) -> list[Any]:
    return [hook for hook in hooks.values() if _is_of_user(hook)]


def _is_of_user(hook: Any) -> bool:
    function = hook.func if isinstance(hook, partial) else hook
    module = str(getattr(function, "__module__", ""))
    return isinstance(hook, _OncePerStep) or not module.startswith(_NOT_OF_USER)


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))
