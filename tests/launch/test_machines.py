"""What is given for a run on several machines, and this one's address among them."""

from __future__ import annotations

import pytest

from lockstep.base.errors import LaunchError
from lockstep.launch.machines import Machines, address_on, address_towards, interface_of
from lockstep.options import LaunchOptions


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
    assert Machines.parse(LaunchOptions(nnodes=nnodes, rdzv=rdzv)) == found


@pytest.mark.parametrize("nnodes", ["0", "0:2", "3:2", "two", "", "1:2:3", "-1", "1:", ":2"])
def test_numbers_of_machines_that_are_none_are_refused(nnodes: str) -> None:
    with pytest.raises(LaunchError, match=f"--nnodes {nnodes};.*A:B"):
        Machines.parse(LaunchOptions(nnodes=nnodes, rdzv="node1:29400"))


@pytest.mark.parametrize(
    "rdzv", ["node1", "node1:", ":29400", "node1:0", "node1:65536", "node1:http", ""]
)
def test_places_that_are_none_are_refused(rdzv: str) -> None:
    with pytest.raises(LaunchError, match=f"--rdzv {rdzv};.*HOST:PORT"):
        Machines.parse(LaunchOptions(nnodes="2", rdzv=rdzv))


def test_several_machines_need_a_place_and_one_has_none() -> None:
    with pytest.raises(LaunchError, match="--nnodes 2 without --rdzv"):
        Machines.parse(LaunchOptions(nnodes="2"))
    with pytest.raises(LaunchError, match="--rdzv node1:29400 on one machine"):
        Machines.parse(LaunchOptions(nnodes="1", rdzv="node1:29400"))


def test_a_place_is_said_as_it_was_given() -> None:
    assert [Machines(2, 2, host, 7).endpoint for host in ("node1", "fe80::1")] == [
        "node1:7",
        "[fe80::1]:7",
    ]
    assert [Machines(least, 2, "node1", 7).count for least in (1, 2)] == ["1 to 2", "2"]


def test_a_host_without_an_address_is_named() -> None:
    with pytest.raises(
        LaunchError,
        match=r"--rdzv nowhere.invalid:29400: the address of nowhere.invalid cannot be found",
    ):
        Machines(2, 2, "nowhere.invalid", 29400).resolve()


def test_the_way_to_this_machine_is_loopback() -> None:
    assert Machines(2, 2, "localhost", 29400).resolve() == "127.0.0.1"
    assert address_towards("127.0.0.1", 29400) == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None
    assert address_on("lo") == "127.0.0.1"


def test_the_older_way_gives_each_machine_its_number() -> None:
    found = Machines.parse(
        LaunchOptions(
            nnodes="3", node_rank=2, master_addr="node0", master_port=29400, interface="eth1"
        )
    )
    assert found == Machines(3, 3, "node0", 29400, 2, "eth1", "--master-addr")
    assert found.option == "--master-addr node0:29400"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            LaunchOptions(nnodes="2", node_rank=0, master_addr="node0"),
            "--node-rank 0, --master-addr node0 alone; .*give all three",
        ),
        (
            LaunchOptions(nnodes="2", master_addr="node0", master_port=1),
            "--master-addr node0, --master-port 1 alone; .*give all three",
        ),
        (
            LaunchOptions(nnodes="2", rdzv="node0:1", node_rank=0),
            "--rdzv node0:1 with --node-rank 0; both name the address",
        ),
        (
            LaunchOptions(nnodes="2", node_rank=2, master_addr="node0", master_port=1),
            "--node-rank 2 with --nnodes 2; N machines have the numbers 0 to N - 1",
        ),
        (
            LaunchOptions(nnodes="2:3", node_rank=0, master_addr="node0", master_port=1),
            "--node-rank 0 with --nnodes 2:3; .*fixed number",
        ),
        (
            LaunchOptions(nnodes="1", node_rank=0, master_addr="node0", master_port=1),
            "--node-rank 0 on one machine",
        ),
    ],
)
def test_what_is_half_given_or_contradicts_itself_is_refused(
    options: LaunchOptions, text: str
) -> None:
    with pytest.raises(LaunchError, match=text):
        Machines.parse(options)


def test_an_interface_is_for_several_machines_and_is_there() -> None:
    with pytest.raises(LaunchError, match="--interface lo on one machine"):
        Machines.parse(LaunchOptions(interface="lo"))
    with pytest.raises(
        LaunchError, match=r"--interface nosuch0 is not there; .*this machine has lo"
    ):
        address_on("nosuch0")
