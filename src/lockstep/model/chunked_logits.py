"""Logits that are computed in chunks of tokens during the cross-entropy (`logits=chunked`). The
full logits of a language model are often its largest tensor.

`F.cross_entropy` of a `ChunkedLogits` computes the logits, the loss and the gradient of one chunk
after another. The forward already computes the gradients, and the backward multiplies the gradients
by one number. With `reduction="none"`, each token has a different factor, so the backward computes
the logits again.

`torch.nn.functional.linear_cross_entropy` also computes in chunks. Under autocast,
`linear_cross_entropy` sums the loss in bf16 or fp16, with an error of 1% for 2,048 tokens. The
chunks of `linear_cross_entropy` are too small for CPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.base import accelerator
from lockstep.base.errors import PlanError, RecipeError
from lockstep.base.torch_private import (
    DisableTorchFunctionSubclass,
    disable_current_modes,
    keeps_graph,
    uncounted,
)

MIN_ROWS, MIN_ROWS_OF_ACCELERATOR = 256, 1024
"""Smallest number of tokens in a chunk, on a CPU and on an accelerator. Fewer tokens would not keep
the device busy."""
SAME = frozenset({"contiguous", "clone"})
CASTS = frozenset({"float", "double", "bfloat16", "to"})
SHAPES = frozenset({"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"})
ORDERS = frozenset(
    {"transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "t", "T", "mT"}
)
OF_LOGITS = frozenset(
    {"shape", "dtype", "ndim", "layout", "is_sparse", "is_quantized", "is_nested", "itemsize"}
    | {"size", "dim", "ndimension", "numel", "nelement", "stride", "__len__", "element_size"}
    | {"is_floating_point", "is_complex", "__hash__"}
)
OF_HIDDEN = frozenset(
    {"device", "requires_grad", "grad_fn", "is_leaf", "get_device", "is_inference"}
    | accelerator.DEVICE_FLAGS
)
ELEMENTWISE = frozenset(
    {"div", "true_divide", "divide", "mul", "multiply", "tanh", "sigmoid", "clamp", "exp", "pow"}
    | {"__truediv__", "__rtruediv__", "__mul__", "__rmul__", "__pow__"}
)


class Head(NamedTuple):
    """The linear layer that computes the logits. `Head` also has the dtype of the matrix product,
    and the dtypes to which the user's code casts the logits."""

    weight: Tensor
    bias: Tensor | None
    dtypes: tuple[torch.dtype, ...]

    def logits(self, hidden: Tensor) -> Tensor:
        product, *casts = self.dtypes
        logits = F.linear(hidden.to(product), self.weight, self.bias)
        for dtype in casts:
            logits = logits.to(dtype)
        return logits


class ChunkedLogits(Tensor):
    """A tensor with the shape and dtype of the logits but no memory. The tensor refers to the
    hidden states and the head."""

    _hidden: Tensor
    _head: Head
    _class_dim: int

    @classmethod
    def of(cls, hidden: Tensor, head: Head, class_dim: int) -> ChunkedLogits:
        shape = list(hidden.shape)
        shape[class_dim] = len(head.weight)
        with disable_current_modes():
            made = torch.empty((), dtype=head.dtypes[-1], device="meta").expand(shape)
            logits = made.as_subclass(cls)
        logits._hidden, logits._head, logits._class_dim = hidden, head, class_dim
        return logits

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = str(getattr(func.__self__, "__name__", ""))
        if func is F.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        logits = args[0] if args else None
        if not isinstance(logits, ChunkedLogits):
            raise _error(name)
        hidden, head, class_dim = logits._hidden, logits._head, logits._class_dim
        if name in OF_HIDDEN:
            return func(hidden, *args[1:], **kwargs)
        if name in OF_LOGITS:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name == "__repr__":
            return f"ChunkedLogits(shape={tuple(logits.shape)}, dtype={logits.dtype})"
        if name in SAME:
            return logits
        if name == "_base":
            return None
        if name == "register_hook" and _is_internal_hook(args[1]):
            return hidden.register_hook(args[1])  # type: ignore[no-untyped-call]
        if name == "detach":
            return cls.of(hidden.detach(), _detached(head), class_dim)
        if name in CASTS:
            dtypes = (*head.dtypes, _dtype_of(name, logits, args[1:], kwargs))
            return cls.of(hidden, head._replace(dtypes=dtypes), class_dim)
        if name in ORDERS:
            with disable_current_modes():
                numbered = torch.empty([*range(1, hidden.dim() + 1)], device="meta")
                place = func(numbered, *args[1:], **kwargs).shape.index(class_dim + 1)
            return cls.of(func(hidden, *args[1:], **kwargs), head, place)
        if class_dim == hidden.dim() - 1:
            if name == "__getitem__":
                part = hidden[_index(logits, args[1])]
                return cls.of(part, head, part.dim() - 1)
            if name in SHAPES:
                with disable_current_modes(), DisableTorchFunctionSubclass():
                    *rows, last = func(*args, **kwargs).shape
                if last == logits.shape[-1]:
                    return cls.of(hidden.reshape(*rows, hidden.shape[-1]), head, len(rows))
        raise _error(name)


def hidden_states(tensor: Tensor) -> Tensor:
    return tensor._hidden if isinstance(tensor, ChunkedLogits) else tensor


def with_hidden(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    if not isinstance(tensor, ChunkedLogits):
        return change(tensor)
    return ChunkedLogits.of(change(tensor._hidden), tensor._head, tensor._class_dim)


def head_name(model: nn.Module, given: str | None, autocast_dtype: torch.dtype | None) -> str:
    """Return the name of the `nn.Linear` that computes the logits. If `given` is None, the head is
    the output embeddings of a Hugging Face model."""
    modules = dict(model.named_modules())
    head = modules.get(given) if given is not None else _hugging_face_head(model)
    name: str | None = next((name for name, each in modules.items() if each is head), None)
    if head is None or name is None:
        why = (
            "the model does not say which of its layers is the head"
            if given is None
            else f"the recipe's head {given!r} is no module of the model"
        )
        linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
        raise RecipeError(
            f"logits=chunked, and {why}; name the nn.Linear that computes the logits:"
            f" Recipe(head={linear[-1] if linear else 'lm_head'!r}), or leave logits=chunked out"
        )
    if type(head).forward is not nn.Linear.forward or "forward" in vars(head):
        raise RecipeError(
            f"logits=chunked with the head {name!r}, a {type(head).__name__}; the head must be an"
            " nn.Linear with torch's own forward, because its weights give the loss; name such a"
            " layer in Recipe.head, or leave logits=chunked out"
        )
    if torch.float16 in (autocast_dtype, head.weight.dtype):
        raise PlanError(
            "logits=chunked with fp16; gradients are computed in the forward, before they are"
            " multiplied by the loss scale, and small ones would be lost; choose bf16 or fp32 as"
            " the precision, or leave logits=chunked out"
        )
    return name


def modules_with_weights_of(model: nn.Module, head: str) -> set[nn.Module]:
    own = set(model.get_submodule(head).parameters())
    return {
        module for module in model.modules() if not own.isdisjoint(module.parameters(recurse=False))
    }


def chunk_logits(model: nn.Module, name: str) -> None:
    head: Any = model.get_submodule(name)
    forward: Callable[..., Any] = head.forward

    @functools.wraps(forward)
    def wrapped(input: Tensor) -> Tensor:
        weight, bias = head.weight, head.bias
        dtype, kind = weight.dtype, input.device.type
        if torch.is_autocast_enabled(kind) and dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(kind)
        tensors = (input, weight, bias)
        if torch.is_grad_enabled() and any(
            each is not None and each.requires_grad for each in tensors
        ):
            hidden, weight, bias = _behind_one_node(*tensors)
        else:
            hidden, weight, bias = (None if each is None else each.detach() for each in tensors)
        return ChunkedLogits.of(hidden, Head(weight, bias, (dtype,)), hidden.dim() - 1)

    head.forward = wrapped


def _hugging_face_head(model: nn.Module) -> nn.Module | None:
    get: Any = getattr(model, "get_output_embeddings", None)
    return get() if callable(get) else None


def _error(name: str) -> PlanError:
    if name in ELEMENTWISE:
        return PlanError(
            f"logits=chunked, and torch's {name} is called on the logits, which are never computed"
            " as a whole; leave logits=chunked out for a soft cap (torch.tanh) or another function"
            " of each logit; a head without bias can be given a factor before it: head(x / 30)"
            " instead of head(x) / 30"
        )
    return PlanError(
        f"logits=chunked, and torch's {name} is called on the logits, which are never computed as a"
        " whole; give the logits to F.cross_entropy, which computes them in chunks, or leave"
        " logits=chunked out"
    )


def _is_internal_hook(hook: Any) -> bool:
    """Return True for the gradient hooks of torch and lockstep, which only note that a backward
    begins. A user's hook expects the gradient of the logits, but would get the gradient of the
    hidden states."""
    return str(getattr(hook, "__module__", "")).partition(".")[0] in ("torch", "lockstep")


def _detached(head: Head) -> Head:
    bias = None if head.bias is None else head.bias.detach()
    return head._replace(weight=head.weight.detach(), bias=bias)


def _dtype_of(name: str, logits: ChunkedLogits, args: Any, kwargs: Any) -> torch.dtype:
    named = {"float": torch.float32, "double": torch.float64, "bfloat16": torch.bfloat16}
    if name in named:
        return named[name]
    dtype = logits.dtype
    for given in (*args, *kwargs.values()):
        if isinstance(given, Tensor):
            dtype, given = given.dtype, given.device
        if isinstance(given, torch.dtype):
            dtype = given
        elif isinstance(given, str | torch.device) and torch.device(given) != logits.device:
            raise _error("to(device)")
    if dtype is torch.float16:
        raise _error("to(torch.float16)")
    return dtype


def _index(logits: ChunkedLogits, index: Any) -> tuple[Any, ...]:
    items = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(item, bool) for item in items):
        raise _error("__getitem__")

    def dims(item: Any) -> int:
        if item is None or item is Ellipsis:
            return 0
        return item.dim() if isinstance(item, Tensor) and item.dtype is torch.bool else 1

    if not any(item is Ellipsis for item in items):
        items.append(Ellipsis)
    place = next(place for place, item in enumerate(items) if item is Ellipsis)
    rest = logits.dim() - sum(map(dims, items))
    items[place : place + 1] = [slice(None)] * rest
    classes = items[-1] if items else None
    if not (
        isinstance(classes, slice) and classes.indices(logits.shape[-1]) == (0, logits.shape[-1], 1)
    ):
        raise _error("__getitem__")
    return (*items[:-1], slice(None))


def _behind_one_node(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
    trained = [each for each in (weight, bias) if each is not None and each.requires_grad]
    joined = _Joined.apply(hidden, *trained)  # type: ignore[no-untyped-call]
    found = dict(zip(map(id, trained), joined[1:], strict=True))
    return joined[0], *(found.get(id(each), each) for each in (weight, bias))


class _Joined(torch.autograd.Function):
    """The head's node in autograd's graph, with FSDP2's hooks on the head's output. The node's
    backward runs after the loss's backward and before the weights' gradients are accumulated, as
    for a linear layer."""

    @staticmethod
    def forward(ctx: Any, *tensors: Any) -> Any:
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients


@dataclass(frozen=True, slots=True)
class _LossOptions:
    weight: Tensor | None
    ignore_index: int
    label_smoothing: float

    def of(self, logits: Tensor, target: Tensor, reduction: str) -> Tensor:
        return F.cross_entropy(
            logits,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=reduction,
            label_smoothing=self.label_smoothing,
        )

    def divisor(self, target: Tensor) -> Tensor:
        counts = target != self.ignore_index
        if self.weight is None:
            return counts.sum()
        return (self.weight[target.where(counts, 0)] * counts).sum()


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    _check_call(input, target, size_average, reduce, reduction)
    hidden, head = input._hidden, input._head
    if head.dtypes[-1] in (torch.bfloat16, torch.float16) and torch.is_autocast_enabled(
        hidden.device.type
    ):  # autocast runs the loss in float32
        head = head._replace(dtypes=(*head.dtypes, torch.float32))
    if len(head.weight) and not head.weight.untyped_storage().nbytes():
        raise PlanError(
            "logits=chunked with a loss that is computed after the backward; by then the gathered"
            " weights of the head are freed; compute each loss before the backward, or leave"
            " logits=chunked out"
        )
    rows = hidden.movedim(input._class_dim, -1).reshape(-1, head.weight.shape[1])
    loss = _LossOptions(weight, ignore_index, label_smoothing)
    arguments = (rows, head.weight, head.bias, target.reshape(-1), head.dtypes, loss)
    with torch.autocast(hidden.device.type, enabled=False):
        if reduction == "none":
            losses: Tensor = ChunkedLosses.apply(*arguments)  # type: ignore[no-untyped-call]
            return losses.reshape(target.shape)
        total: Tensor = ChunkedTotal.apply(*arguments, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
        if reduction == "mean":
            total = total / loss.divisor(target)
        return total.to(head.dtypes[-1])


def _check_call(input: Any, target: Any, size_average: Any, reduce: Any, reduction: str) -> None:
    if not isinstance(input, ChunkedLogits) or isinstance(target, ChunkedLogits):
        raise _error("cross_entropy, as its target,")
    if size_average is not None or reduce is not None:
        raise PlanError(
            "logits=chunked, and F.cross_entropy is called with size_average or reduce, which torch"
            ' has deprecated; give reduction="mean", "sum" or "none"'
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    if target.is_floating_point():
        raise PlanError(
            "logits=chunked with a target of F.cross_entropy that has a probability for each class;"
            " such a target is as large as the logits; give the index of a class for each token, or"
            " leave logits=chunked out"
        )
    class_dim = 1 if input.dim() > 1 else 0
    shape = list(input.shape)
    del shape[class_dim]
    if input._class_dim != class_dim or list(target.shape) != shape:
        raise PlanError(
            f"F.cross_entropy of logits of shape {tuple(input.shape)}, with the classes in dim"
            f" {input._class_dim}, and a target of shape {tuple(target.shape)}; it takes logits"
            " (tokens, classes) and a target (tokens); call it with logits.flatten(0, -2) and"
            " target.flatten()"
        )


def _rows_of_chunk(hidden: Tensor, classes: int) -> int:
    """Return a number of rows for which a chunk's logits are about as large as all hidden
    states."""
    least = MIN_ROWS_OF_ACCELERATOR if accelerator.is_accelerator(hidden) else MIN_ROWS
    tokens, features = hidden.shape
    return max(1, min(max(least, tokens * features // max(1, classes)), -(-tokens // 2)))


class _Chunk(NamedTuple):
    hidden: Tensor
    logits: Tensor
    target: Tensor
    rows: slice


def _chunks(head: Head, hidden: Tensor, target: Tensor) -> Iterator[_Chunk]:
    size = _rows_of_chunk(hidden, len(head.weight))
    for start in range(0, len(hidden), size):
        rows = slice(start, start + size)
        part = hidden[rows].to(head.dtypes[0])
        yield _Chunk(part, head.logits(part), target[rows], rows)


class _Gradients:
    def __init__(self, head: Head, hidden: Tensor, needed: Sequence[bool]) -> None:
        def zeros(tensor: Tensor | None, is_needed: bool) -> Tensor | None:
            if tensor is None or not is_needed:
                return None
            # sum in float32 at least: in a low precision, small parts would be lost
            wide = torch.promote_types(tensor.dtype, torch.float32)
            return torch.zeros_like(tensor, dtype=wide)

        self.hidden = torch.empty_like(hidden) if needed[0] else None
        self.weight, self.bias = zeros(head.weight, needed[1]), zeros(head.bias, needed[2])
        self._head = head

    @uncounted()
    def add(self, chunk: _Chunk, slope: Tensor) -> None:
        slope = slope.to(self._head.dtypes[0])
        if self.hidden is not None:
            self.hidden[chunk.rows] = slope @ self._head.weight
        if self.weight is not None:
            if self.weight.dtype is slope.dtype:
                self.weight.addmm_(slope.T, chunk.hidden)
            else:
                self.weight += slope.T @ chunk.hidden
        if self.bias is not None:
            self.bias += slope.sum(0)

    def take(self) -> list[Tensor | None]:
        return [self.hidden, self.weight, self.bias]


def _cast_head(weight: Tensor, bias: Tensor | None, dtypes: tuple[torch.dtype, ...]) -> Head:
    return Head(weight.to(dtypes[0]), None if bias is None else bias.to(dtypes[0]), dtypes)


class ChunkedTotal(torch.autograd.Function):
    """The sum of the cross-entropy of all tokens. The forward also computes the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        dtypes: tuple[torch.dtype, ...],
        loss: _LossOptions,
        with_gradients: bool,
    ) -> Tensor:
        head = _cast_head(weight, bias, dtypes)
        needed = [with_gradients and each for each in ctx.needs_input_grad[:3]]
        gradients = _Gradients(head, hidden, needed)
        total = hidden.new_zeros((), dtype=torch.promote_types(dtypes[-1], torch.float32))
        for chunk in _chunks(head, hidden, target):
            with torch.set_grad_enabled(any(needed)):
                logits = chunk.logits.requires_grad_(any(needed))
                value = loss.of(logits, chunk.target, "sum")
            if any(needed):
                gradients.add(chunk, torch.autograd.grad(value, logits)[0])
            total += value.detach()
        ctx.save_for_backward(*gradients.take())
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *upstream: Any) -> Any:
        scale = Tensor.mul if keeps_graph() else Tensor.mul_  # another backward may follow
        scaled = [None if each is None else scale(each, upstream[0]) for each in ctx.saved_tensors]
        return *scaled, None, None, None, None


class ChunkedLosses(torch.autograd.Function):
    """The cross-entropy of each token. The backward computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        dtypes: tuple[torch.dtype, ...],
        loss: _LossOptions,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, target)
        ctx.dtypes, ctx.loss = dtypes, loss
        losses = hidden.new_empty(len(hidden), dtype=dtypes[-1])
        for chunk in _chunks(_cast_head(weight, bias, dtypes), hidden, target):
            losses[chunk.rows] = loss.of(chunk.logits, chunk.target, "none")
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *upstream: Any) -> Any:
        hidden, weight, bias, target = ctx.saved_tensors
        head = _cast_head(weight, bias, ctx.dtypes)
        gradients = _Gradients(head, hidden, ctx.needs_input_grad[:3])
        for chunk in _chunks(head, hidden, target):
            with torch.enable_grad():
                logits = chunk.logits.requires_grad_()
                value = ctx.loss.of(logits, chunk.target, "none")
            slope = torch.autograd.grad(value, logits, upstream[0][chunk.rows])[0]
            gradients.add(chunk, slope)
        return *gradients.take(), None, None, None
