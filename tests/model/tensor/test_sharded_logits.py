"""Logits whose classes are cut over two ranks: whatever a loss does with them, it gets the numbers
and gradients of whole ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from model.tensor.models import mesh_of
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F

from lockstep.base.errors import LossError
from lockstep.model.tensor.sharded_logits import ShardedLogits, as_sharded_logits
from lockstep.testing.pool import WorkerPool

CLASSES = 6


def targets() -> Tensor:
    labels = torch.arange(12).view(3, 4) % CLASSES
    labels[1, 2:] = -100
    return labels


def entropy(logits: Tensor) -> Tensor:
    return -(F.softmax(logits, -1) * F.log_softmax(logits, -1)).sum()


def shifted(logits: Tensor) -> Tensor:
    """As transformers' models do."""
    ahead = logits[..., :-1, :].contiguous().float()
    return F.cross_entropy(ahead.view(-1, CLASSES), targets()[:, 1:].flatten(), ignore_index=-100)


def unlikely(logits: Tensor) -> Tensor:
    """Of classes that a mask has ruled out."""
    return F.cross_entropy(
        torch.where(torch.arange(CLASSES) == 4, -torch.inf, logits).flatten(0, 1),
        targets().flatten() % 4,
    )


ON_PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda logits: F.cross_entropy(
        logits.flatten(0, 1), targets().flatten(), reduction="sum"
    ),
    "mean": lambda logits: F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), targets().flatten()
    ),
    "each": (
        lambda logits: (
            F.cross_entropy(logits.view(-1, logits.size(-1)), targets().flatten(), reduction="none")
            .square()
            .sum()
        )
    ),
    "classes in dim 1": lambda logits: F.cross_entropy(
        logits.transpose(1, 2), targets() % 5, ignore_index=3
    ),
    "shifted": shifted,
}
WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "smoothed labels": lambda logits: F.cross_entropy(
        logits.flatten(0, 1), targets().flatten(), label_smoothing=0.1
    ),
    "weighted classes": lambda logits: F.cross_entropy(
        logits.flatten(0, 1), targets().flatten(), torch.arange(6.0)
    ),
    "probabilities": lambda logits: F.cross_entropy(
        logits.flatten(0, 1), torch.eye(CLASSES).repeat(2, 1)
    ),
    "entropy": entropy,
    "a mask": lambda logits: logits[targets() >= 0].square().sum(),
    "a list of places": lambda logits: logits[[0, 2]].square().sum(),
    "some classes": lambda logits: logits[..., 1:4].square().sum(),
    "several": lambda logits: torch.stack([logits, logits * 2]).logsumexp(-1).sum(),
    "classes ruled out": unlikely,
}


def measured(function: Callable[[Tensor], Tensor], *, cut: bool) -> tuple[Tensor, Tensor, bool]:
    """A value, its gradient, and whether the logits were gathered for it."""
    whole = torch.randn(3, 4, CLASSES, generator=torch.Generator().manual_seed(1)) * 5
    whole.requires_grad_()
    given: Tensor = whole
    if cut:
        mesh = mesh_of(tensor=2).torch_mesh
        assert mesh is not None
        given = as_sharded_logits(
            DTensor.from_local(whole, mesh, [Replicate()]).redistribute(placements=[Shard(2)])
        )
        assert isinstance(given, ShardedLogits)
    with CommDebugMode() as sent:  # type: ignore[no-untyped-call]
        value = function(given)
    assert type(value) is Tensor
    (gradient,) = torch.autograd.grad(value, whole)
    return (
        value.detach(),
        gradient,
        any("gather" in str(operation) for operation in sent.get_comm_counts()),
    )


def everything(names: list[str], cut: bool) -> list[tuple[Tensor, Tensor, bool]]:
    return [measured({**ON_PARTS, **WHOLE}[name], cut=cut) for name in names]


def test_a_loss_of_cut_logits_is_that_of_whole_ones(pool: WorkerPool) -> None:
    names = [*ON_PARTS, *WHOLE]
    expected = everything(names, cut=False)
    for found in pool.run(2, everything, names, True):
        for name, (value, gradient, gathered), (truth, slope, _) in zip(
            names, found, expected, strict=True
        ):
            torch.testing.assert_close(value, truth, msg=name)
            torch.testing.assert_close(gradient, slope, msg=name)
            assert not (gathered and name in ON_PARTS), name


def refused(what: str) -> Any:
    mesh = mesh_of(tensor=2).torch_mesh
    assert mesh is not None
    logits = as_sharded_logits(
        distribute_tensor(torch.zeros(3, CLASSES), mesh, [Shard(1)], src_data_rank=None)
    )
    if what == "in place":
        logits /= 2
    F.cross_entropy(logits, torch.tensor([0, 1, CLASSES]))


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        (
            "in place",
            LossError,
            (
                r"Tensor.div_ changes logits in place .* or give the output layer the style"
                r" 'vocabulary'"
            ),
        ),
        ("a target", Exception, "a target of the cross entropy is not one of its 6 classes"),
    ],
)
def test_what_cannot_be_is_refused(
    pool: WorkerPool, what: str, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        pool.run(2, refused, what)
