"""What is given for a run on several machines, and this one's address among them."""

from __future__ import annotations

import pytest

from lockstep.errors import LaunchError
from lockstep.launch.machines import Machines, address_towards, interface_of


@pytest.mark.parametrize(
    ("nnodes", "rdzv", "found"),
    [
        ("1", None, None),
        ("1:1", None, None),
        ("2", "node1:29400", Machines(2, 2, "node1", 29400)),
        ("1:4", "10.0.0.1:1", Machines(1, 4, "10.0.0.1", 1)),
        ("2:3", "[fe80::1]:65535", Machines(2, 3, "fe80::1", 65535)),
    ],
)
def test_what_is_given_is_read(nnodes: str, rdzv: str | None, found: Machines | None) -> None:
    assert Machines.parse(nnodes, rdzv) == found


@pytest.mark.parametrize("nnodes", ["0", "0:2", "3:2", "two", "", "1:2:3", "-1", "1:", ":2"])
def test_numbers_of_machines_that_are_none_are_refused(nnodes: str) -> None:
    with pytest.raises(LaunchError, match=f"--nnodes {nnodes};.*A:B"):
        Machines.parse(nnodes, "node1:29400")


@pytest.mark.parametrize("rdzv", ["node1", "node1:", ":29400", "node1:0", "node1:65536", "node1:http", ""])
def test_places_that_are_none_are_refused(rdzv: str) -> None:
    with pytest.raises(LaunchError, match=f"--rdzv {rdzv};.*HOST:PORT"):
        Machines.parse("2", rdzv)


def test_several_machines_need_a_place_and_one_has_none() -> None:
    with pytest.raises(LaunchError, match="--nnodes 2 without --rdzv"):
        Machines.parse("2", None)
    with pytest.raises(LaunchError, match="--rdzv node1:29400 on one machine"):
        Machines.parse("1", "node1:29400")


def test_a_place_is_said_as_it_was_given() -> None:
    assert [Machines(2, 2, host, 7).place for host in ("node1", "fe80::1")] == ["node1:7", "[fe80::1]:7"]
    assert [Machines(least, 2, "node1", 7).number for least in (1, 2)] == ["1 to 2", "2"]


def test_a_host_without_an_address_is_named() -> None:
    with pytest.raises(LaunchError, match=r"--rdzv nowhere.invalid:29400: the address of nowhere.invalid cannot be found"):
        Machines(2, 2, "nowhere.invalid", 29400).resolve()


def test_the_way_to_this_machine_is_loopback() -> None:
    assert Machines(2, 2, "localhost", 29400).resolve() == "127.0.0.1"
    assert address_towards("127.0.0.1", 29400) == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None
