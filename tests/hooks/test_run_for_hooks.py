"""What a hook can ask a run: the same answer under every plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training.subjects import learned, recipe, rows

import lockstep as ls
from lockstep.base.errors import DataError
from lockstep.testing.pool import WorkerPool

PLANS = {"replicate=2": 2, "shard=2": 2, "tensor=2": 2, "pipeline=2": 2}


class Asks(ls.Hook):
    def __init__(self) -> None:
        self.norms: list[dict[str, float]] = []
        self.state: dict[str, Tensor] = {}
        self.seen: Any = None

    def on_start(self, run: Any) -> None:
        self.seen = (run.rank, run.dir.name)

    def after_backward(self, run: Any, model: nn.Module) -> None:
        self.norms.append(run.gradient_norms(model))

    def after_step(self, run: Any) -> None:
        run.log({"largest": max(self.norms[-1].values())})

    def on_finish(self, run: Any) -> None:
        self.state = run.full_state_dict()


def inputs(batch: list[Tensor]) -> Tensor:
    return batch[1]


def loss(output: Tensor, batch: list[Tensor]) -> Tensor:
    return ((output - batch[2]) ** 2).mean()


def ask(
    run_dir: str, plan: str, precision: Any = "fp32"
) -> tuple[Any, list[dict[str, float]], dict[str, Tensor]]:
    asks = Asks()
    tensor = {"0": "colwise", "2": "rowwise"}
    given = recipe(inputs=inputs, loss=loss, steps=2, tensor=tensor, precision=precision)
    ls.train(given, run_dir=run_dir, plan=plan, hooks=[asks], log_every=1)
    return asks.seen, asks.norms, asks.state


@pytest.mark.parametrize("plan", PLANS)
def test_the_norms_and_the_state_are_those_of_one_process_on_every_rank(
    pool: WorkerPool, tmp_path: Path, plan: str
) -> None:
    _, norms, state = ask(str(tmp_path / "alone"), "replicate=1")
    for rank, (seen, found_norms, found) in enumerate(
        pool.run(PLANS[plan], ask, str(tmp_path / "run"), plan)
    ):
        assert seen == (rank, "run")
        for found_step, step in zip(found_norms, norms, strict=True):
            assert found_step == pytest.approx(step, rel=1e-4)
        assert sorted(found) == sorted(state)
        for name, value in state.items():
            assert type(found[name]) is Tensor
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    assert [row["largest"] for row in learned(tmp_path / "run")] == pytest.approx(
        [max(step.values()) for step in norms], rel=1e-4
    )


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2"])
def test_with_bitwise_numerics_the_norms_have_the_bits_of_one_process(
    pool: WorkerPool, tmp_path: Path, plan: str
) -> None:
    _, norms, _ = ask(str(tmp_path / "alone"), "replicate=1,numerics=bitwise")
    run_dir, plan = str(tmp_path / "run"), f"{plan},numerics=bitwise"
    assert [found for _, found, _ in pool.run(2, ask, run_dir, plan)] == [norms, norms]


def test_the_norms_are_without_the_loss_scale(tmp_path: Path) -> None:
    _, norms, _ = ask(str(tmp_path / "fp32"), "replicate=1")
    _, scaled, _ = ask(str(tmp_path / "fp16"), "replicate=1", "fp16")
    assert scaled[0] == pytest.approx(norms[0], rel=2e-2)


class LogsBadly(ls.Hook):
    def after_step(self, run: Any) -> None:
        run.log({"loss": 1.0})


def test_a_name_that_every_line_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"log\(\{'loss': ...\}\); every line has 'loss' already; choose another name",
    ):
        ls.train(recipe(data=rows(48)), run_dir=str(tmp_path / "run"), hooks=[LogsBadly()])


def first_once(folder: str, fails: bool) -> tuple[int, str | list[str]]:
    def download() -> list[str]:
        if fails:
            raise OSError("no network")
        found = sorted(path.name for path in Path(folder).iterdir())
        Path(folder, f"by {ls.rank()}").touch()
        return found

    try:
        return ls.rank(), ls.once(download)
    except Exception as error:
        return ls.rank(), f"{type(error).__name__}: {error}"


def test_once_calls_the_first_process_of_a_machine_before_the_others(
    pool: WorkerPool, tmp_path: Path
) -> None:
    (first, alone), *others = pool.run(3, first_once, str(tmp_path), False)
    assert (first, alone) == (0, [])
    assert [rank for rank, _ in others] == [1, 2]
    assert all("by 0" in found for _, found in others)


def test_a_failure_of_the_first_process_is_raised_on_all(pool: WorkerPool, tmp_path: Path) -> None:
    (_, first), (_, second) = pool.run(2, first_once, str(tmp_path), True)
    assert first == "OSError: no network"
    assert (
        second
        == "LaunchError: ls.once: the function failed on rank 0, the first of its machine (OSError:"
        " no network); see its traceback"
    )
