"""Deferred initialization builds a model without values, and computes the initial value of each
tensor separately.

`DeferredModel.build` runs the model's factory on fake tensors and logs every operation that writes.
`materialize` replays only the operations on which one tensor depends. A random operation draws from
a generator that is seeded by the operation's number, so its result does not depend on earlier
operations. If the factory needs a tensor's value, as in `.item()` or `if mask.any():`, the log is
replayed during the build.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from lockstep.base.garbage import is_frozen
from lockstep.base.torch_private import (
    FAKE_PARAMETER_MARK,
    FakeTensor,
    FakeTensorMode,
    gradient_hooks,
    make_subclass,
    post_accumulate_hooks,
    storage_address,
    swap_implementations,
)
from lockstep.model.initialization.operation_log import OperationLog, StorageView
from lockstep.model.initialization.recorder import CannotDefer, InitRecorder, KeyedInit

OWN_CODE = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def build(factory: Callable[[], Any], key: int) -> Any:
    with KeyedInit(key):
        return factory()


class DeferredModel:
    """A model on the meta device. The initial values can be computed one tensor at a time."""

    module: Any
    """The user's module. Only the module's parameters and buffers are on the meta device."""

    def __init__(
        self,
        module: Any,
        log: OperationLog,
        sources: dict[int, StorageView | Tensor],
        tensors: list[Tensor],
    ) -> None:
        self.module = module
        self._log = log
        self._sources = sources
        # keep the tensors alive, so that no other tensor gets one of their ids
        self._tensors = tensors
        self._names = {
            name: tensor
            for named in (module.named_parameters, module.named_buffers)
            for name, tensor in named(remove_duplicate=False)
        }
        self.names = {id(tensor): name for name, tensor in reversed(self._names.items())}
        """Maps the `id()` of each parameter or buffer to its first name in `module`."""

    @classmethod
    def build(cls, factory: Callable[[], Any], key: int) -> DeferredModel:
        """Raises `CannotDefer` for any error of `factory`."""
        recorder = InitRecorder(key)
        with _older_objects_frozen():
            try:
                with recorder, fake_parameters_keep_class(), warnings.catch_warnings():
                    # copy.deepcopy causes this warning
                    warnings.filterwarnings(
                        "ignore", message="Accessing the data pointer of FakeTensor"
                    )
                    module = factory()
            except Exception as error:
                raise CannotDefer(_reason(error, recorder)) from error
            # the factory has caught the error, so it may have taken another branch than with values
            if recorder.failure is not None:
                raise CannotDefer(_reason(recorder.failure, recorder)) from recorder.failure
            if not isinstance(module, nn.Module):
                raise CannotDefer(
                    f"the function returned a {type(module).__name__}, not a torch.nn.Module"
                )
            return _finish(cls, module, recorder)

    @torch.no_grad()
    def materialize(self, tensor: str | Tensor) -> Tensor:
        """Compute an initial value on the CPU. The state of torch's default generator does not
        change."""
        meta = self._names[tensor] if isinstance(tensor, str) else tensor
        source = self._sources[id(meta)]
        if isinstance(source, Tensor):
            return source.detach().clone()
        value = self._log.replay([source])[0]
        return value if value.untyped_storage().nbytes() == source.bytes else value.clone()


def _finish(cls: type[DeferredModel], module: nn.Module, recorder: InitRecorder) -> DeferredModel:
    """Move parameters and buffers to the meta device, and give the factory's other fake tensors
    their values, in place."""
    named = {
        id(tensor): (name, tensor)
        for name, tensor in (*module.named_buffers(), *module.named_parameters())
    }
    other = [fake for fake in _fakes(recorder) if id(fake) not in named]
    if other:
        gc.collect()
        other = [fake for fake in _fakes(recorder) if id(fake) not in named]
    outside = [("a tensor outside its parameters and buffers", tensor) for tensor in other]
    _check(recorder, [*named.values(), *outside])
    sources: dict[int, StorageView | Tensor] = {}
    for _, tensor in named.values():
        source = recorder.view(tensor) if isinstance(tensor, FakeTensor) else None
        shape, stride, dtype = tensor.shape, tensor.stride(), tensor.dtype
        empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        before = replace_contents(tensor, empty)
        sources[id(tensor)] = before.detach() if source is None else source
    for tensor in other:
        replace_contents(tensor, recorder.log.replay([recorder.view(tensor)])[0].clone())
    return cls(module, recorder.log, sources, [tensor for _, tensor in named.values()])


@contextmanager
def _older_objects_frozen() -> Iterator[None]:
    """Hide existing objects from `gc.get_objects`. A search among the factory's objects is then
    fast."""
    if is_frozen():  # objects that other code has frozen could not be told apart from ours
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _fakes(recorder: InitRecorder) -> list[Any]:
    return [
        item
        for item in gc.get_objects()
        if issubclass(type(item), FakeTensor) and item.fake_mode is recorder.fake
    ]


def _check(recorder: InitRecorder, tensors: list[tuple[str, Any]]) -> None:
    seen: dict[int, str] = {}
    for name, tensor in tensors:
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise CannotDefer(f"{name} has no shape before the first forward")
        if tensor.device.type != "cpu":
            raise CannotDefer(f"{name} is on the device {tensor.device}, not on the CPU")
        if not tensor.is_leaf or tensor.grad is not None:
            raise CannotDefer(f"{name} is part of a graph of gradients, or has a gradient")
        if gradient_hooks(tensor) or post_accumulate_hooks(tensor):
            raise CannotDefer(f"{name} has hooks on its gradient")
        storage = storage_address(tensor.untyped_storage())
        if tensor.numel() and storage in seen:
            raise CannotDefer(f"{name} and {seen[storage]} are two tensors that share memory")
        seen[storage] = name
        if isinstance(tensor, FakeTensor):
            recorder.view(tensor)


def _reason(error: Exception, recorder: InitRecorder) -> str:
    """Name the operation that raised `error`, and the last line of user code that led to it."""
    place, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(OWN_CODE) and not file.startswith("<"):
            place = f"{file}:{trace.tb_lineno}: "
        trace = trace.tb_next
    operation = f"{recorder.failed}: " if error is recorder.failure else ""
    said = str(error) if isinstance(error, CannotDefer) else f"{type(error).__name__}: {error}"
    return place + operation + said


def replace_contents(tensor: Any, new: Any) -> Any:
    """Exchange the contents of two tensors. `tensor` keeps its id, class and attributes. Return the
    former contents of `tensor`."""
    kind = _plain_class(tensor)
    if issubclass(kind, nn.Parameter):
        new = make_subclass(kind, new, tensor.requires_grad)
    else:
        new.requires_grad_(tensor.requires_grad)
    kept = {name: value for name, value in vars(tensor).items() if name not in _fake_attributes()}
    former = vars(tensor).copy()
    swap_implementations(tensor, new)
    tensor.__class__, new.__class__ = new.__class__, tensor.__class__
    vars(tensor).clear()
    vars(tensor).update(kept)
    vars(new).update(former)
    return new


def _plain_class(tensor: Any) -> Any:
    if not isinstance(tensor, FakeTensor):
        return type(tensor)
    if type(tensor) is not FakeTensor:
        return type(tensor).__mro__[2]
    return nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor


@cache
def _fake_attributes() -> frozenset[str]:
    with FakeTensorMode():
        return frozenset(vars(torch.empty(1))) | {FAKE_PARAMETER_MARK}


@contextmanager
def fake_parameters_keep_class() -> Iterator[None]:
    """A fake parameter gets the subclass of `nn.Parameter` that the user's code constructs."""
    make: Any = nn.Parameter.__new__
    swap: Any = torch.utils.swap_tensors

    def made(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        parameter: Any = make(cls, data, requires_grad)
        if cls is not nn.Parameter and isinstance(parameter, FakeTensor):
            parameter.__class__ = type(cls.__name__, (FakeTensor, cls), {})
        return parameter

    def swapped(one: Any, other: Any) -> None:
        if isinstance(one, FakeTensor) and isinstance(other, FakeTensor):
            former = one.detach()
            one.data = other
            other.data = former
        else:
            swap(one, other)

    nn.Parameter.__new__ = made  # type: ignore[method-assign]
    torch.utils.swap_tensors = swapped
    try:
        yield
    finally:
        nn.Parameter.__new__ = make  # type: ignore[method-assign]
        torch.utils.swap_tensors = swap
