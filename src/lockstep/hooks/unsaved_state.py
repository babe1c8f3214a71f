"""Finds tensors that users' hooks change, and that no checkpoint holds."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from lockstep.base.torch_private import tree_leaves, version
from lockstep.training.hook import Hook, Run
from lockstep.training.set_up import Remark
from lockstep.training.state import Stateful

Versions = dict[str, list[tuple[int, int]]]  # attribute -> (identity, changes in place) of each tensor in it


class UnsavedState:
    """Names, once, the hooks without a state_dict that have changed a tensor or a module of their own."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self._hooks = [hook for hook in hooks if not isinstance(hook, Stateful)]
        self._at_start: list[Versions] = []

    def begin(self, run: Run) -> None:
        self._at_start = [self._versions(hook, run) for hook in self._hooks]

    def tell(self, run: Run) -> None:
        for hook, before in zip(self._hooks, self._at_start, strict=False):
            now = self._versions(hook, run)
            changed = [name for name, versions in before.items() if versions and now.get(name) != versions]
            if changed:
                kind, names = type(hook).__name__, ", ".join(changed)
                line = (
                    f"warning: hook {kind} changes tensors of its own ({names}), and has no state_dict: they are not saved, and a resumed "
                    "run would begin with others; give it state_dict and load_state_dict"
                )
                run.remark(Remark("hook-state-not-saved", {"hook": kind, "attributes": changed}, line))
        self._at_start = []

    def _versions(self, hook: Hook, run: Run) -> Versions:
        """Return the versions of the hook's tensors, those of the models left out."""
        models = {id(tensor) for module in run.modules for tensor in _tensors_of(module.model)}
        return {
            name: [(id(tensor), version(tensor)) for leaf in tree_leaves(value) for tensor in _tensors_of(leaf) if id(tensor) not in models]
            for name, value in vars(hook).items()
        }


def _tensors_of(value: object) -> list[Tensor]:
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    return [value] if isinstance(value, Tensor) else []
