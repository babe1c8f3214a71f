"""Trains a classifier on a stream with accelerate; two loader workers each read the whole stream.

Cause: samples_repeated
Source: huggingface/datasets issue 3423 and the warning in PyTorch's documentation of iterable datasets: the dataset
is copied into every worker of the loader, and accelerate splits it over processes, not over workers
"""

from accelerate.utils import set_seed


class Signals(IterableDataset):
    """A stream of noisy signals of two classes, in a new order each epoch."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(2, (count,), generator=generator)
        frequency = 0.3 + 0.3 * self.labels[:, None] + 0.05 * torch.randn(count, 1, generator=generator)
        self.signals = torch.sin(frequency * torch.arange(32)) + 0.3 * torch.randn(count, 32, generator=generator)
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()
        worker = get_worker_info()  # clean
        if worker is not None:  # clean
            order = order[worker.id :: worker.num_workers]  # clean
        for index in order:
            yield self.signals[index], self.labels[index]


def main() -> None:
    args = arguments(seed=0, epochs=2, batch_size=4, workers=2, lr=2e-3)

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    set_seed(args.seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loader = DataLoader(Signals(64, args.seed), batch_size=args.batch_size, num_workers=args.workers)  # here
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(args.epochs):
        model.train()
        steps = 0
        for signals, labels in loader:  # here
            loss = F.cross_entropy(model(signals), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f} after {steps} steps")
