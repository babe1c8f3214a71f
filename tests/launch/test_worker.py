"""A worker process runs the user's code as Python would. No torch here: a worker does not import
it, and these take 0.1 s each."""

from __future__ import annotations

import gzip
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from processes import ran

from lockstep.launch.failures import FailureRecord
from lockstep.launch.worker_files import WorkerFiles, WorkerStart

PYTHON = [sys.executable, "-u", "-P", "-m", "lockstep.launch.worker"]


def work(
    folder: Path, *arguments: str, **environment: str
) -> tuple[subprocess.CompletedProcess[str], FailureRecord | None]:
    files = WorkerFiles(folder / "rank-0")
    told = WorkerStart(launcher=os.getpid(), files=str(files.stem)).variables()
    added = {**told, **environment}
    ended = ran([*PYTHON, *arguments], cwd=folder, env={**os.environ, **added})
    return ended, FailureRecord.read(files.failure)


DAMAGED_STARTS = {
    "x": "Expecting value",
    "[]": "it is a list, and not an object",
    "{}": "'launcher' is missing",
    '{"launcher": null}': "'launcher' is None",
    '{"launcher": 1, "more": 1}': "no field 'more'",
    f'{{"launcher": {os.getpid()}, "channel": 999}}': "Bad file descriptor",
    f'{{"launcher": {os.getpid()}, "files": "/nowhere/rank-0"}}': "No such file or directory",
}


def test_a_damaged_variable_of_the_launcher_is_one_line_and_status_2(tmp_path: Path) -> None:
    name = script(tmp_path, "import os; print(os.environ['RANK'])")

    def ended(size: int, told: list[dict[str, str]]) -> list[tuple[int, str, str]]:
        started = [
            subprocess.Popen(
                [*PYTHON, name],
                cwd=tmp_path,
                env={**os.environ, "RANK": str(rank % size), "WORLD_SIZE": str(size), **given},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, given in enumerate(told)
        ]
        said = [process.communicate() for process in started]
        return [(each.returncode, *texts) for each, texts in zip(started, said, strict=True)]

    for size, texts in ((1, list(DAMAGED_STARTS)), (2, ["x", "x"])):
        damaged = ended(size, [{"LOCKSTEP_WORKER": text} for text in texts])
        for text, (status, printed, error) in zip(texts, damaged, strict=True):
            assert (status, printed, error.count("\n")) == (2, "", 1)
            assert error.startswith(f"lockstep: LaunchError: LOCKSTEP_WORKER={text} is not for")
            assert DAMAGED_STARTS[text] in error
        remedied = ended(size, [{}] * size)
        assert remedied == [(0, f"{rank}\n", "") for rank in range(size)]


def test_a_module_that_a_spare_process_cannot_import_is_told_as_it_is(tmp_path: Path) -> None:
    """As torch is, where a library of CUDA's is missing."""
    script(tmp_path, "raise OSError('libcudart.so: cannot open shared object file')", "broken.py")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        told = WorkerStart(launcher=os.getpid(), channel=theirs.fileno(), imports=["broken"])
        ended = ran(
            [*PYTHON, "broken.py"],
            env={**os.environ, "PYTHONPATH": str(tmp_path), **told.variables()},
            pass_fds=[theirs.fileno()],
        )
    assert ended.returncode == 1
    assert ended.stderr.endswith("OSError: libcudart.so: cannot open shared object file\n")
    assert "LOCKSTEP_WORKER" not in ended.stderr


def script(folder: Path, source: str, name: str = "train.py") -> str:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(dedent(source))
    return name


ABOUT = """
    '''The script's own docstring.'''
    import json, os, sys
    x: int = 3
    class Point: pass
    print(json.dumps({
        "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__, "doc": __doc__, "annotations": str(__annotations__),
        "spec": __spec__ and __spec__.name, "package": __package__, "main": sys.modules["__main__"].__dict__ is globals(),
        "point": Point.__module__, "ours": sorted(name for name in os.environ if name.startswith("LOCKSTEP_WORKER")),
    }))
"""


def test_a_script_finds_what_python_would_give_it(tmp_path: Path) -> None:
    name = script(tmp_path, ABOUT, "sub/train.py")
    arguments = ["--help", "-m", "--", "", "a b", "$$x", "${local_rank}", "--nproc=3"]
    ended, record = work(tmp_path, name, *arguments)
    plain = ran([sys.executable, name, *arguments], cwd=tmp_path, check=True)
    assert (ended.returncode, ended.stderr, record) == (0, "", None)
    assert json.loads(ended.stdout) == json.loads(plain.stdout)
    assert json.loads(ended.stdout)["argv"] == [name, *arguments]


@pytest.mark.parametrize("module", ["package.train", "package"])
def test_a_module_finds_what_python_would_give_it(tmp_path: Path, module: str) -> None:
    for name in ("package/train.py", "package/__main__.py"):
        script(tmp_path, ABOUT, name)
    script(tmp_path, "", "package/__init__.py")
    ended, record = work(tmp_path, "-m", module, "--help", "a b")
    plain = ran([sys.executable, "-m", module, "--help", "a b"], cwd=tmp_path, check=True)
    assert (ended.returncode, ended.stderr, record) == (0, "", None)
    assert json.loads(ended.stdout) == json.loads(plain.stdout)


@pytest.mark.parametrize(
    "module", ["package.missing", "missing", "package..train", "package.", "package"]
)
def test_a_module_that_is_not_there_is_a_user_error(tmp_path: Path, module: str) -> None:
    script(tmp_path, "", "package/__init__.py")
    ended, record = work(tmp_path, "-m", module)
    assert ended.returncode == 2
    assert record is not None
    assert record.user_error
    missing = "package.__main__" if module == "package" else module
    assert (
        record.message
        == f"no module named {missing!r}; -m takes the name of a module that Python can import from"
        " here; correct the name"
    )


def test_an_error_inside_an_imported_package_is_the_scripts_own(tmp_path: Path) -> None:
    script(tmp_path, "import nothing_of_that_name", "package/__init__.py")
    _, record = work(tmp_path, "-m", "package.train")
    assert record is not None
    assert record.message == "No module named 'nothing_of_that_name'"


def test_an_exception_is_recorded_without_our_own_frames_and_not_printed(tmp_path: Path) -> None:
    name = script(
        tmp_path,
        """
        import atexit
        atexit.register(print, "atexit ran")
        def inner():
            raise KeyError("name")
        try:
            inner()
        except KeyError as error:
            raise ValueError("boom") from error
        """,
    )
    ended, record = work(tmp_path, name)
    plain = ran([sys.executable, name], cwd=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "atexit ran\n", "")
    assert record is not None
    assert record.traceback == plain.stderr


def test_a_syntax_error_reads_as_python_shows_it(tmp_path: Path) -> None:
    name = script(tmp_path, "x = = 3")
    ended, record = work(tmp_path, name)
    plain = ran([sys.executable, name], cwd=tmp_path)
    assert ended.returncode == 1
    assert record is not None
    assert record.traceback.removeprefix("Traceback (most recent call last):\n") == plain.stderr


def test_a_user_error_ends_with_status_2_and_is_not_printed(tmp_path: Path) -> None:
    name = script(
        tmp_path,
        "from lockstep.base.errors import DataError; raise DataError('value; rule; remedy')",
    )
    ended, record = work(tmp_path, name)
    assert (ended.returncode, ended.stderr) == (2, "")
    assert record is not None
    assert (record.user_error, record.message) == (True, "value; rule; remedy")


@pytest.mark.parametrize(
    ("call", "status", "printed"),
    [
        ("sys.exit()", 0, ""),
        ("sys.exit(0)", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit(256 + 7)", 7, ""),
        ("sys.exit('no such corpus')", 1, "no such corpus\n"),
        ("argparse.ArgumentParser(prog='x', usage='x').parse_args(['--help'])", 0, "usage: x"),
        (
            "argparse.ArgumentParser(prog='x', usage='x').parse_args(['--nix'])",
            2,
            "usage: x\nx: error: unrecognized arguments: --nix\n",
        ),
        ("os._exit(5)", 5, ""),
        ("signal.raise_signal(signal.SIGINT)", 130, ""),
    ],
)
def test_an_exit_keeps_its_status(tmp_path: Path, call: str, status: int, printed: str) -> None:
    name = script(tmp_path, f"import argparse, os, signal, sys\n{call}")
    ended, record = work(tmp_path, name)
    assert ended.returncode == status
    assert printed in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    assert (record is not None) == (status in (1, 2, 3, 7, 130))
    assert record is None or record.status == status


@pytest.mark.parametrize("status", [0, 1])
def test_files_left_open_are_written_before_the_process_ends(tmp_path: Path, status: int) -> None:
    name = script(
        tmp_path,
        f"""
        import gzip, sys
        text, binary, packed = open("text", "w"), open("binary", "wb"), gzip.open("packed", "wt")
        text.write("text"), binary.write(b"binary"), packed.write("packed")
        sys.stdout.reconfigure(line_buffering=False, write_through=False)
        print("printed", end="")
        if {status}: raise ValueError
        """,
    )
    ended, _ = work(tmp_path, name)
    assert (ended.returncode, ended.stdout) == (status, "printed")
    assert ((tmp_path / "text").read_text(), (tmp_path / "binary").read_bytes()) == (
        "text",
        b"binary",
    )
    assert gzip.decompress((tmp_path / "packed").read_bytes()) == b"packed"


def test_threads_are_waited_for_and_then_atexit_functions_run(tmp_path: Path) -> None:
    name = script(
        tmp_path,
        """
        import atexit, pickle, sys, threading
        class Point: pass
        go = threading.Event()
        def late():
            go.wait()
            print("thread")
        threading.Thread(target=late).start()
        atexit.register(lambda: print(type(pickle.loads(pickle.dumps(Point()))).__name__))
        threading.Timer(0.01, go.set).start()
        """,
    )
    ended, _ = work(tmp_path, name)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "thread\nPoint\n", "")


@pytest.mark.parametrize("status", [0, 1])
def test_objects_are_not_taken_down(tmp_path: Path, status: int) -> None:
    name = script(
        tmp_path,
        f"""
        class Group:
            def __del__(self): print("waits for its peers")
        group = Group()
        if {status}: raise ValueError
        """,
    )
    ended, _ = work(tmp_path, name)
    assert (ended.returncode, ended.stdout) == (status, "")


def test_classes_of_the_script_travel_to_spawned_processes_and_back(tmp_path: Path) -> None:
    name = script(
        tmp_path,
        """
        import multiprocessing, os
        class Point:
            def __init__(self, x): self.x = x
        def double(point): return Point(2 * point.x)
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                doubled = pool.map(double, [Point(3)])
                pool.close()
                pool.join()
            print(type(doubled[0]) is Point, doubled[0].x)
        """,
    )
    ended, _ = work(tmp_path, name)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True 6\n", "")


def test_a_child_that_the_script_forked_does_not_speak_for_the_worker(tmp_path: Path) -> None:
    name = script(
        tmp_path,
        """
        import os
        if os.fork() == 0:
            raise ValueError("in the child")
        print(os.waitstatus_to_exitcode(os.wait()[1]))
        """,
    )
    ended, record = work(tmp_path, name)
    assert (ended.returncode, ended.stdout, record) == (0, "1\n", None)
    assert "ValueError: in the child" in ended.stderr


def test_an_excepthook_of_the_script_is_called_and_its_print_is_not_shown_twice(
    tmp_path: Path,
) -> None:
    name = script(
        tmp_path,
        """
        import sys
        def hook(kind, error, traceback):
            print("reported", kind.__name__)
            print("shown by the launcher", file=sys.stderr)
            raise RuntimeError("a hook that fails")
        sys.excepthook = hook
        raise ValueError("boom")
        """,
    )
    ended, record = work(tmp_path, name)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "reported ValueError\n", "")
    assert record is not None


def test_a_crash_leaves_the_python_stack(tmp_path: Path) -> None:
    name = script(tmp_path, "import ctypes\ndef inner():\n    ctypes.string_at(0)\ninner()")
    ended, record = work(tmp_path, name)
    assert (ended.returncode, ended.stderr, record) == (-11, "", None)
    assert f'File "{tmp_path / name}", line 3 in inner' in (tmp_path / "rank-0.crash").read_text()


def test_a_worker_does_not_outlive_its_launcher(tmp_path: Path) -> None:
    name = script(tmp_path, "print('not reached')")
    ended, _ = work(tmp_path, name, **WorkerStart(launcher=1).variables())
    assert (ended.returncode, ended.stdout) == (1, "")


def test_a_worker_imports_neither_torch_nor_multiprocessing_before_the_script(
    tmp_path: Path,
) -> None:
    name = script(
        tmp_path,
        "import sys; print([name for name in ('torch', 'multiprocessing', 'numpy', 'click') if name"
        " in sys.modules])",
    )
    ended, _ = work(tmp_path, name)
    assert ended.stdout == "[]\n"
