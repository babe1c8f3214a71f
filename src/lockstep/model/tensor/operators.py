"""The kinds of ATen operators, by the bits that they compute for a shard of the features or
heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

Kind = Literal[
    "keeps", "moves", "exact", "by place", "by rows", "adds tokens", "product", "unknown"
]
"""An operator of kind `keeps` copies elements to the same position, and `moves` to another
position. `exact` rounds the value of each element only once. `by place` is an elementwise function
that a CPU rounds differently at the end of a tensor. `by rows` computes each row of a contiguous
tensor separately. `adds tokens` is a sum over dims before the last. `product` is a matrix product
or convolution. `adds tokens`, `product` and `unknown` are refused."""
EXACT: frozenset[Kind] = frozenset({"keeps", "moves", "exact"})


def _set(names: str) -> frozenset[str]:
    return frozenset(names.split())


KEEPS = _set(
    "_to_copy alias arange clone copy detach empty empty_like empty_strided expand eye fill full"
    " full_like lift lift_fresh new_empty new_empty_strided new_full new_ones new_zeros ones"
    " ones_like scalar_tensor zero zeros zeros_like"
)
MOVES = _set(
    "_reshape_alias _unsafe_view cat constant_pad_nd diagonal_backward flip gather index"
    " index_select repeat roll select_backward select_scatter slice_backward slice_scatter stack"
    " tril triu"
)
ROUNDED_ONCE = _set(
    "abs add amax amin bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max"
    " clamp_min copysign div eq floor fmax fmin ge gt hardtanh hardtanh_backward heaviside isfinite"
    " isinf isnan le leaky_relu leaky_relu_backward logical_and logical_not logical_or logical_xor"
    " lt masked_fill maximum minimum mul nan_to_num ne neg pow reciprocal relu round rsqrt rsub sgn"
    " sign signbit sqrt sub threshold threshold_backward trunc where"
)
"""Operators that round each element once, or twice in a fixed order, at any position in the
tensor."""
EXPONENTS = (-2, -1, -0.5, 0, 0.5, 1, 2, 3)
"""The exponents for which torch computes `pow` by a product, quotient or root. A product, quotient
or root has the same bits at any position in the tensor."""
UNTAGGED = _set(
    "elu_backward hardsigmoid hardsigmoid_backward hardswish hardswish_backward"
    " log_sigmoid_backward log_sigmoid_forward mish_backward softplus_backward"
)
"""Elementwise operators that lack `torch.Tag.pointwise`."""
ROWS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("sum", "mean"), lambda given, dim=None, *_, **__: dim),
    "linalg_vector_norm": lambda given, _=2, dim=None, *__, **___: dim,
    "_softmax": lambda given, dim, *_: dim,
    "_log_softmax": lambda given, dim, *_: dim,
    "_safe_softmax": lambda given, dim, *_: dim,
    "_softmax_backward_data": lambda slope, _, dim, __: dim,
    "_log_softmax_backward_data": lambda slope, _, dim, __: dim,
    "native_layer_norm": lambda given, shape, *_: range(-len(shape), 0),
    "_fused_rms_norm": lambda given, shape, *_: range(-len(shape), 0),
    "native_layer_norm_backward": lambda slope, _, shape, *rest: (
        None if any(rest[-1][1:]) else range(-len(shape), 0)
    ),
    "_fused_rms_norm_backward": lambda slope, _, shape, *rest: (
        None if any(rest[-1][1:]) else range(-len(shape), 0)
    ),
}
"""Maps each operator that sums over dims to a function that returns the dims of a call, or None for
all dims. `var` and `std` are missing, because they sum the only row of a tensor in another
order."""
PRODUCTS = _set(
    "addbmm addmm addmv addr baddbmm bmm convolution convolution_backward dot mm mv vdot"
)

IN_ORDER = _set(
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu"
    " _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"
    " all any argmax argmin avg_pool1d avg_pool2d cummax cummin cumprod cumsum logcumsumexp max"
    " max_pool2d_with_indices mean min native_batch_norm native_group_norm prelu prod sort std topk"
    " var var_mean"
)


def kind_of_operator(operator: Any, args: Any, kwargs: Any, out: Any) -> Kind:
    name, _, overload = operator.name().partition("::")[2].partition(".")
    name = name.rstrip("_")
    tensors = list(tensors_of(args, kwargs))
    if operator.namespace != "aten" or torch.Tag.nondeterministic_seeded in operator.tags:
        return "unknown"
    if name in PRODUCTS:
        return "product"
    if name in KEEPS:
        return "keeps"
    if operator.is_view or name in MOVES:
        return "moves"
    if name in ROWS:
        return _kind_of_sum(tensors[0], ROWS[name](*args, **kwargs))
    if name in ROUNDED_ONCE and _is_rounded_once(name, overload, args, kwargs, tensors):
        return "exact"
    if torch.Tag.pointwise in operator.tags or name in UNTAGGED:
        return "by place"
    counts = tensors and not any(_is_inexact(each) for each in tensors)
    return "exact" if counts and isinstance(out, Tensor) else "unknown"


def _kind_of_sum(given: Tensor, dims: Any) -> Kind:
    if not _is_inexact(given):
        return "exact"
    each = [dims] if isinstance(dims, int) else list(dims or range(given.dim()))
    each = sorted({dim % given.dim() for dim in each if given.shape[dim] != 1}) if each else []
    if each != list(range(given.dim() - len(each), given.dim())) or len(each) == given.dim() > 1:
        return "adds tokens"
    return "by rows" if given.is_contiguous() else "adds tokens"


def _is_rounded_once(name: str, overload: str, args: Any, kwargs: Any, tensors: Any) -> bool:
    if any(each.is_complex() for each in tensors):
        return False
    if name in ("add", "sub", "rsub"):
        return bool((args[2] if len(args) > 2 else kwargs.get("alpha", 1)) == 1)
    if name == "pow" and (overload != "Tensor_Scalar" or args[1] not in EXPONENTS):
        return False
    if name == "rsqrt" or (name == "pow" and args[1] == -0.5):
        return tensors[0].dtype in (torch.float32, torch.float64)
    return not (name in ("div", "round") and {"rounding_mode", "decimals"} & kwargs.keys())


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def tensors_of(args: Any, kwargs: Any) -> list[Tensor]:
    tensors = []
    for item in (*args, *kwargs.values()):
        if isinstance(item, Tensor):
            tensors.append(item)
        elif isinstance(item, list | tuple):
            tensors += [member for member in item if isinstance(member, Tensor)]
    return tensors
