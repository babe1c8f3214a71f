"""What is deleted is what nobody asked to keep, whether that is asked after each save or once at
the end."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import Literal

import hypothesis.strategies as st
from hypothesis import given

from lockstep.checkpoint.storage import CheckpointName
from lockstep.checkpoint.writer import checkpoints_to_delete, sparse_steps

names = st.builds(CheckpointName, st.integers(0, 60), st.sampled_from(["0000000a", "0000000b"]))
scores = st.one_of(st.integers(-3, 3).map(float), st.just(math.nan), st.just(math.inf))
by_rules = partial(checkpoints_to_delete, sparse=False)
to_delete = partial(by_rules, every=None, agreed=None, scores={}, mode="min")
modes: st.SearchStrategy[Literal["min", "max"]] = st.sampled_from(["min", "max"])


@given(
    st.dictionaries(names, st.none() | scores),
    st.integers(1, 5),
    st.none() | st.integers(1, 9),
    st.none() | st.integers(0, 60),
    modes,
)
def test_only_the_requested_checkpoints_are_kept(
    given: dict[CheckpointName, float | None],
    last: int,
    every: int | None,
    agreed: int | None,
    mode: Literal["min", "max"],
) -> None:
    known = {name: score for name, score in given.items() if score is not None}
    newest = max(given, default=CheckpointName(0, "0000000a"))
    delete = partial(
        by_rules,
        newest=newest,
        last=last,
        every=every,
        agreed=agreed,
        scores=known,
        mode=mode,
    )
    gone = delete(given)
    ordered = sorted(given)
    before = [name for name in ordered if agreed is not None and name.step <= agreed]
    real = {
        name: score if mode == "min" else -score
        for name, score in known.items()
        if not math.isnan(score)
    }
    best = {
        name
        for name in real
        if real[name] == min(real.values())
        and all(other >= name for other in real if real[other] == real[name])
    }
    assert gone == sorted(gone)
    for place, name in enumerate(ordered):
        stays = (
            place >= len(ordered) - last
            or (every is not None and name.step % every == 0)
            or name in best
            or name in before[-1:]
        )
        assert (name in gone) == (not stays)
    assert delete(set(given) - set(gone)) == []


@given(
    st.lists(st.none() | scores, max_size=30),
    st.integers(1, 4),
    st.none() | st.integers(1, 5),
    modes,
)
def test_deleting_after_each_save_is_as_deleting_once(
    found: list[float | None], last: int, every: int | None, mode: Literal["min", "max"]
) -> None:
    there: list[CheckpointName] = []
    known: dict[CheckpointName, float] = {}
    for step, score in enumerate(found):
        there.append(CheckpointName(step, "0000000a"))
        if score is not None:
            known[there[-1]] = score
        gone = by_rules(
            there, newest=there[-1], last=last, every=every, agreed=None, scores=known, mode=mode
        )
        there = [name for name in there if name not in gone]
    everyone = [CheckpointName(step, "0000000a") for step in range(len(found))]
    newest = max(everyone, default=CheckpointName(0, "0000000a"))
    gone = by_rules(
        everyone, newest=newest, last=last, every=every, agreed=None, scores=known, mode=mode
    )
    assert there == [name for name in everyone if name not in gone]


def test_without_scores_the_last_ones_are_kept() -> None:
    there = [CheckpointName(step, "0000000a") for step in (10, 20, 30, 40)]
    assert to_delete(there, newest=there[-1], last=2) == there[:2]
    assert to_delete(there, newest=there[-1], last=1, every=20) == [there[0], there[2]]
    assert to_delete(there, newest=there[-1], last=1, scores={there[1]: 0.5, there[2]: 0.7}) == [
        there[0],
        there[2],
    ]
    assert to_delete([], newest=there[-1], last=1) == []


def test_checkpoints_after_the_newest_are_not_counted() -> None:
    damaged = [CheckpointName(40, "0000000b"), CheckpointName(90, "0000000a")]
    there = [CheckpointName(step, "0000000a") for step in (20, 30, 40)]
    assert to_delete([*there, *damaged], newest=there[-1], last=1) == there[:2]
    assert to_delete([*there, *damaged], newest=there[-1], last=2) == there[:1]
    assert to_delete(damaged[1:], newest=there[-1], last=1) == []


@given(st.lists(st.integers(1, 9), min_size=1, max_size=200))
def test_sparse_checkpoints_are_near_every_old_step(distances: list[int]) -> None:
    saved: list[int] = []
    kept: list[int] = []
    for distance in distances:  # after each save, what is not kept is deleted
        saved.append((saved or [0])[-1] + distance)
        kept = sorted(sparse_steps([*kept, saved[-1]]))
    assert {saved[0], saved[-1]} <= set(kept) <= set(saved)
    for before, after in pairwise(kept):
        neighbours = saved.index(after) - saved.index(before) == 1
        assert neighbours or after - before <= saved[-1] - after


@given(st.integers(1, 400))
def test_of_n_sparse_checkpoints_about_two_log_n_are_kept(count: int) -> None:
    kept: list[int] = []
    for step in range(count):
        kept = sorted(sparse_steps([*kept, 10 * step]))
    assert len(kept) <= 2 * math.log2(count) + 2


def test_sparse_checkpoints_are_kept_besides_the_others() -> None:
    there = [CheckpointName(step, "0000000a") for step in range(10, 170, 10)]
    rules = partial(checkpoints_to_delete, newest=there[-1], agreed=None, scores={}, mode="min")
    gone = rules(there, last=2, every=None, sparse=True)
    assert [name.step for name in there if name not in gone] == [10, 80, 120, 140, 150, 160]
    gone = rules(there, last=4, every=50, sparse=True)
    left = [name.step for name in there if name not in gone]
    assert left == [10, 50, 80, 100, 120, 130, 140, 150, 160]
