"""An error of one rank is named on all ranks: the same mistake of the user, or the cause of the end
of the others."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from training.subjects import recipe
from worlds import ALONE

import lockstep as ls
from lockstep.base.errors import DataError
from lockstep.comm import first_failure
from lockstep.comm.first_failure import FirstFailure
from lockstep.hooks.hang import watchdog
from lockstep.testing.pool import WorkerPool

ERRORS = {"mistake": (DataError, "a word that is none"), "failure": (IndexError, "out of range")}


class Fails(ls.Hook):
    def __init__(self, kind: str) -> None:
        self.kind, self.text = ERRORS[kind]

    def after_step(self, run: ls.Run) -> None:
        if run.rank == 1 and run.step == 4:
            raise self.kind(self.text)


def fails(run_dir: str, plan: str, kind: str) -> tuple[str, str, list[str]]:
    """Raise an error on rank 1. Return each rank's error and its notes."""
    try:
        ls.train(recipe(steps=8), run_dir=run_dir, plan=plan, hooks=[Fails(kind)], log_every=100)
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "__notes__", [])
    raise AssertionError("rank 1 fails")


def all_fail(run_dir: str) -> list[Any]:
    return [
        fails(f"{run_dir}/{place}", plan, kind)
        for place, (plan, kind) in enumerate(
            (plan, kind) for plan in ("replicate=3", "shard=3") for kind in ERRORS
        )
    ]


def test_the_error_of_one_rank_is_named_on_all(pool: WorkerPool, tmp_path: Path) -> None:
    found = pool.run(3, all_fail, str(tmp_path))
    for mistakes in zip(*found, strict=True):
        names, texts, notes = zip(*mistakes, strict=True)
        if names[1] == "DataError":
            assert set(names) == {"DataError"}
            assert set(texts) == {"a word that is none"}
        else:
            assert names == ("PeerStopped", "IndexError", "PeerStopped")
            cause = "rank 1 failed first: IndexError: out of range"
            assert [cause in each for each in notes] == [True, False, True]


def fails_over_gloo(run_dir: str) -> tuple[str, str, list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watchdog, "EXCHANGE_SECONDS", 0.5)
        return fails(run_dir, "shard=2,transport=torch", "failure")


def test_a_rank_that_waits_in_gloo_for_one_that_lives_on_is_told(
    pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_check_leaks", False)  # whose connections are ended
    waited, failed = pool.run(2, fails_over_gloo, str(tmp_path / "run"), timeout_seconds=40)
    assert failed[:2] == ("IndexError", "out of range")
    assert waited[0] == "RuntimeError"
    assert "rank 1 failed first: IndexError: out of range" in waited[2]


class Lost(dist.HashStore):
    """A store that does not answer."""

    def check(self, keys: list[str]) -> bool:
        threading.Event().wait(3.0)
        return False


def test_a_store_that_does_not_answer_ends_no_run_late(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Lost()
    store.set_timeout(timedelta(seconds=1))
    monkeypatch.setattr(first_failure, "default_store", lambda: store)
    monkeypatch.setattr(first_failure, "MOST_SECONDS", 0.05)
    world = ALONE
    assert FirstFailure(world).cause(wait_seconds=0.0) is None
