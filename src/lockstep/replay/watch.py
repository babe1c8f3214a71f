"""Finds the first value of a microbatch that is not finite, in its batch, in the output of each
module, and in the gradient of each operation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from lockstep.base.nested import tensors_in
from lockstep.base.torch_private import without_torch_function_modes
from lockstep.comm.mesh import to_local
from lockstep.replay.not_finite import NotFinite


class FiniteWatch:
    """Watches the forward and backward of models for values that are not finite. Call `begin` with
    each microbatch, and `before_backward` before its backward."""

    def __init__(self) -> None:
        self.seen: list[NotFinite] = []
        self._samples: Sequence[int | str] = ()
        self._enclosing: list[tuple[str, nn.Module]] = []
        self._module_of: dict[Node, str] = {}
        self._in_forward = False
        self._handles: list[Any] = []

    def watch(self, models: Iterable[nn.Module]) -> None:
        for name, module in chain.from_iterable(model.named_modules() for model in models):
            self._handles += [
                module.register_forward_pre_hook(self._before(name), with_kwargs=True),
                module.register_forward_hook(self._after(name), with_kwargs=True),
            ]

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._module_of.clear()

    def begin(self, samples: Sequence[int | str], batch: Any) -> None:
        self.seen, self._samples, self._in_forward = [], samples, True
        self._enclosing.clear()
        self._module_of.clear()
        if (rows := self._not_finite(_without_mask(tensors_in(batch)))) is not None:
            self.seen.append(NotFinite(stage="batch", samples=rows))

    def before_backward(self, total: Tensor) -> None:
        self._in_forward = False
        if not torch.isfinite(total).all():
            self.seen.append(NotFinite(stage="loss"))
            return
        for node in _graph(total):
            node.register_hook(self._of_node(node))

    def _before(self, name: str) -> Callable[..., None]:
        # the mode of slices refuses operations that it does not know
        @without_torch_function_modes()
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self._in_forward:
                return  # activation checkpointing recomputes this forward
            if (samples := self._not_finite(_without_mask(tensors_in((args, kwargs))))) is not None:
                if self._enclosing:
                    self._note_output(*self._enclosing[-1], samples)
                else:
                    self.seen.append(NotFinite(stage="input", samples=samples))
            self._enclosing.append((name, module))

        return before

    def _after(self, name: str) -> Callable[..., None]:
        @without_torch_function_modes()
        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not self._in_forward:
                return
            while self._enclosing and self._enclosing.pop()[1] is not module:
                pass  # drop modules whose forward has raised
            outputs, inputs = tensors_in(output), tensors_in((args, kwargs))
            before = {each.grad_fn for each in inputs}
            for node in _graph(*outputs, until=before | self._module_of.keys()):
                self._module_of[node] = name
            if (samples := self._not_finite(_without_mask(outputs))) is not None:
                self._note_output(name, module, samples)

        return after

    def _note_output(self, name: str, module: nn.Module, samples: Sequence[int | str]) -> None:
        own = chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        self.seen.append(
            NotFinite(
                stage="forward",
                layer=name,
                operation=type(module).__name__,
                parameter=next((of for of, value in own if not _is_finite(value)), None),
                samples=samples,
            )
        )

    def _of_node(self, node: Node) -> Callable[..., None]:
        layer = self._module_of.get(node)

        def after(computed: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> None:
            samples = self._not_finite(each for each in computed if each is not None)
            if samples is not None and all(each is None or _is_finite(each) for each in given):
                self.seen.append(
                    NotFinite(
                        stage="backward",
                        layer=layer or "",
                        is_in_model=layer is not None,
                        operation=node.name(),
                        samples=samples,
                    )
                )

        return after

    def _not_finite(self, tensors: Iterable[Tensor]) -> list[int | str] | None:
        """Return the samples whose rows are not finite; None if all values are finite. Return an
        empty list if a tensor that is not finite has no row for each sample."""
        count = len(self._samples)
        for each in tensors:
            finite = torch.isfinite(to_local(each.detach()))
            if bool(finite.all()):
                continue
            if not finite.dim() or len(finite) != count:
                return []
            rows = ~finite.reshape(count, -1).all(1)
            return [self._samples[row] for row in rows.nonzero().flatten().tolist()]
        return None


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(to_local(tensor.detach())).all())


def _without_mask(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Replace -inf by 0 in tensors that require no gradient, because -inf is probably a mask."""
    for each in tensors:
        yield each if each.requires_grad else each.masked_fill(each == -torch.inf, 0)


def _graph(*outputs: Tensor, until: Iterable[Node | None] = ()) -> list[Node]:
    seen, operations = {*until, None}, []
    following = [each.grad_fn for each in outputs]
    while following:
        node = following.pop()
        if node in seen or node is None:
            continue
        seen.add(node)
        operations.append(node)
        following += [before for before, _ in node.next_functions]
    return operations
