"""Finds the dim of a function's result that holds the shard of the features or heads. Repeated
calls are not analysed again."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional as F

from lockstep.base.errors import RecipeError
from lockstep.base.nested import tree_tensors
from lockstep.base.torch_private import base_of
from lockstep.model.tensor.elementwise import mapped
from lockstep.model.tensor.forms import PLAIN, OperatorRecord, OperatorRecorder, apart
from lockstep.model.tensor.marks import (
    UNKNOWN,
    Shard,
    is_sharded,
    mark_of,
    mark_sharded,
    marked,
    set_mark,
)
from lockstep.model.tensor.sharded_dims import check_drawn, shards_of

MOST = 10_000
"""Largest number of analysed calls that are kept. The number is limited, because code may call a
function with new sizes in each step."""


CREATES = frozenset(
    {Tensor.new_empty, Tensor.new_full, Tensor.new_ones, Tensor.new_tensor, Tensor.new_zeros}
)
"""Methods that make a new tensor, and use only the dtype and device of the old tensor."""


class ShardTracking:
    def __init__(self) -> None:
        self._known: dict[Any, _TrackedCall] = {}

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        key = func, _pattern(args), _pattern(kwargs)
        known = self._known.get(key)
        if known is not None:
            out = func(*args, **kwargs)
        else:
            out, known = _tracked_call(func, args, kwargs)
            if len(self._known) > MOST:
                self._known.clear()
            self._known[key] = known
        if known.writes:
            _mark_written(args[0], known.shards[0])
        elif known.shards:
            marked(out, known.shards)
        return out


class _TrackedCall(NamedTuple):
    """The facts about one distinct call of a torch function with sharded tensors."""

    shards: list[Shard]
    writes: bool
    """True if the call writes a shard into an unsharded first argument."""


def _tracked_call(func: Any, args: Any, kwargs: Any) -> tuple[Any, _TrackedCall]:
    def before(item: Any) -> Any:
        # the function may change the shape of its argument
        return set_mark(item.detach(), mark_of(item)) if isinstance(item, Tensor) else item

    with apart():
        given = mapped(before, args), mapped(before, kwargs)
    name = getattr(func, "__name__", str(func))
    written = args[0] if args and name.endswith("_") else None
    writes = isinstance(written, Tensor) and not is_sharded(written)
    writes = writes and (func is Tensor.__setitem__ or not name.endswith("__"))
    record = OperatorRecord()
    with OperatorRecorder(record, set(), backward=False):
        out = func(*args, **kwargs)
    outs = tree_tensors(out)
    if record.draws and func is not F.scaled_dot_product_attention:
        raise RecipeError(
            f"{name} of a tensor that is sharded over the tensor axis, which draws random numbers"
            " that are not those of the full tensor; use torch.nn.functional.dropout, or give the"
            " layers before and after it 'colwise_gathered' and 'rowwise_split'"
        )
    if func is Tensor.__setitem__:
        func, outs = _written, [args[0]]
    with apart():
        shards = shards_of(func, *given, record.kinds_in_order(), outs)
        check_drawn(func, *given, shards)
    if func in CREATES and UNKNOWN in shards:
        shards = []
    return out, _TrackedCall(shards, writes)


def _written(target: Tensor, *item: Any) -> Tensor:
    Tensor.__setitem__(target, *item)
    return target


def _mark_written(target: Tensor, shard: Shard) -> None:
    set_mark(target, shard)
    if not is_sharded(base := base_of(target)):
        mark_sharded(base)


def _pattern(item: Any) -> Any:
    if isinstance(item, Tensor):
        mark = mark_of(item)
        return item.shape, mark, mark and item.stride()
    if isinstance(item, list | tuple):
        return tuple(map(_pattern, item))
    if isinstance(item, dict):
        return tuple((name, _pattern(each)) for name, each in item.items())
    if isinstance(item, slice):
        return slice, item.start, item.stop, item.step
    # calls that differ only in a number (such as a scale) are analysed once
    return item if isinstance(item, PLAIN) and not isinstance(item, float) else type(item)
