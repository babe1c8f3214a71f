"""Faults that are easy to make in code for devices, planted into lockstep one at a time. Training
must not hide any: it raises, or the check of what it should give fails, as those in
test_training.py would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from device.ranks import on_device
from device.test_training import train
from torch import Tensor

from lockstep.base import accelerator
from lockstep.comm.world import World
from lockstep.data.device import to_device
from lockstep.testing.pool import WorkerFailed, WorkerPool
from lockstep.training.optim import gradient_norm
from lockstep.training.precision import DeviceLossScale
from lockstep.training.reducers.step_stats import StepStatsVector

Fault = Callable[[], AbstractContextManager[Any]]


def computation_does_not_wait_for_copies() -> AbstractContextManager[Any]:
    streams = SimpleNamespace(wait_stream=lambda other: None)
    return several(
        patch.object(accelerator, "current_stream", lambda device: streams),
        memory_of_copies_is_used_again_at_once(),
    )


def memory_of_copies_is_used_again_at_once() -> AbstractContextManager[Any]:
    return patch.object(Tensor, "record_stream", lambda *of: None)


def copies_make_the_host_wait() -> AbstractContextManager[Any]:
    to = Tensor.to

    def blocking(tensor: Tensor, *given: Any, **settings: Any) -> Tensor:
        return to(
            tensor,
            *given,
            **{name: value for name, value in settings.items() if name != "non_blocking"},
        )

    return patch.object(Tensor, "to", blocking)


def a_generator_of_the_wrong_device_is_seeded() -> AbstractContextManager[Any]:
    return patch.object(accelerator, "generator", lambda device: torch.default_generator)


def a_batch_goes_to_another_ranks_device() -> AbstractContextManager[Any]:
    return patch(
        "lockstep.training.microbatches.to_device",
        lambda batch, device: to_device(batch, torch.device("standin", 0)),
    )


def the_norm_is_exchanged_on_the_cpu() -> AbstractContextManager[Any]:
    clip_divisor = gradient_norm.clip_divisor

    def on_the_cpu(norm: Any, limit: float) -> Any:
        return clip_divisor(norm, limit).cpu()

    return patch.object(gradient_norm, "clip_divisor", on_the_cpu)


def a_cpu_tensor_is_in_the_optimizer() -> AbstractContextManager[Any]:
    step = torch.optim.AdamW.step

    def with_a_state_on_the_cpu(optimizer: Any, *given: Any) -> Any:
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].cpu()
        return step(optimizer, *given)

    return patch.object(torch.optim.AdamW, "step", with_a_state_on_the_cpu)


def the_loss_is_read_in_each_step() -> AbstractContextManager[Any]:
    pack = StepStatsVector.pack

    def reading(vector: Any, used: Any, share: Any, values: Any, *rest: Any) -> Tensor:
        assert all(np.isfinite(float(value)) for value in values)
        return pack(vector, used, share, values, *rest)

    return patch.object(StepStatsVector, "pack", reading)


def the_loss_scaler_asks_for_a_number() -> AbstractContextManager[Any]:
    update_by = DeviceLossScale.update_by

    def asking(scale: DeviceLossScale, found_inf: Tensor) -> None:
        update_by(scale, torch.full_like(found_inf, found_inf.item()))

    return patch.object(DeviceLossScale, "update_by", asking)


def a_pinned_buffer_is_filled_while_it_is_copied() -> AbstractContextManager[Any]:
    buffers: dict[torch.Size, Tensor] = {}
    pin_memory = Tensor.pin_memory

    def one_buffer_a_shape(tensor: Tensor) -> Tensor:
        if tensor.shape not in buffers or buffers[tensor.shape].dtype != tensor.dtype:
            buffers[tensor.shape] = pin_memory(tensor)
        return buffers[tensor.shape].copy_(tensor)

    return patch.object(Tensor, "pin_memory", one_buffer_a_shape)


def microbatches_are_computed_on_two_streams_in_turn() -> AbstractContextManager[Any]:
    streams: list[torch.Stream] = []

    def on_the_next(batch: Any, device: torch.device) -> Any:
        streams[:] = reversed(streams or [torch.accelerator.current_stream(), torch.Stream(device)])
        torch.accelerator.set_stream(streams[0])
        return to_device(batch, device)

    return patch("lockstep.training.microbatches.to_device", on_the_next)


def a_sum_over_ranks_is_used_before_it_is_there() -> AbstractContextManager[Any]:
    works = []

    def not_waited_for(world: World, tensor: Tensor) -> None:
        works.append(dist.all_reduce(tensor, group=world.group, async_op=True))

    return patch.object(World, "all_reduce", not_waited_for)


def an_update_is_not_gated_on_the_device() -> AbstractContextManager[Any]:
    return patch.object(accelerator, "has_streams", lambda device: False)


@contextmanager
def several(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


FAULTS: dict[Fault, tuple[str, str]] = {
    computation_does_not_wait_for_copies: (
        "replicate=1",
        "race: .* reads what copy to the device on stream 1",
    ),
    memory_of_copies_is_used_again_at_once: (
        "replicate=1",
        "race: memory of stream 1 of device 0 is used again",
    ),
    copies_make_the_host_wait: ("replicate=1", "host waits: .*a copy to the device"),
    a_generator_of_the_wrong_device_is_seeded: ("replicate=2", "another fingerprint"),
    a_batch_goes_to_another_ranks_device: ("replicate=2", "same device"),
    the_norm_is_exchanged_on_the_cpu: ("replicate=2", "host waits: .*a copy to the host"),
    a_cpu_tensor_is_in_the_optimizer: (
        "replicate=1",
        "_fused_adamw_: expected all tensors to be on the same device",
    ),
    the_loss_is_read_in_each_step: ("replicate=2", "host waits: .*item"),
    the_loss_scaler_asks_for_a_number: ("replicate=1", "host waits: .*item"),
    a_pinned_buffer_is_filled_while_it_is_copied: (
        "replicate=2",
        "race: pinned memory was changed",
    ),
    microbatches_are_computed_on_two_streams_in_turn: ("replicate=1", "race: "),
    a_sum_over_ranks_is_used_before_it_is_there: (
        "shard=2",
        "race: .* reads what a collective on .* writes",
    ),
    an_update_is_not_gated_on_the_device: ("replicate=1", "host waits: .*item"),
}
"""The plan under which each is planted, and words of what is raised."""


def check(fault: Fault | None, plan: str, run_dir: str, expected: str | None) -> str:
    """Train under a plan, and check what test_training.py checks."""
    with ExitStack() as stack:
        if fault is not None:
            stack.enter_context(fault())
        fingerprint, _, waits = train(plan, run_dir, precision="fp16")
    assert waits == [{}] * 2, f"host waits: {waits}"
    assert expected in (None, fingerprint), "another fingerprint"
    return fingerprint


def processes(plan: str) -> int:
    return 2 if "2" in plan else 1


@pytest.fixture(scope="module")
def right(devices: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The fingerprint under each plan, without a fault."""
    folder = tmp_path_factory.mktemp("right")
    return {
        plan: devices.run(processes(plan), on_device, check, None, plan, str(folder / plan), None)[
            0
        ]
        for plan in {plan for plan, _ in FAULTS.values()}
    }


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_training_does_not_hide_it(
    devices: WorkerPool, tmp_path: Path, right: dict[str, str], fault: Fault
) -> None:
    plan, words = FAULTS[fault]
    with pytest.raises(WorkerFailed, match=words):
        devices.run(
            processes(plan), on_device, check, fault, plan, str(tmp_path / "run"), right[plan]
        )
