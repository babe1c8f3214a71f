"""The store that several machines meet in; two of them are two agents here."""

from __future__ import annotations

import gc
import inspect
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta

import psutil
import pytest
from processes import ran
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from lockstep.base.errors import LaunchError
from lockstep.launch import rendezvous
from lockstep.launch.machines import Machines
from lockstep.launch.rendezvous import ElasticRendezvous, Silence, check_machines
from lockstep.launch.run_workers import run_workers
from lockstep.options import RunOptions


@pytest.fixture
def machines(port: int) -> Machines:
    return Machines(1, 2, "127.0.0.2", port)


def test_the_stores_listen_on_the_address_alone_and_the_first_that_comes_keeps_one(
    machines: Machines,
) -> None:
    keeper = ElasticRendezvous.at(machines)
    visitor = ElasticRendezvous.at(machines)
    assert keeper.agree("name", "first") == "first"
    assert visitor.agree("name", "second") == "first"
    of_workers = keeper._create_tcp_store_server("127.0.0.2", 0)
    listening = [
        c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN
    ]
    assert {("127.0.0.2", machines.port), ("127.0.0.2", of_workers.port)} <= set(listening)
    assert {
        address.ip for address in listening if address.port in (machines.port, of_workers.port)
    } == {"127.0.0.2"}


def test_without_a_loopback_interface_the_launcher_names_it_at_once() -> None:
    before = ["unshare", "--net"]
    if subprocess.run([*before, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a network namespace needs root")
    code = (
        "from lockstep.launch.rendezvous import LoopbackRendezvous;"
        " LoopbackRendezvous().next_rendezvous()"
    )
    ended = ran([*before, sys.executable, "-c", code])
    assert "LaunchError: 127.0.0.1 cannot be reached" in ended.stderr
    assert "ip link set lo up" in ended.stderr


def test_another_command_at_the_same_place_is_refused(machines: Machines) -> None:
    keeper = ElasticRendezvous.at(machines)
    keeper.agree("command", "train.py")
    with pytest.raises(LaunchError, match=r"'other\.py'.*'train\.py'"):
        run_workers(
            lambda _: pytest.fail("started"),
            count=1,
            launcher="lockstep",
            options=RunOptions(),
            machines=machines,
            command="other.py",
        )


def test_a_port_that_may_not_be_used_is_named(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create_server(*_: object, **__: object) -> socket.socket:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "create_server", create_server)
    with pytest.raises(
        LaunchError,
        match=rf"--rdzv 127.0.0.2:{machines.port}: cannot listen there \(Permission denied\)",
    ):
        ElasticRendezvous.at(machines)


def test_where_nobody_keeps_it_the_wait_ends_with_what_was_tried_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def create_connection(*_: object, **__: object) -> socket.socket:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket, "create_connection", create_connection)
    monkeypatch.setattr("lockstep.launch.rendezvous.address_towards", lambda *_: "127.0.0.1")
    monkeypatch.setattr("lockstep.launch.rendezvous.NOTICE_SECONDS", 0)
    monkeypatch.setattr("lockstep.launch.rendezvous.JOIN_SECONDS", 1)
    tried = (
        r"\(tried 192\.0\.2\.1 port 29400 from 127\.0\.0\.1 on lo: \[Errno 111\] Connection"
        r" refused\)"
    )
    with pytest.raises(
        LaunchError, match=rf"nobody at --rdzv 192\.0\.2\.1:29400 for 1 s {tried}; .*start it there"
    ):
        ElasticRendezvous.at(Machines(2, 2, "192.0.2.1", 29400))
    (said,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        rf"lockstep: no answer yet at --rdzv 192\.0\.2\.1:29400 {tried}; goes on trying for 1 s",
        said,
    )


def test_a_refusal_is_an_obstacle_only_at_the_port_of_a_machine_that_is_there(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a container has this machine's own address: the connection comes back here, and is
    refused."""
    monkeypatch.setattr("lockstep.launch.rendezvous.REACH_SECONDS", 0.2)
    keeper = ElasticRendezvous.at(machines)
    with socket.create_server(("127.0.0.2", 0)) as free:
        port = free.getsockname()[1]
        assert keeper._obstacle("127.0.0.2", port, refusal_is_one=True) is None
    assert keeper._obstacle("127.0.0.2", port, refusal_is_one=False) is None
    assert "Connection refused" in str(keeper._obstacle("127.0.0.2", port, refusal_is_one=True))


@pytest.fixture
def two(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ElasticRendezvous]]:
    """Two machines that have met. None is lost, however busy this one is."""
    monkeypatch.setattr(rendezvous, "SILENCE_SECONDS", 1000.0)
    both = [ElasticRendezvous.at(machines) for _ in range(2)]
    meet(both)
    yield both
    for each in both:
        each._stop_heartbeats()
    both.clear()
    gc.collect()  # closes the stores


def meet(several: list[ElasticRendezvous]) -> None:
    with ThreadPoolExecutor() as pool:
        for found in [pool.submit(each.next_rendezvous) for each in several]:
            found.result()


def test_time_in_which_a_machine_did_not_look_is_no_silence_of_others() -> None:
    now = 0.0
    silence = Silence("own", lambda: now)
    heartbeat = datetime(2000, 1, 1)  # the machines' clocks do not matter
    told = dict.fromkeys(["own", "sends", "silent"], heartbeat)
    assert silence.lost(told) == set()
    now += 1000.0  # this machine was stopped
    assert silence.lost(told) == set()
    for number in range(20):
        told["sends"] = heartbeat - timedelta(hours=number)
        now += 0.25
        lost = silence.lost(told)
        assert lost == ({"silent"} if number >= 17 else set())
    assert silence.lost(told | {"silent": heartbeat + timedelta(seconds=1)}) == set()


def lose(machine: ElasticRendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has been silent for long."""
    machine._stop_heartbeats()
    monkeypatch.setattr(rendezvous, "SILENCE_SECONDS", 0.0)


def test_machines_recover_in_place_once_all_have_said_that_they_can(
    two: list[ElasticRendezvous], machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    visitor = ElasticRendezvous.at(machines)
    one.note_able()
    assert [each.all_are_able() for each in two] == [False, False]
    began = time.monotonic()
    assert visitor.machines_able(0.3) == 0
    assert time.monotonic() - began > 0.3
    other.note_able()
    assert [each.all_are_able() for each in two] == [True, True]
    assert visitor.machines_able(0.0) == 2
    meet(two)
    assert not one.all_are_able()  # with other workers, perhaps
    one.note_able()
    lose(other, monkeypatch)
    while not one.all_are_able():
        pass


def test_the_first_machine_says_why_all_leave(two: list[ElasticRendezvous]) -> None:
    one, other = two
    assert (one.announced(), other.announced()) == (None, None)
    assert one.announce("lost") == "lost"
    assert other.announce("joins") == "lost"
    assert other.announced() == "lost"
    meet(two)
    assert (one.announced(), other.announced()) == (None, None)


def test_machines_wait_for_all_that_are_there(
    two: list[ElasticRendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(one.wait_for_all)
        time.sleep(0.3)
        assert not waiting.done()
        other.wait_for_all()
        waiting.result()
        meet(two)
        waiting = pool.submit(one.wait_for_all)
        time.sleep(0.3)
        assert not waiting.done()
        lose(other, monkeypatch)
        waiting.result()
    found = one.next_rendezvous()
    assert found.world_size == 1


def test_who_waits_for_a_machine_that_is_lost_meets_the_others_again(
    two: list[ElasticRendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    lose(other, monkeypatch)
    with pytest.raises(rendezvous._MachineLostError):
        one._text_from(one._store, "what the other one never tells")
    met = iter([None, "a rendezvous"])
    monkeypatch.setattr(one, "_meet", lambda: next(met))
    assert one.next_rendezvous() == "a rendezvous"


def test_machines_that_wait_hear_of_the_end_of_the_run(two: list[ElasticRendezvous]) -> None:
    one, other = two
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(one.wait_for_all)
        other.set_closed()
        with pytest.raises(RendezvousClosedError):
            waiting.result()


def test_no_machine_looks_up_its_callers_before_it_writes_the_shared_state(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch does so for records that nobody keeps. On a busy machine this takes longer than the
    time between two heartbeats, and each heartbeat makes other machines' pending writes fail."""

    def stack(*_: object) -> list[inspect.FrameInfo]:
        pytest.fail("looked up its callers")

    monkeypatch.setattr(inspect, "stack", stack)
    one, other = both = [ElasticRendezvous.at(machines) for _ in range(2)]
    meet(both)
    other.set_closed()
    with pytest.raises(RendezvousClosedError):
        one.wait_for_all()
    for each in both:
        each._stop_heartbeats()


def test_they_hear_of_it_if_the_one_that_ended_the_run_is_lost(
    two: list[ElasticRendezvous],
) -> None:
    one, other = two
    other.set_closed()
    time.sleep(2 * rendezvous.STATE_SECONDS)
    one._met = [one._this_node]
    with pytest.raises(RendezvousClosedError):
        one.wait_for_all()


def test_number_0_is_where_the_others_look_for_it() -> None:
    with pytest.raises(
        LaunchError,
        match=(
            r"--master-addr 192\.0\.2\.1:29400: 192\.0\.2\.1 is not an address of this machine, which"
            r" has number 0"
        ),
    ):
        ElasticRendezvous.at(Machines(2, 2, "192.0.2.1", 29400, 0, "lo", "--master-addr"))


def test_each_machine_has_a_number_of_its_own() -> None:
    check_machines([(2, "a", None), (0, "b", None), (1, "c", None)])
    with pytest.raises(
        LaunchError, match=r"--node-rank 1 at a and at c; .*0 to 2; correct one of them"
    ):
        check_machines([(1, "a", None), (0, "b", None), (1, "c", None)])
