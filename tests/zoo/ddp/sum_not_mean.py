"""Trains a regression with a hand-written all-reduce of the gradients that sums and never divides by the world size.

Cause: wrong_scale
Source: tensorflow/benchmarks #466 and srush/LLM-Training-Puzzles #9: gradients are added up over the ranks, and
  nobody divides, so the step is W times too large. The frame is that of the tutorials that spawn processes and
  average by hand.
Launch: python
"""

def make_dataset(seed, size=96, features=8):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, features, generator=generator)
    teacher = torch.randn(features, 1, generator=generator)
    return TensorDataset(inputs, torch.tanh(inputs @ teacher) + 0.1 * torch.randn(size, 1, generator=generator))


def average_gradients(model):
    """Makes the gradients of all ranks the same."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)  # here
        parameter.grad /= dist.get_world_size()  # clean


def train(rank, world_size, port, args):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(args.seed)

    dataset = make_dataset(args.seed)
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    criterion = nn.MSELoss()

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            loss.backward()
            average_gradients(model)  # here
            optimizer.step()  # here
        print(f"rank {rank}, epoch {epoch}: loss {loss.item():.4f}")

    dist.barrier()
    dist.destroy_process_group()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def main():
    parser = argparse.ArgumentParser(description="synchronous SGD by hand")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    mp.spawn(train, args=(args.processes, free_port(), args), nprocs=args.processes, join=True)
