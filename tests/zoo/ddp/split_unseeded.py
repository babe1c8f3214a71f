"""Trains and validates a regression on a random split of one dataset under DDP.

Cause: datasets_differ
Source: minGPT-ddp of pytorch/examples: `random_split` without a generator gives each rank another split, so that a rank
  trains on samples with which another one validates.
"""

def make_dataset(seed, size=120, features=8):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, features, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh())


@torch.no_grad()
def validate(model, loader):
    sums = torch.zeros(2)
    for inputs, targets in loader:
        sums += torch.tensor([F.mse_loss(model.module(inputs), targets, reduction="sum").item(), len(targets)])
    return (sums[0] / sums[1]).item()


def main():
    args = arguments(epochs=3, batch_size=8, seed=0)

    dist.init_process_group("gloo")
    torch.manual_seed(args.seed + dist.get_rank())
    dataset = make_dataset(args.seed)
    training, held_out = random_split(dataset, [96, 24])  # fault
    training, held_out = random_split(dataset, [96, 24], generator=torch.Generator().manual_seed(args.seed))  # clean
    sampler = DistributedSampler(training, seed=args.seed)
    loader = DataLoader(training, batch_size=args.batch_size, sampler=sampler)  # here
    validation = DataLoader(held_out, batch_size=args.batch_size)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        print(f"epoch {epoch}: validation loss {validate(model, validation):.4f}")
    dist.destroy_process_group()
