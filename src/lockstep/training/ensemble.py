"""A deep ensemble: several models whose outputs are averaged (Lakshminarayanan et al., 2017,
arXiv:1612.01474)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.base.errors import RecipeError
from lockstep.checkpoint.pretrained_files import open_tensors
from lockstep.recipe.recipe import Weights
from lockstep.training.pretrained import match_tensors
from lockstep.training.state import named_tensors

_EXAMPLE = 'ls.Ensemble(build_model, ["runs/a", "runs/b"]), or ls.Ensemble([model_a, model_b])'


class Ensemble(nn.Module):
    """A model whose output is the mean of the outputs of several models, for evaluation only."""

    def __init__(
        self,
        model: Callable[[], nn.Module] | Sequence[nn.Module],
        runs: Sequence[str | os.PathLike[str]] = (),
        *,
        combine: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        """Build the members.

        - `model`: function that returns a member, as in `Recipe`, together with `runs`. Without
          `runs`, `model` is the list of members.
        - `runs`: for each member, the folder of a run that has ended, or a .safetensors file.
        - `combine`: function of the list of the members' outputs that returns one output. With
          `combine=None`, the output is the mean of each tensor, also in nested tuples, lists and
          mappings.

        Raises `RecipeError`.
        """
        super().__init__()
        if (
            callable(model)
            and not isinstance(model, nn.Module)
            and not isinstance(runs, str | os.PathLike)
            and runs
        ):
            members = [_loaded(model(), os.fspath(run)) for run in runs]
        elif (
            isinstance(model, Sequence)
            and model
            and all(isinstance(each, nn.Module) for each in model)
            and not runs
        ):
            members = list(model)
        else:
            raise RecipeError(
                f"ls.Ensemble({model!r}, {runs!r}); it takes a function and a list of runs, or a"
                f" list of modules: {_EXAMPLE}"
            )
        self.members = nn.ModuleList(members)
        self.combine = combine or _mean
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the combined output of the members. Raises `RecipeError` in training mode."""
        if self.training:
            raise RecipeError(
                "an ls.Ensemble in training mode; it is the mean of models that are already"
                " trained; measure it by ls.evaluate, or call eval(); to continue training, train"
                " each member"
            )
        return self.combine([member(*args, **kwargs) for member in self.members])


def _loaded(model: nn.Module, path: str) -> nn.Module:
    file = Path(path) / "model.safetensors" if Path(path).is_dir() else Path(path)
    if file.exists() and file.suffix != ".safetensors":
        raise RecipeError(
            f"ls.Ensemble has {path!r}; its members are read from runs and .safetensors files; give"
            " one of these, or load the model yourself and give modules"
        )
    with closing(open_tensors(path)) as tensors, torch.no_grad():
        theirs, _ = match_tensors(Weights(path), tensors.specs, model)
        for name, tensor in named_tensors(model, theirs):
            tensor.copy_(tensors.read(theirs[name][0], ()))
    return model


def _mean(outputs: list[Any]) -> Any:
    first = outputs[0]
    if isinstance(first, Tensor) and (first.is_floating_point() or first.is_complex()):
        return torch.stack(outputs).mean(dim=0)
    if isinstance(first, Mapping):
        means = {name: _mean([output[name] for output in outputs]) for name in first}
        return means if type(first) is dict else type(first)(**means)
    if isinstance(first, tuple | list):
        parts = [_mean(list(each)) for each in zip(*outputs, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if all(
        torch.equal(first, output) if isinstance(first, Tensor) else first == output
        for output in outputs
    ):
        return first
    raise RecipeError(
        f"outputs of an ls.Ensemble have a {type(first).__name__} that differs between members; a"
        " mean is of floating-point tensors, in tuples, lists and mappings; give"
        " ls.Ensemble(combine=...), a function from the list of outputs to one output"
    )
