"""Records two gradients on this rank: the gradient of each backward before any reduction, and the
gradient that the optimizer applies.

The hook of a parameter runs before DistributedDataParallel reduces the gradient. Under FSDP2, the
gradients are recorded in FSDP2's reduction. Gradients under FSDP1 are not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lockstep.audit.probes.recorder import RecordWriter
from lockstep.base import torch_private
from lockstep.evidence.sketch import sketch

Sketch = list[float]


@dataclass(slots=True)
class Watched:
    """The gradient of one parameter, as it was seen on this rank."""

    added: list[tuple[int, Sketch]] = field(default_factory=list)
    """For each backward pass since the last optimizer step: its number, and a sketch of its
    gradient."""
    is_stale: bool = False
    """True if the gradient was not set to zero after the last optimizer step."""
    was_stepped: bool = False
    """True from an optimizer step until the next backward pass."""
    reduced: Sketch | None = None
    """Sketch of this rank's shard of the reduced gradient; None for a parameter that is not
    sharded."""


class Gradients:
    def __init__(self, recorder: RecordWriter) -> None:
        self._recorder = recorder
        self._watched: dict[int, Watched] = {}
        # keep the parameters: the id of a deleted one may be reused
        self._parameters: dict[int, Tensor] = {}
        self.backward = -1
        self.line = ""
        self._depth = 0

    def watch(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            if id(parameter) in self._watched:
                continue
            watched = self._watched[id(parameter)] = Watched()
            self._parameters[id(parameter)] = parameter
            is_leaf = parameter.requires_grad and parameter.is_leaf
            if is_leaf and not torch_private.is_distributed(parameter):
                see = lambda gradient, of=parameter, seen=watched: self._see(of, seen, gradient)  # noqa: E731
                # before the script's own hooks, which may change the gradient
                torch_private.run_first(parameter, partial(self._recorder.safely, see))

    def take(self, parameter: Tensor) -> Watched:
        watched = self._watched.setdefault(id(parameter), Watched())
        taken = Watched(watched.added, watched.is_stale, reduced=watched.reduced)
        watched.added, watched.was_stepped = [], True
        return taken

    def clear(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            if (watched := self._watched.get(id(parameter))) is not None:
                watched.added, watched.is_stale, watched.was_stepped = [], False, False

    def install_backward(
        self, on_backward: Callable[[Any], None], after_backward: Callable[[], None]
    ) -> None:
        """Count the backward passes, without nested ones. `on_backward` gets the tensors whose
        `backward` is called."""

        def before(tensors: Any, *_: Any, **__: Any) -> None:
            self._depth += 1
            if self._depth == 1:
                self.backward += 1
                self.line = self._recorder.line()
                self._recorder.safely(on_backward, tensors)

        def backward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._recorder.safely(before, *args, **kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self._recorder.safely(self._see_shards)
                    self._recorder.safely(after_backward)

        self._recorder.watch(torch.autograd, "backward", backward)

    def install_fsdp(self, module: ModuleType) -> None:
        def before(
            parameters: Sequence[Any], gradients: Sequence[Tensor], *_: Any, **__: Any
        ) -> None:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if (watched := self._watched.get(id(parameter.sharded_param))) is not None:
                    watched.added.append((self.backward, sketch(gradient)))

        self._recorder.wrap(module, "foreach_reduce", before=before)

    def _see_shards(self) -> None:
        for key, parameter in self._parameters.items():
            if torch_private.is_distributed(parameter) and parameter.grad is not None:
                self._watched[key].reduced = local_sketch(parameter.grad)[0]

    def _see(self, parameter: Tensor, watched: Watched, gradient: Tensor) -> None:
        if not self._depth:
            return  # autograd.grad runs hooks too, and adds nothing to a gradient
        is_old = watched.is_stale or watched.was_stepped
        if parameter.grad is None or (is_old and not parameter.grad.any()):
            watched.is_stale, watched.added = False, []  # the script itself may have set it to zero
        elif watched.was_stepped:
            watched.is_stale = True
        watched.was_stepped = False
        watched.added.append((self.backward, sketch(gradient)))


def local_sketch(tensor: Tensor | None) -> tuple[Sketch | None, bool]:
    """Return the sketch of a tensor or of its local shard, and True for a shard. The sketch is None
    if sketches of the ranks' shards cannot be added."""
    if tensor is None:
        return None, False
    if not torch_private.is_distributed(tensor):
        return sketch(tensor), False
    first = shard_start(tensor)
    return (None, True) if first is None else (sketch(torch_private.to_local(tensor), first), True)


def shard_start(tensor: Any) -> int | None:
    """Return the position of a DTensor's local shard in the full tensor, in row-major order. Return
    None if the shard is not a range of rows, or if a lower rank has the same shard."""
    coordinates = tensor.device_mesh.get_coordinate() or [0] * tensor.device_mesh.ndim
    rows, first = tensor.shape[0] if tensor.dim() else 1, 0
    for axis, (place, coordinate) in enumerate(zip(tensor.placements, coordinates, strict=True)):
        if place.is_replicate() and coordinate == 0:
            continue
        if not place.is_shard(0):
            return None
        part = -(-rows // tensor.device_mesh.size(axis))  # splits like torch.chunk
        first += min(coordinate * part, rows)
        rows = max(0, min(part, rows - coordinate * part))
    has_rows = tensor.dim() and tensor.shape[0]
    return int(first * (tensor.numel() // tensor.shape[0] if has_rows else 1))


def scalar(value: Any) -> float | None:
    if isinstance(value, Tensor):
        is_number = value.numel() == 1 and not torch_private.is_distributed(value)
        return float(value.detach()) if is_number else None
    return float(value) if isinstance(value, int | float) else None


def divisors(root: Tensor) -> list[float]:
    numbers: list[float] = []
    node = root.grad_fn
    for _ in range(12):
        if node is None:
            break
        if type(node).__name__ == "DivBackward0":
            number = scalar(torch_private.divisor(node))
            numbers += [] if number is None else [number]
        following = [each for each, _ in node.next_functions if each is not None]
        node = following[0] if len(following) == 1 else None
    return numbers
