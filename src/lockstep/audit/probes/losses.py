"""Records torch's loss functions: the number of targets in each call, and the gradient of the final
loss with respect to the call's output. The gradient includes all factors by which the script
multiplies the loss, such as 1 / accumulation_steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.audit.probes.gradients import Gradients
from lockstep.audit.probes.recorder import RecordWriter

CLASSIFICATION = ("cross_entropy", "nll_loss")
ELEMENTS = (
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "gaussian_nll_loss",
    "poisson_nll_loss",
    "soft_margin_loss",
)


class Losses:
    def __init__(self, recorder: RecordWriter, gradients: Gradients) -> None:
        self._recorder, self._gradients = recorder, gradients
        self._waiting: list[dict[str, Any]] = []
        self._depth = 0

    def install(self) -> None:
        for name in (*CLASSIFICATION, *ELEMENTS):
            self._recorder.watch(F, name, partial(self._loss, name), traced=True)

    def take(self) -> list[dict[str, Any]]:
        taken = [each for each in self._waiting if "weight" in each or "weights" in each]
        self._waiting = []
        return taken

    def _loss(
        self, name: str, original: Callable[..., Tensor], *args: Any, **kwargs: Any
    ) -> Tensor:
        self._depth += 1  # cross_entropy may call nll_loss
        try:
            output = original(*args, **kwargs)
        finally:
            self._depth -= 1
        has_gradient = isinstance(output, Tensor) and output.requires_grad
        if not self._depth and torch.is_grad_enabled() and has_gradient:
            self._recorder.safely(self._note, name, output, args, kwargs)
        return output

    def _note(self, name: str, output: Tensor, args: Any, kwargs: Any) -> None:
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        reduction = kwargs.get("reduction", "mean")
        row: dict[str, Any] = {
            "function": name,
            "line": self._recorder.line(),
            "reduction": reduction,
        }
        if isinstance(target, Tensor) and reduction != "none":
            weight = kwargs.get("weight", args[2] if len(args) > 2 else None)
            if name not in CLASSIFICATION or not isinstance(weight, Tensor):
                weight = None
            row["count"] = _count(name, target, weight, kwargs.get("ignore_index", -100))
            row["has_class_weights"] = weight is not None
        self._waiting.append(row)
        hook = partial(self._recorder.safely, lambda gradient: self._weigh(row, gradient))
        output.register_hook(hook)  # type: ignore[no-untyped-call]

    def _weigh(self, row: dict[str, Any], gradient: Tensor) -> None:
        row["backward"] = self._gradients.backward
        if row["reduction"] != "none":
            row["weight"] = float(gradient)
            return
        nonzero = gradient.detach()[gradient != 0].to(torch.float64)
        row["count"] = nonzero.numel()
        row["weights"] = (
            [float(nonzero.min()), float(nonzero.max())] if row["count"] else [0.0, 0.0]
        )


def _count(name: str, target: Tensor, weight: Tensor | None, ignored: int) -> float:
    if name not in CLASSIFICATION:
        return float(target.numel())
    if target.is_floating_point():
        return float(target.shape[0])
    kept = target[target != ignored]
    return float(kept.numel()) if weight is None else float(weight[kept].sum())
