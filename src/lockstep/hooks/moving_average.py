"""The hook that keeps an exponential moving average of the model's parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from lockstep.base.errors import RecipeError
from lockstep.comm.mesh import to_local
from lockstep.training.hook import Hook
from lockstep.training.run import Run


class ExponentialMovingAverage(Hook):
    """Keeps a moving average of the weights (Polyak and Juditsky, 1992). After each step, the
    average becomes decay × average + (1 - decay) × weights. At the end of training, the average and
    the model's buffers are written to `model_average.safetensors` in the run directory."""

    def __init__(self, decay: float = 0.999) -> None:
        """`decay` is the factor of the old average, at least 0 and less than 1. Raises
        `RecipeError`."""
        if not 0 <= decay < 1:
            raise RecipeError(
                f"decay={decay}; it must be the factor of the old average, from 0 to below 1"
            )
        self.decay = decay
        # parameter's name -> its average, sharded like the parameter
        self._averages: dict[str, Tensor] = {}

    def on_start(self, run: Run) -> None:
        self._averages = {
            name: parameter.detach().clone() for name, parameter in run.model.named_parameters()
        }

    def after_step(self, run: Run) -> None:
        torch._foreach_lerp_(self._local_averages(), _local_parameters(run), 1 - self.decay)

    def state_dict(self) -> dict[str, Tensor]:
        return self._averages

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, average in self._averages.items():
            average.copy_(state[name])

    def on_finish(self, run: Run) -> None:
        with self.applied(run):
            run.context.recorder.save_tensors(
                "model_average.safetensors", run.training.modules[0].model_state()
            )

    @contextmanager
    def applied(self, run: Run) -> Iterator[None]:
        """A context in which the model's parameters have their averaged values."""
        parts = _local_parameters(run)
        own = [part.clone() for part in parts]
        torch._foreach_copy_(parts, self._local_averages())
        try:
            yield
        finally:
            torch._foreach_copy_(parts, own)

    def _local_averages(self) -> list[Tensor]:
        return [to_local(average) for average in self._averages.values()]


def _local_parameters(run: Run) -> list[Tensor]:
    return [to_local(parameter.detach()) for parameter in run.model.parameters()]
