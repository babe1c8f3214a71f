"""Trains under FSDP2 with an optimizer that was built before fully_shard: nothing is trained, and no error says so.

Cause: not_trained
Source: mosaicml/composer #3822 and huggingface/accelerate #3209: fully_shard replaces the parameters by DTensors, and
  an optimizer built before it holds the old ones, which never get a gradient.
"""

def make_dataset(seed, size=96, features=12):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, features, generator=generator)
    teacher = torch.randn(features, 3, generator=generator) / features**0.5
    return TensorDataset(inputs, torch.tanh(inputs @ teacher))


class Model(nn.Module):
    def __init__(self, features=12, hidden=32, layers=2):
        super().__init__()
        self.embed = nn.Linear(features, hidden)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, hidden), nn.GELU()) for _ in range(layers))
        self.out = nn.Linear(hidden, 3)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x)


def main():
    args = arguments(epochs=3, batch_size=8, lr=5e-3, seed=0)

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(args.seed)

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)  # fault
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)  # here
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)  # clean

    dataset = make_dataset(args.seed)
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()  # here
            optimizer.zero_grad()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")

    dist.destroy_process_group()
