"""Which machines a run is on: what was given for it, and this one's address among them. No torch."""

from __future__ import annotations

import re
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass

from lockstep.errors import LaunchError

_SIOCGIFADDR = 0x8915


@dataclass(frozen=True, slots=True)
class Machines:
    """How many machines, and where they meet."""

    least: int
    most: int
    host: str
    port: int

    @property
    def place(self) -> str:
        """HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def number(self) -> str:
        """In words."""
        return f"{self.least}" if self.least == self.most else f"{self.least} to {self.most}"

    @classmethod
    def parse(cls, nnodes: str, rdzv: str | None) -> Machines | None:
        """What `--nnodes` (`N` or `A:B`) and `--rdzv` (`HOST:PORT`) say; None for one machine. Raises `LaunchError`."""
        found = re.fullmatch(r"(\d+)(?::(\d+))?", nnodes)
        least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= least <= most:
            raise LaunchError(
                f"--nnodes {nnodes}; it is a number of machines, N, or the least and the most, A:B with 1 <= A <= B; give one of those"
            )
        if most == 1:
            if rdzv is not None:
                raise LaunchError(f"--rdzv {rdzv} on one machine; it is where several meet; say how many (--nnodes 2), or leave it out")
            return None
        if rdzv is None:
            raise LaunchError(
                f"--nnodes {nnodes} without --rdzv; the machines meet at an address and port of one of them; give --rdzv HOST:PORT, the "
                "same on all"
            )
        host, _, port = rdzv.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise LaunchError(f"--rdzv {rdzv}; it is HOST:PORT, the address of one of the machines and a free port there; give both")
        return cls(least, most, host, int(port))

    def resolve(self) -> str:
        """The host's address as a number. Raises `LaunchError`."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise LaunchError(
                f"--rdzv {self.place}: the address of {self.host} cannot be found ({error.strerror}); it is one of the machines, by a name "
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
