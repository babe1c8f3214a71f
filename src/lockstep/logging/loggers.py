"""Where else a run's numbers go, besides its own files: a small protocol, and the two services that most people ask for."""

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

END_SECONDS = 60.0
"""That a run waits, at its end, for what its loggers have still to say."""


class Logger(Protocol):
    """On rank 0 only, in a thread of its own. What it raises is told once, and it is not called again: training goes on."""

    def start(self, run_dir: Path, facts: Mapping[str, Any]) -> None:
        """Before the first step, also of a run that goes on. `facts`: what run.json says."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """A line of metrics.jsonl; `step`: steps done. Numbers that are not finite are left out."""

    def end(self, result: Mapping[str, Any] | None) -> None:
        """After the run. `result`: what result.json says; None: the run did not come to its end."""


class WandB:
    """Weights & Biases: a run there for the run here, by the name of its directory; one that goes on here goes on there.

    Needs the extra `wandb`. What is given is given to `wandb.init`: project, entity, tags, mode="offline", ...
    """

    def __init__(self, **settings: Any) -> None:
        """Raises `UserError` where it is not installed."""
        _check_installed("wandb", "wandb")
        self._settings = settings
        self._run: Any = None

    def start(self, run_dir: Path, facts: Mapping[str, Any]) -> None:
        import wandb  # type: ignore[import-not-found]

        self._run = wandb.init(
            **{"dir": run_dir, "id": run_dir.name, "name": run_dir.name, "resume": "allow", "config": dict(facts)} | self._settings
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def end(self, result: Mapping[str, Any] | None) -> None:
        if result is not None:
            self._run.summary.update(result)
        self._run.finish(exit_code=0 if result is not None else 1)


class MLflow:
    """MLflow: a run there for the run here, by the name of its directory; one that goes on here goes on there.

    Needs the extra `mlflow`. `tracking_uri` and `experiment`: None is what MLflow has without (MLFLOW_TRACKING_URI, Default).
    """

    def __init__(self, *, experiment: str | None = None, tracking_uri: str | None = None) -> None:
        """Raises `UserError` where it is not installed."""
        _check_installed("mlflow", "mlflow")
        self._experiment = experiment
        self._tracking_uri = tracking_uri
        self._client: Any = None
        self._id = ""

    def start(self, run_dir: Path, facts: Mapping[str, Any]) -> None:
        import mlflow  # type: ignore[import-not-found]

        self._client = mlflow.MlflowClient(tracking_uri=self._tracking_uri)
        name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        place = str(run_dir)
        found = self._client.search_runs([number], filter_string=f"tags.lockstep_run_dir = '{place}'", max_results=1)
        run = found[0] if found else self._client.create_run(number, run_name=run_dir.name, tags={"lockstep_run_dir": place})
        self._id = run.info.run_id
        if not found:
            for key, value in _flat(facts).items():
                self._client.log_param(self._id, key, str(value)[:500])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric  # type: ignore[import-not-found]

        now = int(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[Metric(name, value, now, step) for name, value in values.items()])

    def end(self, result: Mapping[str, Any] | None) -> None:
        if result is not None:
            self._client.set_tag(self._id, "fingerprint", str(result.get("fingerprint")))
        self._client.set_terminated(self._id, "FINISHED" if result is not None else "FAILED")


class Loggers:
    """Calls loggers from a thread of its own, so that training does not wait for a service. Made on one rank; close it."""

    def __init__(self, loggers: Sequence[Logger], run_dir: Path, tell: Callable[[str], None]) -> None:
        """`tell`: called, in that thread, with why a logger is left out from then on."""
        self._live = list(loggers)
        self._run_dir = run_dir
        self._tell = tell
        self._calls: queue.SimpleQueue[Callable[[Logger], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="lockstep-loggers", daemon=True)
        self._thread.start()
        self._result: Mapping[str, Any] | None = None

    def start(self, facts: Mapping[str, Any]) -> None:
        self._calls.put(lambda logger: logger.start(self._run_dir, facts))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        self._calls.put(lambda logger: logger.log(step, finite))

    def end(self, result: Mapping[str, Any]) -> None:
        """The run has come to its end."""
        self._result = result

    def close(self) -> None:
        """Wait for what is left to be said, though not for ever."""
        result = self._result
        self._calls.put(lambda logger: logger.end(result))
        self._calls.put(None)
        self._thread.join(END_SECONDS)
        if self._thread.is_alive():
            names = ", ".join(type(logger).__name__ for logger in self._live)
            self._tell(f"{names} had not taken all of this run {END_SECONDS:.0f} s after its end; the rest is lost there")

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            for logger in list(self._live):
                try:
                    call(logger)
                except Exception as error:  # whatever a service's code raises: it is no reason to end a run
                    self._live.remove(logger)
                    self._tell(f"{type(logger).__name__} takes no more of this run: {type(error).__name__}: {error}")


def _check_installed(module: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise UserError(f"a logger that needs {module}, which is not installed; pip install 'lockstep-train[{extra}]'")


def _flat(facts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The fields of nested mappings, by their paths: recipe.global_batch."""
    found: dict[str, Any] = {}
    for key, value in facts.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found
