"""The hook that finds stragglers: ranks that work more slowly than the median. With the plan's
`assignment=measured`, all ranks also compute a new assignment of microbatches to ranks."""

from __future__ import annotations

import math
import socket
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.base import accelerator
from lockstep.base.system import peak_memory_bytes
from lockstep.comm.torch_collectives import count_torch_waits
from lockstep.logging.metrics import StepRows
from lockstep.logging.phases import StreamTimes
from lockstep.logging.run_files import RANKS
from lockstep.training.hook import ControlHook
from lockstep.training.microbatches import Microbatches
from lockstep.training.run import Run

PARTS = ("data", "compute", "hooks")
"""Parts of a step's time. The times omit waits for other ranks."""
_OF_HOOKS = ("hooks", "script")
_OF_COMPUTE = ("compute", "update")
_COLUMNS = (
    "step",
    *PARTS,
    "communication",
    "microbatches",
    "memory",
    "one_microbatch",
    "requested",
)
_OF_MICROBATCHES = ("data", "compute")
MEDIAN_OF = 16
"""Number of steps from which a rank takes the median time of a microbatch. On a GPU, the number of
exchanges of times."""
MIN_MEDIAN_OF = 3
SLOWDOWN = 1.15  # a rank is a straggler if its work takes this many times the others' median
MIN_SECONDS = 10.0
MIN_WINDOWS = 3  # ranks are compared over at least MIN_SECONDS and this many exchanges of times
# Shortest time between two all-gathers of the ranks' times. If logging steps come faster, some of
# them are skipped.
EXCHANGE_SECONDS = 0.2
_RANKS_AT_ONCE = 256
"""With n times this many ranks, the ranks exchange their times n times less often."""

# shape (parts, ranks): seconds per step between two logging steps, in the order of `PARTS`
Times = NDArray[np.float64]


class Stragglers(ControlHook):
    def __init__(self) -> None:
        self._memory_bytes = 0.0
        self._finder: StragglerFinder | None = None
        self._stack = ExitStack()
        self._microbatches = self._steps = 0
        self._pace = MicrobatchPace()

    def on_start(self, run: Run) -> None:
        self._stack.enter_context(count_torch_waits())
        context = run.context
        if accelerator.has_streams(context.device):
            context.phases.stream = StreamTimes(
                partial(accelerator.event, context.device, timed=True)
            )
        self._phases = context.phases
        mine = [socket.gethostname(), context.mesh.stages.rank]
        self.hosts, stages = zip(*context.world.gather_values(mine), strict=True)
        self._finder = StragglerFinder(stages)
        self._interval = self._remaining = -(-context.world.size // _RANKS_AT_ONCE)
        """Number of logging steps between two exchanges of times, and until the next exchange."""
        self._rows = self._stack.enter_context(StepRows(context.run_dir / RANKS))

    def before_steps(self, run: Run) -> None:
        if run.context.world.rank == 0:
            self._rows.resume(run.step)
        self._restart()

    def between_steps(self, run: Run) -> None:
        source = run.training.current
        self._microbatches += source.own_count
        self._steps += 1
        if run.context.plan.assignment == "measured" and self._phases.stream is None:
            self._pace.add(self._own_seconds(*_OF_MICROBATCHES), source.own_count)
        if run.is_logging_step:
            self._remaining -= 1
            if not self._remaining:
                self._exchange(run)
            run.training.measured["memory_bytes"] = self._memory_bytes

    def on_end(self, run: Run) -> None:
        self._stack.close()

    def _restart(self) -> None:
        self._since = time.perf_counter()
        totals, waited = self._times()
        self._spent, self._waited = dict(totals), dict(waited)
        self._microbatches = self._steps = 0
        self._pace.restart()

    def _exchange(self, run: Run) -> None:
        """Every rank must call this method."""
        world, source = run.context.world, run.training.current
        if self._phases.stream is not None:
            self._pace.add(self._own_seconds(*_OF_MICROBATCHES), self._microbatches)
        seconds, steps = time.perf_counter() - self._since, max(self._steps, 1)
        mine = [seconds, *self._parts(), self._microbatches, process_peak_bytes(world.device)]
        mine += [self._pace.seconds(), source.batching.requested]
        everyone = world.gather_rows(torch.tensor([mine], dtype=torch.float64), [1] * world.size)
        columns = dict(zip(_COLUMNS, everyone.numpy().T, strict=True))
        if world.rank == 0:
            ranks = {name: (columns[name] / steps).round(6).tolist() for name in _COLUMNS[:5]}
            self._rows.write(run.step, ranks=ranks, hosts=self.hosts)
        self._report(run, columns, steps, seconds)
        if run.context.plan.assignment == "measured":
            speeds, requested = columns["one_microbatch"].tolist(), columns["requested"].max()
            reassign(run, source, speeds, requested=int(requested))
        longest, before = float(columns["step"].max()) / self._interval, self._interval
        self._interval = next_interval(longest, before=before, ranks=len(self.hosts))
        self._remaining = self._interval
        self._restart()
        self._memory_bytes = float(columns["memory"].max())

    def _parts(self) -> list[float]:
        totals, waits = self._times()
        phases = (("data",), _OF_COMPUTE, _OF_HOOKS)
        waited = sum(
            waits[name] - self._waited.get(name, 0.0) for names in phases for name in names
        )
        exchange = totals["exchange"] - self._spent.get("exchange", 0.0)
        return [*(self._own_seconds(*names) for names in phases), exchange + waited]

    def _own_seconds(self, *names: str) -> float:
        totals, waits = self._times()
        return sum(
            totals[name] - self._spent.get(name, 0.0) - waits[name] + self._waited.get(name, 0.0)
            for name in names
        )

    def _times(self) -> tuple[defaultdict[str, float], defaultdict[str, float]]:
        """Return the seconds of each phase, and the seconds of waits for other ranks in each phase.
        On a GPU, a wait is a separate phase."""
        stream = self._phases.stream
        if stream is None:
            return self._phases.totals, self._phases.waited
        return stream.totals(), defaultdict(float)

    def _report(
        self, run: Run, columns: Mapping[str, NDArray[np.float64]], steps: int, seconds: float
    ) -> None:
        assert self._finder is not None, "on_start has made it"
        microbatches = columns["microbatches"]
        scale = np.where(microbatches > 0, microbatches.mean() / np.maximum(microbatches, 1.0), 1.0)
        times = np.stack(
            [columns[part] * (1.0 if part == "hooks" else scale) / steps for part in PARTS]
        )
        for each in self._finder.add(times, seconds):
            host = self.hosts[each.rank]
            details = {
                "rank": each.rank,
                "host": host,
                "part": each.part,
                "seconds": each.seconds,
                "usual_seconds": each.usual_seconds,
            }
            run.event("straggler", **details, times=round(each.times, 2))
            run.context.recorder.message(
                f"rank {each.rank} on {host} is slow: its own work takes {each.times:.2f} times"
                f" that of the others, most of it in {each.part} ({each.seconds * 1e3:.1f} ms a"
                f" step, and {each.usual_seconds * 1e3:.1f} ms on the others)"
            )


class MicrobatchPace:
    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=MEDIAN_OF)
        self.restart()

    def restart(self) -> None:
        self._before = 0.0

    def add(self, seconds: float, microbatches: int) -> None:
        if microbatches:
            self._latest.append((seconds - self._before) / microbatches)
        self._before = seconds

    def seconds(self) -> float:
        """The median time per microbatch. NaN before there are enough measurements."""
        return statistics.median(self._latest) if len(self._latest) >= MIN_MEDIAN_OF else math.nan


def reassign(run: Run, source: Microbatches, seconds: Sequence[float], *, requested: int) -> None:
    """Compute a new assignment of microbatches to ranks. `seconds` has each rank's time per
    microbatch. `requested` is the last step for which any rank has requested data. Every rank must
    call this function with the same arguments."""
    batching, first = source.batching, requested + 1
    count = batching.max_microbatches
    assignment = batching.assignment.at_speeds(seconds, count)
    if assignment is None or first >= batching.steps:
        return
    batching.reassign(assignment, first=first, done=source.step)
    run.event(
        "assignment-changed",
        first_step=run.training.loop.steps_before + first,
        microbatches=[len(share) for share in assignment.indices_by_rank(count)],
        milliseconds=[round(1e3 * each, 3) for each in seconds],
    )


def next_interval(seconds: float, *, before: int, ranks: int) -> int:
    """Return the number of logging steps until the next exchange of times. `seconds` is the time
    between two logging steps."""
    # A single measurement of `seconds` may be too long or too short: the first step, and a step
    # that saves, take longer. So the interval at most doubles.
    wanted = EXCHANGE_SECONDS * max(1.0, ranks / _RANKS_AT_ONCE)
    return max(1, min(math.ceil(wanted / max(seconds, 1e-9)), 2 * before))


def process_peak_bytes(device: torch.device) -> float:
    """Return the peak memory of this process, on its GPU if it has one. NaN if unknown."""
    on_device = accelerator.peak_bytes(device)
    return on_device if on_device is not None else peak_memory_bytes()


class Straggler(NamedTuple):
    rank: int
    part: str  # in which the rank differs most from the others, of `PARTS`
    seconds: float  # per step, in that part
    usual_seconds: float  # the other ranks' median in that part
    times: float  # time of all parts, divided by the other ranks' median


class StragglerFinder:
    def __init__(self, peers: Sequence[int]) -> None:
        """`peers` has a number for each rank. Ranks with equal numbers do the same work."""
        self._peers = peers
        self._windows: deque[tuple[float, Times]] = deque()
        self._reported: set[tuple[int, str]] = set()

    def add(self, times: Times, seconds: float) -> list[Straggler]:
        """Return the stragglers that the previous call did not return."""
        self._windows.append((seconds, times))
        lengths = [seconds for seconds, _ in self._windows]
        if len(lengths) < MIN_WINDOWS or sum(lengths) < MIN_SECONDS:
            return []
        mean = np.average([times for _, times in self._windows], axis=0, weights=lengths)
        stragglers = slow(mean, self._peers)
        while len(lengths) > MIN_WINDOWS and sum(lengths[1:]) >= MIN_SECONDS:
            del lengths[0]
            self._windows.popleft()
        new = [each for each in stragglers if (each.rank, each.part) not in self._reported]
        self._reported = {(each.rank, each.part) for each in stragglers}
        return new


def slow(times: Times, peers: Sequence[int]) -> list[Straggler]:
    """Return the ranks whose work takes `SLOWDOWN` times as long as the median of their peers.
    Takes O(n log n)."""
    stragglers = []
    for peer in sorted(set(peers)):
        ranks = np.flatnonzero(np.asarray(peers) == peer)
        if len(ranks) < 2:
            continue
        parts = times[:, ranks]
        own = parts.sum(axis=0)
        usual = _medians_of_the_others(own)
        usual_parts = np.stack([_medians_of_the_others(part) for part in parts])
        for i in np.flatnonzero(own > SLOWDOWN * usual):
            part = int(np.argmax(parts[:, i] - usual_parts[:, i]))
            seconds, usual_seconds = float(parts[part, i]), float(usual_parts[part, i])
            factor = float(own[i] / max(usual[i], 1e-9))
            stragglers.append(Straggler(int(ranks[i]), PARTS[part], seconds, usual_seconds, factor))
    return sorted(stragglers, key=lambda each: each.rank)


def _medians_of_the_others(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return, for each value, the median of all values except this one."""
    order = np.argsort(values)
    positions = np.empty_like(order)
    positions[order] = np.arange(len(values))
    middle = [(len(values) - 2) // 2, (len(values) - 1) // 2]
    ordered = values[order]
    medians: NDArray[np.float64] = sum(ordered[each + (each >= positions)] for each in middle) / 2
    return medians
