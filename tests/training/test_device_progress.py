"""Which step the state on a device is that of, by scripted events of a device that the host is
ahead of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.base import accelerator
from lockstep.hooks.checkpointing import DEVICE_SECONDS, device_seconds
from lockstep.logging.phases import Phases
from lockstep.training.device_progress import DeviceProgress, EndedStep


class Device:
    """Reaches as much of what is queued as the test says."""

    def __init__(self) -> None:
        self.queued = self.reached = 0


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device
        self._place = 0

    def record(self, _: Any) -> None:
        self._device.queued += 1
        self._place = self._device.queued

    def query(self) -> bool:
        return self._device.reached >= self._place


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[Device]:
    found = [Device(), Device()]
    monkeypatch.setattr(accelerator, "event", lambda device: Event(found[device.index]))
    monkeypatch.setattr(accelerator, "current_stream", lambda device: None)
    return found


def ended(step: int) -> EndedStep:
    return EndedStep(step, {}, {}, None, 0.0, {}, [])


def queue(progress: DeviceProgress, *steps: int, devices: int = 1) -> None:
    """Queue steps, each an update and its end."""
    for step in steps:
        progress.begin_change()
        progress.end_step(ended(step), [torch.device("cuda", index) for index in range(devices)])


def newest(progress: DeviceProgress) -> int | None:
    found = progress.newest(0.0)
    return None if found is None else found.step


def test_a_state_is_certain_between_a_steps_end_and_the_next_change(devices: list[Device]) -> None:
    """Of each step but the first, the device reaches the change, then the end."""
    progress, found = DeviceProgress(), []
    assert progress.is_at_start
    queue(progress, 1, 2, 3)
    for place in range(devices[0].queued + 1):
        devices[0].reached = place
        found.append(newest(progress))
    assert found == [None, 1, None, 2, None, 3]
    progress.begin_change()
    assert newest(progress) == 3
    devices[0].reached += 1
    assert newest(progress) is None


def test_only_the_last_three_steps_are_known_and_their_events_are_used_again(
    devices: list[Device],
) -> None:
    progress = DeviceProgress()
    queue(progress, 1)
    devices[0].reached = 1
    first = progress.newest(0.0)
    assert first is not None
    queue(progress, 2, 3, 4, 5)
    assert not progress.is_certain(first), "its events are another step's now"
    assert newest(progress) is None
    devices[0].reached = devices[0].queued
    assert newest(progress) == 5


def test_all_devices_of_a_split_model_count(devices: list[Device]) -> None:
    progress = DeviceProgress()
    queue(progress, 1, 2, devices=2)
    devices[0].reached, devices[1].reached = 3, 1
    assert newest(progress) is None, "one has done step 2, and the other not"
    devices[1].reached = 3
    assert newest(progress) == 2


@pytest.mark.parametrize(
    ("a_phase", "waits"), [(0.1, DEVICE_SECONDS[0]), (10.0, 40.0), (100.0, DEVICE_SECONDS[1])]
)
def test_the_device_is_waited_for_as_long_as_two_steps_take(a_phase: float, waits: float) -> None:
    now = 0.0
    phases = Phases(lambda: now)
    assert device_seconds(phases) == DEVICE_SECONDS[0]
    for name in ("data", "compute", "update", "between steps"):
        phases.enter(name)
        now += a_phase
    assert device_seconds(phases) == pytest.approx(waits)
