"""Watches a loss's calls of torch's cross entropy, and finds means in which labels do not count
equally (class weights, ignored labels). The mean over a batch may then differ from the mean of the
means of its microbatches, because the sum of the labels' weights differs between samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lockstep.comm.torch_collectives import CollectivesRefused

_OPERATIONS = ("nll_loss_forward", "nll_loss2d_forward")
"""The operations that `cross_entropy` and `nll_loss` call, for labels of 1 and of 3 dims."""
_MEAN = 1  # torch's number for reduction="mean"


@dataclass(frozen=True)
class LabelMean:
    """A call of cross entropy that computes a mean over labels, in which not all labels have the
    weight 1."""

    over: str
    """Text for error messages that says which labels the mean is over, or that it has class
    weights."""
    weight: float
    """The sum of the labels' weights in this call, divided by the number of labels."""
    may_differ: bool = True
    """False if the call ignores equally many labels of every sample, such as each row's last
    label."""


@dataclass(eq=False)
class LabelMeans(CollectivesRefused):  # type: ignore[no-untyped-call]
    """A mode that collects, in `found`, the means over labels that cross entropy computes, and
    raises `CollectiveCalled` if a collective is called.

    A mean is collected if its class weights are not all equal, if it ignores labels, or if its
    `ignore_index` is not negative (such as 255 for pixels, or the id of padding), so that it could
    ignore labels.
    """

    samples: int
    """Number of samples in the batch whose loss is computed."""
    found: list[LabelMean] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.overloadpacket.__name__ in _OPERATIONS:
            _, labels, weights, reduction, ignored = args
            if reduction == _MEAN and labels.numel():
                self._note(labels, weights, ignored, float(result[1]))
        return result

    def _note(self, labels: Tensor, weights: Tensor | None, ignored: int, total: float) -> None:
        """Collect one mean, unless all labels count as 1. `ignored`: its `ignore_index`. `total`:
        the sum of the labels' weights."""
        is_ignored = labels == ignored
        if weights is not None and bool((weights != weights[0]).any()):
            self.found.append(LabelMean("class weights", total / labels.numel()))
        elif ignored >= 0 or bool(is_ignored.any()):
            counted = 1 - float(is_ignored.sum()) / labels.numel()
            may_differ = ignored >= 0 or self._differ_between_samples(is_ignored)
            self.found.append(LabelMean(f"labels other than {ignored}", counted, may_differ))

    def _differ_between_samples(self, is_ignored: Tensor) -> bool:
        if is_ignored.numel() % self.samples:
            return True
        counts = is_ignored.reshape(self.samples, -1).sum(1)
        return bool((counts != counts[0]).any())
