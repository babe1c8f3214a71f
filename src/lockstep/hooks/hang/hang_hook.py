"""The hook that acts on a hang: it writes a report, saves the last complete step, and ends the
process."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from lockstep.base.errors import HangError, cannot_write, say
from lockstep.base.torch_private import default_store
from lockstep.hooks.hang.report import Hang
from lockstep.hooks.hang.snapshot import StackSnapshot
from lockstep.hooks.hang.watchdog import Mailbox, Watchdog
from lockstep.launch.failures import failure_record
from lockstep.launch.termination import HUNG_STATUS
from lockstep.launch.worker_files import defer_kill, is_shutting_down, write_failure
from lockstep.options import WatchdogTimeouts
from lockstep.training.context import Context
from lockstep.training.hook import Hook
from lockstep.training.recovery.recovery import Recovery
from lockstep.training.run import Run

SAVING_SECONDS = 300.0  # the longest time for the last save of a rank that hangs
# before a rank exits, so that all ranks read the diagnosis before they lose a peer
EXIT_DELAY_SECONDS = 0.5


class HangHook(Hook):
    def __init__(
        self,
        timeouts: WatchdogTimeouts | None,
        context: Context,
        rescue: Callable[[Run, BaseException], bool],
        recovery: Recovery | None,
    ) -> None:
        """Start this thread's watchdog, unless `timeouts` is None. Every rank calls it. `rescue`:
        saves without other ranks. `recovery`: the run's, if it can recover in place."""
        self._recovery = recovery
        self._timeouts = timeouts
        self._context = context
        self._rescue = rescue
        self._run: Run | None = None
        self._watchdog: Watchdog | None = None
        if timeouts is None:
            return
        world = context.world
        mailbox = (
            None
            if world.size == 1
            else Mailbox(default_store(), f"lockstep/watch/{context.recorder.attempt}")
        )
        self._watchdog = Watchdog(
            context.phases,
            timeouts,
            rank=world.rank,
            size=world.size,
            mailbox=mailbox,
            on_hang=self._on_hang,
            is_shutting_down=is_shutting_down,
            is_recovered=self._is_recovered,
            on_stuck=self._on_stuck,
        )

    def watch(self, run: Run) -> None:
        """Save `run` from now on if it hangs."""
        self._run = run

    @property
    def ends_the_process(self) -> bool:
        return self._watchdog is not None and self._watchdog.ends_the_process

    def close(self) -> None:
        """Stop watching. May be called again."""
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            watchdog.close()

    def _event(self, name: str, **details: Any) -> None:
        if self._run is not None:
            self._run.event(name, **details)
        else:
            self._context.recorder.event(name, 0, **details)

    def _is_recovered(self, hang: Hang) -> bool:
        return self._recovery is not None and self._recovery.can_replace and hang.kind == "missing"

    def _on_hang(
        self,
        hang: Hang,
        snapshots: Mapping[int, StackSnapshot],
        collected: bool,
        mine: StackSnapshot,
    ) -> None:
        """See `Watchdog`. Called in its thread."""
        if collected:
            path = self._context.run_dir / f"hang-{mine.step:08d}.txt"
            stacks = f"all stacks: {path}"
            try:
                path.write_text(page(hang, snapshots), encoding="utf-8")
            except OSError as failure:
                stacks = f"{cannot_write(path, failure)}; all stacks:\n\n{page(hang, snapshots)}"
            say(
                f"lockstep: the run hangs after step {mine.step}:"
                f" {hang.summary}\n{hang.report}\n{stacks}"
            )
        if self._context.world.rank == 0:
            self._event(
                "hang",
                kind=hang.kind,
                ranks=list(hang.ranks),
                summary=hang.summary,
                seconds=round(mine.seconds, 1),
            )
        if self._timeouts is None or self._timeouts.on_hang != "end":
            return
        error = HangError(hang.summary)
        if self._recovery is not None and self._is_recovered(hang):
            if collected:
                self._recovery.report_hang(hang.ranks, failure_record(error, None, HUNG_STATUS))
            return
        timer = threading.Timer(SAVING_SECONDS, os._exit, [HUNG_STATUS])
        timer.daemon = True
        timer.start()
        time.sleep(EXIT_DELAY_SECONDS)
        if mine.activity == "waits":  # else the training thread may be changing the state
            self._save(error)
        write_failure(failure_record(error, None, HUNG_STATUS))
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(HUNG_STATUS)

    def _on_stuck(self) -> None:
        """End this rank, which waits for an ended one. See `Watchdog`."""
        self._event(
            "run-failed",
            error=(
                "a peer was lost: another process of this run ended, or the connection to it broke"
            ),
        )
        self._save(HangError("the run was ended while this process waited for another"))
        os._exit(128 + signal.SIGTERM)

    def _save(self, error: HangError) -> None:
        if self._run is not None:
            with defer_kill():
                self._rescue(self._run, error)


def page(hang: Hang, snapshots: Mapping[int, StackSnapshot]) -> str:
    """Return the report with all stacks."""
    lines = [time.strftime("%Y-%m-%d %H:%M:%S"), hang.summary, "", hang.report]
    for rank, each in sorted(snapshots.items()):
        lines += [
            "",
            (
                f"rank {rank} ({each.host}, process {each.process}): {each.phase}, after step"
                f" {each.step}, {each.seconds:.1f} s"
            ),
        ]
        lines += [f"  in {call}, call {call.sequence} of {call.group}" for call in each.calls]
        for name, frames in {"training thread": each.stack, **each.threads}.items():
            lines += [f"  {name}, innermost frame last:", *(f"    {frame}" for frame in frames)]
    return "\n".join(lines) + "\n"
