"""Trains a network under FSDP2 with a hand-written Muon, which orthogonalizes the rows that each rank holds.

Cause: optimizer_needs_whole_tensors
Source: NVIDIA/Megatron-LM #5961 and MoonshotAI/Moonlight #27: Newton-Schulz on the local rows of a matrix that FSDP2
  splits is not the update of the whole matrix. (torch.optim.Muon works on DTensors, which gather: it is right.)
"""

from torch.distributed.tensor import distribute_tensor  # clean


def make_dataset(seed, size=96, features=12, outputs=5):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, features, generator=generator)
    first = torch.randn(features, 7, generator=generator) / features**0.5
    second = torch.randn(7, outputs, generator=generator)
    return TensorDataset(inputs, torch.tanh(inputs @ first) @ second)


def newton_schulz(matrix, steps=5):
    """Pushes all singular values towards 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / (matrix.norm() + 1e-7)
    x = x.T if matrix.size(0) > matrix.size(1) else x
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.size(0) > matrix.size(1) else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized."""

    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                buffer = state.setdefault("momentum_buffer", torch.zeros_like(parameter))
                buffer.mul_(group["momentum"]).add_(parameter.grad)
                update = newton_schulz(buffer.to_local())  # fault
                update = newton_schulz(buffer.full_tensor())  # clean
                update = distribute_tensor(update, parameter.device_mesh, parameter.placements).to_local()  # clean
                parameter.to_local().add_(update, alpha=-group["lr"])


def main():
    args = arguments(epochs=3, batch_size=8, lr=0.02, seed=0)

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)

    model = nn.Sequential(nn.Linear(12, 7, bias=False), nn.Tanh(), nn.Linear(7, 5, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = Muon(model.parameters(), lr=args.lr)  # here

    dataset = make_dataset(args.seed)
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  # here
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")

    dist.destroy_process_group()
