"""A wire with a delay between two network namespaces, for kernels without netem: python wire.py
NAMESPACE DEVICE NAMESPACE DEVICE SECONDS.

Makes a TAP device in each, carries frames between them, and says `ready` when both are there.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

CLONE_NEWNET = 0x40000000
TUNSETIFF, TUNSETOFFLOAD, TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
TAP, NO_INFORMATION, HEADERS = 0x0002, 0x1000, 0x4000
CHECKSUMS, SEGMENTS_4, SEGMENTS_6 = 0x01, 0x02, 0x04
"""With these a frame may be 64 KiB, and few frames carry much."""


def tap(namespace: str, device: str) -> int:
    """A descriptor of a new TAP device there."""
    libc = ctypes.CDLL(None, use_errno=True)
    home, there = (
        os.open("/proc/self/ns/net", os.O_RDONLY),
        os.open(f"/run/netns/{namespace}", os.O_RDONLY),
    )
    if libc.setns(there, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    made = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(
        made, TUNSETIFF, struct.pack("16sH22x", device.encode(), TAP | NO_INFORMATION | HEADERS)
    )
    fcntl.ioctl(made, TUNSETVNETHDRSZ, struct.pack("i", 10))
    fcntl.ioctl(made, TUNSETOFFLOAD, CHECKSUMS | SEGMENTS_4 | SEGMENTS_6)
    libc.setns(home, CLONE_NEWNET)
    os.close(home)
    os.close(there)
    return made


def carry(one: int, other: int, seconds: float) -> None:
    """For ever. What is on its way arrives in the order in which it was sent."""
    on_its_way: deque[tuple[float, int, bytes]] = deque()
    while True:
        patience = max(0.0, on_its_way[0][0] - time.monotonic()) if on_its_way else None
        for ready in select.select([one, other], [], [], patience)[0]:
            with suppress(BlockingIOError):
                on_its_way.append(
                    (
                        time.monotonic() + seconds,
                        other if ready == one else one,
                        os.read(ready, 70000),
                    )
                )
        while on_its_way and on_its_way[0][0] <= time.monotonic():
            _, to, frame = on_its_way.popleft()
            with suppress(OSError):  # a device that is down drops
                os.write(to, frame)


if __name__ == "__main__":
    ends = tap(*sys.argv[1:3]), tap(*sys.argv[3:5])
    print("ready", flush=True)
    carry(*ends, float(sys.argv[5]))
