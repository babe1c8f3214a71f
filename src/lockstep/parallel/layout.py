"""A model put onto the axes of a plan."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lockstep.comm.mesh import Mesh
from lockstep.parallel.blocks import blocks_of
from lockstep.parallel.shard import shard
from lockstep.plan import Plan


def lay_out(model: nn.Module, mesh: Mesh, plan: Plan, patterns: Sequence[str] | None) -> None:
    """Change `model` in place, so that this rank holds and computes what the plan gives it. Every rank calls it.

    `patterns`: the names of its blocks, None: they are found. Raises `RecipeError`.
    """
    blocks = blocks_of(model, patterns)
    if mesh.axis("shard").size > 1:
        shard(model, mesh, blocks, free_after_forward=plan.sharding == "full")
