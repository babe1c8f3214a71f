"""Checkpoints, offload, splits, memory and whole commands on accelerators."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import run_files
import torch
from checkpoint.states import ATTEMPT
from device import ranks
from device.ranks import on_device
from device.test_training import steps
from processes import ran

import lockstep as ls
from lockstep.base import accelerator
from lockstep.base.errors import PlanError
from lockstep.checkpoint.load import CheckpointReader
from lockstep.checkpoint.saver import Saver
from lockstep.checkpoint.storage import CheckpointName, FolderStorage
from lockstep.comm.world import World
from lockstep.testing.pool import WorkerPool


def train(plan: str, run_dir: str, **settings: Any) -> tuple[str, int]:
    result = ls.train(steps(), plan=plan, run_dir=run_dir, **settings)
    return result.fingerprint, result.steps


def on_one_device(folder: str) -> tuple[list[tuple[str, int]], list[float], str]:
    """Return what is learned whole, by a bitwise plan, and split, the peak that is logged and the
    device's, and why DataParallel is refused."""
    learned = [train("replicate=1", f"{folder}/whole")]
    rows = Path(folder, "whole", "metrics.jsonl").read_text().splitlines()
    logged = max(json.loads(row).get("memory_bytes", 0.0) for row in rows)
    peaks = [logged, torch.accelerator.max_memory_allocated()]
    learned += [train("numerics=bitwise", f"{folder}/bits"), train("split=2", f"{folder}/split")]
    try:
        train("data_parallel=2", f"{folder}/refused")
    except PlanError as error:
        return learned, peaks, str(error)
    return learned, peaks, "trained"


def on_several_devices(size: int, folder: str) -> list[tuple[str, int]]:
    """Return what is learned with parameters that wait on the CPU, and by a run that goes on under
    another plan."""
    plan = f"shard={size},numerics=bitwise"
    ls.train(steps(steps=2), plan=f"replicate={size},numerics=bitwise", run_dir=f"{folder}/goes on")
    return [
        train(f"{plan},offload=yes", f"{folder}/offload"),
        train(plan, f"{folder}/goes on", allow_change=["steps"]),
    ]


def test_a_model_learns_the_same_split_offloaded_and_going_on_under_another_plan(
    devices: WorkerPool, tmp_path: Path
) -> None:
    (((whole, bits, split), (logged, counted), refused),) = devices.run(
        1, on_device, on_one_device, str(tmp_path / "1")
    )
    assert split == whole
    assert logged == counted > 0, "the peak of the memory is the device's"
    assert refused.startswith("data_parallel=2 on standin; ")
    assert "use replicate=2" in refused
    offloaded = set()
    for size in (2, 3):
        folder = str(tmp_path / f"{size}")
        for waiting, goes_on in devices.run(size, on_device, on_several_devices, size, folder):
            assert goes_on == bits, f"{size} devices"
            offloaded.add(waiting)
    assert len(offloaded) == 1, "on any number of devices"


SCRIPT = """
import lockstep as ls
from device.test_training import steps

if __name__ == "__main__":
    result = ls.train(steps())
    if ls.rank() == 0:
        print("fingerprint", result.fingerprint)
"""


def started(
    *arguments: str, folder: Path, seconds: float = 100
) -> subprocess.CompletedProcess[str]:
    """Run a command whose processes are no forks."""
    return ran(
        [sys.executable, *arguments], env=ranks.environment(folder), cwd=folder, timeout=seconds
    )


@pytest.mark.command
def test_a_command_starts_a_process_for_each_device(devices: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    line = ["-m", "lockstep", "run", "--nproc", "auto", "--plan", "numerics=bitwise", "train.py"]
    done = started(*line, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    ((alone, _),) = devices.run(1, on_device, train, "numerics=bitwise", str(tmp_path / "alone"))
    assert done.stdout.split() == ["fingerprint", alone]
    (run,) = (tmp_path / "runs").glob("*/run.json")
    assert "standin" in run.read_text()
    assert json.loads(run.with_name("result.json").read_text())["plan"].startswith("replicate=2")


FAILING = """
import lockstep as ls
from device.test_training import steps

class Fails(ls.Hook):
    def after_step(self, run):
        if run.step == 3 and run.rank == 1:
            raise RuntimeError("on purpose")

if __name__ == "__main__":
    ls.train(steps(), hooks=[Fails()])
"""


TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]


@pytest.mark.command
@pytest.mark.parametrize("by", ["lockstep", "torchrun"])
def test_a_rank_that_fails_ends_without_waiting_for_the_others(
    devices: WorkerPool, tmp_path: Path, by: str
) -> None:
    """The shutdown of a group waits for all ranks, and the other one waits in a collective for this
    one."""
    (tmp_path / "train.py").write_text(FAILING)
    if by == "torchrun":  # a fork does not end as a process that torchrun has started
        done = started(*TORCHRUN, folder=tmp_path, seconds=50)  # it would wait for 60
    else:
        line = ["-m", "lockstep", "run", "--nproc", "2", "--run-dir", "run", "train.py"]
        done = ranks.command(devices, tmp_path, *line, seconds=50)
    assert done.returncode != 0
    assert "on purpose" in done.stdout + done.stderr


SECONDS_BEFORE_THE_COPIES = 0.02


def saved_while_training_goes_on(
    folder: str, fault: str
) -> tuple[dict[str, list[float]], dict[str, int], tuple[int, int], str | None]:
    """Save tensors that later kernels change. Returns what was saved, the host's waits until then,
    the numbers of registered memories during it and after the end, and why copies were slow."""
    import standin

    world = World(0, 1, 0, 1, torch.device("standin", 0), owns_group=False)
    state = {
        "weight": torch.arange(6.0, device=world.device).reshape(2, 3).T,
        "bias": torch.ones(2, device="standin:1"),
    }
    saver = Saver(world, folder, ATTEMPT)
    with pytest.MonkeyPatch.context() as patch:
        if fault == "not waited for":
            patch.setattr(accelerator, "is_reached", lambda *given: True)
            patch.setattr(
                "lockstep.checkpoint.saver._FileContent.device_seconds", lambda content: 0.0
            )
        if fault == "refused":
            patch.setattr(standin._Runtime, "cudaHostRegister", lambda *given: 801)
        saver.prepare(state)
        registered = len(standin.registered)
        standin.take_counters()
        saver.begin()
        time.sleep(SECONDS_BEFORE_THE_COPIES)
        saver.save(1, state, values={}, metadata={})
        for tensor in state.values():
            tensor.add_(1.0)
        waits = standin.take_counters().host_waits
        ended, reason = saver.poll(100), saver.not_registered
    assert ended is not None
    assert ended.error is None
    assert (ended.device_seconds >= SECONDS_BEFORE_THE_COPIES) == (not fault)
    saver.close()
    found = {name: torch.full(tensor.shape, -1.0) for name, tensor in state.items()}
    CheckpointReader(FolderStorage(Path(folder)), CheckpointName(1, ATTEMPT)).load_into(
        found, world
    )
    saved = {name: each.flatten().tolist() for name, each in found.items()}
    return saved, waits, (registered, len(standin.registered)), reason


def device_seconds_unprepared(folder: str) -> float:
    """Return the `device_seconds` of a save whose memory takes `SECONDS_BEFORE_THE_COPIES` to be
    made."""
    world = World(0, 1, 0, 1, torch.device("standin", 0), owns_group=False)
    saver = Saver(world, folder, ATTEMPT)
    register = accelerator.register_memory

    def slow(memory: torch.Tensor, device: torch.device) -> str | None:
        time.sleep(SECONDS_BEFORE_THE_COPIES)
        return register(memory, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerator, "register_memory", slow)
        saver.begin()
        saver.save(1, {"weight": torch.ones(3, device=world.device)}, values={}, metadata={})
    ended = saver.poll(100)
    saver.close()
    assert ended is not None
    return ended.device_seconds


class SlowState(ls.Hook):
    def state_dict(self) -> dict[str, Any]:
        time.sleep(SECONDS_BEFORE_THE_COPIES)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def stopped_seconds(run_dir: str) -> list[float]:
    ls.train(steps(), run_dir=run_dir, hooks=[SlowState()], saving=ls.Saving(every=4))
    events = run_files.events(Path(run_dir))
    return [event["stopped_seconds"] for event in events if event["event"] == "checkpoint-saved"]


def test_the_time_that_a_save_stops_training_is_from_the_last_kernel_to_the_end_of_the_copies(
    devices: WorkerPool, tmp_path: Path
) -> None:
    (found,) = devices.run(1, on_device, stopped_seconds, str(tmp_path / "run"))
    assert min(found) >= SECONDS_BEFORE_THE_COPIES
    (unprepared,) = devices.run(
        1, on_device, device_seconds_unprepared, str(tmp_path / "unprepared")
    )
    assert unprepared >= SECONDS_BEFORE_THE_COPIES


def test_a_checkpoint_is_copied_while_the_host_goes_on(devices: WorkerPool, tmp_path: Path) -> None:
    truth = {"weight": [0.0, 3.0, 1.0, 4.0, 2.0, 5.0], "bias": [1.0, 1.0]}
    (found,) = devices.run(1, on_device, saved_while_training_goes_on, str(tmp_path / "right"), "")
    assert found == (truth, {}, (1, 0), None)
    ((saved, waits, counts, reason),) = devices.run(
        1, on_device, saved_while_training_goes_on, str(tmp_path / "refused"), "refused"
    )
    assert (saved, waits, counts) == (truth, {"a copy to the host": 2}, (0, 0))
    assert re.fullmatch(r"cudaHostRegister of \d+ bytes failed with status 801", str(reason))
    ((early, *_),) = devices.run(
        1, on_device, saved_while_training_goes_on, str(tmp_path / "wrong"), "not waited for"
    )
    assert all(math.isnan(number) for numbers in early.values() for number in numbers)


def many_small_tensors(folder: str) -> tuple[list[str], int]:
    """Return the names of the tensors that a save has changed, and the copies that the host waits
    for."""
    import standin

    device = torch.device("standin", 0)
    world = World(0, 1, 0, 1, device, owns_group=False)
    counted = torch.arange(40, device=device)
    state = {f"weight {i}": counted.float() + i for i in range(20)}
    state |= {f"odd {dtype}": counted[:7].to(dtype) for dtype in (torch.bfloat16, torch.bool)}
    state |= {"scalar": counted[3], "columns": (counted.float() + 0.5).view(8, 5).T}
    state |= {"empty": counted[:0], "large": torch.arange(2.0**19, device=device)}
    state |= {"here": torch.ones(16), "elsewhere": torch.ones(16, device="standin:1")}
    saver = Saver(world, folder, ATTEMPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(standin._Runtime, "cudaHostRegister", lambda *given: 801)
        saver.prepare(state)
        standin.take_counters()
        saver.save(1, state, values={}, metadata={})
        waits = standin.take_counters().host_waits["a copy to the host"]
    assert saver.poll(100) is not None
    saver.close()
    found = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in state.items()}
    CheckpointReader(FolderStorage(Path(folder)), CheckpointName(1, ATTEMPT)).load_into(
        found, world
    )
    return [name for name, tensor in state.items() if not tensor.cpu().equal(found[name])], waits


def test_small_tensors_of_a_device_are_copied_together(devices: WorkerPool, tmp_path: Path) -> None:
    ((changed, copies),) = devices.run(1, on_device, many_small_tensors, str(tmp_path / "run"))
    assert changed == []
    assert copies <= 6  # the large one; the other device's; and what lies around the others
