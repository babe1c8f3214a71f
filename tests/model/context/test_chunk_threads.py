"""Threads that compute chunks in turn: their order, their random numbers, and how they end."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.base.errors import RecipeError
from lockstep.model.context.chunk_threads import ChunkThreads

CPU = torch.device("cpu")


def begin_reversed(values: list[Any]) -> list[Any]:
    return list(reversed(values))


def test_one_thread_runs_at_a_time_and_each_gets_its_part_of_the_answer() -> None:
    threads, said = ChunkThreads(CPU), list[str]()

    def chunk(place: int) -> int:
        said.append(f"{place} begins")
        assert threads.turn == place
        other = threads.meet("keys", place, begin_reversed)
        said.append(f"{place} met {other}")
        assert threads.turn == place
        return int(threads.meet("values", 10 * place, begin_reversed))

    assert threads.run([partial(chunk, place) for place in range(3)]) == [20, 10, 0]
    assert said == ["0 begins", "1 begins", "2 begins", "0 met 2", "1 met 1", "2 met 0"]


def drawn() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_each_draws_the_numbers_that_it_would_draw_alone() -> None:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    threads = ChunkThreads(CPU)

    def chunk() -> list[float]:
        before = drawn()
        threads.meet("keys", None, begin_reversed)
        return before + drawn()

    found = threads.run([chunk] * 3)
    assert found == [drawn() + drawn()] * 3


def test_settings_and_modes_are_those_of_the_caller() -> None:
    def chunk() -> tuple[bool, torch.dtype, torch.device]:
        with_casts = torch.ones(2, 2, device=CPU) @ torch.ones(2, 2, device=CPU)
        return torch.is_grad_enabled(), with_casts.dtype, torch.empty(1).device

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        found = ChunkThreads(CPU).run([chunk] * 2)
    assert found == [(False, torch.bfloat16, torch.device("meta"))] * 2


def alive() -> list[str]:
    for each in threading.enumerate():
        if each.name.startswith("chunk-"):
            each.join(60)
    return [each.name for each in threading.enumerate() if each.name.startswith("chunk-")]


def meets(threads: ChunkThreads, times: int) -> None:
    for _ in range(times):
        threads.meet("keys", None, begin_reversed)


@pytest.mark.parametrize("failing", range(3))
def test_an_error_of_a_chunk_ends_all_and_is_raised_once(failing: int) -> None:
    threads, ended = ChunkThreads(CPU), list[int]()

    def chunk(place: int) -> None:
        try:
            meets(threads, 2)
            if place == failing:
                raise ValueError(f"in chunk {place}")
            meets(threads, 5)
        finally:
            ended.append(place)

    with pytest.raises(ValueError, match=f"in chunk {failing}"):
        threads.run([partial(chunk, place) for place in range(3)])
    assert sorted(ended) == [0, 1, 2]
    assert not alive()
    assert threads.run([lambda: 1, lambda: 2]) == [1, 2]


def test_an_error_of_the_answer_is_raised_too() -> None:
    threads = ChunkThreads(CPU)

    def fails(values: list[Any]) -> list[Any]:
        raise ConnectionError("a peer is gone")

    with pytest.raises(ConnectionError, match="a peer is gone"):
        threads.run([lambda: threads.meet("keys", None, fails)] * 3)
    assert not alive()


def other(threads: ChunkThreads, what: str) -> None:
    threads.meet(what, None, begin_reversed)


@pytest.mark.parametrize(
    "chunks",
    [
        [partial(meets, times=1), partial(meets, times=2)],
        [partial(meets, times=2), partial(meets, times=1)],
        [partial(meets, times=1), partial(other, what="gradients")],
    ],
)
def test_chunks_that_differ_in_their_calls_are_refused(chunks: list[Callable[..., Any]]) -> None:
    threads = ChunkThreads(CPU)
    with pytest.raises(RecipeError, match="do not make the same calls"):
        threads.run([partial(chunk, threads) for chunk in chunks])
    assert not alive()


def to_process() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def to_this_thread() -> None:
    """The thread that waits is not interrupted."""
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)


@pytest.mark.parametrize("interrupt", [to_process, to_this_thread])
def test_an_interrupt_ends_all(interrupt: Callable[[], None]) -> None:
    threads = ChunkThreads(CPU)

    def chunk(place: int) -> None:
        if place == 1:
            interrupt()
        meets(threads, 10**9)

    # a run of tests in the background may ignore the signal
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            threads.run([partial(chunk, place) for place in range(3)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert not alive()
