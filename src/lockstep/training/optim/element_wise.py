"""Finds optimizers whose update of an element depends on other elements (Muon, Adafactor, LAMB) or
on other tensors (Prodigy). Tries each optimizer on small tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.base.errors import RecipeError
from lockstep.base.torch_private import disable_current_modes, has_step_hooks
from lockstep.comm.mesh import divided_over
from lockstep.plan import Plan

ROWS, COLUMNS, DEPTH = 8, 12, 3
STEPS = 10
"""Number of trial steps. RAdam, for example, changes no parameter in its first five steps."""
TOLERANCE = 1e-3
"""Largest relative rounding difference between updating a tensor whole and in two halves."""
MIXING_TOLERANCE = 1e-5
"""Largest relative rounding difference between updating a tensor alone and together with other
tensors."""

KNOWN = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
)

# for each parameter group in a trial: its settings, and the shapes of its small tensors
_Trial = list[tuple[dict[str, Any], list[tuple[int, ...]]]]


def needing_whole_tensors(optimizers: Sequence[Optimizer], plan: Plan) -> list[Optimizer]:
    optimizers = [optimizer for optimizer in optimizers if not _is_known(optimizer)]
    axes = plan.state_divided
    if axes and (mixing := next(filter(mixes_tensors, optimizers), None)) is not None:
        raise RecipeError(
            f"{type(mixing).__name__} with {','.join(axes)}; its update of a tensor depends on"
            " other tensors (such as Prodigy's step size, which is estimated from all tensors) or"
            " on random numbers, but each rank holds only a part of the model; use replicate, or"
            " an optimizer that updates each tensor by itself, such as AdamW"
        )
    if plan.divides("parameters") or plan.divides("features"):
        needing = [each for each in optimizers if not is_element_wise(each)]
    else:
        needing = [each for each in optimizers if not is_element_wise(each, divided_over)]
    if needing and (plan.offload or plan.divides("layers")):
        raise RecipeError(
            f"{type(needing[0]).__name__} with"
            f" {','.join([*axes, *(['offload=yes'] if plan.offload else [])])}; its update of an"
            " element depends on the other elements of the tensor, which are on other ranks; use"
            " replicate, shard and tensor, or an optimizer that updates each element by itself,"
            " such as AdamW"
        )
    return needing


def is_element_wise(
    optimizer: Optimizer, divided: Callable[[Tensor], object] = lambda parameter: True
) -> bool:
    """Tries a copy of each parameter group on small tensors, whole and in halves."""
    for group in optimizer.param_groups:
        dims = {parameter.dim() for parameter in group["params"] if divided(parameter)}
        if any(_differs(optimizer, group, _shape(each)) for each in sorted(dims - {0})):
            return False
    return True


def _is_known(optimizer: Optimizer) -> bool:
    kind = type(optimizer)
    is_changed = has_step_hooks(optimizer) or "step" in vars(optimizer)
    return kind in KNOWN and not is_changed and kind.step.__module__.startswith("torch.optim.")


def mixes_tensors(optimizer: Optimizer) -> bool:
    """Return True if the update of a tensor depends on other tensors: tries a copy of the optimizer
    on small tensors."""
    shapes = [
        _shape(max((each.dim() for each in group["params"]), default=1))
        for group in optimizer.param_groups
    ]
    groups = list(zip(optimizer.param_groups, shapes, strict=True))
    trials: list[_Trial] = [[(group, [shape, shape])] for group, shape in groups]
    if len(groups) > 1:
        trials.append([(group, [shape]) for group, shape in groups])
    with disable_current_modes():
        return any(_mixes(optimizer, trial) for trial in trials)


def _mixes(optimizer: Optimizer, trial: _Trial) -> bool:
    numbers = range(sum(len(shapes) for _, shapes in trial))
    try:
        # constant gradients, because the optimizer's estimate may need them
        expected, *others = (
            _moved(optimizer, trial, factor, varies=False)[0] for factor in (1.0, 100.0, -1.0)
        )
        pairs = [(expected, moved) for moved in others]
        # varying gradients, because the average of constant ones is the same for any momentum
        for factor in (1.0, 100.0):
            pairs += zip(
                _moved(optimizer, trial, factor, varies=True),
                [
                    _moved(optimizer, trial, factor, varies=True, only=number)[number]
                    for number in numbers
                ],
                strict=True,
            )
    except Exception as error:
        raise _cannot_try(optimizer, f"its step raises {type(error).__name__}: {error}") from error
    if not all(moved.any() for moved, _ in pairs):
        raise _cannot_try(optimizer, f"{STEPS} steps leave a parameter unchanged")
    return any((one - other).norm() > MIXING_TOLERANCE * one.norm() for one, other in pairs)


def _moved(
    optimizer: Optimizer, trial: _Trial, factor: float, *, varies: bool, only: int | None = None
) -> list[Tensor]:
    """Return the change of each tensor over the trial's steps."""
    generator, device = torch.Generator().manual_seed(0), _device(trial[0][0])

    def drawn(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    numbers = iter(range(sum(len(shapes) for _, shapes in trial)))
    groups = [
        (group, {next(numbers): torch.nn.Parameter(drawn(shape)) for shape in shapes})
        for group, shapes in trial
    ]
    every = [each for _, several in groups for each in several.values()]
    start = [each.detach().clone() for each in every]
    steady = [drawn(tuple(each.shape)) for each in every]
    kept = [
        (group, [each for number, each in several.items() if only in (None, number)])
        for group, several in groups
    ]
    copied = _copied(optimizer, [(group, several) for group, several in kept if several])
    for step in range(STEPS):
        for number, (parameter, gradient) in enumerate(zip(every, steady, strict=True)):
            scale = 1.0 if not number else factor**step if factor < 0.0 else factor
            parameter.grad = scale * (drawn(tuple(parameter.shape)) if varies else gradient)
        copied.step()
    return [each.detach() - before for each, before in zip(every, start, strict=True)]


def _shape(dims: int) -> tuple[int, ...]:
    return (ROWS, COLUMNS, *[DEPTH] * (dims - 2))[:dims]


def _device(group: dict[str, Any]) -> torch.device | str:
    return next((each.device for each in group["params"] if not each.is_meta), "cpu")


def _differs(optimizer: Optimizer, group: dict[str, Any], shape: tuple[int, ...]) -> bool:
    with disable_current_modes():  # a trial needs real tensors, even if the model is on meta
        generator = torch.Generator().manual_seed(0)
        start, *gradients = (
            torch.randn(shape, generator=generator).to(_device(group)) for _ in range(1 + STEPS)
        )
        try:
            whole = updated(optimizer, group, start, gradients)
            halves = [
                updated(
                    optimizer, group, start.chunk(2)[half], [g.chunk(2)[half] for g in gradients]
                )
                for half in (0, 1)
            ]
        except Exception as error:
            raise _cannot_try(
                optimizer, f"its step raises {type(error).__name__}: {error}"
            ) from error
        moved = (whole - start).norm()
        if not moved:
            raise _cannot_try(optimizer, f"{STEPS} steps leave a parameter unchanged")
        return bool((whole - torch.cat(halves)).norm() > TOLERANCE * moved)


def _cannot_try(optimizer: Optimizer, why: str) -> RecipeError:
    return RecipeError(
        f"{type(optimizer).__name__} cannot be tried on a small tensor ({why}), and the plan"
        " splits the model over ranks; if its update of an element depends on other elements, it"
        " would be wrong on a shard; let step() take parameters from self.param_groups and their"
        " state from self.state, and update any tensor that has a gradient; or use replicate"
    )


def updated(
    optimizer: Optimizer, group: dict[str, Any], start: Tensor, gradients: Sequence[Tensor]
) -> Tensor:
    parameter = torch.nn.Parameter(start.clone())
    copied = _copied(optimizer, [(group, [parameter])])
    for gradient in gradients:
        parameter.grad = gradient.clone()
        copied.step()
    return parameter.detach()


def _copied(
    optimizer: Optimizer, groups: Sequence[tuple[dict[str, Any], list[torch.nn.Parameter]]]
) -> Optimizer:
    """Copy an optimizer, with a positive learning rate in place of 0."""
    copied: Optimizer = object.__new__(type(optimizer))
    vars(copied).update(vars(optimizer))
    copied.param_groups = [{**group, "params": parameters} for group, parameters in groups]
    for group in copied.param_groups:
        if group.get("lr") is not None and not float(group["lr"]):
            group["lr"] = 1e-3
    copied.state = defaultdict(dict)
    return copied
