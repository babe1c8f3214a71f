"""Starts asynchronous saves, waits for them, and loads checkpoints."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

from torch import Tensor

from lockstep.base.errors import CheckpointError, RunDirectoryError
from lockstep.checkpoint.emergency_save import emergency_save
from lockstep.checkpoint.load import CheckpointReader
from lockstep.checkpoint.manifest import (
    DamagedError,
    UnknownFormatError,
    UnreachableError,
    UnreadableError,
    read_manifest,
)
from lockstep.checkpoint.saver import Saver
from lockstep.checkpoint.storage import CheckpointName, FolderStorage, Storage
from lockstep.comm.agreed_errors import on_rank_0, raise_on_all_ranks
from lockstep.comm.mesh import to_local
from lockstep.comm.world import World
from lockstep.logging.run_files import EVENTS, read_rows
from lockstep.plan import Plan, changed_bits
from lockstep.saving import Best, Resume, Saving, differences
from lockstep.training.device_progress import EndedStep
from lockstep.training.optim import optimizer_state as settings
from lockstep.training.run import Run
from lockstep.training.state import State, StateReader, damage_in, restore, state_of
from lockstep.training.training import LoopState, Training

WAIT_SECONDS = 0.5  # ranks that wait for a save ask each other this often whether it has ended
LAST_SECONDS = 10.0  # after an error, the longest wait for a save in progress


@dataclass(slots=True)
class Scores:
    """The value of the metric `Saving.best` for each checkpoint. Every rank has the same values."""

    saving: Saving
    by_name: dict[CheckpointName, float] = field(default_factory=dict)

    def now(self, run: Run) -> float | None:
        metric = self.saving.best
        if metric is None or not run.metrics:
            return None
        return run.training.metric(metric, f"Saving(best={metric!r})")

    def improves(self, value: float) -> bool:
        name = self.best_checkpoint()
        return self.saving.improves(value, None if name is None else self.by_name[name])

    def best_checkpoint(self) -> CheckpointName | None:
        return self.saving.best_of(self.by_name)

    def best(self, run: Run, folder: Storage) -> Best | None:
        """Return the best evaluation, including the evaluation after the latest step."""
        metric, value, name = self.saving.best, self.now(run), self.best_checkpoint()
        if metric is None:
            return None
        if value is not None and self.improves(value):
            weights = str(run.dir / "model.safetensors")
            return Best(metric=metric, value=value, step=run.step, checkpoint=None, weights=weights)
        if name is None:
            return None
        return Best(
            metric=metric,
            value=self.by_name[name],
            step=name.step,
            checkpoint=str(name),
            weights=f"{folder}/{name}",
        )

    def note(self, name: CheckpointName, run: Run) -> dict[str, Any] | None:
        value = self.now(run)
        if value is None:
            return None
        self.by_name[name] = value
        return {"metric": self.saving.best, "mode": self.saving.mode, "value": value}

    def read(self, folder: Storage, names: Sequence[CheckpointName], world: World) -> None:
        """Read the metric's values from checkpoints. Every rank must call this method."""
        if self.saving.best is None:
            return
        rows = []
        for name in names if world.rank == 0 else ():
            with suppress(UnreadableError):
                score = read_manifest(folder, name).metadata.get("score")
                if score is not None and score["metric"] == self.saving.best:
                    rows.append([name.step, name.attempt, score["value"]])
        self.by_name = {CheckpointName(*name): value for *name, value in world.value_of(0, rows)}


@dataclass(slots=True)
class Checkpointer:
    """Starts asynchronous saves, waits for them, and loads the newest checkpoint. The state of a
    `Checkpointer` is the same on all ranks."""

    run: Run
    folder: Storage
    saving: Saving
    compare: Callable[[], None]  # called before a save
    _saver: Saver = field(init=False)
    _interval: float | None = field(init=False)
    _every: int | None = field(init=False)
    _each_epoch: bool = field(init=False)
    _since: float = field(init=False)  # when the last save began
    scores: Scores = field(init=False)
    _began_at: int = 0  # steps done before this process's first step
    # steps since the start at the next check that the state can be saved
    _next_check: int = 0
    _is_due: bool = False  # True if a save is due but waits for the previous save
    _saved: int = -1  # steps done at the last save that began, or at the start
    _is_open: bool = False  # true until the ranks have agreed on the result of the last save
    _error: str | None = None  # why the last save failed, if this rank knows it
    _failures: int = 0  # failed saves in a row
    _has_told: bool = False  # True once the event about slow copies from the device is recorded
    _stopped_seconds: float = 0.0  # time in which training waited for the last save to begin

    def __post_init__(self) -> None:
        self._saver = Saver(self.world, str(self.folder), self.attempt)
        self.scores = Scores(self.saving)
        self._interval = self.saving.seconds
        self._every, self._each_epoch = self.saving.steps, self.saving.each_epoch
        self._since = time.monotonic()

    @property
    def world(self) -> World:
        return self.run.context.world

    @property
    def training(self) -> Training:
        return self.run.training

    @property
    def attempt(self) -> str:
        """Eight hexadecimal digits, which differ between starts of the run."""
        attempt: str = self.run.context.recorder.attempt
        return attempt

    def begin(self, saved: int, *, again: bool = False) -> None:
        """Called before the first step. `saved` is the number of steps in the newest checkpoint.
        With `again`, the run has recovered in place, and nothing is checked. Every rank must call
        this method."""
        self._saved, self._began_at = saved, self.run.step
        self._on_rank_0(self.folder.remove_uncommitted, "written to")
        if not again:
            self._prepare()
        self._since = time.monotonic()

    def _prepare(self) -> None:
        with self._state() as state:
            tensors = state.tensors
        free = self._on_rank_0(self.folder.free_bytes, "written to")
        needed = self._total_bytes(tensors)
        if free is not None and self.world.any(free < needed):
            needed = max(self.world.gather_values(needed))
            raise CheckpointError(
                f"a checkpoint has at least {needed:,} bytes, and {self.folder} has {free:,} free;"
                " make room, or give another folder"
            )
        if self.saving.seconds is None:
            self._saver.prepare(tensors)

    def is_time(self) -> bool:
        """True on rank 0 if a save is due. False on all ranks except rank 0."""
        interval = self._interval if self.world.rank == 0 else None
        return interval is not None and time.monotonic() - self._since >= interval

    def after_step(self, step: int, *, is_time: bool) -> None:
        """Start a save if a save is due and none is in progress. Every rank must call this
        method."""
        done = step - self._began_at
        # This reads values from the device. At a logging step the host has waited for the device
        # anyway.
        if done <= 2 or (self.run.is_logging_step and done >= self._next_check):
            self._check_saveable()
            self._next_check = 2 * done
        self._poll()
        if (score := self.scores.now(self.run)) is not None and self.scores.improves(score):
            self.run.event("best-evaluation", metric=self.saving.best, value=score)
            self.wait()  # at a later step, another state would be saved
            self._is_due = True
        self._is_due |= is_time or (self._every is not None and step % self._every == 0)
        self._is_due |= self._each_epoch and self.run.has_ended_epoch
        if self._is_due and self._has_ended():
            self._is_due = False
            self._save(step)

    def _check_saveable(self) -> None:
        """Check that the state can be saved. Some state appears only in the first steps. Every rank
        must call this method."""
        state = partial(state_of, self.training.modules, self.training.stateful)
        raise_on_all_ranks(self.world, state, CheckpointError)

    def wait(self) -> None:
        """Wait for a save in progress. Every rank must call this method."""
        while not self._has_ended():
            self._poll(WAIT_SECONDS)

    def save_now(self, step: int) -> None:
        """Every rank must call this method."""
        self.wait()
        if step > self._saved:
            self._save(step)
            self.wait()

    def delete_after(self, step: int) -> tuple[list[str], str | None]:
        self.wait()
        deleted, failure = list[str](), None
        if self.world.rank == 0:
            try:
                for name in self.folder.names():
                    if name.step > step:
                        self.folder.delete(name)
                        deleted.append(str(name))
            except OSError as error:
                failure = f"{error.strerror or error}"
        deleted, failure = self.world.value_of(0, [deleted, failure])
        return deleted, failure

    def await_last(self) -> None:
        """Wait until this rank's part of a checkpoint is saved, without the other ranks."""
        with suppress(RuntimeError):  # the device itself may have failed
            self._poll(LAST_SECONDS)

    def rescue(
        self, step: int, ended: EndedStep | None = None, *, on_host: bool = True
    ) -> str | None:
        """Save this rank's state without the other ranks. Returns None if the state is already
        saved. `ended` has the values that the host held after the saved step, if the host has
        started later steps."""
        if step <= self._saved and not self._is_open:
            return None
        if step == self._saved:
            self._poll(LAST_SECONDS)
            if not self._saver.is_under_way and self._error is None:
                return None
        part, parts = 0, 1
        mesh, progress = self.run.context.mesh, self.training.progress
        for axis in (mesh.axis(each.name) for each in mesh.larger if not each.same_state):
            part, parts = part * axis.size + axis.rank, parts * axis.size
        name = CheckpointName(step, f"{(int(self.attempt, 16) + 1) % 2**32:08x}")
        metadata = {**self._metadata(), "score": None, "rescued": True}
        with suppress(Exception):  # the dataset may be what has failed
            self.training.loop.refresh_data()
        with self._state(ended) as state:
            if not on_host and any(to_local(tensor).is_cpu for tensor in state.tensors.values()):
                raise CheckpointError(
                    f"the device has done {step} steps, and a part of the state is on the CPU,"
                    " which has done more"
                )
            loop = self.training.loop.values() if ended is None else ended.loop
            done = emergency_save(
                self.folder,
                name,
                part=part,
                parts=parts,
                tensors=state.tensors,
                values={**state.values, **loop, "step": step},
                metadata=metadata,
                is_unchanged=lambda: (
                    ended is None or progress is None or progress.is_certain(ended)
                ),
            )
        return str(name) if done else None

    @contextmanager
    def _state(self, ended: EndedStep | None = None) -> Iterator[State]:
        """Yield the state to save. Raises an error if a model has other parameters than after
        `prepare`."""
        with ExitStack() as stack:
            for module in self.training.modules:
                module.snapshot.check_parts()
                stack.enter_context(module.modes.evaluating())
            modules, stateful = self.training.modules, self.training.stateful
            if ended is None:
                yield state_of(modules, stateful)
            else:
                yield state_of(modules, {**stateful, "run": ended}, host=ended.modules)

    def has_saved(self, step: int) -> bool:
        with suppress(OSError):
            return any(name.step == step for name in self.folder.names())
        return False

    def restore(
        self,
        resume: Resume,
        *,
        allow_change: frozenset[str],
        before: int = sys.maxsize,
    ) -> CheckpointReader | None:
        """Load the newest undamaged checkpoint with fewer than `before` steps. Every rank must call
        this method."""
        recorder = self.run.context.recorder
        names = [name for name in self._names() if name.step < before]
        if resume == "never" and names:
            raise CheckpointError(
                f"resume=never, and {self.folder} holds checkpoints of an earlier run, the newest"
                f" {names[-1]}; each run needs its own folder; give another folder, or remove"
                " those"
            )
        for name in reversed(names):
            try:
                reader = raise_on_all_ranks(
                    self.world, partial(CheckpointReader, self.folder, name), UnreadableError
                )
                saved = reader.manifest.metadata
                if changes := self._changes(saved["recipe"], self._edited(saved), allow_change):
                    raise CheckpointError(
                        f"the recipe differs from the one in checkpoint {name}:"
                        f" {'; '.join(changes)}; resume with that recipe, name the fields that may"
                        " differ (--allow-change, allow_change=), or choose another run directory"
                    )
                if name == names[0]:
                    # a check before the state is changed: there is no older checkpoint
                    reader.load_into({}, self.world)
                with damage_in("the manifest's values"):
                    LoopState.check(reader.manifest.values, reader.manifest.step)
                self._restore(reader)
                for theirs, module in zip(saved["optimizers"], self.training.modules, strict=False):
                    module.keep_changed_settings(theirs)
            except DamagedError as error:
                self.run.event("checkpoint-damaged", checkpoint=str(name), reason=str(error))
                recorder.message(f"warning: checkpoint {name} is damaged: {error}")
                continue
            except (UnknownFormatError, UnreachableError) as error:
                raise CheckpointError(f"{self.folder}, {name}: {error}") from error
            if saved.get("rescued") and self.world.rank == 0:
                self._record_rescue(name)
            self.run.event("resumed", name.step, checkpoint=str(name), saved_under=saved["plan"])
            recorder.message(f"resumes after step {name.step}")
            self.scores.read(self.folder, names, self.world)
            return reader
        if resume == "must":
            why = f"all {len(names)} are damaged" if names else "there is none"
            raise CheckpointError(
                f"resume=must, and {self.folder} has no checkpoint to resume from: {why};"
                " resume=auto starts again"
            )
        return None

    def _record_rescue(self, name: CheckpointName) -> None:
        with suppress(RunDirectoryError):
            rows = read_rows(
                self.run.context.run_dir, EVENTS, lambda row: row.get("event") == "rescued", {}
            )
            if any(row.get("checkpoint") == str(name) for row in rows):
                return
        self.run.event("rescued", name.step, checkpoint=str(name))

    def restore_from_memory(self, reader: StateReader, *, allow_change: frozenset[str]) -> int:
        """Load the state that the processes of this run hold in memory (recovery in place). Every
        rank must call this method. Returns the number of steps in the newest checkpoint."""
        saved = reader.manifest.values
        edited = self._edited_code(saved["code"])
        if changes := self._changes(saved["recipe"] or {}, edited, allow_change):
            raise CheckpointError(
                "the recipe differs from the one that trained the state in memory:"
                f" {'; '.join(changes)}"
            )
        self._restore(reader)
        names = self._names()
        self.scores.read(self.folder, names, self.world)
        return names[-1].step if names else 0

    def _restore(self, reader: StateReader) -> None:
        restore(reader, self.training.modules, self.training.stateful, self.run.context.mesh)

    def _names(self) -> list[CheckpointName]:
        """Return the names of the checkpoints, newest last. Every rank must call this method."""
        pairs = self._on_rank_0(
            lambda: [[name.step, name.attempt] for name in self.folder.names()], "read"
        )
        return [CheckpointName(*pair) for pair in pairs]

    def close(self) -> None:
        self._saver.close()

    def _changes(
        self,
        saved: Mapping[str, Any] | None,
        edited: Sequence[str],
        allow_change: frozenset[str],
    ) -> list[str]:
        fields = self.run.context.recorder.summary["recipe"] or {}
        changed = [] if saved is None else differences(saved, fields, allow_change=allow_change)
        return changed + [
            line for line in edited if line.partition(":")[0].split()[0] not in allow_change
        ]

    def _edited(self, saved: Mapping[str, Any]) -> list[str]:
        """Every rank must call this method."""
        pairs = zip(saved["optimizers"], self.training.modules, strict=False)
        edited = [
            line
            for theirs, module in pairs
            for line in settings.changes_in_words(theirs, module.settings)
        ]
        edited += changed_bits(Plan.parse(saved["plan"]), self.run.context.plan)
        python = self.run.context.recorder.summary["versions"]["python"]
        if saved["versions"]["python"] == python:
            edited += self._edited_code(saved["code"])
        lines: list[str] = self.world.value_of(0, edited)
        return lines

    def _edited_code(self, saved: Mapping[str, str] | None) -> list[str]:
        now = self.training.code or {}
        edited = [name for name, digest in (saved or {}).items() if now.get(name, digest) != digest]
        return [f"{name}: its code has changed, or a value that it uses" for name in edited]

    def _total_bytes(self, tensors: Mapping[str, Tensor]) -> int:
        """Every rank must call this method."""
        mine = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
        sizes: dict[str, int] = {}
        for theirs in self.run.context.mesh.stages.gather_values(mine):
            sizes.update(theirs)
        return sum(sizes.values())

    def _on_rank_0(self, call: Callable[[], Any], what: str) -> Any:
        """Every rank must call this method."""

        def compute() -> Any:
            try:
                return call()
            except OSError as error:
                raise CheckpointError(
                    f"the checkpoints in {self.folder} cannot be {what}"
                    f" ({error.strerror or error}); give another folder"
                ) from error

        return on_rank_0(self.world, compute, CheckpointError)

    def _save(self, step: int) -> None:
        self.compare()
        began = time.monotonic()
        # a run that resumes from this checkpoint does not repeat the recorded steps
        self.run.context.recorder.flush()
        self._saver.begin()
        score = self.scores.note(CheckpointName(step, self.attempt), self.run)
        keep = {
            "last": self.saving.last,
            "every": self.saving.keep_every,
            "sparse": self.saving.keep == "log",
            "agreed": self.training.loop.agreed,
            "mode": self.saving.mode,
            "scores": {str(name): value for name, value in self.scores.by_name.items()},
        }
        metadata = {**self._metadata(), "score": score}
        self.training.loop.refresh_data()
        with self._state() as state:
            values = {**state.values, **self.training.loop.values(), "step": step}
            self._saver.save(step, state.tensors, values=values, metadata=metadata, keep=keep)
        if (reason := self._saver.not_registered) is not None and not self._has_told:
            self._has_told = True
            self.run.event("checkpoint-copies-slow", reason=reason)
        self._saved, self._is_open, self._since = step, True, time.monotonic()
        self._stopped_seconds = self._since - began

    def _metadata(self) -> dict[str, Any]:
        return {
            **self.run.context.recorder.summary,
            "code": self.training.code,
            "optimizers": [module.settings for module in self.training.modules],
            "saved": datetime.now().astimezone().isoformat(timespec="seconds"),
        }

    def _poll(self, timeout_seconds: float = 0.0) -> None:
        if (ended := self._saver.poll(timeout_seconds)) is None:
            return
        self._error = ended.error
        if ended.error is not None:
            self._report_failure(ended.error)
            return
        if ended.not_deleted is not None:
            self.run.event("checkpoint-not-deleted", reason=ended.not_deleted)
            self.run.context.recorder.message(
                f"warning: an old checkpoint could not be deleted: {ended.not_deleted}"
            )
        if self.world.rank == 0:  # rank 0 commits the checkpoint
            self.run.event(
                "checkpoint-saved",
                checkpoint=str(CheckpointName(ended.step, self.attempt)),
                seconds=round(time.monotonic() - self._since, 3),
                stopped_seconds=round(ended.device_seconds or self._stopped_seconds, 4),
            )

    def _report_failure(self, reason: str) -> None:
        name = str(CheckpointName(self._saved, self.attempt))
        self.run.event("checkpoint-failed", checkpoint=name, reason=reason)
        self.run.context.recorder.message(
            f"warning: the checkpoint after step {self._saved} was not saved: {reason}"
        )

    def _has_ended(self) -> bool:
        """True if no rank has a save in progress. Every rank must call this method."""
        if not self._is_open:
            return True
        self._poll()
        everyone = self.world.gather_values([self._saver.is_under_way, self._error])
        error = next((error for _, error in everyone if error is not None), None)
        under_way = [is_under_way for is_under_way, _ in everyone]
        # rank 0 would wait for the part of the checkpoint that the failed rank cannot write
        if error is not None and under_way[0]:
            under_way[0] = False
            if self.world.rank == 0:
                self._saver.abandon()
        if any(under_way):
            return False
        if error is not None:
            if self._error is None and self.world.rank == 0:
                self._report_failure(error)
            # remove the files of the failed save: the disk may be full
            if isinstance(self.folder, FolderStorage):
                if self.world.rank == 0:
                    with suppress(OSError):
                        self.folder.remove_uncommitted()
                self.world.any(False)  # no rank may begin the next save before this
            self.scores.by_name.pop(CheckpointName(self._saved, self.attempt), None)
        self._failures = 0 if error is None else self._failures + 1
        self._is_open, self._error = False, None
        if self._failures >= self.saving.failures:
            raise CheckpointError(
                f"{self._failures} checkpoints in a row could not be saved, the last one: {error};"
                f" make {self.folder} writable, with room for one checkpoint more than it keeps,"
                " and resume from the last one there"
            )
        return True
