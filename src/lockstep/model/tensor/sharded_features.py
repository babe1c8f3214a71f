"""Handles plain tensors of the `tensor` axis that hold this rank's shard of the features (or
heads). Activations between a `colwise` layer and a `rowwise` layer hold a shard of the features.
User code between the two layers is written for full tensors. `ShardedFeatures` intercepts each
torch function that the user's code calls:

- The result of a function of a sharded tensor is sharded. A model that returns a sharded tensor
  gets an error.
- User code may combine an unsharded tensor with a sharded one, for example the weight of a norm
  over each head. The ranks compute parts of the unsharded tensor's gradient, and all-reduce the
  parts.
- `any` and `all` of a sharded tensor are computed for the full tensor.
- Dropout of a sharded tensor draws the full mask, as one process does, and takes this rank's shard.
  In a GPU's attention kernels, each rank has a different seed. Random functions other than dropout
  and attention are called with the full tensor.
- Random numbers from another source must not have the shape of a sharded tensor that they are
  combined with. The user's code may have drawn the numbers in the shape of a shard, with equal
  numbers on all ranks.
- With slices (equal bits on any number of ranks), each function is called in a form in which an
  element has the same bits in a shard as in the full tensor (`forms.py`). Slices refuse the
  combination of a sharded tensor with an unsharded tensor that has a gradient, random numbers other
  than dropout, a sharded weight used without its layer, code whose torch functions lockstep cannot
  intercept, and every unknown operator.
- A DTensor may be combined with unsharded plain tensors. The DTensor is sharded along the sequence,
  or is a sharded weight used without its layer, for example by a tied output layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard as Sharded,
    distribute_tensor,
)
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from lockstep.base import accelerator
from lockstep.base.errors import RecipeError
from lockstep.base.nested import tree_tensors
from lockstep.base.torch_private import (
    checkpoints_saved_tensors,
    function_of,
    own_parameters,
    saved_tensor_hooks,
    tree_map,
)
from lockstep.model.host_values import ARRAYS, READS
from lockstep.model.random_functions import DROPOUT, draws, writes
from lockstep.model.tensor.elementwise import mapped
from lockstep.model.tensor.forms import Forms, by_rows, other_product, repeated
from lockstep.model.tensor.marks import (
    DRAWN,
    ONE,
    Shard,
    full_like,
    is_sharded,
    mark_of,
    mark_sharded,
    order_in_memory,
    set_mark,
    sharded_dim,
)
from lockstep.model.tensor.operators import tensors_of
from lockstep.model.tensor.shard_tracking import ShardTracking
from lockstep.model.tensor.sharded_dims import check_drawn
from lockstep.model.tensor.sharded_logits import ShardedLogits, gather_full
from lockstep.model.tensor.sliced import Slices, of_heads

SEEDS = 2**32
VALUES = READS | ARRAYS | {Tensor.register_hook}
"""Functions that give a tensor's values to code that lockstep cannot intercept, such as Python,
numpy and gradient hooks."""
ANSWERS = {
    **dict.fromkeys((torch.any, Tensor.any), dist.ReduceOp.MAX),
    **dict.fromkeys((torch.all, Tensor.all), dist.ReduceOp.MIN),
}
OWN_FUNCTIONS = ("lockstep.", "torch.distributed.fsdp.", "torch.distributed.tensor.")
"""Prefixes of the Python modules of lockstep and torch whose autograd.Functions may return a
sharded tensor."""
OWN_HOOKS = (*OWN_FUNCTIONS, "torch.autograd.graph", "torch.utils.module_tracker")
MATMUL = frozenset({torch.matmul, Tensor.matmul, Tensor.__matmul__})


class _AllReduceGradient(torch.autograd.Function):
    """The identity on an unsharded tensor. The gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        summed = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


@dataclass(frozen=True, slots=True)
class SlicedModel:
    model: nn.Module
    layers: Sequence[str]
    slices: Slices


class ShardedFeatures(TorchFunctionMode):
    """The torch function mode that is active in the forward of each module with sharded submodules.
    The mode may be entered again inside itself."""

    def __init__(self, mesh: DeviceMesh | None, sliced: SlicedModel | None = None) -> None:
        super().__init__()
        self._mesh = mesh
        self._sliced = sliced
        self._rank, self._ranks = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())
        self._forms = Forms()
        self._tracking = ShardTracking()
        self._layers: dict[str, nn.Module] = {}
        if sliced is not None:
            self._layers = {name: sliced.model.get_submodule(name) for name in sliced.layers}
        # the saved-tensor hooks that were active when each forward began
        self._entered: list[Any] = []

    @property
    def is_entered(self) -> bool:
        return bool(self._entered)

    def __enter__(self) -> Any:
        self._entered.append(saved_tensor_hooks())
        return self if len(self._entered) > 1 else super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._entered.pop()
        if not self._entered:
            super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        distributed = sharded = drawn = False
        owner: str | None = None
        for tensor in tensors_of(args, kwargs):
            distributed = distributed or isinstance(tensor, DTensor)
            mark = mark_of(tensor)
            sharded = sharded or isinstance(mark, Shard)
            drawn = drawn or mark is DRAWN
            if owner is None and isinstance(tensor, nn.Parameter):
                owner = self._layer_of(tensor)
        if distributed:
            out = self._with_distributed(func, args, kwargs, sharded=sharded)
        elif sharded:
            out = self._with_sharded(func, args, kwargs)
        else:
            out = func(*args, **kwargs)
            if drawn or draws(func, args, kwargs):
                _mark_drawn(out, args, kwargs)
        if owner is not None and torch.is_grad_enabled():
            _check_uses_no_weight(out, owner, func)
        return out

    def _with_sharded(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._sliced is not None:
            self._refuse_checkpoint()
            for tensor in tensors_of(args, kwargs):
                check_backward(tensor)
        if func in ANSWERS and len(args) == 1 and not kwargs:
            return self._answer(func, *args)
        if func in VALUES and not _is_own_hook(args):
            raise _of_values(func)
        if func is F.scaled_dot_product_attention or func in MATMUL:
            check_drawn(func, args, kwargs, ())
        if torch.is_grad_enabled() and any(
            _needs_gradient(tensor) for tensor in tensors_of(args, kwargs)
        ):
            if self._sliced is not None:
                self._refuse_unsharded(func, args, kwargs)
            name = getattr(func, "__name__", "")
            if name.endswith("_") and not name.endswith("__") and _needs_gradient(args[0]):
                raise RecipeError(
                    f"Tensor.{name} writes a tensor that is sharded over the tensor axis into an "
                    f"unsharded one with a gradient, of shape {tuple(args[0].shape)}; that "
                    "gradient would be incomplete on each rank; write it out of place"
                )

            def with_full_gradient(item: Any) -> Any:
                if not _needs_gradient(item):
                    return item
                assert self._mesh is not None, "one rank has slices, and refuses it"
                whole: Tensor = _AllReduceGradient.apply(item, self._mesh.get_group())  # type: ignore[no-untyped-call]
                return set_mark(whole, mark_of(item))

            args, kwargs = mapped(with_full_gradient, args), mapped(with_full_gradient, kwargs)
        drop = self._drop(func, args, kwargs)
        if drop is not None or draws(func, args, kwargs):
            self._refuse_checkpoint()
            if drop is None:
                return self._drawn_in_full(func, args, kwargs)
            return set_mark(drop(), mark_of(tensors_of(args, kwargs)[0]))
        if self._sliced is None:
            return self._tracking.call(func, args, kwargs)
        if func in MATMUL:
            return self._product(func, *args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention_in_slices(*args, **kwargs)
        return self._forms.call(func, args, kwargs)

    def _refuse_checkpoint(self) -> None:
        if checkpoints_saved_tensors() and saved_tensor_hooks() != self._entered[-1]:
            raise unseen_backward("torch.utils.checkpoint")

    def _answer(self, func: Any, tensor: Tensor) -> Tensor:
        own: Tensor = func(tensor)
        if self._mesh is None:
            return own
        answer = own.int()
        dist.all_reduce(answer, ANSWERS[func], self._mesh.get_group())
        return answer.to(own.dtype)

    def _product(self, func: Any, input: Tensor, other: Tensor) -> Tensor:
        return self._of_heads(func, func, input, other)

    def _of_heads(self, func: Any, compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        assert self._sliced is not None
        # a shard of one head without a known dim takes the dim of the other tensors
        dims = {sharded_dim(each) for each in tensors} - {ONE}
        dim = dims.pop() if len(dims) == 1 else None
        count = tensors[0].dim()
        if dim is None or dim >= count - 2 or any(each.dim() != count for each in tensors):
            raise other_product(func.__name__)
        return mark_sharded(of_heads(compute, tensors, dim, self._sliced.slices), dim)

    def _attention_in_slices(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **further: Any,
    ) -> Tensor:
        func = F.scaled_dot_product_attention
        compute = partial(func, dropout_p=dropout_p, is_causal=is_causal, **further)
        if attn_mask is not None and is_sharded(attn_mask):
            return self._of_heads(func, compute, query, key, value, attn_mask)
        return self._of_heads(func, partial(compute, attn_mask=attn_mask), query, key, value)

    def _layer_of(self, tensor: Tensor) -> str | None:
        for name, layer in self._layers.items():
            if any(tensor is each for each in own_parameters(layer).values()):
                return name
        return None

    def _refuse_unsharded(self, func: Any, args: Any, kwargs: Any) -> None:
        assert self._sliced is not None
        met = next(filter(_needs_gradient, tensors_of(args, kwargs)))
        named = {id(each): name for name, each in self._sliced.model.named_parameters()}
        what = named.get(id(met), f"a tensor of shape {tuple(met.shape)}")
        raise RecipeError(
            f"{getattr(func, '__name__', func)} of {what}, which is not sharded and has a gradient,"
            " and a tensor that is sharded over the tensor axis; with slices, its gradient would be"
            " a sum over heads or features in an order that depends on the number of ranks; give"
            " the layers before and after it 'colwise_gathered' and 'rowwise_split', freeze it, or"
            " leave slices and numerics=bitwise out"
        )

    def _with_distributed(self, func: Any, args: Any, kwargs: Any, *, sharded: bool) -> Any:
        if (drop := self._drop(func, args, kwargs)) is not None:
            return drop()
        if draws(func, args, kwargs):
            return _drawn_in_full_sequence(func, args, kwargs)
        tensors = list(tensors_of(args, kwargs))
        if all(isinstance(tensor, DTensor) for tensor in tensors):
            return func(*args, **kwargs)
        if sharded:
            raise RecipeError(
                f"{getattr(func, '__name__', func)} of a tensor that is sharded over the features "
                "and one that is sharded over the sequence, or a sharded parameter; pass the "
                "first through a 'rowwise_sequence' layer, or call that parameter's layer"
            )
        if any(isinstance(tensor, ShardedLogits) for tensor in tensors):
            return func(*args, **kwargs)
        args, kwargs = (mapped(self._replicated, nest) for nest in (args, kwargs))
        out = func(*args, **kwargs)
        by_parameters = all(
            isinstance(tensor, nn.Parameter) for tensor in tensors if isinstance(tensor, DTensor)
        )
        return tree_map(gather_full, out) if by_parameters else out

    def _replicated(self, item: Any) -> Any:
        if not isinstance(item, Tensor) or isinstance(item, DTensor):
            return item
        assert self._mesh is not None, "one rank has no DTensors of this axis"
        return DTensor.from_local(item, self._mesh, (Replicate(),), run_check=False)

    def _drop(self, func: Any, args: Any, kwargs: Any) -> Callable[[], Tensor] | None:
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func not in DROPOUT:
            return None
        given = dict(zip(("input", "p"), args, strict=False)) | kwargs
        tensor, p = given["input"], given.get("p", 0.5)
        if not draws(func, args, kwargs):
            return None
        if writes(func, args, kwargs):
            return lambda: tensor.mul_(self._mask(tensor, p))
        return lambda: tensor * self._mask(tensor, p)

    def _mask(self, tensor: Tensor, p: float) -> Tensor:
        """Draw a dropout mask in the memory layout that the full tensor has in one process, and
        return this rank's shard of the mask."""
        if isinstance(tensor, DTensor):
            shape, order = tensor.shape, order_in_memory(tensor.shape, tensor.stride())
            return distribute_tensor(
                _drawn_mask(shape, order, tensor, p),
                tensor.device_mesh,
                tensor.placements,
                src_data_rank=None,
            )
        dim = self._dim_to_draw(tensor, "dropout")
        whole, order = full_like(tensor, self._ranks)
        own = tensor.shape[dim]
        return _drawn_mask(whole, order, tensor, p).narrow(dim, self._rank * own, own)

    def _dim_to_draw(self, tensor: Tensor, name: str) -> int:
        dim = sharded_dim(tensor)
        if dim is None or dim == ONE:
            raise RecipeError(
                f"{name} of a tensor of shape {tuple(tensor.shape)} that is sharded over the tensor"
                " axis, whose heads or features are not in a dim that lockstep can follow; each"
                " rank takes its part of the numbers that one process draws; write"
                " query.view(batch, length, -1, head_dim), with -1 for the heads, and drop before"
                " heads are merged with other dims, or give the layers before and after it"
                " 'colwise_gathered' and 'rowwise_split'"
            )
        return dim

    def _drawn_in_full(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func.__name__
        if self._sliced is not None:
            raise RecipeError(
                f"{name} of a tensor that is sharded over the tensor axis, with slices; each rank"
                " takes its part of one mask only for torch.nn.functional.dropout; use it, draw"
                " outside of the sharded layers, or leave slices and numerics=bitwise out"
            )
        first = next(each for each in tensors_of(args, kwargs) if is_sharded(each))
        dim = self._dim_to_draw(first, name)
        size = first.shape[dim] * self._ranks

        def own(out: Any) -> Any:
            if not isinstance(out, Tensor):
                return out
            if out.dim() <= dim or out.shape[dim] != size:
                raise RecipeError(
                    f"{name} of a tensor that is sharded over the tensor axis, which returns a"
                    f" tensor of shape {tuple(out.shape)}, without the dim {dim} of the heads or"
                    " features; give the layers before and after it 'colwise_gathered' and"
                    " 'rowwise_split'"
                )
            part = out.narrow(dim, self._rank * first.shape[dim], first.shape[dim])
            return mark_sharded(part, dim)

        given = mapped(self._full, args), mapped(self._full, kwargs)
        out = tree_map(own, func(*given[0], **given[1]))
        return first.copy_(out) if writes(func, args, kwargs) else out

    def _full(self, item: Any) -> Any:
        """Gather a sharded tensor, in the memory layout that the full tensor has in one process."""
        if not is_sharded(item):
            return item
        assert self._mesh is not None, "one rank has slices, and refuses it"
        dim = self._dim_to_draw(item, "a random function")
        _, order = full_like(item, self._ranks)
        part = DTensor.from_local(
            item.permute(order).contiguous(),
            self._mesh,
            (Sharded(order.index(dim)),),
            run_check=False,
        )
        # a function may write the tensor
        full = part.full_tensor(grad_placements=[Partial()]).clone()
        return full.permute(_inverse(order))

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Callable[[], Tensor] | None:
        """Return None without dropout. On a CPU, attention uses this rank's part of the dropout
        mask of all heads. On a GPU, torch's attention gets a different seed on each rank."""
        if not dropout_p:
            return None
        if query.device.type != "cpu" or not is_sharded(query):
            options = (attn_mask, dropout_p, is_causal)
            further = {"scale": scale, "enable_gqa": enable_gqa}
            return lambda: self._drawn_apart(query, key, value, *options, **further)

        dim = self._dim_to_draw(query, "scaled_dot_product_attention with dropout")
        product: Callable[[Tensor, Tensor], Tensor] = torch.matmul
        if self._sliced is not None:
            dims = {dim, sharded_dim(key), sharded_dim(value), query.dim() - 3} - {ONE}
            if len(dims) != 1 or is_sharded(attn_mask):
                raise other_product("scaled_dot_product_attention with dropout")

            def product(left: Tensor, right: Tensor) -> Tensor:
                assert self._sliced is not None
                return of_heads(torch.matmul, (left, right), dim, self._sliced.slices)

        def attend() -> Tensor:
            groups = query.shape[-3] // key.shape[-3] if enable_gqa else 1
            keys, values = (
                repeated(torch.repeat_interleave, (tensor, groups, -3), {})
                if groups > 1
                else tensor
                for tensor in (key, value)
            )
            factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
            scores = product(query, keys.transpose(-2, -1)) * factor
            allowed = attn_mask
            if is_causal:
                whole = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
                allowed = whole.tril()
            if allowed is not None and allowed.dtype is torch.bool:
                scores = scores.masked_fill(~allowed, -math.inf)
            elif allowed is not None:
                scores = scores + allowed
            weights = mark_sharded(by_rows(torch.softmax, (scores, -1), {}), dim)
            return product(weights * self._mask(weights, dropout_p), values)

        return attend

    def _drawn_apart(self, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute attention with a seed that differs between the ranks. The default generators
        advance by the same amount on all ranks."""
        device = query.device
        if self._sliced is not None:
            raise RecipeError(
                "scaled_dot_product_attention with dropout, of a tensor that is sharded over the"
                f" tensor axis, on {device.type}, with slices; each rank would draw different"
                " random numbers; leave its dropout out, write it with matmul, softmax and"
                " torch.nn.functional.dropout, or leave slices and numerics=bitwise out"
            )
        seed = int(torch.randint(SEEDS, (self._ranks,))[self._rank])
        with accelerator.preserved_generators(device):
            accelerator.generators_of([device])[-1].manual_seed(seed)
            return F.scaled_dot_product_attention(query, *args, **kwargs)


def _drawn_mask(shape: Sequence[int], order: Sequence[int], like: Tensor, p: float) -> Tensor:
    ones = torch.ones([shape[dim] for dim in order], dtype=like.dtype, device=like.device)
    return F.dropout(ones, p).permute(_inverse(order))


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=lambda place: order[place])


def _drawn_in_full_sequence(func: Any, args: Any, kwargs: Any) -> Any:
    first = next(each for each in tensors_of(args, kwargs) if isinstance(each, DTensor))

    def own(out: Any) -> Any:
        if not isinstance(out, Tensor) or out.shape != first.shape:
            return out
        whole = DTensor.from_local(out, first.device_mesh, (Replicate(),), run_check=False)
        return whole.redistribute(placements=first.placements)

    given = mapped(gather_full, args), mapped(gather_full, kwargs)
    if not writes(func, args, kwargs):
        return tree_map(own, func(*given[0], **given[1]))
    whole = given[0][0].clone()
    return first.copy_(own(func(whole, *given[0][1:], **given[1])))


def _mark_drawn(out: Any, args: Any, kwargs: Any) -> None:
    """Mark `out` as derived from random numbers. `out` is not marked if an argument of the same
    shape requires a gradient, because its shape is then not the shape of a shard."""
    shapes = [
        each.shape
        for each in tensors_of(args, kwargs)
        if each.requires_grad and mark_of(each) is not DRAWN
    ]
    for each in tree_tensors(out):
        if each.numel() > 1 and not (each.requires_grad and each.shape in shapes):
            set_mark(each, DRAWN)


def _of_values(func: Any) -> RecipeError:
    return RecipeError(
        f"{func.__name__} of a tensor that is sharded over the tensor axis; each rank has only the"
        " values of its heads or features, so ranks would take different branches; call it before"
        " the 'colwise' layer or after the 'rowwise' one, or give these layers 'colwise_gathered'"
        " and 'rowwise_split'"
    )


def check_backward(tensor: Tensor) -> None:
    """A user's autograd.Function must not return a sharded tensor, because lockstep cannot
    intercept its backward."""
    node: Any = tensor.grad_fn
    if isinstance(node, BackwardCFunction) and is_sharded(tensor):
        function = function_of(node)
        if not function.__module__.startswith(OWN_FUNCTIONS):
            raise unseen_backward(f"the backward of {function.__name__}")


def _is_own_hook(args: Any) -> bool:
    hook = args[1] if len(args) > 1 else None
    return str(getattr(hook, "__module__", "")).startswith(OWN_HOOKS)


def check_gradients(given: Tensor, layer: str) -> None:
    """Raise `RecipeError` if a sharded tensor was computed from an unsharded parameter by a
    function that lockstep has not intercepted. Without the error, each rank would get an incomplete
    gradient of the parameter."""
    todo, known = [given.grad_fn], set()
    while todo:
        node: Any = todo.pop()
        if node is None or node in known:
            continue
        known.add(node)
        if isinstance(node, BackwardCFunction):
            function = function_of(node)
            if function.__module__.startswith(OWN_FUNCTIONS):
                continue
            if function is CheckpointFunction:
                raise unsummed(f"torch.utils.checkpoint with use_reentrant=True, before {layer}")
        elif hasattr(node, "variable"):
            shape = tuple(node.variable.shape)
            raise unsummed(f"a parameter of shape {shape}, in the input of {layer}")
        todo += [each for each, _ in node.next_functions]


def unsummed(what: str) -> RecipeError:
    return RecipeError(
        f"{what}, whose gradient lockstep does not sum over the ranks of the tensor axis: between"
        " sharded layers it must see each function that combines the two (no"
        " torch.autograd.Function of your own, torch.func or torch.jit); write it with torch's own"
        " functions, use use_reentrant=False, or give the layers before and after it"
        " 'colwise_gathered' and 'rowwise_split'"
    )


def unseen_backward(what: str) -> RecipeError:
    return RecipeError(
        f"{what}, between layers that are sharded over the tensor axis; it computes in the"
        " backward, where lockstep does not see its functions; with slices, each element must have"
        " the same bits on any number of ranks; write it with torch's own functions, checkpoint the"
        " module around these layers (as checkpointing=full does), or leave slices and"
        " numerics=bitwise out"
    )


def _check_uses_no_weight(out: Any, layer: str, func: Any) -> None:
    if not any(
        each.requires_grad and not isinstance(each, nn.Parameter) for each in tree_tensors(out)
    ):
        return
    name = getattr(func, "__name__", func)
    raise RecipeError(
        f"{name} of a weight of {layer}, which is sharded over the tensor axis, outside of that"
        " layer; with slices, only the layer computes with its weight in the same order on any"
        " number of ranks; call a layer that shares the weight (tied, with the style 'vocabulary'),"
        f" or leave {layer} out of Recipe.tensor"
    )


def checked_output(output: Any, name: str) -> Any:
    """Gather all DTensors in a model's output except `ShardedLogits`."""

    def leave(item: Any) -> Any:
        if is_sharded(item):
            raise RecipeError(
                f"an output of {name}, of shape {tuple(item.shape)} on each rank, is sharded over "
                "the tensor axis, so the loss would see a part of it; end with a 'rowwise' layer, "
                "or give the output layer the style 'vocabulary' or 'colwise_gathered'"
            )
        return item if isinstance(item, ShardedLogits) else gather_full(item)

    return tree_map(leave, output)


def _needs_gradient(item: Any) -> bool:
    return isinstance(item, Tensor) and item.requires_grad and not is_sharded(item)
