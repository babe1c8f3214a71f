"""GRPO: reinforcement learning of a language model; each prompt is answered several times, and each
answer is compared with the others of its prompt.

lockstep run --nproc 2 --run-dir runs/grpo examples/cookbook/grpo.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls

WORDS, LENGTH, ANSWERS, KL = 16, 8, 8, 0.02  # ANSWERS: for each prompt
prompts = TensorDataset(torch.arange(WORDS)[:, None])


class Writer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 32), nn.Embedding(LENGTH, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
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
    """Starts as the reference; in life: session.prepare(weights=...), or from_pretrained."""
    model = Writer()
    model.load_state_dict(reference.state_dict())
    return model


@torch.no_grad()
def write(model: nn.Module, texts: Tensor) -> Tensor:
    """Answer each prompt. Under `shard` forwards have collectives, so all answers have one length:
    cut them later."""
    while texts.shape[1] < LENGTH:
        texts = torch.cat([texts, torch.multinomial(model(texts)[:, -1].softmax(1), 1)], 1)
    return texts


def rewards(texts: Tensor) -> Tensor:
    """How often a word is followed by the next one."""
    return (texts[:, 1:] == (texts[:, :-1] + 1) % WORDS).float().mean(1)


def log_probabilities(model: nn.Module, texts: Tensor) -> Tensor:
    """Of each word of the answers."""
    return model(texts)[:, :-1].log_softmax(2).gather(2, texts[:, 1:, None])[..., 0]


def loss(model: nn.Module, texts: Tensor, rewards: Tensor) -> ls.Loss:
    groups = rewards.view(-1, ANSWERS)  # a microbatch holds whole groups, on one process
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    words = log_probabilities(model, texts)
    with torch.no_grad():
        ratio = log_probabilities(reference, texts)
    distance = ratio - words
    losses = -(words - words.detach()).exp() * advantages.view(-1, 1) + KL * (
        distance.exp() - distance - 1
    )
    return ls.Loss(losses.sum(), losses.numel())


def train(**options: Any) -> str:
    with ls.Session(seed=0, **options) as session:
        model, optimizer = session.prepare(
            policy, lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3)
        )
        for step in session.steps(prompts, global_batch=16, microbatch=4, steps=20):
            earned = [torch.empty(0)]
            # each with its random numbers: who computes it does not matter
            for (texts,) in step.microbatches():
                written = write(model, texts.repeat_interleave(ANSWERS, 0))
                earned.append(rewards(written).cpu())
                step.backward(loss(model, written, rewards(written)))
            step.commit(optimizer, clip_norm=1.0)
            step.log({"reward": session.mean(torch.cat(earned))})
        return ls.fingerprint(model)


if __name__ == "__main__":
    train()
