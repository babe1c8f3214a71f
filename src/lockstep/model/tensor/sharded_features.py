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
  (law 2). The sharded dim is dim 1, the heads, of a tensor with four dims, and otherwise the last;
  with slices it is followed (`sharded_dims.py`). Attention's dropout does so on a CPU. In a GPU's
  kernels, and in other random functions, each rank has its own seed.
- With slices (`sliced.py`), on any number of ranks, each function is called so that an element has
  the same bits in a shard as in the full tensor (`forms.py`), or refused: an unsharded tensor with
  a gradient that meets a sharded one, random numbers other than dropout, a sharded weight used
  without its layer, code that computes where lockstep does not see it, and every operator that is
  not known.
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
from torch.autograd.function import BackwardCFunction
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lockstep.base import accelerator
from lockstep.base.errors import RecipeError
from lockstep.base.torch_private import (
    checkpoints_saved_tensors,
    function_of,
    own_parameters,
    saved_tensor_hooks,
    tree_leaves,
    tree_map,
)
from lockstep.model.context.host_reads import READS
from lockstep.model.tensor.elementwise import mapped
from lockstep.model.tensor.forms import Forms, by_rows, other_product, repeated
from lockstep.model.tensor.marks import ONE, is_sharded, mark_sharded, marked, sharded_dim
from lockstep.model.tensor.operators import tensors_of
from lockstep.model.tensor.sharded_logits import ShardedLogits, gather_full
from lockstep.model.tensor.sliced import Slices, of_heads

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
OWN_FUNCTIONS = ("lockstep.", "torch.distributed.fsdp.", "torch.distributed.tensor.")
"""The modules of autograd.Functions that a sharded tensor may come from."""
MATMUL = frozenset({torch.matmul, Tensor.matmul, Tensor.__matmul__})


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
        self._forms = Forms()
        self._layers: dict[str, nn.Module] = {}
        if sliced is not None:
            self._layers = {name: sliced.model.get_submodule(name) for name in sliced.layers}
        # the hooks of saved tensors, where each forward began
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
        if func in READS and self._sliced is None:  # with slices, `Forms` refuses more
            raise RecipeError(
                f"the model reads a number of a shard of the features ({func.__name__} of a tensor"
                f" of shape {tuple(args[0].shape)}); each rank would read another number, and a"
                " branch on it would compute another model; read it before the first sharded layer"
                " or after the last; or give these layers 'colwise_gathered' and 'rowwise_split'"
            )
        if self._sliced is not None:
            if checkpoints_saved_tensors() and saved_tensor_hooks() != self._entered[-1]:
                raise unseen("torch.utils.checkpoint")
            for tensor in tensors_of(args, kwargs):
                check_backward(tensor)
        if (drop := self._drop(func, args, kwargs)) is not None:
            return mark_sharded(drop(), sharded_dim(tensors_of(args, kwargs)[0]))
        if func in RANDOM:
            return marked(self._drawn_apart(func, args, kwargs))
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
        if self._sliced is None:
            return marked(func(*args, **kwargs))
        if func in MATMUL:
            return self._product(func, *args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention_in_slices(*args, **kwargs)
        return self._forms.call(func, args, kwargs)

    def _product(self, func: Any, input: Tensor, other: Tensor) -> Tensor:
        return self._of_heads(func, func, input, other)

    def _of_heads(self, func: Any, compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Compute a function of all heads, for some at a time. `func`: torch's function."""
        assert self._sliced is not None
        # a shard of one head is multiplied with the heads in the dim of the others
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
        if is_sharded(attn_mask):

            def with_mask(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
                return func(query, key, value, mask, dropout_p, is_causal, **further)

            assert attn_mask is not None
            return self._of_heads(func, with_mask, query, key, value, attn_mask)
        compute = partial(
            func, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, **further
        )
        return self._of_heads(func, compute, query, key, value)

    def _layer_of(self, tensor: Tensor) -> str | None:
        """Return the name of the sharded layer that has this parameter."""
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

    def _masked(self, tensor: Tensor, p: float, dim: int | None = None) -> Tensor:
        """Return the tensor with some elements dropped. `dim`: its sharded dim, if not marked."""
        if isinstance(tensor, DTensor):
            mask = F.dropout(torch.ones(tensor.shape, dtype=tensor.dtype, device=tensor.device), p)
            return tensor * distribute_tensor(
                mask, tensor.device_mesh, tensor.placements, src_data_rank=None
            )
        dim = sharded_dim(tensor) if dim is None else dim
        if self._sliced is None:
            dim = 1 if tensor.dim() == 4 else tensor.dim() - 1
        elif dim is None or dim == ONE:
            raise RecipeError(
                "dropout of a tensor that is sharded over the tensor axis, whose heads or features"
                " are not in a dim that lockstep can follow; with slices, each rank takes its part"
                " of one mask; write query.view(batch, length, -1, head_dim), with -1 for the"
                " heads, and drop before heads are merged with other dims, or leave slices and"
                " numerics=bitwise out"
            )
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

        dim = sharded_dim(query)
        product: Callable[[Tensor, Tensor], Tensor] = torch.matmul
        if self._sliced is not None:
            dims = {dim, sharded_dim(key), sharded_dim(value), query.dim() - 3} - {ONE}
            if len(dims) != 1 or dim in (None, ONE) or is_sharded(attn_mask):
                raise other_product("scaled_dot_product_attention with dropout")

            def product(left: Tensor, right: Tensor) -> Tensor:
                assert self._sliced is not None
                assert dim is not None, "checked above"
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
            weights = by_rows(torch.softmax, (scores, -1), {})
            return product(self._masked(weights, dropout_p, dim), values)

        return attend

    def _drawn_apart(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call `func` with this rank's seed. The default generators advance by the same amount on
        all ranks."""
        device = tensors_of(args, kwargs)[0].device
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


def check_backward(tensor: Tensor) -> None:
    """Raise `RecipeError` if a sharded tensor was returned by a user's autograd.Function."""
    node: Any = tensor.grad_fn
    if isinstance(node, BackwardCFunction) and is_sharded(tensor):
        function = function_of(node)
        if not function.__module__.startswith(OWN_FUNCTIONS):
            raise unseen(f"the backward of {function.__name__}")


def unseen(what: str) -> RecipeError:
    return RecipeError(
        f"{what}, between layers that are sharded over the tensor axis; it computes in the"
        " backward, where lockstep does not see its functions; with slices, each element must have"
        " the same bits on any number of ranks; write it with torch's own functions, checkpoint the"
        " module around these layers (as checkpointing=full does), or leave slices and"
        " numerics=bitwise out"
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
