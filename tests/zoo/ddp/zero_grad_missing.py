"""Trains an autoencoder under DDP and never clears the gradients: each step applies the sum of all steps so far.

Cause: stale_gradients
Source: wenet-e2e/wekws #73 and yastrebksv/TennisCourtDetector #7: the training loop steps the optimizer, and nobody
  calls zero_grad. pytorch/pytorch #47175 asks for a warning.
"""

def make_dataset(seed, size=144, features=16, factors=4):
    """Points near a subspace."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randn(size, factors, generator=generator)
    basis = torch.randn(factors, features, generator=generator) / factors**0.5
    return TensorDataset(codes @ basis + 0.05 * torch.randn(size, features, generator=generator))


class AutoEncoder(nn.Module):
    def __init__(self, features=16, code=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(features, 12), nn.ReLU(), nn.Linear(12, code))
        self.decoder = nn.Sequential(nn.Linear(code, 12), nn.ReLU(), nn.Linear(12, features))

    def forward(self, x):
        return self.decoder(self.encoder(x))


class Executor:
    """Runs one epoch after another."""

    def __init__(self, model, optimizer, log_interval):
        self.model = model
        self.optimizer = optimizer
        self.log_interval = log_interval

    def train(self, loader, epoch):
        self.model.train()
        for batch_idx, (points,) in enumerate(loader):
            loss = nn.functional.mse_loss(self.model(points), points)
            self.optimizer.zero_grad()  # clean
            loss.backward()  # here
            self.optimizer.step()  # here
            if batch_idx % self.log_interval == 0 and dist.get_rank() == 0:
                print(f"epoch {epoch}, batch {batch_idx}: loss {loss.item():.4f}")


def main():
    args = arguments(epochs=2, batch_size=6, lr=0.3, seed=0)

    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    dataset = make_dataset(args.seed)
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    model = DDP(AutoEncoder())
    executor = Executor(model, torch.optim.SGD(model.parameters(), lr=args.lr), log_interval=4)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        executor.train(loader, epoch)

    dist.destroy_process_group()
