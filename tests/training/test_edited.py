"""A script that was edited between a save and the resumption: refused, or taken up where it is
allowed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from training.subjects import learned, recipe, rows
from training.test_checkpointing import At, ask

import lockstep as ls
from lockstep.base.errors import CheckpointError, DataError
from lockstep.launch.termination import Preempted


def loss_of(factor: float) -> Callable[..., Any]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return factor * ((model(batch[1]) - batch[2]) ** 2).mean()

    return loss


def sgd(rate: float, momentum: float = 0.0) -> Callable[..., Any]:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)

    return optimizer


def halves(step: int) -> float:
    return 0.5**step


def step_lr(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def stopped(run: Path, **changes: Any) -> None:
    with pytest.raises(Preempted):
        ls.train(recipe(steps=6, **changes), run_dir=str(run), hooks=[At({3: ask})])


def resumed(run: Path, allow: tuple[str, ...] = (), **changes: Any) -> list[float]:
    ls.train(recipe(steps=6, **changes), run_dir=str(run), allow_change=allow, log_every=1)
    return [row["lr"] for row in learned(run) if "lr" in row and row["step"] > 4]


def test_an_edited_loss_is_refused_unless_it_is_allowed(tmp_path: Path) -> None:
    stopped(tmp_path / "run", loss=loss_of(1.0))
    with pytest.raises(
        CheckpointError,
        match=("loss: its code has changed, or a value that it uses; resume with that recipe"),
    ):
        resumed(tmp_path / "run", loss=loss_of(2.0))
    resumed(tmp_path / "run", ("loss",), loss=loss_of(2.0))


def test_the_same_script_is_resumed(tmp_path: Path) -> None:
    stopped(tmp_path / "run", loss=loss_of(1.0), optimizer=sgd(0.1))
    assert resumed(tmp_path / "run", loss=loss_of(1.0), optimizer=sgd(0.1)) == [0.1] * 2


def test_a_setting_of_the_optimizer_is_refused_unless_it_is_allowed(tmp_path: Path) -> None:
    stopped(tmp_path / "run", optimizer=sgd(0.1))
    with pytest.raises(CheckpointError) as caught:
        resumed(tmp_path / "run", optimizer=sgd(0.2, momentum=0.9))
    assert (
        "optimizer: lr of group 0: 0.1, now 0.2; optimizer: momentum of group 0: 0.0, now 0.9; "
        in str(caught.value)
    )


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (None, [0.2] * 2),
        (halves, [0.2 * 0.5**step for step in (4, 5)]),
        (step_lr, [0.2 * 0.5**step for step in (4, 5)]),
    ],
)
def test_an_allowed_rate_is_the_one_that_is_used(
    tmp_path: Path, schedule: Any, expected: list[float]
) -> None:
    stopped(tmp_path / "run", optimizer=sgd(0.1), schedule=schedule)
    assert resumed(
        tmp_path / "run", ("optimizer",), optimizer=sgd(0.2), schedule=schedule
    ) == pytest.approx(expected)


def test_a_rate_that_a_hook_had_set_stays(tmp_path: Path) -> None:
    def lower(run: Any) -> None:
        run.optimizers[0].param_groups[0]["lr"] = 0.05

    with pytest.raises(Preempted):
        ls.train(
            recipe(steps=6, optimizer=sgd(0.1)),
            run_dir=str(tmp_path / "run"),
            hooks=[At({2: lower, 3: ask})],
        )
    assert resumed(tmp_path / "run", optimizer=sgd(0.1)) == [0.05] * 2


def changed_rows(number: int) -> TensorDataset:
    changed = TensorDataset(*(tensor.clone() for tensor in rows(32).tensors))
    changed.tensors[1][number] += 1
    return changed


@pytest.mark.parametrize("number", [0, 31])
def test_other_data_is_refused_unless_it_is_allowed(tmp_path: Path, number: int) -> None:
    stopped(tmp_path / "run", data=rows(32))
    with pytest.raises(
        DataError,
        match=rf"data: sample {number}\[1\] has changed since the checkpoint was saved",
    ):
        resumed(tmp_path / "run", data=changed_rows(number))
    resumed(tmp_path / "run", ("data",), data=changed_rows(number))


class Noisy(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        number, x, y = super().__getitem__(index)
        return number, x + torch.randn_like(x), y


def test_augmented_data_is_the_same_data(tmp_path: Path) -> None:
    stopped(tmp_path / "run", data=Noisy(*rows(32).tensors))
    resumed(tmp_path / "run", data=Noisy(*rows(32).tensors))
