"""Trains on 9 shards of data: each rank takes 9 // 2 of them, so the last shard is never seen.

Cause: samples_missing
Source: modelscope/ms-swift #9859 and the warning in NVIDIA/NeMo #4553: an integer division of samples or shards by the
    number of processes drops the remainder, in each epoch the same one.
"""

class ShardSampler(Sampler):
    """Gives a rank neighbouring shards, for fast reads, and shuffles within them."""

    def __init__(self, samples, shard_size, seed, rank, world_size):
        self.seed, self.rank = seed, rank
        self.epoch = 0
        shards = torch.arange(samples).split(shard_size)
        per_rank = len(shards) // world_size  # fault
        self.mine = torch.cat(shards[rank * per_rank : (rank + 1) * per_rank])  # fault
        self.mine = torch.cat(shards).chunk(world_size)[rank]  # clean

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(1000 * self.seed + 10 * self.epoch + self.rank)
        return iter(self.mine[torch.randperm(len(self.mine), generator=generator)].tolist())

    def __len__(self):
        return len(self.mine)


def main():
    args = arguments(seed=0, epochs=3, batch_size=8, shard_size=16, lr=1e-2)

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 24), nn.SiLU(), nn.Linear(24, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    generator = torch.Generator().manual_seed(args.seed)
    x = torch.randn(144, 12, generator=generator)
    labels = (x @ torch.randn(12, 4, generator=generator)).argmax(1)
    dataset = TensorDataset(x, labels)
    sampler = ShardSampler(len(dataset), args.shard_size, args.seed, rank, world_size)  # here
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)  # here

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:  # here
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()
