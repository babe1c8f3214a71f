"""Maps torch's operations to kernels, with their shape, FLOPs and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import gcd, prod
from typing import Any

from torch import Tensor

from lockstep.base.dtypes import dtype_name
from lockstep.base.nested import tree_tensors
from lockstep.base.torch_private import ITEM
from lockstep.planner.trace import ALIGNED, Kind, Operation, Phase
from lockstep.planner.tracing.torch_fakes import flop_registry

WITHOUT_KERNEL = frozenset(
    (
        "detach alias _unsafe_view view reshape _reshape_alias as_strided expand permute transpose"
        " t unsqueeze squeeze select slice split split_with_sizes unbind chunk narrow diagonal"
        " unfold view_as_real view_as_complex lift_fresh empty empty_like empty_strided new_empty"
        " new_empty_strided resize_ set_ is_same_size sym_size sym_stride sym_numel record_stream"
        f" random_ _has_compatible_shallow_copy_type movedim swapaxes _conj conj {ITEM}"
    ).split()
)
READS_ONE_ROW = frozenset({"embedding", "index_select", "gather", "index"})
"""Operations that read only as many bytes of their first argument as they write."""


def kernel(
    function: Any, arguments: Sequence[Any], keywords: Mapping[str, Any], result: Any, phase: Phase
) -> Operation | None:
    name = function.overloadpacket.__name__
    if name in WITHOUT_KERNEL or function.is_view or function.namespace == "prim":
        return None
    read = tree_tensors([arguments, dict(keywords)])
    written = tree_tensors(result)
    if not (tensors := [*written, *read]):
        return None
    flops = _flops(function, arguments, keywords, result)
    kind, shape = _kind(name, arguments, result) if flops else ("memory", ())
    computed = next(filter(Tensor.is_floating_point, tensors), tensors[0])
    dtype = dtype_name(computed.dtype)
    got = _bytes(read[1:]) + _bytes(written) if name in READS_ONE_ROW else _bytes(read)
    moved = got + _bytes(written)
    aligned = _aligned_bytes(arguments, written) if kind == "matmul" else ALIGNED
    return Operation(
        kind, dtype, 0 if kind == "memory" else flops, moved, shape, phase, f"aten.{name}", aligned
    )


def _flops(
    function: Any, arguments: Sequence[Any], keywords: Mapping[str, Any], result: Any
) -> int:
    name = function.overloadpacket.__name__
    if "attention" in name:
        # Two products in the forward, five in the backward; causal attention computes half.
        batch, queries, keys, width = _kind(name, arguments, None)[1]
        is_causal = queries == keys and any(each is True for each in arguments)
        products = batch * queries * keys * width * (10 if "backward" in name else 4)
        return products // (2 if is_causal else 1)
    if "convolution" in name:
        # In the backward, one product for each requested gradient. Torch's counter also counts
        # products between groups.
        products = sum(arguments[10][:2]) if "backward" in name else 1
        return 2 * prod(_convolution_shape(name, arguments, result)) * products
    count = flop_registry.get(function.overloadpacket)
    return 0 if count is None else int(count(*arguments, **keywords, out_val=result))


def _kind(name: str, arguments: Sequence[Any], result: Any) -> tuple[Kind, tuple[int, ...]]:
    tensors = [each for each in arguments if isinstance(each, Tensor)]
    if "attention" in name:
        query, keys = tensors[1:3] if "backward" in name else tensors[:2]
        batch, heads, length, width = query.shape
        return "attention", (batch * heads, length, keys.shape[-2], width)
    if "convolution" in name:
        return "convolution", _convolution_shape(name, arguments, result)
    left, right = tensors[-2:]
    if left.dim() == 3:
        return "matmul", (left.shape[0], left.shape[1], right.shape[2], left.shape[2])
    return "matmul", (1, left.shape[0], right.shape[1] if right.dim() > 1 else 1, left.shape[1])


def _aligned_bytes(arguments: Sequence[Any], written: Sequence[Tensor]) -> int:
    operands = [each for each in arguments if isinstance(each, Tensor)][-2:]
    return gcd(ALIGNED, *(_row_bytes(each) for each in (*operands, *written[:1])))


def _row_bytes(matrix: Tensor) -> int:
    """Return the bytes between rows, or between columns if columns are contiguous."""
    *_, rows, columns = matrix.stride() if matrix.dim() > 1 else (1, 1)
    return (rows if columns == 1 and matrix.shape[-1] > 1 else columns) * matrix.element_size()


def _convolution_shape(name: str, arguments: Sequence[Any], result: Any) -> tuple[int, ...]:
    """Return (groups, m, n, k) of the matrix product in a convolution's forward."""
    is_backward = "backward" in name
    written, read, weight = arguments[:3] if is_backward else (result, *arguments[:2])
    is_transposed, groups = arguments[7 if is_backward else 6], arguments[9 if is_backward else 8]
    samples, _, *positions = (read if is_transposed else written).shape
    inner, outer = weight.shape[0] // groups, prod(weight.shape[1:])
    product = (outer, inner) if is_transposed else (inner, outer)
    return groups, samples * prod(positions), *product


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Count the bytes of each tensor once. An expanded dimension counts as one element."""

    def distinct(tensor: Tensor) -> int:
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        return prod(size for size, stride in sizes if stride)

    several = {id(each): each for each in tensors}.values()
    return sum(distinct(each) * each.element_size() for each in several)
