"""A run that exceeds a timeout and then continues; and collectives that are compared before they
start."""

from __future__ import annotations

import ctypes
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import run_files
import torch
import torch.distributed as dist
from training.subjects import recipe

import lockstep as ls
from lockstep.base.errors import MismatchError
from lockstep.testing.pool import WorkerPool


def line_of(text: str) -> str:
    """The first line of this file with the text."""
    return f"{__file__}:{next(number for number, line in enumerate(Path(__file__).read_text().splitlines(), 1) if text in line)}"


STEPS_BEFORE = 2


def hangs(run_dir: Path) -> list[dict[str, Any]]:
    """The events of a hang in the third step. Before, a step may exceed a second on a busy
    machine."""
    return [row for row in run_files.events(run_dir, "hang") if row["step"] == STEPS_BEFORE]


def until_reported(run_dir: Path) -> None:
    """Stand in one call of native code until the hang is reported."""
    read, write = os.pipe()

    def watch() -> None:
        while not hangs(run_dir):
            time.sleep(0.05)
        os.write(write, b"x")

    thread = threading.Thread(target=watch)
    thread.start()
    os.read(read, 1)
    thread.join()
    os.close(read)
    os.close(write)


def with_the_gil_until_reported(run_dir: Path) -> None:
    """The same, without another thread of Python meanwhile: a fork looks for the event."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            while not hangs(run_dir):
                time.sleep(0.05)
            os.write(write, b"x")
        finally:
            os._exit(0)
    ctypes.PyDLL(None).read(read, ctypes.create_string_buffer(1), 1)
    os.waitpid(child, 0)
    os.close(read)
    os.close(write)


class Stands(ls.Hook):
    """One rank stands somewhere before the third step."""

    def __init__(self, rank: int, stand: Callable[[Path], None]) -> None:
        self._rank, self._stand = rank, stand

    def before_step(self, run: Any) -> None:
        if run.step == STEPS_BEFORE and run.rank == self._rank:
            self._stand(run.context.run_dir)


def slow_in_the_third_step(
    run_dir: str, rank: int, stand: Callable[[Path], None] = until_reported
) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.hooks.hang.watchdog.SILENCE_SECONDS", 2.0)
        patch.setenv("LOCKSTEP_HANG_AFTER", "1s")
        patch.setenv("LOCKSTEP_ON_HANG", "report")
        return ls.train(
            recipe(steps=6), run_dir=run_dir, plan="numerics=bitwise", hooks=[Stands(rank, stand)]
        ).fingerprint


@pytest.mark.parametrize("rank", [0, 1])
def test_on_hang_report_writes_a_report_and_the_run_continues(
    pool: WorkerPool, tmp_path: Path, rank: int
) -> None:
    found = pool.run(2, slow_in_the_third_step, str(tmp_path / "run"), rank)
    assert len(set(found)) == 1
    (hang,) = hangs(tmp_path / "run")
    assert (hang["kind"], hang["ranks"]) == ("missing", [rank])
    assert (
        f"it is in a call that does not return at {line_of('os.read(read, 1)')}" in hang["summary"]
    )
    text = Path(tmp_path, "run", f"hang-{STEPS_BEFORE:08d}.txt").read_text()
    assert f"rank {1 - rank} waits in all_" in text
    assert "training thread, innermost frame last:" in text
    assert (tmp_path / "run" / "result.json").exists()


def test_a_rank_whose_native_code_holds_the_gil_is_waited_for_and_then_named(
    pool: WorkerPool, tmp_path: Path
) -> None:
    pool.run(2, slow_in_the_third_step, str(tmp_path / "run"), 1, with_the_gil_until_reported)
    (hang,) = hangs(tmp_path / "run")
    assert (hang["kind"], hang["ranks"]) == ("missing", [1])
    assert (
        f"native code holds the GIL, called at {line_of('.read(read, ctypes')}" in hang["summary"]
    )


class Between(ls.Hook):
    """A collective of the script, after the second step, that differs between the ranks."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def after_step(self, run: Any) -> None:
        if run.step != 2:
            return
        if self.kind == "late" and run.context.world.rank == 1:
            time.sleep(2.5)
        size = 3 + (self.kind == "size") * run.context.world.rank
        if self.kind == "name" and run.context.world.rank == 1:
            dist.broadcast(torch.ones(size), 0)
        elif self.kind != "left out" or run.context.world.rank == 0:
            op = (
                dist.ReduceOp.MAX
                if self.kind == "operation" and run.context.world.rank == 1
                else dist.ReduceOp.SUM
            )
            dist.all_reduce(torch.ones(size), op)


def checked(run_dir: str, plan: str, kind: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_CHECK", "1")
        hooks = [] if kind == "none" else [Between(kind)]
        try:
            return ls.train(recipe(steps=4), run_dir=run_dir, plan=plan, hooks=hooks).fingerprint
        except MismatchError as error:
            return str(error)


@pytest.mark.parametrize(
    ("kind", "plan", "said"),
    [
        (
            "name",
            "replicate=2",
            "rank 0 allreduce of float32 (3,), reduce_op sum at {here} in Between.after_step;"
            " rank 1 broadcast of float32 (3,), root_rank 0",
        ),
        (
            "size",
            "shard=2",
            "rank 0 allreduce of float32 (3,), reduce_op sum at {here} in Between.after_step; "
            "rank 1 allreduce of float32 (4,), reduce_op sum at {here}",
        ),
        (
            "operation",
            "replicate=2",
            "rank 0 allreduce of float32 (3,), reduce_op sum at {here} in Between.after_step; "
            "rank 1 allreduce of float32 (3,), reduce_op max at {here}",
        ),
        (
            "left out",
            "replicate=2",
            "rank 0 allreduce of float32 (3,), reduce_op sum at {here} in Between.after_step;"
            " rank 1 all",
        ),
    ],
)
def test_every_rank_names_the_mismatched_call_with_the_lines_of_all_ranks(
    pool: WorkerPool, tmp_path: Path, kind: str, plan: str, said: str
) -> None:
    found = set(pool.run(2, checked, str(tmp_path / "run"), plan, kind))
    assert len(found) == 1
    assert said.format(here=line_of("dist.all_reduce(torch")) in found.pop()


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2"])
def test_the_check_does_not_change_the_bits_of_a_run_without_mismatch(
    pool: WorkerPool, tmp_path: Path, plan: str
) -> None:
    found = pool.run(2, checked, str(tmp_path / "checked"), f"{plan},numerics=bitwise", "none")
    plain = ls.train(recipe(steps=4), run_dir=str(tmp_path / "plain"), plan="numerics=bitwise")
    assert set(found) == {plain.fingerprint}


def waits_quietly(folder: str) -> tuple[str, str]:
    """The result of a run in which one rank is 2.5 s late to a call, and what its native code
    writes to stderr."""
    kept = os.dup(2)
    written = Path(folder, f"stderr-{os.getpid()}")
    with written.open("wb") as file:
        os.dup2(file.fileno(), 2)
        try:
            found = checked(str(Path(folder, "run")), "replicate=2", "late")
        finally:
            os.dup2(kept, 2)
            os.close(kept)
    return found, written.read_text()


def test_waiting_for_a_late_rank_prints_nothing(pool: WorkerPool, tmp_path: Path) -> None:
    for found, said in pool.run(2, waits_quietly, str(tmp_path)):
        assert re.fullmatch("[0-9a-f]{64}", found)
        assert "waitForInput" not in said
