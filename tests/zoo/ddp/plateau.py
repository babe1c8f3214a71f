"""Trains under DDP with ReduceLROnPlateau; each rank steps the schedule with its own validation loss.

Cause: learning_rates_differ
Source: lucidrains/DALLE-pytorch #268 and rmchurch/disruptcnn #3: the scheduler is given the local loss, not the
  average, so the ranks lower their learning rates at different times, and the replicas drift apart.
"""

def make_dataset(seed, size, features=6):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, features, generator=generator)
    targets = inputs[:, :2].prod(dim=1, keepdim=True) + 0.5 * torch.randn(size, 1, generator=generator)
    return TensorDataset(inputs, targets)


@torch.no_grad()
def validate(model, loader):
    model.eval()
    total = torch.zeros(2)
    for inputs, targets in loader:
        total[0] += nn.functional.mse_loss(model(inputs), targets, reduction="sum")
        total[1] += len(targets)
    dist.all_reduce(total)  # clean
    model.train()
    return (total[0] / total[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=6)
    parser.add_argument("--validate-every", type=int, default=3, help="steps")
    parser.add_argument("--lr", type=float, default=0.15)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    train_set, validation_set = make_dataset(args.seed, 144), make_dataset(args.seed + 10_000, 12)
    sampler = DistributedSampler(train_set, seed=args.seed)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    part = Subset(validation_set, range(rank, len(validation_set), world_size))
    validation_loader = DataLoader(part, batch_size=args.batch_size)

    model = DDP(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, (inputs, targets) in enumerate(train_loader):
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  # here
            if (step + 1) % args.validate_every == 0:
                validation_loss = validate(model, validation_loader)  # here
                scheduler.step(validation_loss)  # here
        print(f"rank {rank}, epoch {epoch}: validation loss {validation_loss:.4f}, lr {optimizer.param_groups[0]['lr']:.4f}")

    dist.barrier()
    dist.destroy_process_group()
