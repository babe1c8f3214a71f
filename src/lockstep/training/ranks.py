"""What each rank's time goes to, from logging step to logging step: one small exchange, a line of `ranks.jsonl`, and who is slow."""

from __future__ import annotations

import json
import resource
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import torch

from lockstep.comm.mesh import Mesh
from lockstep.watch.metrics import keep_up_to
from lockstep.watch.phases import Phases
from lockstep.watch.stragglers import Row, Stragglers

_OF_HOOKS = ("hooks", "script")
_OF_COMPUTE = ("compute", "update")
_COLUMNS = ("step", "data", "compute", "hooks", "communication", "share", "memory")


class Ranks:
    """One a rank; every rank makes it, and makes the same calls on it."""

    def __init__(self, mesh: Mesh, phases: Phases, run_dir: Path, event: Callable[..., None], warn: Callable[[str], None]) -> None:
        self._mesh = mesh
        self._phases = phases
        self._event = event
        self._warn = warn
        world = mesh.world
        self.hosts = world.gather_values(socket.gethostname())
        self._stages = world.gather_values(mesh.axis("pipeline").rank)
        self._stragglers = Stragglers()
        self._path = run_dir / "ranks.jsonl"
        self._file: TextIO | None = None
        self._share = 0
        self._steps = 0
        self.restart()

    def begin(self, step: int) -> None:
        """The run begins, or goes on, with `step` steps done."""
        if self._mesh.world.rank == 0 and self._file is None and self._path.exists():
            keep_up_to(step, self._path)
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
        """After a logging step; `step`: those done. Every rank calls it. Returns the most memory that any rank has had, in bytes."""
        seconds, steps = time.perf_counter() - self._since, max(self._steps, 1)
        mine = [seconds, *self._parts(), float(self._share), float(self._memory_bytes())]
        everyone = self._mesh.world.gather_rows(torch.tensor([mine], dtype=torch.float64), [1] * self._mesh.world.size).tolist()
        columns = dict(zip(_COLUMNS, zip(*everyone, strict=True), strict=True))
        if self._mesh.world.rank == 0:
            self._file = self._file or self._path.open("a", encoding="utf-8", buffering=1)
            ranks = {name: [round(value / steps, 6) for value in columns[name]] for name in _COLUMNS[:5]}
            self._file.write(json.dumps({"step": step, "time": time.time(), "ranks": ranks, "hosts": self.hosts}) + "\n")
        self._look(columns, steps, seconds)
        self.restart()
        return float(max(columns["memory"]))

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

    def _look(self, columns: dict[str, tuple[float, ...]], steps: int, seconds: float) -> None:
        """Tell who has become slow. What counts is the time a microbatch: ranks may compute different numbers of them."""
        mean = sum(columns["share"]) / len(columns["share"]) or 1.0
        rows = []
        for rank, stage in enumerate(self._stages):
            scale = mean / (columns["share"][rank] or mean)
            seconds_of = {name: columns[name][rank] / steps for name in _COLUMNS[:5]}
            seconds_of |= {name: seconds_of[name] * scale for name in ("data", "compute")}
            rows.append(Row(**seconds_of, peer=stage))
        for each in self._stragglers.look(rows, seconds):
            host = self.hosts[each.rank]
            details = {"rank": each.rank, "host": host, "part": each.part, "seconds": each.seconds, "usual_seconds": each.usual_seconds}
            self._event("straggler", **details, times=round(each.times, 2))
            self._warn(
                f"rank {each.rank} on {host} is slow: its own work takes {each.times:.2f} times the others', most of it in {each.part} "
                f"({each.seconds * 1e3:.1f} ms a step, and {each.usual_seconds * 1e3:.1f} elsewhere)"
            )

    def _memory_bytes(self) -> int:
        """The most that this process has had: on its GPU, where it has one."""
        if self._mesh.world.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._mesh.world.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
