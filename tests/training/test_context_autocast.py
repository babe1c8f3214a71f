"""Under autocast the arguments of an attention may have several dtypes: queries and keys that were
rotated in float32, and values in bf16. Ranks that share out tokens compute with them as torch's
function does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from training.test_context_axis import HEADS, TOKENS, WIDTH, WORDS, Attention, recipe

import lockstep as ls
from lockstep.testing.pool import WorkerPool


class Rotated(Attention):
    """Scales queries and keys by their places, in float32."""

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, _ = x.shape
        given = (each(self.norm(x)) for each in (self.query, self.key, self.value))
        heads = [each.view(samples, tokens, -1, WIDTH // HEADS).transpose(1, 2) for each in given]
        places = torch.arange(tokens, dtype=torch.float32).cos()[:, None]
        query, key, value = heads[0] * places, heads[1] * places, heads[2]
        if torch.is_autocast_enabled("cpu"):
            assert (query.dtype, value.dtype) == (torch.float32, torch.bfloat16)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(samples, tokens, -1))  # type: ignore[no-any-return]


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Rotated() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text) + self.places(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def train(folder: str, plans: list[str]) -> list[float]:
    # some of the chunks have no token
    given = recipe(
        model=Generator,
        precision="bf16",
        evaluation=None,
        tensor=None,
        sequence=ls.Sequence(chunks=TOKENS + 11),
    )
    return [ls.train(given, plan=plan, run_dir=f"{folder}/{plan}").loss for plan in plans]


def test_arguments_of_several_dtypes_are_cast(pool: WorkerPool, tmp_path: Path) -> None:
    (alone,) = pool.run(1, train, str(tmp_path), ["replicate=1"])[0]
    truth = load_file(tmp_path / "replicate=1" / "model.safetensors")
    plans = ["context=2,exchange=keys", "context=2,exchange=heads"]
    for plan, loss in zip(plans, pool.run(2, train, str(tmp_path), plans)[0], strict=True):
        assert loss == pytest.approx(alone, rel=1e-3)
        state = load_file(tmp_path / plan / "model.safetensors")
        torch.testing.assert_close(state, truth, rtol=0.0, atol=0.02)
