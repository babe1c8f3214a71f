"""Trains a classifier with dropout under DDP; one seed on all ranks gives all of them the same dropout masks.

Cause: same_random_numbers
Source: huggingface/transformers #31412: set_seed with one number on every process, and the same units are dropped on
  all devices, which a run on one device with the whole batch would not do.
"""

def make_dataset(seed, size=120, features=12, classes=3):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (size,), generator=generator)
    centers = 1.5 * torch.randn(classes, features, generator=generator)
    return TensorDataset(centers[labels] + torch.randn(size, features, generator=generator), labels)


def build_model(features=12, hidden=48, classes=3, dropout=0.3):
    return nn.Sequential(
        nn.Linear(features, hidden),
        nn.ReLU(),
        nn.Dropout(dropout),  # here
        nn.Linear(hidden, classes),
    )


def main():
    args = arguments(epochs=2, batch_size=5, lr=0.01, seed=0)

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)  # here

    dataset = make_dataset(args.seed)
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    model = DDP(build_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    torch.manual_seed(args.seed + rank)  # clean
    model.train()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            logits = model(inputs)  # here
            loss = F.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")

    dist.destroy_process_group()
