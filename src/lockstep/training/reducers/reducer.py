"""The protocol of gradient reducers, and the choice of a reducer for a device mesh. A reducer
accumulates gradients and sums them over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor, nn

from lockstep.assignment import MicrobatchAssignment
from lockstep.comm.mesh import Mesh
from lockstep.model.expert.leaves import Leaves
from lockstep.model.separate_parts import PartLeaf
from lockstep.training.reducers.agreement import StepAgreement
from lockstep.training.reducers.compression import Compression
from lockstep.training.reducers.ddp import DdpReducer
from lockstep.training.reducers.fsdp import FsdpReducer
from lockstep.training.reducers.microbatch_checksums import Recording
from lockstep.training.reducers.ordered import OrderedReducer
from lockstep.training.reducers.post_backward import PostBackwardReducer
from lockstep.training.reducers.rounds import RoundsReducer
from lockstep.training.reducers.step_stats import Number, StepStats

if TYPE_CHECKING:
    from lockstep.model.pipeline.pipeline import Pipeline


class GradientReducer(Protocol):
    """Accumulates the gradients of a step and sums them over ranks. In every step, every rank calls
    `begin_step`, then `backward` for each of its microbatches, then `reduce`."""

    def begin_step(self, count: int, assignment: MicrobatchAssignment) -> None:
        """Clear the gradients. `count` is the number of microbatches over all ranks."""

    def backward(
        self, total: Tensor, grad_output: Tensor, *, own_parameters_only: bool, is_dummy: bool
    ) -> None:
        """Accumulate the gradient of the loss `total`. If `is_dummy`, takes part in the backward's
        collectives and accumulates nothing. With `own_parameters_only`, other models in the graph
        get no gradient."""

    def reduce(
        self, values: Sequence[Number], weights: Sequence[Number] | None, *, flag: bool
    ) -> StepStats:
        """Sum the gradients over all ranks. Each `.grad` becomes this rank's shard of the sum, or
        None if no microbatch used the parameter. `values` and `weights` have one entry for each
        microbatch of this rank. `weights` is None on all ranks or on none."""

    def gradient_versions(self) -> list[Any]:
        """Return values that change with each backward that accumulates a gradient on this rank."""

    def close(self) -> None: ...


class RecomputingReducer(GradientReducer, Protocol):
    """A reducer that can also compute the gradient of another rank's microbatch, to find faulty
    hardware."""

    recording: Recording

    def discarding(self) -> AbstractContextManager[None]:
        """A context in which the gradient of another rank's microbatch is computed and discarded.
        Enter the context before the first `backward` of the step, or after `reduce`. If entered
        after `reduce`, the context clears the step's summed gradients."""

    def recompute(self, total: Tensor, grad_output: Tensor) -> None:
        """Call `recompute` in the context `discarding`."""


class ReducerChoice(NamedTuple):
    """The chosen reducer class, and the reason for the choice as text for the user."""

    reducer: type[DdpReducer | FsdpReducer | OrderedReducer | PostBackwardReducer | RoundsReducer]
    reason: str


def choose_reducer(
    mesh: Mesh, *, bitwise: bool, compressed: bool, in_chunks: bool = False
) -> ReducerChoice:
    if mesh.axis("shard").size > 1 and in_chunks:
        return ReducerChoice(
            RoundsReducer, "numerics=bitwise: chunks of a sequence are computed in turn"
        )
    if mesh.axis("shard").size > 1:
        return ReducerChoice(FsdpReducer, "the shard axis has more than one rank")
    divides_experts = any("experts" in axis.divides for axis in mesh.larger)
    if bitwise and divides_experts:
        return ReducerChoice(
            RoundsReducer, "numerics=bitwise: rows of several microbatches meet in the experts"
        )
    if bitwise and not all(axis.same_state for axis in mesh.larger):
        return ReducerChoice(
            OrderedReducer,
            "numerics=bitwise: DistributedDataParallel takes no DTensors and no pipeline schedules",
        )
    if not all(axis.same_state for axis in mesh.larger):
        return ReducerChoice(
            PostBackwardReducer,
            "DistributedDataParallel takes no DTensors and no pipeline schedules",
        )
    if bitwise:
        return ReducerChoice(
            DdpReducer, "numerics=bitwise: buckets are summed in the canonical order"
        )
    if compressed:
        return ReducerChoice(DdpReducer, "gradient_compression: buckets are sent in fewer bytes")
    if mesh.summed().shared_memory is not None:
        return ReducerChoice(PostBackwardReducer, "all replicas share the memory of one host")
    return ReducerChoice(DdpReducer, "buckets are summed while the backward computes")


def build_reducer(
    choice: ReducerChoice,
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    mesh: Mesh,
    *,
    bitwise: bool,
    max_microbatches: int,
    compression: Compression | None,
    complete: Callable[[Sequence[nn.Parameter]], None] | None,
    leaves: Sequence[Leaves],
    part_leaves: Sequence[PartLeaf],
    pipeline: Pipeline | None,
    agreement: StepAgreement,
) -> GradientReducer:
    """Every rank must call this function."""
    if choice.reducer is FsdpReducer:
        reducer = FsdpReducer(
            model,
            parameters,
            mesh,
            bitwise=bitwise,
            max_microbatches=max_microbatches,
            leaves=leaves,
            part_leaves=part_leaves,
            stages=() if pipeline is None else pipeline.modules,
            agreement=agreement,
        )
        if bitwise and pipeline is not None:
            pipeline.on_gradient = reducer.after_backward
            pipeline.on_exchange = reducer.recording.exchange
        return reducer
    parameters = [*parameters, *(leaf.parameter for leaf in part_leaves)]
    if choice.reducer in (OrderedReducer, RoundsReducer):
        known = set(parameters)
        stages = None
        if pipeline is not None:
            stages = [[each for each in stage if each in known] for stage in pipeline.weights()]
        ordered: OrderedReducer | RoundsReducer
        if choice.reducer is OrderedReducer:
            ordered = OrderedReducer(
                parameters,
                mesh,
                max_microbatches=max_microbatches,
                stages=stages,
                agreement=agreement,
            )
        else:
            # a stage on another rank may have a parameter of the same name
            called = model if pipeline is None else nn.ModuleList(pipeline.modules)
            ordered = RoundsReducer(
                *(called, parameters, mesh, leaves, part_leaves),
                max_microbatches=max_microbatches,
                stages=stages,
                agreement=agreement,
            )
        if pipeline is not None:
            pipeline.on_gradient = ordered.after_backward
            pipeline.on_exchange = ordered.recording.exchange
        return ordered
    if choice.reducer is DdpReducer:
        return DdpReducer(
            parameters,
            mesh,
            bitwise=bitwise,
            max_microbatches=max_microbatches,
            compression=compression,
            agreement=agreement,
        )
    return PostBackwardReducer(
        parameters,
        mesh,
        max_microbatches=max_microbatches,
        complete=complete,
        agreement=agreement,
    )
