"""An image in memory is complete or is not there: whenever a rank dies, the newest one that all
ranks have is whole."""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from checkpoint.states import ATTEMPT, alone, here, laid_out, loaded, numbered, values
from hypothesis import given, strategies as st
from torch import Tensor

from lockstep.base.errors import CheckpointError
from lockstep.checkpoint import images as slots
from lockstep.checkpoint.image_writer import ImageWriter, image_interval
from lockstep.checkpoint.images import open_images
from lockstep.comm.mesh import full_tensor
from lockstep.comm.world import World
from lockstep.testing.pool import WorkerPool


def path_of(writer: ImageWriter) -> str:
    return f"/proc/{os.getpid()}/fd/{writer.descriptors[0]}"


@contextmanager
def writer_of(world: World, attempt: str = ATTEMPT) -> Iterator[ImageWriter]:
    writer = ImageWriter(world, attempt, {})
    try:
        yield writer
    finally:
        writer.close()


class Fault(Exception):
    """Stands for SIGKILL: nothing that comes after it is written."""


class Faults:
    """Raises `Fault` at the moment number `at` of all that this rank's writes pass."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int) -> None:
        self.left = at
        self._pwrite = os.pwrite
        patch.setattr(slots.os, "pwrite", self._torn_write)

    def passes(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Fault

    def _torn_write(self, descriptor: int, data: bytes, at: int) -> int:
        self.passes()
        self._pwrite(descriptor, data[: len(data) // 2], at)
        self.passes()
        count = self._pwrite(descriptor, data, at)
        self.passes()
        return count

    def state(self, step: int, tensors: int) -> dict[str, Tensor]:
        faults = self

        class Watched(dict[str, Tensor]):
            def __getitem__(self, name: str) -> Tensor:
                faults.passes()
                return super().__getitem__(name)

        return Watched(numbered(step, tensors))


@pytest.mark.parametrize("tensors", [4, 6, 1])
def test_a_write_that_ends_at_any_moment_leaves_the_image_before_it(
    monkeypatch: pytest.MonkeyPatch, tensors: int
) -> None:
    """Also where the layout changes with that write: to more tensors, or to fewer."""
    moments = 0
    while True:
        moments += 1
        with writer_of(alone()) as writer, monkeypatch.context() as patch:
            for step in (1, 2):
                writer.write(step, numbered(step), {"step": step})
            assert loaded([path_of(writer)]) == {1: {1.0}, 2: {2.0}}
            faults = Faults(patch, moments)
            try:
                writer.write(3, faults.state(3, tensors), {"step": 3})
                break
            except Fault:
                found = loaded([path_of(writer)])
            assert found[2] == {2.0}
            assert all(numbers == {float(step)} for step, numbers in found.items())
            faults.left = -1
            writer.write(4, numbered(4, tensors), {"step": 4})
            assert {2: {2.0}, 4: {4.0}}.items() <= loaded([path_of(writer)]).items(), (
                "the torn slot was used again"
            )
    assert moments > 12 + tensors


def faults_of_one_rank() -> list[list[int]]:
    """The steps that both ranks have after rank 1 failed at each moment in the third write, and
    after one write more, in which it failed too."""
    world, found = here(), []
    for at in range(1, 15, 2):
        with writer_of(world) as writer, pytest.MonkeyPatch.context() as patch:
            paths = world.gather_values(path_of(writer))
            for step in (1, 2):
                writer.write(step, numbered(step, 1), {"step": step})
            faults = Faults(patch, at if world.rank == 1 else -1)
            for step in (3, 4):
                try:
                    writer.write(step, faults.state(step, 1), {"step": step})
                except Fault:
                    faults.left = at
                world.any(False)  # both have ended it
                both = loaded(paths)
                assert all(numbers == {float(step)} for step, numbers in both.items())
                found.append(sorted(both))
                world.any(False)
    return found


def test_ranks_have_an_image_in_common_though_one_fails_in_each_write(pool: WorkerPool) -> None:
    one, other = pool.run(2, faults_of_one_rank)
    assert one == other
    assert all(steps for steps in one)
    assert [2] in one, "torn in the third write, and in the fourth"
    assert [2, 3] in one, "it failed after the last write to memory"


def test_a_process_killed_at_any_instant_leaves_a_whole_image() -> None:
    chance, counts, step = random.Random(5), [], 0
    with writer_of(alone()) as writer:
        state = numbered(0, tensors=8, numbers=40_000)
        writer.prepare(state)
        for _ in range(20):
            if (child := os.fork()) == 0:
                _write_for_ever(writer, state, step)
            while max(_steps_of(writer)) <= step:
                time.sleep(0.001)
            time.sleep(0.01 * chance.random())
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            found = loaded([path_of(writer)])
            assert all(numbers == {float(each)} for each, numbers in found.items())
            assert max(found) > step
            step = max(found)
            counts.append(len(found))
            for slot, newest in zip(writer._memory.slots, _steps_of(writer), strict=True):
                slot.step = newest
    assert 1 in counts, "some died in the middle of a write"


def _write_for_ever(writer: ImageWriter, state: dict[str, Tensor], step: int) -> None:
    """Never returns."""
    try:
        while True:
            step += 1
            for tensor in state.values():
                tensor.fill_(step)
            writer.write(step, state, {"step": step})
    finally:
        os._exit(1)


def _steps_of(writer: ImageWriter) -> list[int]:
    """The step of each slot: a forked process wrote it, of which this one knows nothing."""
    starts = (0, slots.SLOT_BYTES)
    data = [os.pread(writer.descriptors[0], slots.HEADER_BYTES, start) for start in starts]
    return [-1 if header is None else header.name.step for header in map(slots.Header.read, data)]


def written(turned: bool) -> list[Any]:
    """Two images of tensors of many types, the second with other placements; what this rank reads
    of them."""
    world = here()
    with writer_of(world) as writer:
        for step in (1, 2):
            state = {
                **laid_out(values(step), world, turned=step == 2),
                "everywhere": torch.full((500_000,), float(step)),
            }
            writer.write(step, state, {"step": step, "ranks": {str(world.rank): step}})
        images = open_images(world.gather_values(path_of(writer)), world)
        right = []
        for name in images.names:
            state = laid_out(
                {key: torch.zeros_like(value) for key, value in values(0).items()},
                world,
                turned=turned,
            )
            state["everywhere"] = torch.zeros(500_000, dtype=torch.float64)
            reader = images.reader(name)
            reader.load_into(state, world)
            right.append(bool((state["everywhere"] == name.step).all()))
            right.append(
                all(
                    torch.equal(full_tensor(state[key]), value)
                    for key, value in values(name.step).items()
                )
            )
            right.append(
                reader.manifest.values
                == {
                    "step": name.step,
                    "ranks": {str(rank): name.step for rank in range(world.size)},
                }
            )
        size = writer.size_bytes
        world.gather_values(None)
    return [right, size]


@pytest.mark.parametrize("turned", [False, True])
def test_images_hold_each_tensor_once_and_every_rank_reads_its_own_part(
    pool: WorkerPool, turned: bool
) -> None:
    ended = pool.run(2, written, turned)
    assert [right for right, _ in ended] == [[True] * 6] * 2
    state = sum(value.nbytes for value in values(0).values()) + 4 * 500_000
    assert 2 * state <= sum(size for _, size in ended) <= 2 * (state + 3 * 4096 * 2)


def test_an_image_counts_if_those_of_all_ranks_of_its_start_are_there(pool: WorkerPool) -> None:
    assert pool.run(2, starts) == [[[], [1], [1], [1, 3], [1, 3]]] * 2


def starts() -> list[list[int]]:
    world, found = here(), []
    with writer_of(world) as first, writer_of(world, "0badcafe") as second:
        old, new = world.gather_values(path_of(first)), world.gather_values(path_of(second))
        first.write(1, numbered(1), {"step": 1})
        world.gather_values(None)  # all have ended it
        found += [sorted(loaded(paths)) for paths in (old[:1], old, [*old, *new])]
        world.gather_values(None)
        second.write(3, numbered(3), {"step": 3})
        world.gather_values(None)
        found += [sorted(loaded(paths)) for paths in ([*new, *old], [*old, *new])]
        world.gather_values(None)
    return found


def test_after_prepare_a_write_allocates_little() -> None:
    with writer_of(alone()) as writer:
        writer.prepare(numbered(1, numbers=50_000))
        before = os.fstat(writer.descriptors[0]).st_blocks * 512
        assert before >= writer.size_bytes
        writer.write(1, numbered(1, numbers=50_000), {"step": 1})
        writer.write(2, numbered(2, numbers=50_000), {"step": 2})
        assert os.fstat(writer.descriptors[0]).st_blocks * 512 <= before + 2 * 4096 * 2, (
            "the text and no more"
        )


def test_without_memory_every_rank_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with writer_of(alone()) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(slots.os, "posix_fallocate", full)
            with pytest.raises(
                CheckpointError,
                match=(
                    r"rank 0 has no memory for two images of .* bytes \(No space left on device\)"
                ),
            ):
                writer.prepare(numbered(1))
        writer.write(2, numbered(2), {"step": 2})
        assert loaded([path_of(writer)]) == {2: {2.0}}


@given(st.floats(0, 1e3), st.floats(1e-4, 1e3), st.floats(1e-3, 1))
def test_copying_takes_no_more_of_the_time_than_asked(
    copy_seconds: float, step_seconds: float, limit: float
) -> None:
    interval = image_interval(copy_seconds, step_seconds, limit)
    assert interval >= 1
    assert copy_seconds <= limit * interval * step_seconds * (1 + 1e-9)
    assert interval == 1 or copy_seconds > limit * (interval - 1) * step_seconds * (1 - 1e-9)


def test_the_interval_keeps_copying_at_a_hundredth() -> None:
    assert image_interval(0.05, 1.0, 0.01) == 5
    assert image_interval(0.051, 1.0, 0.01) == 6
    assert image_interval(0.001, 1.0, 0.01) == 1
