"""Trains an LSTM on time series with accelerate; the first microbatches of a step are clipped alone, on each process.

Cause: local_clipping
Source: huggingface/accelerate issue 641 and huggingface/diffusers pull request 721: clip_grad_norm_ without
`if accelerator.sync_gradients` also clips the sums of microbatches that are not reduced yet
"""

from accelerate.utils import set_seed


class Forecaster(nn.Module):
    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(series)[0][:, -1])


def waves(count: int, seed: int) -> TensorDataset:
    """Noisy waves of unequal frequencies and heights; the target is the next value."""
    generator = torch.Generator().manual_seed(seed)
    frequency = 0.2 + torch.rand(count, 1, generator=generator)
    height = 0.5 + 4 * torch.rand(count, 1, generator=generator)
    values = height * torch.sin(frequency * torch.arange(25)) + 0.1 * torch.randn(count, 25, generator=generator)
    return TensorDataset(values[:, :-1, None], values[:, -1:])


def main() -> None:
    args = arguments(seed=0, epochs=4, batch_size=4, accumulate=4, max_norm=0.25, lr=0.1)

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.accumulate)
    set_seed(args.seed)
    model = Forecaster()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    loader = DataLoader(waves(128, args.seed), batch_size=args.batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    criterion = nn.MSELoss()

    for epoch in range(args.epochs):
        model.train()
        total = 0.0
        for series, targets in loader:
            with accelerator.accumulate(model):
                loss = criterion(model(series), targets)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), args.max_norm)  # fault
                if accelerator.sync_gradients:  # clean
                    accelerator.clip_grad_norm_(model.parameters(), args.max_norm)  # clean
                optimizer.step()
                optimizer.zero_grad()
                total += loss.item()
        accelerator.print(f"epoch {epoch}: loss {total / len(loader):.4f}")
