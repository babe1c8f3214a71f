"""Every private name of torch that lockstep uses. No other module reaches for one;
`torch._foreach_*` alone are used in place.

Each name is in torch 2.13 to 2.15, and tests/base/test_torch_private.py has a test for it. If one
of them fails under another torch, the function here is the place to mend.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass
from torch._C._distributed_c10d import (
    GradBucket as GradBucket,
    PrefixStore as PrefixStore,
    Store as Store,
    TCPStore as TCPStore,
)
from torch._prims_common import make_contiguous_strides_for as make_contiguous_strides_for
from torch._subclasses.fake_tensor import (
    DataDependentOutputException as DataDependentOutputException,
    DynamicOutputShapeException as DynamicOutputShapeException,
    FakeTensor as FakeTensor,
    FakeTensorMode as FakeTensorMode,
)
from torch.nn.modules import batchnorm, dropout
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import (
    tree_flatten as tree_flatten,
    tree_leaves as tree_leaves,
    tree_map as tree_map,
    tree_unflatten as tree_unflatten,
)
from torch.utils.data._utils.collate import (
    collate as collate,
    default_collate_fn_map as default_collate_fn_map,
)

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp._fully_shard._fsdp_api import (
        AllGather as AllGather,
        ReduceScatter as ReduceScatter,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
        DefaultAllGather as DefaultAllGather,
    )
    from torch.optim import Optimizer

BatchNormBase = batchnorm._BatchNorm
DropoutBase = dropout._DropoutNd
disable_current_modes = _python_dispatch._disable_current_modes

_FSDP = {
    "AllGather": "_fsdp_api",
    "ReduceScatter": "_fsdp_api",
    "DefaultAllGather": "_fsdp_collectives",
}
"""Classes of FSDP2, which takes long to import -> their module."""

IMPORTED_IN_TRAINING = (
    *("torch._dynamo", "torch._subclasses.fake_tensor", "torch.distributed.device_mesh"),
    *(
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "torch.distributed.checkpoint.default_planner",
    ),
)
"""Modules that torch or lockstep import while a run is opened and takes its first step."""

SUBCLASSED: Mapping[str, frozenset[str]] = {
    "torch.distributed.elastic.agent.server.api:SimpleElasticAgent": frozenset(
        {
            "_rendezvous",
            "_start_workers",
            "_stop_workers",
            "_restart_workers",
            "_monitor_workers",
            "_shutdown",
            "_exit_barrier",
        }
        | {"_worker_group", "_remaining_restarts"}
    ),
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous:DynamicRendezvousHandler": frozenset(
        {"_bootstrap_store_info", "_shared_tcp_store_server", "_create_tcp_store_server"}
        | {"_heartbeat_lock", "_state_holder", "_this_node"}
    ),
    "torch.nn:SyncBatchNorm": frozenset({"_check_input_dim"}),
}
"""Protected names that a subclass of ours overrides, or uses on itself, by torch's class."""

RECURRENT_CACHES = frozenset({"_flat_weights", "_flat_weight_refs"})
"""Attributes that torch's recurrent modules make anew if their parameters are replaced."""

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""The attributes that every `nn.Module` has: its parameters, buffers, children, hooks and mode."""

ITEM = "_local_scalar_dense"
"""The operation of `item()`."""

FAKE_PARAMETER_MARK = "_is_param"
"""The attribute that makes an `nn.Parameter` of a `FakeTensor`."""


def __getattr__(name: str) -> Any:
    if name not in _FSDP:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"torch.distributed.fsdp._fully_shard.{_FSDP[name]}"), name)


# Tensors


def is_distributed(tensor: Tensor) -> bool:
    """True for a `DTensor`. Does not import `torch.distributed.tensor`, which takes half a
    second."""
    return hasattr(tensor, "_local_tensor")


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that may be a `DTensor`: its memory, with no autograd
    node and no view."""
    part: Tensor = tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor
    return part


def set_item_of_distributed(item: Callable[[Tensor], Any]) -> None:
    """Make `item()`, `float()`, `int()` and `bool()` of each `DTensor` return `item(tensor)`.
    Torch's return the value of this rank's part: a part of a sum, of a norm."""
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[getattr(torch.ops.aten, ITEM).default] = lambda _, args, __: item(args[0])


def version(tensor: Tensor) -> int:
    """Return the number of in-place writes that autograd has counted; those through `.data` do not
    count."""
    return int(tensor._version)


def base_of(tensor: Tensor) -> Tensor:
    """Return the tensor that `tensor` is a view of, as far as autograd knows; itself if it is
    none."""
    base: Tensor | None = tensor._base
    return tensor if base is None else base


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """Return the `version` of each tensor."""
    return [tensor._version for tensor in tensors]


def storage_address(storage: torch.UntypedStorage) -> int:
    """Return the address of the storage itself; unlike `data_ptr` a storage without memory has one
    too."""
    return int(storage._cdata)


def gradient_hooks(tensor: Tensor) -> dict[int, Callable[[Tensor], Any]]:
    """Return the hooks of `Tensor.register_hook`, by number: torch's own dict, unless there is
    none."""
    return getattr(tensor, "_backward_hooks", None) or {}


def set_gradient_hooks(tensor: Tensor, hooks: dict[int, Callable[[Tensor], Any]]) -> None:
    """Replace the hooks of `Tensor.register_hook` by the dict of another tensor, which the handles
    then change."""
    tensor._backward_hooks = hooks


def gradient_hook_counts(tensors: Sequence[Tensor]) -> list[int]:
    """Return how many hooks on its gradient each tensor has, of both kinds."""
    return [
        len(each._backward_hooks or ()) + len(each._post_accumulate_grad_hooks or ())
        for each in tensors
    ]


def post_accumulate_hooks(tensor: Tensor) -> Mapping[int, Callable[[Tensor], None]]:
    """Return the hooks of `Tensor.register_post_accumulate_grad_hook`, by number."""
    return getattr(tensor, "_post_accumulate_grad_hooks", None) or {}


def make_subclass(kind: type[Tensor], tensor: Tensor, requires_grad: bool) -> Tensor:
    """Return a tensor of class `kind` that shares the memory of `tensor`, without running the
    constructor of `kind`."""
    made: Tensor = torch.Tensor._make_subclass(kind, tensor, requires_grad)
    return made


def swap_implementations(one: Tensor, other: Tensor) -> None:
    """Exchange the contents of two tensors. Unlike `torch.utils.swap_tensors` it leaves classes and
    attributes."""
    torch._C._swap_tensor_impl(one, other)


def assert_async(condition: Tensor, text: str) -> None:
    """Raise (on a GPU: end the process, later) if the tensor of one element is false, without
    waiting for its value."""
    torch._assert_async(condition, text)


# Operations and autograd


def schema(operation: Any) -> Any:
    """Return the `FunctionSchema` of an operation that a `TorchDispatchMode` was given: its name
    and its arguments."""
    return operation._schema


def in_backward() -> bool:
    """True if autograd is running a backward in this thread: a forward that runs then is a
    recomputation."""
    return backward_number() != -1


def backward_number() -> int:
    """Return the number of the backward that autograd is running in this thread, another one for a
    backward within a backward; -1 if it runs none."""
    return int(torch._C._current_graph_task_id())


def saved_tensors(node: Any) -> Iterator[tuple[Any, Tensor]]:
    """Yield what a node of autograd's graph has saved and no hook has packed: `register_hooks` is
    the first's, and the second is the tensor. A backward frees what a node has saved."""
    kind: Any = type(node)
    for name in _saved_names(kind):
        try:
            saved = getattr(node, name)
        except RuntimeError:  # freed
            continue
        for each in saved if isinstance(saved, tuple) else (saved,):
            if (
                each is not None
                and each.unpack_hook is None
                and isinstance(tensor := each.data, Tensor)
            ):
                yield each, tensor


@functools.cache
def _saved_names(kind: Any) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]


def saved_value(node: Any, name: str) -> Any:
    """Return a number, None, or a list of numbers, that a node of autograd's graph has saved."""
    value = getattr(node, f"_saved_{name}")
    return list(map(_signed, value)) if isinstance(value, tuple) else _signed(value)


def _signed(number: int | None) -> int | None:
    # torch shows some as unsigned
    return number - 2**64 if number is not None and number >= 2**63 else number


def output_shape(node: Any, place: int) -> torch.Size:
    """Return the shape of an output of the operation that `node` is the backward of."""
    return torch.Size(node._input_metadata[place].shape)


def profiler_enabled() -> bool:
    """True if a profiler records this thread."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def cpu_multiplies_bf16() -> bool:
    """True if this CPU has matrix instructions for bf16 (AVX512-BF16 or AMX)."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def update_loss_scale(
    scale: Tensor, in_a_row: Tensor, found_inf: Tensor, *, steps_to_double: int
) -> None:
    """Halve a loss scale on the device if `found_inf` is set, or double it after so many steps in a
    row without it."""
    torch._amp_update_scale_(scale, in_a_row, found_inf, 2.0, 0.5, steps_to_double)


def set_allocator_settings(settings: str) -> bool:
    """Set what PYTORCH_ALLOC_CONF would; False if this torch cannot."""
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if configure is None:
        return False
    configure(settings)
    return True


def default_mps_generator() -> torch.Generator:
    """Return the generator that operations on MPS draw from, without one of their own."""
    generator: torch.Generator = torch.mps._get_default_mps_generator()
    return generator


# Modules


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the module's dict of its own parameters, which may be changed; not those of its
    children."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the module's dict of its own buffers, which may be changed; not those of its
    children."""
    return module._buffers


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of the module's own buffers that its state dict leaves out."""
    return module._non_persistent_buffers_set


def forward_pre_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return what the module calls before its forward."""
    return list(module._forward_pre_hooks.values())


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the module's dict of its children, which may be changed."""
    return module._modules


def apply_to_own_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace the module's own parameters and buffers, not its children's, by `function` of them,
    as `to` does."""
    module._apply(function, recurse=False)  # type: ignore[no-untyped-call]


def is_compiled_in_place(module: nn.Module) -> bool:
    """True if `module.compile()` was called."""
    return module._compiled_call_impl is not None


def has_compiled_forward(module: nn.Module) -> bool:
    """True if the module's forward was given to `torch.compile`."""
    return hasattr(module.forward, "_torchdynamo_orig_callable")


# Optimizers


def has_step_hooks(optimizer: Optimizer) -> bool:
    """True if a hook waits for `step` of this optimizer, or of every optimizer."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )


def step_is_profiled() -> bool:
    """True if a profiler is on in any thread: `Optimizer.step` then reports to it."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def divides_gradients(optimizer: Optimizer) -> bool:
    """True if `step` divides gradients by `optimizer.grad_scale`, and skips if `found_inf` is set:
    fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


# Data loading


def shut_down_workers(loader: Any, batches: Any) -> None:
    """End the persistent workers of a `DataLoader`; `batches`: its iterator, or None if there was
    none."""
    loader._iterator = None
    if batches is not None:
        batches._shutdown_workers()


# Distributed


def default_store() -> Any:
    """Return the store by which the ranks of the default process group met."""
    import torch.distributed as dist

    return dist.distributed_c10d._get_default_store()


def resolve_process_group(name: str) -> dist.ProcessGroup:
    """Return the process group whose `group_name` is `name`, as operations of `torch.ops.c10d` are
    given it."""
    import torch.distributed as dist

    resolve: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    group: dist.ProcessGroup = resolve(name)
    return group


def active_collectives_json() -> bytes:
    """Return Gloo's flight recorder's entries of the collectives that are not done, as JSON; some
    are marked "retired"."""
    from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]

    recorded: bytes = _dump_fr_trace_json(onlyActive=True)
    return recorded


def accelerator_collectives_json() -> list[bytes]:
    """Return the entries of the flight recorders of the accelerator's backends, done or not, as
    JSON: NCCL's of its own, and in torch 2.15 the one that torch's hook writes for a backend
    without its own, such as the newer NCCL."""
    from torch._C import _distributed_c10d

    recorded = []
    for name, backend in {backend.name(): backend for backend in _accelerator_backends()}.items():
        own = f"_dump_{name}_trace_json"
        dump = getattr(backend, own, None) or getattr(_distributed_c10d, own, None)
        if dump is not None:
            recorded.append(dump(includeCollectives=True, onlyActive=False))
        with suppress(TypeError):  # before 2.15 there is one recorder, Gloo's
            recorded.append(_distributed_c10d._dump_fr_trace_json(backend=name))  # type: ignore[attr-defined]
    return recorded


def accelerator_groups_failed() -> bool:
    """True if a backend of the accelerator says that it has failed: it may have ended its kernels
    before their end."""
    for backend in _accelerator_backends():
        with suppress(AttributeError, RuntimeError):  # not every backend knows
            if backend.get_error().name != "SUCCESS":
                return True
    return False


def forget_process_groups(mesh: DeviceMesh) -> None:
    """Drop the process groups that the root of `mesh` holds, and with the last reference their
    sockets."""
    mesh._get_root_mesh()._pg_registry.clear()


def clone_store(store: Store) -> Store:
    """Return a store with the same keys, and if it is a `TCPStore` a connection of its own."""
    clone: Store = store.clone()  # type: ignore[attr-defined]
    return clone


def process_group_count() -> int:
    """Return the number that names the next process group. `destroy_process_group` sets it back to
    0."""
    import torch.distributed as dist

    return int(dist.distributed_c10d._world.group_count)


def number_process_groups_from(count: int) -> None:
    """Name the next process group `count`, and those after it with the numbers that follow."""
    import torch.distributed as dist

    dist.distributed_c10d._world.group_count = count


ABORT_SECONDS = 10.0
"""The longest wait for the groups' aborts. The process ends after it."""


def abort_accelerator_groups() -> bool:
    """Abort all process groups of a backend other than Gloo, such as NCCL. Returns True if there is
    one. Never run with several GPUs."""
    found = _accelerator_groups()
    if not found:
        return False
    # The abort of one communicator can wait for a kernel of another: all are aborted at once.
    backend = found[0][1]
    if hasattr(backend, "_group_start"):
        backend._group_start()
        for group, _ in found:
            group.abort()
        backend._group_end()
        return True
    threads = [
        threading.Thread(target=group.abort, name="lockstep-abort-group", daemon=True)
        for group, _ in found
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + ABORT_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return True


def _accelerator_groups() -> list[tuple[Any, Any]]:
    """Return each process group that has a backend for a device other than the CPU, the newest
    first, and that backend."""
    import torch.distributed as dist

    names = dict(dist.distributed_c10d._world.pg_names)
    found = []
    for group in sorted(names, key=lambda group: names[group], reverse=True):
        device = next((device for device in group._device_types if device.type != "cpu"), None)
        if device is not None and (backend := group._get_backend(device)).name() != "gloo":
            found.append((group, backend))
    return found


def _accelerator_backends() -> list[Any]:
    return [backend for _, backend in _accelerator_groups()]


@contextmanager
def rendezvous_polls_every(seconds: float) -> Iterator[None]:
    """Have torch's elastic rendezvous look for other machines that often. By itself it does once a
    second."""
    module: Any = import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    before = module._delay
    module._delay = lambda *_, **__: time.sleep(seconds)
    try:
        yield
    finally:
        module._delay = before


def refresh_rendezvous_state_after(holder: Any, seconds: float) -> None:
    """Have what an elastic rendezvous knows of its machines be read again after so long. By itself
    that is a second."""
    assert holder._cache_duration > 0
    holder._cache_duration = seconds


def forget_distributed_operations() -> None:
    """Drop what this thread has cached of operations on `DTensor`s: torch takes equal meshes for
    one another there."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def changed_grad_tensors(structure: Any, change: Callable[..., Sequence[Tensor]]) -> Any:
    """Return the structure with its tensors that require a gradient replaced by what `change`
    returns for them; None if it has none. Those are the tensors that FSDP2 takes for inputs of a
    block: in lists, tuples, dicts, dataclasses."""
    from torch.distributed.fsdp._common_utils import collect_grad_tensors, replace_grad_tensors

    tensors = collect_grad_tensors(structure)
    return replace_grad_tensors(structure, iter(change(*tensors))) if tensors else None


def fsdp_parameter_group(module: Any) -> Any:
    """Return FSDP2's group of the parameters of a `fully_shard` module; None if it has none of its
    own."""
    return module._get_fsdp_state()._fsdp_param_group


def owners_of(parameter: Any) -> list[tuple[nn.Module, str]]:
    """Return the modules that hold a parameter of FSDP2's group, each with its name there."""
    info = parameter._module_info
    return [
        (info.module, info.param_name),
        *zip(info.shared_modules, info.shared_param_names, strict=True),
    ]


def gathered(parameter: Any) -> Tensor | None:
    """Return the tensor that a parameter of FSDP2's group is gathered in, with or without memory;
    None before the first forward."""
    return getattr(parameter, "_unsharded_param", None)


def name_of(parameter: Any) -> str:
    """Return the name in the model of a parameter of FSDP2's group, from the first forward on."""
    return str(parameter._param_fqn)


def begins_forward_of(parameters: Any, node: Any) -> bool:
    """True if `node` of autograd's graph is where the inputs of one of FSDP2's groups enter it."""
    return getattr(node, "param_group", None) is parameters


def gather_in(parameter: Any, dtype: torch.dtype) -> None:
    """Have FSDP2 all-gather a parameter of its group in `dtype`. Its gradient is reduced in the
    dtype of its shards."""
    parameter.__class__ = _gathered_in(dtype)


def gathered_short(parameter: Any) -> tuple[str, Tensor] | None:
    """Return the name, and the gathered tensor, of a parameter for which `gather_in` was called;
    None for another one, and before the first forward."""
    gathered = getattr(parameter, "_unsharded_param", None)
    return (
        (parameter._param_fqn, gathered)
        if gathered is not None and "gathered_in" in vars(type(parameter))
        else None
    )


@functools.cache
def _gathered_in(dtype: torch.dtype) -> type[Any]:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    class GatheredIn(FSDPParam):
        gathered_in = dtype

        def init_dtype_attrs(self, policy: Any) -> None:
            super().init_dtype_attrs(policy)
            self.param_dtype = dtype

        @property
        def unsharded_grad_data(self) -> Tensor:
            return super().unsharded_grad_data.to(self.orig_dtype)

        @property
        def unsharded_zero_grad_data(self) -> Tensor:
            return super().unsharded_zero_grad_data.to(self.orig_dtype)

    return GatheredIn


def is_fsdp_root(module: Any) -> bool:
    """True for the outermost of FSDP2's modules, once a forward of it has begun."""
    return bool(module._get_fsdp_state()._is_root)


def set_unshard_async(root: Any, enabled: bool) -> None:
    """Run the all-gathers of FSDP2's blocks as async operations of the process group, not on their
    own streams."""
    root._set_unshard_async_op(enabled)


# Pipelines: `torch.distributed.pipelining` keeps these for itself.


def stage_input_gradients(stage: Any) -> dict[int, tuple[Any, ...]]:
    """Return the dict, by microbatch, of the gradients that a pipeline stage is about to send
    back."""
    cache: dict[int, tuple[Any, ...]] = stage.bwd_cache
    return cache


def schedule_losses(schedule: Any) -> list[Tensor]:
    """Return the list in which a pipeline schedule keeps the losses of the microbatches so far."""
    losses: list[Tensor] = schedule._internal_losses
    return losses


def loader_classes() -> tuple[type[Any], tuple[type[Any], ...]]:
    """Return the class that all iterators of a `DataLoader` are subclasses of, with `_next_index`
    and `__next__`; and those whose `fetch` reads a batch of a dataset, in a worker or in the
    process itself."""
    from torch.utils.data import _utils, dataloader

    return dataloader._BaseDataLoaderIter, (
        _utils.fetch._MapDatasetFetcher,
        _utils.fetch._IterableDatasetFetcher,
    )


def divisor(node: Any) -> float | None:
    """Return the number by which a division in the autograd graph divides; None if it is no number
    in host memory."""
    other = getattr(node, "_saved_other", None)
    return (
        float(other)
        if isinstance(other, Tensor) and other.numel() == 1 and other.device.type == "cpu"
        else None
    )
