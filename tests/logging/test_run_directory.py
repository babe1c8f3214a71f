"""The run directory: one run writes to it, nothing of an earlier one is overwritten, and no file in
it is ever half written."""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import run_files
import torch
from safetensors.torch import load_file
from torch import nn

from lockstep.base.errors import RecipeError, RunDirectoryError
from lockstep.logging.run_directory import (
    RunDirectory,
    check_tensors,
    describe_environment,
    is_followed,
)
from lockstep.logging.run_files import default_run_path

HOLDER = Path(__file__).parents[1] / "scripts" / "holder.py"


@contextmanager
def holder(path: Path, how: str = "alone") -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the run directory `path`, and with "forks" a child of it that
    outlives it."""
    process = subprocess.Popen(
        [sys.executable, str(HOLDER), str(path), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        said = {process.stdout.readline().strip() for _ in range(2 if how == "forks" else 1)}
        assert said == ({"held", "child"} if how == "forks" else {"held"})
        yield process
    finally:
        process.stdin.close()
        process.stdout.read()  # ends when the last process that has it open has ended
        process.stdout.close()
        process.wait()


def test_a_directory_is_made_with_its_parents_and_can_be_created_again_after_an_empty_run(
    tmp_path: Path,
) -> None:
    path = tmp_path / "runs" / "first"
    with RunDirectory.create(path) as directory:
        assert directory.path == path
        claim = json.loads((path / "lock").read_text())
        assert claim["pid"] == os.getpid()
        assert claim["host"] == socket.gethostname()
        assert datetime.fromisoformat(claim["started"]).tzinfo is not None
    assert list(path.iterdir()) == []
    RunDirectory.create(path).close()


def test_the_path_is_absolute_so_that_a_script_may_change_its_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with RunDirectory.create(Path("here")) as directory:
        assert directory.path == tmp_path / "here"


@pytest.mark.forks
def test_a_directory_held_by_another_process_is_refused_with_that_process_named(
    tmp_path: Path,
) -> None:
    with holder(tmp_path) as process:
        with pytest.raises(RunDirectoryError) as refused:
            RunDirectory.create(tmp_path)
        assert re.fullmatch(
            re.escape(
                f"run directory {tmp_path} is in use by a live run (process {process.pid} on"
                f" {socket.gethostname()}, since "
            )
            + r"\S+"
            + re.escape("); one run writes to a directory; choose another, or end that run first"),
            str(refused.value),
        )
        assert json.loads((tmp_path / "lock").read_text())["pid"] == process.pid
    RunDirectory.create(tmp_path).close()


@pytest.mark.forks
@pytest.mark.parametrize("how", ["alone", "forks"])
def test_the_claim_of_a_killed_process_is_void_at_once_even_where_a_child_of_it_lives_on(
    tmp_path: Path, how: str
) -> None:
    with holder(tmp_path, how) as process:
        process.kill()
        process.wait()
        assert (tmp_path / "lock").exists()
        with RunDirectory.create(tmp_path):
            assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()


def test_a_directory_is_refused_a_second_time_in_the_same_process(tmp_path: Path) -> None:
    with (
        RunDirectory.create(tmp_path),
        pytest.raises(RunDirectoryError, match=rf"in use by a live run \(process {os.getpid()} on"),
    ):
        RunDirectory.create(tmp_path)


def test_a_claim_is_on_the_file_that_has_the_name_and_not_on_one_that_its_holder_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = RunDirectory.create(tmp_path)
    real_open = os.open
    opened: list[int] = []

    def open_just_before_the_holder_closes(*arguments: Any, **keywords: Any) -> int:
        opened.append(real_open(*arguments, **keywords))
        earlier.close()
        return opened[-1]

    monkeypatch.setattr(os, "open", open_just_before_the_holder_closes)
    with RunDirectory.create(tmp_path):
        assert len(opened) == 2
        assert (tmp_path / "lock").exists()


def test_a_process_on_a_lost_machine_loses_the_directory_and_leaves_it_alone(
    tmp_path: Path,
) -> None:
    lost = RunDirectory.create(tmp_path / "run")
    assert lost.holder is not None
    with pytest.raises(RunDirectoryError, match="in use by a live run"):
        RunDirectory.create(tmp_path / "run", lost_holders=[{**lost.holder, "pid": 1}])
    assert not lost.is_taken
    with RunDirectory.create(tmp_path / "run", lost_holders=[lost.holder]) as directory:
        assert (lost.is_taken, directory.is_taken) == (True, False)
        lost.close()
        assert (tmp_path / "run" / "lock").exists()
        with pytest.raises(RunDirectoryError, match="in use by a live run"):
            RunDirectory.create(tmp_path / "run")
    assert not (tmp_path / "run" / "lock").exists()


def test_closing_twice_gives_up_only_the_own_claim(tmp_path: Path) -> None:
    first = RunDirectory.create(tmp_path)
    first.close()
    with RunDirectory.create(tmp_path):
        first.close()
        assert (tmp_path / "lock").exists()
        with pytest.raises(RunDirectoryError, match="in use"):
            RunDirectory.create(tmp_path)


@pytest.mark.parametrize(
    "name", ["run.json", "metrics.jsonl", "events.jsonl", "result.json", "model.safetensors"]
)
def test_a_directory_that_holds_a_run_is_refused_and_left_as_it_is(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("earlier")
    with pytest.raises(RunDirectoryError) as refused:
        RunDirectory.create(tmp_path)
    ended = " that has ended" if name == "result.json" else ""
    assert (
        str(refused.value)
        == f"run directory {tmp_path} already holds a run{ended} ({name}); nothing of an earlier"
        " run is overwritten;"
        f" {'go on with more steps (--allow-change steps), ' if ended else ''}choose another"
        " directory, or remove this one"
    )
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [(name, "earlier")]


def test_what_a_run_left_that_was_killed_before_it_wrote_anything_is_taken_over(
    tmp_path: Path,
) -> None:
    (tmp_path / "events.jsonl").touch()
    RunDirectory.create(tmp_path).close()


@pytest.mark.parametrize("below", [".", "deeper/still"])
def test_a_path_that_is_a_file_or_lies_below_one_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("mine")
    path = tmp_path / "file" / below
    with pytest.raises(RunDirectoryError) as refused:
        RunDirectory.create(path)
    assert (
        str(refused.value)
        == f"run directory {path} is, or lies below, something that is not a folder; a run"
        " directory is a folder; choose another path"
    )


def test_a_place_that_cannot_be_written_to_is_refused() -> None:
    with pytest.raises(RunDirectoryError) as refused:
        RunDirectory.create(Path("/proc/lockstep"))
    assert (
        str(refused.value)
        == "run directory /proc/lockstep cannot be written to (No such file or directory:"
        " /proc/lockstep); a run directory is a folder in which files can be created and locked;"
        " choose another, or change its permissions"
    )


def test_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 300)
    assert not is_followed(path), "a run asks this first"
    with pytest.raises(RunDirectoryError, match=r"cannot be written to \(File name too long"):
        RunDirectory.create(path)


def test_a_disk_without_room_is_said_with_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(
        RunDirectoryError,
        match=re.escape(f"{tmp_path} cannot be written to (No space left on device: {tmp_path});"),
    ):
        RunDirectory.create(tmp_path)


def test_a_name_that_the_system_cannot_write_is_refused(tmp_path: Path) -> None:
    for name in ("d\udfff", "a\0b"):
        with pytest.raises(
            RunDirectoryError,
            match=r"has a name that this system cannot write \(.*use plain letters",
        ):
            RunDirectory.create(tmp_path / name)


def test_a_path_that_the_locale_cannot_decode_is_written_with_its_own_bytes(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path) as directory:
        directory.write_json("run.json", {"path": "d\udcc3\udca9"})
    assert json.loads((tmp_path / "run.json").read_text(encoding="utf-8")) == {"path": "dé"}


def test_a_users_own_file_of_the_locks_name_is_neither_overwritten_nor_removed(
    tmp_path: Path,
) -> None:
    (tmp_path / "lock").write_text('{"version": 7}')
    with pytest.raises(RunDirectoryError) as refused:
        RunDirectory.create(tmp_path)
    assert (
        str(refused.value)
        == f"run directory {tmp_path} holds a file named 'lock' that no run wrote; a run records"
        " its claim in that file; choose another directory"
    )
    assert (tmp_path / "lock").read_text() == '{"version": 7}'


def test_json_is_written_readably(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path) as directory:
        directory.write_json("run.json", {"name": "größer", "plan": {"replicate": 2}})
    text = (tmp_path / "run.json").read_text(encoding="utf-8")
    assert text == '{\n  "name": "größer",\n  "plan": {\n    "replicate": 2\n  }\n}\n'


def test_json_names_numbers_that_are_not_finite(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path) as directory:
        directory.write_json(
            "result.json",
            {"loss": float("nan"), "metrics": {"f1": [1.0, float("-inf")]}, "steps": 3},
        )
    assert json.loads((tmp_path / "result.json").read_text(), parse_constant=pytest.fail) == {
        "loss": None,
        "metrics": {"f1": [1.0, None]},
        "steps": 3,
        "not_finite": {"loss": "nan", "metrics.f1[1]": "-inf"},
    }


@pytest.mark.parametrize("step", ["fsync", "rename"])
def test_a_file_that_cannot_be_written_whole_leaves_the_one_before_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fails(*_: Any) -> None:
        raise OSError("the disk is full")

    with RunDirectory.create(tmp_path) as directory:
        directory.write_json("result.json", {"steps": 1})
        with monkeypatch.context() as patch:
            (
                patch.setattr(os, "fsync", fails)
                if step == "fsync"
                else patch.setattr(os, "replace", fails)
            )
            with pytest.raises(OSError, match="the disk is full"):
                directory.write_json("result.json", {"steps": 2})
            with pytest.raises(OSError, match="the disk is full"):
                directory.save_tensors("model.safetensors", {"weight": torch.zeros(3)})
        assert run_files.result(tmp_path) == {"steps": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


def test_tensors_for_which_there_is_no_room_are_an_error_of_the_file(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with RunDirectory.create(tmp_path) as directory:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
        try:
            with pytest.raises(OSError, match="File too large") as caught:
                directory.save_tensors("model.safetensors", {"weight": torch.zeros(2**20)})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert caught.value.filename == str(tmp_path / "model.safetensors")


def test_a_file_of_tensors_holds_every_name_with_its_bits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    square = torch.randn(4, 6)
    state = {
        "tied.a": square,
        "tied.b": square,
        "part.of.tied": square[1:3],
        "transposed": square.t(),
        "expanded": torch.randn(3, 1).expand(3, 5),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "negative.contiguous": torch.randn(1, dtype=torch.complex64).conj().imag,
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "empty.too": torch.empty(0),
        "bfloat16": torch.randn(5).bfloat16(),
        "float16": torch.randn(5).half(),
        "float8": torch.randn(5).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
        "parameter": nn.Parameter(torch.randn(2)),
    }
    with RunDirectory.create(tmp_path) as directory:
        directory.save_tensors("model.safetensors", state)
        before = os.umask(0)
        os.umask(before)
        assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~before
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == state.keys()
    for name, tensor in state.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert torch.equal(
            loaded[name].float() if name == "float8" else loaded[name],
            tensor.float() if name == "float8" else tensor.detach(),
        )


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (
            torch.zeros(2, dtype=torch.complex128),
            "a tensor of layout torch.strided, type torch.complex128, on device cpu",
        ),
        (
            torch.zeros(2, device="meta"),
            "a tensor of layout torch.strided, type torch.float32, on device meta",
        ),
        (
            torch.eye(2).to_sparse(),
            "a tensor of layout torch.sparse_coo, type torch.float32, on device cpu",
        ),
        ({"scale": 1}, "a dict"),
    ],
)
def test_an_entry_that_the_format_cannot_hold_is_named_before_anything_is_written(
    tmp_path: Path, value: Any, found: str
) -> None:
    state = {"good": torch.zeros(1), "bad": value}
    with RunDirectory.create(tmp_path) as directory, pytest.raises(RecipeError) as refused:
        directory.save_tensors("model.safetensors", state)
    assert (
        str(refused.value)
        == f"state dict entry 'bad' is {found}; model.safetensors holds dense tensors of integers,"
        " floats, bools and complex64; change its type, or leave it out of the state dict (a"
        " buffer: persistent=False; get_extra_state: return a tensor)"
    )
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RecipeError, match="'bad'"):
        check_tensors(state)


def test_a_default_path_has_the_script_the_time_and_a_number_where_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    now = datetime(2026, 1, 31, 12, 0, 0)
    paths = []
    for _ in range(3):
        paths.append(default_run_path("examples/gpt.py", now))
        paths[-1].mkdir(parents=True)
    assert paths == [
        Path("runs/gpt-20260131-120000"),
        Path("runs/gpt-20260131-120000-2"),
        Path("runs/gpt-20260131-120000-3"),
    ]


@pytest.mark.parametrize("script", [None, "", "-c", "-m"])
def test_a_default_path_without_a_script_is_called_run(
    script: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert default_run_path(script, datetime(2026, 1, 31, 12, 0, 0)) == Path(
        "runs/run-20260131-120000"
    )


def test_the_environment_is_json_and_says_what_the_bits_may_depend_on() -> None:
    environment = json.loads(json.dumps(describe_environment(torch.device("cpu"))))
    assert environment["versions"]["torch"] == torch.__version__
    assert environment["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert set(environment["versions"]) == {"lockstep", "python", "torch", "numpy"}
    assert environment["threads"] == {
        "intra_op": torch.get_num_threads(),
        "inter_op": torch.get_num_interop_threads(),
    }
    assert environment["command_line"] == sys.orig_argv
    assert environment["host"] == socket.gethostname()
    assert environment["device"]["type"] == "cpu"
    assert environment["device"]["name"]
    assert 1 <= environment["cpus_usable"] <= environment["cpus"]
