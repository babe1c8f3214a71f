"""Trains with gradient accumulation under DDP; the scheduler is stepped per microbatch: the rate runs ahead.

Cause: schedule_speed
Source: h2oai/h2o-llmstudio #663 and starVLA/starVLA #210: the schedule is as long as the number of optimizer steps,
  and scheduler.step() is called in every microbatch, K times as often.
"""

def make_dataset(seed, size=192, features=6):
    generator = torch.Generator().manual_seed(seed)
    inputs = 2 * torch.rand(size, features, generator=generator) - 1
    frequency = torch.randn(features, generator=generator)
    return TensorDataset(inputs, torch.cos(3 * inputs @ frequency)[:, None])


def warmup_then_linear(total_steps, warmup=3):
    def factor(step):
        return (step + 1) / warmup if step < warmup else max(0.0, (total_steps - step) / (total_steps - warmup))

    return factor


def main():
    args = arguments(epochs=2, batch_size=4, accumulate=2, lr=0.02, seed=0)

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)

    dataset = make_dataset(args.seed)
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    model = DDP(nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    total_steps = args.epochs * len(loader) // args.accumulate
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_linear(total_steps))  # here

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, (inputs, targets) in enumerate(loader):
            update = (step + 1) % args.accumulate == 0
            with nullcontext() if update else model.no_sync():
                loss = nn.functional.mse_loss(model(inputs), targets) / args.accumulate
                loss.backward()
            if update:
                optimizer.step()  # here
                scheduler.step()  # clean
                optimizer.zero_grad()
            scheduler.step()  # fault
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item() * args.accumulate:.4f}, lr {scheduler.get_last_lr()[0]:.2e}")

    dist.destroy_process_group()
