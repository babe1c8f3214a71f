"""Epochs: what hooks, evaluations and saves know of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import run_files
import torch
from training.subjects import network, recipe, rows, squared_error

import lockstep as ls
from lockstep.base.errors import CheckpointError, RecipeError
from lockstep.checkpoint.storage import FolderStorage
from lockstep.hooks.checkpointing import Checkpointing
from lockstep.testing.pool import WorkerPool
from lockstep.training.loop import interval_of


class Epochs(ls.Hook):
    """Notes `run.epoch` before each step, and the steps after which an epoch has ended.
    Waits for each save, so that every one that is due begins."""

    def __init__(self) -> None:
        self.before: list[int | None] = []
        self.ends: list[int] = []
        self.evaluated: list[int] = []

    def before_step(self, run: Any) -> None:
        next(each for each in run.training.hooks.all if isinstance(each, Checkpointing)).wait()
        self.before.append(run.epoch)

    def after_step(self, run: Any) -> None:
        if run.has_ended_epoch:
            self.ends.append(run.step)

    def after_evaluation(self, run: Any, metrics: dict[str, float]) -> None:
        self.evaluated.append(run.step)


def trained(run_dir: Path, **changes: Any) -> tuple[Epochs, list[int]]:
    """The notes of a run, and the steps of its checkpoints."""
    hook = Epochs()
    evaluation = ls.Evaluation(data=rows(4), every="epoch")
    given = recipe(
        **{
            "data": rows(10),
            "global_batch": 4,
            "microbatch": 2,
            "evaluation": evaluation,
            **changes,
        }
    )
    ls.train(given, run_dir=str(run_dir), hooks=[hook], saving=ls.Saving(every="epoch", last=9))
    return hook, [name.step for name in FolderStorage(run_dir / "checkpoints").names()]


def test_with_epochs_each_ends_with_its_last_batch(tmp_path: Path) -> None:
    hook, saved = trained(tmp_path / "run", steps=None, epochs=2)
    assert hook.before == [0, 0, 0, 1, 1, 1]
    assert hook.ends == hook.evaluated == [3, 6]
    assert saved == [3, 6]


def test_batches_that_span_two_epochs_end_the_first_one(tmp_path: Path) -> None:
    """10 samples in batches of 4: the epochs end within steps 3, at the end of 5, within 8."""
    hook, saved = trained(tmp_path / "run", steps=8)
    assert hook.before == [0, 0, 0, 1, 1, 2, 2, 2]
    assert hook.ends == hook.evaluated == [3, 5, 8]
    assert saved == [3, 5, 8]


def test_the_epochs_of_a_sampler_have_its_length(tmp_path: Path) -> None:
    hook, _ = trained(tmp_path / "run", steps=4, sampler=lambda epoch, seed: range(8))
    assert hook.ends == [2, 4]
    batches = {"global_batch": None, "microbatch": None, "steps": 4}
    one_batch = [[[0, 1], [2]]]
    hook, _ = trained(tmp_path / "other", **batches, batch_sampler=lambda epoch, seed: one_batch)
    assert hook.ends == [1, 2, 3, 4]


def epochs_in_two_loops(run_dir: str, resume: bool) -> list[tuple[int | None, int | None]]:
    found = []
    with ls.Session(run_dir=run_dir, seed=0, saving=ls.Saving(every="epoch")) as session:
        model, optimizer = session.prepare(
            network, lambda model: torch.optim.SGD(model.parameters(), lr=0.1)
        )
        for loop in range(2):
            for step in session.steps(rows(8), global_batch=4, microbatch=2, epochs=2):
                found.append((loop, session.epoch))
                for batch in step.microbatches():
                    step.backward(squared_error(model, batch))
                step.commit(optimizer)
                if not resume and len(found) == 6:
                    raise ValueError("on purpose")
    return found


def test_each_loop_of_a_session_counts_its_own_epochs_on_any_number_of_ranks(
    tmp_path: Path, pool: WorkerPool
) -> None:
    expected = [(0, 0), (0, 0), (0, 1), (0, 1), (1, 0), (1, 0), (1, 1), (1, 1)]
    assert epochs_in_two_loops(str(tmp_path / "one"), True) == expected
    assert pool.run(2, epochs_in_two_loops, str(tmp_path / "two"), True) == [expected] * 2
    with pytest.raises(ValueError, match="on purpose"):
        epochs_in_two_loops(str(tmp_path / "resumed"), False)
    rest = epochs_in_two_loops(str(tmp_path / "resumed"), True)
    assert 0 < len(rest) < len(expected)
    assert rest == expected[-len(rest) :]


def stream(**changes: Any) -> ls.Recipe:
    samples = list(rows(16))
    data = ls.Stream(lambda shard, epoch, start: iter(samples[start:]), shards=2)
    return recipe(data=data, global_batch=4, microbatch=2, steps=2, **changes)


def test_data_without_a_length_has_no_epochs(tmp_path: Path) -> None:
    hook = Epochs()
    ls.train(stream(), run_dir=str(tmp_path / "run"), hooks=[hook])
    assert hook.before == [None, None]
    assert hook.ends == []
    with pytest.raises(
        CheckpointError, match=r"every='epoch'.*no epochs; give a number of\s+steps"
    ):
        ls.train(stream(), run_dir=str(tmp_path / "save"), saving=ls.Saving(every="epoch"))
    evaluation = ls.Evaluation(data=rows(4), every="epoch")
    with pytest.raises(RecipeError, match=r"every='epoch'.*no epochs; give a number of\s+steps"):
        ls.train(stream(evaluation=evaluation), run_dir=str(tmp_path / "evaluate"))
    ls.train(
        stream(evaluation=ls.Evaluation(data=rows(4), every=2)),
        run_dir=str(tmp_path / "remedy"),
        saving=ls.Saving(every="10m"),
    )


def test_other_words_are_refused() -> None:
    with pytest.raises(
        RecipeError, match="every='epochs'; give a number of steps, 'epoch', or None"
    ):
        ls.Evaluation(data=rows(4), every="epochs")  # type: ignore[arg-type]
    with pytest.raises(
        CheckpointError, match=r"every='epochs'\); it must be a number of steps.* or 'epoch'"
    ):
        ls.Saving(every="epochs")


class RaisesAfterSave(ls.Hook):
    """Raises in `after_step`, where the step has not ended, so that nothing else can be saved."""

    def after_step(self, run: Any) -> None:
        if run.step == 3:
            raise ValueError("on purpose")


def save_then_raise(run_dir: str) -> str:
    given = recipe(steps=6, global_batch=4, microbatch=2)
    with pytest.raises(ValueError, match="on purpose"):
        ls.train(given, run_dir=run_dir, hooks=[RaisesAfterSave()], saving=ls.Saving(every=2))
    return "raised"


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_error_in_a_hook_does_not_abandon_the_save_under_way(
    tmp_path: Path, pool: WorkerPool, ranks: int
) -> None:
    run_dir = tmp_path / "run"
    if ranks == 1:
        save_then_raise(str(run_dir))
    else:
        pool.run(ranks, save_then_raise, str(run_dir))
    assert [name.step for name in FolderStorage(run_dir / "checkpoints").names()] == [2]
    events = [row["event"] for row in run_files.events(run_dir)]
    assert events.index("checkpoint-saved") > events.index("run-failed")


def test_groups_with_other_rates_have_lines_of_their_own(tmp_path: Path) -> None:
    def groups(model: torch.nn.Module, rates: list[float]) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        halves = [parameters[::2], parameters[1::2]]
        return torch.optim.SGD(
            [{"params": half, "lr": rate} for half, rate in zip(halves, rates, strict=True)]
        )

    rows_of = {}
    for name, rates in (("same", [0.1, 0.1]), ("other", [0.1, 0.01])):
        run_dir = tmp_path / name
        given = recipe(steps=2, optimizer=lambda model, rates=rates: groups(model, rates))
        ls.train(given, run_dir=str(run_dir), log_every=1)
        rows_of[name] = run_files.metrics(run_dir)
    assert [row["lr"] for row in rows_of["other"]] == [0.1, 0.1]
    assert [row["lr/1"] for row in rows_of["other"]] == [0.01, 0.01]
    assert not [name for row in rows_of["same"] for name in row if name.startswith("lr/")]


@pytest.mark.parametrize(
    ("changes", "interval"),
    [
        ({"steps": None, "epochs": 2}, 3),  # 10 samples in batches of 4
        ({"steps": None, "epochs": 2, "drop_last": True}, 2),
        ({"steps": 9}, None),  # epochs of 3, 2 and 3 steps
        ({"steps": 9, "global_batch": 5, "microbatch": 5}, 2),
        ({"steps": 9, "sampler": lambda epoch, seed: range(8)}, 2),
    ],
)
def test_a_search_knows_the_steps_of_an_epoch(
    changes: dict[str, Any], interval: int | None
) -> None:
    evaluation = ls.Evaluation(data=rows(4), every="epoch")
    given = recipe(**{"data": rows(10), "global_batch": 4, "microbatch": 2, **changes})
    assert interval_of(given, evaluation) == interval
