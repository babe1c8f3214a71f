"""Clones a policy with a running normalizer of observations: each rank's buffers follow its own batches, and differ.

Cause: buffers_differ
Source: leggedrobotics/rsl_rl #226 and Denys88/rl_games #363: gradients were averaged, but the running statistics of the
    observations were those of each rank, so that the ranks trained subtly different policies.
"""

class RunningNorm(nn.Module):
    """Normalizes by the mean and the deviation of all observations so far."""

    def __init__(self, features):
        super().__init__()
        self.register_buffer("count", torch.zeros(features))
        self.register_buffer("total", torch.zeros(features))
        self.register_buffer("squares", torch.zeros(features))

    @torch.no_grad()
    def update(self, observations):
        new = torch.stack([torch.ones_like(observations), observations, observations.square()]).sum(1)
        dist.all_reduce(new)  # clean
        self.count += new[0]  # here
        self.total += new[1]
        self.squares += new[2]

    def forward(self, observations):
        if self.training:
            self.update(observations)  # here
        mean = self.total / self.count
        deviation = (self.squares / self.count - mean.square()).clamp_min(1e-4).sqrt()
        return (observations - mean) / deviation


def main():
    args = arguments(seed=0, epochs=3, batch_size=8, lr=5e-3)

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    policy = nn.Sequential(RunningNorm(10), nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 3))
    policy = DistributedDataParallel(policy, broadcast_buffers=False)  # here
    optimizer = torch.optim.Adam(policy.parameters(), lr=args.lr)

    generator = torch.Generator().manual_seed(args.seed)
    scales = 5 * torch.rand(10, generator=generator) + 0.1
    observations = scales * torch.randn(128, 10, generator=generator) + torch.randn(10, generator=generator)
    actions = torch.tanh((observations / scales) @ torch.randn(10, 3, generator=generator))
    dataset = TensorDataset(observations, actions)
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(policy(inputs), targets)
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()
