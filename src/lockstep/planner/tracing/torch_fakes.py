"""Private names of torch that tracing uses. A test covers each name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode as TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore
from torch.utils.flop_counter import flop_registry as flop_registry

from lockstep.base.torch_private import FakeTensor

DEVICE = torch.ops.prim.device.default
"""The operator that torch's C++ code calls to get the device of a fake tensor. Most calls in a
trace are calls of `prim.device`."""
PIN_MEMORY = torch.ops.aten._pin_memory.default
IS_PINNED = torch.ops.aten.is_pinned.default
_MISSING = object()

if TYPE_CHECKING:

    class PythonProcessGroup:
        """A process group in Python whose methods torch can call from C++."""

        def __init__(self, rank: int, size: int) -> None: ...

else:
    PythonProcessGroup = dist.ProcessGroup


def group_name(group: Any) -> str:
    name: str = dist.distributed_c10d._world.pg_names[group]
    return name


@contextmanager
def replaced(owner: Any, **names: Any) -> Iterator[None]:
    before = {name: vars(owner).get(name, _MISSING) for name in names}
    for name, value in names.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _MISSING:
                delattr(owner, name)  # it is inherited
            else:
                setattr(owner, name, value)


def temporary_backend(name: str, create: Callable[..., Any]) -> AbstractContextManager[None]:
    return replaced(
        dist.Backend,
        backend_list=[*dist.Backend.backend_list, name],
        backend_capability=dist.Backend.backend_capability | {name: ["cpu"]},
        backend_type_map=dist.Backend.backend_type_map
        | {name: dist.ProcessGroup.BackendType.CUSTOM},
        _plugins=dist.Backend._plugins | {name.upper(): dist.Backend._BackendPlugin(create, False)},
        **{name.upper(): name},
    )


def foreach_on_the_cpu() -> AbstractContextManager[None]:
    module = sys.modules["torch.optim.optimizer"]
    return replaced(
        module,
        _get_foreach_kernels_supported_devices=lambda: ["cpu"],
        _foreach_supported_types=[*module._foreach_supported_types, FakeTensor],
    )


def cpu_streams(
    stream: Callable[..., Any],
    event: Callable[..., Any],
    current: Callable[..., Any],
    entered: Callable[..., Any],
) -> AbstractContextManager[None]:
    return replaced(torch.cpu, Stream=stream, Event=event, current_stream=current, stream=entered)


class _Chunks:
    """The chunks of `torch.chunk`, each computed when it is read."""

    def __init__(self, tensor: Tensor, count: int, dim: int) -> None:
        self._tensor, self._dim, self._size = tensor, dim, -(-tensor.shape[dim] // count)

    def __getitem__(self, index: int) -> Tensor:
        length = self._tensor.shape[self._dim]
        start = min(index * self._size, length)
        return self._tensor.narrow(self._dim, start, min(self._size, length - start))


def chunks_on_demand() -> AbstractContextManager[None]:
    """Make FSDP2 create only this rank's chunk of a parameter."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    return replaced(_fsdp_param, _chunk_with_empty=_Chunks)


def mesh_methods(wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> dict[str, Any]:
    """Wrap the methods of `DeviceMesh` that read ranks as numbers."""
    from torch.distributed.device_mesh import DeviceMesh

    return {
        "__init__": wrapped(DeviceMesh.__init__),
        "_concatenate": staticmethod(wrapped(DeviceMesh._concatenate)),
    }


def propagation_methods(
    wrapped: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> tuple[Any, dict[str, Any]]:
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    name = "_propagate_tensor_meta_non_cached"
    return ShardingPropagator, {name: wrapped(getattr(ShardingPropagator, name))}


class _KeepsBuckets:
    """DDP's reducer, which does not rebuild its buckets after the first step."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def keeping_buckets() -> dict[str, Any]:
    from torch.nn.parallel import DistributedDataParallel

    original: Any = DistributedDataParallel._pre_forward

    def pre_forward(module: Any, *inputs: Any, **keywords: Any) -> Any:
        reducer, module.reducer = module.reducer, _KeepsBuckets(module.reducer)
        try:
            return original(module, *inputs, **keywords)
        finally:
            module.reducer = reducer

    return {"_pre_forward": pre_forward}
