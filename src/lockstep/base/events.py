"""The events of a training run, and the log events.jsonl, which has one JSON object per line."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Severity = Literal["error", "warning", "info"]
EVENTS: Mapping[Severity, Mapping[str, str]] = {
    "error": {
        "run-failed": "an error ended the run",
        "rescue-failed": "lockstep could not save a checkpoint after an error",
        "out-of-memory": "memory ran out. `then` is the next change of the plan",
        "hang": "the run made no progress",
        "microbatch-differs": "two ranks computed different gradients of the same microbatch",
        "checkpoint-failed": "lockstep could not save a checkpoint",
        "checkpoint-damaged": "a checkpoint is damaged. lockstep uses the previous checkpoint",
    },
    "warning": {
        "preempted": "all ranks saved and ended after a request to stop",
        "restarted": "new processes continue from the last checkpoint",
        "recovered": "after the loss of a process, the other processes continued the run",
        "plan-changed": "lockstep changed the plan because memory ran out",
        "step-skipped": "a gradient overflowed in fp16, and all ranks skipped the update",
        "straggler": "a rank became slow",
        "no-checkpoint": "a resumed run found no checkpoint, and starts at step 0",
        "checkpoint-not-deleted": "lockstep could not delete an old checkpoint",
        "launcher-overrides-script": "the command line replaced a value of the script",
        "gpu-not-used": "torch sees no GPU of this machine",
        "devices-shared": "several processes compute on one GPU",
        "devices-differ": "ranks compute on devices of different kinds",
        "device-changed": "a resumed run uses another kind of device, which gives other bits",
        "data-parallel": "one process uses several GPUs by `torch.nn.DataParallel`",
        "slow-precision": "the device has no instructions for the recipe's precision",
        "selective-as-full": "with `compile=yes`, `checkpointing=selective` acts as `full`",
        "untested-torch": "torch is newer than the tested versions",
        "run-directory-in-container": "the run directory is deleted when its container is deleted",
        "idle-ranks": "some ranks have no microbatch in a step",
        "modes-restored": "a forward changed the mode of modules. lockstep restored the mode",
        "not-recomputed": "`--recompute-every` has no effect with one replica",
        "data-not-reproducible": "a sample differs when lockstep fetches it again",
        "loss-depends-on-microbatches": "the losses of two halves do not add up to the loss",
        "loss-keeps-state": "the loss or the model carries a value from one microbatch to the next",
        "experts-dead": "no token has chosen some experts for 100 steps",
        "term-without-weight": "the weights of a loss term added up to 0 in a step",
        "hook-state-not-saved": "a hook changes tensors and has no `state_dict`",
        "attributes-not-saved": "modules or optimizers change attributes that no checkpoint has",
        "variables-not-saved": "the loop of a session changes variables that no checkpoint has",
        "error-feedback-dropped": "a run resumed without the error feedback of compression",
        "cublas-workspace-late": "a GPU was in use before `import lockstep`: bits may differ",
        "logger-failed": "a logger failed, and lockstep stopped calling it",
        "profile-failed": "lockstep could not write a profile",
    },
    "info": {
        "run-started": "the run started",
        "run-ended": "the run ended without an error",
        "stopped": "a hook or the script ended training",
        "resumed": "the run continued from a checkpoint",
        "rescued": "lockstep saved a checkpoint after an error",
        "checkpoint-saved": "a checkpoint is complete",
        "checkpoint-copies-slow": "training waits while the state is copied for a checkpoint",
        "best-evaluation": "the metric of `Saving(best=)` reached a new best value",
        "settings-chosen": "lockstep measured the settings that are `auto`, and chose values",
        "cache-ignored": "lockstep cannot use the settings that an earlier run measured",
        "cache-not-written": "lockstep could not save the measured settings for later runs",
        "attention-kernel": "the attention kernels, and the reasons against faster kernels",
        "gradient-reducer": "the reducer of gradients, and the reason for this reducer",
        "assignment-changed": "lockstep assigned microbatches again, by the ranks' measured speeds",
        "assignment-fixed": "measured speeds have no effect on the assignment of microbatches",
        "no-shared-memory": "the ranks of an axis use the network instead of shared memory",
        "segments-not-expandable": "torch's allocator cannot use expandable segments",
        "generators-seeded": "lockstep seeded the default generators of the launched processes",
        "batchnorm-per-microbatch": "BatchNorm's statistics cover one microbatch",
        "trainable-parameters": "a hook or the script froze or unfroze parameters",
        "model-built-whole": "lockstep could not build the model in parts",
        "experts-watched": "the routers that lockstep found, one for each layer of experts",
        "weights-loaded": "lockstep loaded pretrained weights",
        "experts-whole": "`tensor` does not shard experts: each of its ranks computes all experts",
        "experts-eager": "for the same bits, transformers' experts compute one after another",
        "optimizer-not-fused": "lockstep replaced a fused kernel, whose bits depend on the shard",
        "optimizer-on-whole-tensors": "an optimizer updates full tensors, which one rank gathers",
        "data-not-compared": "lockstep could not compare samples between ranks",
        "loss-not-checked": "lockstep could not test the loss on two halves of a microbatch",
        "profiled": "lockstep wrote a profile",
    },
}
"""Describes each event, by severity and name. The table in the docs is made from this dict."""


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

    def __init__(self, path: Path | None) -> None:
        self.events: list[Event] = []
        self._file = path.open("a", encoding="utf-8") if path is not None else None

    def record(self, event: Event) -> None:
        """Raises `OSError` if the event cannot be written. After an error, all events are kept in
        memory only."""
        self.events.append(event)
        if self._file is not None and not self._file.closed:
            row = {"time": time.time(), "event": event.name, "step": event.step, **event.details}
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
