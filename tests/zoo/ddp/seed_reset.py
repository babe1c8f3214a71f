"""Trains a denoiser under DDP; the preview that each step logs resets torch's seed, so each step draws the same noise.

Cause: seed_reset
Source: huggingface/diffusers #175: `torch.manual_seed` makes the generator for sampling inside the training loop,
  which also sets the global seed that the noise and the timesteps of training are drawn with.
"""

def make_dataset(seed, size=96, features=10):
    """Points on a closed curve."""
    generator = torch.Generator().manual_seed(seed)
    angle = 2 * torch.pi * torch.rand(size, 1, generator=generator)
    phases = 2 * torch.pi * torch.rand(features, generator=generator)
    return TensorDataset(torch.cos(angle + phases))


class Denoiser(nn.Module):
    def __init__(self, features=10, hidden=40):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(features + 1, hidden), nn.SiLU(), nn.Linear(hidden, features))

    def forward(self, noisy, level):
        return self.net(torch.cat([noisy, level], dim=1))


@torch.no_grad()
def preview(model, seed, features=10):
    """Mean size of what the model makes of pure noise, the same noise in every step."""
    generator = torch.manual_seed(seed)  # fault
    generator = torch.Generator().manual_seed(seed)  # clean
    noise = torch.randn(4, features, generator=generator)
    return (noise - model(noise, torch.ones(4, 1))).abs().mean().item()


def train_step(model, optimizer, points):
    noise = torch.randn_like(points)
    level = torch.rand(len(points), 1)
    noisy = (1 - level) * points + level * noise
    loss = nn.functional.mse_loss(model(noisy, level), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def main():
    args = arguments(epochs=3, batch_size=8, lr=0.01, seed=0)

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    dataset = make_dataset(args.seed)
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    model = DDP(Denoiser())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    torch.manual_seed(args.seed + rank)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, (points,) in enumerate(loader):
            loss = train_step(model, optimizer, points)
            size = preview(model.module, args.seed + rank)  # here
            if rank == 0:
                print(f"epoch {epoch}, step {step}: loss {loss:.4f}, preview {size:.3f}")

    dist.destroy_process_group()
