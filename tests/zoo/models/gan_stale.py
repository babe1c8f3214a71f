"""Trains a GAN with several critic steps per generator step: the critic's gradients are cleared only before the first.

Cause: stale_gradients
Source: ajbrock/BigGAN-PyTorch #25: the discriminator's zero_grad stood outside the loop over its steps, so the second
    step also took the gradient of the first.
"""

NOISE = 8


def ring(count, seed):
    """Points near a circle."""
    generator = torch.Generator().manual_seed(seed)
    angles = 6.2832 * torch.rand(count, generator=generator)
    return torch.stack([angles.cos(), angles.sin()], 1) + 0.05 * torch.randn(count, 2, generator=generator)


def main():
    args = arguments(seed=0, epochs=3, batch_size=8, critic_steps=2, lr=2e-3)

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    generator = DistributedDataParallel(nn.Sequential(nn.Linear(NOISE, 32), nn.ReLU(), nn.Linear(32, 2)))
    critic = DistributedDataParallel(nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)))
    generator_optimizer = torch.optim.SGD(generator.parameters(), lr=10 * args.lr)
    critic_optimizer = torch.optim.SGD(critic.parameters(), lr=10 * args.lr)
    torch.manual_seed(args.seed + rank)  # each rank draws its own noise

    dataset = TensorDataset(ring(128, args.seed))
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for index, (real,) in enumerate(loader):
            if index % args.critic_steps == 0:  # fault
                critic_optimizer.zero_grad()  # fault
            critic_optimizer.zero_grad()  # clean
            with torch.no_grad():
                fake = generator(torch.randn(len(real), NOISE))
            real_score, fake_score = critic(torch.cat([real, fake])).chunk(2)
            critic_loss = F.relu(1 - real_score).mean() + F.relu(1 + fake_score).mean()
            critic_loss.backward()  # here
            critic_optimizer.step()  # here

            if (index + 1) % args.critic_steps == 0:
                critic.requires_grad_(False)
                generator_optimizer.zero_grad()
                score = critic.module(generator(torch.randn(len(real), NOISE)))
                generator_loss = -score.mean()
                generator_loss.backward()
                generator_optimizer.step()
                critic.requires_grad_(True)
        if rank == 0:
            print(f"epoch {epoch} critic {critic_loss.item():.4f} generator {generator_loss.item():.4f}")
    dist.destroy_process_group()
