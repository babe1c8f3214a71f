"""lockstep: train a PyTorch model on any number of processes, get the same model, and prove it.

Names are loaded at their first use, so `import lockstep` is fast and does not import torch.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lockstep.base import errors as errors
from lockstep.base.cublas import set_workspace
from lockstep.base.errors import install_excepthook
from lockstep.base.garbage import collector_paused
from lockstep.base.version import __version__ as __version__

if TYPE_CHECKING:
    from lockstep.cli.export import export_pretrained as export_pretrained, load as load
    from lockstep.data import samplers as samplers
    from lockstep.data.packing import pack as pack
    from lockstep.evaluation import evaluate as evaluate
    from lockstep.hooks.early_stopping import EarlyStopping as EarlyStopping
    from lockstep.hooks.moving_average import ExponentialMovingAverage as ExponentialMovingAverage
    from lockstep.launch.spawn import spawn as spawn
    from lockstep.logging.fingerprint import fingerprint as fingerprint
    from lockstep.logging.loggers import MLflow as MLflow, WandB as WandB
    from lockstep.plan import Plan as Plan
    from lockstep.ranks import once as once, rank as rank
    from lockstep.recipe.balance import Balance as Balance
    from lockstep.recipe.data import Stream as Stream
    from lockstep.recipe.parameters import param as param
    from lockstep.recipe.recipe import (
        Evaluation as Evaluation,
        Gathered as Gathered,
        Loss as Loss,
        Mean as Mean,
        Recipe as Recipe,
        Sum as Sum,
        Weights as Weights,
    )
    from lockstep.recipe.sequence import Sequence as Sequence
    from lockstep.recipe_session import Result as Result
    from lockstep.run import train as train
    from lockstep.saving import Saving as Saving
    from lockstep.schedule import warmup_cosine as warmup_cosine
    from lockstep.session import Session as Session
    from lockstep.training.ensemble import Ensemble as Ensemble
    from lockstep.training.hook import Hook as Hook
    from lockstep.training.optim.schedule import OnMetric as OnMetric

_HOME = {
    "Balance": "lockstep.recipe.balance",
    "EarlyStopping": "lockstep.hooks.early_stopping",
    "Ensemble": "lockstep.training.ensemble",
    "Evaluation": "lockstep.recipe.recipe",
    "ExponentialMovingAverage": "lockstep.hooks.moving_average",
    "Gathered": "lockstep.recipe.recipe",
    "Hook": "lockstep.training.hook",
    "Loss": "lockstep.recipe.recipe",
    "MLflow": "lockstep.logging.loggers",
    "Mean": "lockstep.recipe.recipe",
    "OnMetric": "lockstep.training.optim.schedule",
    "Plan": "lockstep.plan",
    "Recipe": "lockstep.recipe.recipe",
    "Result": "lockstep.recipe_session",
    "Saving": "lockstep.saving",
    "Sequence": "lockstep.recipe.sequence",
    "Session": "lockstep.session",
    "Stream": "lockstep.recipe.data",
    "Sum": "lockstep.recipe.recipe",
    "WandB": "lockstep.logging.loggers",
    "Weights": "lockstep.recipe.recipe",
    "evaluate": "lockstep.evaluation",
    "export_pretrained": "lockstep.cli.export",
    "fingerprint": "lockstep.logging.fingerprint",
    "load": "lockstep.cli.export",
    "once": "lockstep.ranks",
    "pack": "lockstep.data.packing",
    "param": "lockstep.recipe.parameters",
    "rank": "lockstep.ranks",
    "spawn": "lockstep.launch.spawn",
    "train": "lockstep.run",
    "warmup_cosine": "lockstep.schedule",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name == "samplers":
        return import_module("lockstep.data.samplers")
    if name == "errors":
        return import_module("lockstep.base.errors")
    if name not in _HOME:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    with collector_paused():
        value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__", "errors", "samplers"]


install_excepthook()
set_workspace(os.environ)
