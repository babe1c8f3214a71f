"""What each rank's time goes to, from logging step to logging step: one small exchange, a line of `ranks.jsonl`, and who is slow."""

from __future__ import annotations

import json
import math
import resource
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.comm.mesh import Mesh
from lockstep.hooks.straggler_rule import PARTS, Stragglers
from lockstep.logging.metrics import drop_rows_after
from lockstep.logging.phases import Phases

_OF_HOOKS = ("hooks", "script")
_OF_COMPUTE = ("compute", "update")
_COLUMNS = ("step", *PARTS, "communication", "share", "memory")
LOOK_SECONDS = 0.2
"""Where logging steps follow each other more quickly, only some of them are looked at."""
_RANKS_AT_ONCE = 256
"""Of more ranks, as many times more seldom: what that costs a step does not grow with them."""


class Ranks:
    """One a rank; every rank makes it, and makes the same calls on it."""

    def __init__(self, mesh: Mesh, phases: Phases, run_dir: Path, event: Callable[..., None], warn: Callable[[str], None]) -> None:
        self._mesh = mesh
        self._phases = phases
        self._event = event
        self._warn = warn
        world = mesh.world
        self.hosts, parts = zip(*world.gather_values([socket.gethostname(), mesh.axis("pipeline").rank]), strict=True)
        self._stragglers = Stragglers(parts)
        self._every = self._left = -(-world.size // _RANKS_AT_ONCE)
        """Logging steps from one look to the next, and those that are left."""
        self._memory = 0.0
        self._path = run_dir / "ranks.jsonl"
        self._file: TextIO | None = None
        self._share = 0
        self._steps = 0
        self.restart()

    def begin(self, step: int) -> None:
        """The run begins, or goes on, with `step` steps done."""
        if self._mesh.world.rank == 0 and self._file is None and self._path.exists():
            drop_rows_after(step, self._path)
        self.restart()

    def restart(self) -> None:
        """Begin to count anew."""
        self._since = time.perf_counter()
        totals, waited = self._times()
        self._spent, self._waited = dict(totals), dict(waited)
        self._share = self._steps = 0

    def count(self, share: int) -> None:
        """A step is done. `share`: microbatches that this rank computed in it."""
        self._share += share
        self._steps += 1

    def log(self, step: int) -> float:
        """After a logging step; `step`: those done. Every rank calls it. Returns the most memory that any rank has had, in bytes, as of the
        last time that ranks were looked at.
        """
        self._left -= 1
        if self._left:
            return self._memory
        seconds, steps = time.perf_counter() - self._since, max(self._steps, 1)
        mine = [seconds, *self._parts(), float(self._share), float(peak_bytes(self._mesh.world.device))]
        everyone = self._mesh.world.gather_rows(torch.tensor([mine], dtype=torch.float64), [1] * self._mesh.world.size)
        columns = dict(zip(_COLUMNS, everyone.numpy().T, strict=True))
        if self._mesh.world.rank == 0:
            self._file = self._file or self._path.open("a", encoding="utf-8", buffering=1)
            ranks = {name: (columns[name] / steps).round(6).tolist() for name in _COLUMNS[:5]}
            self._file.write(json.dumps({"step": step, "time": time.time(), "ranks": ranks, "hosts": self.hosts}) + "\n")
        self._look(columns, steps, seconds)
        self._every = self._left = next_look(float(columns["step"].max()) / self._every, before=self._every, ranks=len(self.hosts))
        self.restart()
        self._memory = float(columns["memory"].max())
        return self._memory

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

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

    def _look(self, columns: Mapping[str, NDArray[np.float64]], steps: int, seconds: float) -> None:
        """Tell who has become slow. What counts is the time a microbatch: ranks may compute different numbers of them."""
        share = columns["share"]
        scale = np.where(share > 0, share.mean() / np.maximum(share, 1.0), 1.0)
        times = np.stack([columns[part] * (1.0 if part == "hooks" else scale) / steps for part in PARTS])
        for each in self._stragglers.look(times, seconds):
            host = self.hosts[each.rank]
            details = {"rank": each.rank, "host": host, "part": each.part, "seconds": each.seconds, "usual_seconds": each.usual_seconds}
            self._event("straggler", **details, times=round(each.times, 2))
            self._warn(
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
