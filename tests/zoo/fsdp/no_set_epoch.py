"""Trains under FSDP2 for some epochs with a DistributedSampler whose epoch is never set: each has the same order.

Cause: same_order
Source: pytorch/pytorch #31771 and huggingface/transformers #4398: without sampler.set_epoch the sampler shuffles with
  the same seed in every epoch, so the same samples meet in the same batches each time.
"""

class Rings(Dataset):
    """Points in rings; the class is the ring."""

    def __init__(self, seed, size=96, classes=3, features=5):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(classes, (size,), generator=generator)
        direction = F.normalize(torch.randn(size, features, generator=generator), dim=1)
        self.points = direction * (1 + self.labels[:, None] + 0.2 * torch.randn(size, 1, generator=generator))

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"points": self.points[index], "labels": self.labels[index]}


def main():
    args = arguments(epochs=3, batch_size=8, lr=0.01, seed=0)

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(args.seed)

    dataset = Rings(args.seed)
    sampler = DistributedSampler(dataset, shuffle=True, seed=args.seed)  # here
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, drop_last=True)  # here

    model = nn.Sequential(nn.Linear(5, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 3))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):  # here
        sampler.set_epoch(epoch)  # clean
        for batch in loader:  # here
            loss = F.cross_entropy(model(batch["points"]), batch["labels"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")

    dist.destroy_process_group()
