from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from lockstep.base.errors import LockstepError
from lockstep.base.nested import tree_tensors
from lockstep.base.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    schema,
    storage_address,
    tree_map,
)
from lockstep.model.initialization.operation_log import (
    LoggedOperation,
    OperationLog,
    OperationSeeds,
    StorageView,
)

DRAWN = "normal uniform exponential random log_normal cauchy geometric bernoulli"
OVERWRITES = frozenset(f"aten::{name}_" for name in f"{DRAWN} fill zero copy".split())


class CannotDefer(LockstepError):
    """Raised if a model's initial values cannot be computed later, tensor by tensor."""


class KeyedInit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Seeds torch's default CPU generator by `keys.key(key, n)` before the n-th random operation.
    `torch.manual_seed` has no effect in the context. Does not seed random operations of other
    threads and of other devices than the CPU."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # otherwise each operation goes through torch._dynamo, whose import takes a second
        return False

    def __init__(self, key: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seeds = OperationSeeds(key)

    def __enter__(self) -> Any:
        self.seeds.start()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self.seeds.start()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _draws(func) and _generator(args, kwargs) is None:
            self.seeds.seed(self.seeds.next())
        return func(*args, **kwargs)


class InitRecorder(KeyedInit):  # type: ignore[no-untyped-call]
    """Seeds random operations in the same way as `KeyedInit`. Operations on fake tensors are
    logged. Operations on tensors that have values are executed."""

    def __init__(self, key: int) -> None:
        super().__init__(key)
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.log = OperationLog(self.seeds)
        self.failure: Exception | None = None
        self.failed: Any = None

    def view(self, fake: Any) -> StorageView:
        storage = storage_address(fake.untyped_storage())
        if storage not in self.log.storages:
            raise CannotDefer("it uses a tensor that no operation made")
        return StorageView(
            storage, fake.dtype, tuple(fake.shape), fake.stride(), fake.storage_offset()
        )

    def values(self, tree: Any) -> Any:
        """Replace each fake tensor in `tree` by its value, computed from the log."""
        views = [self.view(item) for item in tree_tensors(tree) if _is_fake(item)]
        values = iter(self.log.replay(views))
        return tree_map(lambda item: next(values) if _is_fake(item) else item, tree)

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
        tensors = tree_tensors((args, kwargs))
        given = _generator(args, kwargs)
        number = self.seeds.next() if _draws(func) and given is None else None
        if not any(map(_is_fake, tensors)) and (tensors or _is_empty(func, args, kwargs)):
            return self._now(func, args, kwargs, number)
        written = _written(func, args, kwargs)
        if any(not _is_fake(tensor) for tensor in written):
            if any(map(_is_fake, written)):
                raise CannotDefer("it writes both to a tensor with values and to one without")
            return self._now(func, self.values(args), self.values(kwargs), number)
        state = None
        if given is not None:
            state = given.get_state()
            # executed because it changes the generator
            self._now(func, self.values(args), self.values(kwargs), None)
        args, kwargs = tree_map(self._constant, (args, kwargs))
        try:
            with self.fake:
                out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if written:
                raise
            return self._now(func, self.values(args), self.values(kwargs), number)
        self._record(func, args, kwargs, out, number, state)
        return out

    def _now(self, func: Any, args: Any, kwargs: Any, number: int | None) -> Any:
        if number is not None:
            self.seeds.seed(number)
        return func(*args, **kwargs)

    def _constant(self, item: Any) -> Any:
        """Return a fake tensor for a tensor with values, and log a copy of the values. NumPy could
        change the values later without an operation of torch."""
        if not isinstance(item, Tensor) or _is_fake(item):
            return item
        copy = item.detach().clone()
        fake = self.fake.from_tensor(copy, static_shapes=True)
        self.log.constants[self.log.keep(fake.untyped_storage())] = copy.untyped_storage()
        return fake

    def _record(
        self, func: Any, args: Any, kwargs: Any, out: Any, number: int | None, state: Tensor | None
    ) -> None:
        inputs = tree_tensors((args, kwargs))
        written = [self.view(tensor) for tensor in _written(func, args, kwargs)]
        outputs, new = self._outputs(out)
        if not written and not new:
            return
        fresh = new | self._overwritten(func, written, inputs)
        given_args, given_kwargs = tree_map(
            lambda item: self.view(item) if _is_fake(item) else item, (args, kwargs)
        )
        self.log.add(
            LoggedOperation(
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

    def _outputs(self, out: Any) -> tuple[tuple[StorageView | None, ...], set[int]]:
        outputs: list[StorageView | None] = []
        new: set[int] = set()
        for tensor in tree_tensors(out):
            if tensor.device.type != "cpu":
                raise CannotDefer(f"it makes a tensor on the device {tensor.device}")
            if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
                raise CannotDefer(
                    "it makes a tensor that is sparse, or a lazy conjugate or negative"
                )
            storage = tensor.untyped_storage()
            if storage_address(storage) in self.log.constants:
                raise CannotDefer("it makes a view of a tensor with values")
            known = storage_address(storage) in self.log.storages.keys() - new
            if not known:
                new.add(self.log.keep(storage))
            outputs.append(None if known else self.view(tensor))
        return tuple(outputs), new

    def _overwritten(self, func: Any, written: list[StorageView], inputs: list[Tensor]) -> set[int]:
        """Return the storage addresses that an operation overwrites completely without reading
        them."""
        if schema(func).name not in OVERWRITES or not self.log.is_whole(written[0]):
            return set()
        others = {storage_address(tensor.untyped_storage()) for tensor in inputs[1:]}
        return {written[0].storage} - others


def _is_fake(item: Any) -> bool:
    return isinstance(item, FakeTensor)


def _generator(args: Any, kwargs: Any) -> torch.Generator | None:
    for item in (*args, *kwargs.values()):
        if isinstance(item, torch.Generator) and item is not torch.default_generator:
            return item
    return None


def _is_empty(func: Any, args: Any, kwargs: Any) -> bool:
    on_cpu = torch.device(kwargs.get("device") or "cpu").type == "cpu"
    return func is torch.ops.aten.empty.memory_format and 0 in args[0] and on_cpu


@cache
def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    positions, names = _writes(func)
    return tree_tensors(
        (
            [args[place] for place in positions if place < len(args)],
            [kwargs[name] for name in names if name in kwargs],
        )
    )


@cache
def _writes(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    arguments = [
        (place, argument)
        for place, argument in enumerate(schema(func).arguments)
        if argument.alias_info and argument.alias_info.is_write
    ]
    return (
        tuple(place for place, argument in arguments if not argument.kwarg_only),
        tuple(argument.name for _, argument in arguments),
    )
