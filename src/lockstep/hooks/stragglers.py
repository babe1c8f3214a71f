"""The hook that finds stragglers: at logging steps, one small gather of each rank's times, and a line of `ranks.jsonl`."""

from __future__ import annotations

import json
import math
import resource
import socket
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import TextIO

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.comm.wait_times import count_torch_waits
from lockstep.hooks.straggler_rule import PARTS, StragglerFinder
from lockstep.logging.metrics import drop_rows_after
from lockstep.logging.phases import StreamTimes
from lockstep.training.hook import ControlHook, Run

_OF_HOOKS = ("hooks", "script")
_OF_COMPUTE = ("compute", "update")
_COLUMNS = ("step", *PARTS, "communication", "share", "memory")
LOOK_SECONDS = 0.2
"""Shortest time between two gathers. If logging steps come faster, some are left out."""
_RANKS_AT_ONCE = 256
"""With n times as many ranks, gathers are n times rarer, so that their cost for each step stays the same."""


class Stragglers(ControlHook):
    """Measures where each rank's time goes, writes `ranks.jsonl`, and names ranks that have become slow."""

    def __init__(self) -> None:
        self._memory_bytes = 0.0
        self._file: TextIO | None = None
        self._finder: StragglerFinder | None = None
        self._stack = ExitStack()
        self._share = self._steps = 0

    def on_start(self, run: Run) -> None:
        self._stack.enter_context(count_torch_waits())
        context = run.context
        if context.device.type == "cuda":
            context.phases.stream = StreamTimes(partial(torch.cuda.Event, enable_timing=True))
        self._phases, self._mesh = context.phases, context.mesh
        mine = [socket.gethostname(), context.mesh.axis("pipeline").rank]
        self.hosts, parts = zip(*context.world.gather_values(mine), strict=True)
        self._finder = StragglerFinder(parts)
        self._every = self._left = -(-context.world.size // _RANKS_AT_ONCE)
        """Logging steps from one exchange to the next, and those that are left."""
        self._path = context.run_dir / "ranks.jsonl"

    def before_steps(self, run: Run) -> None:
        if run.context.world.rank == 0 and self._file is None and self._path.exists():
            drop_rows_after(run.step, self._path)
        self._restart()

    def between_steps(self, run: Run) -> None:
        assert run.source is not None, "a step has begun"
        self._share += run.source.mine
        self._steps += 1
        if run.is_logging_step:
            self._left -= 1
            if not self._left:
                self._exchange(run)
            run.measured["memory_bytes"] = self._memory_bytes

    def on_end(self, run: Run) -> None:
        self._stack.close()
        if self._file is not None:
            self._file.close()

    def _restart(self) -> None:
        self._since = time.perf_counter()
        totals, waited = self._times()
        self._spent, self._waited = dict(totals), dict(waited)
        self._share = self._steps = 0

    def _exchange(self, run: Run) -> None:
        """Gather all ranks' times. Every rank calls it."""
        world = run.context.world
        seconds, steps = time.perf_counter() - self._since, max(self._steps, 1)
        mine = [seconds, *self._parts(), float(self._share), float(peak_bytes(world.device))]
        everyone = world.gather_rows(torch.tensor([mine], dtype=torch.float64), [1] * world.size)
        columns = dict(zip(_COLUMNS, everyone.numpy().T, strict=True))
        if world.rank == 0:
            self._file = self._file or self._path.open("a", encoding="utf-8", buffering=1)
            ranks = {name: (columns[name] / steps).round(6).tolist() for name in _COLUMNS[:5]}
            self._file.write(json.dumps({"step": run.step, "time": time.time(), "ranks": ranks, "hosts": self.hosts}) + "\n")
        self._report(run, columns, steps, seconds)
        self._every = self._left = next_look(float(columns["step"].max()) / self._every, before=self._every, ranks=len(self.hosts))
        self._restart()
        self._memory_bytes = float(columns["memory"].max())

    def _parts(self) -> list[float]:
        """Seconds since the last time, without waits: data, compute, hooks; and communication."""
        totals, waits = self._times()

        def spent(*names: str) -> float:
            return sum(totals[name] - self._spent.get(name, 0.0) for name in names)

        def waited(*names: str) -> float:
            return sum(waits[name] - self._waited.get(name, 0.0) for name in names)

        own = [spent(*names) - waited(*names) for names in (("data",), _OF_COMPUTE, _OF_HOOKS)]
        return [*own, spent("exchange") + waited("data", *_OF_COMPUTE, *_OF_HOOKS)]

    def _times(self) -> tuple[defaultdict[str, float], defaultdict[str, float]]:
        """Seconds of each phase in all, and those of them that were waits for others. On a GPU such waits are phases of their own."""
        stream = self._phases.stream
        return (self._phases.totals, self._phases.waited) if stream is None else (stream.totals(), defaultdict(float))

    def _report(self, run: Run, columns: Mapping[str, NDArray[np.float64]], steps: int, seconds: float) -> None:
        """Name ranks that have become slow, by their time for each microbatch: ranks may compute different numbers of them."""
        assert self._finder is not None, "on_start has made it"
        share = columns["share"]
        scale = np.where(share > 0, share.mean() / np.maximum(share, 1.0), 1.0)
        times = np.stack([columns[part] * (1.0 if part == "hooks" else scale) / steps for part in PARTS])
        for each in self._finder.look(times, seconds):
            host = self.hosts[each.rank]
            details = {"rank": each.rank, "host": host, "part": each.part, "seconds": each.seconds, "usual_seconds": each.usual_seconds}
            run.event("straggler", **details, times=round(each.times, 2))
            run.context.recorder.message(
                f"rank {each.rank} on {host} is slow: its own work takes {each.times:.2f} times the others', most of it in {each.part} "
                f"({each.seconds * 1e3:.1f} ms a step, and {each.usual_seconds * 1e3:.1f} elsewhere)"
            )


def next_look(seconds: float, *, before: int, ranks: int) -> int:
    """Logging steps until the next look: the same on every rank. `seconds`: from one to the next. `before`: as it was: a first step, or one
    that saves, says little of those that follow."""
    wanted = LOOK_SECONDS * max(1.0, ranks / _RANKS_AT_ONCE)
    return max(1, min(math.ceil(wanted / max(seconds, 1e-9)), 2 * before))


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process has had: on its GPU, where it has one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
