"""The whole command, on this machine as it is and with defects planted in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import forked
import namespace
import psutil
import pytest
from processes import LOCKSTEP, ran, started

from lockstep.doctor.expected_results import COLLECTIVES, DATA_TYPES

ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
for left in ("LOCKSTEP_RUN_DIR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
    ENVIRONMENT.pop(left, None)


def doctor(
    *options: str, cwd: Path, before: Sequence[str] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    line = [*before, LOCKSTEP, "doctor", *options]
    return ran(line, cwd=cwd, env={**ENVIRONMENT, **variables})


def bad(ended: subprocess.CompletedProcess[str]) -> dict[str, dict[str, str]]:
    """The lines of what is not well, by what was looked at."""
    return {
        line["check"]: line
        for line in json.loads(ended.stdout)["checks"]
        if line["verdict"] in ("slow", "failed")
    }


@pytest.mark.forks
def test_a_machine_that_is_well(tmp_path: Path) -> None:
    ended = doctor("--nproc", "2", "--json", cwd=tmp_path)
    found: dict[str, Any] = json.loads(ended.stdout)
    # how fast they are depends on what else runs
    wrong = {check: line for check, line in bad(ended).items() if line["section"] != "links"}
    assert wrong == {}
    assert ended.returncode == (1 if bad(ended) else 0)
    collectives = {
        line["check"]: line["verdict"]
        for line in found["checks"]
        if line["section"] == "collectives"
    }
    assert {name: collectives[name] for name in COLLECTIVES} == dict.fromkeys(COLLECTIVES, "ok")
    checked = {
        (row["collective"], row["type"], row["group"])
        for row in found["checked"]
        if row["type"] is not None
    }
    assert len(checked) == (len(COLLECTIVES) - 1) * len(DATA_TYPES) * 2
    assert {row["collective"] for row in found["timed"]} == set(COLLECTIVES)
    all_reduce = [row for row in found["timed"] if row["collective"] == "all-reduce"]
    assert all(
        row["bus_bandwidth"] == row["algorithm_bandwidth"] == row["size_bytes"] / row["seconds"]
        for row in all_reduce
    )
    assert [(link["sender"], link["receiver"]) for link in found["point_to_point"]] == [
        (0, 1),
        (1, 0),
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_sub_groups_of_four_ranks_exchange_at_the_same_time(tmp_path: Path) -> None:
    ended = doctor("--nproc", "4", "--json", cwd=tmp_path)
    found: dict[str, Any] = json.loads(ended.stdout)
    assert {row["group"] for row in found["checked"]} == {"all ranks", "halves", "odd and even"}
    assert [line for line in bad(ended).values() if line["section"] == "collectives"] == []


@pytest.mark.parametrize(
    ("columns", "width"), [("80", 80), ("", 100), pytest.param("120", 120, marks=pytest.mark.slow)]
)
@pytest.mark.forks
def test_the_table_fits_and_says_what_to_do(tmp_path: Path, columns: str, width: int) -> None:
    ended = doctor("--nproc", "1", cwd=tmp_path, COLUMNS=columns, NCCL_DEBUG="INFO")
    assert ended.returncode == 1
    assert all(len(line) <= width for line in ended.stdout.splitlines())
    assert "  NCCL_DEBUG " in ended.stdout
    assert "→ NCCL_DEBUG=WARN" in ended.stdout
    assert "a single process has no peers" in ended.stdout
    assert ended.stdout.splitlines()[-1].startswith(
        ("1 to fix: NCCL_DEBUG", "2 to fix: threads, NCCL_DEBUG")
    )
    assert ended.stderr == ""


@pytest.mark.forks
def test_a_small_shared_memory_is_found(tmp_path: Path) -> None:
    mount = "mount --make-rprivate / && mount -t tmpfs -o size=16m tmpfs /dev/shm"
    before = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    if subprocess.run([*before, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounting in a name space of its own needs root")

    def enter() -> None:
        namespace.leave(["--mount"])
        subprocess.run(["sh", "-c", mount], check=True)

    with forked.inside(before, enter):
        ended = doctor("--nproc", "1", "--json", cwd=tmp_path, before=before)
    assert ended.returncode == 1
    line = bad(ended)["/dev/shm"]
    assert (line["verdict"], line["found"]) == (
        "failed",
        "16 MiB free; up to 128 MiB needed for 1 process",
    )
    assert "--shm-size" in line["remedy"]


@pytest.mark.slow
def test_threads_that_hinder_one_another_are_found(tmp_path: Path) -> None:
    ended = doctor("--nproc", "1", "--json", cwd=tmp_path, OMP_NUM_THREADS="500")
    assert ended.returncode == 1
    line = bad(ended)["threads"]
    assert line["verdict"] == "slow"
    assert line["found"].startswith("1 process × 500 threads on ")
    assert line["remedy"].startswith("OMP_NUM_THREADS=")


@pytest.mark.slow
def test_an_interface_that_does_not_exist_is_found_and_nothing_hangs(tmp_path: Path) -> None:
    ended = doctor("--nproc", "2", "--json", cwd=tmp_path, GLOO_SOCKET_IFNAME="nowhere0")
    assert ended.returncode == 1
    found = bad(ended)
    assert found["interface"]["found"].startswith(
        "GLOO_SOCKET_IFNAME names 'nowhere0'; the interfaces are lo"
    )
    assert found["the process group"]["section"] == "rendezvous"
    assert "nowhere0" in found["the process group"]["found"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--nproc", "0"], "LaunchError: --nproc 0;"),
        (["--nnodes", "2"], "LaunchError: --nnodes 2 without --rdzv"),
        (["--run-dir", ""], "RunDirectoryError: --run-dir is empty"),
        (["extra"], "UsageError"),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    tmp_path: Path, options: list[str], text: str
) -> None:
    ended = doctor(*options, cwd=tmp_path)
    assert ended.returncode == 2
    assert text in ended.stderr
    assert ended.stdout == ""


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
@pytest.mark.forks
def test_a_signal_ends_it_without_a_traceback(tmp_path: Path, number: signal.Signals) -> None:
    line = [LOCKSTEP, "doctor", "--nproc", "2"]
    with started(
        line,
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as doctor:
        while not psutil.Process(doctor.pid).children():
            time.sleep(0.05)
        doctor.send_signal(number)
        output, told = doctor.communicate()
    assert doctor.returncode == 128 + number
    asked = "lockstep: interrupted: the workers are asked to end; Ctrl-C again ends them at once\n"
    ended = f"lockstep: stopped by {number.name}; no worker is left\n"
    assert (output, told) == ("", asked + ended if number == signal.SIGINT else ended)
