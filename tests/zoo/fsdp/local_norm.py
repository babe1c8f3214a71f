"""Trains under FSDP2 and clips with a hand-written norm, which each rank takes of its own shards.

Cause: local_clipping
Source: pytorch/pytorch #72548 and pytorch/torchtitan #766: under sharding a rank has a part of each gradient, so a
  norm that is not summed over the ranks is too small, and every rank clips by another factor.
"""

def make_dataset(seed, size=96, features=9, classes=4):
    generator = torch.Generator().manual_seed(seed)
    inputs = 2.0 * torch.randn(size, features, generator=generator)
    teacher = torch.randn(features, classes, generator=generator)
    return TensorDataset(inputs, (inputs @ teacher).argmax(dim=1))


@torch.no_grad()
def clip_gradients(model, max_norm):
    """Scales the gradients so that their norm is at most max_norm. Returns what it was."""
    gradients = [parameter.grad.to_local() for parameter in model.parameters()]
    square = torch.stack([gradient.square().sum() for gradient in gradients]).sum()  # here
    dist.all_reduce(square)  # clean
    norm = square.sqrt()
    for gradient in gradients:
        gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))  # here
    return norm


def main():
    args = arguments(epochs=3, batch_size=8, lr=0.1, max_norm=0.3, seed=0)

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(args.seed)

    model = nn.Sequential(nn.Linear(9, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 4))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    dataset = make_dataset(args.seed)
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            grad_norm = clip_gradients(model, args.max_norm)  # here
            optimizer.step()
        print(f"rank {rank}, epoch {epoch}: loss {loss.item():.4f}, gradient norm {grad_norm.item():.4f}")

    dist.barrier()
    dist.destroy_process_group()
