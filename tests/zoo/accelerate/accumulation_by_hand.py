"""Trains an MLP on tables with accelerate; each microbatch waits for all processes, so accumulation saves nothing.

Cause: reduced_every_microbatch
Source: the habit of accumulating by a counter, which is right on one process; accelerate's guide on gradient
synchronization (see also huggingface/accelerate pull request 1708) says that it reduces in every backward pass
"""

from accelerate.utils import set_seed


def houses(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, 12, generator=generator)
    weights = torch.randn(12, 1, generator=generator)
    prices = torch.tanh(features @ weights) + 0.1 * torch.randn(count, 1, generator=generator)
    return TensorDataset(features, prices)


def main() -> None:
    args = arguments(seed=0, epochs=4, batch_size=8, accumulate=4, lr=0.05)

    accelerator = Accelerator(cpu=True)
    set_seed(args.seed)
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    loader = DataLoader(houses(256, args.seed), batch_size=args.batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    criterion = nn.MSELoss()

    for epoch in range(args.epochs):
        model.train()
        total = 0.0
        for index, (features, prices) in enumerate(loader):
            last = (index + 1) % args.accumulate == 0
            loss = criterion(model(features), prices) / args.accumulate  # fault
            accelerator.backward(loss)  # fault
            with nullcontext() if last else accelerator.no_sync(model):  # clean
                loss = criterion(model(features), prices) / args.accumulate  # clean
                accelerator.backward(loss)  # clean
            total += loss.item()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {total * args.accumulate / len(loader):.4f}")
