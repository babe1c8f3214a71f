"""The machines of a run: their number, the address of their rendezvous, and the address of this
machine. Does not import torch."""

from __future__ import annotations

import errno
import re
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass

from lockstep.base.errors import LaunchError
from lockstep.options import LaunchOptions, flag

_SIOCGIFADDR = 0x8915


@dataclass(frozen=True, slots=True)
class Machines:
    """The number of machines of a run (from `least` to `most`), and the address of their
    rendezvous."""

    least: int
    most: int
    host: str
    port: int
    node_rank: int | None = None
    """The number that the user gave to this machine, from 0. None if the rendezvous assigns the
    numbers."""
    interface: str | None = None
    """The network interface that the user requested. None for the interface that routes to the
    rendezvous host."""
    source: str = "--rdzv"

    @property
    def endpoint(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def option(self) -> str:
        return f"{self.source} {self.endpoint}"

    @property
    def count(self) -> str:
        return f"{self.least}" if self.least == self.most else f"{self.least} to {self.most}"

    @classmethod
    def parse(cls, options: LaunchOptions) -> Machines | None:
        """Return None for one machine."""
        nnodes = options.nnodes if options.nnodes is not None else "1"
        match = re.fullmatch(r"(\d+)(?::(\d+))?", nnodes)
        least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= least <= most:
            raise LaunchError(
                f"--nnodes {nnodes}; it takes a number of machines, N, or the least and the most, "
                "A:B with 1 <= A <= B; give one of those"
            )
        given = rendezvous_options(options)
        for option, value in (*given.items(), ("--interface", options.interface)):
            if most == 1 and value is not None:
                raise LaunchError(
                    f"{option} {value} on one machine; it is for a run on several machines; say"
                    " how many (--nnodes 2), or leave it out"
                )
        if most == 1:
            return None
        if not given:
            raise LaunchError(
                f"--nnodes {nnodes} without --rdzv; the machines connect at an address and port of"
                " one of them; give --rdzv HOST:PORT, the same on all, or --node-rank,"
                " --master-addr and --master-port"
            )
        host, port = _endpoint(options)
        if options.node_rank is not None and (least != most or options.node_rank >= most):
            raise LaunchError(
                f"--node-rank {options.node_rank} with --nnodes {nnodes}; N machines have the"
                " numbers 0 to N - 1, and N is a fixed number; correct one of them, or give"
                " --rdzv, which lets machines come and go"
            )
        source = "--rdzv" if options.rdzv is not None else "--master-addr"
        return cls(least, most, host, port, options.node_rank, options.interface, source)

    def resolve(self) -> str:
        try:
            addresses = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise LaunchError(
                f"{self.option}: the address of {self.host} cannot be found ({error.strerror}); it"
                " must be one of the machines, by a name or address that all of them know;"
                " correct it"
            ) from None
        return str(min(addresses, key=lambda each: each[0] != socket.AF_INET)[4][0])


def rendezvous_options(options: LaunchOptions) -> dict[str, str | int]:
    names = ("rdzv", "node_rank", "master_addr", "master_port")
    return {flag(name): value for name in names if (value := getattr(options, name)) is not None}


def _endpoint(options: LaunchOptions) -> tuple[str, int]:
    given = rendezvous_options(options)
    if options.rdzv is None:
        if options.node_rank is None or options.master_addr is None or options.master_port is None:
            raise LaunchError(
                f"{', '.join(f'{name} {value}' for name, value in given.items())} alone; a machine"
                " is given its number (--node-rank), and the address and a free port of number 0"
                " (--master-addr, --master-port); give all three, or --rdzv HOST:PORT"
            )
        return options.master_addr, options.master_port
    if len(given) > 1:
        name, value = list(given.items())[1]
        raise LaunchError(
            f"--rdzv {options.rdzv} with {name} {value}; both name the address at which the"
            " machines connect; give only one of them"
        )
    host, _, port = options.rdzv.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise LaunchError(
            f"--rdzv {options.rdzv}; it must be HOST:PORT, the address of one of the machines and"
            " a free port there; give both"
        )
    return host, int(port)


def address_towards(address: str, port: int) -> str:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError as error:
            raise LaunchError(
                f"no route from this machine to {address} ({error.strerror}); the machines of a"
                " run must reach each other"
            ) from None
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(ImportError):
        import fcntl

        for _, name in socket.if_nameindex():
            with suppress(OSError):  # this interface has no IPv4 address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def address_on(interface: str) -> str:
    import fcntl  # not on every system

    names = ", ".join(name for _, name in socket.if_nameindex())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            why = "has no IPv4 address" if error.errno == errno.EADDRNOTAVAIL else "is not there"
            raise LaunchError(
                f"--interface {interface} {why}; it takes a network interface by which the other "
                f"machines reach this one; this machine has {names}; give one of them, or omit "
                "--interface to use the one that routes to the rendezvous"
            ) from None
    return socket.inet_ntoa(answer[20:24])
