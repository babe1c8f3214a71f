"""Optimizers with a training and an evaluation mode, such as schedule-free optimizers (Defazio et
al., 2024). In training mode, the parameters are the point at which the next gradient is computed.
In evaluation mode, the parameters are the weights to use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def has_modes(optimizer: Optimizer) -> bool:
    return callable(getattr(optimizer, "train", None)) and callable(
        getattr(optimizer, "eval", None)
    )


class OptimizerModes:
    """Switches optimizers between training and evaluation mode. After evaluation mode, every
    parameter has the same bits as before."""

    def __init__(self, optimizers: Sequence[Optimizer], held: Mapping[str, nn.Parameter]) -> None:
        self._optimizers = [optimizer for optimizer in optimizers if has_modes(optimizer)]
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        theirs = {id(parameter) for group in groups for parameter in group["params"]}
        self._held = {
            name: parameter for name, parameter in held.items() if id(parameter) in theirs
        }
        self.training_values: dict[str, Tensor] = {}
        """Training-mode values of the parameters while evaluation mode is on. Empty while training
        mode is on."""
        self._groups: dict[int, list[dict[str, Any]]] = {}

    @torch.no_grad()
    def evaluate(self) -> None:
        if not self.training_values:
            self._groups = {
                id(optimizer): [dict(group) for group in optimizer.param_groups]
                for optimizer in self._optimizers
            }
            self.training_values = {
                name: parameter.detach().clone() for name, parameter in self._held.items()
            }
            for optimizer in self._optimizers:
                optimizer.eval()  # type: ignore[attr-defined]  # `has_modes`

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """On exit, restores training mode if the optimizers were in training mode."""
        if self.training_values:
            yield
            return
        self.evaluate()
        try:
            yield
        finally:
            self._train()

    @torch.no_grad()
    def _train(self) -> None:
        for optimizer in self._optimizers:
            optimizer.train()  # type: ignore[attr-defined]  # `has_modes`
        for name, value in self.training_values.items():
            self._held[name].copy_(value)  # `train` would compute it with rounding
        self.training_values, self._groups = {}, {}

    def groups_of(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """Return the parameter groups that the optimizer has in training mode."""
        return self._groups.get(id(optimizer), optimizer.param_groups)
