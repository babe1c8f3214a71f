"""Finds means over labels in a loss's calls of torch's cross entropy. With class weights or ignored
labels, labels do not count equally. The mean over a batch may differ from the mean over its
microbatches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lockstep.base.torch_private import MEAN_REDUCTION
from lockstep.comm.torch_collectives import CollectivesRefused
from lockstep.training.loss import is_even_over_samples

_OPERATIONS = ("nll_loss_forward", "nll_loss2d_forward")
"""Operations of cross entropy, for labels with 1 and with 3 dims."""


@dataclass(frozen=True)
class LabelMean:
    over: str
    weight: float
    """Sum of the labels' weights divided by the number of labels."""
    may_differ: bool = True
    """False if every sample has the same number of ignored labels, such as the last label of each
    row."""


@dataclass(eq=False)
class LabelMeans(CollectivesRefused):  # type: ignore[no-untyped-call]
    """Collects the means over labels that cross entropy computes with unequal class weights, or
    with an ignored index. Raises `CollectiveCalled` if a collective is called."""

    samples: int
    found: list[LabelMean] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.overloadpacket.__name__ in _OPERATIONS:
            _, labels, weights, reduction, ignored = args
            if reduction == MEAN_REDUCTION and labels.numel():
                self._note(labels, weights, ignored, float(result[1]))
        return result

    def _note(self, labels: Tensor, weights: Tensor | None, ignored: int, total: float) -> None:
        is_ignored = labels == ignored
        if weights is not None and bool((weights != weights[0]).any()):
            self.found.append(LabelMean("class weights", total / labels.numel()))
        elif ignored >= 0 or bool(is_ignored.any()):
            counted = 1 - float(is_ignored.sum()) / labels.numel()
            may_differ = ignored >= 0 or not is_even_over_samples(is_ignored, self.samples)
            self.found.append(LabelMean(f"labels other than {ignored}", counted, may_differ))
