"""Builds a recipe's optimizers, and prepares them for the first step."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from lockstep.base.errors import RecipeError, first_few
from lockstep.base.garbage import collector_paused
from lockstep.base.torch_private import is_optimizer_initialized
from lockstep.comm.mesh import to_local
from lockstep.plan import Plan


def needs_closure(optimizer: Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return bool(getattr(optimizer, "needs_closure", False)) or (
        closure is not None and closure.default is inspect.Parameter.empty
    )


def check_closures(
    optimizers: Sequence[Optimizer], plan: Plan, *, precision: str, gradient_compression: str
) -> None:
    with_closure = next(filter(needs_closure, optimizers), None)
    if with_closure is None:
        return
    others = plan.state_divided
    others += ["fp16"] * (precision == "fp16") + [
        f"gradient_compression={gradient_compression!r}"
    ] * (gradient_compression != "none")
    others += [f"{len(optimizers)} optimizers for one model"] * (len(optimizers) > 1)
    if others:
        raise RecipeError(
            f"{type(with_closure).__name__} with {', '.join(others)}; its closure computes the"
            " gradient more than once per step, which needs all parameters on each process, one"
            " optimizer per model, and gradients that are neither scaled nor compressed; use"
            " replicate, without these"
        )


STATE_IS_ZERO_AT_FIRST = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
)


def build_optimizers(
    factory: Callable[[nn.Module], Any], model: nn.Module, *, in_part: bool = False
) -> list[Optimizer]:
    """With `in_part`, an optimizer may have no parameters on this rank."""
    with collector_paused():
        import_module("torch._dynamo")  # the first optimizer of a process imports it
    with _empty_optimizers_allowed() if in_part else nullcontext():
        made = _made(factory, model)
    optimizers = list(made) if isinstance(made, list | tuple) else [made]
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise RecipeError(
                f"the optimizer factory returned {optimizer!r} (a {type(optimizer).__name__}); it"
                " must return a torch.optim.Optimizer, or a list of them"
            )
        if not is_optimizer_initialized(optimizer):
            kind = type(optimizer).__name__
            raise RecipeError(
                f"{kind}.__init__ does not call torch.optim.Optimizer.__init__, without which an"
                " optimizer has no step hooks, and its state is not saved; call"
                " super().__init__(params, defaults), or, in a wrapper of another optimizer,"
                " super().__init__(other.param_groups, {})"
            )
    if not optimizers:
        raise RecipeError(
            "the optimizer factory returned an empty list; it must return at least one"
            " torch.optim.Optimizer"
        )
    _check_cover(model, optimizers)
    return optimizers


def _made(factory: Callable[[nn.Module], Any], model: nn.Module) -> Any:
    try:
        return factory(model)
    except TypeError as error:
        made = factory.func if isinstance(factory, partial) else factory
        if not (isinstance(made, type) and issubclass(made, Optimizer)):
            raise
        keywords = factory.keywords if isinstance(factory, partial) else {}
        given = "".join(f", {name}={value!r}" for name, value in keywords.items())
        raise RecipeError(
            f"Recipe.optimizer is the class {made.__name__}; it is called with the model, and the"
            f" class takes parameters ({error}); write optimizer=lambda model:"
            f" {made.__name__}(model.parameters(){given})"
        ) from error


@contextmanager
def _empty_optimizers_allowed() -> Iterator[None]:
    original: Any = Optimizer.__init__

    def patched(self: Optimizer, params: Any, defaults: dict[str, Any]) -> None:
        given = params if isinstance(params, Tensor) else list(params)
        original(
            self, [{"params": []}] if isinstance(given, list) and not given else given, defaults
        )

    Optimizer.__init__ = patched  # type: ignore[method-assign]
    try:
        yield
    finally:
        Optimizer.__init__ = original  # type: ignore[method-assign]


def trainable(model: Any) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name. Tied parameters occur once."""
    if not isinstance(model, nn.Module):
        raise RecipeError(
            f"the model factory returned {model!r} (a {type(model).__name__}); it must return a"
            " torch.nn.Module"
        )
    by_name = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    if lazy := [
        name for name, parameter in by_name.items() if isinstance(parameter, UninitializedParameter)
    ]:
        raise RecipeError(
            f"the model has lazy parameters without a shape ({first_few(lazy)}); the optimizer"
            " needs them before the first batch; run the model once on an example in the model's"
            " factory, or use layers with given sizes"
        )
    if not by_name:
        raise RecipeError(
            f"the model ({type(model).__name__}) has no trainable parameter; training needs at"
            " least one: check requires_grad, and that layers are registered (a plain list of"
            " layers is not; nn.ModuleList is)"
        )
    return by_name


def check_reducible(
    model: nn.Module, parameters: dict[str, nn.Parameter], *, bitwise: bool
) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise RecipeError(
                f"the model's {name or 'embedding'!r} has sparse=True; gradients are summed over"
                " ranks and clipped as dense tensors; build it with sparse=False"
            )
    if bitwise and (
        complex_names := [name for name, parameter in parameters.items() if parameter.is_complex()]
    ):
        raise RecipeError(
            f"numerics=bitwise with complex parameters ({first_few(complex_names)}); it sums real"
            " numbers; keep them as real tensors and use torch.view_as_complex in the forward, or"
            " choose numerics=fast"
        )


def unfuse(optimizers: Sequence[Optimizer]) -> bool:
    """On a CPU, replace fused kernels by foreach. Fused kernels round elements differently at the
    end of a tensor. Return True if an optimizer was changed."""
    was_fused = False
    for optimizer in optimizers:
        fused = [
            settings
            for settings in (*optimizer.param_groups, optimizer.defaults)
            if settings.get("fused")
        ]
        if fused and any(
            to_local(parameter).is_cpu
            for group in optimizer.param_groups
            for parameter in group["params"]
        ):
            for settings in fused:
                settings.update(fused=False, foreach=True)
            was_fused = True
    return was_fused


def separate_meshes(optimizer: Optimizer) -> None:
    """Split param groups by device mesh during each `step`. PyTorch's foreach and fused kernels do
    not accept DTensors of different meshes."""
    if all(len(_by_mesh(group["params"])) == 1 for group in optimizer.param_groups):
        return
    kept: list[list[dict[str, Any]]] = []

    def before(*arguments: Any) -> None:
        after()  # in case the previous step failed
        kept.append(optimizer.param_groups)
        optimizer.param_groups = [
            {**group, "params": params} for group in kept[0] for params in _by_mesh(group["params"])
        ]

    def after(*arguments: Any) -> None:
        if kept:
            groups = kept.pop()
            parts = iter(optimizer.param_groups)
            for group in groups:
                for _ in _by_mesh(group["params"]):  # some optimizers count steps in the group
                    group.update(
                        {name: value for name, value in next(parts).items() if name != "params"}
                    )
            optimizer.param_groups = groups

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def _by_mesh(parameters: list[Tensor]) -> list[list[Tensor]]:
    groups: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        groups.setdefault(
            parameter.device_mesh if isinstance(parameter, DTensor) else None, []
        ).append(parameter)
    return list(groups.values())


def allocate_state(optimizer: Optimizer) -> None:
    """Allocate the state by a step with zero gradients and zero learning rate. Later steps allocate
    no optimizer state, and cannot run out of memory in the update. Skips optimizers whose state
    does not start at zero."""
    if (
        type(optimizer) not in STATE_IS_ZERO_AT_FIRST
        or optimizer.state
        or any(not group.get("eps", 1) for group in optimizer.param_groups)
    ):
        # keep state that the factory has loaded; without eps, this step would divide by zero
        return
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


def _check_cover(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    counts = Counter(
        id(p)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    )
    if others := sum(i not in names for i in counts):
        raise RecipeError(
            f"the optimizer holds {others} parameters that do not belong to the model; build it"
            " from the model that the function gets: optimizer=lambda model:"
            " torch.optim.AdamW(model.parameters())"
        )
    if left_out := [
        name for name, parameter in trainable(model).items() if id(parameter) not in counts
    ]:
        raise RecipeError(
            f"the optimizer leaves out {first_few(left_out)}; every trainable parameter must be in"
            " exactly one optimizer: add them, or freeze them with requires_grad_(False)"
        )
    if twice := [names.get(i, "(unnamed)") for i, times in counts.items() if times > 1]:
        raise RecipeError(
            f"{first_few(twice)} are in two optimizers, and both would update them; give every"
            " parameter to exactly one optimizer"
        )
