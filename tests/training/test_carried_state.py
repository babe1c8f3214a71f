"""Models that carry a tensor from one microbatch to the next, in loops whose loss cannot be
tried."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training.subjects import FEATURES, OUTPUTS, rows, sgd

import lockstep as ls
from lockstep.base.errors import LossError
from lockstep.testing.pool import WorkerPool


class Recurrent(nn.Module):
    """Keeps the state of its cell, and goes on from it."""

    def __init__(self, *, carries: bool = True) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(FEATURES, 8), nn.Linear(8, OUTPUTS)
        self.hidden: Tensor | None = None
        self.carries = carries

    def forward(self, x: Tensor) -> Tensor:
        state = self.cell(x, self.hidden if self.carries else None)
        self.hidden = state.detach()
        output: Tensor = self.head(state)
        return output


class Centred(nn.Module):
    """Moves a tensor in place, within a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.centres = nn.Linear(FEATURES, OUTPUTS), [torch.zeros(OUTPUTS)]

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        centre = self.centres[0].mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        return output - centre.clone()


class Buffered(nn.Module):
    """The remedy for `Centred`: a buffer that is updated once a step."""

    self_updating_buffers = ("centre",)
    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, OUTPUTS)
        self.register_buffer("centre", torch.zeros(OUTPUTS))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        before = self.centre.clone()
        self.centre.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        return output - before


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(FEATURES, OUTPUTS)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1.0 if self.calls < 1000 else 2.0)


class Caching(nn.Module):
    """Computes a table once, and sets the latest output, and its norm, anew in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, OUTPUTS)
        self.table: Tensor | None = None
        self.latest, self.norm = torch.zeros(0), 0.0

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or self.table.shape != x.shape:
            self.table = torch.arange(float(x.numel())).reshape(x.shape).cos()
        self.latest = self.layer(x + self.table)
        self.norm = self.latest.detach().norm().item()
        return self.latest


class Staging(nn.Module):
    """Overwrites a part of a buffer in each forward, and reads only that part."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.buffer = nn.Linear(FEATURES, OUTPUTS), torch.zeros(16, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        self.buffer[: len(x)] = x
        output: Tensor = self.layer(self.buffer[: len(x)].clone())
        return output


class Late(Staging):
    """Reads what the forward before has written."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x + self.buffer[: len(x)].clone())
        self.buffer[: len(x)] = x
        return output


MODELS: dict[str, Callable[[], nn.Module]] = {
    "recurrent": Recurrent,
    "centred": Centred,
    "buffered": Buffered,
    "counting": Counting,
    "caching": Caching,
    "staging": Staging,
    "late": Late,
    "reset": lambda: Recurrent(carries=False),
}


def own_loop(name: str, run_dir: str, plan: str, microbatch: int) -> list[str]:
    """The error; of the remedy the fingerprint."""
    try:
        with ls.Session(run_dir=run_dir, plan=plan) as session:
            model, optimizer = session.prepare(MODELS[name], sgd)
            for step in session.steps(rows(32), global_batch=8, microbatch=microbatch, steps=3):
                for batch in step.microbatches():
                    step.backward(
                        (model(batch[1]) - batch[2]).square().mean()
                        + getattr(model, "latest", torch.zeros(1)).mean()
                    )
                step.commit(optimizer)
            # its graph holds the model, in a circle that Python does not see
            vars(model).pop("latest", None)
            if name == "buffered":
                return [ls.fingerprint(model)]
            hooks = [*model._forward_pre_hooks.values(), *model._forward_hooks.values()]
            assert not any(
                "loss_check" in type(getattr(hook, "__self__", None)).__module__ for hook in hooks
            )
    except LossError as error:
        return [str(error)]
    return []


def every_model(folder: str, plan: str) -> dict[str, list[str]]:
    """With two microbatches in a step, which are one a rank on two; without dummies also with one
    for all."""
    cases = [*((name, 4) for name in MODELS), *([] if "shard" in plan else [("recurrent", 8)])]
    return {
        f"{name}, {size}": own_loop(name, f"{folder}/{plan}/{name}{size}", plan, size)
        for name, size in cases
    }


@pytest.mark.timeout(120)
def test_in_bitwise_numerics_it_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    (alone,) = pool.run(1, every_model, str(tmp_path), "replicate=1,numerics=bitwise")
    for plan in ("replicate=2", "shard=2"):
        one, other = pool.run(2, every_model, str(tmp_path), f"{plan},numerics=bitwise")
        assert one == other
        for name, found in (one | alone).items():
            if name.startswith("buffered"):
                assert one.get(name, found) == alone.get(name, found)
                continue
            if name.startswith("counting"):
                (text,) = found
                assert text.startswith("each forward changes the number calls; each rank would")
                continue
            carries = {"recurrent": "hidden", "centred": "centres", "late": "buffer"}.get(
                name.partition(",")[0]
            )
            assert bool(found) == (carries is not None), (name, found)
            assert all(
                each.startswith(
                    f"the model's forward reads {carries}, which the forward of another micro"
                )
                for each in found
            )
            assert all(each.endswith("or drop numerics=bitwise") for each in found)


def test_otherwise_it_is_a_warning(tmp_path: Path) -> None:
    assert own_loop("recurrent", str(tmp_path / "own"), "numerics=fast", 4) == []
    assert '"loss-keeps-state"' in (tmp_path / "own" / "events.jsonl").read_text()
    assert own_loop("caching", str(tmp_path / "caching"), "numerics=fast", 4) == []
    assert '"loss-keeps-state"' not in (tmp_path / "caching" / "events.jsonl").read_text()


def test_the_watch_itself_changes_no_attribute(tmp_path: Path) -> None:
    with ls.Session(run_dir=str(tmp_path / "run")) as session:
        model, optimizer = session.prepare(lambda: nn.Linear(FEATURES, OUTPUTS), sgd)
        # it ends while the model is watched
        for step in session.steps(rows(8), global_batch=8, microbatch=4, steps=1):
            for batch in step.microbatches():
                step.backward((model(batch[1]) - batch[2]).square().mean())
            step.commit(optimizer)
    assert not model._forward_pre_hooks
    assert '"attributes-not-saved"' not in (tmp_path / "run" / "events.jsonl").read_text()


def output_of(model: nn.Module, batch: Any) -> Tensor:
    output: Tensor = model(batch[1])
    return output


def test_with_a_batch_loss_it_is_found_too(tmp_path: Path) -> None:
    given = ls.Recipe(
        model=Recurrent,
        data=rows(32),
        batch_loss=ls.Gathered(output_of, lambda output: output.square().mean()),
        optimizer=sgd,
        global_batch=8,
        microbatch=4,
        steps=2,
    )
    with pytest.raises(
        LossError, match="reads hidden, which the forward of another microbatch has set"
    ):
        ls.train(given, run_dir=str(tmp_path / "run"), plan="numerics=bitwise")
