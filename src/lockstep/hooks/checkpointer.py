"""A session's checkpoints: when to save, what came of it, which stay, and what a run goes on from."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

from torch import Tensor

from lockstep.base.errors import CheckpointError
from lockstep.checkpoint.emergency_save import emergency_save
from lockstep.checkpoint.integrity import read_manifest
from lockstep.checkpoint.load import CheckpointReader, raise_on_all_ranks
from lockstep.checkpoint.manifest import DamagedError, UnknownFormatError, UnreachableError
from lockstep.checkpoint.saver import Saver
from lockstep.checkpoint.storage import CheckpointName, FolderStorage, Storage
from lockstep.comm.world import World
from lockstep.saving import Resume, Saving, differences
from lockstep.training.hook import Run
from lockstep.training.state import restore, state_of

WAIT_SECONDS = 0.5
"""Between two looks of all ranks at a save that they wait for."""
LAST_SECONDS = 10.0
"""For a save under way, after an error."""


@dataclass(slots=True)
class Checkpointer:
    """One a rank, alike on all."""

    run: Run
    folder: Storage
    saving: Saving
    compare: Callable[[], None]
    """Compares the replicas before a save. Raises `DivergenceError`."""
    clock: Callable[[], float] = time.monotonic
    _saver: Saver = field(init=False)
    _every: float | None = field(init=False)
    """Seconds from one save to the next; None if steps are counted."""
    _since: float = field(init=False)
    _scores: dict[str, float] = field(default_factory=dict)
    """The metric by which the best checkpoint is kept, by the checkpoint's name."""
    _late: bool = False
    """True if a save is due but had to wait for the one before it."""
    _saved: int = -1
    """Steps done at the last save that began, or at the beginning."""
    _open: bool = False
    """True until the ranks have agreed on the result of the last save."""
    _error: str | None = None
    """Why the last save failed, as far as this rank knows."""
    _failures: int = 0
    """Failed saves in a row."""
    _stopped_seconds: float = 0.0
    """Seconds for which training stopped for the last save."""

    def __post_init__(self) -> None:
        self._saver = Saver(self.world, str(self.folder), self.attempt)
        self._every = self.saving.seconds
        self._since = self.clock()

    @property
    def world(self) -> World:
        return self.run.context.world

    @property
    def attempt(self) -> str:
        """Eight hexadecimal digits that name this start of the run, in the names of its checkpoints."""
        attempt: str = self.run.context.recorder.attempt
        return attempt

    def begin(self, step: int) -> None:
        """Before the first of the steps, at `step` steps done. Every rank calls it. Raises `CheckpointError` where nothing can be saved."""
        state = state_of(self.run.modules, self.run.stateful)
        self._saved = step
        self._on_rank_0(self.folder.remove_uncommitted, "written to")
        room = self._on_rank_0(self.folder.free_bytes, "written to")
        least = self._bytes_of(state.tensors)
        if room is not None and self.world.any(room < least):
            least = max(self.world.gather_values(least))
            raise CheckpointError(
                f"a checkpoint has {least:,} bytes at least, and {self.folder} has room for {room:,}; make more, or give another folder"
            )
        if self.saving.steps is not None:
            self._saver.prepare(state.tensors)
        self._since = self.clock()

    def time_is_up(self) -> bool:
        """True if a save is due by the clock; rank 0's clock counts."""
        return self._every is not None and self.world.rank == 0 and self.clock() - self._since >= self._every

    def after(self, step: int, *, asked: bool) -> None:
        """After a step; `step`: those done. `asked`: whether a save is due by the clock. Every rank calls it.

        Saves where a save is due and none is under way. Raises `CheckpointError` where too many failed in a row.
        """
        self._look()
        self._late |= asked or (self.saving.steps is not None and step % self.saving.steps == 0)
        if self._late and self._settled():
            self._late = False
            self._save(step)

    def finish(self) -> None:
        """Wait for the save under way. Every rank calls it."""
        while not self._settled():
            self._look(WAIT_SECONDS)

    def save_now(self, step: int) -> None:
        """Save, and wait until that is done. Every rank calls it."""
        self.finish()
        if step > self._saved:
            self._save(step)
            self.finish()

    def rescue(self, step: int) -> str | None:
        """Save without the others' help, after an error; returns the name of what was saved, None where nothing was to do.

        Each rank that still can calls it, with its state as it is after `step` steps. Raises `OSError`.
        """
        if step <= self._saved and not self._open:
            return None
        if step == self._saved:
            self._look(LAST_SECONDS)
            if not self._saver.is_under_way and self._error is None:
                return None
        state = state_of(self.run.modules, self.run.stateful)
        axes = [self.run.context.mesh.axis(name) for name in ("pipeline", "shard", "tensor")]
        place = 0
        for axis in axes:
            place = place * axis.size + axis.rank
        places = axes[0].size * axes[1].size * axes[2].size
        name = CheckpointName(step, f"{(int(self.attempt, 16) + 1) % 2**32:08x}")
        values = {**state.values, **self.run.loop.values(), "step": step}
        metadata = {**self._facts(), "score": None}
        done = emergency_save(self.folder, name, part=place, parts=places, tensors=state.tensors, values=values, metadata=metadata)
        return str(name) if done else None

    def restore(self, resume: Resume, *, allow_change: frozenset[str]) -> CheckpointReader | None:
        """Give everything the values of the newest checkpoint that is not damaged. Every rank calls it; returns what it read from.

        Raises `CheckpointError` where it is of another run, or `resume` is "must" and there is none.
        """
        fields = self.run.context.recorder.facts["recipe"] or {}
        if unknown := sorted(name for name in allow_change if name.partition(".")[0] not in fields):
            raise CheckpointError(
                f"allow_change={unknown[0]!r}; it names fields of the recipe, which are {', '.join(sorted(fields)) or 'none here'}"
            )
        names = [CheckpointName(*said) for said in self._on_rank_0(self._names, "read")]
        if resume == "never" and names:
            raise CheckpointError(
                f"resume=never, and {self.folder} holds checkpoints of an earlier run, the newest {names[-1]}; one run saves to a folder; "
                "give another folder, or remove those"
            )
        for name in reversed(names):
            try:
                reader = raise_on_all_ranks(partial(CheckpointReader, self.folder, name), self.world)
                if found := differences(
                    reader.manifest.metadata["recipe"] or {}, self.run.context.recorder.facts["recipe"] or {}, allow_change=allow_change
                ):
                    raise CheckpointError(
                        f"the recipe is not that of checkpoint {name}: {'; '.join(found)}; go on with the one it was saved with, say which "
                        "fields may differ (--allow-change, allow_change=), or choose another run directory"
                    )
                if name == names[0]:
                    reader.load_into({}, self.world)  # before anything of the state is touched: there is no other to fall back on
                restore(reader, self.run.modules, self.run.stateful, self.run.context.mesh)
            except DamagedError as error:
                self.run.event("checkpoint-damaged", checkpoint=str(name), reason=str(error))
                self.run.context.recorder.message(f"warning: checkpoint {name} is damaged: {error}")
                continue
            except (UnknownFormatError, UnreachableError) as error:
                raise CheckpointError(f"{self.folder}, {name}: {error}") from error
            self.run.event("resumed", reader.manifest.step, checkpoint=str(name), saved_under=reader.manifest.metadata["plan"])
            self.run.context.recorder.message(f"goes on from step {name.step}")
            self._read_scores(names)
            return reader
        if resume == "must":
            why = f"all {len(names)} are damaged" if names else "there is none"
            raise CheckpointError(f"resume=must, and {self.folder} has no checkpoint to go on from: {why}; resume=auto begins anew")
        return None

    def close(self) -> None:
        """Give up what is under way."""
        self._saver.close()

    def _read_scores(self, names: Sequence[CheckpointName]) -> None:
        """Read the scores of the existing checkpoints, on rank 0, which decides what is kept."""
        if self.world.rank == 0 and self.saving.best is not None:
            for name in names:
                with suppress(DamagedError, UnknownFormatError, UnreachableError):
                    if (score := CheckpointReader(self.folder, name).manifest.metadata["score"]) is not None:
                        self._scores[str(name)] = score

    def _names(self) -> list[list[Any]]:
        return [[name.step, name.attempt] for name in self.folder.names()]

    def _bytes_of(self, tensors: Mapping[str, Tensor]) -> int:
        """Return the bytes that all ranks together write. Every rank calls it."""
        mine = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
        everyone = self.run.context.mesh.axis("pipeline").gather_values(mine)
        return sum({name: size for theirs in everyone for name, size in theirs.items()}.values())

    def _on_rank_0(self, call: Callable[[], Any], what: str) -> Any:
        """A JSON value that rank 0 finds. Every rank calls it. Raises `CheckpointError` where the folder cannot be `what`."""
        found, failure = None, None
        if self.world.rank == 0:
            try:
                found = call()
            except OSError as error:
                failure = f"the checkpoints in {self.folder} cannot be {what} ({error.strerror or error}); give another folder"
        found, failure = self.world.value_of(0, [found, failure])
        if failure is not None:
            raise CheckpointError(failure)
        return found

    def _save(self, step: int) -> None:
        self.compare()
        state = state_of(self.run.modules, self.run.stateful)
        began = self.clock()
        measured, best, score = self._metrics(), self.saving.best, None
        if best is not None and measured:
            if best not in measured:
                raise CheckpointError(f"Saving(best={best!r}), which is not measured; measured are {', '.join(measured)}")
            score = measured[best]
            self._scores[str(CheckpointName(step, self.attempt))] = score
        keep = {"last": self.saving.last, "every": self.saving.keep_every, "mode": self.saving.mode, "scores": self._scores}
        values = {**state.values, **self.run.loop.values(), "step": step}
        self._saver.save(step, state.tensors, values=values, metadata={**self._facts(), "score": score}, keep=keep)
        self._saved, self._open, self._since = step, True, self.clock()
        self._stopped_seconds = self._since - began

    def _metrics(self) -> Mapping[str, float]:
        """The evaluation after the latest step; empty if there was none."""
        return self.run.metrics if self.run.evaluated_at == self.run.step else {}

    def _facts(self) -> dict[str, Any]:
        return {**self.run.context.recorder.facts, "saved": datetime.now().astimezone().isoformat(timespec="seconds")}

    def _look(self, timeout_seconds: float = 0.0) -> None:
        """Note what came of the save under way, where that is known here."""
        ended = self._saver.poll(timeout_seconds)
        if ended is None:
            return
        self._error = ended.error
        if ended.error is not None:
            self._say_failed(ended.error)
            return
        if ended.not_deleted is not None:
            self.run.event("checkpoint-not-deleted", reason=ended.not_deleted)
            self.run.context.recorder.message(f"warning: an old checkpoint could not be deleted: {ended.not_deleted}")
        if self.world.rank == 0:  # which commits
            name, seconds = str(CheckpointName(ended.step, self.attempt)), round(self.clock() - self._since, 3)
            self.run.event("checkpoint-saved", checkpoint=name, seconds=seconds, stopped_seconds=round(self._stopped_seconds, 4))

    def _say_failed(self, reason: str) -> None:
        self.run.event("checkpoint-failed", checkpoint=str(CheckpointName(self._saved, self.attempt)), reason=reason)
        self.run.context.recorder.message(f"warning: the checkpoint of step {self._saved} was not saved: {reason}")

    def _make_room(self) -> None:
        """Remove what a failed save has left on a disk, which may be full of it. While no save is under way. Every rank calls it."""
        if isinstance(self.folder, FolderStorage):
            if self.world.rank == 0:
                with suppress(OSError):
                    self.folder.remove_uncommitted()
            self.world.any(False)  # or another rank would begin the next save meanwhile

    def _settled(self) -> bool:
        """True if no save is under way on any rank. Every rank calls it. Raises `CheckpointError` if too many failed in a row."""
        if not self._open:
            return True
        self._look()
        everyone = self.world.gather_values([self._saver.is_under_way, self._error])
        error = next((error for _, error in everyone if error is not None), None)
        if error is not None and self._saver.is_under_way and self.world.rank == 0:  # it would wait for that rank's part
            self._saver.abandon()
        busy = [rank for rank, (under_way, _) in enumerate(everyone) if under_way and not (error is not None and rank == 0)]
        if busy:
            return False
        if error is not None:
            if self._error is None and self.world.rank == 0:
                self._say_failed(error)
            self._make_room()
        self._failures = 0 if error is None else self._failures + 1
        self._open, self._error = False, None
        if self._failures >= self.saving.failures:
            raise CheckpointError(
                f"{self._failures} checkpoints in a row could not be saved, at last: {error}; make {self.folder} writable, with room "
                "for a checkpoint more than it keeps, and go on from the last one there"
            )
        return True


def saved_recipe(folder: Storage, world: World) -> dict[str, Any]:
    """The recipe of the newest checkpoint there that can be read, as JSON; empty where there is none. Every rank calls it."""
    found: dict[str, Any] = {}
    if world.rank == 0:
        with suppress(OSError):  # which `restore` reports
            for name in reversed(folder.names()):
                with suppress(DamagedError, UnknownFormatError, UnreachableError):
                    found = read_manifest(folder, name).metadata["recipe"] or {}
                    break
    recipe: dict[str, Any] = world.value_of(0, found)
    return recipe
