"""Pipelines with bitwise numerics: one fingerprint under every schedule, with every data axis, and
on one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from training.subjects import each_of, learned
from training.test_pipeline_axis import Staged, of_its_own_weight, recipe

import lockstep as ls
from lockstep.model.separate_parts import SeparateParts
from lockstep.testing.pool import WorkerPool

WORDS, WIDTH = 11, 8
Batch = Sequence[Tensor]


class Uses(nn.Module):
    """Uses a matrix twice, and passes on a view that is not contiguous, beside a mask and the same
    tensor again."""

    def __init__(self, matrix: nn.Parameter, inner: nn.Module) -> None:
        super().__init__()
        self.matrix, self.inner = matrix, inner
        self.dropout = nn.Dropout(0.2)

    def forward(self, given: Any) -> Any:
        x, mask, again = given if isinstance(given, tuple) else (given, given > 0, given)
        x = x + self.inner(F.gelu(x @ self.matrix) @ self.matrix.t()) * mask + again.sin()
        passed = self.dropout(x).t().contiguous().t()
        return passed, mask, passed


class Last(nn.Module):
    def __init__(self, matrix: nn.Parameter, words: nn.Parameter) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.matrix, self.words = matrix, words

    def forward(self, given: Any) -> Tensor:
        return F.linear(given[0] @ self.matrix, self.words) * self.scale


class Entangled(nn.Module):
    """A matrix in four parts and an embedding in two; a module inside three parts; parts in another
    order than they are called in."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.Linear(WIDTH, WIDTH)
        matrix = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.head = Last(matrix, self.words.weight)
        self.third = Uses(matrix, inner)
        self.second = Uses(matrix, inner)
        self.first = Uses(matrix, inner)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.third(self.second(self.first(self.words(words)))))  # type: ignore[no-any-return]


def convolutions() -> nn.Module:
    def block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
        )

    return nn.Sequential(
        block(1, 4),
        block(4, 6),
        nn.MaxPool2d(2),
        block(6, 6),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, WORDS),
    )


def frozen() -> nn.Module:
    model = Staged()
    model.embedding.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    return model


def sharing(*, one_module: bool = False) -> nn.Module:
    """Two layers that are one module, or only share their parameters."""
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    second.weight, second.bias = first.weight, first.bias
    layers = [first, nn.Tanh(), first if one_module else second]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Tanh(), *layers, nn.Linear(WIDTH, WORDS))


def images(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(WORDS, (samples,), generator=generator)
    return TensorDataset(torch.randn(samples, 1, 6, 6, generator=generator), targets)


def cross_entropy(output: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(output, batch[1])


SIMPLE: dict[str, Any] = {"loss": cross_entropy, "weight": None, "evaluation": None}
SEQUENTIAL = {**SIMPLE, "stages": None, "tensor": None}
ENTANGLED = {"model": Entangled, "stages": ["words", "first", "second", "third", "head"]}
MODELS: dict[str, dict[str, Any]] = {
    "staged": {},
    "weight": {"loss": of_its_own_weight, "weight": None},
    "entangled": {**ENTANGLED, "tensor": None},
    "entangled in bf16": {**ENTANGLED, "tensor": None, "precision": "bf16", "microbatch": 3},
    "frozen": {"model": frozen},
    "sharing": {**SEQUENTIAL, "model": sharing},
    "eight": {"global_batch": 32, "steps": 3, "epochs": None, "microbatch": 4},
    "convolutions": {
        **SEQUENTIAL,
        "model": convolutions,
        "data": images(30),
        "global_batch": 15,
        "microbatch": 3,
    },
}
"""Name -> changes of the recipe of `test_pipeline_axis`."""
REFUSED = {"one module": {**SEQUENTIAL, "model": partial(sharing, one_module=True)}}
CASES = {
    1: [("replicate=1", name) for name in MODELS],
    2: [
        *(("pipeline=2", name) for name in MODELS if name not in ("weight", "eight")),
        ("pipeline=2,schedule=zero-bubble", "entangled"),
        ("pipeline=2,schedule=interleaved,checkpointing=full", "staged"),
        ("shard=2", "staged"),
    ],
    4: [
        ("replicate=2,pipeline=2", "staged"),
        ("shard=2,pipeline=2,schedule=zero-bubble", "staged"),
    ],
}
"""Number of processes -> plans and models."""
MORE = {
    2: [
        ("pipeline=2", "weight"),
        ("pipeline=2", "eight"),
        ("pipeline=2,schedule=gpipe", "staged"),
        ("pipeline=2,schedule=zero-bubble", "convolutions"),
        ("pipeline=2,schedule=interleaved", "entangled in bf16"),
        ("replicate=2", "entangled in bf16"),
        ("replicate=2", "convolutions"),
    ],
    3: [
        ("pipeline=3", "staged"),
        ("pipeline=3,schedule=zero-bubble,checkpointing=full", "eight"),
        ("pipeline=3", "entangled"),
        ("pipeline=3", "convolutions"),
    ],
    4: [
        ("shard=2,pipeline=2", "staged"),
        ("replicate=2,pipeline=2,schedule=zero-bubble", "weight"),
        ("replicate=2,pipeline=2,schedule=interleaved", "entangled in bf16"),
        ("shard=2,pipeline=2,schedule=gpipe", "frozen"),
        ("shard=2,pipeline=2,sharding=gradients,checkpointing=selective", "eight"),
        ("shard=2,pipeline=2,schedule=zero-bubble,checkpointing=full", "eight"),
        ("shard=2,pipeline=2,schedule=zero-bubble,sharding=gradients", "frozen"),
        ("pipeline=4,schedule=1f1b", "eight"),
        ("pipeline=4,schedule=zero-bubble", "entangled"),
    ],
}


def fingerprint(run_dir: str, plan: str, name: str) -> str:
    changed = recipe(**(MODELS | REFUSED)[name])
    plan += ",numerics=bitwise"
    result = ls.train(changed, plan=plan, run_dir=run_dir, log_every=1)
    # a norm is float64, so its last bits seldom change a clipped gradient
    return f"{result.fingerprint} {[row.get('gradient_norm') for row in learned(run_dir)]}"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = str(tmp_path_factory.mktemp("alone"))
    found = each_of(fingerprint, folder, CASES[1], may_refuse=False)
    return dict(zip(MODELS, found, strict=True))


@pytest.mark.parametrize(
    ("processes", "cases"),
    [
        *CASES.items(),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in MORE.items()),
    ][1:],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_the_bits_are_those_of_one_process(
    pool: WorkerPool,
    tmp_path: Path,
    alone: dict[str, str],
    processes: int,
    cases: list[tuple[str, str]],
) -> None:
    found, *others = pool.run(
        processes, partial(each_of, may_refuse=False), fingerprint, str(tmp_path), cases
    )
    assert [name for name, other in zip(cases, found, strict=True) if other != alone[name[1]]] == []
    # only rank 0 has written the norms when it returns
    prints = [[each.split()[0] for each in several] for several in (found, *others)]
    assert all(each == prints[0] for each in prints)


def test_each_part_has_its_own_leaf_only_in_its_forward() -> None:
    model = Entangled()
    separate = SeparateParts(model, ENTANGLED["stages"], ["head.matrix"], last="head")  # type: ignore[arg-type]
    matrix = model.head.matrix
    leaves = [leaf.parameter for leaf in separate.leaves["head.matrix"]]
    assert len(leaves) == 3
    assert all(leaf.data_ptr() == matrix.data_ptr() for leaf in leaves)
    model(torch.arange(4)).sum().backward()
    assert [name for name, each in model.named_parameters() if each is matrix] == ["head.matrix"]
    assert model.second.matrix is model.head.matrix is matrix
    parts = [matrix.grad, *(leaf.grad for leaf in leaves)]
    assert all(part is not None and part.norm() > 0 for part in parts)
    once = Entangled()
    once.load_state_dict(model.state_dict())
    torch.manual_seed(0)
    for each in (model, once):
        each.zero_grad()
        each.eval()
    for leaf in leaves:
        leaf.grad = None
    model(torch.arange(4)).sum().backward()
    once(torch.arange(4)).sum().backward()
    summed = sum(part.grad for part in (matrix, *leaves) if part.grad is not None)
    torch.testing.assert_close(summed, once.head.matrix.grad)
    separate.close()
    for leaf in leaves:
        leaf.grad = None
    model(torch.arange(4)).sum().backward()
    assert all(leaf.grad is None for leaf in leaves)


def test_one_module_that_is_two_parts_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    """What the error recommends, `sharing`, is among the models above."""
    cases = [(plan, "one module") for plan in ("pipeline=2", "replicate=2")]
    for found in pool.run(2, each_of, fingerprint, str(tmp_path), cases):
        assert all("one module for two parts of the model, '2' and '4'" in each for each in found)
