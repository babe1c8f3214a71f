"""Trains on signals with random jitter: worker_init_fn seeds NumPy with a constant, all workers draw the same jitter.

Cause: same_augmentation
Source: pytorch/pytorch #5059 and fairseq #1383: NumPy's random state is the same in each worker of a DataLoader; and
    the habit of a worker_init_fn that sets a fixed seed to be reproducible.
"""

class JitteredSignals(Dataset):
    """Noisy sine waves; each access scales, shifts and jitters a wave anew."""

    def __init__(self, count, length, seed):
        generator = np.random.default_rng(seed)
        self.labels = generator.integers(0, 3, count)
        phases = generator.uniform(0, 2 * np.pi, (count, 1))
        times = np.linspace(0, 1, length)
        self.signals = np.sin(2 * np.pi * (self.labels[:, None] + 1) * times + phases)
        self.signals += 0.3 * generator.standard_normal((count, length))

    def __len__(self):
        return len(self.signals)

    def __getitem__(self, index):
        signal = self.signals[index]
        signal = signal * np.random.uniform(0.7, 1.3) + np.random.uniform(-0.2, 0.2)  # here
        signal = signal + np.random.normal(0.0, 0.2, signal.shape)
        return torch.from_numpy(signal).float(), int(self.labels[index])


def seed_worker(worker):
    np.random.seed(0)  # fault
    np.random.seed(torch.initial_seed() % 2**32)  # clean


def main():
    args = arguments(seed=0, epochs=3, batch_size=8, workers=2, lr=5e-3)

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    dataset = JitteredSignals(128, 32, args.seed)
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(  # here
        dataset,
        batch_size=args.batch_size,
        sampler=sampler,
        num_workers=args.workers,
        persistent_workers=True,
        worker_init_fn=seed_worker,  # here
        generator=torch.Generator().manual_seed(args.seed + rank),
    )
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for signals, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(signals), labels)
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()
