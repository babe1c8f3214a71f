"""Trains a classifier under DDP and validates with a DistributedSampler, which pads: some samples are counted twice.

Cause: evaluation_repeats
Source: pytorch/pytorch #25162 and roboflow/rf-detr #1507: the sampler repeats samples until every rank has as many,
  so the metric is over more samples than there are, and depends on the number of processes.
"""

def make_datasets(seed, train=96, validation=47, features=8):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(train + validation, features, generator=generator)
    hidden = torch.tanh(inputs @ torch.randn(features, 3, generator=generator))
    dataset = TensorDataset(inputs, hidden.argmax(dim=1))
    return Subset(dataset, range(train)), Subset(dataset, range(train, train + validation))


def train_one_epoch(model, loader, optimizer):
    model.train()
    for inputs, targets in loader:
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def validate(model, loader):
    """Loss and accuracy over the samples of all ranks."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    for inputs, targets in loader:
        logits = model(inputs)
        sums[0] += F.cross_entropy(logits, targets, reduction="sum")
        sums[1] += (logits.argmax(dim=1) == targets).sum()
        sums[2] += len(targets)
    dist.all_reduce(sums)
    loss, correct, count = sums.tolist()
    return loss / count, correct / count


def main():
    args = arguments(epochs=3, batch_size=8, lr=0.02, seed=0)

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    train_set, validation_set = make_datasets(args.seed)
    train_sampler = DistributedSampler(train_set, seed=args.seed)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=train_sampler, drop_last=True)
    sampler = DistributedSampler(validation_set, shuffle=False)  # fault
    validation_loader = DataLoader(validation_set, batch_size=args.batch_size, sampler=sampler)  # fault
    part = Subset(validation_set, range(rank, len(validation_set), world_size))  # clean
    validation_loader = DataLoader(part, batch_size=args.batch_size)  # clean

    model = DDP(nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        train_one_epoch(model, train_loader, optimizer)
        loss, accuracy = validate(model, validation_loader)  # here
        if rank == 0:
            print(f"epoch {epoch}: validation loss {loss:.4f}, accuracy {accuracy:.4f}")

    dist.barrier()
    dist.destroy_process_group()
