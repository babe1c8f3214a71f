"""The hook that acts when the run hangs: it reports, saves the last whole step, and ends the process."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import torch

from lockstep.base.errors import HangError, cannot_write, say
from lockstep.base.torch_private import default_store
from lockstep.hooks.hang.report import Hang
from lockstep.hooks.hang.snapshot import Place
from lockstep.hooks.hang.watchdog import StoreMailbox, Watchdog
from lockstep.launch.failures import failure_record
from lockstep.launch.termination import HUNG_STATUS
from lockstep.launch.worker_files import defer_kill, is_shutting_down, write_failure
from lockstep.options import WatchdogTimeouts
from lockstep.training.context import Context
from lockstep.training.hook import Hook, Run

SAVING_SECONDS = 300.0
"""At most, for the last save of a rank that is stuck."""
NEWS_SECONDS = 0.5
"""From the verdict to the first rank's end, so that all know of it before they lose a peer."""


class HangHook(Hook):
    """Watches this rank's training thread; when the run hangs, reports it, saves the last whole step, and ends the process."""

    def __init__(self, timeouts: WatchdogTimeouts | None, context: Context, rescue: Callable[[Run, BaseException], bool]) -> None:
        """Begins to watch. Every rank calls it. `timeouts`: None: there is no watchdog. `rescue`: saves without the other ranks' help."""
        self._timeouts = timeouts
        self._context = context
        self._rescue = rescue
        self._run: Run | None = None
        self._watchdog: Watchdog | None = None
        if timeouts is None:
            return
        world, mailbox = context.world, None
        if world.size > 1:
            mailbox = StoreMailbox(default_store(), f"lockstep/watch/{context.recorder.attempt}")
        self._watchdog = Watchdog(
            context.phases,
            timeouts,
            rank=world.rank,
            size=world.size,
            mailbox=mailbox,
            told=self._act,
            is_over=is_shutting_down,
            ended=self._end,
        )
        self._watchdog.start()

    def watch(self, run: Run) -> None:
        """From now on there is a run, which can be saved."""
        self._run = run

    @property
    def ends_the_process(self) -> bool:
        """True if the watchdog is about to end this process: then nothing else may."""
        return self._watchdog is not None and self._watchdog.has_ended_the_run

    def close(self) -> None:
        """Stop watching."""
        if self._watchdog is not None:
            self._watchdog.close()

    def _event(self, name: str, **details: Any) -> None:
        if self._run is not None:
            self._run.event(name, **details)
        else:
            self._context.recorder.event(name, 0, **details)

    def _act(self, hang: Hang, places: Mapping[int, Place], gathered: bool, mine: Place) -> None:
        """In the watchdog's thread, on every rank."""
        ends = self._timeouts is not None and self._timeouts.on_hang == "end"
        if gathered:
            path = self._context.run_dir / f"hang-{mine.step:08d}.txt"
            where = f"all stacks: {path}"
            try:
                path.write_text(page(hang, places), encoding="utf-8")
            except OSError as failure:
                where = f"{cannot_write(path, failure)}; all stacks:\n\n{page(hang, places)}"
            say(f"lockstep: {self._text(hang, mine.step)}\n{where}")
        if self._context.world.rank == 0:
            self._event("hang", kind=hang.kind, ranks=list(hang.ranks), summary=hang.summary, seconds=round(mine.seconds, 1))
        if not ends:
            return
        error = HangError(hang.summary)
        timer = threading.Timer(SAVING_SECONDS, os._exit, [HUNG_STATUS])
        timer.daemon = True
        timer.start()
        time.sleep(NEWS_SECONDS)
        if mine.doing == "waits":  # what moves may be changing the state
            self._save(error)
        write_failure(failure_record(error, None, HUNG_STATUS))
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(HUNG_STATUS)

    def _end(self) -> None:
        """In the watchdog's thread, where the launcher ends the run and this rank waits for one that is gone, and will not hear of it."""
        self._event("run-failed", error="a peer was lost: another process of this run ended, or the connection to it broke")
        self._save(HangError("the run was ended while this process waited for another"))
        os._exit(128 + signal.SIGTERM)

    def _text(self, hang: Hang, step: int) -> str:
        return f"the run stands still in step {step}: {hang.summary}\n{hang.report}"

    def _save(self, error: HangError) -> None:
        with ExitStack() as stack:
            stack.enter_context(defer_kill())
            if self._context.world.device.type == "cuda":  # the stream at hand may wait for what does not come
                apart = torch.cuda.Stream(self._context.world.device)  # type: ignore[no-untyped-call]
                stack.enter_context(torch.cuda.stream(apart))
            if self._run is not None:
                self._rescue(self._run, error)


def page(hang: Hang, places: Mapping[int, Place]) -> str:
    """Everything known, for a file."""
    lines = [time.strftime("%Y-%m-%d %H:%M:%S"), hang.summary, "", hang.report]
    for rank, place in sorted(places.items()):
        lines += ["", f"rank {rank} ({place.host}, process {place.process}): {place.phase} of step {place.step}, {place.seconds:.1f} s"]
        lines += [f"  in {call}, call {call.sequence} of {call.group}" for call in place.calls]
        stacks: dict[str, Any] = {"the thread that trains": place.stack, **place.threads}
        for name, frames in stacks.items():
            lines += [f"  {name}, the innermost last:", *(f"    {frame}" for frame in frames)]
    return "\n".join(lines) + "\n"
