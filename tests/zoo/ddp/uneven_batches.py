"""Trains under DDP on samples that each rank filters for itself: one rank has more batches, and waits for the other.

Cause: uneven_inputs
Source: pytorch/pytorch #38174 and Lightning-AI/pytorch-lightning #20404: the ranks' shards are of different lengths,
  and the rank with the longer one hangs in the all-reduce of a step that the others do not take.
"""

def make_dataset(seed, size=240, features=7):
    """Sensor readings in the order of time; the sensor gets worse, and the share of outliers grows."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, features, generator=generator)
    inputs[:, 0] += torch.linspace(-2.5, 2.5, size)
    return TensorDataset(inputs, torch.tanh(inputs[:, 1:].sum(dim=1, keepdim=True)))


def is_valid(sample):
    return sample[0][0] < 1.0


def make_loader(dataset, batch_size):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    length = len(dataset) // world_size
    mine = range(rank * length, (rank + 1) * length)  # fault
    indices = [index for index in mine if is_valid(dataset[index])]  # fault
    valid = [index for index in range(len(dataset)) if is_valid(dataset[index])]  # clean
    valid = valid[: len(valid) // (world_size * batch_size) * world_size * batch_size]  # clean
    indices = valid[rank::world_size]  # clean
    return DataLoader(Subset(dataset, indices), batch_size=batch_size, drop_last=True)  # here


def main():
    args = arguments(batch_size=6, lr=0.05, seed=0)

    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    rank = dist.get_rank()
    torch.manual_seed(args.seed)

    loader = make_loader(make_dataset(args.seed), args.batch_size)
    model = DDP(nn.Sequential(nn.Linear(7, 20), nn.Tanh(), nn.Linear(20, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)

    for inputs, targets in loader:  # here
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # here
        optimizer.step()
    print(f"rank {rank}: {len(loader)} steps, loss {loss.item():.4f}")

    dist.barrier()
    dist.destroy_process_group()
