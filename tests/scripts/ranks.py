"""Prints one JSON line per process with its arguments and the variables of its launcher. Does not
import torch."""

import json
import os
import sys

NAMES = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
)
found = {name: int(os.environ[name]) for name in NAMES} | {
    "arguments": sys.argv[1:],
    "interface": os.environ["GLOO_SOCKET_IFNAME"],
}
os.write(1, f"{json.dumps(found)}\n".encode())
