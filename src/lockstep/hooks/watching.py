"""What looks after a run while it goes on: whether it stands still, whether replicas are the same, who is slow, what time goes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from lockstep.comm.mesh import Mesh
from lockstep.comm.wait_times import count_torch_waits
from lockstep.hooks.hang.hang_hook import Standstill
from lockstep.hooks.hang.watchdog import Watchdog
from lockstep.hooks.profiler import Profiling
from lockstep.hooks.replica_audit import Replicas
from lockstep.hooks.stragglers import Ranks
from lockstep.hooks.timeline import steps_of
from lockstep.launch.environment import Environment
from lockstep.logging.phases import Phases
from lockstep.logging.recorder import Recorder
from lockstep.logging.stream_times import StreamTimes
from lockstep.timeouts import Patience
from lockstep.train.step import Step
from lockstep.train.train_module import Pair


class Watching:
    """One a rank; every rank makes it, and makes the same calls on it."""

    def __init__(
        self,
        mesh: Mesh,
        pairs: Sequence[Pair],
        phases: Phases,
        recorder: Recorder,
        environment: Environment,
        *,
        event: Callable[..., None],
        rescue: Callable[[BaseException], bool],
        stack: ExitStack,
    ) -> None:
        """`rescue`: saves the last whole step without the others' help. `stack`: what ends when the session does."""
        self._environment = environment
        self._replicas = Replicas(mesh, pairs)
        self._watchdog: Watchdog | None = None
        self._profiling: Profiling | None = None
        if (patience := Patience.parse(environment.hang_after, environment.on_hang)) is not None:
            standstill = Standstill(patience, recorder.path, mesh.world, event, rescue)
            self._watchdog = standstill.watch(phases, recorder.attempt)
            stack.callback(self._watchdog.close)
        if environment.profile is not None:
            steps = steps_of(environment.profile)
            self._profiling = Profiling(steps, recorder.path, mesh.world, pairs, phases, event, recorder.message)
            stack.callback(self._profiling.close)
        stack.enter_context(count_torch_waits())
        if mesh.world.device.type == "cuda":
            phases.stream = StreamTimes(partial(torch.cuda.Event, enable_timing=True))
        self._ranks = Ranks(mesh, phases, recorder.path, event, recorder.message)
        stack.callback(self._ranks.close)

    @property
    def ends_the_run(self) -> bool:
        """Whether the watchdog is about to end this process: then nobody else does."""
        return self._watchdog is not None and self._watchdog.has_ended_the_run

    def begin_loop(self, steps_done: int) -> None:
        """What came before the steps is none of theirs."""
        self._ranks.begin(steps_done)

    def before(self, step: Step) -> None:
        if self._profiling is not None:
            self._profiling.before(step.index)

    def after(self, step: Step) -> None:
        if self._profiling is not None:
            self._profiling.after(step.index)
        self._ranks.count(step.source.mine)

    def log(self, steps_done: int) -> float:
        """At a logging step. Returns the most memory that any rank has had, in bytes."""
        return self._ranks.log(steps_done)

    def compare(self, steps_done: int, *, now: bool) -> None:
        """Where it is time to, or `now`: compare replicas. Raises `DivergenceError`."""
        every = self._environment.compare_every
        if every and (now or steps_done % every == 0) and self._replicas.agreed != steps_done:
            self._replicas.compare(steps_done)
