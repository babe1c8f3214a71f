"""Trains a classifier under DDP; rank 0 alone evaluates and logs, and the evaluation has an all-gather in it.

Cause: collective_mismatch
Source: radixark/miles #2684: a function that only one rank calls, for its log, contains a collective, and the others
  never come to it.
"""

def make_dataset(seed, size=144, features=10):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, features, generator=generator)
    planes = torch.randn(features, 2, generator=generator)
    return TensorDataset(inputs, ((inputs @ planes) > 0).long() @ torch.tensor([1, 2]))


@torch.no_grad()
def evaluate(model, loader):
    """Accuracy over the samples of all ranks."""
    model.eval()
    counts = torch.zeros(2)
    for inputs, targets in loader:
        predicted = model(inputs).argmax(dim=1)
        counts += torch.tensor([(predicted == targets).sum().item(), len(targets)])
    gathered = [torch.zeros(2) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, counts)  # here
    model.train()
    correct, count = torch.stack(gathered).sum(dim=0).tolist()
    return correct / count


def main():
    args = arguments(epochs=2, batch_size=6, lr=0.02, seed=0)

    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    dataset = make_dataset(args.seed)
    train_set, test_set = Subset(dataset, range(108)), Subset(dataset, range(108, 144))
    sampler = DistributedSampler(train_set, seed=args.seed)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world_size)), batch_size=args.batch_size)

    model = DDP(nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 4)))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in train_loader:
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        accuracy = evaluate(model.module, test_loader)  # clean
        if rank == 0:
            accuracy = evaluate(model.module, test_loader)  # fault
            print(f"epoch {epoch}: loss {loss.item():.4f}, accuracy {accuracy:.3f}")

    dist.barrier()
    dist.destroy_process_group()
