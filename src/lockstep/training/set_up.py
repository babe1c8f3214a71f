"""Sets up threads, determinism and allocators for a session, and checks its plan and its
devices."""

from __future__ import annotations

import ctypes
import math
import os
import random
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from lockstep.assignment import MicrobatchAssignment
from lockstep.base import accelerator, cublas
from lockstep.base.container import VOLUME, ends_with_container
from lockstep.base.errors import LaunchError, PlanError, RecipeError
from lockstep.base.torch_private import set_allocator_settings
from lockstep.comm.mesh import Mesh
from lockstep.comm.world import World
from lockstep.data.digests import differing_part
from lockstep.model.sync_batchnorm import training_batchnorms
from lockstep.plan import MEASURED, Plan
from lockstep.recipe.checks import Precision
from lockstep.recipe.code import Digests, other_sources
from lockstep.recipe.sequence import Sequence as RecipeSequence
from lockstep.training import precision as precisions
from lockstep.training.microbatches import Batching

OLDEST_TORCH = (2, 13)
NEWEST_TESTED_TORCH = (2, 15)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)
_KEPT_BYTES = 2**31 - 1
_MOST_FROM_HEAP_BYTES = 2**25  # the largest threshold that glibc accepts
OWN_SETTINGS = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "GLIBC_TUNABLES",
)
OWN_GPU_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


class Remark(NamedTuple):
    """An event for the run's log, and an optional line for the terminal."""

    event: str
    details: dict[str, Any]
    line: str | None = None


def remarks(plan: Plan, mesh: Mesh, precision: Precision) -> Iterator[Remark]:
    if (untested := untested_torch(torch.__version__)) is not None:
        yield untested
    if mesh.world.device.type == "cpu" and (reason := accelerator.unseen(os.environ)):
        yield Remark("gpu-not-used", {"reason": reason}, f"warning: trains on the CPU: {reason}")
    if (ranks := mesh.world.ranks_per_device) > 1:
        line = (
            f"warning: --share-devices: {ranks} processes compute on one GPU; times and memory are"
            " not those of a GPU for each"
        )
        yield Remark("devices-shared", {"ranks": ranks}, line)
    for axis, reason in mesh.without_shared_memory.items():
        yield Remark("no-shared-memory", {"axis": axis, "reason": reason})
    if (gpus := plan.data_parallel) > 1:
        better = (
            f"replicate={gpus}, one process a GPU, is faster: it does not copy the model in each"
            " step, and each has its own Python"
        )
        yield Remark(
            "data-parallel",
            {"gpus": gpus, "better": better},
            f"warning: data_parallel={gpus}; {better}",
        )
    if plan.compile and plan.checkpointing == "selective":
        reason = (
            "compiled code recomputes all of a block, as with checkpointing=full; compile=yes alone"
            " keeps the results of products"
        )
        yield Remark(
            "selective-as-full",
            {"reason": reason},
            f"warning: compile=yes with checkpointing=selective: {reason}",
        )
    device = mesh.world.device
    if warning := precisions.slow_on_this_cpu(precision, device) or precisions.slow_without_tf32(
        precision, device
    ):
        yield Remark("slow-precision", {"reason": warning}, f"warning: {warning}")


def check_torch(version: str) -> None:
    if _major_and_minor(version) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise LaunchError(
            f"torch {version}; lockstep needs torch {oldest} or newer; pip install"
            f" 'torch>={oldest}'"
        )


def lost_with_container(run_dir: Path) -> Remark | None:
    if (reason := ends_with_container(run_dir, os.environ)) is None:
        return None
    return Remark(
        "run-directory-in-container",
        {"reason": reason},
        f"warning: run directory {reason}; {VOLUME}",
    )


def untested_torch(version: str) -> Remark | None:
    newest = ".".join(map(str, NEWEST_TESTED_TORCH))
    if _major_and_minor(version) <= NEWEST_TESTED_TORCH:
        return None
    line = (
        f"warning: torch {version} is newer than {newest}, the newest that lockstep is tested with;"
        " lockstep verify shows whether it trains the same model"
    )
    return Remark("untested-torch", {"torch": version, "newest_tested": newest}, line)


def _major_and_minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split(".")[:2])


def batchnorm(models: Sequence[nn.Module], batching: Batching) -> Remark | None:
    plain = [
        name for name, each in training_batchnorms(models) if not isinstance(each, nn.SyncBatchNorm)
    ]
    if not plain or batching.max_microbatches == 1:
        return None
    samples = batching.largest
    line = (
        f"BatchNorm: {len(plain)} of the layers ({plain[0]!r}{', ...' if len(plain) > 1 else ''})"
        f" take their statistics over one microbatch at a time, {samples} samples, at any number of"
        " processes; for more, give a larger microbatch, split over the processes: model=lambda:"
        " torch.nn.SyncBatchNorm.convert_sync_batchnorm(Net())"
    )
    return Remark("batchnorm-per-microbatch", {"layers": plain, "samples": samples}, line)


def refuse_single_samples(models: Sequence[nn.Module], batching: Batching) -> None:
    """Make the first forward raise if BatchNorm will get one value per channel in an epoch's last
    global batch."""
    sizes = batching.last_of_epoch
    if 1 not in sizes or batching.assignment.slices:
        return
    for name, layer in training_batchnorms(models):
        _check_values_per_channel(name, layer, sizes)


def _check_values_per_channel(name: str, layer: nn.Module, sizes: Sequence[int]) -> None:
    def check(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        if not layer.training:
            return
        handle.remove()
        if math.prod(arguments[0].shape[2:]) == 1:
            raise RecipeError(
                "the last global batch of an epoch has microbatches of"
                f" {', '.join(map(str, sizes))} samples; BatchNorm {name!r} has no variance over"
                " one sample; use drop_last=True, or another global_batch or microbatch"
            )

    handle = layer.register_forward_pre_hook(check)


def idle_ranks(batching: Batching) -> Remark | None:
    ranks, count, size = batching.assignment.ranks, batching.max_microbatches, batching.largest
    idle = [
        rank
        for rank, indices in enumerate(batching.assignment.indices_by_rank(count))
        if not indices
    ]
    if not idle:
        return None
    better = (
        "smaller microbatches, a larger global_batch, or fewer processes"
        if size > 1
        else "a larger global_batch, or fewer processes"
    )
    line = (
        f"warning: {len(idle)} of {ranks} data ranks compute nothing: a global batch has {count}"
        f" microbatches of up to {size} samples, and no rank has more than one; use {better}"
    )
    return Remark("idle-ranks", {"ranks": idle, "microbatches": count}, line)


def fixed_assignment(plan: Plan, batching: Batching) -> Remark | None:
    ranks, count = batching.assignment.ranks, batching.max_microbatches
    if plan.assignment == "equal" or ranks == 1 or count > ranks:
        return None
    line = (
        f"warning: assignment=measured, and a global batch has {count} microbatches for {ranks}"
        " ranks, so no rank can have more than another; use smaller microbatches, or a larger"
        " global_batch"
    )
    return Remark("assignment-fixed", {"microbatches": count, "ranks": ranks}, line)


def check_assignment(
    plan: Plan, assignment: MicrobatchAssignment, *, is_stream: bool, microbatch_is_fixed: bool
) -> None:
    if plan.assignment == "equal":
        return
    for applies, what, why, instead in (
        (
            is_stream,
            "an ls.Stream",
            "each of its shards is read by one rank from beginning to end",
            "use a map-style dataset",
        ),
        (
            bool(assignment.slices),
            "SyncBatchNorm",
            "all ranks compute slices of each microbatch together",
            "use plain BatchNorm",
        ),
        (
            not microbatch_is_fixed,
            "microbatch=None",
            "each rank has exactly one, of equal size",
            "give a microbatch",
        ),
    ):
        if applies:
            raise PlanError(
                f"assignment=measured with {what}; {why}; leave assignment=measured out, or"
                f" {instead}"
            )


def check_microbatch_is_fixed(plan: Plan, global_batch: int, microbatch: int | None) -> None:
    if plan.numerics == "bitwise" and microbatch is None:
        raise RecipeError(
            "numerics=bitwise with microbatch=None; without a fixed microbatch, the microbatches"
            " depend on the number of processes; give a microbatch, for example"
            f" microbatch={max(1, global_batch // 8)}"
        )


RECOMPUTES = frozenset({"replicate", "shard", "pipeline", "tensor", "context"})
"""Mesh axes under which a rank can recompute another rank's microbatch."""


def check_recomputation(plan: Plan, every: int) -> None:
    if not every:
        return
    if plan.numerics != "bitwise":
        raise PlanError(
            f"--recompute-every {every} with numerics={plan.numerics}; only under bitwise does a"
            " microbatch's gradient have the same bits on every process, so that a different"
            " gradient is wrong; give numerics=bitwise, or leave --recompute-every out"
        )
    for axis in plan.axes():
        if axis.name not in RECOMPUTES and (size := getattr(plan, axis.name)) != 1:
            raise PlanError(
                f"--recompute-every {every} with {axis.name}={size}; its ranks compute rows of"
                " each other's microbatches, so none of these can be computed again alone; use"
                " replicate or shard, or leave --recompute-every out"
            )


def check_no_auto(plan: Plan, microbatch: object) -> None:
    why = "in your own loop; only ls.train has a loss to measure with; give a number"
    for name in MEASURED:
        if getattr(plan, name) == "auto":
            raise PlanError(f"{name}=auto {why}: {name}=2")
    if microbatch == "auto":
        raise RecipeError(f"microbatch='auto' {why} of samples: microbatch=8")


def check_compression_fits(plan: Plan, gradient_compression: str) -> None:
    if gradient_compression == "none":
        return
    if plan.numerics == "bitwise":
        raise RecipeError(
            f"gradient_compression={gradient_compression!r} with numerics=bitwise; each process"
            " rounds the gradients it sends, so the bits depend on the number of processes; use"
            " gradient_compression='none', or numerics=fast"
        )
    divided = plan.state_divided + [
        f"{name}={getattr(plan, name)}" for name in ("context", "split") if getattr(plan, name) != 1
    ]
    if divided:
        raise RecipeError(
            f"gradient_compression={gradient_compression!r} with {', '.join(divided)}; only"
            " gradients of full replicas can be compressed; use a plan with replicate only, or"
            " gradient_compression='none'"
        )


def check_sequence(plan: Plan, sequence: RecipeSequence | None) -> None:
    if sequence is None and plan.context == 1:
        return
    for name, why in (
        (
            "compile",
            "attention and random numbers are replaced while the forward runs, which a"
            " compiled forward does not see",
        ),
        ("data_parallel", "its threads call the model as it is"),
    ):
        value = getattr(plan, name)
        if value is True or value not in (1, False):
            said = f"{name}={'yes' if value is True else value}"
            raise PlanError(f"{said} with Recipe.sequence; {why}; leave {said} or sequence out")
    if plan.numerics == "bitwise":
        _check_bitwise_sequence(plan, sequence)
    chunks, least = (sequence or RecipeSequence()).chunks, 2 * int(plan.context or 1)
    if chunks < least and plan.context != 1:
        raise PlanError(
            f"context={plan.context} with {chunks} chunks of a sequence; each rank computes two or"
            f" more; give Recipe(sequence=ls.Sequence(chunks={least})), or a smaller context"
        )


def _check_bitwise_sequence(plan: Plan, sequence: RecipeSequence | None) -> None:
    if sequence is None:
        raise PlanError(
            f"context={plan.context} with numerics=bitwise on a recipe without sequence; the chunks"
            " that are computed by themselves are the same on any number of processes if the recipe"
            " has them; give Recipe(sequence=ls.Sequence())"
        )
    if plan.slices != 1:
        raise PlanError(
            f"slices={plan.slices} with Recipe.sequence; chunks of a sequence are computed in"
            " threads, and layers in slices are not; leave slices or sequence out"
        )


def resolved(plan: Plan, world_size: int) -> str:
    """Return the plan as text. `auto` is left out if the plan fits the world size."""
    try:
        return str(plan.resolve(world_size))
    except PlanError:
        return str(plan)


def use_threads(number: int) -> None:
    # set_num_threads makes MKL use all threads for small products too, which makes a small GPT 3 to
    # 7% slower: it is called only if needed.
    if number != torch.get_num_threads():
        torch.set_num_threads(number)


def check_same(everyone: Sequence[Mapping[str, Any]]) -> None:
    first, *others = everyone
    for rank, other in enumerate(others, start=1):
        for name in {**first, **other}:
            one, another = first.get(name, "not there"), other.get(name, "not there")
            if one != another:
                raise (PlanError if name == "plan" else RecipeError)(
                    f"{name} is {one} on rank 0 and {another} on rank {rank}; all processes of a"
                    " run have one recipe and one plan; give the same on every rank"
                )


def check_same_devices(everyone: Sequence[Mapping[str, str]], numerics: str) -> Remark | None:
    first, differing = everyone[0], dict[int, dict[str, list[str | None]]]()
    for rank, other in enumerate(everyone):
        if other != first:
            names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
            differing[rank] = {name: [first.get(name), other.get(name)] for name in names}
    if not differing:
        return None
    if numerics == "bitwise":
        rank, changed = next(iter(differing.items()))
        words = ", ".join(
            f"{name} is {one} on rank 0 and {another} on rank {rank}"
            for name, (one, another) in changed.items()
        )
        raise PlanError(
            f"numerics=bitwise on several kinds of devices: {words}; the same bits come from one"
            " kind of device, with one version of its driver and libraries; use machines of one"
            " kind, or numerics=fast"
        )
    return Remark(
        "devices-differ", {"ranks": {str(rank): changed for rank, changed in differing.items()}}
    )


def check_same_programs(everyone: Sequence[Mapping[str, str]]) -> None:
    for rank, other in enumerate(everyone):
        if changed := other_sources(everyone[0], other):
            raise RecipeError(
                f"{', '.join(map(_file_of, changed))} is another version on rank {rank} than on"
                " rank 0: edited since the first process started, or another copy; all processes"
                " of a run execute the same code; start all of them with one version"
            )


def _file_of(module: str) -> str:
    return (
        Path(vars(sys.modules[module]).get("__file__") or module).name
        if module in sys.modules
        else module
    )


def check_same_code(everyone: Sequence[Digests]) -> None:
    first = everyone[0]
    for rank, other in enumerate(everyone):
        for field in {**first, **other}:
            if (part := differing_part(first.get(field, {}), other.get(field, {}))) is not None:
                raise RecipeError(
                    f"{field} is another function on rank {rank} than on rank 0:"
                    f" {part or 'its code'} differs; all processes of a run have one recipe; give"
                    " the same on every rank; for a line that one rank prints or logs, ask for the"
                    " rank within the function (if ls.rank() == 0:), or do it in a hook, which may"
                    " differ between ranks"
                )


def set_up_computation(
    plan: Plan, world: World, threads: int, stack: ExitStack
) -> list[Remark | None]:
    bitwise = plan.numerics == "bitwise"
    pinned = bitwise and (world.device.type == "cpu" or plan.offload)
    if pinned and plan.threads not in (None, "auto", 1):
        raise PlanError(
            f"threads={plan.threads} with numerics=bitwise; on a CPU the number of threads changes"
            " bits, so it is 1; leave threads out"
        )
    given = plan.threads if isinstance(plan.threads, int) else threads
    stack.callback(use_threads, torch.get_num_threads())
    use_threads(1 if pinned else given)
    remarks_of_device: list[Remark | None] = []
    if world.device.type == "cpu":
        keep_freed_memory(os.environ)
    else:
        remarks_of_device.append(expand_segments(world.device, os.environ))
    if bitwise and accelerator.is_accelerator(world.device):
        remarks_of_device.append(cublas_workspace(os.environ))
        stack.callback(
            torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled()
        )
        stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
        fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]  # it is a module's property
        stack.callback(setattr, torch.utils.deterministic, "fill_uninitialized_memory", fills)
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    # past these limits torch stops compiling new shapes; ranks might reach them at different shapes
    if plan.compile:
        limits = {"recompile_limit": sys.maxsize, "accumulated_recompile_limit": sys.maxsize}
        stack.enter_context(torch.compiler.config.patch(limits))  # type: ignore[attr-defined]  # torch adds it to its modules of settings
    stack.callback(random.setstate, random.getstate())
    stack.callback(np.random.set_state, np.random.get_state())
    stack.callback(torch.default_generator.set_state, torch.default_generator.get_state())
    return remarks_of_device


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Make glibc keep freed memory. By default, glibc returns a step's gradients to the system and
    gets the memory back page by page, which takes up to a fifth of a step."""
    if sys.platform != "linux" or any(name in environ for name in OWN_SETTINGS):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)) and bool(
        mallopt(_MMAP_THRESHOLD, _MOST_FROM_HEAP_BYTES)
    )


def expand_segments(device: torch.device, environ: Mapping[str, str]) -> Remark | None:
    """Let CUDA's allocator expand its segments, which prevents fragmentation. On WSL, gVisor and
    some virtual GPUs, allocations with expandable segments would fail."""
    if any(name in environ for name in OWN_GPU_SETTINGS) or not set_allocator_settings(
        "expandable_segments:True"
    ):
        return None
    if not (reason := accelerator.allocation_error(device)):
        return None
    set_allocator_settings("expandable_segments:False")
    return Remark("segments-not-expandable", {"reason": reason})


def cublas_workspace(environ: MutableMapping[str, str]) -> Remark | None:
    """torch reads the setting at the first matrix product. Return a remark if the setting was
    missing, because the script may already have computed a matrix product."""
    if cublas.VARIABLE in environ:
        return None
    environ[cublas.VARIABLE] = cublas.WORKSPACE
    line = (
        f"warning: the GPU was in use before lockstep was imported, without {cublas.VARIABLE}; the"
        " bits of numerics=bitwise may depend on what it computed; import lockstep first, or set"
        f" {cublas.VARIABLE}={cublas.WORKSPACE}"
    )
    return Remark("cublas-workspace-late", {}, line)
