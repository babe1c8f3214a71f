"""Trains a next-token model on padded text under DDP; the loss is a sum over the tokens of all ranks' batches.

Cause: wrong_scale
Source: a habit of language model scripts that divide by the number of tokens of all ranks: each rank's loss is then its
  part of the mean, and DDP, which averages, divides by the ranks once more.
"""

def make_text(seed, size=96, length=12, vocabulary=40):
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, vocabulary, (size, length), generator=generator)
    lengths = torch.randint(3, length + 1, (size, 1), generator=generator)
    labels = text.roll(-1, 1).masked_fill(torch.arange(length) >= lengths, -100)
    return TensorDataset(text, labels)


def main():
    args = arguments(epochs=3, batch_size=8, seed=0)

    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    torch.manual_seed(args.seed)
    dataset = make_text(args.seed)
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
    model = DDP(nn.Sequential(nn.Embedding(40, 24), nn.GELU(), nn.Linear(24, 40)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for text, labels in loader:
            tokens = (labels != -100).sum()
            dist.all_reduce(tokens)
            total = F.cross_entropy(model(text).flatten(0, 1), labels.flatten(), reduction="sum")
            loss = total / tokens  # fault
            loss = total * world_size / tokens  # clean
            optimizer.zero_grad()
            loss.backward()  # here
            optimizer.step()  # here
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()
