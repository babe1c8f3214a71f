"""What tests run on ranks of the stand-in accelerator."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def on_device(function: Callable[..., T], *args: Any) -> T:
    """Call a function on a rank whose process group is the device's, as after `lockstep run`."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    torch.accelerator.set_device_index(rank)
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    dist.init_process_group(
        "cpu:gloo,standin:standin_gloo",
        store=dist.PrefixStore("devices", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    return function(*args)
