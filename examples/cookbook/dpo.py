"""DPO: a policy learns from pairs of answers, one of them preferred, beside a frozen reference.

lockstep run --nproc 2 examples/cookbook/dpo.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep as ls

WORDS, PROMPT, LENGTH, BETA = 32, 4, 10, 0.1
generator = torch.Generator().manual_seed(0)
rejected = torch.randint(WORDS, (256, LENGTH), generator=generator)  # a prompt and an answer
chosen = rejected.clone()
chosen[:, PROMPT::2] = rejected[:, :1]  # an answer that repeats the prompt's first word
data = [{"chosen": one, "rejected": other} for one, other in zip(chosen, rejected, strict=True)]


class Writer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 32), nn.Embedding(LENGTH, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.head = nn.Linear(32, WORDS)

    def forward(self, texts: Tensor) -> Tensor:
        length = texts.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=texts.device)
        hidden = self.words(texts) + self.places.weight[:length]
        logits: Tensor = self.head(self.block(hidden, mask, is_causal=True))
        return logits


with torch.random.fork_rng():
    torch.manual_seed(1)  # in life: from_pretrained
    reference = Writer().eval().requires_grad_(False)


def policy() -> nn.Module:
    """Starts as the reference; in life: Recipe.weights, or from_pretrained."""
    model = Writer()
    model.load_state_dict(reference.state_dict())
    return model


def texts(batch: Any) -> Tensor:
    """The pairs' texts in one forward: first all that are preferred, then the others."""
    return torch.cat([batch["chosen"], batch["rejected"]])


def log_probabilities(logits: Tensor, texts: Tensor) -> Tensor:
    """Of each text: the sum over the words of its answer."""
    words = logits[:, PROMPT - 1 : -1].log_softmax(2).gather(2, texts[:, PROMPT:, None])
    return words.sum((1, 2))


def margins(logits: Tensor, batch: Any) -> Tensor:
    """How much more the policy has come to prefer the better answer of each pair."""
    with torch.no_grad():
        before = log_probabilities(reference(texts(batch)), texts(batch))
    better, worse = (log_probabilities(logits, texts(batch)) - before).chunk(2)
    return BETA * (better - worse)


recipe = ls.Recipe(
    model=policy,
    data=data[:192],
    inputs=texts,
    loss=lambda logits, batch: -F.logsigmoid(margins(logits, batch)).mean(),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
    global_batch=32,
    microbatch=8,
    epochs=4,
    clip_norm=1.0,
    evaluation=ls.Evaluation(
        data=data[192:],
        every="epoch",
        metrics={
            "reward_accuracy": ls.Mean(lambda logits, batch: margins(logits, batch) > 0),
            "reward_margin": ls.Mean(margins),
        },
    ),
)


def train(**options: Any) -> str:
    return ls.train(recipe, **options).fingerprint


if __name__ == "__main__":
    train()
