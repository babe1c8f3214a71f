"""Trains a GRU tagger on ragged sequences: each rank averages over its own steps, and DDP averages the averages.

Cause: mean_of_means
Source: huggingface/transformers #34242: after token counts were summed over microbatches, the mean over ranks with
    unequal counts was still a mean of means.
"""

IGNORED = -100


class RaggedSignals(Dataset):
    """Signals of 3 to 30 steps; the label of a step says whether the running sum is above zero."""

    def __init__(self, count, features, seed):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, 31, (count,), generator=generator).tolist()
        self.signals = [torch.randn(length, features, generator=generator) for length in lengths]
        self.labels = [(each.cumsum(0)[:, 0] > 0).long() for each in self.signals]

    def __len__(self):
        return len(self.signals)

    def __getitem__(self, index):
        return self.signals[index], self.labels[index]


def pad(samples):
    signals, labels = zip(*samples, strict=True)
    return pad_sequence(signals, batch_first=True), pad_sequence(labels, batch_first=True, padding_value=IGNORED)


class Tagger(nn.Module):
    def __init__(self, features, width):
        super().__init__()
        self.gru = nn.GRU(features, width, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, signals):
        hidden, _ = self.gru(signals)
        return self.head(hidden)


def main():
    args = arguments(seed=0, epochs=3, batch_size=4, lr=1e-2)

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(Tagger(features=6, width=24))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    dataset = RaggedSignals(96, 6, args.seed)
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, collate_fn=pad)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for signals, labels in loader:
            logits = model(signals).flatten(0, 1)
            loss = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED)  # fault
            count = (labels != IGNORED).sum()  # clean
            dist.all_reduce(count)  # clean
            total = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")  # clean
            loss = total * world_size / count  # clean
            optimizer.zero_grad()
            loss.backward()  # here
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} of {world_size} ranks")
    dist.destroy_process_group()
