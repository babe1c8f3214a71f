"""The command line before it starts anything: help, versions, mistakes."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from forked import lockstep
from processes import LOCKSTEP, ran
from safetensors.numpy import save_file

from lockstep import __version__
from lockstep.cli import main

BEFORE_WORKERS = [
    *(
        ["--help"],
        ["-h"],
        ["run", "--help"],
        ["--version"],
        ["run", "missing.py"],
        ["run", "-m", "missing"],
        ["verify", "--help"],
    ),
    *(["inspect", "missing"], ["export", "--help"], ["slurm", "train.py", "--time", "1:00:00"], []),
]
IMPORTED = """
import json, sys
from contextlib import suppress
from lockstep.cli.main import main
for arguments in json.loads(sys.argv.pop()):
    sys.argv[1:] = arguments
    with suppress(SystemExit, Exception):
        main()
    print("\\ntorch:", "torch" in sys.modules, arguments, flush=True)
"""


def test_torch_is_not_imported_before_workers_are_started() -> None:
    line = [sys.executable, "-c", IMPORTED, json.dumps(BEFORE_WORKERS)]
    ended = ran(line)
    found = [line for line in ended.stdout.splitlines() if line.startswith("torch: ")]
    assert found == [f"torch: False {arguments}" for arguments in BEFORE_WORKERS]


def test_torch_is_not_imported_for_an_evaluation_that_is_refused(tmp_path: Path) -> None:
    for name in ("weights", "train.py"):
        (tmp_path / name).touch()
    lines = (
        "import atexit, sys",
        "from lockstep.cli.main import main",
        "atexit.register(lambda: print('torch' in sys.modules))",
        "main()",
    )
    arguments = ["evaluate", "--nproc", "x", str(tmp_path / "weights"), str(tmp_path / "train.py")]
    line = [sys.executable, "-c", "\n".join(lines), *arguments]
    ended = ran(line)
    assert "LaunchError: --nproc x; it takes a whole number of processes" in ended.stderr
    assert ended.stdout == "False\n"


CTRL_C_DURING_IMPORTS = """
import importlib.abc, os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)


class CtrlC(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == arriving_at:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                print("swallowed, as by the import of a C extension")


arriving_at = sys.argv.pop()
sys.meta_path.insert(0, CtrlC())
from lockstep.cli.entry import main
main()
"""


@pytest.mark.parametrize("name", ["click", "lockstep.cli.average", "torch"])
def test_ctrl_c_while_the_command_line_is_imported_ends_it(name: str, tmp_path: Path) -> None:
    files = [str(tmp_path / f"{each}.safetensors") for each in "ab"]
    for file in files:
        save_file({"weight": np.zeros(3, np.float32)}, file)
    arguments = ["average", *files, "-o", str(tmp_path / "mean.safetensors")]
    line = [sys.executable, "-c", CTRL_C_DURING_IMPORTS, *arguments, name]
    ended = ran(line)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
    assert not (tmp_path / "mean.safetensors").exists()


def test_a_working_directory_that_is_gone_is_told(tmp_path: Path) -> None:
    line = f'cd "{tmp_path}" && mkdir gone && cd gone && rmdir ../gone && exec "{LOCKSTEP}" "$@"'
    for arguments in (["run", "/train.py"], ["export", "/run", "out.safetensors"]):
        ended = ran(["sh", "-c", line, "sh", *arguments])
        assert ended.returncode == 2
        assert (
            ended.stderr
            == "lockstep: LaunchError: the working directory cannot be found (No such file or"
            " directory); it was deleted or replaced since the shell entered it; change to one"
            " that exists: cd ~\n"
        )


def test_too_few_open_files_are_told() -> None:
    line = f'ulimit -n 16 && exec "{LOCKSTEP}" doctor'
    ended = ran(["sh", "-c", line])
    assert ended.returncode == 2
    assert ended.stderr.startswith(
        "lockstep: LaunchError: this process may have 16 files open (ulimit -n); "
    )
    assert ended.stderr.endswith("raise the limit: ulimit -n 4096\n")


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EMFILE, "no more files may be open; raise the limit: ulimit -n 4096"),
        (
            errno.ENOSPC,
            "make room there, or name another place; TMPDIR names the folder of temporary files",
        ),
        (
            errno.EROFS,
            (
                "give yourself the right to it, or name another place; TMPDIR is that of temporary "
                "files"
            ),
        ),
    ],
)
def test_an_error_of_the_system_is_told_in_words(
    number: int, remedy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise OSError(number, "said", "/place")

    monkeypatch.setattr(main._commands, "main", fail)
    with pytest.raises(SystemExit, match="2"):
        main.main()
    kind = type(OSError(number, "")).__name__
    assert capsys.readouterr().err == f"lockstep: {kind}: said (/place); {remedy}\n"


def test_an_error_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "said", "/place")

    monkeypatch.setattr(main._commands, "main", fail)
    with pytest.raises(FileNotFoundError):
        main.main()


def test_help_names_the_commands_and_an_example() -> None:
    ended = lockstep("--help")
    assert ended.returncode == 0
    assert "  lockstep run --nproc 2 train.py\n" in ended.stdout
    assert (
        "  run       Run SCRIPT on several processes, on one machine or several.\n" in ended.stdout
    )
    assert "  verify    Prove that plans train the same model as one process.\n" in ended.stdout


def test_run_help_names_its_options_and_examples() -> None:
    ended = lockstep("run", "--help")
    assert ended.returncode == 0
    for text in (
        "--nproc N|auto|gpu",
        "--plan PLAN",
        "--run-dir DIR",
        "-m ",
        '  lockstep run --plan "replicate=2,numerics=bitwise"',
    ):
        assert text in ended.stdout


def test_a_search_shows_its_own_options_before_those_of_each_run() -> None:
    for command in ("search", "sweep"):
        shown = lockstep(command, "--help").stdout
        assert 0 < shown.index(" --metric ") < shown.index(" --csv ") < shown.index(" --nproc ")


def test_the_module_is_the_command() -> None:
    for arguments in (["--version"], ["run", "--help"], ["nix"]):
        as_module = ran([sys.executable, "-m", "lockstep", *arguments])
        as_command = ran([LOCKSTEP, *arguments])
        assert lockstep(*arguments).__dict__ == as_command.__dict__, "a fork is as a process"
        assert (as_module.returncode, as_module.stdout, as_module.stderr) == (
            as_command.returncode,
            as_command.stdout,
            as_command.stderr,
        )


def test_the_version_of_lockstep_torch_and_python_is_printed() -> None:
    ended = lockstep("--version")
    assert ended.returncode == 0
    assert ended.stdout.startswith(f"lockstep {__version__}, torch 2.")
    assert ended.stdout.endswith(f", Python {sys.version.partition(' ')[0]}\n")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "UsageError: Missing command; see lockstep --help"),
        (["nix"], "UsageError: No such command 'nix'; see lockstep --help"),
        (
            ["relpay"],
            "UsageError: No such command 'relpay'; did you mean replay?; see lockstep --help",
        ),
        (["run"], "UsageError: Missing argument 'SCRIPT'; see lockstep run --help"),
        (
            ["plan", "--on"],
            "UsageError: Option '--on' requires an argument; see lockstep plan --help",
        ),
        (
            ["run", "--nix", "train.py"],
            "UsageError: No such option '--nix'; see lockstep run --help",
        ),
        (
            ["run", "trian.py"],
            (
                "LaunchError: 'trian.py' is not there; SCRIPT is the path of a Python file; correct"
                " it, or give -m before a module's name"
            ),
        ),
        (
            ["run", "."],
            (
                "LaunchError: '.' is a directory; SCRIPT is the path of a Python file; name the"
                " file in it"
            ),
        ),
        (
            ["run", "-m", "missing.train"],
            (
                "LaunchError: no module named 'missing.train'; -m takes the name of a module that"
                " Python can import from here; correct the name"
            ),
        ),
        (
            ["run", "--nproc", "0", "train.py"],
            (
                "LaunchError: --nproc 0; it takes a whole number of processes, at least 1, or "
                "auto (from the plan, else one per GPU, else 1), or gpu (one per GPU); give one "
                "of those"
            ),
        ),
        (
            ["run", "--nproc", "two", "train.py"],
            (
                "LaunchError: --nproc two; it takes a whole number of processes, at least 1, or "
                "auto (from the plan, else one per GPU, else 1), or gpu (one per GPU); give one "
                "of those"
            ),
        ),
        (
            ["run", "--nproc", "3", "--plan", "replicate=2", "train.py"],
            (
                "PlanError: plan 'replicate=2,numerics=fast' with 3 processes; the axes multiply to"
                " 2, and must multiply to the number of processes; change the plan, or the number"
                " of processes to 2"
            ),
        ),
        (
            ["run", "--run-dir", "", "train.py"],
            (
                "RunDirectoryError: --run-dir is empty; it names the folder that the run writes to"
                " (is a shell variable unset?); give a path, or leave --run-dir out"
            ),
        ),
        (
            ["run", "--run-dir", "s3://bucket/run", "train.py"],
            (
                "RunDirectoryError: --run-dir is 's3://bucket/run', a URL; a run directory is a"
                " folder of this machine; give a path, and ls.Saving(folder=URL) for checkpoints at"
                " a URL"
            ),
        ),
        (
            ["slurm", "--time", "10", "--run", "--nix", "train.py"],
            "UsageError: No such option '--nix'; see lockstep run --help",
        ),
        (
            ["slurm", "--time", "10", "--submit", "trian.py"],
            (
                "LaunchError: 'trian.py' is not there; SCRIPT is the path of a Python file; correct"
                " it, or give -m before a module's name"
            ),
        ),
        (
            ["slurm", "--time", "10", "--name", "a b", "train.py"],
            ("LaunchError: --name a b; it names files; use letters, digits, dots, - and _"),
        ),
        (
            ["slurm", "--time", "10", "--run", "--plan 'shard=2", "train.py"],
            (
                'LaunchError: --run "--plan \'shard=2": No closing quotation; its syntax is the'
                " shell's; close each quotation mark"
            ),
        ),
        (
            ["slurm", "--time", "10", "--run", "other.py --lr 1", "train.py"],
            (
                "LaunchError: --run 'other.py --lr 1' has 'other.py', which is not an option; --run "
                "takes options of lockstep run; give the script and its arguments after the "
                "options of lockstep slurm"
            ),
        ),
        (
            ["slurm", "--time", "10", "--sbatch", "partition=gpu", "train.py"],
            (
                "LaunchError: --sbatch 'partition=gpu'; it takes one option of sbatch; repeat it for each,"
                ' as in --sbatch "--partition=gpu"'
            ),
        ),
        (
            ["slurm", "--time", "10", "-o", "train.py", "train.py"],
            (
                "LaunchError: -o train.py exists and is not a batch script; only a batch script is "
                "overwritten; name another file, or remove it"
            ),
        ),
        (
            ["slurm", "--time", "10", "-o", "missing/train.sh", "train.py"],
            (
                "LaunchError: -o missing/train.sh; its directory does not exist; name a file in an "
                "existing one"
            ),
        ),
        (
            ["run", "--plan", "replicate", "train.py"],
            (
                "PlanError: 'replicate' in plan 'replicate'; a plan is made of name=value pairs"
                " with commas between them, such as replicate=2,numerics=bitwise"
            ),
        ),
    ],
)
def test_a_mistake_is_one_message_and_status_2(
    tmp_path: Path, arguments: list[str], text: str
) -> None:
    (tmp_path / "train.py").write_text("print('started')")
    ended = lockstep(*arguments, folder=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", f"lockstep: {text}\n")
    assert (tmp_path / "train.py").read_text() == "print('started')"


@pytest.mark.parametrize("closed", ["2>&-", ">&-", ">&- 2>&- <&-"])
def test_a_script_runs_where_streams_are_closed(tmp_path: Path, closed: str) -> None:
    (tmp_path / "train.py").write_text(
        "import sys\nprint('out')\nprint('err', file=sys.stderr)\nopen('done', 'w').close()"
    )
    ended = ran(f"{LOCKSTEP} run train.py {closed}", shell=True, cwd=tmp_path)
    assert ended.returncode == 0
    assert (tmp_path / "done").exists()
    assert (ended.stdout, ended.stderr) == (
        "" if closed[0] == ">" else "out\n",
        "" if "2>" in closed else "err\n",
    )


def test_a_batch_script_goes_to_the_terminal_or_to_a_file(tmp_path: Path) -> None:
    line = [
        "slurm",
        "train.py",
        "--nodes",
        "2",
        "--time",
        "1:00:00",
        "--run",
        "--plan shard=2",
        "-o",
        "train.sh",
        "--",
        "--lr",
        "0.1",
    ]
    for _ in range(2):  # it is written over
        assert lockstep(*line, folder=tmp_path).stdout == ""
    written = (tmp_path / "train.sh").read_text()
    assert (
        lockstep(*[word for word in line if word not in ("-o", "train.sh")], folder=tmp_path).stdout
        == written
    )
    assert (
        '    lockstep run --run-dir "runs/train-$SLURM_JOB_ID" --plan shard=2 train.py --lr 0.1\n'
        in written
    )
    assert f"export PATH={Path(sys.executable).parent}:$PATH\n" in written


@pytest.mark.command
@pytest.mark.parametrize(
    "arguments", [["run", "train.py"], ["doctor"], ["plan", "--on", "this", "train.py"]]
)
def test_an_interrupt_while_torch_is_imported_ends_the_command(
    tmp_path: Path, arguments: list[str]
) -> None:
    (tmp_path / "train.py").write_text("print('started')")
    (tmp_path / "torch.py").write_text(
        "import os, signal\n"
        "try: os.kill(os.getpid(), signal.SIGINT)\n"
        "except KeyboardInterrupt: print('swallowed')\n"
        "raise ImportError('interrupted')\n"
    )
    ended = ran(
        [LOCKSTEP, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "\n")


def test_a_path_that_no_system_takes_is_told(tmp_path: Path) -> None:
    """Python's own functions raise for a name that is too long, and for symlinks in a circle."""
    circle, long = tmp_path / "circle", tmp_path / ("x" * 300)
    circle.symlink_to(circle)
    out = f"{tmp_path / 'out'}.safetensors"
    for arguments in (
        ["inspect", circle],
        ["export", circle, out],
        ["export", tmp_path, f"{long}.safetensors"],
        ["average", circle, tmp_path, "-o", out],
        ["report", circle],
        ["replay", "--step", "1", circle],
        *([name, long] for name in ("inspect", "report", "run", "blame")),
    ):
        ended = lockstep(*map(str, arguments), folder=tmp_path)
        assert ended.returncode == 2, (arguments, ended.stderr)
        assert ended.stderr.startswith("lockstep: "), (arguments, ended.stderr)
        assert ended.stderr.count("\n") == 1, (arguments, ended.stderr)
