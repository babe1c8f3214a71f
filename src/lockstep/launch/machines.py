"""Which machines a run is on: what was given for it, and this one's address among them. No torch."""

from __future__ import annotations

import errno
import re
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass

from lockstep.base.errors import LaunchError

_SIOCGIFADDR = 0x8915


@dataclass(frozen=True, slots=True)
class Place:
    """Where machines are to meet: `--rdzv`, or the older way, in which each is given its number too."""

    rdzv: str | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None

    @property
    def given(self) -> list[tuple[str, str | int]]:
        """The options that were given, and their values."""
        options = (
            ("--rdzv", self.rdzv),
            ("--node-rank", self.node_rank),
            ("--master-addr", self.master_addr),
            ("--master-port", self.master_port),
        )
        return [(name, value) for name, value in options if value is not None]

    def address(self) -> tuple[str, int]:
        """The host and the port. Raises `LaunchError`."""
        if self.rdzv is None:
            if self.node_rank is None or self.master_addr is None or self.master_port is None:
                given = ", ".join(f"{name} {value}" for name, value in self.given)
                raise LaunchError(
                    f"{given} alone; a machine is given its number (--node-rank), and the address and a free port of number 0 "
                    "(--master-addr, --master-port); give all three, or --rdzv HOST:PORT"
                )
            return self.master_addr, self.master_port
        if len(self.given) > 1:
            name, value = self.given[1]
            raise LaunchError(f"--rdzv {self.rdzv} with {name} {value}; these are two ways to say where machines meet; give one of them")
        host, _, port = self.rdzv.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise LaunchError(f"--rdzv {self.rdzv}; it is HOST:PORT, the address of one of the machines and a free port there; give both")
        return host, int(port)


@dataclass(frozen=True, slots=True)
class Machines:
    """How many machines, and where they meet."""

    least: int
    most: int
    host: str
    port: int
    node_rank: int | None = None
    """This machine's place among them, from 0, where somebody gave it. None: they agree on one when they meet."""
    interface: str | None = None
    """The network interface that was asked for. None: that of the way to the host."""
    told_by: str = "--rdzv"
    """What the host and the port were given as."""

    @property
    def place(self) -> str:
        """HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def said(self) -> str:
        """The place, and what it was given as."""
        return f"{self.told_by} {self.place}"

    @property
    def number(self) -> str:
        """In words."""
        return f"{self.least}" if self.least == self.most else f"{self.least} to {self.most}"

    @classmethod
    def parse(cls, nnodes: str, place: Place, interface: str | None = None) -> Machines | None:
        """What `--nnodes` (`N` or `A:B`) and the options of `place` say; None for one machine. Raises `LaunchError`."""
        found = re.fullmatch(r"(\d+)(?::(\d+))?", nnodes)
        least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= least <= most:
            raise LaunchError(
                f"--nnodes {nnodes}; it is a number of machines, N, or the least and the most, A:B with 1 <= A <= B; give one of those"
            )
        for option, value in (*place.given, ("--interface", interface)):
            if most == 1 and value is not None:
                raise LaunchError(
                    f"{option} {value} on one machine; it is for several that meet; say how many (--nnodes 2), or leave it out"
                )
        if most == 1:
            return None
        if not place.given:
            raise LaunchError(
                f"--nnodes {nnodes} without --rdzv; the machines meet at an address and port of one of them; give --rdzv HOST:PORT, the "
                "same on all, or --node-rank, --master-addr and --master-port"
            )
        host, port = place.address()
        if place.node_rank is not None and (least != most or place.node_rank >= most):
            raise LaunchError(
                f"--node-rank {place.node_rank} with --nnodes {nnodes}; the places of N machines are 0 to N - 1, and N is a fixed number; "
                "correct one of them, or give --rdzv, where machines may come and go"
            )
        return cls(least, most, host, port, place.node_rank, interface, "--rdzv" if place.rdzv is not None else "--master-addr")

    def resolve(self) -> str:
        """The host's address as a number. Raises `LaunchError`."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise LaunchError(
                f"{self.said}: the address of {self.host} cannot be found ({error.strerror}); it is one of the machines, by a name "
                "or address that all of them know; correct it"
            ) from None
        return str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])


def address_towards(address: str, port: int) -> str:
    """The address of this machine that `address` sees. Nothing is sent. Raises `LaunchError`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError as error:
            raise LaunchError(f"no way from this machine to {address} ({error.strerror}); the machines of a run reach each other") from None
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The network interface that has this IPv4 address. None: not found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(ImportError):
        import fcntl

        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no such address
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


def address_on(interface: str) -> str:
    """The IPv4 address of this network interface. Raises `LaunchError`."""
    import fcntl  # not on every system

    names = ", ".join(name for _, name in socket.if_nameindex())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            why = "has no IPv4 address" if error.errno == errno.EADDRNOTAVAIL else "is not there"
            raise LaunchError(
                f"--interface {interface} {why}; it is a network interface of this machine, by which the others reach it; those here are "
                f"{names}; give one of them, or leave it out for that of the way to the rendezvous"
            ) from None
    return socket.inet_ntoa(found[20:24])
