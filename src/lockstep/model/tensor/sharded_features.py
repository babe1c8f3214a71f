"""Plain tensors that contain a shard of the features (or heads), between the layer that returns
them and the layer that takes them.

User code between these layers is written for full tensors; `ShardedFeatures` intercepts each torch
function that it calls:

- The result of a function of a sharded tensor is sharded. If the model returns one, that is an
  error.
- If an unsharded tensor meets a sharded one (the weight of a norm over each head, a learned scale),
  each rank computes a part of its gradient, which is all-reduced: parameters without a style have
  equal gradients on all ranks.
- Dropout of a sharded tensor draws the full mask, as one process does, and takes this rank's shard
  (law 2). The sharded dim is dim 1, the heads, of a tensor with four dims, and otherwise the last.
  Attention's dropout does so on a CPU. In a GPU's kernels, and in other random functions, each rank
  has its own seed.
- With slices (`sliced.py`), on any number of ranks, a function of each element gives an element the
  same bits at any place. What would depend on the number of ranks is refused: an unsharded tensor
  with a gradient that meets a sharded one, random numbers other than dropout, and a sharded weight
  used without its layer.
- A DTensor (sharded along the sequence, or a sharded weight used without its layer, as by a tied
  output layer) may meet plain tensors, which are unsharded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lockstep.base import accelerator
from lockstep.base.errors import RecipeError
from lockstep.base.torch_private import own_parameters, tree_leaves, tree_map
from lockstep.model.tensor.elementwise import elementwise, is_rounded_by_place, mapped, tensors_of
from lockstep.model.tensor.sharded_logits import ShardedLogits, gather_full
from lockstep.model.tensor.sliced import Slices, product_of_heads
from lockstep.model.tensor.token_sums import gradient_sums_tokens, sums_tokens

MARK = "_lockstep_sharded"
SEEDS = 2**32
DROPOUT = {F.dropout: "p", torch.dropout: "p"}
RANDOM = frozenset(
    getattr(owner, name)
    for owner, names in {
        F: "dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout gumbel_softmax rrelu",
        torch: "rand_like randn_like randint_like bernoulli multinomial normal poisson",
        Tensor: "bernoulli bernoulli_ normal_ uniform_ exponential_ multinomial",
    }.items()
    for name in names.split()
)
"""Functions that draw random numbers."""
MATMUL = frozenset({torch.matmul, Tensor.matmul, Tensor.__matmul__})
OTHER_PRODUCTS = frozenset(
    getattr(owner, name)
    for owner, names in {
        F: "linear bilinear conv1d conv2d conv3d",
        torch: "einsum bmm baddbmm addbmm mm addmm mv addmv dot inner tensordot cdist",
        Tensor: "bmm baddbmm baddbmm_ addbmm addbmm_ mm addmm addmm_ mv addmv addmv_ dot inner",
    }.items()
    for name in names.split()
)
"""Products of which lockstep does not know the heads."""


def mark_sharded(tensor: Tensor) -> Tensor:
    setattr(tensor, MARK, True)
    return tensor


def is_sharded(tensor: Any) -> bool:
    return hasattr(tensor, MARK)


class _AllReduceGradient(torch.autograd.Function):
    """The identity on an unsharded tensor, before it is combined with a sharded one. Its gradient
    is summed over the ranks."""

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
    """A model whose layers compute in slices."""

    model: nn.Module
    layers: Sequence[str]
    """The names of its sharded layers."""
    slices: Slices


class ShardedFeatures(TorchFunctionMode):
    """The mode around the forward of each module with sharded layers inside. It may be nested."""

    def __init__(self, mesh: DeviceMesh | None, sliced: SlicedModel | None = None) -> None:
        """`mesh`: None for one rank. `sliced`: None without slices."""
        super().__init__()
        self._mesh = mesh
        self._sliced = sliced
        self._rank, self._ranks = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())
        self._entered = 0

    def __enter__(self) -> Any:
        self._entered += 1
        return super().__enter__() if self._entered == 1 else self  # type: ignore[no-untyped-call]

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._entered -= 1
        if not self._entered:
            super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        distributed = sharded = False
        owner: str | None = None
        for tensor in tensors_of(args, kwargs):
            distributed = distributed or isinstance(tensor, DTensor)
            sharded = sharded or is_sharded(tensor)
            if owner is None and isinstance(tensor, nn.Parameter):
                owner = self._layer_of(tensor)
        if distributed:
            out = self._with_distributed(func, args, kwargs, sharded=sharded)
        else:
            out = self._with_sharded(func, args, kwargs) if sharded else func(*args, **kwargs)
        if owner is not None and torch.is_grad_enabled():
            _check_uses_no_weight(out, owner, func)
        return out

    def _with_sharded(self, func: Any, args: Any, kwargs: Any) -> Any:
        if (drop := self._drop(func, args, kwargs)) is not None:
            return _marked(drop())
        if func in RANDOM:
            return _marked(self._drawn_apart(func, args, kwargs))
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
                return _AllReduceGradient.apply(item, self._mesh.get_group())  # type: ignore[no-untyped-call]

            args, kwargs = mapped(with_full_gradient, args), mapped(with_full_gradient, kwargs)
        if self._sliced is not None:
            return _marked(self._in_slices(func, args, kwargs))
        return _marked(func(*args, **kwargs))

    def _in_slices(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in MATMUL:
            return self._product(func, *args, **kwargs)
        if func in OTHER_PRODUCTS:
            raise _other_product(func)
        if sums_tokens(func, args, kwargs):
            raise _sum_of_tokens(f"{func.__name__} of", "adds over its tokens")
        by_place = is_rounded_by_place(func, kwargs)
        out = elementwise(func, args, kwargs) if by_place else func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return out
        if gradient_sums_tokens(out, args, kwargs, is_sharded):
            name = getattr(func, "__name__", func)
            raise _sum_of_tokens(f"{name} broadcasts", "has a gradient that is a sum over tokens")
        return out

    def _product(self, func: Any, input: Tensor, other: Tensor) -> Tensor:
        assert self._sliced is not None
        both = (input, other)
        if any(each.dim() != 4 or not is_sharded(each) for each in both):
            raise _other_product(func)
        return product_of_heads(input, other, self._sliced.slices)

    def _layer_of(self, tensor: Tensor) -> str | None:
        """Return the name of the sharded layer that has this parameter."""
        if self._sliced is None:
            return None
        for name in self._sliced.layers:
            layer = self._sliced.model.get_submodule(name)
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
        """Return the computation if `func` is a dropout that drops something; else None."""
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func not in DROPOUT:
            return None
        given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
        tensor, p = given["input"], given.get("p", given.get("train", 0.5))
        training = given.get("training", given.get("train", True))
        return (lambda: self._masked(tensor, p)) if training and p else None

    def _masked(self, tensor: Tensor, p: float) -> Tensor:
        if isinstance(tensor, DTensor):
            mask = F.dropout(torch.ones(tensor.shape, dtype=tensor.dtype, device=tensor.device), p)
            return tensor * distribute_tensor(
                mask, tensor.device_mesh, tensor.placements, src_data_rank=None
            )
        dim = 1 if tensor.dim() == 4 else tensor.dim() - 1
        own = tensor.shape[dim]
        whole = [*tensor.shape[:dim], own * self._ranks, *tensor.shape[dim + 1 :]]
        mask = F.dropout(torch.ones(whole, dtype=tensor.dtype, device=tensor.device), p)
        return tensor * mask.narrow(dim, self._rank * own, own)

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
        """Return the computation of attention with dropout on a CPU, step by step, with the dropout
        mask of all heads."""
        if not dropout_p:
            return None
        if query.device.type != "cpu" or not is_sharded(query):
            further = {
                "attn_mask": attn_mask,
                "dropout_p": dropout_p,
                "is_causal": is_causal,
                "scale": scale,
                "enable_gqa": enable_gqa,
            }
            return lambda: self._drawn_apart(
                F.scaled_dot_product_attention, (query, key, value), further
            )

        product: Callable[[Tensor, Tensor], Tensor] = torch.matmul
        if self._sliced is not None:
            product = partial(product_of_heads, slices=self._sliced.slices)

        def attend() -> Tensor:
            groups = query.shape[-3] // key.shape[-3] if enable_gqa else 1
            keys, values = (
                tensor.repeat_interleave(groups, -3) if groups > 1 else tensor
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
            return product(self._masked(scores.softmax(-1), dropout_p), values)

        return attend

    def _drawn_apart(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call `func` with this rank's seed. The default generators advance by the same amount on
        all ranks."""
        device = next(tensors_of(args, kwargs)).device
        if self._sliced is not None:
            raise RecipeError(
                f"{getattr(func, '__name__', func)} of a tensor that is sharded over the tensor"
                f" axis, on {device.type}, with slices; each rank would draw random numbers of its"
                " own; use torch.nn.functional.dropout, draw outside of the sharded layers, or"
                " leave slices and numerics=bitwise out"
            )
        seed = int(torch.randint(SEEDS, (self._ranks,))[self._rank])
        with accelerator.preserved_generators(device):
            accelerator.generators_of([device])[-1].manual_seed(seed)
            return func(*args, **kwargs)


def _other_product(func: Any) -> RecipeError:
    return RecipeError(
        f"{getattr(func, '__name__', func)} of a tensor that is sharded over the tensor axis; with"
        " slices, products between sharded layers are torch.matmul of two sharded tensors of shape"
        " (batch, heads, ., .), or scaled_dot_product_attention, so that each head has the same"
        " bits on any number of ranks; write one of these, give the layers before and after it"
        " 'colwise_gathered' and 'rowwise_split', or leave slices and numerics=bitwise out"
    )


def _sum_of_tokens(what: str, why: str) -> RecipeError:
    return RecipeError(
        f"{what} a tensor that is sharded over the tensor axis, and {why}; with slices, the order"
        " of such a sum would depend on the number of ranks; give the layers before and after it"
        " 'colwise_gathered' and 'rowwise_split', or leave slices and numerics=bitwise out"
    )


def _check_uses_no_weight(out: Any, layer: str, func: Any) -> None:
    """Raise `RecipeError` if something was computed with a weight of a sharded layer."""
    if not any(
        each.requires_grad and not isinstance(each, nn.Parameter)
        for each in tree_leaves(out)
        if isinstance(each, Tensor)
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
    """Return a model's output with all DTensors gathered except `ShardedLogits`. Raises
    `RecipeError` if a plain tensor in it is sharded."""

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


def _marked(out: Any) -> Any:
    if isinstance(out, Tensor):
        return mark_sharded(out)
    if isinstance(out, list | tuple):
        for item in out:
            if isinstance(item, Tensor):
                mark_sharded(item)
    return out
