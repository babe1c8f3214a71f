"""Faults of libraries that divide experts over ranks, planted in lockstep itself. Each is a context
in which training has the fault if `expert` has several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import lockstep as ls
from lockstep.comm.mesh import full_tensor, to_local
from lockstep.model.context import cut
from lockstep.model.expert import dispatch, divide
from lockstep.model.expert.dispatch import Dispatch
from lockstep.training.balance import ExpertBalance
from lockstep.training.optim.gradient_norm import GradientNorm
from lockstep.training.reducers.post_backward import PostBackwardReducer

ROWS = 2
"""Rows that an expert with a capacity computes."""


def replaced(owner: Any, name: str, made: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Replace a function. `made`: gets the original before the arguments."""
    original = getattr(owner, name)
    return patch.object(owner, name, lambda *given, **named: made(original, *given, **named))


@contextmanager
def unproved(owner: Any, name: str, made: Callable[..., Any]) -> Iterator[None]:
    """Replace a function whose fault the proofs of the first forward would find."""

    def not_proved(compute: Any, layout: Any, *_: Any) -> Any:
        return compute(layout, lambda _: nullcontext())

    without = (
        patch.object(Dispatch, "_prove", lambda *_: None),
        patch.object(cut, "prove", not_proved),
    )
    with without[0], without[1], replaced(owner, name, made):
        yield


def scaled(
    power: int, original: Any, reducer: PostBackwardReducer, *given: Any, **named: Any
) -> Any:
    """Experts' gradients times a power of the number of ranks (pytorch #160285)."""
    stats = original(reducer, *given, **named)
    for place in reducer._expert_places:
        gradient = reducer._parameters[place].grad
        assert gradient is not None
        gradient.mul_(float(reducer._numbers.size) ** power)
    return stats


def scaled_on_a_rank(original: Any, reducer: PostBackwardReducer, *given: Any, **named: Any) -> Any:
    return scaled(0 if reducer._rank == 0 else -1, original, reducer, *given, **named)


def dense_not_summed(original: Any, reducer: PostBackwardReducer, *given: Any, **named: Any) -> Any:
    """Gradients of dense parameters are summed over the data ranks without `expert`."""
    own = {
        place: parameter.grad.clone()
        for place, parameter in enumerate(reducer._parameters)
        if parameter.grad is not None and place not in reducer._expert_places
    }
    stats = original(reducer, *given, **named)
    for place, gradient in own.items():
        reducer._parameters[place].grad = gradient
    return stats


def dummies_discarded(original: Any, reducer: Any, *given: Any, **named: Any) -> None:
    """The gradients of experts in a rank's dummies are discarded, and with them the rows of other
    ranks' microbatches."""
    original(reducer, *given, **named)
    reducer._expert_places = []


def norm_of_own(_: Any, norm: GradientNorm, gradients: list[Tensor]) -> float:
    """Experts of other ranks are missing (Megatron-LM PR #5916, DeepSpeed PR #8478)."""
    return float(torch.stack([to_local(each).norm() for each in gradients]).norm())


def norm_of_dense(_: Any, norm: GradientNorm, gradients: list[Tensor]) -> float:
    dense = [each.norm() for each in gradients if to_local(each) is each]
    return float(torch.stack(dense).norm())


def detached(original: Any, *given: Any, **named: Any) -> Any:
    """The router's weights have no gradient where rows are combined."""
    *first, weights = given
    return original(*first, weights.detach(), **named)


def halved(original: Any, *given: Any, **named: Any) -> Any:
    """Half of the router's gradient is lost."""
    *first, weights = given
    return original(*first, 0.5 * (weights + weights.detach()), **named)


def rolled(original: Any, *given: Any, **named: Any) -> Any:
    """Each token gets the output of the token before."""
    return original(*given, **named).roll(1, 0)


def unsorted_wrongly(original: Any, rows: Tensor, order: Tensor, pairs: int) -> Tensor:
    """Rows that came back are sorted once more, instead of back into the order of pairs."""
    return original(rows, order, pairs) if len(order) < pairs else rows[order]


def over_capacity(
    original: Any, module: Dispatch, parameters: Any, rows: Tensor, local: Tensor, *given: Any
) -> Any:
    """An expert of rank 1 computes its first rows only."""
    output = original(module, parameters, rows, local, *given)
    mine = local[:, 0] == 0
    dropped = mine & (mine.cumsum(0) > ROWS) & (module.world.rank == 1)
    return output.masked_fill(dropped[:, None], 0.0)


def shrunken(original: Any, balance: ExpertBalance, routed: Any) -> Any:
    """The balance loss is divided by the number of ranks (NeMo Automodel PR #1412)."""
    return original(balance, routed) / balance._mesh.world.size


def alike(original: Any, module: Any, mesh: Any, placement_of: Any) -> None:
    """Each rank draws its experts from the same seed."""
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            first = parameter.chunk(mesh.size())[0]
            parameter.copy_(torch.cat([first] * mesh.size()))
    original(module, mesh, placement_of)


class OtherRanksState(ls.Hook):
    """After a resume, the optimizer has the state of another rank's experts."""

    def before_step(self, run: Any) -> None:
        module, mesh = run.training.modules[0], run.context.mesh
        if run.step == 1 and mesh.axis("expert").size > 1:
            for parameter in filter(mesh.is_expert, module.parameters):
                for value in module.optimizers[0].state[parameter].values():
                    parts = full_tensor(value).chunk(mesh.axis("expert").size)
                    to_local(value).copy_(parts[mesh.axis("expert").rank - 1])


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "expert gradients times N": lambda: replaced(PostBackwardReducer, "reduce", partial(scaled, 1)),
    "expert gradients averaged": lambda: replaced(
        PostBackwardReducer, "reduce", partial(scaled, -1)
    ),
    "averaged on a rank": lambda: replaced(PostBackwardReducer, "reduce", scaled_on_a_rank),
    "dense gradients not summed": lambda: replaced(PostBackwardReducer, "reduce", dense_not_summed),
    "dummies discarded": lambda: replaced(PostBackwardReducer, "__init__", dummies_discarded),
    "norm of own experts": lambda: replaced(GradientNorm, "of", norm_of_own),
    "norm without experts": lambda: replaced(GradientNorm, "of", norm_of_dense),
    "router detached": lambda: unproved(Dispatch, "_dispatched", detached),
    "router in part": lambda: unproved(Dispatch, "_dispatched", halved),
    "rows of another token": lambda: unproved(Dispatch, "_dispatched", rolled),
    "rows unsorted wrongly": lambda: unproved(dispatch, "_unsorted", unsorted_wrongly),
    "rows over capacity": lambda: unproved(Dispatch, "_computed", over_capacity),
    "balance shrinks": lambda: replaced(ExpertBalance, "_balance_term", shrunken),
    "experts alike": lambda: replaced(divide, "place_parameters", alike),
}
