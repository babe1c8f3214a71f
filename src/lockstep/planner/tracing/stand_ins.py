"""Replaces functions that a trace cannot execute, because they need values of tensors, a GPU or
other ranks."""

from __future__ import annotations

import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial, partialmethod
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from lockstep.assignment import contiguous_range
from lockstep.base.errors import RecipeError
from lockstep.base.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    TorchDispatchMode,
    disable_current_modes,
    tree_map,
)
from lockstep.comm.compared_bits import BITS
from lockstep.comm.first_failure import FirstFailure
from lockstep.comm.world import World
from lockstep.data.fetch import Fetcher
from lockstep.data.streams import StreamFetcher
from lockstep.model.context import attention, cut
from lockstep.model.context.documents import Documents
from lockstep.model.context.part_digests import PartDigests
from lockstep.model.expert.dispatch import Dispatch
from lockstep.model.expert.routing import Routing
from lockstep.model.pipeline.boundary import Boundary
from lockstep.model.pipeline.boundary_discovery import BoundaryDiscovery, PipelineFailure
from lockstep.model.tensor.first_forward_check import FirstForwardCheck
from lockstep.planner.trace import HELD
from lockstep.planner.tracing.recorder import TraceRecorder
from lockstep.planner.tracing.torch_fakes import (
    DEVICE,
    IS_PINNED,
    PIN_MEMORY,
    TorchFunctionMode,
    keeping_buckets,
    mesh_methods,
    propagation_methods,
    replaced,
)
from lockstep.training import loss
from lockstep.training.balance import ExpertBalance
from lockstep.training.loss import LossKind
from lockstep.training.microbatches import Batching, Microbatches, Spans
from lockstep.training.reducers import exchange_order
from lockstep.training.step import Step
from lockstep.training.train_module import TrainModule

TORCH = str(Path(torch.__file__).parent)
TRACING = str(Path(__file__).parent)
LOCKSTEP = str(Path(__file__).parents[2])
PRODUCTS = frozenset({"mm", "addmm", "mv", "addmv", "bmm", "baddbmm", "addbmm", "dot"})
TORCHS_NAMES = {torch.float32: "float", torch.bfloat16: "c10::BFloat16", torch.float16: "c10::Half"}
SHORT = (torch.bfloat16, torch.float16)
IN_FLOAT32 = frozenset(
    getattr(owner, name)
    for owner, names in {
        functional: "layer_norm group_norm softmax log_softmax cross_entropy nll_loss mse_loss"
        " l1_loss smooth_l1_loss kl_div cosine_similarity cosine_embedding_loss normalize softplus",
        torch: "softmax log_softmax exp log pow sum prod cumsum norm rsqrt layer_norm reciprocal"
        " cosh sinh tan acos asin log2 log10",
        Tensor: "softmax log_softmax exp log pow sum prod cumsum norm rsqrt reciprocal __pow__",
    }.items()
    for name in names.split()
)
"""Operations that autocast computes in float32
(https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference)."""
IS_CPU = Tensor.is_cpu.__get__  # type: ignore[attr-defined]
PACKED = "find_packed_sequence_indices"

Patch = tuple[Any, dict[str, Any]]
"""A class or module, and the functions that replace its functions during a trace."""


class ValueNeeded(RecipeError):
    """The script reads a tensor's value, or a shape that depends on values."""


class Values(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].device
        if function in (PIN_MEMORY, IS_PINNED):  # a fake tensor supports neither
            return args[0] if function is PIN_MEMORY else True
        if function.overloadpacket.__name__ in PRODUCTS:
            # the last argument may be a dtype
            dtypes = [each.dtype for each in args if isinstance(each, torch.Tensor)][-2:]
            if len(set(dtypes)) > 1:
                names = " != ".join(TORCHS_NAMES.get(dtype, str(dtype)) for dtype in dtypes)
                raise RuntimeError(
                    f"expected both factors to have the same dtype, but got: {names}"
                )
        try:
            return function(*args, **(kwargs or {}))
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            return _value_instead(function, args, error)


def tolist(tensor: torch.Tensor) -> Any:
    if 0 in tensor.shape:
        return []
    value: Any = tensor.reshape(-1)[0].item()
    for size in reversed(tensor.shape):
        value = [value] * size
    return value


def _value_instead(function: Any, args: Any, error: Exception) -> Any:
    """Return a finite number if torch or lockstep reads the value. Raise `ValueNeeded` in the
    script."""
    frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(2))]
    torchs = (TORCH, TRACING, "<")
    callers = (each for each in frames if not each.f_code.co_filename.startswith(torchs))
    asking = next(callers, None)
    is_own = asking is None or asking.f_code.co_filename.startswith(LOCKSTEP)
    if is_own and isinstance(error, DataDependentOutputException):
        return 1.0 if args[0].is_floating_point() else int(args[0].dtype is not torch.bool)
    where = "" if asking is None else f"{asking.f_code.co_filename}:{asking.f_lineno}: "
    raise ValueNeeded(
        f"{where}{function.overloadpacket.__name__} needs values of a tensor; a plan is made from"
        " shapes only; write this line so that it needs no values"
    ) from error


class GpuSemantics(TorchFunctionMode):
    """Makes CPU tensors use the autocast and attention of a GPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function == IS_CPU:
            return False
        if function is functional.scaled_dot_product_attention:
            # a CPU computes attention with dropout in parts; a GPU in one kernel
            kwargs.pop("dropout_p", None)
            args = args[:4] + ((0.0, *args[5:]) if len(args) > 4 else ())
        elif function in IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(_widened, (args, kwargs))
        return function(*args, **kwargs)


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in SHORT else value


def without_others(boundaries: Sequence[Sequence[Boundary]], skew: float) -> Iterator[Patch]:
    """Yield replacements for functions that communicate with other ranks."""
    # The original compares the values of sharded and of full layers.
    yield FirstForwardCheck, {"compare": lambda *_: None}
    # The originals compare outputs and losses of cut sequences and of whole ones.
    checks = {"prove": None, "check_model": None, "check_labels": True, "find_shift": 0}
    yield cut, {name: partial(_answer, found) for name, found in checks.items()}
    # The originals compare the outputs of divided experts and of whole ones, and read the numbers
    # of rows that the ranks send each other.
    yield Dispatch, {"_prove": lambda *_: None, "_exchange_counts": _routed(skew)}
    # The originals' numbers add up to 0 over all ranks, but not on one rank.
    yield exchange_order, {"digest_numbers": lambda _, **given: [0.0] * BITS * given["groups"]}
    yield PartDigests, {"numbers": lambda digests: [0.0] * digests.count}
    # The originals use torch's store.
    yield FirstFailure, {"__init__": lambda *_: None, "tell": lambda *_: None}
    # The original raises the error of another rank.
    yield PipelineFailure, {"raise_known": _raise_own}
    # The original asks the rank with the model's output for the kind of loss.
    yield TrainModule, {"agree_on_loss": _agree_alone}
    # The originals ask other ranks for the tensors that they pass on.
    forwards = deque(boundaries)
    yield (
        BoundaryDiscovery,
        {
            "_discover": lambda _, __, backward: [
                boundary if backward else _without_gradients(boundary) for boundary in forwards[0]
            ],
            "_in_turn": partialmethod(_own_stages, forwards),
        },
    )
    # The original agrees with other ranks on new buckets, in C++.
    yield DistributedDataParallel, keeping_buckets()


def _without_gradients(boundary: Boundary) -> Boundary:
    return boundary._replace(gradients=tuple(False for _ in boundary.gradients))


def without_masks() -> Patch:
    return attention, {"causal_lower_right": lambda *_: None}


def unrecorded() -> Patch:
    """Do not record the operations with which DTensor propagates shapes."""
    return propagation_methods(with_values)


def with_short_first_step() -> Patch:
    original = Batching.spans

    def spans(batching: Batching, step: int) -> Spans:
        return original(batching, step)[: batching.assignment.ranks if step == 0 else None]

    return Batching, {"spans": spans}


def without_values() -> Iterator[Patch]:
    # The originals read where documents begin: without values, a row is one document.
    yield Documents, {"by_document": _as_one_document, "earliest_key": partial(_answer, 0)}
    # The script's dataset and `collate` compute with values.
    yield from (_with_values(Fetcher, name) for name in ("__getitem__", "_rows"))
    yield _with_values(StreamFetcher, "__getitem__")
    # Counts the weights of the microbatches.
    yield _with_values(Microbatches, "weigh")
    # Reads the ranks of a mesh as numbers.
    yield DeviceMesh, mesh_methods(with_values)
    # Asks for the value of each microbatch in the whole world, one after another.
    yield FakeTensor, {"tolist": tolist}
    # The original looks in the values of position ids for several texts in one sequence, and
    # without values makes a mask for them.
    if "transformers" in sys.modules:
        masks = import_module("transformers.masking_utils")
        if hasattr(masks, PACKED):
            yield masks, {PACKED: lambda *_, **__: None}
    # The originals read the routers' loads and logits.
    nothing = partial(_answer, None)
    yield ExpertBalance, {"check": nothing, "_check_logits": nothing}
    # The original keeps tensors for later runs, which have values.
    yield loss, {"_constant": loss._constant.__wrapped__}


def marked_backwards(recorder: TraceRecorder) -> Patch:
    release, terms = Step._release, ExpertBalance.terms

    def marked_terms(balance: ExpertBalance, *given: Any) -> Any:
        recorder.mark("microbatch")
        return terms(balance, *given)

    def marked(step: Step, balance: ExpertBalance) -> None:
        recorder.mark(HELD)
        with replaced(ExpertBalance, terms=marked_terms):
            release(step, balance)

    return Step, {"_release": marked}


def _with_values(owner: type, name: str) -> Patch:
    return owner, {name: with_values(getattr(owner, name))}


def with_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` so that it runs outside of the `FakeTensorMode`."""

    def outside(*arguments: Any, **keywords: Any) -> Any:
        with disable_current_modes():
            return function(*arguments, **keywords)

    return outside


def _as_one_document(
    documents: Documents, compute: Callable[..., Tensor], *given: Tensor
) -> Tensor:
    return compute(0, 0, *given)


def _answer(found: Any, *_: Any) -> Any:
    return found


def _routed(skew: float) -> Callable[..., tuple[list[int], list[int], Tensor]]:
    def exchange_counts(
        dispatch: Dispatch, world: World, routing: Routing, index: Tensor | None
    ) -> tuple[list[int], list[int], Tensor]:
        """Route `skew` times the mean number of tokens to the first rank's experts."""
        rows, others = len(routing.order), world.size - 1
        most = min(rows, round(skew * len(contiguous_range(rows, 0, world.size))))
        rest = [len(contiguous_range(rows - most, rank, others)) for rank in range(others)]
        sent = [most, *rest]
        received = [sent[world.rank]] * world.size
        counts = routing.counts.new_zeros(world.size, dispatch.experts.count // world.size)
        world.all_to_all(counts)
        return sent, received, counts

    return exchange_counts


def _own_stages(
    discovery: BoundaryDiscovery,
    forwards: deque[Sequence[Boundary]],
    compute: Callable[[int, tuple[Tensor, ...], Sequence[Boundary]], Any],
    count: int,
) -> tuple[Sequence[Boundary], Any]:
    route, found = forwards.popleft(), None
    for stage in discovery._forwards.own:
        received = route[stage - 1].tensors(discovery.world.device) if stage else ()
        output = compute(stage, received, route[:stage])
        if stage == len(route):
            found = output
    return route, found


def _agree_alone(module: TrainModule, kinds: Sequence[LossKind]) -> None:
    module.forward_knows_weight, module.terms, module.repeats, module.counted = (
        kinds[0] if kinds else LossKind(False, [], 1, {})
    )


def _raise_own(failure: PipelineFailure) -> None:
    if failure.error is not None:
        raise failure.error
