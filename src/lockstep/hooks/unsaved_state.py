"""Find what users' hooks, modules and optimizers change, and no checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.base.torch_private import MODULE_ATTRIBUTES, RECURRENT_CACHES, tree_leaves, version
from lockstep.training.hook import Hook
from lockstep.training.optim.optimizer_state import has_own_pair
from lockstep.training.run import Run
from lockstep.training.set_up import Remark
from lockstep.training.state import Stateful

# attribute -> a value for each part of it, which is equal as long as the part is
Versions = dict[str, list[Any]]

_SAVED = MODULE_ATTRIBUTES | RECURRENT_CACHES | {"state", "param_groups"}
"""Attributes that are saved, or watched elsewhere."""


class UnsavedState:
    """Names, once, changed attributes of modules, optimizers and hooks without a state_dict."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self._hooks = [hook for hook in hooks if not isinstance(hook, Stateful)]
        self._at_start: dict[int, Versions] = {}

    def begin(self, run: Run) -> None:
        models = _ids_of(run)
        self._at_start = {id(hook): _tensor_versions(hook, models) for hook in self._hooks}
        self._at_start |= {id(owner): _versions(owner, models) for _, owner in _owners(run)}

    def tell(self, run: Run) -> None:
        if not self._at_start:
            return
        models = _ids_of(run)
        for hook in self._hooks:
            if changed := self._changed(hook, _tensor_versions(hook, models)):
                kind, names = type(hook).__name__, ", ".join(changed)
                line = (
                    f"warning: hook {kind} changes tensors of its own ({names}), and has no"
                    " state_dict: they are not saved, and a resumed run would begin with others;"
                    " give it state_dict and load_state_dict"
                )
                run.remark(
                    Remark("hook-state-not-saved", {"hook": kind, "attributes": changed}, line)
                )
        found = [
            f"{name}.{each}"
            for name, owner in _owners(run)
            for each in self._changed(owner, _versions(owner, models))
        ]
        if found:
            line = (
                "warning: attributes of the model or an optimizer change, and no checkpoint holds"
                f" them: {', '.join(found[:5])}{', ...' if len(found) > 5 else ''}; unless each"
                " step sets them anew, a resumed run goes on with others; keep them in buffers, in"
                " get_extra_state and set_extra_state, or in the optimizer's state"
            )
            run.remark(Remark("attributes-not-saved", {"attributes": found}, line))
        self._at_start = {}

    def _changed(self, owner: object, now: Versions) -> list[str]:
        before = self._at_start.get(id(owner), {})
        with_default: Versions = {
            name: [] for name in now if name not in before and hasattr(type(owner), name)
        }
        return [
            name
            for name, versions in {**before, **with_default}.items()
            if now.get(name) != versions
        ]


def _owners(run: Run) -> Iterator[tuple[str, nn.Module | Optimizer]]:
    """Yield, by name, modules whose extra state is not saved, and optimizers without their own
    pair."""
    for module in run.modules:
        for name, part in module.model.named_modules():
            if type(part).get_extra_state is nn.Module.get_extra_state:
                yield name or type(part).__name__, part
        yield from (
            (type(each).__name__, each) for each in module.optimizers if not has_own_pair(each)
        )


def _versions(owner: nn.Module | Optimizer, models: set[int]) -> Versions:
    return {
        name: _marks(value, models) for name, value in vars(owner).items() if name not in _SAVED
    }


def _marks(value: Any, models: set[int]) -> list[Any]:
    leaves = tree_leaves(value)
    plain = [leaf for leaf in leaves if isinstance(leaf, int | float | str)]
    tensors = [
        leaf
        for leaf in leaves
        if isinstance(leaf, Tensor) and leaf.grad_fn is None and id(leaf) not in models
    ]
    return [*plain, *((id(tensor), version(tensor)) for tensor in tensors)]


def _tensor_versions(hook: Hook, models: set[int]) -> Versions:
    """Return the versions of the hook's own tensors."""
    found = {
        name: [
            (id(tensor), version(tensor))
            for leaf in tree_leaves(value)
            for tensor in _tensors_of(leaf)
            if id(tensor) not in models
        ]
        for name, value in vars(hook).items()
    }
    return {name: versions for name, versions in found.items() if versions}


def _ids_of(run: Run) -> set[int]:
    return {id(tensor) for module in run.modules for tensor in _tensors_of(module.model)}


def _tensors_of(value: object) -> list[Tensor]:
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    return [value] if isinstance(value, Tensor) else []
