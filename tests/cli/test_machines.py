"""Runs on several machines: whole commands, on loopback and on hosts that are network
namespaces."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import run_files
from doctor.network import Network, network
from processes import LOCKSTEP

pytestmark = pytest.mark.forks

SCRIPTS = Path(__file__).parent.parent / "scripts"
RANKS, ELASTIC = str(SCRIPTS / "ranks.py"), str(SCRIPTS / "elastic.py")

Machine = subprocess.Popen[str]


@contextmanager
def together(
    lines: Sequence[Sequence[str]], folder: Path, **variables: str
) -> Iterator[list[Machine]]:
    """These commands at once, each that of a machine. What is left of them at the end is ended."""
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "TMPDIR": str(folder),
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    started: list[Machine] = []
    try:
        for line in lines:
            started.append(
                subprocess.Popen(
                    line,
                    cwd=folder,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        yield started
    finally:
        for each in started:
            if each.poll() is None:
                each.send_signal(signal.SIGQUIT)  # which ends its workers too
            each.communicate()


def ended(
    lines: Sequence[Sequence[str]], folder: Path, **variables: str
) -> list[tuple[int, str, str]]:
    """The exit status, output and errors of each."""
    with together(lines, folder, **variables) as started:
        said = [each.communicate() for each in started]
        return [(each.returncode, *text) for each, text in zip(started, said, strict=True)]


@pytest.fixture
def hosts() -> Iterator[Network]:
    with network(3) as found:
        yield found


def at(keeper: str, machines: int) -> list[str]:
    """The command of each of so many machines."""
    place = ["--nnodes", str(machines), "--rdzv", f"{keeper}:29400", "--nproc", "1"]
    return [LOCKSTEP, "run", *place, RANKS]


def numbered(
    number: int, port: int, nproc: int, *more: str, nnodes: int = 2, host: str = "127.0.0.1"
) -> list[str]:
    """The command of the older way."""
    place = [
        "--nnodes",
        str(nnodes),
        "--node-rank",
        str(number),
        "--master-addr",
        host,
        "--master-port",
        str(port),
    ]
    return [LOCKSTEP, "run", *place, "--nproc", str(nproc), *more]


def test_numbered_machines_with_unequal_numbers_of_processes_and_a_script_that_wants_local_rank(
    tmp_path: Path, port: int
) -> None:
    more = ["--interface", "lo", "--local-rank-argument", RANKS, "--lr", "0.1"]
    one, two = ended(
        [numbered(number, port, nproc, *more) for number, nproc in ((1, 1), (0, 2))],
        tmp_path,
        GLOO_SOCKET_IFNAME="other",
    )
    assert (one[0], two[0]) == (0, 0), one[2] + two[2]
    found = {each["RANK"]: each for each in map(json.loads, (two[1] + one[1]).splitlines())}
    names = ("LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "LOCAL_WORLD_SIZE")
    assert {rank: [each[name] for name in names] for rank, each in found.items()} == {
        0: [0, 0, 0, 2],
        1: [1, 0, 1, 2],
        2: [0, 1, 2, 1],
    }
    assert {
        (each["WORLD_SIZE"], each["GROUP_WORLD_SIZE"], each["interface"]) for each in found.values()
    } == {(3, 2, "lo")}
    assert [found[rank]["arguments"] for rank in range(3)] == [
        [f"--local_rank={local}", "--lr", "0.1"] for local in (0, 1, 0)
    ]


def test_two_machines_with_one_number_are_both_told(tmp_path: Path, port: int) -> None:
    for status, _, told in ended([numbered(1, port, 1, RANKS)] * 2, tmp_path):
        assert status == 2, told
        assert re.search(
            r"LaunchError: --node-rank 1 at 127\.0\.0\.1 and at 127\.0\.0\.1; each machine has its"
            r" own number, 0 to 1",
            told,
        )


@pytest.mark.parametrize(
    "more",
    [
        ["--compare-every", "10"],
        *(
            pytest.param(more, marks=pytest.mark.slow)
            for more in (
                ["--nnodes", "3"],
                ["--check"],
                ["--profile", "steps=1:2"],
                ["--stop-after", "1h"],
            )
        ),
    ],
    ids=lambda more: more[0],
)
def test_a_machine_that_is_given_other_options_is_told_at_once(
    tmp_path: Path, port: int, more: list[str]
) -> None:
    line = [LOCKSTEP, "run", "--nnodes", "2", "--rdzv", f"127.0.0.1:{port}", "--nproc", "1"]
    with together([[*line, RANKS]], tmp_path) as (first,):
        assert first.stderr is not None
        assert "waits at" in first.stderr.readline()
        ((status, _, told),) = ended([[*line, *more, RANKS]], tmp_path)
    assert status == 2
    said = "=".join((more[0].removeprefix("--").replace("-", "_"), *(more[1:] or ["1"])))
    assert re.match(
        rf"lockstep: LaunchError: this machine runs '.*{re.escape(said)} .*'; the first machine at ",
        told,
    )


@pytest.mark.timeout(200)
@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_three_hosts_train_to_the_bits_of_one_process(
    tmp_path: Path, hosts: Network, nproc: int, undisturbed: str
) -> None:
    keeper = hosts.address(2)
    lines = [
        [
            *hosts.inside(host),
            *numbered(
                (host + 1) % 3,
                29400,
                nproc,
                "--interface",
                "eth0",
                "--run-dir",
                "run",
                ELASTIC,
                "0",
                nnodes=3,
                host=keeper,
            ),
        ]
        for host in hosts.hosts
    ]
    for host, (status, output, told) in zip(hosts.hosts, ended(lines, tmp_path), strict=True):
        assert status == 0, told
        first = (host + 1) % 3 * nproc
        assert set(re.findall(r"rank \d+ of \d+", output)) == {
            f"rank {first + local} of {3 * nproc}" for local in range(nproc)
        }
    assert run_files.fingerprint(tmp_path / "run") == undisturbed


@pytest.mark.command
def test_a_host_that_cannot_reach_the_rendezvous_says_what_it_tried(
    tmp_path: Path, hosts: Network
) -> None:
    hosts.cut(1)
    line = at(hosts.address(2), 2)
    with together([[*hosts.inside(1), *line]], tmp_path) as (machine,):
        assert machine.stderr is not None
        said = machine.stderr.readline()
    tried = (
        rf"tried {re.escape(hosts.address(2))} port 29400 from {re.escape(hosts.address(1))} on"
        r" eth0: "
    )
    assert re.match(
        rf"lockstep: no answer yet at --rdzv {re.escape(hosts.address(2))}:29400 \({tried}", said
    )


@pytest.mark.parametrize(
    ("here", "there", "leader"),
    [
        pytest.param(3, 1, 2, id="one reaches the rendezvous alone", marks=pytest.mark.slow),
        pytest.param(2, 3, 1, id="neither is first", marks=pytest.mark.command),
    ],
)
def test_hosts_of_which_one_does_not_reach_another_are_named_on_all(
    tmp_path: Path, hosts: Network, here: int, there: int, leader: int
) -> None:
    hosts.part(here, there)
    line = at(hosts.address(leader), 3)
    tried = (
        rf"tried from {hosts.address(here)} on eth0 to {hosts.address(there)} port \d+:"
        r" \[Errno 113\] No route to host"
    )
    for status, _, told in ended([[*hosts.inside(host), *line] for host in hosts.hosts], tmp_path):
        assert status == 2
        assert re.search(
            r"LaunchError: a machine of the run reaches the rendezvous, but not another machine"
            rf" \({tried}\)",
            told,
        )


@pytest.mark.command
@pytest.mark.parametrize("boxes", [[2], [2, 3]], ids=["one", "two of one address"])
def test_containers_whose_address_only_their_own_host_reaches_are_told_the_remedy(
    tmp_path: Path, hosts: Network, boxes: list[int]
) -> None:
    line = at(hosts.address(1), 1 + len(boxes))
    for status, _, told in ended(
        [[*before, *line] for before in (hosts.inside(1), *map(hosts.contain, boxes))], tmp_path
    ):
        assert status == 2, told
        assert re.search(
            r"LaunchError: .*\(tried from \S+ on eth0 to 172\.17\.0\.2 port \d+: .*or start"
            r" containers with --network=host",
            told,
        )


def test_an_interface_that_is_not_there_is_told(tmp_path: Path, port: int) -> None:
    ((status, _, told),) = ended([numbered(0, port, 1, "--interface", "nosuch0", RANKS)], tmp_path)
    assert status == 2
    assert re.search(
        r"LaunchError: --interface nosuch0 is not there; .*this machine has .*\blo\b", told
    )
