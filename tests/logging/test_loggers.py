"""Where else a run's numbers go."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import run_files
from training.subjects import recipe, rows

import lockstep as ls
from lockstep.base.errors import UserError
from lockstep.logging.loggers import Loggers
from lockstep.testing.pool import WorkerPool


class Notes:
    """A logger that keeps what it is told; it may fail, or take its time."""

    def __init__(self, *, fails_at: str = "", waits_for: threading.Event | None = None) -> None:
        self.said: list[Any] = []
        self._fails_at = fails_at
        self._waits_for = waits_for

    def _say(self, what: str, *more: Any) -> None:
        if self._waits_for is not None:
            self._waits_for.wait(10)
        if what == self._fails_at:
            raise ConnectionError("gone away")
        self.said.append((what, *more))

    def start(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        self._say("start", run_dir.name, config["plan"]["text"])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._say("log", step, dict(values))

    def end(self, result: Mapping[str, Any] | None) -> None:
        self._say("end", None if result is None else result["steps"])


def test_a_logger_is_told_what_the_files_say(tmp_path: Path) -> None:
    notes = Notes()
    given = recipe(steps=4, evaluation=ls.Evaluation(data=rows(8), every=2))
    ls.train(given, run_dir=str(tmp_path / "run"), loggers=[notes], log_every=1)
    assert notes.said[0] == ("start", "run", "replicate=1,numerics=fast")
    assert notes.said[-1] == ("end", 4)
    lines = run_files.metrics(tmp_path / "run")
    for line, (what, step, values) in zip(lines, notes.said[1:-1], strict=True):
        assert (what, step) == ("log", line["step"])
        assert {name: line[name] for name in values} == pytest.approx(values)
        assert values.keys() == line.keys() - {"step", "time", "gradient_checksum"}


def test_a_run_that_fails_has_no_result(tmp_path: Path) -> None:
    notes = Notes()

    def loss(model: Any, batch: Any) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ls.train(recipe(loss=loss), run_dir=str(tmp_path / "run"), loggers=[notes])
    assert notes.said[-1] == ("end", None)


@pytest.mark.parametrize("fails_at", ["start", "log", "end"])
def test_a_logger_that_fails_is_told_once_and_training_goes_on(
    tmp_path: Path, fails_at: str, capfd: pytest.CaptureFixture[str]
) -> None:
    bad, good = Notes(fails_at=fails_at), Notes()
    result = ls.train(
        recipe(steps=4), run_dir=str(tmp_path / "run"), loggers=[bad, good], log_every=1
    )
    assert result.steps == 4
    assert [what for what, *_ in good.said] == ["start", *["log"] * 4, "end"]
    assert (
        capfd.readouterr().err.count(
            "warning: Notes is dropped for the rest of this run: ConnectionError: gone away\n"
        )
        == 1
    )
    if fails_at != "end":  # which comes after the log of events is closed
        events = run_files.events(tmp_path / "run")
        (failed,) = [event for event in events if event["event"] == "logger-failed"]
        assert (
            failed["reason"]
            == "Notes is dropped for the rest of this run: ConnectionError: gone away"
        )


def test_training_does_not_wait_for_a_logger(tmp_path: Path) -> None:
    goes_on = threading.Event()
    notes = Notes(waits_for=goes_on)

    class Release(ls.Hook):
        def on_finish(self, run: Any) -> None:
            assert not notes.said
            goes_on.set()

    ls.train(
        recipe(steps=4),
        run_dir=str(tmp_path / "run"),
        loggers=[notes],
        hooks=[Release()],
        log_every=1,
    )
    assert len(notes.said) == 6


def test_a_logger_that_does_not_come_to_an_end_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lockstep.logging.loggers.CLOSE_TIMEOUT_SECONDS", 0.2)
    never = threading.Event()
    ls.train(recipe(steps=2), run_dir=str(tmp_path / "run"), loggers=[Notes(waits_for=never)])
    assert (
        "Notes did not finish within 0 s after the end of the run; they lack the rest of it"
        in capfd.readouterr().err
    )
    never.set()


def told(run_dir: str) -> int:
    notes = Notes()
    ls.train(recipe(steps=2), run_dir=run_dir, loggers=[notes])
    return len(notes.said)


def test_rank_0_alone_logs(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(2, told, str(tmp_path / "run")) == [3, 0]


def test_what_is_not_finite_is_left_out(tmp_path: Path) -> None:
    notes = Notes()
    loggers = Loggers([notes], tmp_path, lambda text: None)
    loggers.log(3, {"loss": float("nan"), "lr": 0.5})
    loggers.close()
    assert notes.said[0] == ("log", 3, {"lr": 0.5})


@pytest.mark.parametrize(("kind", "module"), [(ls.WandB, "wandb"), (ls.MLflow, "mlflow")])
def test_a_service_without_its_package_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, kind: Any, module: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        UserError,
        match=rf"needs {module}, which is not installed; pip install 'lockstep-train\[{module}\]'",
    ):
        kind()
