"""Out of memory on accelerators: the step changes nothing, and the run goes on under a plan that
there is room for."""

from __future__ import annotations

import gc
import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import run_files
import torch
import torch.distributed as dist
from device.ranks import command, on_device
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from training.subjects import same

import lockstep as ls
from lockstep.base.torch_private import tree_map
from lockstep.comm.mesh import to_local
from lockstep.hooks.out_of_memory import FILE
from lockstep.testing.pool import WorkerPool

WIDTH, MICROBATCH, STEPS, AT = 128, 1024, 4, 2
PLAN = "shard=2,numerics=bitwise"
FALLBACKS = ("checkpointing=full", "offload=yes", "microbatch_splits=1")
LIMITS = (12_700_000, 9_500_000, 7_500_000, 5_800_000)
"""Bytes of a device that are enough with none of the fallbacks, one, two and three: a step takes
12.1 MB (the first one 12.6), 8.7, 7.0 and 5.1."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = (
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
            nn.Dropout(0.1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(x))))


def recipe(**changes: Any) -> ls.Recipe:
    """Steps of two microbatches, of which the activations are larger than the model."""
    inputs, targets = torch.randn(
        2, 4 * MICROBATCH, WIDTH, generator=torch.Generator().manual_seed(0)
    )
    given: dict[str, Any] = {
        "model": lambda: nn.Sequential(*(Layer() for _ in range(4))),
        "data": TensorDataset(inputs, targets),
        "inputs": lambda batch: batch[0],
        "loss": lambda output, batch: ls.Sum((output - batch[1]).square().mean(1).sum()),
        "weight": lambda batch: len(batch[0]),
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        "global_batch": 2 * MICROBATCH,
        "microbatch": MICROBATCH,
        "steps": STEPS,
        "clip_norm": 0.5,
    }
    return ls.Recipe(**{**given, **changes})


class Scarce(ls.Hook):
    """This rank's device has `limit` bytes from step `at` on; where that was too little before,
    from the start."""

    def __init__(self, at: int, limit: int) -> None:
        self.at, self.limit = at, limit
        self.seen: Any = None

    def on_start(self, run: Any) -> None:
        self.run = run
        if self.at == 0 or (run.dir / FILE).exists():
            self.begin()

    def before_step(self, run: Any) -> None:
        if run.step == self.at:
            self.begin()

    def begin(self) -> None:
        import standin

        self.scarcity = standin.capacity(self.run.rank, self.limit)
        self.scarcity.__enter__()
        torch.accelerator.reset_peak_memory_stats()

    def after_step(self, run: Any) -> None:
        self.seen = self.now()

    def now(self) -> Any:
        """Copies of this rank's parts of the model and of the optimizer's state."""
        states = {
            "model": self.run.model.state_dict(),
            "optimizer": self.run.optimizers[0].state_dict()["state"],
        }
        return tree_map(
            lambda value: to_local(value).cpu().clone() if isinstance(value, Tensor) else value,
            states,
        )


class End(NamedTuple):
    """How a training ended on a rank."""

    error: str = ""
    changed: bool = False
    """The error has changed something."""
    kept_bytes: int = 0
    """Bytes of the device that were not given back."""


def train(
    run_dir: str, limits: dict[int, int], at: int = AT, plan: str = PLAN, optimizer: Any = None
) -> End:
    """`limits`: by rank."""
    hook, end = Scarce(at, limits.get(dist.get_rank(), 2**34)), End()
    given = recipe() if optimizer is None else recipe(optimizer=optimizer)
    try:
        ls.train(given, plan=plan, run_dir=run_dir, hooks=[hook], log_every=1)
    except Exception as error:
        text = "\n".join([type(error).__name__, str(error), *getattr(error, "__notes__", [])])
        end = End(text, hook.seen is not None and not same(hook.now(), hook.seen))
        hang_up()
    del hook, given
    gc.collect()
    return end._replace(kept_bytes=torch.accelerator.memory_allocated())


def hang_up() -> None:
    """Close the connections to other processes, as the end of this one would."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as copy:
            if copy.family != socket.AF_UNIX and copy.getpeername():
                copy.shutdown(socket.SHUT_RDWR)


def ended_well(run_dir: Path, limit: int, *, fallbacks: int) -> bool:
    """Whether the run did all of its steps with these fallbacks, one after another. No device had
    more than `limit` bytes at any time, and all say so."""
    failures = json.loads((run_dir / FILE).read_text())["failures"]
    assert [(each["step"], each["then"]) for each in failures] == [
        (AT, then) for then in FALLBACKS[:fallbacks]
    ]
    assert [row["step"] for row in run_files.events(run_dir, "resumed")] == [AT] * fallbacks
    assert [row["then"] for row in run_files.events(run_dir, "out-of-memory")] == list(
        FALLBACKS[:fallbacks]
    )
    result, rows = (
        run_files.result(run_dir),
        run_files.metrics(run_dir),
    )
    assert all(fallback in result["plan"] for fallback in FALLBACKS[:fallbacks])
    assert all(0 < row["memory_bytes"] <= limit for row in rows if row["step"] > AT)
    return bool(result["steps"] == STEPS == rows[-1]["step"])


@pytest.fixture(scope="module")
def undisturbed(devices: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The fingerprint with memory enough for every step, and for no more: nor does trying the loss
    take more."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    limits = dict.fromkeys(range(2), LIMITS[0])
    assert devices.run(2, on_device, train, str(run_dir), limits, 0) == [End()] * 2
    return run_files.fingerprint(run_dir)


def test_a_step_without_room_on_one_device_ends_all_ranks_and_changes_nothing(
    devices: WorkerPool, tmp_path: Path
) -> None:
    """And the memory is given back, and the next plan is written, though the other rank sees no
    more than an end."""
    lost, ran_out = devices.run(2, on_device, train, str(tmp_path / "run"), {1: LIMITS[1]})
    assert ran_out.error.startswith("OutOfMemoryError\nthe stand-in device is out of memory")
    assert (
        f"resumes after step {AT} with checkpointing=full if the same command is given again"
        in ran_out.error
    )
    assert "Connection closed by peer" in lost.error
    assert (lost.changed, ran_out.changed, ran_out.kept_bytes) == (False, False, 0)
    (failure,) = json.loads((tmp_path / "run" / FILE).read_text())["failures"]
    assert (failure["step"], failure["rank"], failure["then"]) == (AT, 1, "checkpointing=full")
    (event,) = run_files.events(tmp_path / "run", "out-of-memory")
    assert (event["step"], event["rank"], event["then"]) == (AT, 1, "checkpointing=full")


@pytest.mark.parametrize("fallbacks", [2, 3])
def test_the_bits_are_those_of_an_undisturbed_run_until_microbatches_are_split(
    devices: WorkerPool, tmp_path: Path, undisturbed: str, fallbacks: int
) -> None:
    limits = dict.fromkeys(range(2), LIMITS[fallbacks])
    with patch.dict(os.environ, LOCKSTEP_OUT_OF_MEMORY="halve"):
        ends = [
            devices.run(2, on_device, train, str(tmp_path / "run"), limits)
            for _ in range(fallbacks + 1)
        ]
    ran_out = ["OutOfMemoryError" in f"{ranks}" for ranks in ends]
    assert ran_out == [True] * fallbacks + [False], ends
    assert ended_well(tmp_path / "run", LIMITS[fallbacks], fallbacks=fallbacks)
    assert (run_files.fingerprint(tmp_path / "run") == undisturbed) == (fallbacks < 3)


def test_a_rank_without_room_for_trying_the_loss_leaves_no_other_waiting(
    devices: WorkerPool, tmp_path: Path
) -> None:
    lost, ran_out = devices.run(2, on_device, train, str(tmp_path / "run"), {1: 3_000_000}, 0)
    assert ran_out.error.startswith("OutOfMemoryError")
    assert "Connection closed by peer" in lost.error
    assert (
        json.loads((tmp_path / "run" / FILE).read_text())["failures"][0]["then"]
        == "checkpointing=full"
    )


def with_muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """It needs whole tensors, and is refused with offload."""
    matrices, others = (
        [each for each in model.parameters() if (each.dim() == 2) == two] for two in (True, False)
    )
    return [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(others, lr=1e-3)]


def test_offload_is_skipped_where_the_optimizer_would_be_refused(
    devices: WorkerPool, tmp_path: Path
) -> None:
    plan, limits = f"{PLAN},checkpointing=full", dict.fromkeys(range(2), LIMITS[2])
    with patch.dict(os.environ, LOCKSTEP_OUT_OF_MEMORY="halve"):
        ends = devices.run(2, on_device, train, str(tmp_path / "run"), limits, 1, plan, with_muon)
    assert "with microbatch_splits=1 if the same command" in str(ends)


SCRIPT = """
import lockstep as ls
from device.test_out_of_memory import AT, Scarce, recipe

if __name__ == "__main__":
    ls.train(recipe(), hooks=[Scarce(AT, {limit})], log_every=1)
"""


@pytest.mark.command
@pytest.mark.parametrize(
    "fallbacks",
    [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)],
)
def test_a_command_goes_on_until_its_devices_have_room(
    devices: WorkerPool, tmp_path: Path, undisturbed: str, fallbacks: int
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(limit=LIMITS[fallbacks]))
    line = ["-m", "lockstep", "run", "--nproc", "2", "--run-dir", "run", "--plan", PLAN]
    ended = command(devices, tmp_path, *line, "--out-of-memory", "halve", "train.py")
    assert ended.returncode == 0, ended.stderr
    assert ended_well(tmp_path / "run", LIMITS[fallbacks], fallbacks=fallbacks)
    assert (run_files.fingerprint(tmp_path / "run") == undisturbed) == (fallbacks < 3)
