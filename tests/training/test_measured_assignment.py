"""With assignment=measured a slow rank has fewer microbatches, and the model is the same, to the
bit in bitwise numerics."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import run_files
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, distributed, nn
from training.subjects import FEATURES, OUTPUTS, adamw, learned, recipe, rows, sgd, squared_error
from training.test_source import laid_out

import lockstep as ls
from lockstep.assignment import MicrobatchAssignment
from lockstep.base.errors import PlanError
from lockstep.data.loader import Loader
from lockstep.launch.termination import Preempted
from lockstep.logging.phases import StreamTimes
from lockstep.testing.pool import WorkerPool
from lockstep.training.microbatches import Batching, from_data

SAMPLES, GLOBAL_BATCH, EPOCHS = 100, 32, 6
"""Four steps an epoch: three of eight microbatches, and a short one of one microbatch."""
STEPS = 4 * EPOCHS
SLOW, USUAL = 0.03, 0.003
"""Seconds that a microbatch sleeps on the slow rank, and on the others."""
PLAN = "replicate={},numerics=bitwise,assignment=measured"


class Model(nn.Module):
    """Dropout, BatchNorm, a part that only some samples use, and a buffer that updates itself."""

    self_updating_buffers = ("updates",)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 16)
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.3)
        self.sometimes = nn.Linear(16, 16)
        self.last = nn.Linear(16, OUTPUTS)
        self.evaluated = 0
        self.register_buffer("updates", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.evaluated += not self.training
        x = self.dropout(self.norm(self.first(x)))
        if self.training:
            self.updates = self.updates + x.detach().sum()
        if bool(x[0, 0] > 0.5):
            x = x + self.sometimes(x)
        return self.last(torch.tanh(x))


class Noted(ls.Hook):
    """Notes the microbatches on this rank: their numbers in each step, and how many an evaluation
    has."""

    def __init__(self) -> None:
        self.mine: list[list[int]] = []
        self.evaluated: list[int] = []

    def before_evaluation(self, run: ls.Run) -> None:
        self.before = getattr(run.model, "evaluated", 0)

    def after_evaluation(self, run: ls.Run, metrics: dict[str, float]) -> None:
        self.evaluated.append(getattr(run.model, "evaluated", 0) - self.before)

    def on_finish(self, run: ls.Run) -> None:
        (run.dir / f"evaluated-{run.rank}.json").write_text(json.dumps(self.evaluated))

    def before_step(self, run: ls.Run) -> None:
        source = run.training.source
        assert source is not None
        self.mine.append(list(source.layout.mine()))
        assert len(self.mine[-1]) == source.own_count


class TimedEvent:
    """A GPU's event, of a GPU that takes the time of the host."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: TimedEvent) -> float:
        return 1e3 * (end.at - self.at)


class OnAStream(ls.Hook):
    def on_start(self, run: ls.Run) -> None:
        run.context.phases.stream = StreamTimes(TimedEvent)  # type: ignore[arg-type]


class Stop(ls.Hook):
    """Asks for the end of the run after a step, as Slurm does."""

    def __init__(self, after: int) -> None:
        self.after = after

    def after_step(self, run: Any) -> None:
        if run.step == self.after and run.rank == 0:
            os.kill(os.getpid(), signal.SIGUSR1)


def slowly(model: Any, batch: Any) -> Tensor:
    time.sleep(float(os.environ["SECONDS_ASLEEP"]))
    return squared_error(model, batch)


def trained(
    run_dir: str,
    plan: str,
    slow_rank: int | None,
    stop_after: int = 0,
    changes: dict[str, Any] | None = None,
) -> Any:
    """Return the fingerprint, or None of a preempted run, and this rank's microbatches of each
    step."""
    noted = Noted()
    held_out = ls.Evaluation(data=rows(23, seed=9), every=7, microbatch=2)
    given: dict[str, Any] = {
        "model": Model,
        "data": rows(SAMPLES),
        "global_batch": GLOBAL_BATCH,
        "epochs": EPOCHS,
    }
    given |= {"evaluation": held_out, "clip_norm": 1.0, **(changes or {})}
    hooks = [noted, *([Stop(stop_after)] if stop_after else [])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.hooks.stragglers.EXCHANGE_SECONDS", 0.0)
        patch.setenv(
            "SECONDS_ASLEEP",
            str(
                SLOW if slow_rank == int(os.environ.get("RANK", distributed.get_rank())) else USUAL
            ),
        )
        try:
            how: dict[str, Any] = {"run_dir": run_dir, "plan": plan, "log_every": 2, "hooks": hooks}
            result = ls.train(recipe(loss=slowly, **given), **how)
        except Preempted:
            return None, noted.mine
    return result.fingerprint, noted.mine


def events(run_dir: Path) -> list[dict[str, Any]]:
    found = run_files.events(run_dir)
    return [event for event in found if event["event"] == "assignment-changed"]


@pytest.fixture(scope="module")
def alone(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    path = tmp_path_factory.mktemp("alone") / "run"
    ((fingerprint, _),) = pool.run(1, trained, str(path), "replicate=1,numerics=bitwise", None)
    (path / "fingerprint").write_text(fingerprint)
    return path


@pytest.mark.parametrize(
    ("size", "more"),
    [(2, ""), (2, ",transport=torch"), (3, ""), (2, ",workers=2"), (2, ",microbatch_splits=1")],
)
def test_a_slow_rank_has_fewer_microbatches_and_the_model_the_same_bits(
    pool: WorkerPool, tmp_path: Path, alone: Path, size: int, more: str
) -> None:
    changes = {"model": Plain} if "splits" in more else {}  # BatchNorm does not go with it
    expected = (alone / "fingerprint").read_text(), learned(alone)
    if changes:
        ((fingerprint, _),) = pool.run(
            1, trained, str(tmp_path / "alone"), f"numerics=bitwise{more}", None, 0, changes
        )
        expected = fingerprint, learned(tmp_path / "alone")
    everyone = pool.run(
        size, trained, str(tmp_path / "run"), PLAN.format(size) + more, size - 1, 0, changes
    )
    assert [fingerprint for fingerprint, _ in everyone] == [expected[0]] * size
    assert learned(tmp_path / "run") == expected[1]
    counts = list(zip(*([len(step) for step in mine] for _, mine in everyone), strict=True))
    for step in range(STEPS):
        together = [index for _, mine in everyone for index in mine[step]]
        assert together == list(range(len(together)))
    if (size, more) == (2, ""):  # evaluations follow the same speeds
        fast, slow = (
            json.loads((tmp_path / "run" / f"evaluated-{rank}.json").read_text())
            for rank in range(2)
        )
        assert [one + other for one, other in zip(fast, slow, strict=True)] == [12] * len(fast)
        assert slow[-1] < 6
    changes_of = events(tmp_path / "run")
    assert 0 < changes_of[0]["first_step"] < STEPS - 4
    assert changes_of[0]["milliseconds"][-1] > 1.5 * max(changes_of[0]["milliseconds"][:-1])
    assert 1 <= changes_of[-1]["microbatches"][-1] < min(changes_of[-1]["microbatches"][:-1])
    most = sum(counts[0])
    equal = tuple(len(part) for part in MicrobatchAssignment(size).indices_by_rank(most))
    for step in range(STEPS):
        if sum(counts[step]) == most:
            latest = [
                tuple(change["microbatches"])
                for change in changes_of
                if change["first_step"] <= step
            ]
            assert counts[step] == (latest[-1] if latest else equal)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 16), nn.Dropout(0.3), nn.Linear(16, OUTPUTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_a_run_that_was_stopped_with_another_assignment_goes_on_with_the_same_bits(
    pool: WorkerPool, tmp_path: Path, alone: Path
) -> None:
    stopped = pool.run(2, trained, str(tmp_path / "run"), PLAN.format(2), 1, 18)
    assert [fingerprint for fingerprint, _ in stopped] == [None, None]
    assert events(tmp_path / "run")
    assert len(stopped[0][1][16]) > len(stopped[1][1][16])
    # another rank is slow now
    resumed = pool.run(2, trained, str(tmp_path / "run"), PLAN.format(2), 0)
    assert {
        len(before) + len(after) for (_, before), (_, after) in zip(stopped, resumed, strict=True)
    } == {STEPS}
    assert len(resumed[0][1]) < STEPS - 16
    assert {fingerprint for fingerprint, _ in resumed} == {(alone / "fingerprint").read_text()}
    assert learned(tmp_path / "run") == learned(alone)


def test_ranks_that_are_equally_fast_keep_equal_shares(pool: WorkerPool, tmp_path: Path) -> None:
    with_equal = pool.run(
        2, trained, str(tmp_path / "run"), PLAN.format(2), None, 0, {"epochs": 1, "steps": None}
    )
    assert events(tmp_path / "run") == []
    assert [[len(step) for step in mine] for _, mine in with_equal] == [[4, 4, 4, 1], [4, 4, 4, 0]]


def test_in_fast_numerics_the_loss_is_the_same_to_rounding(
    pool: WorkerPool, tmp_path: Path
) -> None:
    for name, more in (
        ("equal", ""),
        ("measured", ",assignment=measured"),
        ("ddp", ",assignment=measured,transport=torch"),
    ):
        pool.run(
            2,
            trained,
            str(tmp_path / name),
            f"replicate=2{more}",
            1,
            0,
            {"epochs": 3, "optimizer": sgd},
        )
    expected = learned(tmp_path / "equal")
    for name in ("measured", "ddp"):
        assert events(tmp_path / name)
        assert learned(tmp_path / name) == [
            {key: pytest.approx(value, rel=1e-4) for key, value in row.items()} for row in expected
        ]


def in_two_loops(run_dir: str) -> list[list[int]]:
    """Return the number of this rank's microbatches in each step of two loops, on a stream like a
    GPU's."""
    counts = []
    with (
        pytest.MonkeyPatch.context() as patch,
        ls.Session(
            run_dir=run_dir, plan=PLAN.format(2), log_every=1, hooks=[OnAStream()]
        ) as session,
    ):
        patch.setattr("lockstep.hooks.stragglers.EXCHANGE_SECONDS", 0.0)
        patch.setenv("SECONDS_ASLEEP", str(SLOW if session.rank else USUAL))
        model, _ = session.prepare(Model, adamw)
        for _ in range(2):
            counts.append([0] * 12)
            for step in session.steps(
                rows(SAMPLES), global_batch=GLOBAL_BATCH, microbatch=4, steps=12
            ):
                for batch in step.microbatches():
                    step.backward(slowly(model, batch))
                    counts[-1][step.index] += 1
                step.commit()
    return counts


def test_a_later_loop_of_steps_begins_with_the_assignment_of_the_one_before(
    pool: WorkerPool, tmp_path: Path
) -> None:
    fast, slow = pool.run(2, in_two_loops, str(tmp_path / "run"))
    assert [
        [one + other for one, other in zip(*both, strict=True)]
        for both in zip(fast, slow, strict=True)
    ] == [[8] * 12] * 2
    assert slow[0][0] == 4
    assert slow[1][0] == slow[0][-1] < 4


CPU = torch.device("cpu")


class Asked(torch.utils.data.Dataset[int]):
    """Notes which samples were asked for."""

    def __init__(self, length: int) -> None:
        self.length, self.asked = length, list[int]()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.asked.append(index)
        return index


@settings(max_examples=25)
@given(
    ranks=st.integers(1, 4),
    length=st.integers(8, 60),
    global_batch=st.integers(1, 16),
    microbatch=st.integers(1, 4),
    ahead=st.integers(1, 40),
    changes=st.lists(
        st.tuples(st.integers(0, 30), st.lists(st.floats(0.05, 20), min_size=4, max_size=4)),
        max_size=6,
    ),
)
def test_no_sample_is_skipped_or_fetched_twice_when_the_assignment_changes(
    ranks: int, length: int, global_batch: int, microbatch: int, ahead: int, changes: list[Any]
) -> None:
    """All ranks in one process, in step, each with a loader that reads ahead."""
    batchings, loops, data = [], [], [Asked(length) for _ in range(ranks)]
    for rank in range(ranks):
        lengths: dict[str, Any] = {
            "global_batch": global_batch,
            "microbatch": microbatch,
            "steps": None,
            "epochs": 2,
        }
        batchings.append(Batching(samples=length, **laid_out(rank, ranks), **lengths))
        loops.append(from_data(Loader(data[rank], seed=3, ahead=ahead, device=CPU), batchings[-1]))
    for step, sources in enumerate(zip(*loops, strict=True)):
        computed = [item.index for source in sources for item, _ in source.batches(0)]
        assert computed == list(range(sources[0].count))
        assert all(source.layout.assignment == sources[0].layout.assignment for source in sources)
        for at, speeds in changes:
            if at == step:
                first = max(batching.requested for batching in batchings) + 1
                for batching in batchings:
                    batching.reassign(
                        MicrobatchAssignment(ranks, speeds=tuple(speeds[:ranks])),
                        first=first,
                        done=step,
                    )
    assert sorted(sample for each in data for sample in each.asked) == sorted(
        2 * list(range(length))
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"microbatch": None},
            "assignment=measured with microbatch=None; each rank has exactly one, of equal size",
        ),
        (
            {"data": "stream", "epochs": None, "steps": 3},
            "assignment=measured with an ls.Stream; each of its shards is read by one rank",
        ),
        (
            {"model": "synchronized"},
            "assignment=measured with SyncBatchNorm; all ranks compute slices of each"
            " microbatch together",
        ),
    ],
)
def test_where_microbatches_cannot_move_it_is_refused(
    pool: WorkerPool, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    for said in pool.run(2, refused, str(tmp_path / "run"), changes):
        assert said.startswith(words)
        assert "leave assignment=measured out, or " in said


def refused(run_dir: str, changes: dict[str, Any]) -> str:
    named = {
        "stream": ls.Stream(lambda shard, epoch, start: iter(rows(64)), shards=8),
        "synchronized": lambda: nn.SyncBatchNorm.convert_sync_batchnorm(Model()),
    }
    given = {
        name: named.get(value, value) if isinstance(value, str) else value
        for name, value in changes.items()
    }
    given = {
        "model": Model,
        "data": rows(SAMPLES),
        "global_batch": GLOBAL_BATCH,
        "epochs": 1,
        **given,
    }
    given = {
        name: value for name, value in given.items() if value is not None or name == "microbatch"
    }
    with pytest.raises(PlanError) as caught:
        ls.train(
            recipe(optimizer=adamw, **given),
            run_dir=run_dir,
            plan="replicate=2,assignment=measured",
        )
    return str(caught.value)


def test_with_one_microbatch_a_rank_it_is_said_that_nothing_can_change(
    pool: WorkerPool, tmp_path: Path
) -> None:
    pool.run(
        2, trained, str(tmp_path / "run"), PLAN.format(2), 1, 0, {"global_batch": 8, "epochs": 1}
    )
    found = run_files.events(tmp_path / "run")
    (told,) = [event for event in found if event["event"] == "assignment-fixed"]
    assert (told["microbatches"], told["ranks"]) == (2, 2)
    assert events(tmp_path / "run") == []
