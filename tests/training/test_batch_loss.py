"""A loss over the global batch: the gradient is that of all samples together, whatever the
microbatches and ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import TensorDataset
from training.subjects import each_of, recipe, samples_at, state_of

import lockstep as ls
from lockstep.testing.pool import WorkerPool

SAMPLES, BATCH = 67, 22


class TwoTowers(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 4))
        self.text = nn.Linear(5, 4)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (
            normalize(self.image(image)),
            normalize(self.text(text)),
            self.scale.exp().expand(len(image)),
        )


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(
        torch.randn(SAMPLES, 6, generator=generator), torch.randn(SAMPLES, 5, generator=generator)
    )


def rows_of(output: Any, batch: list[Tensor]) -> Any:
    return output


def contrast(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    logits, own = scale.mean() * image @ text.T, torch.arange(len(image))
    return (cross_entropy(logits, own) + cross_entropy(logits.T, own)) / 2


def inputs(batch: list[Tensor]) -> tuple[Tensor, ...]:
    return tuple(batch)


def clip(dropout: float = 0.0, **changes: Any) -> ls.Recipe:
    given = {
        "model": lambda: TwoTowers(dropout),
        "data": data(),
        "inputs": inputs,
        "loss": None,
        "global_batch": BATCH,
        "steps": 4,
    }
    return recipe(**{**given, "batch_loss": ls.Gathered(rows_of, contrast), **changes})


class FirstStep(ls.Hook):
    """The weights before the first step, and its gradient."""

    def on_start(self, run: Any) -> None:
        self.weights = state_of(run.model)

    def after_backward(self, run: Any, model: nn.Module) -> None:
        if run.step == 0:
            self.gradients = {
                name: parameter.grad.clone() for name, parameter in model.named_parameters()
            }


def gradients_of(
    run_dir: str, microbatch: int | None
) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    hook = FirstStep()
    result = ls.train(clip(microbatch=microbatch, steps=1), run_dir=run_dir, hooks=[hook])
    return hook.weights, hook.gradients, result.loss


MICROBATCHES = (22, 8, 5, None)


def gradients_each(run_dir: str) -> list[Any]:
    return each_of(gradients_of, run_dir, [(microbatch,) for microbatch in MICROBATCHES])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_gradient_is_that_of_all_samples_at_once(
    pool: WorkerPool, tmp_path: Path, ranks: int
) -> None:
    alone = ranks == 1
    for everyone in (
        [gradients_each(str(tmp_path))] if alone else pool.run(ranks, gradients_each, str(tmp_path))
    ):
        for microbatch, (weights, gradients, loss) in zip(MICROBATCHES, everyone, strict=True):
            model = TwoTowers()
            model.load_state_dict(weights)
            expected = contrast(*model(*data()[samples_at(0, BATCH, of=SAMPLES)]))
            expected.backward()
            assert loss == pytest.approx(expected.item(), rel=1e-5), microbatch
            truth = {name: parameter.grad for name, parameter in model.named_parameters()}
            torch.testing.assert_close(gradients, truth, rtol=1e-4, atol=1e-6)


def fingerprint(run_dir: str, plan: str, resumes: bool = False) -> str:
    def train(**options: Any) -> ls.Result:
        plan_in_bits = f"{plan},numerics=bitwise"
        return ls.train(
            clip(0.3, microbatch=4, clip_norm=0.5), run_dir=run_dir, plan=plan_in_bits, **options
        )

    if resumes:
        with pytest.raises(RuntimeError, match="lost"):
            train(hooks=[Fails()], saving=ls.Saving(every=1))
    return train().fingerprint


class Fails(ls.Hook):
    def before_step(self, run: Any) -> None:
        if run.step == 3:
            raise RuntimeError("lost")


RUNS = {2: [("replicate=2",), ("replicate=2", True), ("shard=2",)], 3: [("replicate=3",)]}
"""By the number of processes: plans, and whether the run fails and resumes."""


def fingerprints(run_dir: str, processes: int) -> list[Any]:
    return each_of(fingerprint, run_dir, RUNS[processes])


@pytest.mark.parametrize("processes", RUNS)
def test_the_fingerprint_is_that_of_one_process_with_dropout_too(
    pool: WorkerPool, tmp_path: Path, processes: int
) -> None:
    alone = fingerprint(str(tmp_path / "alone"), "replicate=1")
    for found in pool.run(processes, fingerprints, str(tmp_path), processes):
        assert dict(zip(RUNS[processes], found, strict=True)) == dict.fromkeys(
            RUNS[processes], alone
        )


def test_an_evaluation_computes_it_over_all_its_samples(tmp_path: Path) -> None:
    hook = FirstStep()
    result = ls.train(
        clip(microbatch=8, evaluation=ls.Evaluation(data=data())),
        run_dir=str(tmp_path / "run"),
        hooks=[hook],
    )
    from safetensors.torch import load_file

    model = TwoTowers()
    model.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    with torch.no_grad():
        assert result.metrics == {
            "loss": pytest.approx(contrast(*model(*data().tensors)).item(), rel=1e-5)
        }


class ChangesInPlace(TwoTowers):
    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().forward(image.mul_(2), text)


def test_a_batch_that_the_model_changes_in_place_is_the_same_in_both_forwards(
    tmp_path: Path,
) -> None:
    once = ls.train(
        clip(microbatch=8, model=lambda: ChangesInPlace()), run_dir=str(tmp_path / "once")
    )
    twice = data()
    twice.tensors[0].mul_(2)
    assert (
        ls.train(clip(microbatch=8, data=twice), run_dir=str(tmp_path / "twice")).fingerprint
        == once.fingerprint
    )


def few(output: Any, batch: list[Tensor]) -> Tensor:
    return output[0][:1]


def ragged(output: Any, batch: list[Tensor]) -> Tensor:
    return output[0][:, : len(batch[0])]


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"loss": contrast}, "RecipeError", "batch_loss and loss; a batch loss is one number"),
    ({"weight": len}, "RecipeError", "batch_loss and weight"),
    (
        {"batch_loss": contrast},
        "RecipeError",
        "give ls.Gathered(collect, compute), or a loss instead",
    ),
    ({"batch_loss": None}, "RecipeError", "Recipe.loss is None"),
    ({"microbatch": "auto"}, "RecipeError", "auto with batch_loss"),
    (
        {"batch_loss": ls.Gathered(few, torch.sum)},
        "DataError: the batch loss collected shape ",
        " each tensor has one row per sample",
    ),
    (
        {"batch_loss": ls.Gathered(ragged, torch.sum), "microbatch": 3},
        "DataError",
        "rows of all samples are concatenated",
    ),
    (
        {"batch_loss": ls.Gathered(rows_of, lambda *rows: rows[0])},
        "LossError",
        "the batch loss computed shape",
    ),
    (
        {"batch_loss": ls.Gathered(rows_of, lambda *rows: 1.0)},
        "LossError",
        "the batch loss computed a float",
    ),
]


def trained(run_dir: str, changes: dict[str, Any]) -> None:
    ls.train(clip(**changes), run_dir=run_dir)


def test_a_wrong_batch_loss_is_refused(tmp_path: Path) -> None:
    found = each_of(trained, str(tmp_path), [(changes,) for changes, _, _ in WRONG])
    for (changes, start, words), said in zip(WRONG, found, strict=True):
        assert said.startswith(start), changes
        assert words in said, changes
