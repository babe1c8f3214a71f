"""The layers of one process on several devices: what comes out has the bits of one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from model.second_device import ELSEWHERE, SecondDevice
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from training.subjects import recipe

import lockstep as ls
from lockstep.base import accelerator
from lockstep.base.errors import PlanError, RecipeError
from lockstep.model import parallelize as layout

WIDTH, VOCABULARY, LENGTH = 8, 11, 5
PLANS = ["split=3", "split=0+4", "split=1+3", "split=2,checkpointing=full"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.dropout = nn.Dropout(0.3)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, *, mask: tuple[Tensor, float]) -> Tensor:
        keep, scale = mask
        normed = self.norm(x.flatten(0, 1)).view_as(x)
        return x + self.down(self.dropout(torch.relu(self.up(normed)))) * keep * scale


class Tagger(nn.Module):
    """Tied embeddings, and two lists of blocks with code of the model's own around them."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.ModuleList(Block() for _ in range(2))
        self.late = nn.ModuleList(Block() for _ in range(2))
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.norm = nn.LayerNorm(WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.unnamed = "an attribute of the user's own"

    def forward(self, text: Tensor) -> dict[str, Tensor]:
        x = self.dropout(self.embedding(text))
        mask = ((text > 1).float()[..., None], 0.5)
        for block in self.early:
            x = block(x, mask=mask)
        x = x * mask[0] + 0.1
        for block in self.late:
            x = block(x, mask=mask)
        return {"logits": F.linear(self.norm(x), self.embedding.weight), "last": x}


def data(samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(*torch.randint(VOCABULARY, (2, samples, LENGTH), generator=generator))


def cross_entropy(output: dict[str, Tensor], batch: Sequence[Tensor]) -> dict[str, Any]:
    total = F.cross_entropy(output["logits"].flatten(0, 1), batch[1].flatten(), reduction="sum")
    return {"entropy": ls.Sum(total), "size": (output["last"] ** 2).mean()}


def right(output: dict[str, Tensor], batch: Sequence[Tensor]) -> Tensor:
    return (output["logits"].argmax(-1) == batch[1]).float()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.3, foreach=True)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    assert model.unnamed
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.3)


def tagging(**changes: Any) -> ls.Recipe:
    given: dict[str, Any] = {
        "model": Tagger,
        "data": data(40, seed=3),
        "inputs": lambda batch: batch[0],
        "loss": cross_entropy,
        "weight": lambda batch: {"entropy": (batch[1] > 2).sum()},
        "optimizer": adamw,
        "clip_norm": 0.5,
        "global_batch": 14,
        "microbatch": 4,
        "steps": 2,
        "evaluation": ls.Evaluation(
            data=data(9, seed=4), every=2, metrics={"right": ls.Mean(right)}
        ),
    }
    return recipe(**given | changes)


def train(
    path: Path, name: str, plan: str, given: ls.Recipe
) -> tuple[str, dict[str, float], float, bytes, bytes]:
    directory = path / name
    result = ls.train(
        given, plan=plan, run_dir=str(directory), hooks=[ls.ExponentialMovingAverage(0.5)]
    )
    saved = [
        (directory / file).read_bytes()
        for file in ("model.safetensors", "model_average.safetensors")
    ]
    return result.fingerprint, result.metrics, result.loss, *saved


@contextmanager
def two_devices() -> Iterator[SecondDevice]:
    """The first device of a split is the CPU, each other one the one that only looks like
    another."""
    with (
        SecondDevice() as second,
        patch.object(layout, "devices_of", lambda home, count: [home, *[ELSEWHERE] * (count - 1)]),
    ):
        yield second


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any, str], Any]:
    """Returns what one device gives with an optimizer and numerics."""
    return cache(
        lambda optimizer, numerics: train(
            tmp_path_factory.mktemp("whole"),
            "run",
            f"numerics={numerics}",
            tagging(optimizer=optimizer),
        )
    )


@pytest.mark.parametrize(
    ("machine", "plan"),
    [
        *((two_devices, plan) for plan in PLANS),
        (nullcontext, "split=3"),
        (nullcontext, "split=2,checkpointing=full"),
    ],
)
def test_a_split_model_trains_to_the_same_bits(
    tmp_path: Path, whole: Any, plan: str, machine: Callable[[], AbstractContextManager[Any]]
) -> None:
    with machine():
        assert train(tmp_path, "split", f"{plan},numerics=bitwise", tagging()) == whole(
            adamw, "bitwise"
        )


@pytest.mark.parametrize(("optimizer", "numerics"), [(adamw, "fast"), (momentum, "bitwise")])
def test_every_optimizer_works_on_parameters_of_two_devices(
    tmp_path: Path, whole: Any, optimizer: Any, numerics: str
) -> None:
    expected = whole(optimizer, numerics)
    with two_devices():
        found = train(
            tmp_path, "split", f"split=2,numerics={numerics}", tagging(optimizer=optimizer)
        )
    assert found[1] == pytest.approx(expected[1], rel=1e-5)
    assert found[2] == pytest.approx(expected[2], rel=1e-5)
    assert (found[0] == expected[0]) or numerics == "fast"


def train_shorthand(path: Path, plan: str) -> str:
    """The loss calls the model itself, twice; and only the forward knows the weight."""

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> ls.Loss:
        first, second = model(batch[0])["logits"], model(text=batch[1])["last"]
        return ls.Loss(first.square().sum() + second.sum(), second.detach().abs().sum())

    given = tagging(inputs=None, weight=None, evaluation=None, loss=loss)
    return ls.train(given, plan=plan, run_dir=str(path)).fingerprint


def test_a_loss_that_calls_the_model_itself(tmp_path: Path) -> None:
    expected = train_shorthand(tmp_path / "whole", "numerics=bitwise")
    with two_devices():
        assert train_shorthand(tmp_path / "split", "split=2,numerics=bitwise") == expected


def train_a_pair(path: Path, plan: str) -> list[str]:
    with ls.Session(run_dir=str(path), plan=plan) as session:
        one, first = session.prepare(Tagger, adamw)
        other, second = session.prepare(Tagger, momentum)
        for step in session.steps(data(40, seed=3), global_batch=14, microbatch=4, steps=2):
            for batch in step.microbatches():
                step.backward(
                    (one(batch[0])["last"] - other(batch[0])["last"]).square().mean(), first
                )
            step.commit(first, clip_norm=0.1)
            for batch in step.microbatches():
                step.backward(
                    (one(batch[0])["last"] - other(batch[0])["last"]).abs().mean(), second
                )
            step.commit(second)
        return [ls.fingerprint(one), ls.fingerprint(other)]


def test_two_models_that_learn_from_each_other(tmp_path: Path) -> None:
    expected = train_a_pair(tmp_path / "whole", "numerics=bitwise")
    with two_devices():
        assert train_a_pair(tmp_path / "split", "split=2,numerics=bitwise") == expected


def test_a_loss_scale_reaches_the_gradients_of_both_devices(tmp_path: Path) -> None:
    """The second device that these tests have does not autocast: it computes in float32, nearer to
    the truth than float16."""
    given = tagging(precision="fp16")
    expected = train(tmp_path, "whole", "replicate=1", given)
    with two_devices():
        found = train(tmp_path, "split", "split=2", given)
    assert found[2] == pytest.approx(expected[2], rel=1e-2)


@pytest.mark.parametrize(
    ("plan", "kind", "text"),
    [
        (
            "split=5",
            RecipeError,
            "split=5 and a model of 4 layers (early.0, early.1, late.0, late.1)",
        ),
        ("split=2+3", RecipeError, "split=2+3 places 5 layers, but the model has 4"),
        ("data_parallel=2", PlanError, "data_parallel=2 and 0 GPUs"),
    ],
)
def test_what_a_model_or_machine_does_not_allow_is_refused(
    tmp_path: Path, plan: str, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as caught:
        ls.train(tagging(), plan=plan, run_dir=str(tmp_path / "run"))
    assert str(caught.value).startswith(text)
    assert kind is RecipeError or not (tmp_path / "run").exists()


def test_data_parallel_says_in_the_run_that_replicate_is_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without GPUs torch's DataParallel calls the module as it is, so the model that comes out is
    that of one process."""
    expected = ls.train(recipe(), run_dir=str(tmp_path / "whole"))
    monkeypatch.setattr(layout, "gpus_of", lambda home, count: list(range(count)))
    generators = [torch.Generator(), torch.Generator()]
    monkeypatch.setattr(accelerator, "kind", lambda: "cuda")
    monkeypatch.setattr(accelerator, "generator", lambda device: generators[device.index])
    capfd.readouterr()
    result = ls.train(recipe(), plan="data_parallel=2", run_dir=str(tmp_path / "cut"))
    assert result.fingerprint == expected.fingerprint
    (event,) = [event for event in result.events if event.name == "data-parallel"]
    assert event.details["gpus"] == 2
    assert "replicate=2, one process a GPU, is faster" in event.details["better"]
    assert (
        "warning: data_parallel=2; replicate=2, one process a GPU, is faster"
        in capfd.readouterr().err
    )


class Unmoved(Tagger):
    def to(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("the whole model was moved to one device")


def test_the_model_is_never_whole_on_the_first_device(tmp_path: Path) -> None:
    assert (
        ls.train(tagging(model=Unmoved), plan="split=2", run_dir=str(tmp_path / "run")).steps == 2
    )


def small_parts() -> nn.Module:
    """No module has an eighth of the parameters, and neighbours are not alike, so none is a
    block."""
    return nn.Sequential(
        *(module for _ in range(9) for module in (nn.Linear(6, 6), nn.LayerNorm(6))),
        nn.Linear(6, 3),
    )


def test_where_there_is_no_block_each_layer_is_recomputed_and_not_the_model_over_two_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[type[nn.Module]] = []
    monkeypatch.setattr(
        layout, "checkpoint_activations", lambda block, mode: found.append(type(block))
    )
    ls.train(
        recipe(model=small_parts), plan="split=2,checkpointing=full", run_dir=str(tmp_path / "run")
    )
    assert found == [nn.Linear, nn.LayerNorm] * 9 + [nn.Linear]
