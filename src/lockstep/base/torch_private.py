"""Every private name of torch that lockstep uses, except `torch._foreach_*`. Each name exists in
torch 2.13 to 2.15, and has a test in tests/base/test_torch_private.py. If the test of a name fails
with another version of torch, fix the function in this file."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn, overrides
from torch._C import (
    DisableTorchFunctionSubclass as DisableTorchFunctionSubclass,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)
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
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
        DefaultAllGather as DefaultAllGather,
        DefaultReduceScatter as DefaultReduceScatter,
    )
    from torch.optim import Optimizer

BatchNormBase = batchnorm._BatchNorm
DropoutBase = dropout._DropoutNd
disable_current_modes = _python_dispatch._disable_current_modes
unsafe_view = torch.ops.aten._unsafe_view.default
"""A `Tensor.view` that autograd does not track as a view. No other reference to the tensor may
exist."""

_FSDP = ("DefaultAllGather", "DefaultReduceScatter")

IMPORTED_IN_TRAINING = (
    *("torch._dynamo", "torch._subclasses.fake_tensor", "torch.distributed.device_mesh"),
    *("torch.distributed.fsdp", "torch.distributed.tensor"),
    "torch.distributed.checkpoint.default_planner",
)

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
"""Private methods and attributes that a subclass in lockstep overrides or uses, by class of
torch."""

RECURRENT_CACHES = frozenset({"_flat_weights", "_flat_weight_refs"})
"""Attributes that recurrent modules recreate when their parameters are replaced."""

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))

ITEM = "_local_scalar_dense"

FAKE_PARAMETER_MARK = "_is_param"
"""The attribute that makes a `FakeTensor` an `nn.Parameter`."""


def __getattr__(name: str) -> Any:
    if name not in _FSDP:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("torch.distributed.fsdp._fully_shard._fsdp_collectives"), name)


# Tensors


def is_distributed(tensor: Tensor) -> bool:
    """True for a `DTensor`. Does not import `DTensor`, which takes half a second."""
    return hasattr(tensor, "_local_tensor")


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's shard, not a view of it. Autograd does not record the call."""
    part: Tensor = tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor
    return part


def set_item_of_distributed(item: Callable[[Tensor], Any]) -> None:
    """Let `item()`, `float()`, `int()` and `bool()` of a `DTensor` return `item(tensor)`. By
    default, torch uses the local tensor."""
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[getattr(torch.ops.aten, ITEM).default] = lambda _, args, __: item(args[0])


def version(tensor: Tensor) -> int:
    """Return the version counter of a tensor. Writes through `.data` and writes to inference
    tensors do not change the counter."""
    return 0 if tensor.is_inference() else int(tensor._version)


def base_of(tensor: Tensor) -> Tensor:
    base: Tensor | None = tensor._base
    return tensor if base is None else base


def versions(tensors: Sequence[Tensor]) -> list[int]:
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # one was created under `torch.inference_mode()`
        return [version(tensor) for tensor in tensors]


def storage_address(storage: torch.UntypedStorage) -> int:
    return int(storage._cdata)


def gradient_hooks(tensor: Tensor) -> dict[int, Callable[[Tensor], Any]]:
    return getattr(tensor, "_backward_hooks", None) or {}


def set_gradient_hooks(tensor: Tensor, hooks: dict[int, Callable[[Tensor], Any]]) -> None:
    """Share the hooks of another tensor. Removing a hook by its handle removes it from both
    tensors."""
    tensor._backward_hooks = hooks


def gradient_hook_counts(tensors: Sequence[Tensor]) -> list[int]:
    return [
        len(each._backward_hooks or ()) + len(each._post_accumulate_grad_hooks or ())
        for each in tensors
    ]


def post_accumulate_hooks(tensor: Tensor) -> Mapping[int, Callable[[Tensor], None]]:
    return getattr(tensor, "_post_accumulate_grad_hooks", None) or {}


def make_subclass(kind: type[Tensor], tensor: Tensor, requires_grad: bool) -> Tensor:
    """Return a tensor of class `kind` that shares the memory of `tensor`. Does not call the
    constructor of `kind`."""
    made: Tensor = torch.Tensor._make_subclass(kind, tensor, requires_grad)
    return made


def swap_implementations(one: Tensor, other: Tensor) -> None:
    """Exchange the C++ objects of two tensors. `torch.utils.swap_tensors` would also exchange the
    tensors' Python classes and attributes."""
    torch._C._swap_tensor_impl(one, other)


def assert_async(condition: Tensor, text: str) -> None:
    """Assert a condition on the device. On a GPU, a failed assertion makes a later CUDA call
    fail."""
    torch._assert_async(condition, text)


# Operations and autograd


def schema(operation: Any) -> Any:
    return operation._schema


def in_backward() -> bool:
    """True while this thread runs a backward. A forward in a backward is a recomputation by
    activation checkpointing."""
    return backward_number() != -1


def backward_number() -> int:
    """Return the id of the graph task that this thread runs. -1 outside of a backward."""
    return int(torch._C._current_graph_task_id())


@contextmanager
def without_torch_function_modes() -> Iterator[None]:
    modes = [_pop_torch_function_stack() for _ in range(_len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_on_torch_function_stack(mode)


@contextmanager
def uncounted() -> Iterator[None]:
    """Return a context whose operations the innermost FlopCounterMode does not count."""
    mode = _python_dispatch._get_current_dispatch_mode()
    if type(mode).__name__ != "_FlopCounterMode":
        yield
        return
    with _python_dispatch._pop_mode_temporarily():
        yield


def keeps_graph() -> bool:
    """True in a backward with `retain_graph=True`."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def current_modes() -> Callable[[], AbstractContextManager[None]]:
    """Return a context that enters this thread's TorchFunctionModes and TorchDispatchModes in
    another thread."""
    stack: Any = overrides
    functions = stack._get_current_function_mode_stack()
    dispatches = _python_dispatch._get_current_dispatch_mode_stack()

    @contextmanager
    def entered() -> Iterator[None]:
        for mode in functions:
            stack._push_mode(mode)
        for mode in dispatches:
            _python_dispatch._push_mode(mode)
        try:
            yield
        finally:
            for _ in dispatches:
                _python_dispatch._pop_mode()
            for _ in functions:
                stack._pop_mode()

    return entered


def saved_tensors(node: Any) -> Iterator[tuple[Any, Tensor]]:
    """Yield the tensors that an autograd node has saved for the backward, each with its
    `SavedTensor`. Omits tensors that a `pack` hook has replaced."""
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


def saved_tensor_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Any]] | None:
    """Return the innermost `pack` and `unpack` hooks."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    found: tuple[Callable[[Tensor], Any], Callable[[Any], Any]] | None = hooks
    return found


def checkpoints_saved_tensors() -> bool:
    """True under non-reentrant `torch.utils.checkpoint`, and in its recomputation."""
    hooks = saved_tensor_hooks()
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


@functools.cache
def _saved_names(kind: Any) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]


def saved_value(node: Any, name: str) -> Any:
    value = getattr(node, f"_saved_{name}")
    return list(map(_signed, value)) if isinstance(value, tuple) else _signed(value)


def _signed(number: int | None) -> int | None:
    # torch returns some negative numbers as unsigned ones
    return number - 2**64 if number is not None and number >= 2**63 else number


def output_shape(node: Any, place: int) -> torch.Size:
    return torch.Size(node._input_metadata[place].shape)


def profiler_enabled() -> bool:
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def cpu_multiplies_bf16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def update_loss_scale(
    scale: Tensor, in_a_row: Tensor, found_inf: Tensor, *, steps_to_double: int
) -> None:
    """Halve the loss scale if `found_inf` is set. Double the loss scale after `steps_to_double`
    consecutive finite steps, which `in_a_row` counts."""
    torch._amp_update_scale_(scale, in_a_row, found_inf, 2.0, 0.5, steps_to_double)


def set_allocator_settings(settings: str) -> bool:
    """Apply settings in the format of PYTORCH_ALLOC_CONF. Returns False if this version of torch
    does not support the call."""
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if configure is None:
        return False
    configure(settings)
    return True


def default_mps_generator() -> torch.Generator:
    generator: torch.Generator = torch.mps._get_default_mps_generator()
    return generator


# Modules


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    return module._buffers


def non_persistent_buffers(module: nn.Module) -> set[str]:
    return module._non_persistent_buffers_set


def forward_pre_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    return list(module._forward_pre_hooks.values())


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    return module._modules


def apply_to_own_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    module._apply(function, recurse=False)  # type: ignore[no-untyped-call]


def is_compiled_in_place(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None


def has_compiled_forward(module: nn.Module) -> bool:
    return hasattr(module.forward, "_torchdynamo_orig_callable")


# Optimizers


def is_optimizer_initialized(optimizer: Optimizer) -> bool:
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def has_step_hooks(optimizer: Optimizer) -> bool:
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )


def step_is_profiled() -> bool:
    return bool(torch.autograd.profiler._is_profiler_enabled)


def divides_gradients(optimizer: Optimizer) -> bool:
    """True if the optimizer divides gradients by `optimizer.grad_scale`, as fused optimizers do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


# Data loading


def shut_down_workers(loader: Any, batches: Any) -> None:
    loader._iterator = None
    if batches is not None:
        batches._shutdown_workers()


# Distributed


def default_store() -> Any:
    import torch.distributed as dist

    return dist.distributed_c10d._get_default_store()


def resolve_process_group(name: str) -> dist.ProcessGroup:
    import torch.distributed as dist

    resolve: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    group: dist.ProcessGroup = resolve(name)
    return group


def active_collectives_json() -> bytes:
    """Return the flight recorder's entries of Gloo's unfinished collectives."""
    from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]

    recorded: bytes = _dump_fr_trace_json(onlyActive=True)
    return recorded


def accelerator_collectives_json() -> list[bytes]:
    """Return NCCL's flight recorder and, in torch 2.15, the flight recorder of each backend."""
    from torch._C import _distributed_c10d

    recorded = []
    for name, backend in {backend.name(): backend for backend in _accelerator_backends()}.items():
        own = f"_dump_{name}_trace_json"
        dump = getattr(backend, own, None) or getattr(_distributed_c10d, own, None)
        if dump is not None:
            recorded.append(dump(includeCollectives=True, onlyActive=False))
        with suppress(TypeError):  # before 2.15 there is only Gloo's recorder
            recorded.append(_distributed_c10d._dump_fr_trace_json(backend=name))  # type: ignore[attr-defined]
    return recorded


def accelerator_groups_failed() -> bool:
    """True if an NCCL process group has an error. A failed group's kernels may have ended early,
    with wrong results."""
    for backend in _accelerator_backends():
        with suppress(AttributeError, RuntimeError):  # not every backend can tell
            if backend.get_error().name != "SUCCESS":
                return True
    return False


def forget_process_groups(mesh: DeviceMesh) -> None:
    """Drop the mesh's references to its process groups. The last reference to a group keeps its
    sockets open."""
    mesh._get_root_mesh()._pg_registry.clear()


def clone_store(store: Store) -> Store:
    """Return a store with the same keys. A `TCPStore` gets a new connection."""
    clone: Store = store.clone()  # type: ignore[attr-defined]
    return clone


def process_group_count() -> int:
    import torch.distributed as dist

    return int(dist.distributed_c10d._world.group_count)


def number_process_groups_from(count: int) -> None:
    import torch.distributed as dist

    dist.distributed_c10d._world.group_count = count


ABORT_SECONDS = 10.0


def abort_accelerator_groups() -> bool:
    """Abort the process groups of accelerators. Returns True if an accelerator's group exists.
    Never tested with several GPUs."""
    found = _accelerator_groups()
    if not found:
        return False
    # The abort of one communicator can wait for a kernel of another, so all are aborted at once.
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
    import torch.distributed as dist

    names = dict(dist.distributed_c10d._world.pg_names)
    groups = []
    for group in sorted(names, key=lambda group: names[group], reverse=True):
        device = next((device for device in group._device_types if device.type != "cpu"), None)
        if device is not None and (backend := group._get_backend(device)).name() != "gloo":
            groups.append((group, backend))
    return groups


def _accelerator_backends() -> list[Any]:
    return [backend for _, backend in _accelerator_groups()]


@contextmanager
def rendezvous_polls_every(seconds: float) -> Iterator[None]:
    """Set how often torch's elastic rendezvous looks for new machines. By default, torch looks
    every second."""
    module: Any = import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    before = module._delay
    module._delay = lambda *_, **__: time.sleep(seconds)
    try:
        yield
    finally:
        module._delay = before


def refresh_rendezvous_state_after(holder: Any, seconds: float) -> None:
    assert holder._cache_duration > 0
    holder._cache_duration = seconds


def judge_heartbeats_by(
    holder: Any, lost: Callable[[Mapping[Any, datetime]], Collection[Any]]
) -> None:
    """Let `lost` choose the machines that count as lost. `lost` gets the time of each machine's
    last heartbeat. By default, torch compares heartbeats by the clocks of several machines."""
    drop_old = holder._sanitize
    old, new = (each.replace(tzinfo=UTC) for each in (datetime.min, datetime.max))

    def drop() -> None:
        told = holder.state.last_heartbeats
        dropped = lost(told)
        holder.state.last_heartbeats = {each: old if each in dropped else new for each in told}
        drop_old()
        kept = holder.state.last_heartbeats
        holder.state.last_heartbeats = {each: told[each] for each in kept}

    holder._sanitize = drop


def skip_rendezvous_records(handler: Any) -> None:
    """Skip the event records of torch's rendezvous, whose default handler is a `NullHandler`. Torch
    walks the whole stack for each record, between a read and a write of the rendezvous state. A
    slow record makes every write of the rendezvous state fail."""
    for part in (handler, handler._state_holder, handler._op_executor):
        assert callable(part._record)
        part._record = lambda *_, **__: None


def forget_distributed_operations() -> None:
    """Clear torch's cache of operations on `DTensor`s. The cache does not distinguish meshes that
    compare equal."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def changed_grad_tensors(structure: Any, change: Callable[..., Sequence[Tensor]]) -> Any:
    """Replace the tensors that require a gradient by `change(*tensors)`. Returns None if no tensor
    requires a gradient."""
    from torch.distributed.fsdp._common_utils import collect_grad_tensors, replace_grad_tensors

    tensors = collect_grad_tensors(structure)
    return replace_grad_tensors(structure, iter(change(*tensors))) if tensors else None


def fsdp_parameter_group(module: Any) -> Any:
    return module._get_fsdp_state()._fsdp_param_group


def unmark_sharded(module: nn.Module) -> None:
    """Delete the attribute by which libraries recognise an FSDP2 module."""
    vars(module).pop("_is_fsdp_managed_module", None)


def remove_forward_hooks(module: Any) -> None:
    """Remove FSDP2's forward hooks. Without the hooks, FSDP2 neither all-gathers the module's
    parameters nor reduce-scatters their gradients."""
    state = module._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()


def gathers_in_forward(module: Any) -> bool:
    return module._get_fsdp_state()._pre_forward_hook_handle.id in module._forward_pre_hooks


def owners_of(parameter: Any) -> list[tuple[nn.Module, str]]:
    """Return the modules that share an `FSDPParam`, each with the parameter's name in the
    module."""
    info = parameter._module_info
    return [
        (info.module, info.param_name),
        *zip(info.shared_modules, info.shared_param_names, strict=True),
    ]


def gathered(parameter: Any) -> Tensor | None:
    """Return the unsharded tensor of an `FSDPParam`. None before the first forward."""
    return getattr(parameter, "_unsharded_param", None)


def parameter_name(parameter: Any) -> str:
    return str(parameter._param_fqn)


def begins_forward_of(parameters: Any, node: Any) -> bool:
    """True for the autograd node that FSDP2 puts on the inputs of an `FSDPParamGroup`'s modules."""
    return getattr(node, "param_group", None) is parameters


def gather_in(parameter: Any, dtype: torch.dtype) -> None:
    """Make FSDP2 all-gather an `FSDPParam` in `dtype`. Gradients are reduced in the dtype of the
    shards."""
    parameter.__class__ = _gathered_in(dtype)


def gathered_short(parameter: Any) -> tuple[str, Tensor] | None:
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
    """True if the first forward has made this module the root of FSDP2."""
    state = module._get_fsdp_state()
    return bool(state._is_root) and hasattr(state._comm_ctx, "all_gather_state")


def reduce_gradients(root: Any) -> None:
    """Reduce-scatter the gradients that were accumulated under
    `set_requires_gradient_sync(False)`."""
    state = root._get_fsdp_state()
    for each in reversed(state._state_ctx.all_states):
        for group in reversed(each._fsdp_param_groups):
            group.post_backward()
    state._state_ctx.manual_backward_finalization_active = False  # torch 2.15 reads it
    state._root_post_backward_final_callback()


def set_unshard_async(root: Any, enabled: bool) -> None:
    root._set_unshard_async_op(enabled)


# Pipelines: private attributes of `torch.distributed.pipelining`.


def stage_input_gradients(stage: Any) -> dict[int, tuple[Any, ...]]:
    """Return the gradients, by microbatch, that the stage has yet to send to the previous stage."""
    cache: dict[int, tuple[Any, ...]] = stage.bwd_cache
    return cache


def keep_gradients(stage: Any) -> None:
    """Keep the gradients in the first call of a pipeline schedule. In the first call, torch clears
    the gradients, because it may have run a forward and a backward to infer shapes."""
    stage._post_metadata_inference_cleanup = lambda: None


def schedule_losses(schedule: Any) -> list[Tensor]:
    losses: list[Tensor] = schedule._internal_losses
    return losses


def loader_classes() -> tuple[type[Any], tuple[type[Any], ...]]:
    from torch.utils.data import _utils, dataloader

    return dataloader._BaseDataLoaderIter, (
        _utils.fetch._MapDatasetFetcher,
        _utils.fetch._IterableDatasetFetcher,
    )


def saved_factors(node: Any) -> list[Tensor]:
    """Return the tensors that the autograd node of a product (`mul`, `dot`) has saved. Omits
    tensors that a `pack` hook has replaced."""
    kept = [
        getattr(getattr(node, f"_raw_saved_{name}", None), "data", None)
        for name in ("self", "other", "tensor")
    ]
    return [each for each in kept if isinstance(each, Tensor)]


def run_first(tensor: Tensor, hook: Callable[[Tensor], Any]) -> None:
    handle: Any = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    hooks: Any = tensor._backward_hooks
    for key in [key for key in hooks if key != handle.id]:
        hooks[key] = hooks.pop(key)  # the order of insertion counts


def divisor(node: Any) -> float | None:
    """Return the divisor that the autograd node of a division has saved. Return None if the divisor
    is not a single number on the CPU."""
    other = getattr(node, "_saved_other", None)
    return (
        float(other)
        if isinstance(other, Tensor) and other.numel() == 1 and other.device.type == "cpu"
        else None
    )


MEAN_REDUCTION = 1  # torch's number for reduction="mean"
_CROSS_ENTROPIES = ("NllLossBackward0", "NllLoss2DBackward0")


def labels_averaged_by(node: Any) -> tuple[Tensor, int, Tensor] | None:
    """If the autograd node is a cross entropy with `reduction="mean"` and without class weights,
    return the labels, the label that it ignores, and the number of all other labels.

    Returns None for other nodes, and if the ignored label is not negative, or a `pack` hook has
    replaced the labels: to read them, activation checkpointing would compute the loss again.
    """
    if node.name() not in _CROSS_ENTROPIES or node._saved_reduction != MEAN_REDUCTION:
        return None
    # autograd returns a negative integer as an unsigned one
    ignored = node._saved_ignore_index - 2**64
    kept = [getattr(node, f"_raw_saved_{name}").data for name in ("target", "total_weight")]
    if ignored < -(2**63) or node._raw_saved_weight.data is not None:
        return None
    labels, counted = kept
    return (labels, ignored, counted) if isinstance(labels, Tensor) else None


def function_of(node: Any) -> type[Any]:
    function: type[Any] = type(node)._forward_cls
    return function
