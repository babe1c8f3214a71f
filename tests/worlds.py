"""Worlds of processes that compute on the CPU."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep.comm.world import World

ALONE = World(0, 1, 0, 1, torch.device("cpu"), owns_group=False)


def all_ranks() -> World:
    """All ranks of the default process group, on one machine."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return World(rank, size, rank, size, torch.device("cpu"), owns_group=False)
