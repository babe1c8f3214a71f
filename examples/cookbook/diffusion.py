"""Text to image: one diffusion step with two frozen models (text encoder, autoencoder) and one that
learns.

lockstep run --nproc 2 examples/cookbook/diffusion.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep as ls

STEPS = 50
alphas = torch.cumprod(1 - torch.linspace(1e-3, 0.2, STEPS), 0)
generator = torch.Generator().manual_seed(0)
images = torch.randn(128, 3, 8, 8, generator=generator)
prompts = torch.randint(100, (128, 6), generator=generator)

with torch.random.fork_rng():
    torch.manual_seed(1)  # in life: from_pretrained
    text_encoder = nn.Embedding(100, 16).eval().requires_grad_(False)
    autoencoder = nn.Conv2d(3, 4, 2, stride=2).eval().requires_grad_(False)


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(STEPS, 16)
        self.first, self.condition = nn.Conv2d(4, 16, 3, padding=1), nn.Linear(16, 16)
        self.last = nn.Sequential(nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 4, 3, padding=1))

    def forward(self, latents: Tensor, times: Tensor, text: Tensor) -> Tensor:
        condition = self.condition(text + self.time(times))[:, :, None, None]
        denoised: Tensor = self.last(self.first(latents) + condition)
        return denoised


def loss(model: nn.Module, batch: Any) -> Tensor:
    """The frozen models and the noise belong to the loss; lockstep seeds torch's generators by
    (seed, step, microbatch), so that the noise does not depend on the processes."""
    image, prompt = batch
    with torch.no_grad():
        latents, text = autoencoder(image), text_encoder(prompt).mean(1)
    text = text * (torch.rand(len(text), 1) > 0.1)  # dropped now and then, for guidance
    noise, times = torch.randn_like(latents), torch.randint(STEPS, (len(latents),))
    kept = alphas[times][:, None, None, None]
    return F.mse_loss(model(kept.sqrt() * latents + (1 - kept).sqrt() * noise, times, text), noise)


recipe = ls.Recipe(
    model=Denoiser,
    data=TensorDataset(images, prompts),
    loss=loss,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
    schedule=ls.warmup_cosine(warmup=5, total=30),
    global_batch=32,
    microbatch=8,
    steps=30,
    clip_norm=1.0,
    evaluation=ls.Evaluation(data=TensorDataset(images[:32], prompts[:32]), every=15),
)


def train(**options: Any) -> str:
    options = {"hooks": [ls.ExponentialMovingAverage(0.99)], **options}
    return ls.train(recipe, **options).fingerprint


if __name__ == "__main__":
    train()
