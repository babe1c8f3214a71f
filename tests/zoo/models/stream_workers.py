"""Trains on a stream with two loader workers: each worker reads the whole part of its rank, so samples come twice.

Cause: samples_repeated
Source: huggingface/datasets #3423: with more than one worker each holds a copy of an IterableDataset, and an __iter__
    that does not ask get_worker_info yields all samples from each of them.
"""

class SensorStream(IterableDataset):
    """The part of the readings that belongs to a rank, in another order in each epoch."""

    def __init__(self, readings, targets, seed, rank, world_size):
        self.readings, self.targets = readings, targets
        self.seed = seed
        self.rank, self.world_size = rank, world_size
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(1000 * self.seed + self.epoch)
        order = torch.randperm(len(self.readings), generator=generator)
        mine = order[self.rank :: self.world_size]  # here
        worker = get_worker_info()  # clean
        mine = mine[worker.id :: worker.num_workers]  # clean
        for index in mine.tolist():
            yield self.readings[index], self.targets[index]


def main():
    args = arguments(seed=0, epochs=2, batch_size=8, workers=2, lr=5e-3)

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(14, 32), nn.Tanh(), nn.Linear(32, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    generator = torch.Generator().manual_seed(args.seed)
    readings = torch.randn(128, 14, generator=generator)
    targets = torch.tanh(readings @ torch.randn(14, 2, generator=generator))
    stream = SensorStream(readings, targets, args.seed, rank, world_size)
    loader = DataLoader(stream, batch_size=args.batch_size, num_workers=args.workers)  # here

    for epoch in range(args.epochs):
        stream.set_epoch(epoch)
        for inputs, outputs in loader:  # here
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), outputs)
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()
