"""Models that start from a file of weights, for the tests of that. At module level, so that workers
can be told their names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from training.kept import recipe, run

import lockstep as ls
from lockstep.base.errors import RecipeError
from lockstep.checkpoint import pretrained_files
from lockstep.comm.mesh import to_local
from lockstep.model.initialization.deferred_init import DeferredModel
from lockstep.training import pretrained as starting
from lockstep.training.pretrained import PretrainedWeights
from lockstep.training.state import aliases, named_tensors

GIVEN = recipe()


def theirs() -> nn.Module:
    """The model with other values than a run's seed gives it."""
    torch.manual_seed(7)
    model: nn.Module = GIVEN.model()
    return model


def write(path: Path, state: Mapping[str, Tensor]) -> None:
    save_file({name: tensor.detach().clone() for name, tensor in state.items()}, path)


def started(plan: str, run_dir: str, weights: Any, model: Any = GIVEN.model) -> tuple[str, Any]:
    """The fingerprint of the model after `prepare`, and what the event says; or the error's
    text."""
    with ls.Session(plan=plan, run_dir=run_dir) as session:
        try:
            made, _ = session.prepare(
                model, GIVEN.optimizer, stages=GIVEN.stages, tensor=GIVEN.tensor, weights=weights
            )
        except RecipeError as error:
            return "refused", str(error)
        found = ls.fingerprint(session.context.mesh.union(made.state_dict()))
        (event,) = [
            event
            for event in session.context.recorder.events.events
            if event.name == "weights-loaded"
        ]
    return found, event.details


def read_bytes(plan: str, run_dir: str, weights: Any) -> tuple[int, int]:
    """What a rank has read of the file, and what it holds of the model."""
    read = 0

    class Counting:
        def __init__(self, inner: Any) -> None:
            self.inner, self.specs, self.close = inner, inner.specs, inner.close

        def read(self, name: str, box: Any) -> Tensor:
            nonlocal read
            part: Tensor = self.inner.read(name, box)
            read += part.nbytes
            return part

    original = PretrainedWeights.fill
    PretrainedWeights.fill = lambda self, *given: original(  # type: ignore[method-assign]
        PretrainedWeights(self.weights, Counting(self.tensors), self.theirs, self.kept), *given
    )
    try:
        with ls.Session(plan=plan, run_dir=run_dir) as session:
            model, _ = session.prepare(
                GIVEN.model,
                GIVEN.optimizer,
                stages=GIVEN.stages,
                tensor=GIVEN.tensor,
                weights=weights,
            )
            return read, sum(to_local(tensor).nbytes for _, tensor in named_tensors(model))
    finally:
        PretrainedWeights.fill = original  # type: ignore[method-assign]


def computed(plan: str, run_dir: str, weights: Any) -> list[str]:
    """The names of the parameters and buffers whose initial values a rank has computed."""
    names = []
    original = DeferredModel.materialize

    def noting(self: DeferredModel, tensor: Tensor) -> Tensor:
        names.append(self.names[id(tensor)])
        return original(self, tensor)

    DeferredModel.materialize = noting  # type: ignore[method-assign,assignment]
    try:
        started(plan, run_dir, weights)
    finally:
        DeferredModel.materialize = original  # type: ignore[method-assign]
    return names


def values(run_dir: str) -> dict[str, Tensor]:
    """What the factory gives."""
    with ls.Session(run_dir=run_dir) as session:
        model, _ = session.prepare(GIVEN.model, GIVEN.optimizer)
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def tied() -> list[str]:
    """The two names of the model's tied parameter."""
    ((other, first),) = aliases(theirs()).items()
    return [first, other]


def started_apart(plan: str, run_dir: str, folder: str, other: int) -> tuple[str, Any]:
    """As `started`, rank 1 from another file under the same path."""
    opened = pretrained_files.open_tensors
    file = other if os.environ["RANK"] == "1" else 0
    starting.open_tensors = lambda _: opened(f"{folder}/{file}.safetensors")  # type: ignore[attr-defined]
    try:
        return started(
            plan,
            run_dir,
            (
                ls.Weights("weights.safetensors", {"more": None})
                if other == 2 and file
                else "weights.safetensors"
            ),
        )
    finally:
        starting.open_tensors = opened  # type: ignore[attr-defined]


def started_each(plan: str, run_dir: str, given: Sequence[Any]) -> list[tuple[str, Any]]:
    return [started(plan, f"{run_dir}/{place}", each) for place, each in enumerate(given)]


def computed_each(plan: str, run_dir: str, given: Sequence[Any]) -> list[list[str]]:
    return [computed(plan, f"{run_dir}/{place}", each) for place, each in enumerate(given)]


def trained_each(run_dir: str, given: Sequence[tuple[str, int | None, Any]]) -> list[str]:
    """Runs in folders from weights, each asked to end after so many steps."""
    return [
        str(run("replicate=1", f"{run_dir}/{name}", at, {"weights": weights}))
        for name, at, weights in given
    ]
