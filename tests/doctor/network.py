"""Hosts that are network namespaces on one bridge, for tests of several machines: real network
stacks, links with a rate or a delay."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import forked
import namespace
import pytest

NET = "10.229.9"
DELAYED_LINK = Path(__file__).with_name("delayed_link.py")


def run(line: str, *, check: bool = True) -> int:
    return subprocess.run(line.split(), check=check, capture_output=True).returncode


class Network:
    """`count` hosts; the address of each is `address(number)`, numbers from 1."""

    def __init__(self, count: int) -> None:
        self.name = f"doctor-{os.getpid()}"
        self.hosts = {number: f"{self.name}-{number}" for number in range(1, count + 1)}
        self._links: list[subprocess.Popen[bytes]] = []
        self._boxes: list[str] = []
        self._known = ExitStack()

    def _line(self, words: list[str], enter: Callable[[], object]) -> list[str]:
        """Return the words, after which a fork calls `enter` in place of them."""
        self._known.enter_context(forked.inside(words, enter))
        return words

    def address(self, number: int) -> str:
        return f"{NET}.{number}"

    def inside(self, number: int) -> list[str]:
        """What to put before a command that is to run on a host. The host has a name of its own
        too."""

        def enter() -> None:
            namespace.join_network(self.hosts[number])
            namespace.leave(["--uts"])
            socket.sethostname(f"host{number}")

        set_name = ["unshare", "--uts", "sh", "-c", f'hostname host{number} && exec "$@"', "sh"]
        return self._line(["nsenter", f"--net=/run/netns/{self.hosts[number]}", *set_name], enter)

    def up(self) -> None:
        run(f"ip -n {self.name} link add bridge type bridge forward_delay 0 stp_state 0")
        run(f"ip -n {self.name} link set bridge up")
        for number, host in self.hosts.items():
            run(f"ip netns add {host}")
            run(f"ip -n {host} link set lo up")
            run(f"ip -n {self.name} link add port{number} type veth peer name eth0 netns {host}")
            self._connect(number, f"port{number}")

    def _connect(self, number: int, port: str) -> None:
        run(f"ip -n {self.name} link set {port} master bridge up")
        run(f"ip -n {self.hosts[number]} addr add {self.address(number)}/24 dev eth0")
        run(f"ip -n {self.hosts[number]} link set eth0 up")

    def cut(self, number: int) -> None:
        """The host's link is down."""
        run(f"ip -n {self.name} link set port{number} down")

    def part(self, number: int, other: int) -> None:
        """Of these two, none reaches the other."""
        for one, two in ((number, other), (other, number)):
            run(f"ip -n {self.hosts[one]} route add unreachable {self.address(two)}/32")

    def limit(self, sender: int, receiver: int, megabits: int) -> None:
        """What one host sends to another has this rate; all else is as fast as it was."""
        on = f"ip netns exec {self.hosts[sender]} tc"
        lines = (
            f"{on} qdisc add dev eth0 root handle 1: htb default 1",
            f"{on} class add dev eth0 parent 1: classid 1:1 htb rate 40gbit quantum 60000",
            (
                f"{on} class add dev eth0 parent 1: classid 1:2 htb rate {megabits}mbit burst 128k"
                " quantum 60000"
            ),
            (
                f"{on} filter add dev eth0 parent 1: protocol ip u32 match ip dst"
                f" {self.address(receiver)} flowid 1:2"
            ),
        )
        if any(run(line, check=False) for line in lines):
            pytest.skip("this kernel limits no rates (htb and u32 of tc)")

    def contain(self, number: int) -> list[str]:
        """What to put before a command that is to run in a container on a host, as Docker's own
        network has it: its address is 172.17.0.2 on each host, behind a bridge named docker0, what
        it sends seems to come from the host, and its first process has the id 1."""
        if shutil.which("nft") is None:
            pytest.skip("no program nft, which has the kernel translate addresses")
        host, box = self.hosts[number], f"{self.name}-box{number}"
        self._boxes.append(box)
        run(f"ip netns add {box}")
        run(f"ip -n {box} link set lo up")
        run(f"ip -n {host} link add docker0 type bridge forward_delay 0 stp_state 0")
        run(f"ip -n {host} link add to-box type veth peer name eth0 netns {box}")
        run(f"ip -n {host} link set to-box master docker0 up")
        run(f"ip -n {host} addr add 172.17.0.1/16 dev docker0")
        run(f"ip -n {host} link set docker0 up")
        run(f"ip -n {box} addr add 172.17.0.2/16 dev eth0")
        run(f"ip -n {box} link set eth0 up")
        run(f"ip -n {box} route add default via 172.17.0.1")
        inside = ["nsenter", f"--net=/run/netns/{host}"]
        subprocess.run([*inside, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"], check=True)
        rules = (
            "table ip docker { chain out { type nat hook postrouting priority 100; ip saddr"
            " 172.17.0.0/16 oif eth0 masquerade; }; }"
        )
        subprocess.run([*inside, "nft", rules], check=True)

        def enter() -> None:
            namespace.join_network(box)
            namespace.leave(["--pid"])

        return self._line(
            ["nsenter", f"--net=/run/netns/{box}", "unshare", "--pid", "--fork", "--kill-child"],
            enter,
        )

    def delay(self, number: int, milliseconds: float) -> None:
        """All that a host sends and receives comes so much later."""
        if not os.path.exists("/dev/net/tun"):
            pytest.skip("no /dev/net/tun, by which a link with a delay is made")
        run(f"ip -n {self.hosts[number]} link del eth0")
        line = [
            sys.executable,
            str(DELAYED_LINK),
            self.hosts[number],
            "eth0",
            self.name,
            f"tap{number}",
            str(milliseconds / 1000),
        ]
        link = subprocess.Popen(line, stdout=subprocess.PIPE)
        self._links.append(link)
        assert link.stdout is not None
        if link.stdout.readline() != b"ready\n":
            pytest.skip("this kernel makes no TAP devices")
        self._connect(number, f"tap{number}")

    def down(self) -> None:
        self._known.close()
        for link in self._links:
            link.kill()
            link.communicate()
        for each in (*self._boxes, *self.hosts.values(), self.name):
            run(f"ip netns del {each}", check=False)


@contextmanager
def network(count: int) -> Iterator[Network]:
    """Skips the test where the machine has no network namespaces."""
    made = Network(count)
    if (
        os.geteuid() != 0
        or not all(map(shutil.which, ("ip", "tc", "nsenter", "unshare")))
        or run(f"ip netns add {made.name}", check=False)
    ):
        pytest.skip("network namespaces need root, and the programs ip, tc, nsenter and unshare")
    try:
        made.up()
        yield made
    finally:
        made.down()


def on_hosts(
    network: Network, arguments: Sequence[str], *, cwd: Path, seconds: float = 100
) -> list[subprocess.CompletedProcess[str]]:
    """Run `python ARGUMENTS` on all hosts at once. In order of their numbers."""
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [*network.inside(number), sys.executable, *arguments],
            cwd=cwd,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in network.hosts
    ]
    try:
        said = [each.communicate(timeout=seconds) for each in started]
    finally:
        for each in started:
            each.kill()
            each.communicate()
    return [
        subprocess.CompletedProcess(each.args, each.returncode, *text)
        for each, text in zip(started, said, strict=True)
    ]
