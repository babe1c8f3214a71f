"""Finds the means of a loss that are over something else than samples, by its calls of torch's
cross entropy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lockstep.comm.torch_collectives import CollectivesRefused

_OPERATIONS = ("nll_loss_forward", "nll_loss2d_forward")
"""The operations that `cross_entropy` and `nll_loss` call, for labels of 1 and of 3 dims."""
_MEAN = 1  # torch's number for reduction="mean"


@dataclass(frozen=True)
class LabelMean:
    """A mean over labels that do not all count as 1."""

    over: str
    """The labels, or their weights, as text."""
    weight: float
    """The mean weight of a label in this call."""


@dataclass(eq=False)
class LabelMeans(CollectivesRefused):  # type: ignore[no-untyped-call]
    """Collects the means over labels in `found` while the body runs. Refuses collectives too.

    A mean counts if it has class weights, if it ignores some of its labels, or if the label that it
    is told to ignore is not negative: a pixel's 255, the id of padding.
    """

    found: list[LabelMean] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.overloadpacket.__name__ in _OPERATIONS:
            _, labels, weight, reduction, ignored = args
            count = labels.numel()
            if reduction == _MEAN and count:
                total = float(result[1])
                if weight is not None:
                    self.found.append(LabelMean("class weights", total / count))
                elif ignored >= 0 or total < count:
                    self.found.append(LabelMean(f"labels other than {ignored}", total / count))
        return result
