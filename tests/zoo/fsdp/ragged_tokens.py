"""Trains a tagger on sequences of many lengths under FSDP2, with accumulation; the token loss is a mean of means.

Cause: mean_of_means
Source: huggingface/transformers #34242 and verl-project/verl #5625: each microbatch of each rank divides by its own
  number of tokens, so a token of a short sequence weighs more than one of a long sequence.
"""

IGNORE = -100


class Sequences(Dataset):
    """Sequences of 2 to 16 vectors; a tag says whether the running sum of a projection goes up."""

    def __init__(self, seed, size=120, features=6):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, 17, (size,), generator=generator).tolist()
        projection = torch.randn(features, generator=generator)
        self.frames = [torch.randn(length, features, generator=generator) for length in lengths]
        self.tags = [(frames @ projection > 0).long() for frames in self.frames]

    def __len__(self):
        return len(self.frames)

    def __getitem__(self, index):
        return self.frames[index], self.tags[index]


def collate(samples):
    frames, tags = zip(*samples, strict=True)
    return pad_sequence(frames, batch_first=True), pad_sequence(tags, batch_first=True, padding_value=IGNORE)


class Tagger(nn.Module):
    def __init__(self, features=6, hidden=16, tags=2):
        super().__init__()
        self.rnn = nn.GRU(features, hidden, batch_first=True)
        self.out = nn.Linear(hidden, tags)

    def forward(self, frames):
        return self.out(self.rnn(frames)[0])


def main():
    args = arguments(epochs=2, batch_size=2, accumulate=2, lr=0.01, seed=0)

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    dataset = Sequences(args.seed)
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, collate_fn=collate, drop_last=True)

    model = Tagger()
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        stream = iter(loader)
        for _ in range(len(loader) // args.accumulate):
            microbatches = [next(stream) for _ in range(args.accumulate)]
            tokens = torch.stack([(tags != IGNORE).sum() for _, tags in microbatches]).sum()  # clean
            dist.all_reduce(tokens)  # clean
            for index, (frames, tags) in enumerate(microbatches):
                model.set_requires_gradient_sync(index == args.accumulate - 1)
                logits = model(frames)  # here
                loss = F.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=IGNORE) / args.accumulate  # fault
                loss = F.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=IGNORE, reduction="sum")  # clean
                loss = loss * world_size / tokens  # clean
                loss.backward()  # here
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            print(f"epoch {epoch}: loss of the last microbatch {loss.item():.4f}")

    dist.barrier()
    dist.destroy_process_group()
