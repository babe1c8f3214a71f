"""What the stand-in accelerator finds. Each of these faults would be silent, or rare, on a real
device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device.ranks import on_device
from torch import Tensor, nn

from lockstep.testing.pool import WorkerFailed, WorkerPool


def on_another_stream(tensor: Tensor, *, waits: bool) -> torch.Stream:
    """Add 1 on a new stream, which first waits for what is queued on the current one, if it
    `waits`."""
    stream = torch.Stream(tensor.device)
    if waits:
        stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        tensor.add_(1)
    return stream


def ones(size: int = 4) -> Tensor:
    return torch.ones(size, device="standin")


def writes_before_the_write() -> None:
    on_another_stream(ones(), waits=False)


def reads_before_the_write() -> None:
    tensor = ones()
    on_another_stream(tensor, waits=True)
    print(tensor + 1)


def is_freed_while_another_stream_uses_it() -> None:
    tensor = ones()
    on_another_stream(tensor, waits=True)
    del tensor
    ones()


def changes_pinned_memory_before_it_was_read() -> None:
    pinned = torch.ones(4).pin_memory()
    pinned.to("standin", non_blocking=True)
    pinned.zero_()
    torch.accelerator.synchronize()


def mixes_a_tensor_of_the_cpu_in() -> None:
    ones().addcmul_(torch.ones(4), ones())


def mixes_devices() -> None:
    ones() + torch.ones(4, device="standin:1")


def draws_from_the_cpus_generator() -> None:
    torch.randn(4, device="standin", generator=torch.Generator())


def reads_the_result_of_a_collective_without_waiting() -> None:
    tensor = ones()
    dist.all_reduce(tensor, async_op=True)
    tensor.add(1)


def changes_what_a_collective_still_sends() -> None:
    tensor, out = ones(), ones()
    dist.all_gather_single(out, tensor, async_op=True)
    tensor.zero_()


def asks_for_more_memory_than_there_is() -> None:
    import standin

    with standin.capacity(0, 10**6):
        ones(10**6)


FAULTS: dict[Callable[[], None], str] = {
    writes_before_the_write: (
        r"race: aten::add on stream 1 of device 0 reads what aten::fill_ on stream 0 of device 0"
        r" writes"
    ),
    reads_before_the_write: (
        r"race: aten::add on stream 0 of device 0 reads what aten::add on stream 1"
    ),
    is_freed_while_another_stream_uses_it: (
        r"race: memory of stream 0 of device 0 is used again, which aten::add on stream 1"
    ),
    changes_pinned_memory_before_it_was_read: r"race: pinned memory was changed before the copy",
    mixes_a_tensor_of_the_cpu_in: (
        r"expected all tensors to be on the same device|Expected all tensors to be on the same"
        r" device"
    ),
    mixes_devices: r"same device",
    draws_from_the_cpus_generator: r"expected a generator of the stand-in device, found one of cpu",
    reads_the_result_of_a_collective_without_waiting: (
        r"race: aten::add on stream 0 .* reads what a collective"
    ),
    changes_what_a_collective_still_sends: (
        r"race: aten::zero_ on stream 0 .* writes what a collective on .* reads"
    ),
    asks_for_more_memory_than_there_is: r"OutOfMemoryError: the stand-in device is out of memory",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_raises(devices: WorkerPool, fault: Callable[[], None]) -> None:
    with pytest.raises(WorkerFailed, match=FAULTS[fault]):
        devices.run(1, on_device, fault)


def item(tensor: Tensor) -> Any:
    return tensor.sum().item()


def condition(tensor: Tensor) -> Any:
    return bool((tensor > 0).all())


def copy_back(tensor: Tensor) -> Any:
    return tensor.cpu()


def mask(tensor: Tensor) -> Any:
    return tensor[tensor > 0]


def copy_in(tensor: Tensor) -> Any:
    return tensor + torch.tensor([1.0], device=tensor.device)


def synchronize(tensor: Tensor) -> Any:
    torch.accelerator.synchronize()


WAITS = [item, condition, copy_back, mask, copy_in, synchronize]


def errors_of_waits() -> list[str]:
    import standin

    found = []
    for how in WAITS:
        tensor = ones()
        try:
            with standin.host_must_not_wait():
                how(tensor)
            found.append("nothing")
        except RuntimeError as error:
            found.append(str(error))
    return found


def test_a_wait_of_the_host_raises_where_there_must_be_none(devices: WorkerPool) -> None:
    (errors,) = devices.run(1, on_device, errors_of_waits)
    for how, error in zip(WAITS, errors, strict=True):
        assert "the host waits for the device, where it must not" in error, how.__name__


def what_is_right() -> tuple[list[float], list[float], list[float], bool]:
    tensor = ones()
    stream = on_another_stream(tensor, waits=True)
    torch.accelerator.current_stream().wait_stream(stream)
    copied = tensor.to("cpu", non_blocking=True)
    early = copied.tolist()
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    late = copied.tolist()
    torch.accelerator.synchronize()
    return early, late, tensor.tolist(), copied.tolist() == [2.0] * 4


def test_what_waits_is_computed_and_a_copy_arrives_when_the_host_has_waited(
    devices: WorkerPool,
) -> None:
    for early, late, reduced, arrived in devices.run(2, on_device, what_is_right):
        assert all(number != number for number in early + late), (
            "a copy that nobody has waited for is not there"
        )
        assert reduced == [4.0] * 4
        assert arrived


def draws() -> tuple[list[float], list[float], list[float]]:
    torch.manual_seed(3)
    of_device, of_cpu = torch.randn(4, device="standin").tolist(), torch.randn(4).tolist()
    torch.manual_seed(3)
    torch.randn(7)
    return of_device, of_cpu, torch.randn(4, device="standin").tolist()


def test_each_device_draws_numbers_of_its_own(devices: WorkerPool) -> None:
    ((of_device, of_cpu, again),) = devices.run(1, draws)
    assert of_device == again != of_cpu


def moves_tied_parameters() -> tuple[int, float]:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    model.to("standin")
    before = torch.accelerator.memory_allocated()
    torch.ones(2**10, device="standin")
    return len(list(model.parameters())), torch.accelerator.max_memory_allocated() - before


def test_parameters_stay_tied_and_memory_is_counted(devices: WorkerPool) -> None:
    assert devices.run(1, moves_tied_parameters) == [(1, 4096)]
