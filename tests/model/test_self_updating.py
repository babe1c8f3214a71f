"""Buffers that a forward updates: once a step, from the first microbatch, on any number of
processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fully_shard import cls_to_fsdp_cls
from torch.nn.utils import spectral_norm as spectral_norm_by_hooks
from torch.nn.utils.parametrizations import spectral_norm
from training.subjects import OUTPUTS, EachState, recipe, rows, sgd

import lockstep as ls
from lockstep.base.errors import RecipeError
from lockstep.testing.pool import WorkerPool

STEPS = 3


class Codebook(nn.Module):
    """Snaps to the nearest of four codes, which follow their inputs by a moving average.
    `replaces`: or its own way to update a buffer."""

    self_updating_buffers = ("codes", "seen")

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.replaces = replaces
        self.register_buffer("codes", torch.linspace(-1, 1, 4)[:, None].repeat(1, 16))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.codes).argmin(1)
        snapped = x + (self.codes[nearest] - x).detach()
        if self.training:
            with torch.no_grad():
                moved = self.codes.index_reduce(0, nearest, x.detach(), "mean", include_self=True)
                if self.replaces:
                    self.codes, self.seen = moved, self.seen + 1
                else:
                    self.codes.copy_(moved)
                    self.seen += 1
        return snapped


def quantized(replaces: bool = False) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), Codebook(replaces), nn.Linear(16, OUTPUTS))


def replacing() -> nn.Module:
    return quantized(replaces=True)


def normalized() -> nn.Module:
    return nn.Sequential(spectral_norm(nn.Linear(6, 16)), nn.Tanh(), nn.Linear(16, OUTPUTS))


def normalized_by_hooks() -> nn.Module:
    return nn.Sequential(
        spectral_norm_by_hooks(nn.Linear(6, 16)), nn.Tanh(), nn.Linear(16, OUTPUTS)
    )


MODELS = {
    "codebook": quantized,
    "replaced": replacing,
    "spectral_norm": normalized,
    "spectral_norm by hooks": normalized_by_hooks,
}


def given(name: str, **changes: Any) -> ls.Recipe:
    options = {
        "global_batch": 8,
        "microbatch": 2,
        "steps": STEPS,
        "data": rows(24),
        "optimizer": sgd,
        **changes,
    }
    return recipe(model=MODELS[name], evaluation=ls.Evaluation(data=rows(7), every=1), **options)


def train(
    name: str, run_dir: str, plan: str = "replicate=1", **options: Any
) -> tuple[str, list[dict[str, Tensor]]]:
    states = EachState()
    result = ls.train(
        given(name), run_dir=run_dir, plan=f"{plan},numerics=bitwise", hooks=[states], **options
    )
    return result.fingerprint, states.states


def fingerprint(name: str, run_dir: str, plan: str) -> str:
    found = train(name, run_dir, plan)[0]
    # torch keeps the class of a sharded module for good, and the class of a parametrized module
    # keeps the module.
    cls_to_fsdp_cls.clear()
    return found


@pytest.mark.parametrize("plan", ["replicate=2", "replicate=3", "shard=2"])
@pytest.mark.parametrize("name", MODELS)
def test_the_bits_are_those_of_one_process(
    pool: WorkerPool, tmp_path: Path, name: str, plan: str
) -> None:
    (alone,) = pool.run(1, fingerprint, name, str(tmp_path / "alone"), "replicate=1")
    assert set(pool.run(int(plan[-1]), fingerprint, name, str(tmp_path / "run"), plan)) == {alone}


@pytest.mark.parametrize("name", ["codebook", "replaced"])
def test_they_are_updated_once_a_step_from_the_first_microbatch(tmp_path: Path, name: str) -> None:
    _, states = train(name, str(tmp_path / "run"))
    assert [int(state["1.seen"]) for state in states] == list(range(STEPS + 1)), (
        "once a step, and not in evaluations"
    )
    batches: list[Tensor] = []
    session = ls.Session(run_dir=str(tmp_path / "session"))
    with session:
        session.prepare(MODELS[name], sgd)
        for step in session.steps(rows(24), global_batch=8, microbatch=2, steps=1):
            batches += [batch[1] for batch in step.microbatches()]
            break
    model = MODELS[name]().train()
    model.load_state_dict(states[0])
    model(batches[0])
    assert torch.equal(states[1]["1.codes"], model[1].codes)
    assert not torch.equal(states[1]["1.codes"], states[0]["1.codes"])


def test_the_vectors_of_spectral_norm_are_iterated_once_a_step(tmp_path: Path) -> None:
    _, states = train("spectral_norm", str(tmp_path / "run"))
    weight = states[0]["0.parametrizations.weight.original"]
    u = nn.functional.normalize(weight @ states[0]["0.parametrizations.weight.0._v"], dim=0)
    assert torch.allclose(states[1]["0.parametrizations.weight.0._u"], u, atol=1e-6)


def test_recomputation_does_not_update_again(pool: WorkerPool, tmp_path: Path) -> None:
    kept, _ = train("spectral_norm", str(tmp_path / "kept"))
    recomputed, _ = train(
        "spectral_norm", str(tmp_path / "recomputed"), "replicate=1,checkpointing=full"
    )
    assert recomputed == kept


class Misnamed(nn.Linear):
    self_updating_buffers = ("counts",)


def test_a_name_without_a_buffer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError,
        match=(r"Misnamed\.self_updating_buffers names 'counts', which is not one of its buffers"),
    ):
        ls.train(recipe(model=lambda: Misnamed(6, OUTPUTS)), run_dir=str(tmp_path / "run"))
