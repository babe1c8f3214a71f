"""The state of an optimizer in a checkpoint: tensors by parameter, and other values as JSON. An
optimizer that overrides `state_dict` and `load_state_dict` is saved and loaded by these methods.
The state of other optimizers is saved from `Optimizer.state`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.base.dtypes import TensorSpec, torch_dtype
from lockstep.base.errors import CheckpointError
from lockstep.base.nested import tree_tensors
from lockstep.base.torch_private import is_distributed

EXECUTION = ("params", "foreach", "fused", "capturable", "differentiable", "initial_lr")
"""Fields of a param group that the trained model does not depend on."""

Settings = list[list[dict[str, Any]]]
"""The settings (lr, betas and so on) of each param group of each optimizer, as JSON."""


def settings_of(optimizers: Sequence[Optimizer]) -> Settings:
    return [
        [
            {name: _plain(value) for name, value in group.items() if name not in EXECUTION}
            for group in each.param_groups
        ]
        for each in optimizers
    ]


def changed_settings(saved: Settings, now: Settings) -> Iterator[tuple[int, int, str]]:
    """Yield (optimizer index, param group index, setting name) for each changed setting."""
    for number, (theirs, ours) in enumerate(zip(saved, now, strict=False)):
        for group, (before, after) in enumerate(zip(theirs, ours, strict=False)):
            yield from (
                (number, group, name)
                for name in after
                if name in before and before[name] != after[name]
            )


def changes_in_words(saved: Settings, now: Settings) -> list[str]:
    """Return texts such as `optimizer: lr of group 0: 0.1, now 0.01`."""
    return [
        f"optimizer{f' {number}' if len(now) > 1 else ''}: {name} of group {group}:"
        f" {saved[number][group][name]!r}, now {now[number][group][name]!r}"
        for number, group, name in changed_settings(saved, now)
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    return value if isinstance(value, bool | int | float | str | None) else type(value).__qualname__


@dataclass(slots=True)
class OptimizerState:
    """An optimizer's state, in the parts that a checkpoint saves."""

    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Maps a parameter's name and a key such as `exp_avg` to a tensor."""
    rest: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Maps a parameter's name and a key to a value that is not a tensor."""
    shared: dict[Any, Any] = field(default_factory=dict)
    """Entries of `Optimizer.state` whose keys are not parameters."""
    more: dict[str, Any] = field(default_factory=dict)
    """Entries of the state dict other than `state` and `param_groups`."""

    @classmethod
    def of(cls, optimizer: Optimizer, named: Mapping[str, nn.Parameter]) -> OptimizerState:
        state = cls()
        _check_inner(optimizer)
        names = {id(parameter): name for name, parameter in named.items()}
        states, state.more = (
            _own_states(optimizer)
            if overrides_state_dict(optimizer)
            else (dict(optimizer.state), {})
        )
        for key, values in states.items():
            if not isinstance(key, Tensor):
                state.shared[key] = values
            elif (name := names.get(id(key))) is not None:
                for each, value in values.items():
                    found = state.tensors if isinstance(value, Tensor) else state.rest
                    found.setdefault(name, {})[each] = value
        return state

    def load(
        self, optimizer: Optimizer, named: Mapping[str, nn.Parameter], groups: list[dict[str, Any]]
    ) -> None:
        states = {
            name: {**self.tensors.get(name, {}), **self.rest.get(name, {})}
            for name in {**self.tensors, **self.rest}
        }
        if overrides_state_dict(optimizer):
            numbers = {
                id(parameter): number for number, parameter in enumerate(_parameters(optimizer))
            }
            packed = [
                {
                    **group,
                    **saved,
                    "params": [numbers[id(parameter)] for parameter in group["params"]],
                }
                for group, saved in zip(optimizer.param_groups, groups, strict=True)
            ]
            by_number = {numbers[id(named[name])]: dict(values) for name, values in states.items()}
            optimizer.load_state_dict(
                {"state": {**by_number, **self.shared}, "param_groups": packed, **self.more}
            )
        else:
            for name, values in states.items():
                optimizer.state[named[name]].update(values)
            for key, value in self.shared.items():
                optimizer.state[key] = value
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            _set(group, saved)
        # torch's `Optimizer.load_state_dict` would cast to the parameter's dtype
        for name, tensors in self.tensors.items():
            state = optimizer.state.get(named[name], {})
            state.update(
                {key: value for key, value in tensors.items() if isinstance(state.get(key), Tensor)}
            )


def overrides_state_dict(optimizer: Optimizer) -> bool:
    kind = type(optimizer)
    return (
        kind.state_dict is not Optimizer.state_dict
        and kind.load_state_dict is not Optimizer.load_state_dict
    )


def remedy(optimizer: Optimizer) -> str:
    name = type(optimizer).__name__
    return (
        f"give {name} both a state_dict() that returns tensors, numbers or text instead, by"
        " parameter as torch's does, and a load_state_dict() that restores the object from them;"
        " lockstep then calls both"
    )


def allocate(
    optimizer: Optimizer,
    named: Mapping[str, nn.Parameter],
    prefix: str,
    saved: Mapping[str, TensorSpec],
) -> dict[str, dict[str, Tensor]]:
    """Return tensors to load a checkpoint's optimizer state into, by parameter name and key."""
    mine = {id(parameter) for parameter in _parameters(optimizer)}
    on_device = any(
        group.get("capturable") or group.get("fused") for group in optimizer.param_groups
    )
    tensors: dict[str, dict[str, Tensor]] = {}
    for full, (dtype, shape) in saved.items():
        name, _, key = full.removeprefix(f"{prefix}/").rpartition("/")
        parameter = named.get(name) if full.startswith(f"{prefix}/") else None
        if parameter is None or id(parameter) not in mine:
            continue
        now = (
            None if overrides_state_dict(optimizer) else optimizer.state.get(parameter, {}).get(key)
        )
        if isinstance(now, Tensor):
            tensor = now
        elif shape == tuple(parameter.shape):
            tensor = torch.empty_like(parameter.detach(), dtype=torch_dtype(dtype))
        else:
            device = "cpu" if key == "step" and not on_device else parameter.device
            tensor = torch.empty(shape, dtype=torch_dtype(dtype), device=device)
        tensors.setdefault(name, {})[key] = tensor
    return tensors


def _check_inner(optimizer: Optimizer) -> None:
    if overrides_state_dict(optimizer):
        return
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer) and value.state and value.state is not optimizer.state:
            kind = type(optimizer).__name__
            raise CheckpointError(
                f"{kind}.{name} is another optimizer, with its own state ({type(value).__name__}),"
                f" which {kind}'s state_dict() leaves out; give {kind} both a state_dict() that"
                f" returns it too, such as {{**super().state_dict(), {name!r}:"
                f" self.{name}.state_dict()}}, and a load_state_dict() that loads it"
            )


def _own_states(optimizer: Optimizer) -> tuple[dict[Any, Any], dict[str, Any]]:
    """Return the state by parameter, and the entries of the state dict besides `state` and
    `param_groups`."""
    kept = {
        key: dict(values) for key, values in optimizer.state.items() if isinstance(values, dict)
    }
    try:
        returned = optimizer.state_dict()
        states = {
            key: dict(values) if isinstance(values, Mapping) else values
            for key, values in returned["state"].items()
        }
        more = {
            key: value for key, value in returned.items() if key not in ("state", "param_groups")
        }
    except (AttributeError, KeyError, TypeError, NotImplementedError) as error:
        raise CheckpointError(
            f"{type(optimizer).__name__}.state_dict() cannot be saved ({type(error).__name__}:"
            f" {error}); it must be a dict with the keys state and param_groups, as torch's is;"
            " return such a dict"
        ) from error
    # restore dicts that state_dict() has changed: torch's state dict shares them with the optimizer
    for key, values in kept.items():
        optimizer.state[key].clear()
        optimizer.state[key].update(values)
    if any(map(is_distributed, tree_tensors(more))):
        raise CheckpointError(
            f"{type(optimizer).__name__}.state_dict() returns sharded tensors besides 'state';"
            " their shards are saved by parameter; return them in 'state', by parameter, or use"
            " replicate"
        )
    parameters = _parameters(optimizer)
    return {
        parameters[key] if type(key) is int and key < len(parameters) else key: values
        for key, values in states.items()
    }, more


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters in the order in which torch's state dict numbers them."""
    return list(
        {
            id(parameter): parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
        }.values()
    )


def _set(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for key, value in saved.items():
        now = group.get(key)
        if isinstance(now, Tensor):
            now.copy_(value) if isinstance(value, Tensor) else now.fill_(value)
        elif isinstance(now, int | float) and isinstance(value, Tensor):
            group[key] = value.item()
        else:
            group[key] = value
