"""`lockstep run`, whole: each of these starts processes that import torch, which takes seconds."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from processes import LOCKSTEP, ran, started

from lockstep.launch.worker_processes import KILL_SECONDS, PEER_FAILURES_SECONDS, STOP_SECONDS

pytestmark = pytest.mark.forks

SCRIPTS = Path(__file__).parent.parent / "scripts"


def without_gpus() -> dict[str, str]:
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


def lockstep_run(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return ran([LOCKSTEP, "run", *arguments], cwd=folder, env=without_gpus())


@pytest.mark.command
def test_a_script_written_for_torchrun_runs_unchanged(tmp_path: Path) -> None:
    arguments = ["--help", "--nproc", "3", "-m", "--", "", "a b", "$$x", "${local_rank}"]
    plan = "replicate=2,numerics=bitwise"
    options = ("--plan", plan, "--run-dir", "runs/a")
    script = str(SCRIPTS / "torchrun_style.py")
    ended = lockstep_run(*options, script, *arguments, folder=tmp_path)
    assert ended.returncode == 0
    assert ended.stderr.startswith("lockstep: warning: --plan, --run-dir had no effect")
    assert ended.stderr.count("\n") == 1
    found = sorted(
        (json.loads(line) for line in ended.stdout.splitlines()), key=lambda row: row["rank"]
    )
    listening = {address for row in found for address in row.pop("listening")}
    assert listening == {"127.0.0.1"}
    assert found == [
        {
            "rank": rank,
            "size": 2,
            "local_rank": rank,
            "sum": [3.0, 3.0, 3.0],
            "gradient": [[1.0, 1.0, 1.0, 1.0]],
            "squares": [[0.0, 1.0, 4.0], [9.0, 16.0, 25.0]] if rank == 0 else [],
            "pickled": True,
            "arguments": arguments,
            "plan": plan,
            "run_dir": str(tmp_path / "runs" / "a"),
            "threads": max(1, len(os.sched_getaffinity(0)) // 2),
        }
        for rank in (0, 1)
    ]


@pytest.mark.parametrize(
    ("how", "status", "first"),
    [
        pytest.param(
            "raise",
            1,
            r"lockstep: rank 0 failed \(exit status 1\)(, first of 2)?:\nTraceback \(most recent"
            r" call last\):\n(?s:.*)\nValueError: boom\n",
            marks=pytest.mark.command,
        ),
        pytest.param(
            "kill",
            137,
            r"lockstep: rank 0 was killed by SIGKILL \(often the kernel or the container, because"
            r" memory ran out\)(, first of 2)?\n",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["raise", "kill"],
)
def test_when_a_rank_fails_all_stop_and_it_is_reported_once(
    how: str, status: int, first: str
) -> None:
    ended = lockstep_run("--nproc", "4", str(SCRIPTS / "failing.py"), how)
    assert ended.returncode == status
    assert re.fullmatch(
        first + r"The others: (rank 1 lost a peer; ranks 2-3|ranks 1-3) were stopped\.\n",
        ended.stderr,
    ), ended.stderr
    assert ended.stderr.count("Traceback") == (how == "raise")


def test_the_others_of_a_rank_that_fails_stop_within_10_seconds() -> None:
    """On a machine that is not busy; a run measures the machine."""
    assert PEER_FAILURES_SECONDS + STOP_SECONDS + KILL_SECONDS < 10


@pytest.mark.parametrize(
    ("end", "status", "printed"),
    [
        (
            "from lockstep.base.errors import DataError; raise DataError('value; rule; remedy')",
            2,
            "lockstep: DataError: value; rule; remedy\n",
        ),
        (
            "raise SystemExit(7) if os.environ['RANK'] == '1' else SystemExit(signal.pause())",
            7,
            "lockstep: rank 1 failed (exit status 7)\nThe others: rank 0 was stopped.\n",
        ),
    ],
    ids=["user error", "exit status"],
)
def test_the_status_of_the_script_is_that_of_the_command(
    tmp_path: Path, end: str, status: int, printed: str
) -> None:
    (tmp_path / "script.py").write_text(f"import os, signal\n{end}")
    ended = lockstep_run("--nproc", "2", "script.py", folder=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (status, "", printed)


@pytest.mark.command
def test_sigterm_to_the_command_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, subprocess, time\n"
        "print(os.getpid(), subprocess.Popen(['sleep', '1000']).pid, flush=True)\n"
        "time.sleep(1000)"
    )
    with started(
        [LOCKSTEP, "run", "--nproc", "2", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stderr is not None
        processes = [int(number) for _ in range(2) for number in launcher.stdout.readline().split()]
        launcher.send_signal(signal.SIGTERM)
        assert launcher.stderr.read() == "lockstep: stopped by SIGTERM; no worker is left\n"
    assert launcher.returncode == 143
    assert len(processes) == 4
    for number in processes:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(number).wait()


@pytest.mark.command
def test_sigkill_to_the_command_leaves_no_worker(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(1000)")
    temporary = {"TMPDIR": str(tmp_path)}
    with started(
        [LOCKSTEP, "run", str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **temporary},
    ) as launcher:
        assert launcher.stdout is not None
        worker = int(launcher.stdout.readline())
        launcher.kill()
    with suppress(psutil.NoSuchProcess):
        psutil.Process(worker).wait()


@pytest.mark.command
def test_under_nohup_a_run_outlives_its_terminal_and_still_ends_its_workers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, time\n"
        "print(os.getpid(), signal.getsignal(signal.SIGHUP).name, flush=True)\n"
        "time.sleep(1000)"
    )
    shell = ["sh", "-c", "trap '' HUP INT; exec \"$@\"", "sh"]
    line = [*shell, LOCKSTEP, "run", "--nproc", "2", str(script)]
    with started(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        workers = [launcher.stdout.readline().split() for _ in range(2)]
        launcher.send_signal(signal.SIGHUP)
        launcher.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            launcher.wait(0.5)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.communicate()[1] == "lockstep: stopped by SIGTERM; no worker is left\n"
    assert launcher.returncode == 143
    assert [action for _, action in workers] == ["SIG_IGN"] * 2
    assert not any(psutil.pid_exists(int(number)) for number, _ in workers)


@pytest.mark.command
def test_one_process_a_gpu_is_refused_without_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('started')")
    ended = lockstep_run("--nproc", "gpu", "train.py", folder=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert (
        ended.stderr
        == "lockstep: LaunchError: --nproc gpu; it starts one process per GPU, and torch sees no"
        " GPU here; give a number, or auto\n"
    )


@pytest.mark.parametrize(("restarts", "status"), [("0", 3), ("1", 0)])
def test_where_nobody_reads_its_words_a_run_is_started_again_and_has_its_own_status(
    tmp_path: Path, restarts: str, status: int
) -> None:
    (tmp_path / "train.py").write_text(
        "import os\n"
        "if not os.path.exists('again'):\n"
        "    open('again', 'w').close()\n"
        "    os._exit(3)\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    try:
        line = [LOCKSTEP, "run", "--max-restarts", restarts, "train.py"]
        ended = subprocess.run(line, cwd=tmp_path, stderr=writer, timeout=60, check=False)
    finally:
        os.close(writer)
    assert ended.returncode == status
