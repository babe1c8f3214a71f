"""A model's initial values, the same whether it is built whole or one tensor at a time.

Under `keyed` each random operation draws from a generator of its own, seeded by the operation's number. So what an operation draws does
not depend on which others ran before it, and one parameter can be computed alone: `Deferred.build` runs the user's function on tensors
without storage and logs every operation that writes; `materialise` runs again only those that one tensor depends on.

What starts with values (lists, NumPy, a file) has them at once: an operation on such tensors alone is computed at once. Where Python asks
for a value (`.item()`, `if mask.any():`) it is computed from the log, so most functions whose course depends on values can be deferred.
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

from lockstep.base.errors import LockstepError
from lockstep.base.torch_private import (
    FAKE_PARAMETER_MARK,
    TorchDispatchMode,
    gradient_hooks,
    make_subclass,
    post_accumulate_hooks,
    schema,
    storage_address,
    swap_implementations,
    tree_map,
)
from lockstep.model.recorded_init import Entry, Log, Numbered, View, tensors_of

OWN_CODE = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
OVERWRITES = frozenset(
    f"aten::{name}_"
    for name in ("normal", "uniform", "exponential", "random", "log_normal", "cauchy", "geometric", "bernoulli", "fill", "zero", "copy")
)
"""In-place operations whose result does not depend on what was there."""


class CannotDefer(LockstepError):
    """A model that can only be built whole. The text says at which operation, and where in the user's code."""


@contextmanager
def keyed(key: int) -> Iterator[None]:
    """Within it, the n-th random operation draws from torch's default CPU generator seeded with `key(key, n)`.

    An operation that is given a generator of its own draws from that. `torch.manual_seed` within has no effect on later operations.
    Python's and NumPy's generators are started once, and drawn from in order. Afterwards all three stand at their start. Operations in
    other threads, and on other devices than the CPU, are not covered.
    """
    with _Keyed(key):
        yield


def build(factory: Callable[[], Any], key: int) -> Any:
    """The model that `factory` returns, whole, with the values that `key` gives."""
    with keyed(key):
        return factory()


class _Keyed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else each operation goes through torch._dynamo, whose import takes a second

    def __init__(self, key: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbered = Numbered(key)

    def __enter__(self) -> Any:
        self.numbered.start()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self.numbered.start()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _draws(func) and _generator(args, kwargs) is None:
            self.numbered.seed(self.numbered.next())
        return func(*args, **kwargs)


class _Recorder(_Keyed):  # type: ignore[no-untyped-call]
    """Runs operations without values and logs them; operations on tensors that have values are run as they are."""

    def __init__(self, key: int) -> None:
        super().__init__(key)
        # Importing it takes a quarter of a second.
        from lockstep.base.torch_private import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, FakeTensorMode

        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.fake_class = FakeTensor
        self._needs_values = (DataDependentOutputException, DynamicOutputShapeException)
        self.log = Log(self.numbered)
        self.failure: Exception | None = None
        self.failed: Any = None

    def is_fake(self, item: Any) -> bool:
        return isinstance(item, self.fake_class)

    def view(self, fake: Any) -> View:
        storage = storage_address(fake.untyped_storage())
        if not self.log.knows(storage):
            raise CannotDefer("it uses a tensor that no operation made")
        return View(storage, fake.dtype, tuple(fake.shape), fake.stride(), fake.storage_offset())

    def values(self, tree: Any) -> Any:
        """`tree` with the values of its tensors."""
        views = [self.view(item) for item in tensors_of(tree) if self.is_fake(item)]
        values = iter(self.log.replay(views))
        return tree_map(lambda item: next(values) if self.is_fake(item) else item, tree)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        try:
            return self._dispatch(func, args, kwargs)
        except Exception as error:
            self.failure, self.failed = error, func
            raise

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = tensors_of((args, kwargs))
        given = _generator(args, kwargs)
        number = self.numbered.next() if _draws(func) and given is None else None
        if not any(map(self.is_fake, tensors)) and (tensors or _is_empty(func, args, kwargs)):
            return self._now(func, args, kwargs, number)
        written = _written(func, args, kwargs)
        if any(not self.is_fake(tensor) for tensor in written):
            if any(map(self.is_fake, written)):
                raise CannotDefer("it writes both to a tensor with values and to one without")
            return self._now(func, self.values(args), self.values(kwargs), number)
        state = None
        if given is not None:
            state = given.get_state()
            self._now(func, self.values(args), self.values(kwargs), None)  # for what it does to the generator
        args, kwargs = tree_map(self._constant, (args, kwargs))
        try:
            with self.fake:
                out = func(*args, **kwargs)
        except self._needs_values:
            if written:
                raise
            return self._now(func, self.values(args), self.values(kwargs), number)
        self._record(func, args, kwargs, out, number, state)
        return out

    def _now(self, func: Any, args: Any, kwargs: Any, number: int | None) -> Any:
        if number is not None:
            self.numbered.seed(number)
        return func(*args, **kwargs)

    def _constant(self, item: Any) -> Any:
        """A tensor with values, as one without; the values it has now are kept, since NumPy may change them unseen."""
        if not isinstance(item, Tensor) or self.is_fake(item):
            return item
        copy = item.detach().clone()
        fake = self.fake.from_tensor(copy, static_shapes=True)
        self.log.constant(self.log.keep(fake.untyped_storage()), copy.untyped_storage())
        return fake

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any, number: int | None, state: Tensor | None) -> None:
        inputs = tensors_of((args, kwargs))
        written = [self.view(tensor) for tensor in _written(func, args, kwargs)]
        outputs, new = self._outputs(out)
        if not written and not new:
            return
        fresh = new | self._overwritten(func, written, inputs)
        given_args, given_kwargs = tree_map(lambda item: self.view(item) if self.is_fake(item) else item, (args, kwargs))
        self.log.add(
            Entry(
                func=func,
                args=given_args,
                kwargs=given_kwargs,
                outputs=outputs,
                reads=frozenset(view.storage for view in map(self.view, inputs)) - fresh,
                writes=frozenset(new | {view.storage for view in written}),
                fresh=frozenset(fresh),
                number=number,
                generator=state,
                dtype=torch.get_default_dtype(),
            )
        )

    def _outputs(self, out: Any) -> tuple[tuple[View | None, ...], set[int]]:
        """What an operation returned, as `Entry.outputs` has it, and the new storages."""
        outputs: list[View | None] = []
        new: set[int] = set()
        for tensor in tensors_of(out):
            if tensor.device.type != "cpu":
                raise CannotDefer(f"it makes a tensor on the device {tensor.device}")
            if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
                raise CannotDefer("it makes a tensor that is sparse, or a lazy conjugate or negative")
            storage = tensor.untyped_storage()
            if self.log.is_constant(storage_address(storage)):
                raise CannotDefer("it makes a view of a tensor with values")
            known = self.log.knows(storage_address(storage)) and storage_address(storage) not in new
            if not known:
                new.add(self.log.keep(storage))
            outputs.append(None if known else self.view(tensor))
        return tuple(outputs), new

    def _overwritten(self, func: Any, written: list[View], inputs: list[Tensor]) -> set[int]:
        """The storage of which nothing is left, if any."""
        if schema(func).name not in OVERWRITES or not self.log.is_whole(written[0]):
            return set()
        others = {storage_address(tensor.untyped_storage()) for tensor in inputs[1:]}
        return {written[0].storage} - others


class Deferred:
    """A model without storage, and how to compute each of its tensors alone."""

    module: Any
    """What the function returned. Its parameters and buffers are on the meta device; its other tensors have their values."""

    def __init__(self, module: Any, log: Log, sources: dict[int, View | Tensor], tensors: list[Tensor]) -> None:
        self.module = module
        self._log = log
        self._sources = sources
        self._tensors = tensors  # so that no other tensor gets the identity of one of them
        self._names = {
            name: tensor for named in (module.named_parameters, module.named_buffers) for name, tensor in named(remove_duplicate=False)
        }
        self.names = {id(tensor): name for name, tensor in reversed(self._names.items())}
        """The first name of each parameter and buffer, by its identity in the module as it was returned."""

    @classmethod
    def build(cls, factory: Callable[[], Any], key: int) -> Deferred:
        """Run `factory` without computing its tensors. Raises `CannotDefer` where it must be run whole, or fails."""
        with _older_objects_frozen():
            return cls._record(factory, _Recorder(key))

    @classmethod
    def _record(cls, factory: Callable[[], Any], recorder: _Recorder) -> Deferred:
        try:
            with recorder, _parameters_as_they_were(recorder), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")  # copy.deepcopy does
                module = factory()
        except Exception as error:
            raise CannotDefer(_reason(error, recorder)) from error
        if recorder.failure is not None:  # the function went on another way than it would with values
            raise CannotDefer(_reason(recorder.failure, recorder)) from recorder.failure
        if not isinstance(module, nn.Module):
            raise CannotDefer(f"the function returned a {type(module).__name__}, not a torch.nn.Module")
        return _finish(cls, module, recorder)

    @property
    def constant_bytes(self) -> int:
        """The size of what came from NumPy, lists and files: held, beside the log, for as long as this object lives."""
        return self._log.constant_bytes + sum(source.nbytes for source in self._sources.values() if isinstance(source, Tensor))

    @torch.no_grad()
    def materialise(self, tensor: str | Tensor) -> Tensor:
        """The values of one parameter or buffer, given by its name or as it stands in the module: a new plain tensor on the CPU.

        Needs memory for it and for what it depends on, and nothing else. Leaves torch's default generator as it was.
        """
        meta = self._names[tensor] if isinstance(tensor, str) else tensor
        source = self._sources[id(meta)]
        if isinstance(source, Tensor):
            return source.detach().clone()
        value = self._log.replay([source])[0]
        return value if value.untyped_storage().nbytes() == source.bytes else value.clone()


def _finish(cls: type[Deferred], module: nn.Module, recorder: _Recorder) -> Deferred:
    """Give each parameter and buffer its meta form, and each other tensor that the function left its values, all in place."""
    named = {id(tensor): (name, tensor) for name, tensor in (*module.named_buffers(), *module.named_parameters())}
    other = [fake for fake in _fakes(recorder) if id(fake) not in named]
    if other:
        gc.collect()
        other = [fake for fake in _fakes(recorder) if id(fake) not in named]
    _check(recorder, [*named.values(), *(("a tensor outside its parameters and buffers", tensor) for tensor in other)])
    sources: dict[int, View | Tensor] = {}
    for _, tensor in named.values():
        source = recorder.view(tensor) if recorder.is_fake(tensor) else None
        before = _exchange(tensor, torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"))
        sources[id(tensor)] = before.detach() if source is None else source
    for tensor in other:
        _exchange(tensor, recorder.log.replay([recorder.view(tensor)])[0].clone())
    return cls(module, recorder.log, sources, [tensor for _, tensor in named.values()])


@contextmanager
def _older_objects_frozen() -> Iterator[None]:
    """What is there already, such as all of torch's modules, is not looked through for what the function left.

    Where somebody has frozen objects before, nothing is: they could not be told from ours.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _fakes(recorder: _Recorder) -> list[Any]:
    return [item for item in gc.get_objects() if issubclass(type(item), recorder.fake_class) and item.fake_mode is recorder.fake]


def _check(recorder: _Recorder, tensors: list[tuple[str, Any]]) -> None:
    """Raise `CannotDefer` for what one tensor alone cannot express."""
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
        if recorder.is_fake(tensor):
            recorder.view(tensor)


def _exchange(tensor: Any, new: Any) -> Any:
    """Give `tensor` the contents of `new`; it keeps its identity, its class and what was set on it. Returns its former self."""
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
    """The class of a tensor but for its being without values."""
    from lockstep.base.torch_private import FakeTensor

    if not isinstance(tensor, FakeTensor):
        return type(tensor)
    if type(tensor) is not FakeTensor:
        return type(tensor).__mro__[2]
    return nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor


@cache
def _fake_attributes() -> frozenset[str]:
    from lockstep.base.torch_private import FakeTensorMode

    with FakeTensorMode():
        return frozenset(vars(torch.empty(1))) | {FAKE_PARAMETER_MARK}


@contextmanager
def _parameters_as_they_were(recorder: _Recorder) -> Iterator[None]:
    """Within it, a parameter without values keeps its subclass, and `module.to` keeps the parameter with what was set on it."""
    make: Any = nn.Parameter.__new__
    swap: Any = torch.utils.swap_tensors

    def made(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        parameter: Any = make(cls, data, requires_grad)
        if cls is not nn.Parameter and recorder.is_fake(parameter):
            parameter.__class__ = type(cls.__name__, (recorder.fake_class, cls), {})
        return parameter

    def swapped(one: Any, other: Any) -> None:
        if recorder.is_fake(one) and recorder.is_fake(other):
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


def _reason(error: Exception, recorder: _Recorder) -> str:
    """Which operation it was, and the last line outside torch and this package that led to it."""
    place, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(OWN_CODE) and not file.startswith("<"):
            place = f"{file}:{trace.tb_lineno}: "
        trace = trace.tb_next
    operation = f"{recorder.failed}: " if error is recorder.failure else ""
    said = str(error) if isinstance(error, CannotDefer) else f"{type(error).__name__}: {error}"
    return place + operation + said


def _generator(args: Any, kwargs: Any) -> torch.Generator | None:
    for item in (*args, *kwargs.values()):
        if isinstance(item, torch.Generator) and item is not torch.default_generator:
            return item
    return None


def _is_empty(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether it makes a tensor of no elements: what is to be given the storage of a file, or of a copy."""
    on_cpu = torch.device(kwargs.get("device") or "cpu").type == "cpu"
    return func is torch.ops.aten.empty.memory_format and 0 in args[0] and on_cpu


@cache
def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The tensors among the arguments that the operation writes to."""
    positions, names = _writes(func)
    return tensors_of(([args[place] for place in positions if place < len(args)], [kwargs[name] for name in names if name in kwargs]))


@cache
def _writes(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    arguments = [
        (place, argument) for place, argument in enumerate(schema(func).arguments) if argument.alias_info and argument.alias_info.is_write
    ]
    return (
        tuple(place for place, argument in arguments if not argument.kwarg_only),
        tuple(argument.name for _, argument in arguments),
    )
