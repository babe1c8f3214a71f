"""Several processes and one device: refused, shared on purpose, or each process sees one of its
own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from click.testing import CliRunner
from device import ranks
from device.ranks import on_device
from device.test_training import steps

import lockstep as ls
from lockstep.base import accelerator
from lockstep.base.errors import LaunchError, PlanError
from lockstep.base.torch_private import PrefixStore, default_store
from lockstep.cli import average, doctor, evaluate, run, search, sweep, verify
from lockstep.testing.pool import WorkerPool

PLAN = "shard=2,numerics=bitwise"


def train(run_dir: str, **variables: str) -> tuple[str, list[str]]:
    """Return the fingerprint, or what the error says, and the events of a rank that sees one
    device."""
    with patch.object(accelerator, "count", lambda: 1), patch.dict(os.environ, variables):
        try:
            result = ls.train(
                steps(steps=2),
                plan=PLAN if dist.get_world_size() > 1 else "numerics=bitwise",
                run_dir=run_dir,
            )
        except LaunchError as error:
            return str(error), []
    return result.fingerprint, [
        event.name for event in result.events if event.name == "devices-shared"
    ]


def in_a_group_without_the_cpu(run_dir: str) -> str:
    store = default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(
        "standin:standin_gloo", store=PrefixStore("without", store), rank=rank, world_size=size
    )
    return train(run_dir)[0]


def test_a_scripts_group_needs_a_backend_for_the_cpu_too(
    devices: WorkerPool, tmp_path: Path
) -> None:
    for said in devices.run(2, on_device, in_a_group_without_the_cpu, str(tmp_path / "run")):
        assert (
            "made a process group of 'standin:standin_gloo' only, and lockstep's ranks also"
            " exchange tensors on the CPU" in said
        )
        assert (
            "write init_process_group('cpu:gloo,standin:standin_gloo'), or leave it to lockstep"
            in said
        )


def on_unequal_devices(folder: str) -> tuple[str, list[list[str]]]:
    """Return what is refused, and the events of a run on unequal devices, and after its resumption
    on another kind."""
    said, found = "", []
    with patch.dict(os.environ, STAND_IN_NAMES="A100,H100"):
        try:
            ls.train(steps(steps=2), plan=PLAN, run_dir=f"{folder}/bitwise")
        except PlanError as error:
            said = str(error)
        result = ls.train(steps(steps=2), plan="shard=2", run_dir=f"{folder}/fast")
        found.append([event.name for event in result.events if event.name.startswith("device")])
    with patch.dict(os.environ, STAND_IN_NAMES="B200,B200"):
        result = ls.train(
            steps(steps=4), plan=PLAN, run_dir=f"{folder}/fast", allow_change=["steps"]
        )
        found.append([event.name for event in result.events if event.name.startswith("device")])
    return said, found


def test_unequal_devices_are_refused_under_bitwise_and_said_otherwise(
    devices: WorkerPool, tmp_path: Path
) -> None:
    said, found = devices.run(2, on_device, on_unequal_devices, str(tmp_path))[0]
    assert said.startswith(
        "numerics=bitwise on several kinds of devices: name is A100 on rank 0 and H100 on rank 1;"
        " the same bits"
    )
    assert said.endswith("use machines of one kind, or numerics=fast")
    assert found == [["devices-differ"], ["device-changed"]]


def with_one_device(folder: str) -> list[tuple[str, list[str]]]:
    return [train(f"{folder}/refused"), train(f"{folder}/shared", LOCKSTEP_SHARE_DEVICES="1")]


def with_a_device_each(run_dir: str) -> tuple[str, list[str]]:
    return train(run_dir, STAND_IN_UUIDS=str(dist.get_rank()))


def test_two_ranks_on_one_device_are_refused_and_the_remedies_train(
    devices: WorkerPool, tmp_path: Path
) -> None:
    first, second = devices.run(2, on_device, with_one_device, str(tmp_path))
    assert first == second
    (said, _), (shared, events) = first
    assert "and 1 GPU: ranks 0, 1 share one GPU" in said
    assert "each process needs its own GPU; start 1 process there, or hide the GPUs" in said
    assert (
        "or give --share-devices (LOCKSTEP_SHARE_DEVICES=1) to try a plan on fewer GPUs than it"
        " needs" in said
    )
    assert events == ["devices-shared"]
    assert (
        devices.run(2, on_device, with_a_device_each, str(tmp_path / "own")) == [(shared, [])] * 2
    )
    ((alone, _),) = devices.run(1, on_device, train, str(tmp_path / "alone"))
    assert alone == shared


def through_gloo(folder: str) -> list[str]:
    """Return the error of `shard` through Gloo, and the fingerprints of the trainings that it
    recommends."""
    found = []
    with patch.object(dist, "get_backend_config", lambda: "cpu:gloo,standin:gloo"):
        try:
            ls.train(steps(steps=2), plan=PLAN, run_dir=f"{folder}/run")
        except PlanError as error:
            found.append(str(error))
        found.append(
            ls.train(
                steps(steps=2), plan="replicate=2,numerics=bitwise", run_dir=f"{folder}/replicate"
            ).fingerprint
        )
    found.append(ls.train(steps(steps=2), plan=PLAN, run_dir=f"{folder}/run").fingerprint)
    return found


def test_gloo_on_a_device_is_refused_for_shards_and_the_remedies_train(
    devices: WorkerPool, tmp_path: Path
) -> None:
    first, second = devices.run(2, on_device, through_gloo, str(tmp_path))
    assert first == second
    said, replicate, without = first
    assert said.startswith(
        "shard=2 through 'cpu:gloo,standin:gloo'; Gloo carries the tensors of standin for replicate"
        " only; leave"
    )
    assert said.endswith(
        "write init_process_group('cpu:gloo,standin:standin_gloo'); or use replicate only"
    )
    assert replicate == without


def test_each_command_that_starts_ranks_takes_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    for starts in (run, verify, doctor, search, sweep, evaluate, average):
        assert "share_devices" in {option.name for option in starts.command.params}, starts.__name__
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # which the command would set
    given = []

    def diagnose(*, environ: Mapping[str, str], **_: object) -> object:
        given.append(environ["LOCKSTEP_SHARE_DEVICES"])
        raise LaunchError("enough")

    with patch("lockstep.doctor.diagnose.diagnose", diagnose):
        ended = CliRunner().invoke(
            doctor.command, ["--nproc", "4", "--share-devices"], standalone_mode=False
        )
    assert (str(ended.exception), given) == ("enough", ["1"])


def test_times_of_a_shared_device_are_no_data_sheet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    with patch.object(doctor, "count_gpus", lambda: 2):
        options = ["--nproc", "4", "--share-devices", "--write", str(tmp_path / "mine.toml")]
        ended = CliRunner().invoke(doctor.command, options, standalone_mode=False)
    assert (
        "--write with --nproc 4 on 2 GPUs; each process needs its own GPU; give --nproc 2"
        in str(ended.exception)
    )


SCRIPT = """
import os
import lockstep as ls
from device.test_training import steps

if __name__ == "__main__":
    result = ls.train(steps(steps=2), run_dir=os.environ["RUN_DIR"])
    print(f"rank {ls.rank()} has {result.fingerprint}")
"""


@pytest.mark.command
def test_a_launcher_starts_several_processes_for_one_device(
    devices: WorkerPool, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)

    def command(*launcher: str, **variables: str) -> subprocess.CompletedProcess[str]:
        variables |= {"STAND_IN_DEVICES": "1", "LOCKSTEP_PLAN": PLAN}
        return ranks.command(devices, tmp_path, "-m", *launcher, "train.py", **variables)

    refused = command("lockstep", "run", RUN_DIR="refused")
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    assert "share one GPU" in refused.stderr
    torchrun = ("torch.distributed.run", "--nproc-per-node", "2")
    runs = [
        command("lockstep", "run", "--share-devices", RUN_DIR="run"),
        command(*torchrun, RUN_DIR="torchrun", LOCKSTEP_SHARE_DEVICES="1"),
    ]
    found = set()
    for done in runs:
        assert done.returncode == 0, done.stdout + done.stderr
        assert "--share-devices: 2 processes compute on one GPU" in done.stderr
        found |= {line.split()[-1] for line in done.stdout.splitlines() if line.startswith("rank")}
    assert len(found) == 1
