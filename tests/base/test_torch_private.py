"""Every private name of torch that lockstep uses is in this torch, does what it is used for, and is
used through one of two modules: for the names of the other see test_torch_fakes.py."""

import ast
import gc
import inspect
import json
import threading
import time
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import _get_fast_path_sharding_prop_cache_stats
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.flop_counter import FlopCounterMode

import lockstep
from lockstep.base import torch_private
from lockstep.planner.tracing import torch_fakes
from lockstep.testing.worker import loopback_store

PACKAGE = Path(lockstep.__file__).parent
PYTHONS = {
    *(
        "_exit",
        "_current_frames",
        "_getframe",
        "_replace",
        "_fields",
        "_config",
        "_on_queue_feeder_error",
        "_exit_function",
        "_finalizer",
    ),
    *("_run_exitfuncs", "_TextIOBase", "_BufferedIOBase", "_resource_tracker"),
}
"""Private names of the standard library."""
IN_PLACE = "_foreach_"


@pytest.fixture
def group(tmp_path):
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.fixture
def mesh(group):
    made = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    yield made
    torch_private.forget_process_groups(made)
    gc.collect()


@pytest.mark.parametrize("name", torch_private._FSDP)
def test_a_class_of_fsdp_is_there(name):
    assert inspect.isclass(getattr(torch_private, name))


@pytest.mark.parametrize(
    ("path", "name"),
    [(path, name) for path, names in torch_private.SUBCLASSED.items() for name in sorted(names)],
)
def test_a_protected_name_is_there(path, name):
    module, _, attribute = path.partition(":")
    kind = getattr(import_module(module), attribute)
    assert hasattr(kind, name) or any(
        f"self.{name}" in inspect.getsource(each.__init__) for each in kind.__mro__[:-1]
    )


def test_recurrent_caches():
    assert vars(nn.LSTM(2, 2)).keys() >= torch_private.RECURRENT_CACHES


def test_fake_parameter_mark():
    with torch_private.FakeTensorMode():
        assert torch_private.FAKE_PARAMETER_MARK in vars(nn.Parameter(torch.empty(1)))


def test_is_distributed_and_to_local(mesh):
    tensor = torch.arange(4.0)
    distributed = distribute_tensor(tensor, mesh["a"], [Shard(0)])
    assert torch_private.is_distributed(distributed)
    assert not torch_private.is_distributed(tensor)
    assert torch_private.to_local(tensor) is tensor
    part = torch_private.to_local(distributed)
    assert not torch_private.is_distributed(part)
    assert part.data_ptr() == distributed.to_local().data_ptr()


def test_set_item_of_distributed(mesh):
    before = dict(DTensor._op_dispatcher._custom_op_handlers)
    distributed = distribute_tensor(torch.arange(4.0), mesh["a"], [Shard(0)])
    try:
        torch_private.set_item_of_distributed(lambda tensor: (type(tensor), 5.0)[1])
        assert (distributed.sum().item(), float(distributed.norm()), bool(distributed.sum())) == (
            5.0,
            5.0,
            True,
        )
    finally:
        DTensor._op_dispatcher._custom_op_handlers = before


def test_version():
    tensor = torch.zeros(1)
    before = torch_private.version(tensor)
    tensor.add_(1)
    assert torch_private.version(tensor) == before + 1
    with torch.inference_mode():
        constant = torch.zeros(1)
    assert torch_private.version(constant) == 0


def test_versions():
    written, plain = torch.zeros(1), torch.zeros(1)
    first = torch_private.versions([written, plain])
    written.add_(1)
    assert torch_private.versions([written, plain]) == [first[0] + 1, first[1]]
    with torch.inference_mode():
        uncounted = torch.zeros(1)
    assert torch_private.versions([written, uncounted]) == [first[0] + 1, 0]


def test_storage_address():
    tensor, other = torch.empty(2, device="meta"), torch.empty(2, device="meta")
    address = torch_private.storage_address(tensor.untyped_storage())
    assert torch_private.storage_address(tensor[1:].untyped_storage()) == address
    assert torch_private.storage_address(other.untyped_storage()) != address


def test_gradient_hooks():
    tensor = torch.zeros(1, requires_grad=True)
    assert not torch_private.gradient_hooks(tensor)
    tensor.register_hook(print)
    assert list(torch_private.gradient_hooks(tensor).values()) == [print]


def test_set_gradient_hooks():
    one, other = (torch.ones(1, requires_grad=True) for _ in range(2))
    handle = one.register_hook(lambda gradient: gradient * 3)
    torch_private.set_gradient_hooks(other, torch_private.gradient_hooks(one))
    other.sum().backward()
    assert other.grad.tolist() == [3.0]
    handle.remove()
    other.sum().backward()
    assert other.grad.tolist() == [4.0]


def test_gradient_hook_counts():
    one, other = (torch.ones(1, requires_grad=True) for _ in range(2))
    one.register_hook(print)
    one.register_post_accumulate_grad_hook(print)
    assert torch_private.gradient_hook_counts([one, other]) == [2, 0]


def test_post_accumulate_hooks():
    tensor = torch.zeros(1, requires_grad=True)
    assert not torch_private.post_accumulate_hooks(tensor)
    tensor.register_post_accumulate_grad_hook(print)
    assert list(torch_private.post_accumulate_hooks(tensor).values()) == [print]


def test_make_subclass():
    tensor = torch.zeros(1)
    made = torch_private.make_subclass(nn.Parameter, tensor, True)
    assert type(made) is nn.Parameter
    assert made.requires_grad
    assert made.data_ptr() == tensor.data_ptr()


def test_swap_implementations():
    one, other = torch.zeros(1), torch.ones(2)
    one.mark = "one"
    torch_private.swap_implementations(one, other)
    assert (one.tolist(), other.tolist()) == ([1, 1], [0])
    assert one.mark == "one"


def test_assert_async():
    torch_private.assert_async(torch.tensor(True), "fine")
    with pytest.raises(RuntimeError, match="not fine"):
        torch_private.assert_async(torch.tensor(False), "not fine")


def test_schema():
    schema = torch_private.schema(torch.ops.aten.add_.Tensor)
    assert schema.name == "aten::add_"
    assert [
        argument.name
        for argument in schema.arguments
        if argument.alias_info and argument.alias_info.is_write
    ] == ["self"]


def test_in_backward():
    seen = []
    tensor = torch.zeros(1, requires_grad=True)
    tensor.register_hook(lambda _: seen.append(torch_private.in_backward()))
    tensor.sum().backward()
    assert seen == [True]
    assert not torch_private.in_backward()


def test_unsafe_view():
    base = torch.ones(6, requires_grad=True) * 2
    found = torch_private.unsafe_view(base, (2, 3))
    assert found.shape == (2, 3)
    assert not found._is_view()
    assert base.view(2, 3)._is_view()


def test_without_torch_function_modes():
    seen = []

    class Mode(TorchFunctionMode):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(self.name)
            return func(*args, **(kwargs or {}))

    with Mode("outer"), Mode("inner"):
        with torch_private.without_torch_function_modes():
            torch.ones(1).add(1)
        assert seen == []
        torch.ones(1)
    assert seen == ["inner", "outer"]


def test_uncounted():
    with FlopCounterMode(display=False) as counter:
        torch.ones(2, 3) @ torch.ones(3, 4)
        with torch_private.uncounted():
            torch.ones(5, 5) @ torch.ones(5, 5)
        torch.ones(2, 3) @ torch.ones(3, 4)
    assert counter.get_total_flops() == 2 * 2 * 2 * 3 * 4


def test_keeps_graph():
    leaf, seen = torch.ones(1, requires_grad=True), []
    output = leaf * 2
    output.register_hook(lambda _: seen.append(torch_private.keeps_graph()))
    output.backward(retain_graph=True)
    output.backward()
    assert seen == [True, False]


def test_backward_number():
    seen = []
    tensor, inner = (torch.zeros(1, requires_grad=True) for _ in range(2))
    for each in (tensor, inner):
        each.register_hook(lambda _: seen.append(torch_private.backward_number()))
    tensor.register_hook(lambda _: torch.enable_grad()(lambda: inner.sum().backward())())
    tensor.sum().backward()
    assert len(set(seen)) == 2
    assert torch_private.backward_number() == -1


def test_profiler_enabled_and_step_is_profiled():
    found = []
    for _ in range(2):
        found.append((torch_private.profiler_enabled(), torch_private.step_is_profiled()))
        with torch.profiler.profile():
            found.append((torch_private.profiler_enabled(), torch_private.step_is_profiled()))
    assert found == [(False, False), (True, True)] * 2


def test_cpu_multiplies_bf16():
    assert torch_private.cpu_multiplies_bf16() in (True, False)


def test_update_loss_scale():
    scale, in_a_row = torch.tensor(8.0), torch.tensor(0, dtype=torch.int32)
    seen = []
    for overflowed in (1.0, 0.0, 0.0, 0.0, 1.0):
        torch_private.update_loss_scale(
            scale, in_a_row, torch.tensor(overflowed), steps_to_double=3
        )
        seen.append((scale.item(), in_a_row.item()))
    assert seen == [(4.0, 0), (4.0, 1), (4.0, 2), (8.0, 0), (4.0, 0)]


def test_set_allocator_settings():
    # not called: its settings are the process's for good
    assert hasattr(torch._C, "_accelerator_setAllocatorSettings")


def test_own_parameters_buffers_and_modules():
    module = nn.Sequential(nn.BatchNorm1d(2))
    assert not torch_private.own_parameters(module)
    assert torch_private.own_modules(module) == {"0": module[0]}
    assert torch_private.own_parameters(module[0]).keys() == {"weight", "bias"}
    assert torch_private.own_buffers(module[0]).keys() == {
        "running_mean",
        "running_var",
        "num_batches_tracked",
    }
    assert (
        set(vars(module))
        >= torch_private.MODULE_ATTRIBUTES
        >= {"_parameters", "_buffers", "_modules", "training"}
    )


def test_buffers_that_are_not_persistent_are_known():
    module = nn.BatchNorm1d(2)
    module.register_buffer("scratch", torch.zeros(1), persistent=False)
    assert torch_private.non_persistent_buffers(module) == {"scratch"}
    assert "scratch" not in module.state_dict()


def test_apply_to_own_tensors():
    module = nn.Sequential(nn.Linear(1, 1))
    torch_private.apply_to_own_tensors(module, torch.zeros_like)
    assert module[0].weight.item() != 0
    torch_private.apply_to_own_tensors(module[0], torch.zeros_like)
    assert module[0].weight.item() == 0


def test_compiled_modules_are_known():
    plain, in_place, forward = (nn.Linear(1, 1) for _ in range(3))
    in_place.compile()
    forward.forward = torch.compile(forward.forward)
    assert [
        torch_private.is_compiled_in_place(module) for module in (plain, in_place, forward)
    ] == [False, True, False]
    assert torch_private.has_compiled_forward(forward)
    assert not torch_private.has_compiled_forward(plain)


def test_is_optimizer_initialized():
    class Bare(torch.optim.SGD):
        def __init__(self, parameters):
            pass

    parameters = [nn.Parameter(torch.zeros(1))]
    assert torch_private.is_optimizer_initialized(torch.optim.SGD(parameters))
    assert not torch_private.is_optimizer_initialized(Bare(parameters))


def test_has_step_hooks():
    parameters = [nn.Parameter(torch.zeros(1))]
    for register in ("register_step_pre_hook", "register_step_post_hook"):
        optimizer = torch.optim.SGD(parameters)
        assert not torch_private.has_step_hooks(optimizer)
        getattr(optimizer, register)(print)
        assert torch_private.has_step_hooks(optimizer)
    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        handle = register(print)
        assert torch_private.has_step_hooks(torch.optim.SGD(parameters))
        handle.remove()


def test_divides_gradients():
    parameters = [nn.Parameter(torch.zeros(1))]
    assert torch_private.divides_gradients(torch.optim.AdamW(parameters, fused=True))
    assert not torch_private.divides_gradients(torch.optim.AdamW(parameters))


def test_shut_down_workers():
    loader = DataLoader(
        [1, 2], num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    batches = iter(loader)
    assert next(batches).tolist() == [1]
    workers = batches._workers
    torch_private.shut_down_workers(loader, batches)
    assert not any(worker.is_alive() for worker in workers)
    assert loader._iterator is None


def test_default_store(group):
    store = torch_private.default_store()
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_rendezvous_polls_and_state(monkeypatch):
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    with torch_private.rendezvous_polls_every(0.01):
        dynamic_rendezvous._delay(seconds=1)
    assert slept == [0.01]
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    backend = Backend()
    holder = dynamic_rendezvous._BackendRendezvousStateHolder(backend, settings=None)
    holder._sanitize = lambda: None
    torch_private.refresh_rendezvous_state_after(holder, 0.25)
    for count in (1, 2):
        holder.sync()
        holder.sync()
        assert backend.asked == count
        now += 0.26


def test_the_machines_of_a_rendezvous_that_are_dropped():
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    settings = dynamic_rendezvous.DynamicRendezvousHandler.from_backend(
        "run", None, Backend(), 1, 2
    ).settings
    holder = dynamic_rendezvous._BackendRendezvousStateHolder(Backend(), settings, 0)
    told, asked = {"fresh": datetime.now(UTC), "old": datetime(2000, 1, 1, tzinfo=UTC)}, []
    holder._state.last_heartbeats, holder._state.participants = dict(told), {"fresh": 0, "old": 1}

    def lost(heartbeats):
        asked.append(dict(heartbeats))
        return {"fresh"}

    torch_private.judge_heartbeats_by(holder, lost)
    holder._sanitize()
    assert asked == [told]
    assert holder.state.last_heartbeats == {"old": told["old"]}
    assert holder.state.participants == {"old": 1}


def test_a_rendezvous_without_records():
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    def parts(handler):
        return handler, handler._state_holder, handler._op_executor

    handler = DynamicRendezvousHandler.from_backend("run", None, Backend(), 1, 1)
    recorded = [part._record for part in parts(handler)]
    torch_private.skip_rendezvous_records(handler)
    for part, record in zip(parts(handler), recorded, strict=True):
        assert part._record is not record
        assert part._record(message="met") is None


class Backend:
    name = "test"

    def __init__(self):
        self.asked = 0

    def get_state(self):
        self.asked += 1


def test_resolve_process_group(group):
    assert torch_private.resolve_process_group(dist.group.WORLD.group_name) is dist.group.WORLD


def test_active_collectives_json(group):
    dist.barrier()
    entries = json.loads(torch_private.active_collectives_json()).get("entries", [])
    assert [entry for entry in entries if not entry["retired"]] == []


@pytest.mark.parametrize("name", torch_private.IMPORTED_IN_TRAINING)
def test_modules_imported_in_training_are_there(name):
    assert import_module(name)


def test_forget_process_groups(mesh):
    assert mesh._get_root_mesh()._pg_registry
    torch_private.forget_process_groups(mesh)
    assert not mesh._get_root_mesh()._pg_registry


def test_clone_store():
    store = loopback_store()
    clone = torch_private.clone_store(torch_private.PrefixStore("a", store))
    clone.set("key", "value")
    assert isinstance(clone, torch_private.Store)
    assert store.get("a/key") == b"value"
    assert isinstance(clone.underlying_store, torch_private.TCPStore)
    assert clone.underlying_store is not store


def test_process_group_count_and_number_process_groups_from(group):
    assert torch_private.process_group_count() == 1
    torch_private.number_process_groups_from(7)
    assert dist.new_group([0]).group_name == "7"
    assert torch_private.process_group_count() == 8


def test_abort_accelerator_groups_leaves_gloo(group, monkeypatch):
    aborted = []
    monkeypatch.setattr(dist.ProcessGroup, "abort", lambda self: aborted.append(self))
    assert not torch_private.abort_accelerator_groups()
    assert aborted == []


def test_abort_accelerator_groups_within_a_region_where_the_backend_has_one(monkeypatch):
    """The NCCL of torch 2.13 and 2.14, and the legacy one of 2.15."""
    done = []
    backend = SimpleNamespace(
        name=lambda: "nccl",
        _group_start=lambda: done.append("("),
        _group_end=lambda: done.append(")"),
    )
    use_groups(monkeypatch, backend, {"0": lambda: done.append("0"), "1": lambda: done.append("1")})
    assert torch_private.abort_accelerator_groups()
    assert done == ["(", "1", "0", ")"]


def test_abort_accelerator_groups_at_once_where_it_has_none(monkeypatch):
    """The NCCL of torch 2.15. The abort of one group may wait for a kernel of another."""
    both = threading.Barrier(2, timeout=10)
    use_groups(monkeypatch, SimpleNamespace(name=lambda: "nccl2"), {"0": both.wait, "1": both.wait})
    assert torch_private.abort_accelerator_groups()
    assert not both.broken


def use_groups(monkeypatch, backend, aborts):
    """Have torch know process groups of `backend`: name -> what `abort` does."""
    device = SimpleNamespace(type="cuda")
    groups = {
        Group(_device_types=[device], _get_backend=lambda _: backend, abort=abort): name
        for name, abort in aborts.items()
    }
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_names=groups))


class Group(SimpleNamespace):
    __hash__ = object.__hash__


def test_accelerator_groups_failed(group, monkeypatch):
    assert not torch_private.accelerator_groups_failed()
    backend = SimpleNamespace(name=lambda: "nccl")
    use_groups(monkeypatch, backend, {"0": None})
    assert not torch_private.accelerator_groups_failed(), "it does not know"
    for word, failed in {"SUCCESS": False, "TIMEOUT": True, "REMOTE_ERROR": True}.items():
        backend.get_error = lambda word=word: SimpleNamespace(name=word)
        assert torch_private.accelerator_groups_failed() == failed


def test_accelerator_collectives_json(group, monkeypatch):
    """Each recorder that a backend may have: NCCL's in torch's module, XCCL's in the object, and
    the hook's of 2.15."""
    assert torch_private.accelerator_collectives_json() == []
    asked = []

    def dump(recorder, **given):
        asked.append((recorder, given))
        return b"{}"

    use_groups(monkeypatch, SimpleNamespace(name=lambda: "nccl"), {"0": None})
    monkeypatch.setattr(
        _distributed_c10d, "_dump_nccl_trace_json", partial(dump, "nccl"), raising=False
    )
    assert torch_private.accelerator_collectives_json()[:1] == [b"{}"]
    use_groups(
        monkeypatch,
        SimpleNamespace(name=lambda: "xccl", _dump_xccl_trace_json=partial(dump, "xccl")),
        {"0": None},
    )
    assert torch_private.accelerator_collectives_json()[:1] == [b"{}"]
    assert asked == [
        (name, {"includeCollectives": True, "onlyActive": False}) for name in ("nccl", "xccl")
    ]
    monkeypatch.setattr(
        _distributed_c10d, "_dump_fr_trace_json", lambda *, backend: backend.encode()
    )
    use_groups(monkeypatch, SimpleNamespace(name=lambda: "nccl2"), {"0": None})
    assert torch_private.accelerator_collectives_json() == [b"nccl2"]


def test_forget_distributed_operations(mesh):
    tensor = distribute_tensor(torch.arange(4.0), mesh["a"], [Shard(0)])
    torch_private.forget_distributed_operations()
    misses = []
    for forgotten in (False, False, True):
        if forgotten:
            torch_private.forget_distributed_operations()
        before = _get_fast_path_sharding_prop_cache_stats()[1]
        tensor + tensor
        misses.append(_get_fast_path_sharding_prop_cache_stats()[1] - before)
    assert misses[1] == 0
    assert misses[0] == misses[2] > 0


def test_fsdp_parameter_group(mesh):
    model = fully_shard(nn.Linear(2, 2), mesh=mesh["a"])
    found = torch_private.fsdp_parameter_group(model)
    assert [each.sharded_param for each in found.fsdp_params] == list(model.parameters())
    model(torch.ones(1, 2))
    assert list(map(torch_private.parameter_name, found.fsdp_params)) == ["weight", "bias"]
    assert found.fsdp_params[0].padded_sharded_param_size == torch.Size([2, 2])


def test_saved_tensors():
    weight, x = nn.Parameter(torch.ones(3, 2)), torch.ones(2, 3)
    product = x @ weight.view(3, 2).double().float()
    ((saved, tensor),) = torch_private.saved_tensors(product.grad_fn)
    assert tensor is x
    saved.register_hooks(lambda _: None, lambda _: 2 * x)
    assert list(torch_private.saved_tensors(product.grad_fn)) == []
    product.sum().backward()
    assert weight.grad.tolist() == [[4.0, 4.0]] * 3
    assert torch_private.saved_value(weight.transpose(0, -1).grad_fn, "dim1") == -1
    assert torch_private.saved_value(weight.permute(-1, 0).grad_fn, "dims") == [-1, 0]
    assert torch_private.output_shape(weight.view(2, 3).grad_fn, 0) == torch.Size([2, 3])
    assert (
        list(torch_private.saved_tensors(torch.stack([weight.exp(), weight.exp()]).grad_fn)) == []
    )
    freed = weight[torch.tensor([1, 0])]
    freed.sum().backward()
    assert list(torch_private.saved_tensors(freed.grad_fn)) == []


def test_saved_tensor_hooks():
    def pack(tensor):
        return tensor

    assert torch_private.saved_tensor_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        assert torch_private.saved_tensor_hooks() == (pack, pack)
        assert not torch_private.checkpoints_saved_tensors()
    seen = []

    def function(x):
        seen.append(torch_private.checkpoints_saved_tensors())
        return x.exp()

    checkpoint(function, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert seen == [True, True]


def test_base_of():
    tensor = torch.ones(2, 2)
    assert torch_private.base_of(tensor) is torch_private.base_of(tensor.t()) is tensor


def test_gathered(mesh):
    model = fully_shard(nn.Linear(2, 2), mesh=mesh["a"])
    group = torch_private.fsdp_parameter_group(model)
    assert torch_private.gathered(group.fsdp_params[0]) is None
    output = model(torch.ones(2, 2, requires_grad=True))
    assert torch_private.gathered(group.fsdp_params[0]).shape == (2, 2)
    nodes = [output.grad_fn, *(each for each, _ in output.grad_fn.next_functions)]
    assert [torch_private.begins_forward_of(group, node) for node in nodes].count(True) == 1


def test_reduce_gradients(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    weights = [each.detach().clone().requires_grad_() for each in model.parameters()]
    for module in (model[0], model):
        fully_shard(module, mesh=mesh["a"])
    linear = nn.functional.linear
    expected = linear(linear(torch.ones(3, 2), *weights[:2]), *weights[2:]).sum()
    gradients = torch.autograd.grad(expected, weights)

    def grads():
        return [torch_private.to_local(each.grad) for each in model.parameters()]

    for steps in (1, 2):
        model.set_requires_gradient_sync(False)
        model(torch.ones(3, 2)).sum().backward()
        model(torch.ones(3, 2)).sum().backward()
        if steps == 1:
            assert [each.grad for each in model.parameters()] == [None] * 4
        model.set_requires_gradient_sync(True)
        torch_private.reduce_gradients(model)
        torch.testing.assert_close(grads(), [2 * steps * each for each in gradients])
    # the next backward reduces by itself
    model(torch.ones(3, 2)).sum().backward()
    torch.testing.assert_close(grads(), [5 * each for each in gradients])


class SkipsWeight(nn.Linear):
    def forward(self, x, uses_weight):
        return super().forward(x) if uses_weight else x + self.bias


@pytest.mark.parametrize("uses_weight", [True, False])
def test_a_parameter_is_gathered_in_another_dtype(mesh, uses_weight):
    model = SkipsWeight(2, 2)
    model.other = nn.Linear(2, 2)
    model.other.weight = model.weight
    fully_shard(model, mesh=mesh["a"])
    model.set_reduce_scatter_unused_params(True)
    weight, bias = torch_private.fsdp_parameter_group(model).fsdp_params[:2]
    assert torch_private.owners_of(weight) == [(model, "weight"), (model.other, "weight")]
    torch_private.gather_in(weight, torch.bfloat16)
    assert torch_private.gathered_short(weight) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.ones(2, 2, requires_grad=True), uses_weight).sum()
    loss.backward()
    name, gathered = torch_private.gathered_short(weight)
    assert (name, gathered.dtype, torch_private.gathered_short(bias)) == (
        "weight",
        torch.bfloat16,
        None,
    )
    assert (
        model.weight.dtype,
        model.weight.grad.dtype,
        bool(model.weight.grad.full_tensor().any()),
    ) == (*(torch.float32, torch.float32), uses_weight)


def test_default_mps_generator():
    assert callable(torch.mps._get_default_mps_generator)
    if torch.backends.mps.is_available():
        assert torch_private.default_mps_generator().device.type == "mps"


def test_unmark_sharded(mesh):
    model = fully_shard(nn.Sequential(nn.Linear(2, 2)), mesh=mesh["a"])
    assert model[0]._is_fsdp_managed_module  # transformers looks for it
    torch_private.unmark_sharded(model[0])
    assert [hasattr(each, "_is_fsdp_managed_module") for each in model.modules()] == [True, False]


def test_remove_forward_hooks(mesh):
    model = fully_shard(nn.Linear(2, 2), mesh=mesh["a"])
    assert torch_private.gathers_in_forward(model)
    torch_private.remove_forward_hooks(model)
    assert not torch_private.gathers_in_forward(model)
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_set_unshard_async(mesh):
    torch_private.set_unshard_async(fully_shard(nn.Linear(2, 2), mesh=mesh["a"]), True)


def test_is_fsdp_root(mesh):
    model = nn.Sequential(nn.Linear(2, 2))
    for module in (model[0], model):
        fully_shard(module, mesh=mesh["a"])
    assert [torch_private.is_fsdp_root(module) for module in (model, model[0])] == [False, False]
    model(torch.zeros(2, 2))
    assert [torch_private.is_fsdp_root(module) for module in (model, model[0])] == [True, False]


def test_is_fsdp_root_after_a_part(mesh):
    model = nn.Sequential(nn.Linear(2, 2))
    for module in (model[0], model):
        fully_shard(module, mesh=mesh["a"])
    model[0](torch.zeros(2, 2))
    with pytest.raises(RuntimeError, match="requires running forward through the root module"):
        model(torch.zeros(2, 2))
    assert not torch_private.is_fsdp_root(model)


def test_stage_input_gradients(group):
    stage = PipelineStage(nn.Linear(1, 1), 0, 1, torch.device("cpu"))
    assert torch_private.stage_input_gradients(stage) is stage.bwd_cache


def test_keep_gradients(mesh):
    model = fully_shard(nn.Linear(1, 1), mesh=mesh["a"])
    model(torch.ones(1, 1)).sum().backward()
    gradients = [each.grad for each in model.parameters()]
    stage = PipelineStage(nn.Sequential(model), 0, 1, torch.device("cpu"))
    torch_private.keep_gradients(stage)
    stage._post_metadata_inference_cleanup()
    assert [each.grad for each in model.parameters()] == gradients != [None] * 2
    del stage._post_metadata_inference_cleanup  # torch's own
    stage._post_metadata_inference_cleanup()
    assert [each.grad for each in model.parameters()] == [None] * 2


def test_schedule_losses(group):
    stage = PipelineStage(nn.Linear(1, 1), 0, 1, torch.device("cpu"))
    for schedule in (
        Schedule1F1B(stage, 1, loss_fn=print),
        ScheduleInterleavedZeroBubble([stage], 1, loss_fn=print),
    ):
        assert torch_private.schedule_losses(schedule) == []


def test_loader_classes():
    kind, fetchers = torch_private.loader_classes()
    for options in (
        {},
        {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"},
    ):
        loader = DataLoader([1, 2], **options)
        batches = iter(loader)
        assert isinstance(batches, kind)
        assert list(batches) == [1, 2]
        torch_private.shut_down_workers(loader, batches if options else None)
    assert all(
        callable(getattr(kind, name)) for name in ("__init__", "_reset", "_next_index", "__next__")
    )
    assert not {"__next__", "_next_index"} & vars(type(batches)).keys(), (
        "not overridden: a wrapper would see nothing"
    )
    used = [type(iter(DataLoader(dataset))._dataset_fetcher) for dataset in ([1, 2], Stream())]
    assert used == list(fetchers)
    assert all("fetch" in vars(each) for each in used)


class Stream(IterableDataset):
    def __iter__(self):
        yield 1


def test_divisor():
    x = torch.ones(3, requires_grad=True)
    assert [
        torch_private.divisor((x.sum() / by).grad_fn)
        for by in (4, 2.5, torch.tensor(3.0), torch.tensor([1.0, 2.0]))
    ] == [4, 2.5, 3, None]
    assert type((x / 2).grad_fn).__name__ == "DivBackward0"
    assert torch_private.divisor((x + 1).grad_fn) is None


def test_labels_averaged_by():
    outputs, labels = torch.ones(4, 3, requires_grad=True), torch.tensor([0, -100, 1, 2])

    def averaged(outputs, labels, **how):
        return torch_private.labels_averaged_by(
            nn.functional.cross_entropy(outputs, labels, **how).grad_fn
        )

    images = outputs.t()[None].unsqueeze(3)
    for found in (averaged(outputs, labels), averaged(images, labels[None, :, None])):
        assert torch.equal(found[0].flatten(), labels)
        assert found[1:] == (-100, 3.0)
    assert averaged(outputs, labels.clamp(-1), ignore_index=-1)[1:] == (-1, 3.0)
    for how in ({"reduction": "sum"}, {"weight": torch.ones(3)}):
        assert averaged(outputs, labels, **how) is None
    assert averaged(outputs, labels.clamp(0), ignore_index=0) is None
    assert torch_private.labels_averaged_by((outputs + 1).grad_fn) is None
    with torch.autograd.graph.saved_tensors_hooks(lambda _: "packed", pytest.fail):
        assert averaged(outputs, labels) is None


def test_saved_factors():
    x, by = torch.ones(3, requires_grad=True), torch.tensor([1.0, 2.0, 3.0])
    for product in (x * by, by * x, x.dot(by), by.dot(x)):
        (kept,) = torch_private.saved_factors(product.grad_fn)
        assert kept is by or torch.equal(kept, by)
    assert torch_private.saved_factors((x + by).grad_fn) == []
    with torch.autograd.graph.saved_tensors_hooks(lambda _: "packed", pytest.fail):
        assert torch_private.saved_factors((x * by).grad_fn) == []


def test_a_hook_that_runs_first():
    x, seen = torch.ones(2, requires_grad=True), []
    x.register_hook(lambda gradient: gradient * 10)
    torch_private.run_first(x, lambda gradient: seen.append(gradient.tolist()))
    x.sum().backward()
    assert (seen, x.grad.tolist()) == ([[1, 1]], [10, 10])


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def test_the_function_of_a_node():
    node = Doubled.apply(torch.ones(2, requires_grad=True)).grad_fn
    assert torch_private.function_of(node) is Doubled


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and not name.startswith(IN_PLACE)


def defined_in(trees):
    """The names of all functions, classes, arguments and variables in the trees, and of what they
    set on `self` and `cls`."""
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) in ("self", "cls")
        ):
            yield node.attr


def private_names_of_torch(tree, known, own):
    """Uses of a name that is torch's, or at least neither ours nor the standard library's. `known`:
    private names of torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            yield from (
                f"{node.lineno}: import {node.module}.{each.name}"
                for each in node.names
                if any(map(is_private, f"{node.module}.{each.name}".split(".")))
            )
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in PYTHONS:
            base = ast.unparse(node.value)
            if base in ("self", "cls", "super()"):
                found = node.attr not in own and not any(
                    node.attr in names for names in torch_private.SUBCLASSED.values()
                )
            else:
                found = (
                    node.attr in known
                    or node.attr not in own
                    or base.partition(".")[0] in ("torch", "dist", "nn")
                )
            if found:
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Constant) and node.value in known:
            yield f"{node.lineno}: {node.value!r}"


def test_no_other_module_has_private_names_of_torch():
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    homes = [trees.pop(Path(module.__file__)) for module in (torch_private, torch_fakes)]
    nodes = [node for home in homes for node in ast.walk(home)]
    known = {
        node.attr for node in nodes if isinstance(node, ast.Attribute) and is_private(node.attr)
    }
    known |= {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and is_private(str(node.value))
    }
    # also in an operation's name
    known -= {name for names in torch_private.SUBCLASSED.values() for name in names} | {
        "_HOME",
        "_base",
    }
    optunas = {"_trial_id", "_study_id", "_suggest"}
    transformers = {
        "_attn_implementation",
        "_can_set_attn_implementation",
        "_experts_implementation",
    }
    own = set(defined_in(trees.values())) | {"_enclosure"} | optunas | transformers
    found = {
        path.name: list(private_names_of_torch(tree, known, own)) for path, tree in trees.items()
    }
    assert {name: uses for name, uses in found.items() if uses} == {}


def test_the_search_finds_private_names():
    code = """
from torch._C import x
torch.cpu._is()
module._parameters
tensor._unheard_of
self._mine
os._exit(0)
torch._foreach_add_(a, b)
"""
    found = list(private_names_of_torch(ast.parse(code), {"_parameters"}, {"_mine"}))
    assert sorted(int(line.partition(":")[0]) for line in found) == [2, 3, 4, 5]


def test_changed_grad_tensors() -> None:
    with_gradient, without = torch.ones(2, requires_grad=True), torch.ones(2)
    changed = torch_private.changed_grad_tensors(
        ([with_gradient], {"x": without}), lambda *tensors: [tensor * 2 for tensor in tensors]
    )
    assert changed[0][0].tolist() == [2.0, 2.0]
    assert changed[1]["x"] is without
    assert torch_private.changed_grad_tensors((without,), lambda *_: []) is None


def test_another_thread_enters_the_modes_of_this_one():
    found = []

    def run(entered):
        with entered():
            found.append(torch.empty(2).device)
            torch.ones(2, 3, device="cpu") @ torch.ones(3, 2, device="cpu")
        found.append(torch.empty(2).device)

    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        thread = threading.Thread(target=run, args=(torch_private.current_modes(),))
        thread.start()
        thread.join()
    assert found == [torch.device("meta"), torch.device("cpu")]
    assert counter.get_total_flops() == 2 * 2 * 3 * 2
