"""The store that several machines meet in; two of them are two agents here."""

from __future__ import annotations

import socket

import psutil
import pytest

from lockstep.errors import LaunchError
from lockstep.launch.local import run_workers
from lockstep.launch.machines import Machines
from lockstep.launch.rendezvous import Meeting


@pytest.fixture
def machines() -> Machines:
    with socket.create_server(("127.0.0.2", 0)) as free:
        port = free.getsockname()[1]
    return Machines(1, 2, "127.0.0.2", port)


def test_the_stores_listen_on_the_address_alone_and_the_first_that_comes_keeps_one(machines: Machines) -> None:
    keeper = Meeting.at(machines)
    visitor = Meeting.at(machines)
    assert keeper.agree("name", "first") == "first"
    assert visitor.agree("name", "second") == "first"
    of_workers = keeper._create_tcp_store_server("127.0.0.2", 0)
    listening = [c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert {("127.0.0.2", machines.port), ("127.0.0.2", of_workers.port)} <= set(listening)
    assert {address.ip for address in listening if address.port in (machines.port, of_workers.port)} == {"127.0.0.2"}


def test_another_command_at_the_same_place_is_refused(machines: Machines) -> None:
    keeper = Meeting.at(machines)
    keeper.agree("command", "train.py")
    with pytest.raises(LaunchError, match=r"'other\.py'.*'train\.py'"):
        run_workers(lambda _: pytest.fail("started"), count=1, launcher="lockstep", given={}, machines=machines, command="other.py")


def test_a_port_that_may_not_be_used_is_named(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    def create_server(*_: object, **__: object) -> socket.socket:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "create_server", create_server)
    with pytest.raises(LaunchError, match=rf"--rdzv 127.0.0.2:{machines.port}: cannot listen there \(Permission denied\)"):
        Meeting.at(machines)


def test_where_nobody_keeps_it_the_wait_ends_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def create_connection(*_: object, **__: object) -> socket.socket:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket, "create_connection", create_connection)
    monkeypatch.setattr("lockstep.launch.rendezvous.JOIN_SECONDS", 0)
    with pytest.raises(LaunchError, match=r"nobody at --rdzv 192\.0\.2\.1:29400 for 0 s .*start it there"):
        Meeting.at(Machines(2, 2, "192.0.2.1", 29400))
