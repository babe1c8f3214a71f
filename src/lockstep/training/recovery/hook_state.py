"""The state of the user's hooks without a state_dict, by which a recovery in place sees that one
has changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.base.contents import CodeReader, Part, digest_parts
from lockstep.base.errors import first_few
from lockstep.base.torch_private import version
from lockstep.training.state import Stateful
from lockstep.training.training import Training

MOST_BYTES = 2**26
"""The largest tensor or array that is read. Of a larger tensor, torch's count of changes is
compared."""


@dataclass(frozen=True, slots=True)
class HookState:
    """All that a hook holds or uses, at one time."""

    digests: Mapping[str, str]
    """Digests by path: attributes, what functions close over, and the variables of their
    modules."""
    unread: list[str]
    """The paths of what cannot be read, and so cannot be compared."""


def hook_states(training: Training) -> dict[str, HookState]:
    """Return the state of each hook of the user without a state_dict, by the hook's place and
    name."""
    hooks = [
        hook
        for hook in training.hooks.all
        if not type(hook).__module__.startswith("lockstep.") and not isinstance(hook, Stateful)
    ]
    return {
        f"{place} {type(hook).__name__}": HookState(
            *digest_parts(_HookReader(training).parts(hook))
        )
        for place, hook in enumerate(hooks)
    }


def why_not_set_back(before: Mapping[str, HookState], now: Mapping[str, HookState]) -> str | None:
    """Return why a new process would begin with another hook than this process has; None if it
    would not."""
    for name, state in before.items():
        found = now[name]
        changed = [
            path
            for path in {**state.digests, **found.digests}
            if state.digests.get(path) != found.digests.get(path)
        ]
        for paths, what in (
            (changed, "has changed since the start"),
            (found.unread, "cannot be compared"),
        ):
            if paths:
                parts = first_few([path.removeprefix(".") or "it" for path in paths])
                return (
                    f"hook {name.partition(' ')[2]} has no state_dict, and {parts} {what}: it"
                    " cannot be set back; add one"
                )
    return None


class _HookReader(CodeReader):
    def __init__(self, training: Training) -> None:
        super().__init__()
        models = [module.model for module in training.modules]
        parts = (
            part
            for model in models
            for part in (*model.modules(), *model.parameters(), *model.buffers())
        )
        self._of_the_run = {
            id(each)
            for each in (
                *parts,
                *(optimizer for module in training.modules for optimizer in module.optimizers),
            )
        }

    def read(self, value: Any, path: str) -> Iterator[Part]:
        if id(value) in self._of_the_run or type(value).__module__.startswith("lockstep."):
            yield path, [b"of the run"]
        else:
            yield from super().read(value, path)

    def _tensor_bytes(self, value: Any) -> Iterable[bytes] | None:
        return (
            super()._tensor_bytes(value)
            if value.nbytes <= MOST_BYTES
            else [f"{id(value)} {version(value)}".encode()]
        )

    def _array_bytes(self, value: Any) -> Iterable[bytes] | None:
        if value.nbytes <= MOST_BYTES:
            return super()._array_bytes(value)
        return [f"{id(value)}".encode()] if not value.flags.writeable else None
