"""Where a run stands among its loops of steps, and where it goes on after a resume."""

from __future__ import annotations

import json
import sys

from hypothesis import given, strategies as st

from lockstep.training.training import LoopState

LOOPS = st.lists(st.integers(0, 20), min_size=1, max_size=5)
"""The steps of each loop of a script."""


def run(
    loops: list[int], *, state: LoopState, steps_done: int, until: int | None = None
) -> tuple[list[tuple[int, int]], int]:
    """Run through a script's loops. Returns (loop, step in it) of each step that was done, and the
    steps done in all."""
    done = []
    for number, steps in enumerate(loops):
        for step in range(state.begin_loop(steps_done), steps):
            if until is not None and steps_done == until:
                return done, steps_done
            done.append((number, step))
            steps_done += 1
    return done, steps_done


@given(LOOPS, st.data())
def test_a_resumed_run_does_the_steps_that_are_left(loops: list[int], data: st.DataObject) -> None:
    whole, total = run(loops, state=LoopState(), steps_done=0)
    assert total == sum(loops)
    until = data.draw(st.integers(0, total))
    first = LoopState()
    before, steps_done = run(loops, state=first, steps_done=0, until=until)
    saved = json.loads(json.dumps({**first.values(), "step": steps_done}))
    after, ended_at = run(loops, state=LoopState(resumed=saved), steps_done=steps_done)
    assert before + after == whole
    assert ended_at == total


def test_loops_that_were_done_are_passed_over() -> None:
    state = LoopState(resumed={"loop": 2, "steps_before": 10, "shards": {}, "step": 13})
    assert state.begin_loop(13) == sys.maxsize
    assert state.begin_loop(13) == 3
    assert state.steps_before == 10
    assert state.begin_loop(20) == 0
    assert (state.loops, state.steps_before) == (3, 20)


def test_what_is_saved_is_json() -> None:
    state = LoopState()
    state.begin_loop(0)
    state.shards = {"3": (1, 40)}
    state.agreed = 7
    assert json.loads(json.dumps(state.values())) == {
        "loop": 1,
        "steps_before": 0,
        "shards": {"3": [1, 40]},
        "agreed": 7,
        "data": {},
    }
