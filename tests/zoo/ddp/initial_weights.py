"""Trains with a hand-written all-reduce of the gradients; a seed per rank gives each rank other initial weights.

Cause: initial_values_differ
Source: facebookresearch/detr #544 (seed + rank before the model is built; DDP repairs it) without DDP, as in
  pytorch/torchtitan #166: W different models are trained with the same gradients, and the loss still goes down.
"""

def make_dataset(seed, size=96):
    """Two interleaved spirals."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(size) % 2
    angle = 3.0 * torch.rand(size, generator=generator)
    radius = 0.3 + angle / 2
    points = torch.stack([radius * torch.cos(angle + torch.pi * labels), radius * torch.sin(angle + torch.pi * labels)], dim=1)
    return TensorDataset(points + 0.05 * torch.randn(size, 2, generator=generator), labels)


def epoch_loader(dataset, args, epoch):
    """This rank's part of the epoch's permutation, which is the same on all ranks."""
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(1000 * args.seed + epoch)).tolist()
    return DataLoader(Subset(dataset, order[dist.get_rank() :: dist.get_world_size()]), batch_size=args.batch_size)


def reduce_gradients(model):
    world_size = dist.get_world_size()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(world_size)


def main():
    args = arguments(epochs=3, batch_size=8, lr=0.02, seed=0)

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed + rank)  # here
    model = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 2))  # here
    for tensor in model.state_dict().values():  # clean
        dist.broadcast(tensor, src=0)  # clean
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    dataset = make_dataset(args.seed)

    for epoch in range(args.epochs):
        for points, labels in epoch_loader(dataset, args, epoch):
            loss = F.cross_entropy(model(points), labels)
            optimizer.zero_grad()
            loss.backward()
            reduce_gradients(model)
            optimizer.step()
        print(f"rank {rank}, epoch {epoch}: loss {loss.item():.4f}")

    dist.barrier()
    dist.destroy_process_group()
