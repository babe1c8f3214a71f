"""Every private name of torch for tensors without storage is in this torch, and does what it is
used for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from copy import copy
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from lockstep.base import torch_private
from lockstep.base.torch_private import FakeTensor, FakeTensorMode, disable_current_modes
from lockstep.planner.tracing import torch_fakes


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.fixture
def mesh(group: None) -> Iterator[DeviceMesh]:
    made = init_device_mesh("cpu", (1,), mesh_dim_names=("a",))
    yield made
    torch_private.forget_process_groups(made)


def test_fake_tensors_have_shapes_and_no_values() -> None:
    with FakeTensorMode():
        made = torch.ones(2, 3) @ torch.ones(3, 4)
        assert isinstance(made, FakeTensor)
        assert made.shape == (2, 4)
        assert made.untyped_storage().nbytes() == 32
        with pytest.raises(torch_private.DataDependentOutputException):
            made.sum().item()
        with pytest.raises(torch_private.DynamicOutputShapeException):
            made.nonzero()


def test_disable_current_modes() -> None:
    seen: list[str] = []

    class Seeing(torch_private.TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    with FakeTensorMode(), Seeing():  # type: ignore[no-untyped-call]
        with disable_current_modes():
            assert torch.ones(2).tolist() == [1, 1]
        torch.zeros(2)
    assert seen == ["zeros"]


def test_modes_are_asked_for_the_device_of_a_fake_tensor() -> None:
    asked: list[Any] = []

    class Answering(torch_private.TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function is torch_fakes.DEVICE:
                asked.append(args[0])
                return args[0].device
            return function(*args, **(kwargs or {}))

    with FakeTensorMode(), Answering():  # type: ignore[no-untyped-call]
        given = torch.ones(2, 3, requires_grad=True)
        (given @ given.t()).sum().backward()
    assert asked
    assert all(isinstance(each, FakeTensor) for each in asked)
    assert given.grad is not None
    assert given.grad.device == given.device == torch.device("cpu")


def test_torch_function_mode() -> None:
    class Doubling(torch_fakes.TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return function(*args, **(kwargs or {})) * (2 if function is torch.exp else 1)

    with Doubling():
        assert torch.exp(torch.zeros(1)).item() == 2


def test_flop_registry() -> None:
    shapes = torch.empty(2, 3), torch.empty(3, 4)
    assert (
        torch_fakes.flop_registry[torch.ops.aten.mm](*shapes, out_val=torch.empty(2, 4))
        == 2 * 2 * 3 * 4
    )
    names = {each.__name__ for each in torch_fakes.flop_registry}
    assert names >= {
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "convolution",
        "convolution_backward",
        "_scaled_dot_product_flash_attention",
    }


def test_pin_memory() -> None:
    assert torch_private.schema(torch_fakes.PIN_MEMORY).name == "aten::_pin_memory"
    assert torch_private.schema(torch_fakes.IS_PINNED).name == "aten::is_pinned"


def test_fake_store_and_group_name() -> None:
    dist.init_process_group("fake", store=torch_fakes.FakeStore(), rank=3, world_size=8)
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (3, 8)
        assert torch_fakes.group_name(dist.group.WORLD) == dist.group.WORLD.group_name
        assert torch_fakes.group_name(made := dist.new_group([0, 3])) == made.group_name
    finally:
        dist.destroy_process_group()


class Done(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


class PythonGroup(torch_fakes.PythonProcessGroup):
    called = 0

    def getBackendName(self) -> str:
        return "python"

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        PythonGroup.called += 1
        return Done()


def test_python_process_group() -> None:
    """Its methods are called by Python, and by torch's own C++, as in DDP and distributed
    tensors."""
    before = {
        name: copy(value)
        for name, value in vars(dist.Backend).items()
        if isinstance(value, dict | list | str)
    }
    with torch_fakes.temporary_backend(
        "python", lambda store, rank, size, timeout: PythonGroup(rank, size)
    ):
        dist.init_process_group("python", store=torch_fakes.FakeStore(), rank=0, world_size=2)
        try:
            called = PythonGroup.called
            dist.all_reduce(torch.ones(1))
            torch.ops._c10d_functional.all_reduce(
                torch.ones(1), "sum", torch_fakes.group_name(dist.group.WORLD)
            )
            assert PythonGroup.called == called + 2
        finally:
            dist.destroy_process_group()
    assert {
        name: value
        for name, value in vars(dist.Backend).items()
        if isinstance(value, dict | list | str)
    } == before


class Base:
    inherited = 1


class Owner(Base):
    plain = 2

    @staticmethod
    def static() -> int:
        return 3

    @classmethod
    def of(cls) -> type:
        return cls


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_replaced_is_afterwards_as_it_was(fails: bool) -> None:
    before = dict(vars(Owner))
    with (
        pytest.raises(ZeroDivisionError) if fails else torch_fakes.replaced(Owner),
        torch_fakes.replaced(
            Owner,
            inherited=10,
            plain=20,
            static=staticmethod(lambda: 30),
            of=staticmethod(lambda: int),
        ),
    ):
        assert (Owner.inherited, Owner.plain, Owner().static(), Owner.of()) == (10, 20, 30, int)
        _ = 1 / (0 if fails else 1)
    assert dict(vars(Owner)) == before


def test_foreach_on_the_cpu() -> None:
    def steps() -> set[str]:
        with FakeTensorMode(), torch.profiler.profile() as profile:
            weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
            optimizer = torch.optim.SGD(weights, lr=0.1)
            for weight in weights:
                weight.grad = torch.ones(2)
            optimizer.step()
        return {event.key for event in profile.key_averages()}

    assert "aten::_foreach_add_" not in steps()
    with torch_fakes.foreach_on_the_cpu():
        assert "aten::_foreach_add_" in steps()
    assert "aten::_foreach_add_" not in steps()


def test_cpu_streams(mesh: DeviceMesh) -> None:
    """FSDP2 makes its streams and events through `torch.cpu`, for tensors of the CPU."""
    made: list[str] = []
    before = torch.cpu.Stream, torch.cpu.Event, torch.cpu.current_stream, torch.cpu.stream

    def noting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original, updated=())
        def noted(*arguments: Any, **keywords: Any) -> Any:
            made.append(name)
            return original(*arguments, **keywords)

        return noted

    names = ("Stream", "Event", "current_stream", "stream")
    with torch_fakes.cpu_streams(
        *[noting(name, original) for name, original in zip(names, before, strict=True)]
    ):
        fully_shard(model := nn.Linear(2, 2), mesh=mesh)
        model(torch.ones(1, 2)).sum().backward()
    assert set(made) >= {"Stream", "current_stream", "stream"}
    assert (torch.cpu.Stream, torch.cpu.Event, torch.cpu.current_stream, torch.cpu.stream) == before


@pytest.mark.parametrize(("length", "count"), [(8, 2), (7, 4), (3, 4), (1, 3), (5, 1)])
def test_chunks_on_demand(length: int, count: int) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    original, tensor = _fsdp_param._chunk_with_empty, torch.arange(2 * length).view(length, 2)
    expected = original(tensor, count, 0)
    with torch_fakes.chunks_on_demand():
        chunks = _fsdp_param._chunk_with_empty(tensor, count, 0)
        assert [chunks[index].tolist() for index in range(count)] == [
            each.tolist() for each in expected
        ]
    assert _fsdp_param._chunk_with_empty is original


def test_mesh_methods(group: None) -> None:
    """A mesh is made of numbers; it is made outside of the mode that takes them away."""

    def outside(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            with disable_current_modes():
                return function(*arguments, **keywords)

        return wrapped

    methods = torch_fakes.mesh_methods(outside)
    assert methods.keys() == {"__init__", "_concatenate"}
    with torch_fakes.replaced(DeviceMesh, **methods):
        made = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
        with FakeTensorMode():
            joined = made._concatenate([made["a"], made["b"]])
    assert joined.mesh_dim_names == ("a", "b")
    torch_private.forget_process_groups(made)


def test_propagation_methods(group: None) -> None:
    """Torch finds the shape of a distributed tensor by computing with whole fake tensors."""
    calls: list[str] = []

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            calls.append(function.__name__)
            return function(*arguments, **keywords)

        return wrapped

    owner, methods = torch_fakes.propagation_methods(noted)
    mesh = init_device_mesh("cpu", (1,))
    with torch_fakes.replaced(owner, **methods):
        found = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=False) * 2
    assert found.shape == (2, 3)
    assert set(calls) == {"_propagate_tensor_meta_non_cached"}
    torch_private.forget_process_groups(mesh)


def test_keeping_buckets(group: None) -> None:
    asked: list[bool] = []

    def steps() -> int:
        model = DistributedDataParallel(nn.Linear(2, 2))
        asked.clear()
        for _ in range(2):
            reducer = model.reducer
            model.reducer = SimpleNamespace(
                _rebuild_buckets=lambda: asked.append(True),
                **{
                    name: getattr(reducer, name)
                    for name in dir(reducer)
                    if not name.startswith("__") and name != "_rebuild_buckets"
                },
            )
            output = model(torch.ones(1, 2))
            model.reducer = reducer
            output.sum().backward()
        return len(asked)

    assert steps() == 2
    with torch_fakes.replaced(DistributedDataParallel, **torch_fakes.keeping_buckets()):
        assert steps() == 0
    assert (
        sys.modules["torch.nn.parallel.distributed"].DistributedDataParallel
        is DistributedDataParallel
    )
