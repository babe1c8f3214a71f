"""The events of a training run, and the log events.jsonl, which has one JSON object per line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Severity = Literal["error", "warning", "info"]
EVENTS: Mapping[Severity, Mapping[str, str]] = {
    "error": {
        "run-failed": "an error ended the run",
        "rescue-failed": "after an error, the state could not be saved",
        "out-of-memory": "memory ran out; `then` is the next change of the plan",
        "hang": "the run made no progress",
        "microbatch-differs": "ranks computed different gradients of one microbatch",
        "checkpoint-failed": "a checkpoint was not saved",
        "checkpoint-damaged": "a checkpoint is damaged, and the previous one is used",
    },
    "warning": {
        "preempted": "all ranks saved and ended on request",
        "restarted": "new processes continue from the last checkpoint",
        "recovered": "the run continued in place after the loss of a process",
        "plan-changed": "the plan is not the requested one, because memory ran out",
        "step-skipped": "an fp16 gradient overflowed",
        "straggler": "a rank became slow",
        "no-checkpoint": "a resumed run found no checkpoint, and starts again",
        "checkpoint-not-deleted": "an old checkpoint could not be deleted",
        "launcher-overrides-script": "the command line replaced a value of the script",
        "gpu-not-used": "torch sees no GPU of this machine",
        "devices-shared": "several processes compute on one GPU",
        "devices-differ": "ranks compute on devices of different kinds",
        "device-changed": "a resumed run is on another kind of device: its bits differ",
        "data-parallel": "one process computes on several GPUs, by torch's DataParallel",
        "slow-precision": "the device has no instructions for the precision",
        "selective-as-full": "compiled blocks recompute everything",
        "untested-torch": "torch is newer than the tested versions",
        "run-directory-in-container": "the run directory is lost with its container",
        "idle-ranks": "a global batch has too few microbatches for all ranks",
        "modes-restored": "a forward changed the mode of modules",
        "not-recomputed": "`--recompute-every` with one replica checks nothing",
        "data-not-reproducible": "a sample changes when it is fetched again",
        "loss-depends-on-microbatches": "the loss is not the sum over halves of a microbatch",
        "loss-keeps-state": "the loss or the model keeps a value between microbatches",
        "experts-dead": "no token has chosen some experts for 100 steps",
        "term-without-weight": "a loss term had no weight in a step",
        "hook-state-not-saved": "a hook without a state_dict changes tensors",
        "attributes-not-saved": "attributes of modules or optimizers change but are not saved",
        "variables-not-saved": "a session's loop changes values that are not saved",
        "error-feedback-dropped": "a checkpoint lacks the compression's error feedback",
        "cublas-workspace-late": "cuBLAS may not give the same bits",
        "logger-failed": "a logger was dropped",
        "profile-failed": "a profile could not be written",
    },
    "info": {
        "run-started": "the run was opened",
        "run-ended": "the run ended without an error",
        "stopped": "a hook or the script ended training",
        "resumed": "the run continued from a checkpoint",
        "rescued": "the state was saved after an error",
        "checkpoint-saved": "a checkpoint is complete",
        "checkpoint-copies-slow": "the host waits for copies to checkpoints",
        "best-evaluation": "`Saving(best=)` improved",
        "settings-chosen": "values of `auto` were measured",
        "cache-ignored": "measured settings of an earlier run do not fit",
        "cache-not-written": "measured settings could not be kept",
        "attention-kernel": "the kernels of attention in documents or over `context`, and why"
        " faster ones were not used",
        "gradient-reducer": "the reducer of gradients, and the reason for it",
        "assignment-changed": "microbatches were reassigned by measured speed",
        "assignment-fixed": "measured speeds cannot change the assignment",
        "no-shared-memory": "ranks of an axis exchange through the network",
        "segments-not-expandable": "the allocator cannot expand its segments",
        "generators-seeded": "the launcher's processes seeded the default generators",
        "batchnorm-per-microbatch": "BatchNorm's statistics cover one microbatch",
        "trainable-parameters": "parameters were frozen or unfrozen",
        "model-built-whole": "the model could not be built in parts",
        "experts-watched": "the router of each layer of experts",
        "weights-loaded": "pretrained weights were loaded",
        "experts-whole": "`tensor` leaves experts whole: each of its ranks computes them",
        "experts-eager": "transformers' experts compute one after another, for the same bits",
        "optimizer-not-fused": "a fused kernel would round differently on a shard",
        "optimizer-on-whole-tensors": "an optimizer updates gathered tensors",
        "data-not-compared": "samples could not be compared between ranks",
        "loss-not-checked": "the loss could not be tried on halves of a microbatch",
        "profiled": "a profile was written",
    },
}
"""Describes each event, by severity and name. The table in the docs is made from it."""


def severity(name: str) -> Severity:
    return next((each for each, events in EVENTS.items() if name in events), "info")


@dataclass(frozen=True, slots=True)
class Event:
    """Something notable that happened in a run: a plan was chosen, a step skipped, a fallback
    taken."""

    name: str
    """The kind of event, in the past tense with dashes: `run-started`, `step-skipped`."""
    step: int
    """Number of optimizer steps done at the time of the event."""
    details: dict[str, Any] = field(default_factory=dict)
    """The event's details, as JSON values."""


class EventLog:
    """Appends events to `events.jsonl`, and flushes each. With `path=None` the events stay in
    memory."""

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        self.events: list[Event] = []
        self._clock = clock
        self._file = path.open("a", encoding="utf-8") if path is not None else None

    def record(self, event: Event) -> None:
        """Raises `OSError` if the event cannot be written. All later events are kept in memory
        only."""
        self.events.append(event)
        if self._file is not None and not self._file.closed:
            row = {"time": self._clock(), "event": event.name, "step": event.step, **event.details}
            try:
                self._file.write(json.dumps(row) + "\n")
                self._file.flush()
            except OSError as error:
                # later events, the end of the run first, cannot be written either
                self.close()
                raise OSError(error.errno, error.strerror, self._file.name) from error

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # closing tries again to write the rest of a line
                self._file.close()
