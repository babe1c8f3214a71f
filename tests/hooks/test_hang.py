"""The diagnosis of a hang from the stack snapshots of all ranks."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import socket
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest

from lockstep.base.container import process_id_space
from lockstep.comm import segment
from lockstep.comm.active_calls import CollectiveCall, open_entries
from lockstep.hooks.hang import snapshot as snapshot_module, watchdog as module
from lockstep.hooks.hang.report import Hang, diagnose_hang, different_exchanges, enclosing
from lockstep.hooks.hang.snapshot import (
    STACK_SIGNAL,
    Activity,
    Frame,
    StackSnapshot,
    StackWriter,
    activity,
    read_stack,
)
from lockstep.hooks.hang.watchdog import Watchdog, _end_of, _why_silent
from lockstep.logging.phases import FADES, Phases
from lockstep.options import WatchdogTimeouts
from lockstep.training.reducers.exchange_order import Exchanges

REDUCE = CollectiveCall("all_reduce", "default_pg", 7, "float32 (4,)")
USER, TORCH = (
    Frame("/home/me/train.py", 12, "loss"),
    Frame("/site-packages/torch/distributed/distributed_c10d.py", 9, "all_reduce"),
)


def snapshot(
    rank: int,
    what: Activity,
    *calls: CollectiveCall,
    seconds: float = 50.0,
    limit_seconds: float = 30.0,
    is_first: bool = False,
    **more: Any,
) -> StackSnapshot:
    stack = (USER, TORCH) if what == "waits" else (USER,)
    values = {
        "host": "node",
        "process": 100 + rank,
        "phase": "compute",
        "step": 3,
        "stack": stack,
        "threads": {},
    } | more
    return StackSnapshot(
        rank=rank,
        activity=what,
        calls=calls,
        seconds=seconds,
        limit_seconds=limit_seconds,
        is_first=is_first,
        **values,
    )


def judge(*snapshots: StackSnapshot, silent: dict[int, str] | None = None) -> Hang | None:
    return diagnose_hang({each.rank: each for each in snapshots}, silent or {})


def found(*snapshots: StackSnapshot, silent: dict[int, str] | None = None) -> Hang:
    hang = judge(*snapshots, silent=silent)
    assert hang is not None
    return hang


def test_a_process_of_another_container_is_not_looked_for_among_those_of_this_one() -> None:
    """Its host name may be the same (docker run --network=host), and its process id another
    process's here."""
    who = {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "process_ids": process_id_space(),
        "stacks": -1,
    }
    boot, space = process_id_space()
    elsewhere = who | {"process_ids": [boot, int(space) + 1]}
    assert _end_of(elsewhere) is None
    assert _why_silent(elsewhere) == (
        f"process {os.getpid()} on {socket.gethostname()} does not answer: it has ended, it is"
        " stopped, or its machine cannot be reached"
    )
    ended = f"process {2**22 + 1} on {socket.gethostname()} has ended"
    assert _end_of(who | {"process": 2**22 + 1}) == ended
    assert _why_silent(who | {"process": 2**22 + 1}) == ended


class Texts(dict[str, str]):
    """A mailbox whose rank 1 answers when it has been asked for its snapshot `later` times."""

    def __init__(self, later: float, process: int) -> None:
        super().__init__()
        self._asked, self._later = 0, later
        self._process = process

    put = dict.__setitem__

    def take(self, key: str) -> str | None:
        if key == "who/1":
            who = {"process_ids": process_id_space(), "process": self._process}
            return json.dumps({**who, "host": "node", "stacks": -1})
        self._asked += key == "0/1"
        return json.dumps(asdict(snapshot(1, "runs"))) if self._asked > self._later else None

    def close(self) -> None:
        pass


def collected(later: float, process: int) -> Any:
    watchdog = Watchdog(
        Phases(),
        WatchdogTimeouts(),
        rank=0,
        size=2,
        mailbox=cast(Any, Texts(later, process)),
        on_hang=lambda *_: None,
        is_shutting_down=lambda: False,
        is_recovered=lambda _: False,
        on_stuck=lambda: None,
        agreements=lambda: (),
        has_peer_failed=lambda: False,
    )
    watchdog._closed.set()  # its own thread ends
    watchdog._thread.join()
    watchdog._closed.clear()
    try:
        return watchdog._collect(0)
    finally:
        watchdog.close()


def test_a_rank_that_may_still_answer_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.0)
    assert collected(8, os.getpid()) == ({1: snapshot(1, "runs")}, {})
    ended = f"process {2**22 + 1} on node has ended"
    assert collected(math.inf, 2**22 + 1) == ({}, {1: ended})
    monkeypatch.setattr(module, "SILENCE_SECONDS", 0.0)
    silent = f"process {os.getpid()} on node does not answer: native code holds the GIL"
    assert collected(math.inf, os.getpid()) == ({}, {1: silent})


def test_a_process_that_writes_its_stack_late_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshot_module, "_WRITING_SECONDS", 60.0)
    writer = StackWriter()
    assert writer.descriptor is not None
    signal.pthread_sigmask(signal.SIG_BLOCK, [STACK_SIGNAL])  # in the child from its first moment
    child = os.fork()
    if child == 0:
        while STACK_SIGNAL not in signal.sigpending():
            time.sleep(0.01)
        time.sleep(0.3)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [STACK_SIGNAL])
        signal.pause()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [STACK_SIGNAL])
        found = read_stack(child, writer.descriptor)
        assert __file__ in {frame.file for frame in found}
        os.kill(child, signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)
        assert read_stack(child, writer.descriptor) == ()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        writer.close()


def test_a_late_rank_that_does_not_wait_is_named() -> None:
    hang = found(snapshot(0, "waits", REDUCE), snapshot(1, "runs"), snapshot(2, "waits", REDUCE))
    assert (hang.kind, hang.ranks) == ("missing", (1,))
    assert (
        hang.summary == "rank 1 is waited for: it runs Python code at /home/me/train.py:12 in loss"
    )
    assert (
        "ranks 0, 2 wait in all_reduce of float32 (4,), call 7 of default_pg since 50 s, after step"
        " 3, compute" in hang.report
    )


def test_no_hang_while_the_working_rank_is_within_its_timeout() -> None:
    assert (
        judge(
            snapshot(0, "waits", REDUCE),
            snapshot(1, "computes", limit_seconds=900.0, phase="evaluation"),
        )
        is None
    )


def test_a_phase_may_take_long_the_first_time_if_no_rank_waits() -> None:
    assert judge(snapshot(0, "runs", is_first=True), snapshot(1, "computes", is_first=True)) is None
    assert found(snapshot(0, "runs", is_first=True), snapshot(1, "waits", REDUCE)).ranks == (0,)
    assert (
        found(snapshot(0, "runs")).summary
        == "this process is late: it runs Python code at /home/me/train.py:12 in loss"
    )


def gathering(rank: int, *blocks: str) -> dict[str, Any]:
    calls = tuple((f"gathers block {each!r}", "in the forward of microbatch 3") for each in blocks)
    return {"exchanges": (Exchanges(rank, 0, 0, 7, 0, calls),)}


def test_ranks_that_gather_different_blocks_are_named_with_block_and_microbatch() -> None:
    snapshots = {
        0: snapshot(0, "waits", REDUCE, seconds=5.0, **gathering(0, "a", "c")),
        1: snapshot(1, "runs", seconds=5.0, **gathering(1, "a", "b", "c")),
    }
    hang = different_exchanges(snapshots)
    assert hang is not None
    assert (hang.kind, hang.ranks) == ("order", (0, 1))
    assert hang.summary.startswith(
        "rank 0 gathers block 'c' in the forward of microbatch 3 and rank 1 gathers block 'b' in"
    )
    assert "rank 1 gathers block 'c' in the forward of microbatch 3, exchange 3" in hang.report
    snapshots[1] = snapshot(1, "runs", seconds=5.0, **gathering(1, "a"))
    assert different_exchanges(snapshots) is None, "it is behind"


def test_the_block_that_ranks_wait_for_is_named() -> None:
    hang = found(
        snapshot(0, "waits", REDUCE, **gathering(0, "a", "b")),
        snapshot(1, "runs", **gathering(1, "a")),
    )
    assert "rank 0's latest exchange: it gathers block 'b' in the forward" in hang.report
    call = replace(REDUCE, label="gathers block 'a'")
    labelled = found(snapshot(0, "waits", call), snapshot(1, "runs"))
    assert "waits in all_reduce of float32 (4,), which gathers block 'a', call 7" in labelled.report


def test_a_silent_rank_is_named_with_the_reason() -> None:
    hang = found(snapshot(0, "waits", REDUCE), silent={1: "process 101 on node has ended"})
    assert (hang.ranks, hang.summary) == (
        (1,),
        "rank 1 is waited for: process 101 on node has ended",
    )
    several = found(
        snapshot(0, "sleeps"), snapshot(1, "waits", REDUCE), silent={2: "it is stopped"}
    )
    assert (
        several.summary
        == "ranks 0, 2 are waited for: rank 0: it is in a call that does not return at"
        " /home/me/train.py:12 in loss; rank 2: it is stopped"
    )


@pytest.mark.parametrize(
    "other",
    [
        CollectiveCall("broadcast", "default_pg", 7, "float32 (4,)"),
        CollectiveCall("all_reduce", "default_pg", 7, "float32 (5,)"),
        CollectiveCall("all_reduce", "default_pg", 8, "float32 (4,)"),
        CollectiveCall("all_reduce", "mesh_shard", 7, "float32 (4,)"),
    ],
)
def test_all_wait_in_different_calls(other: CollectiveCall) -> None:
    hang = found(
        snapshot(0, "waits", REDUCE), snapshot(1, "waits", other), snapshot(2, "waits", REDUCE)
    )
    assert (hang.kind, hang.ranks) == ("differ", (1,))
    assert (
        f"ranks 0, 2 in {REDUCE}, call 7 of default_pg at /home/me/train.py:12 in loss; rank 1 in"
        f" {other}" in hang.summary
    )


def test_a_gather_may_have_another_size_on_each_rank() -> None:
    one, other = (
        CollectiveCall("gather", "default_pg", 7, f"float32 ({size},)") for size in (4, 5)
    )
    assert found(snapshot(0, "waits", one), snapshot(1, "waits", other)).kind == "between"


def test_all_wait_in_the_same_call() -> None:
    hang = found(snapshot(0, "waits", REDUCE), snapshot(1, "waits", REDUCE))
    assert (hang.kind, hang.ranks) == ("between", (0, 1))
    assert "check the network" in hang.summary


def test_a_loader_worker_is_named() -> None:
    child = {
        77: (
            Frame("/lib/python3.11/queue.py", 1, "get"),
            Frame("/home/me/data.py", 5, "__getitem__"),
        )
    }
    hang = found(snapshot(0, "sleeps", phase="data", children=child), snapshot(1, "waits", REDUCE))
    assert (
        "it waits for loader workers: process 77 is at /home/me/data.py:5 in __getitem__"
        in hang.summary
    )


def test_the_statements_around_a_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SOURCE)
    assert enclosing(Frame(str(script), 5, "f")) == ["'try:' (line 4)", "'if x:' (line 3)"]
    assert enclosing(Frame(str(script), 8, "f")) == []
    assert enclosing(Frame("<stdin>", 5, "f")) == []


def test_the_activity_of_a_thread_follows_from_its_samples_and_calls() -> None:
    assert activity((USER, TORCH), calls=[REDUCE], moves=False, is_busy=False) == "waits"
    assert activity((USER,), calls=[REDUCE], moves=False, is_busy=False) == "sleeps"
    assert activity((USER,), calls=[], moves=False, is_busy=True) == "computes"
    assert activity((USER, TORCH), calls=[REDUCE], moves=True, is_busy=True) == "runs"
    polling = Frame(segment.__file__, 1, "wait")
    assert activity((USER, polling), calls=[REDUCE], moves=True, is_busy=True) == "waits"


def test_a_rank_whose_device_is_in_a_collective_waits_wherever_its_host_is() -> None:
    """`item()` is called at the user's line, and uses a processor fully. A moving host may be what
    is waited for."""
    queued = replace(REDUCE, on_device=True)
    assert activity((USER,), calls=[queued], moves=False, is_busy=True) == "waits"
    assert activity((USER,), calls=[queued], moves=False, is_busy=False) == "waits"
    assert activity((USER,), calls=[queued], moves=True, is_busy=True) == "runs"
    hang = found(snapshot(0, "waits", queued, stack=(USER,)), snapshot(1, "sleeps"))
    assert hang.summary.startswith("rank 1 is waited for: it is in a call that does not return")
    assert "rank 0 waits in all_reduce of float32 (4,), call 7 of default_pg" in hang.report


def entry(
    number: int,
    state: str,
    *,
    group: str = "default_pg",
    retired: bool = False,
    is_p2p: bool = False,
) -> dict[str, Any]:
    return {
        "record_id": number,
        "state": state,
        "process_group": ["0", group],
        "retired": retired,
        "is_p2p": is_p2p,
    }


def test_what_an_accelerators_recorder_holds_is_open_unless_a_later_call_of_its_group_is_done() -> (
    None
):
    """NCCL never says that a part of a coalesced call is done."""
    recorded = [
        entry(0, "completed"),
        entry(1, "scheduled"),
        entry(2, "completed", retired=True),
        entry(3, "scheduled", group="mesh_shard"),
        entry(4, "scheduled", is_p2p=True),
        entry(5, "started"),
        entry(6, "scheduled"),
        entry(7, "scheduled", group="retired at issue", retired=True),
    ]
    assert [each["record_id"] for each in open_entries(recorded)] == [3, 4, 5, 6]


def test_a_snapshot_goes_through_json() -> None:
    one = snapshot(1, "waits", REDUCE, threads={"MainThread": (USER,)}, children={5: (TORCH,)})
    assert StackSnapshot.from_json(json.loads(json.dumps(asdict(one)))) == one


SOURCE = """if True:
    def f(x):
        if x:
            try:
                call()
            except ValueError:
                pass
        call()
"""


class Pace:
    """A simulated run: ranks go through the same phases, each at its own irregular pace, and wait
    for one another after each."""

    def __init__(self, seed: int, *, stops: bool) -> None:
        self._random = random.Random(seed)
        self._usual: list[dict[str, float]] = [{} for _ in range(self._random.choice((1, 2, 4)))]
        self._timeouts = WatchdogTimeouts()
        self._base = {
            "data": 0.01,
            "compute": self._random.choice((0.01, 1.0, 10.0)),
            "evaluation": 30.0,
            "saving": 2.0,
            "hooks": 0.001,
        }
        self.stops_at = self._random.randrange(20, 60) if stops else None
        self.stopped = self._random.randrange(len(self._usual))

    def diagnoses(self) -> list[Hang | None]:
        """The diagnosis each time that a late rank asks, over 80 phases."""
        found: list[Hang | None] = []
        for number in range(80):
            name = self._random.choice(list(self._base))
            took = [self._base[name] * self._random.uniform(0.5, 5.0) for _ in self._usual]
            slow = self._random.randrange(len(took))
            if name not in self._usual[slow]:  # what is compiled, or downloaded
                took[slow] += self._random.uniform(0.0, 350.0)
            elif self._random.random() < 0.2:  # a slow disk, a long epoch's end
                took[slow] += self._random.uniform(0.0, 40.0 if name == "compute" else 250.0)
            if number == self.stops_at:
                took[self.stopped] = 1e6
            found += self._asked(name, took)
            if number == self.stops_at:
                break
            for usual, seconds in zip(self._usual, took, strict=True):
                usual[name] = max(seconds, FADES * usual.get(name, 0.0))
        return found

    def _asked(self, name: str, took: list[float]) -> list[Hang | None]:
        limits = [self._timeouts.limit_seconds(name, usual.get(name)) for usual in self._usual]
        moments = [limit + 0.1 for limit in limits if limit + 0.1 < max(took)] + [max(took) - 0.1]
        return [
            self._at(moment, name, took, limits)
            for moment in moments
            if any(moment >= limit for limit in limits)
        ]

    def _at(self, moment: float, name: str, took: list[float], limits: list[float]) -> Hang | None:
        return judge(
            *(
                (
                    snapshot(rank, "waits", REDUCE, seconds=moment, limit_seconds=limit, phase=name)
                    if moment >= took[rank]
                    else snapshot(
                        rank,
                        "computes",
                        seconds=moment,
                        limit_seconds=limit,
                        phase=name,
                        is_first=name not in self._usual[rank],
                    )
                )
                for rank, limit in enumerate(limits)
            )
        )


@pytest.mark.parametrize("seed", range(200))
def test_a_run_of_irregular_pace_is_never_reported_as_a_hang(seed: int) -> None:
    assert not any(Pace(seed, stops=False).diagnoses())


@pytest.mark.parametrize("seed", range(50))
def test_a_rank_that_stops_is_named(seed: int) -> None:
    pace = Pace(seed, stops=True)
    hang = next(hang for hang in pace.diagnoses() if hang is not None)
    assert hang.ranks == (pace.stopped,)
