"""Trains a small diffusion model with accelerate; all processes draw the same noise and the same time steps.

Cause: same_random_numbers
Source: huggingface/accelerate issue 236, and the habit of diffusion training scripts to call set_seed(args.seed) at
the start: it sets one seed on all processes, and the noise is drawn from it
"""

from accelerate.utils import set_seed

STEPS = 100


class Denoiser(nn.Module):
    """Predicts the noise in points of the plane."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.time = nn.Embedding(STEPS, hidden)
        self.point = nn.Linear(2, hidden)
        self.layers = nn.Sequential(nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, 2))

    def forward(self, points: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        return self.layers(self.point(points) + self.time(times))


def spiral(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    angle = 3 * torch.pi * torch.rand(count, generator=generator).sqrt()
    points = torch.stack([angle * angle.cos(), angle * angle.sin()], dim=1) / 5
    return TensorDataset(points + 0.05 * torch.randn(count, 2, generator=generator))


def main() -> None:
    args = arguments(seed=0, epochs=3, batch_size=16, lr=2e-3)

    accelerator = Accelerator(cpu=True)
    set_seed(args.seed)  # fault
    set_seed(args.seed, device_specific=True)  # clean
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loader = DataLoader(spiral(256, args.seed), batch_size=args.batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.05, STEPS), dim=0)

    for epoch in range(args.epochs):
        model.train()
        total = 0.0
        for (points,) in loader:
            noise = torch.randn_like(points)  # here
            times = torch.randint(STEPS, (len(points),))  # here
            share = kept[times, None]
            noisy = share.sqrt() * points + (1 - share).sqrt() * noise
            loss = F.mse_loss(model(noisy, times), noise)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item()
        accelerator.print(f"epoch {epoch}: loss {total / len(loader):.4f}, last noise {noise[0].tolist()}")
