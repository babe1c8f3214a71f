"""Chooses the form in which each torch function of a sharded tensor is called: unchanged, with
contiguous rows, or with padded tensors. An element of the result must have the same bits as in the
result for the full tensor. Each distinct call is first tried on copies of its tensors, to record
its ATen operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lockstep.base import accelerator
from lockstep.base.errors import RecipeError
from lockstep.base.nested import tree_tensors
from lockstep.base.torch_private import (
    FakeTensor,
    TorchDispatchMode,
    disable_current_modes,
    schema,
    storage_address,
    tree_leaves,
    tree_map,
    without_torch_function_modes,
)
from lockstep.model.tensor.elementwise import aligned, aligned_gradient, elementwise, mapped
from lockstep.model.tensor.marks import Shard, mark_of, marked
from lockstep.model.tensor.operators import (
    EXACT,
    IN_ORDER,
    Kind,
    kind_of_operator,
    tensors_of,
)
from lockstep.model.tensor.sharded_dims import check_drawn, shards_of

Form = Callable[[Any, Any, Any], Any]
PRINTS = frozenset({Tensor.__repr__, Tensor.__format__})
PLAIN = (
    *(bool, int, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Types that a function may return besides tensors. A result of another type could contain tensors
that lockstep does not mark as sharded."""
EXPANDS = frozenset({Tensor.expand, Tensor.expand_as, Tensor.broadcast_to, torch.broadcast_to})
REPEATS = frozenset({Tensor.repeat_interleave, torch.repeat_interleave})


def as_it_is(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def by_rows(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function with contiguous tensors, also in its backward. A sum over the last dims then
    adds the elements of a row in the same order in a shard as in the full tensor."""

    def prepared(item: Any) -> Any:
        return aligned(item) if isinstance(item, Tensor) else item

    out = func(*mapped(prepared, args), **mapped(prepared, kwargs))
    return tree_map(aligned_gradient, out)


def expanded(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Expand a tensor. The backward sums the gradients of each element as one contiguous row."""
    given: Tensor = args[0] if args else kwargs["input"]
    out: Tensor = _Expand.apply(given, func(*args, **kwargs).shape)  # type: ignore[no-untyped-call]
    return out


def repeated(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Call `repeat_interleave` with a fixed number of repeats. The backward sums the gradient as
    `expanded` does."""
    named = dict(zip(("input", "repeats", "dim"), args, strict=False)) | kwargs
    given, times, dim = named.pop("input"), named.pop("repeats"), named.pop("dim")
    if named or not isinstance(times, int) or not isinstance(dim, int):
        raise TypeError("only a fixed number of repeats along a dim is known")
    dim %= given.dim()
    shape = (*given.shape[: dim + 1], times, *given.shape[dim + 1 :])
    out: Tensor = _Expand.apply(given.unsqueeze(dim + 1), shape)  # type: ignore[no-untyped-call]
    return out.flatten(dim, dim + 1)


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, shape: torch.Size) -> Tensor:
        ctx.shape = given.shape
        return given.expand(shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (slope,) = gradients
        sizes = (*(1,) * (slope.dim() - len(ctx.shape)), *ctx.shape)
        summed = [dim for dim, size in enumerate(sizes) if size != slope.shape[dim]]
        kept = [dim for dim in range(slope.dim()) if dim not in summed]
        if not summed:
            return slope.reshape(ctx.shape), None
        rows = slope.permute(*kept, *summed).flatten(len(kept)).contiguous()
        return rows.sum(-1).view(ctx.shape), None


@dataclass(slots=True)
class OperatorRecord:
    """The ATen operators of one call of a torch function."""

    operators: list[tuple[Kind, str, bool]] = field(default_factory=list)
    writes: bool = False
    draws: bool = False
    returns: str | None = None
    """The name of the result's type, if the result is neither a tensor nor a plain value such as a
    number."""
    outs: list[Tensor] = field(default_factory=list)

    def kinds(self, *, backward: bool = True) -> set[Kind]:
        return {kind for kind, _, is_backward in self.operators if backward or not is_backward}

    def kinds_in_order(self) -> set[Kind]:
        """Return the kinds of the operators. Operators that keep the order of heads and features,
        but may give a shard different bits, count as "by rows"."""
        return {
            "by rows" if name.split(".")[1].rstrip("_") in IN_ORDER else kind
            for kind, name, _ in self.operators
        }


class Forms:
    """The form chosen for each distinct call of a torch function that one model makes with sharded
    tensors."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Form, list[Shard]]] = {}

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in PRINTS:
            return func(*args, **kwargs)
        key = (func, _state(), _pattern((args, kwargs), {}))
        known = self._known.get(key)
        if known is None:
            with apart():
                known = self._known[key] = _form_of(func, args, kwargs)
        form, shards = known
        return marked(form(func, args, kwargs), shards)


@contextmanager
def apart() -> Iterator[None]:
    """Call functions outside of all torch function and dispatch modes. Activation checkpointing
    does not record calls in this context."""
    with (
        disable_current_modes(),
        without_torch_function_modes(),
        saved_tensors_hooks(lambda each: each, lambda each: each),
    ):
        yield


def _form_of(func: Any, args: Any, kwargs: Any) -> tuple[Form, list[Shard]]:
    name = getattr(func, "__name__", str(func))
    grows = any(each.requires_grad for each in tensors_of(args, kwargs)) and (
        expanded if func in EXPANDS else repeated if func in REPEATS else None
    )
    first = _operators_of(grows or as_it_is, func, args, kwargs)
    if first is None:
        func(*args, **kwargs)  # an invalid call raises its own error here
        raise _refused(name, "which lockstep cannot try on copies of its tensors")
    if func is Tensor.backward or kwargs.get("out") is not None or first.returns is not None:
        raise _refused(name, f"whose result ({first.returns or 'in out='}) lockstep cannot follow")

    def known(form: Form) -> tuple[Form, list[Shard]]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return form(func, args, kwargs)

        shards = shards_of(call, args, kwargs, first.kinds(backward=False), first.outs)
        check_drawn(func, args, kwargs, shards)
        return form, shards

    if first.kinds() <= EXACT:
        return known(as_it_is)
    rows = None if first.writes else _operators_of(grows or by_rows, func, args, kwargs)
    if rows is not None and rows.kinds() <= EXACT | {"by rows"}:
        return known(grows or by_rows)
    shapes = [each.shape for each in tensors_of(args, kwargs)]
    of_each = first.kinds(backward=False) <= {"keeps", "exact", "by place"}
    if of_each and [each.shape for each in first.outs] == [_broadcast(shapes)]:
        padded = partial(elementwise, in_place=first.writes)
        record = _operators_of(padded, func, args, kwargs)
        if record is not None and record.kinds() <= EXACT | {"by place", "by rows"}:
            return known(padded)
    raise _why_refused(name, rows or first)


def _broadcast(shapes: list[torch.Size]) -> torch.Size | None:
    try:
        return torch.Size(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None


def _operators_of(form: Form, func: Any, args: Any, kwargs: Any) -> OperatorRecord | None:
    """Call the function in a form on copies of its tensors, forward and backward. Returns None if
    the function raises."""
    record = OperatorRecord()
    # `lockstep plan` computes with fake tensors, which need their mode for further ones
    fakes = (each for each in tensors_of(args, kwargs) if isinstance(each, FakeTensor))
    mode = next((each.fake_mode for each in fakes), None)
    with nullcontext() if mode is None else mode:
        with torch.no_grad():
            copies = {id(each): each.clone() for each in tensors_of(args, kwargs)}
        leaves = []
        for each in tensors_of(args, kwargs):
            if torch.is_grad_enabled() and each.requires_grad:
                leaves.append(copies[id(each)].requires_grad_())
                # a function may write the tensor, which autograd refuses for a leaf
                copies[id(each)] = copies[id(each)].clone()

        def copied(item: Any) -> Any:
            return copies.get(id(item), item) if isinstance(item, Tensor) else item

        storages = {storage_address(each.untyped_storage()) for each in copies.values()}
        try:
            with OperatorRecorder(record, storages, backward=False):
                out = form(func, mapped(copied, args), mapped(copied, kwargs))
            outs = tree_tensors(out)
            slopes = [each for each in outs if each.requires_grad]
            if leaves and slopes:
                ones = [torch.ones_like(each).contiguous() for each in slopes]
                with OperatorRecorder(record, storages, backward=True):
                    torch.autograd.grad(slopes, leaves, ones, allow_unused=True)
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError, NotImplementedError):
            return None
    record.outs = outs
    others = (each for each in tree_leaves(out) if not isinstance(each, (Tensor, *PLAIN)))
    record.returns = next((type(each).__name__ for each in others), None)
    return record


class OperatorRecorder(TorchDispatchMode):
    """Records the ATen operators that are called, and the writes to the given storages."""

    def __init__(self, record: OperatorRecord, storages: set[int], *, backward: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record = record
        self._storages = storages
        self._backward = backward

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for argument, given in zip(schema(func).arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = storage_address(given.untyped_storage()) in self._storages
                self._record.writes = self._record.writes or (written and not self._backward)
        out = func(*args, **kwargs)
        # fake tensors call this for their device
        if func.namespace != "prim":
            try:
                kind = kind_of_operator(func, args, kwargs, out)
            except (TypeError, IndexError, ValueError):
                kind = "unknown"
            self._record.draws |= torch.Tag.nondeterministic_seeded in func.tags
            self._record.operators.append((kind, str(func), self._backward))
        return out


def _state() -> tuple[Any, ...]:
    return torch.is_grad_enabled(), *accelerator.autocast_dtypes()


def _pattern(item: Any, sizes: dict[int, int]) -> Any:
    """Return a hashable description, equal for calls that run the same operators. Each size of a
    tensor is replaced by the index of its first occurrence."""
    if isinstance(item, Tensor):
        shape = tuple(
            size if size < 2 else sizes.setdefault(size, len(sizes)) for size in item.shape
        )
        is_even = not item.dim() or item.stride(-1) == 1
        return (
            *(shape, item.dtype, item.device.type, item.requires_grad, is_even),
            mark_of(item),
        )
    if isinstance(item, dict):
        return tuple((name, _pattern(each, sizes)) for name, each in item.items())
    if isinstance(item, list | tuple):
        return tuple(_pattern(each, sizes) for each in item)
    # calls that differ only in a number (such as a scale) are tried once
    return type(item), None if isinstance(item, float) and item % 0.5 else repr(item)


def _why_refused(name: str, record: OperatorRecord) -> RecipeError:
    inexact = [each for each in record.operators if each[0] not in EXACT]
    kind, operator, is_backward = next(
        (each for each in inexact if each[0] != "by rows"), inexact[0]
    )
    if kind == "product":
        return other_product(name)
    if kind == "adds tokens":
        what = "whose gradient is a sum" if is_backward else "which adds"
        why = (
            f"{what} over dims before its last, in an order that may depend on the number of ranks"
        )
        return _refused(name, why)
    said = "backward" if is_backward else "forward"
    return _refused(name, f"whose {said} calls {operator}, not known to give a shard the same bits")


REMEDY = (
    "give the layers before and after it 'colwise_gathered' and 'rowwise_split', or leave slices"
    " and numerics=bitwise out"
)


def _refused(name: str, why: str) -> RecipeError:
    return RecipeError(
        f"{name} of a tensor that is sharded over the tensor axis, {why}; with slices, each"
        f" element must have the same bits on any number of ranks; {REMEDY}"
    )


def other_product(name: str) -> RecipeError:
    return RecipeError(
        f"{name} of a tensor that is sharded over the tensor axis; with slices, products between"
        " sharded layers are torch.matmul of two sharded tensors of shape (batch, heads, ., .), or"
        " scaled_dot_product_attention, so that each head has the same bits on any number of ranks;"
        f" write one of these, {REMEDY}"
    )
