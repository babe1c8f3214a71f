from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.base.errors import RunDirectoryError, UserError, cannot_write, say
from lockstep.base.events import Event, EventLog
from lockstep.base.notebook import progress_stream
from lockstep.comm.agreed_errors import on_rank_0
from lockstep.comm.mesh import full_tensor
from lockstep.comm.world import World
from lockstep.logging.loggers import Logger, Loggers
from lockstep.logging.metrics import MetricsLog
from lockstep.logging.progress import Progress
from lockstep.logging.run_directory import (
    Holder,
    RunDirectory,
    describe_environment,
    is_followed,
    note_followed,
)
from lockstep.logging.run_files import RESERVED_NAMES, default_run_path, numbered
from lockstep.plan import Plan
from lockstep.saving import Resume

ROW_NAMES = RESERVED_NAMES | {
    *("loss", "lr", "gradient_norm", "samples_per_second", "weight_per_second"),
    *("memory_bytes", "mfu"),
}
"""Keys that lockstep writes in each line of metrics.jsonl."""
_runs_in_launched = 0
_opened: list[Path] = []
_goes_through_again = False
"""True after this process has opened an ended run that the script repeats on the way to a later
run."""


class Recorder:
    """A run directory, its logs and the progress display. Every rank creates a `Recorder` at the
    same time. Only rank 0 writes."""

    def __init__(
        self,
        run_dir: str | None,
        world: World,
        *,
        resume: Resume,
        launched: str | None,
        loggers: Sequence[Logger] = (),
        extend: bool = False,
        restarted: bool = False,
        again: bool = False,
        lost_holders: Sequence[Holder] = (),
        check_ended: Callable[[Mapping[str, Any]], None] = lambda recorded: None,
    ) -> None:
        """Raises on every rank if rank 0 cannot use the directory, or if a machine does not have
        it. The second run of a process is in `launched`-2, and so on.

        An ended run is resumed at its last checkpoint if the script repeats the run on the way to a
        later run. A script repeats a run in three cases: the launcher has `restarted` this process,
        an earlier process continued after the ended run, or this process has passed an ended run
        before. `check_ended` gets the run.json of an ended run, and raises `UserError` if the
        recipe has changed. `again` is True if this process has opened the run before. Rank 0 takes
        over the directory from `lost_holders`.
        """
        global _runs_in_launched
        if launched is not None:
            _runs_in_launched += not again
            run_dir = str(numbered(Path(launched), _runs_in_launched))
        self._directory: RunDirectory | None = None
        self._open = ExitStack()

        def create() -> list[Any]:
            global _goes_through_again
            default = default_run_path(sys.argv[0], datetime.now()) if run_dir is None else run_dir
            wanted = Path(default)
            is_passed = _goes_through_again or is_followed(wanted)
            directory = self._directory = RunDirectory.create(
                wanted,
                resume=resume != "never",
                extend=extend,
                reopen=restarted or (is_passed and wanted.absolute() not in _opened),
                lost_holders=lost_holders,
            )
            self._open.enter_context(directory)
            if directory.has_ended:
                _goes_through_again |= is_passed
                check_ended(directory.recorded())
            return [str(directory.path), secrets.token_hex(4), directory.holder]

        try:
            path, self.attempt, self.holder = on_rank_0(world, create, UserError)
        except UserError:
            self._open.close()
            raise
        self.path = Path(path)
        """The run directory, which is the same on all ranks."""
        if self._directory is not None and _opened and not again:
            note_followed(_opened[-1], self.path)
        _opened.append(self.path)
        if world.local_size < world.size:
            self._check_shared(world)
        self.events = EventLog(self.path / "events.jsonl" if self._directory else None)
        self._open.callback(self.events.close)
        self._metrics = self._open.enter_context(MetricsLog(self.path)) if self._directory else None
        self._progress: Progress | None = None
        self._loggers: Loggers | None = None
        if self._directory is not None and loggers:
            self._loggers = Loggers(loggers, self.path, self._on_logger_failure)
            self._open.callback(self._loggers.close)
        self.is_resumed = self._directory is not None and self._directory.is_resumed
        """True on rank 0 if the directory contains an unfinished run."""
        self.summary: dict[str, Any] = {}
        self._run_json: dict[str, Any] = {}
        self._first_step = 0

    def _check_shared(self, world: World) -> None:
        is_there = self.path.is_dir()
        if world.any(not is_there):
            missing = world.gather_values(is_there).index(False)
            self.close()
            raise RunDirectoryError(
                f"run directory {self.path}, made by rank 0, is not there for rank {missing}, on"
                " another machine; all machines of a run write their parts of its checkpoints"
                " there; give one on a file system that they share (--run-dir)"
            )

    def start(
        self,
        *,
        plan: Plan,
        world: World,
        launcher: str,
        seed: int,
        recipe: Mapping[str, Any] | None,
        code: Mapping[str, str],
        checkpoints: str | None,
    ) -> None:
        """Write run.json. `code` has digests of the recipe's functions. `checkpoints` is None for
        the default folder."""
        environment = describe_environment(world.device)
        if self._directory is not None and self.is_resumed:
            self._compare_device(environment["device"], is_bitwise=plan.numerics == "bitwise")
        self.summary = {
            "recipe": recipe,
            "seed": seed,
            "plan": str(plan),
            "world_size": world.size,
            "versions": environment["versions"],
        }
        if checkpoints is not None and "://" not in checkpoints:
            checkpoints = str(Path(checkpoints).absolute())
        self._write_run(
            recipe=recipe,
            code=code,
            seed=seed,
            plan=_plan_fields(plan),
            world_size=world.size,
            launcher=launcher,
            checkpoints=checkpoints,
            place_in_script=list(dict.fromkeys(_opened)).index(self.path) + 1,
            started=datetime.now().astimezone().isoformat(timespec="seconds"),
            environment=environment,
        )
        if self._loggers is not None:
            self._loggers.start(self._run_json)

    def _compare_device(self, now: Mapping[str, str], *, is_bitwise: bool) -> None:
        """Warn if the run has moved to another type of device, whose results differ bitwise."""
        assert self._directory is not None
        before = (self._directory.recorded().get("environment") or {}).get("device") or {}
        changed = {
            name: [old, now[name]]
            for name, old in before.items()
            if name != "type" and now.get(name, old) != old
        }
        if not changed:
            return
        self.event("device-changed", 0, changed=changed)
        if is_bitwise:
            parts = [f"{name} was {old} and is {new}" for name, (old, new) in changed.items()]
            self.message(
                f"warning: resumed on another kind of device ({', '.join(parts)}); numerics=bitwise"
                " gives the same bits on one kind"
            )

    def update_chosen(
        self, recipe: Mapping[str, Any], plan: Plan, device: torch.device, auto: Mapping[str, Any]
    ) -> None:
        """Write the values chosen for `auto` to `run.json`."""
        self.summary |= {"recipe": recipe, "plan": str(plan)}
        environment = describe_environment(device)
        self._write_run(recipe=recipe, plan=_plan_fields(plan), auto=auto, environment=environment)

    def describe(self, recipe: Mapping[str, Any]) -> None:
        """Write a description of a script's training loop to `run.json`."""
        self.summary |= {"recipe": recipe}
        self._write_run(recipe=recipe)

    def _write_run(self, **changed: Any) -> None:
        if self._directory is not None:
            self._run_json |= changed
            self._directory.write_json("run.json", self._run_json)

    def resume(self, step: int, checkpoints: str | None) -> None:
        """Start the logs of a new run, or continue the logs of a resumed run after `step`."""
        self._first_step = step
        if self.is_resumed and not step and checkpoints is not None:
            self.event("no-checkpoint", 0, checkpoints=checkpoints)
            self.message(
                f"warning: {checkpoints} has no checkpoint to resume from; the run starts again"
                " from step 0"
            )
        if self._directory is not None:
            self._directory.keep_result()
        if self._metrics is not None:
            self._metrics.resume(step)

    def show(self, total_steps: int) -> None:
        stream = progress_stream()
        if self._directory is not None and self._progress is None and stream is not None:
            self._progress = self._open.enter_context(
                Progress(total_steps, stream=stream, start=self._first_step)
            )

    def step(
        self,
        step: int,
        values: Mapping[str, float],
        extra: Mapping[str, float],
        *,
        checksum: str | None = None,
    ) -> None:
        """Write a row of metrics. Loggers do not get the gradient's `checksum`."""
        self._write(step, {**values, **extra}, checksum)
        if self._progress is not None:
            names = ("loss", "lr", "samples_per_second")
            shown = {name: values[name] for name in names if name in values}
            self._progress.update(step, **shown, extra=extra)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        self._write(step, {f"evaluation/{name}": value for name, value in values.items()})
        self.flush()
        if self._progress is not None:
            self._progress.evaluation(step, values)

    def flush(self) -> None:
        if self._metrics is not None:
            self._metrics.flush()

    def _write(self, step: int, values: Mapping[str, float], checksum: str | None = None) -> None:
        if self._metrics is not None:
            self._metrics.write(step, values, checksum=checksum)
        if self._loggers is not None:
            self._loggers.log(step, values)

    def _on_logger_failure(self, text: str) -> None:
        self.event("logger-failed", 0, reason=text)
        say(f"warning: {text}")  # the display may be closed already

    def event(self, name: str, step: int, **details: Any) -> Event:
        event = Event(name, step, details)
        if self._directory is not None and self._directory.is_taken:
            self.events.close()  # later events are kept in memory only
        with _writing():
            self.events.record(event)
        return event

    def message(self, text: str) -> None:
        if self._progress is not None:
            self._progress.message(text)
        elif self._directory is not None:
            say(text)

    def save_tensors(self, name: str, state_dict: Mapping[str, Any]) -> None:
        """Write a state dict to the run directory. Every rank must call this method, because
        distributed tensors are gathered."""
        gathered = {}
        for key, value in state_dict.items():
            tensor = full_tensor(value)
            if self._directory is not None:
                # a GPU may not have room for all tensors
                gathered[key] = tensor.cpu() if isinstance(tensor, Tensor) else tensor
        if self._directory is not None:
            with _writing():
                self._directory.save_tensors(name, gathered)

    def end(self, result: Mapping[str, Any]) -> None:
        """Write `result.json`, which marks the run as ended. Does nothing if `result.json`
        exists."""
        if self._directory is not None and not (self.path / "result.json").exists():
            with _writing():
                self._directory.write_json("result.json", result)
            if self._loggers is not None:
                self._loggers.end(result)

    def close(self) -> None:
        self._open.close()


def _plan_fields(plan: Plan) -> dict[str, Any]:
    return {"text": str(plan), **asdict(plan)}


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise cannot_write(error.filename, error) from error


class Throughput:
    """Measures throughput between logging steps, without evaluations."""

    def __init__(self) -> None:
        self.started = self._since = time.perf_counter()
        self._samples = 0
        self._weight = 0.0
        self.total_samples = 0

    def count(self, samples: int, weights: Mapping[str, float] | None) -> None:
        """`weights` has the denominator of each loss term, such as the number of tokens."""
        self._samples += samples
        self.total_samples += samples
        if weights is not None and len(weights) == 1:
            self._weight += sum(weights.values())

    def restart(self) -> dict[str, float]:
        """Return the samples per second since the last call. For a single loss term, also return
        the denominator per second, such as tokens per second."""
        now = time.perf_counter()
        seconds = max(now - self._since, 1e-9)
        rates = {"samples_per_second": self._samples / seconds}
        if self._weight:
            rates["weight_per_second"] = self._weight / seconds
        self._since, self._samples, self._weight = now, 0, 0.0
        return rates

    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def exclude(self, seconds: float) -> None:
        self._since += seconds
