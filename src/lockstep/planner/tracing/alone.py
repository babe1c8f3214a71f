"""Places of the production code that need values or other ranks, and what a trace does instead."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from lockstep.base.torch_private import disable_current_modes
from lockstep.data.fetch import Fetcher
from lockstep.data.streams import StreamFetcher
from lockstep.model.pipeline.boundary import Boundary
from lockstep.model.pipeline.boundary_discovery import BoundaryDiscovery
from lockstep.model.pipeline.failure import PipelineFailure
from lockstep.model.tensor.first_forward_check import FirstForwardCheck
from lockstep.planner.tracing.torch_fakes import (
    FakeTensor,
    keeping_buckets,
    mesh_methods,
    propagation_methods,
)
from lockstep.planner.tracing.values import listed
from lockstep.training.losses import loss
from lockstep.training.losses.loss import LossKind
from lockstep.training.microbatches import Batching, Microbatches, Spans
from lockstep.training.train_module import TrainModule

PACKED = "find_packed_sequence_indices"
"""Looks for several texts in one sequence, in transformers 5.x."""

Patch = tuple[Any, dict[str, Any]]
"""A class or module, with its functions in a trace."""


def without_others(boundaries: Sequence[Boundary]) -> Iterator[Patch]:
    """Yield what would ask other ranks. `boundaries`: between a pipeline's stages."""
    # Compares values of sharded layers with those of whole ones.
    yield FirstForwardCheck, {"compare": lambda *_: None}
    # Raises the error of another rank.
    yield PipelineFailure, {"raise_known": _raise_own}
    # Asks the rank with the model's output what it got.
    yield TrainModule, {"agree_on_loss": _agree_alone}
    # Asks other ranks what they hand on.
    yield BoundaryDiscovery, {"_discover": lambda *_: list(boundaries)}
    # Agrees with the other ranks on new buckets, in C++.
    yield DistributedDataParallel, keeping_buckets()


def unrecorded() -> Patch:
    """Return what torch computes only for the shapes of distributed tensors."""
    return propagation_methods(with_values)


def with_short_first_step() -> Patch:
    """Return what lets each rank compute one microbatch in the unrecorded first step."""
    original = Batching.spans

    def spans(batching: Batching, step: int) -> Spans:
        return original(batching, step)[: batching.assignment.ranks if step == 0 else None]

    return Batching, {"spans": spans}


def without_values() -> Iterator[Patch]:
    # The script's dataset and `collate` compute with them.
    yield (
        Fetcher,
        {
            "__getitem__": with_values(Fetcher.__getitem__),
            "_rows": with_values(Fetcher._rows),
        },
    )
    yield StreamFetcher, {"__getitem__": with_values(StreamFetcher.__getitem__)}
    # Counts the weights of the microbatches.
    yield Microbatches, {"weigh": with_values(Microbatches.weigh)}
    # Reads the ranks of a mesh as numbers.
    yield DeviceMesh, mesh_methods(with_values)
    # Asks for one value after another, of which there are as many as microbatches in the whole
    # world.
    yield FakeTensor, {"tolist": listed}
    # Looks in the values of position ids for several texts in one sequence, and without values
    # makes a mask for them.
    if "transformers" in sys.modules and hasattr(
        masks := import_module("transformers.masking_utils"), PACKED
    ):
        yield masks, {PACKED: lambda *_, **__: None}
    # Keeps tensors for later runs, which have values.
    yield loss, {"_constant": loss._constant.__wrapped__}


def with_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `function` with values."""

    def outside(*arguments: Any, **keywords: Any) -> Any:
        with disable_current_modes():
            return function(*arguments, **keywords)

    return outside


def _agree_alone(module: TrainModule, kinds: Sequence[LossKind]) -> None:
    module.forward_knows_weight, module.terms, module.repeats = (
        kinds[0] if kinds else LossKind(False, [], 1)
    )


def _raise_own(failure: PipelineFailure) -> None:
    if failure.error is not None:
        raise failure.error
