"""Documents packed into rows train as each would alone, in any bins, under every plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from model.context.families import family
from torch import Tensor, nn
from torch.nn import functional as F
from training.subjects import LastState, each_of
from training.test_context_axis import HEADS, WIDTH, WORDS, Undropped

import lockstep as ls
from lockstep.testing.pool import WorkerPool

LENGTHS = [2, 9, 1, 5, 7, 3, 8, 4, 6, 2, 9, 5]
TEXTS = torch.randint(WORDS, (len(LENGTHS), 9), generator=torch.Generator().manual_seed(5))
DOCUMENTS = [text[:length].tolist() for text, length in zip(TEXTS, LENGTHS, strict=True)]
PACKED = ls.Sequence(chunks=8, documents=lambda batch: batch["document_ids"])
NAMED = ls.Sequence(chunks=8, documents=PACKED.documents, positions="position_ids")
OTHERS = [[0, 5, 6], [1, 2, 10], [3, 4], [7, 8, 9, 11]]
"""Bins of the test's own: numbers of documents."""
PLANS = {
    1: ("replicate=1", "checkpointing=full", "logits=chunked"),
    2: (
        "replicate=2",
        "context=2",
        "shard=2,logits=chunked",
        "context=2,exchange=heads,checkpointing=selective,logits=chunked",
    ),
    3: ("context=3",),
    4: ("replicate=2,context=2", "shard=2,context=2,logits=chunked"),
}
LEFT_OUT = {
    ("replicate=2", "named positions"),
    ("replicate=2", "llama"),
    ("shard=2,logits=chunked", "own"),
    (PLANS[2][3], "named positions"),
}
"""Plans and models that add nothing to the others."""


def rows(bins: Sequence[Sequence[int]], length: int) -> list[dict[str, Tensor]]:
    """Rows of documents, as `ls.pack` makes them."""
    found = []
    for each in bins:
        row = {
            name: torch.full((length,), value)
            for name, value in (("input_ids", 0), ("labels", -100), ("document_ids", -1))
        }
        start = 0
        for number, document in enumerate(each):
            tokens = torch.tensor(DOCUMENTS[document])
            stop = start + len(tokens)
            row["input_ids"][start:stop] = tokens
            row["labels"][start + 1 : stop] = tokens[1:]
            row["document_ids"][start:stop] = number
            start = stop
        found.append(row)
    return found


class Placed(nn.Module):
    """Takes its positions as an argument, and rotates queries and keys by them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.double()

    def forward(self, text: Tensor, position_ids: Tensor) -> Tensor:
        x = self.words(text)
        heads = self.query_key_value(x).view(*text.shape, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        angles = position_ids[:, None, :, None] * torch.tensor([0.5, 0.1])
        query, key = (
            torch.cat([y.cos(), y.sin()], -1) * z
            for y, z in ((angles, heads[0]), (angles, heads[1]))
        )
        y = F.scaled_dot_product_attention(query, key, heads[2], is_causal=True)
        return self.head(x + y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def llama() -> nn.Module:
    return family("llama", torch.float64).train()


def text_alone(batch: Any) -> Any:
    return batch["input_ids"]


def logits_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


def entropy(output: Any, batch: Any) -> ls.Sum:
    logits = logits_of(output)[:, :-1].flatten(0, 1)
    return ls.Sum(F.cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="sum"))


def targets(batch: Any) -> Tensor:
    return (batch["labels"][:, 1:] != -100).sum()


MODELS: dict[str, tuple[Callable[[], nn.Module], ls.Sequence]] = {
    "own": (Undropped, PACKED),
    "named positions": (Placed, NAMED),
    "llama": (llama, PACKED),
}


def with_positions(batch: Any) -> Any:
    samples, tokens = batch["input_ids"].shape
    return batch["input_ids"], torch.arange(tokens).expand(samples, -1)


def train(run_dir: str, plan: str, data: Any, **changes: Any) -> tuple[dict[str, Tensor], float]:
    """Return the model and the last loss. Each step has all the data."""
    given: dict[str, Any] = {
        "data": data,
        "inputs": text_alone,
        "loss": entropy,
        "weight": targets,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.3),
        "global_batch": len(data),
        "microbatch": 2,
        "steps": 2,
        **changes,
    }
    last = LastState()
    result = ls.train(ls.Recipe(**given), plan=plan, run_dir=run_dir, hooks=[last])
    events = [each.details for each in result.events if each.name == "attention-kernel"]
    assert [*map(kernel_of, events)] in kernels_of(plan, given), events
    return last.state, result.loss


def kernel_of(details: dict[str, Any]) -> str:
    """The kernel that an event names, with the reasons of a CPU."""
    ((kernel, why),) = details["kernels"].items()
    assert "it needs an NVIDIA GPU" in why
    assert "it has no backward on cpu" in why
    return kernel


def kernels_of(plan: str, given: dict[str, Any]) -> list[list[str]]:
    """The kernels that the event may name: it is recorded once, if there are documents."""
    whole_rows = ["the model's attention for each document"]
    some_rows = ["the model's attention with a dense mask"]
    if given.get("sequence") is None:
        return [[]]
    if "context" not in plan or "heads" in plan:
        return [whole_rows]
    return [whole_rows, some_rows]


def packed(run_dir: str, plan: str, name: str, bins: str) -> tuple[dict[str, Tensor], float]:
    model, sequence = MODELS[name]
    data = ls.pack(DOCUMENTS, 16) if bins == "pack" else rows(OTHERS, 24)
    head = None if name == "llama" else "head"
    return train(run_dir, plan, data, model=model, sequence=sequence, head=head)


def one_by_one(run_dir: str) -> dict[str, tuple[dict[str, Tensor], float]]:
    data = rows([[number] for number in range(len(DOCUMENTS))], 9)
    found = {}
    for name, (model, _) in MODELS.items():
        inputs = with_positions if model is Placed else text_alone
        found[name] = train(f"{run_dir}/{name}", "", data, model=model, inputs=inputs, microbatch=4)
    return found


@pytest.fixture(scope="module")
def alone(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    (found,) = pool.run(1, one_by_one, str(tmp_path_factory.mktemp("alone")))
    return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("size", "names"),
    [
        (1, [*MODELS]),
        (2, [*MODELS]),
        (3, ["own", "named positions"]),
        pytest.param(3, ["llama"], marks=pytest.mark.slow),
        pytest.param(4, [*MODELS], marks=pytest.mark.slow),
    ],
)
def test_packed_documents_train_the_model_of_documents_one_by_one(
    pool: WorkerPool, tmp_path: Path, alone: Any, size: int, names: Sequence[str]
) -> None:
    """Plans and models are in both kinds of bins in turn."""
    bins = ("pack", "others") if size < 3 else ("pack", "pack")
    cases = [
        (plan, name, bins[(row + place) % 2])
        for row, plan in enumerate(PLANS[size])
        for place, name in enumerate(names)
        if (plan, name) not in LEFT_OUT
    ]
    for rank in pool.run(size, each_of, packed, str(tmp_path), cases, timeout_seconds=110):
        for (plan, name, each_bins), found in zip(cases, rank, strict=True):
            assert not isinstance(found, str), (plan, name, each_bins, found)
            state, loss = alone[name]
            assert loss == pytest.approx(found[1], rel=1e-10), (plan, name, each_bins)
            for each, value in state.items():
                torch.testing.assert_close(found[0][each], value, rtol=1e-10, atol=1e-10)
