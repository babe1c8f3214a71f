"""What keeps a model's gradients through a step, and which one a mesh needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn

from lockstep.comm.mesh import Mesh
from lockstep.model.shard import Shards
from lockstep.train.reducers import ddp as replicate
from lockstep.train.reducers.compression import Compression
from lockstep.train.reducers.ddp import Replica
from lockstep.train.reducers.pipeline import Piped
from lockstep.train.reducers.post_backward import Parts
from lockstep.train.reducers.step_stats import Number, Told
from lockstep.train.reducers.tied_gradients import TiedGradients


class Engine(Protocol):
    """One model's gradients on one rank, from the first microbatch of a step to the sum over all ranks.

    In every step, on every rank: `begin`, then `backward` for each of this rank's microbatches, then `finish`. After it each `.grad` is
    the sum over all microbatches of all ranks (this rank's part of it, where it holds a part of the parameter), or None where no
    microbatch used the parameter.
    """

    def begin(self, count: int) -> None:
        """Start a step of `count` microbatches in all."""

    def backward(self, total: Tensor, seed: Tensor, *, only_these: bool, is_dummy: bool) -> None:
        """Add the gradient of `seed * total`, the next microbatch's.

        `only_these`: leave other models' parameters that the graph reaches alone. `is_dummy`: the microbatch is computed only
        for the collectives in it, and its gradient is discarded.
        """

    def finish(self, values: Sequence[Number], weights: Sequence[Number] | None, *, flag: bool) -> Told:
        """Sum over all ranks. `values`, `weights`: one number for each of this rank's microbatches; no weights on any rank, or on all."""

    def close(self) -> None:
        """Take its hooks off the model."""


def sum_factor(mesh: Mesh, *, bitwise: bool, compression: Compression | None) -> int:
    """What a loss is multiplied by on its way through the engine, which a loss scale must leave room for."""
    ddp = _uses_ddp(mesh, bitwise=bitwise, compression=compression)
    return replicate.sum_factor(mesh, bitwise=bitwise, compression=compression) if ddp else 1


def _uses_ddp(mesh: Mesh, *, bitwise: bool, compression: Compression | None) -> bool:
    """Every rank holds the whole model, and memory is not what gradients are simply added in."""
    return mesh.torch_mesh is None and (mesh.data.shared_memory is None or bitwise or compression is not None)


def engine_for(
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    mesh: Mesh,
    *,
    tied: TiedGradients | None,
    bitwise: bool,
    max_microbatches: int,
    compression: Compression | None,
) -> Engine:
    """The gradients' keeper of a model that is laid out on `mesh`. Every rank makes it alike. `tied`: where there is a pipeline.

    `compression`: only where there is no other axis than `replicate`.
    """
    if _uses_ddp(mesh, bitwise=bitwise, compression=compression):
        return Replica(parameters, mesh, bitwise=bitwise, max_microbatches=max_microbatches, compression=compression)
    inner: Shards | Parts
    if mesh.axis("shard").size > 1:
        inner = Shards(model, parameters, mesh, bitwise=bitwise, max_microbatches=max_microbatches)
    else:
        inner = Parts(parameters, mesh, max_microbatches=max_microbatches)
    return inner if tied is None else Piped(inner, tied)
