"""Loggers that send a run's metrics to a service: a protocol, Weights & Biases, and MLflow."""

from __future__ import annotations

import importlib.util
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from lockstep.base.errors import UserError

CLOSE_TIMEOUT_SECONDS = 60.0


class Logger(Protocol):
    """A service that receives metrics. The methods of a logger are called on rank 0, in a separate
    thread. If a method raises, training continues without the logger, after one warning."""

    def start(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        """Called before the first step, also after a resume. `config` is the content of
        run.json."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Called for each line of metrics.jsonl, with finite values. `step` is the number of steps
        done."""

    def end(self, result: Mapping[str, Any] | None) -> None:
        """Called after the run. `result` is the content of result.json. None if the run failed or
        was preempted."""


class WandB:
    """Logger for Weights & Biases. The W&B run is named after the run directory, and is resumed
    with the lockstep run. Needs the extra `wandb`. Takes the arguments of `wandb.init`: project,
    entity, tags, mode="offline", ..."""

    def __init__(self, **settings: Any) -> None:
        """Raises `UserError` if the package is not installed."""
        _check_installed("wandb")
        self._settings = settings
        self._run: Any = None

    def start(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        import wandb  # type: ignore[import-not-found]

        name = run_dir.name
        usual = {"dir": run_dir, "id": name, "name": name, "resume": "allow"}
        self._run = wandb.init(**{**usual, "config": dict(config), **self._settings})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def end(self, result: Mapping[str, Any] | None) -> None:
        if result is not None:
            self._run.summary.update(result)
        self._run.finish(exit_code=0 if result is not None else 1)


class MLflow:
    """Logger for MLflow. The MLflow run is named after the run directory, and is resumed with the
    lockstep run. Needs the extra `mlflow`. `tracking_uri` and `experiment` default to MLflow's
    defaults (MLFLOW_TRACKING_URI, and the experiment MLFLOW_EXPERIMENT_NAME or "Default")."""

    def __init__(self, *, experiment: str | None = None, tracking_uri: str | None = None) -> None:
        """Raises `UserError` if the package is not installed."""
        _check_installed("mlflow")
        self._experiment = experiment
        self._tracking_uri = tracking_uri
        self._client: Any = None
        self._id = ""

    def start(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        import mlflow  # type: ignore[import-not-found]

        self._client = mlflow.MlflowClient(tracking_uri=self._tracking_uri)
        name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        experiment = self._client.get_experiment_by_name(name)
        number = experiment and experiment.experiment_id
        if experiment is None:
            number = self._client.create_experiment(name)
        query = f"tags.lockstep_run_dir = '{run_dir}'"
        for run in self._client.search_runs([number], filter_string=query, max_results=1):
            self._id = run.info.run_id
            return
        tags = {"lockstep_run_dir": str(run_dir)}
        run = self._client.create_run(number, run_name=run_dir.name, tags=tags)
        self._id = run.info.run_id
        for key, value in _flatten(config).items():
            self._client.log_param(self._id, key, str(value)[:500])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric  # type: ignore[import-not-found]

        now = int(time.time() * 1000)
        self._client.log_batch(
            self._id, metrics=[Metric(name, value, now, step) for name, value in values.items()]
        )

    def end(self, result: Mapping[str, Any] | None) -> None:
        if result is not None:
            self._client.set_tag(self._id, "fingerprint", str(result.get("fingerprint")))
        self._client.set_terminated(self._id, "FINISHED" if result is not None else "FAILED")


class Loggers:
    """Calls the loggers in a thread, so that training does not wait."""

    def __init__(
        self, loggers: Sequence[Logger], run_dir: Path, warn: Callable[[str], None]
    ) -> None:
        """`warn` is called in the loggers' thread when a logger is dropped."""
        self._live = list(loggers)
        self._run_dir = run_dir
        self._warn = warn
        self._calls: queue.SimpleQueue[Callable[[Logger], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="lockstep-loggers", daemon=True)
        self._thread.start()
        self._result: Mapping[str, Any] | None = None

    def start(self, config: Mapping[str, Any]) -> None:
        self._calls.put(lambda logger: logger.start(self._run_dir, config))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        self._calls.put(lambda logger: logger.log(step, finite))

    def end(self, result: Mapping[str, Any]) -> None:
        self._result = result

    def close(self) -> None:
        result = self._result
        self._calls.put(lambda logger: logger.end(result))
        self._calls.put(None)
        self._thread.join(CLOSE_TIMEOUT_SECONDS)
        if self._thread.is_alive():
            names = ", ".join(type(logger).__name__ for logger in self._live)
            self._warn(
                f"{names} did not finish within {CLOSE_TIMEOUT_SECONDS:.0f} s after the end of the"
                " run; they lack the rest of it"
            )

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            for logger in list(self._live):
                try:
                    call(logger)
                except Exception as error:  # a failing service must not end the run
                    self._live.remove(logger)
                    self._warn(
                        f"{type(logger).__name__} is dropped for the rest of this run:"
                        f" {type(error).__name__}: {error}"
                    )


def _check_installed(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"a logger that needs {package}, which is not installed; pip install"
            f" 'lockstep-train[{package}]'"
        )


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            fields |= _flatten(value, f"{prefix}{key}.")
        else:
            fields[f"{prefix}{key}"] = value
    return fields
