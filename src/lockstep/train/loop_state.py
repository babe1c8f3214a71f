"""Where a session is among its steps, in how many loops they are, what it goes on from, and how it is kept."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lockstep.base.errors import CheckpointError, DivergenceError
from lockstep.checkpoint.load import Reader
from lockstep.comm.mesh import Mesh
from lockstep.data.streams import ShardPosition
from lockstep.hooks.checkpointing import Keeper
from lockstep.launch.grace import needing_time
from lockstep.launch.termination import Terminated
from lockstep.train.microbatches import positions_in
from lockstep.train.state import Stateful
from lockstep.train.step import Step
from lockstep.train.train_module import Pair


@dataclass(slots=True)
class Course:
    """Of one session, the same on every rank."""

    mesh: Mesh
    pairs: Sequence[Pair]
    """What the session has prepared."""
    event: Callable[..., None]
    """`Session.event`."""
    others: dict[str, Stateful] = field(default_factory=dict)
    """What else is saved, by name."""
    is_whole_in_a_step: bool = True
    """Whether what is saved changes in a step only once its commit has begun: not what a script's own loop includes."""
    step: Step | None = None
    """The latest of this loop."""
    keeper: Keeper | None = None
    """None: nothing is saved."""
    _resumed: Reader | None = None
    _loops: int = 0
    _before: int = 0
    """Steps done in earlier loops."""
    _first: int = 0
    """The step of the loop that this process began with."""

    @property
    def steps_done(self) -> int:
        """Optimizer steps that all pairs have committed, in all loops, and before this process went on with the run."""
        if self.step is None:
            return self._before + self._first
        return self._before + self.step.index + (len(self.step.committed) == len(self.pairs))

    def include(self, name: str, state: Stateful) -> None:
        """See `Session.include`."""
        if not isinstance(state, Stateful):
            raise CheckpointError(f"include({name!r}, a {type(state).__name__}); it has no state_dict and load_state_dict; give it both")
        if name in self.others:
            raise CheckpointError(f"include({name!r}) for a second time; each name is for one; choose another")
        if self._loops:
            raise CheckpointError(f"include({name!r}) after steps have begun; what was saved is taken up then; include it before")
        self.others[name] = state
        self.is_whole_in_a_step = False

    def begin_loop(self, keep: Callable[[], tuple[Keeper | None, Reader | None]]) -> int:
        """Another loop of steps. Returns its first step: a large one where all of it was done before. Every rank calls it.

        `keep`: called before the first loop, takes up what was saved.
        """
        self._loops += 1
        self._before = self.steps_done
        self.step, self._first = None, 0
        if self._loops == 1:
            self.keeper, self._resumed = keep()
        saved = 0 if self._resumed is None else self._resumed.manifest.values["loop"]
        if self._resumed is None or self._loops != saved:
            return 0 if self._loops > saved else sys.maxsize
        self._before = self._resumed.manifest.values["steps_before"]
        self._first = self._resumed.manifest.step - self._before
        return self._first

    def save_is_due(self) -> bool:
        """By the clock."""
        return self.keeper is not None and self.keeper.time_is_up()

    def shards(self, count: int) -> dict[int, ShardPosition]:
        """Where the `count` shards of a stream stand at the beginning of this loop. Raises `CheckpointError`."""
        if self._resumed is None or not self._first:
            return {}
        return positions_in(self._resumed.manifest.values, count)

    def end_step(self, step: Step) -> None:
        """All that the script does in the step is done."""
        step.ended = True
        if self.keeper is not None:
            shards = {str(shard): at for shard, at in (step.source.positions or {}).items()}
            self.keeper.values.update(loop=self._loops, steps_before=self._before, shards=shards)

    def save_end(self) -> None:
        """Save the last step, where it is whole. Every rank calls it, after the loops."""
        if self.keeper is not None and self.step is not None and len(self.step.committed) == len(self.pairs):
            self.end_step(self.step)
            self.keeper.save_now(self.steps_done)

    def rescue(self, error: BaseException) -> bool:
        """Where this rank's state is that of a whole step, save it, without the others' help. Returns whether it is saved."""
        by_the_script = isinstance(error, SystemExit) and not isinstance(error, Terminated)
        if self.keeper is None or self.step is None or by_the_script or isinstance(error, DivergenceError) or not self.is_whole_in_a_step:
            return False
        if self.step.source.positions is not None and self.mesh.axis("replicate").size > 1:
            return False  # another replica's shards stand where only it knows
        if self.step.touched and not self.step.ended:
            return False
        try:
            with needing_time():
                name = self.keeper.rescue(self.steps_done)
        except Exception as failure:  # whatever it is, it must not hide the error that ended the run
            self.event("rescue-failed", reason=f"{type(failure).__name__}: {failure}")
            return False
        if name is not None:
            self.event("rescued", checkpoint=name)
        return True
