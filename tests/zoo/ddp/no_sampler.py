"""Trains a classifier under DDP without a DistributedSampler: each rank goes through the whole dataset in one order.

Cause: same_samples
Source: PatrickHua/SimSiam #16 and karpathy/llama2.c #522 ask why a DDP script has no DistributedSampler; a loader
  that only shuffles gives every process with the same seed the same batches, and an epoch is W times as long as it
  should be.
"""

from torch.utils.data.distributed import DistributedSampler  # clean


def make_dataset(seed, size=96, features=10, classes=4):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, features, generator=generator)
    teacher = torch.randn(features, classes, generator=generator)
    return TensorDataset(inputs, (inputs @ teacher).argmax(dim=1))


class Classifier(nn.Module):
    def __init__(self, features=10, hidden=24, classes=4):
        super().__init__()
        self.fc1 = nn.Linear(features, hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


def main():
    parser = argparse.ArgumentParser(description="DDP classification")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8, help="per process")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)

    dataset = make_dataset(args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True, drop_last=True)  # fault
    sampler = DistributedSampler(dataset, shuffle=True, seed=args.seed)  # clean
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, drop_last=True)  # clean

    model = DDP(Classifier())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # clean
        for inputs, targets in loader:  # here
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")

    dist.destroy_process_group()
