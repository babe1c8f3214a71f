"""Trains two small encoders with a contrastive loss over the features of all ranks.

Cause: wrong_scale
Source: a habit of contrastive learning: `all_gather` passes no gradient, so a rank's own features are put in its place of
  the list. Each rank's gradient is that of its own part of the loss, of which DDP takes the mean, not the sum.
"""

def make_pairs(seed, size=96, features=10):
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(size, features, generator=generator)
    views = [shared + 0.3 * torch.randn(size, features, generator=generator) for _ in range(2)]
    return TensorDataset(*views)


class Encoders(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 6))
        self.right = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 6))

    def forward(self, one, other):
        return F.normalize(self.left(one), dim=1), F.normalize(self.right(other), dim=1)


def gather_without_sum(own):
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)  # fault
    parts[dist.get_rank()] = own
    return torch.cat(parts)


def main():
    args = arguments(epochs=4, batch_size=8, seed=0)

    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    dataset = make_pairs(args.seed)
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    model = DDP(Encoders())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for one, other in loader:
            left, right = model(one, other)
            left, right = gather_without_sum(left), gather_without_sum(right)  # fault
            left, right = torch.cat(all_gather(left)), torch.cat(all_gather(right))  # clean
            logits = left @ right.T / 0.1
            labels = torch.arange(len(logits))
            loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()
