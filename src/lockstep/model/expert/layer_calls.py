"""Detects that a forward skips a layer of experts (as with stochastic depth), or calls a layer more
often. Each call of a layer of experts has collectives. Each rank tells the other ranks which layers
it skips, and that its forward has ended."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from lockstep.base.uncompiled import Uncompiled
from lockstep.model.expert.dispatch import Dispatch


class _RunningForward(threading.local):
    """The progress of the model's forward that runs in this thread."""

    next: int | None = None
    """Index of the layer that the forward should call next, or None outside of a forward.
    Recomputation calls layers in another order."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _RunningForward:
        return _RunningForward()


class LayerCalls:
    """Watches the calls of layers of experts in the forwards of a model."""

    def __init__(self, model: nn.Module, layers: Sequence[Dispatch]) -> None:
        self._layers = layers
        self._forward = _RunningForward()
        model.register_forward_pre_hook(self._begin, prepend=True)
        model.register_forward_hook(self._end)
        for place, layer in enumerate(layers):
            hook = Uncompiled(partial(self._before, place))
            layer.experts.module.register_forward_pre_hook(hook, prepend=True)

    def _begin(self, _: nn.Module, __: Any) -> None:
        self._forward.next = 0

    def _before(self, place: int, _: nn.Module, __: Any) -> None:
        if self._forward.next is not None:
            self._leave_out(place)
            self._forward.next = max(self._forward.next, place + 1)

    def _end(self, _: nn.Module, __: Any, ___: Any) -> None:
        self._leave_out(len(self._layers))
        if self._layers:
            self._layers[-1].end_forward()
        self._forward.next = None

    def _leave_out(self, end: int) -> None:
        for layer in self._layers[self._forward.next : end]:
            layer.leave_out()
