"""Models that start from a file of weights, for the tests of that. At module level, so that workers can be told their names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from training.kept import recipe

import lockstep as ls
from lockstep.comm.mesh import held
from lockstep.errors import RecipeError
from lockstep.training.starting import Start
from lockstep.training.state import tensors_of

GIVEN = recipe()


def theirs() -> nn.Module:
    """The model with other values than a run's seed gives it."""
    torch.manual_seed(7)
    model: nn.Module = GIVEN.model()
    return model


def write(path: Path, state: Mapping[str, Tensor]) -> None:
    save_file({name: tensor.detach().clone() for name, tensor in state.items()}, path)


def started(plan: str, run_dir: str, weights: Any, model: Any = GIVEN.model) -> tuple[str, Any]:
    """The fingerprint of the model after `prepare`, and what the event says; or the error's text."""
    with ls.Session(plan=plan, run_dir=run_dir) as session:
        try:
            made, _ = session.prepare(model, GIVEN.optimizer, stages=GIVEN.stages, tensor=GIVEN.tensor, weights=weights)
        except RecipeError as error:
            return "refused", str(error)
        found = ls.fingerprint(session.mesh.union(made.state_dict()))
        (event,) = [event for event in session.recorder.events.events if event.name == "weights-loaded"]
    return found, event.details


def read_bytes(plan: str, run_dir: str, weights: str) -> tuple[int, int]:
    """What a rank has read of the file, and what it holds of the model."""
    read = 0

    class Counting:
        def __init__(self, inner: Any) -> None:
            self.inner, self.kinds, self.close = inner, inner.kinds, inner.close

        def read(self, name: str, box: Any) -> Tensor:
            nonlocal read
            part: Tensor = self.inner.read(name, box)
            read += part.untyped_storage().nbytes()
            return part

    original = Start.fill
    Start.fill = lambda self, *given: original(Start(self.weights, Counting(self.tensors), self.theirs, self.kept), *given)  # type: ignore[method-assign]
    try:
        with ls.Session(plan=plan, run_dir=run_dir) as session:
            model, _ = session.prepare(GIVEN.model, GIVEN.optimizer, stages=GIVEN.stages, tensor=GIVEN.tensor, weights=weights)
            return read, sum(held(tensor).nbytes for _, tensor in tensors_of(model))
    finally:
        Start.fill = original  # type: ignore[method-assign]


def trained(run_dir: str, at: int | None, weights: Any) -> str:
    """A run from weights."""
    from training.kept import run

    return str(run("replicate=1", run_dir, at, {"weights": weights}))
