"""The hook that finds models that carry tensors from one microbatch to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lockstep.base.torch_private import MODULE_ATTRIBUTES, RECURRENT_CACHES, tree_leaves, version
from lockstep.hooks.loss_check import tell_kept
from lockstep.logging.flops import is_compiled
from lockstep.training.hook import ControlHook
from lockstep.training.run import Run

STEPS, MICROBATCHES = 2, 4
"""Watched steps, and microbatches of a rank."""

_ABOUT = frozenset(
    {
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "requires_grad",
        "is_leaf",
        "grad_fn",
        "size",
        "dim",
        "numel",
        "__len__",
    }
)
"""Attributes and methods that do not tell a tensor's values."""
_SAVED = MODULE_ATTRIBUTES | RECURRENT_CACHES

# attribute -> its tensors, with the number of writes to each
Marks = dict[str, list[tuple[Tensor, int]]]


class CarriedState(ControlHook):
    """Watches the models' attributes in the first forwards of a script's own loop, or with a batch
    loss.

    An attribute carries state if a forward reads a tensor that another microbatch's forward left
    there, and leaves another one. Cached values do not change again; what each forward sets anew is
    not read.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._watches: list[_Watch] = []

    def before_step(self, run: Run) -> None:
        if self._steps or (run.recipe is not None and run.recipe.loss is not None):
            return
        if run.context.recovered_from is not None and run.step > 0:
            return  # the same script has passed it
        if not run.context.plan.compile and not any(
            is_compiled(module.model) for module in run.training.modules
        ):
            held = {
                id(tensor)
                for module in run.training.modules
                for tensor in (*module.model.parameters(), *module.model.buffers())
            }
            self._watches = [
                _Watch(module.model, held, lambda: run.training.microbatches)
                for module in run.training.modules
            ]

    def after_step(self, run: Run) -> None:
        if not self._watches:
            return
        self._steps += 1
        found = sorted({name for watch in self._watches for name in watch.found})
        everyone = next(filter(None, run.context.world.gather_values(found)), None)
        if everyone is not None or self._steps == STEPS:
            self._close()
        if everyone is not None:
            tell_kept(
                run,
                f"the model's forward reads {', '.join(everyone)}, which the forward of another"
                " microbatch has set",
            )

    def after_steps(self, run: Run) -> None:
        self._close()

    def _close(self) -> None:
        for watch in self._watches:
            watch.close()
        self._watches = []


class _Watch:
    """Watches one model. `microbatches`: the number that this rank has begun."""

    def __init__(
        self, model: nn.Module, held: Iterable[int], microbatches: Callable[[], int]
    ) -> None:
        self.found: set[str] = set()
        self._model, self._held, self._microbatches = model, held, microbatches
        self._first = self._latest = microbatches()
        self._known = self._before = self._marks()
        self._uses = _Uses({})
        self._entered: list[ExitStack | None] = []
        self._handles = [
            model.register_forward_pre_hook(self._enter),
            model.register_forward_hook(self._leave, always_call=True),
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, *_: Any) -> None:
        if not torch.is_grad_enabled() or self._microbatches() - self._first > MICROBATCHES:
            self._entered.append(None)
            return
        if self._microbatches() != self._latest:
            self._latest, self._before = self._microbatches(), self._marks()
            known = {
                (id(tensor), writes)
                for tensors in self._known.values()
                for tensor, writes in tensors
            }
            left = {
                id(tensor): name
                for name, tensors in self._before.items()
                for tensor, writes in tensors
                if (id(tensor), writes) not in known
            }
            self._uses = _Uses(left)
        entered = ExitStack()
        entered.enter_context(self._uses)
        self._entered.append(entered)

    def _leave(self, *_: Any) -> None:
        if (entered := self._entered.pop()) is None:
            return
        entered.close()
        if self._uses.names:
            now = self._marks()
            self.found |= {
                name
                for name in self._uses.names
                if not _are_same(self._before[name], now.get(name, []))
            }

    def _marks(self) -> Marks:
        found: Marks = {}
        for prefix, module in self._model.named_modules():
            for name, value in vars(module).items():
                if name not in _SAVED:
                    tensors = [
                        leaf
                        for leaf in tree_leaves(value)
                        if isinstance(leaf, Tensor) and id(leaf) not in self._held
                    ]
                    if tensors:
                        found[f"{prefix}.{name}".lstrip(".")] = [
                            (tensor, version(tensor)) for tensor in tensors
                        ]
        return found


def _are_same(before: list[tuple[Tensor, int]], now: list[tuple[Tensor, int]]) -> bool:
    return [(id(tensor), writes) for tensor, writes in before] == [
        (id(tensor), writes) for tensor, writes in now
    ]


class _Uses(TorchFunctionMode):
    """Collects the names of tensors whose values are used. `left`: id -> name."""

    def __init__(self, left: Mapping[int, str]) -> None:
        super().__init__()
        self.names: set[str] = set()
        self._left = left

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(function, "__self__", None), "__name__", "")
        if self._left and name not in _ABOUT:
            self.names |= {
                self._left[id(leaf)]
                for leaf in tree_leaves((args, kwargs))
                if id(leaf) in self._left
            }
        return function(*args, **(kwargs or {}))
