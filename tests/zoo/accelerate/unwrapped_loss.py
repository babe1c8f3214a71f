"""Trains an autoencoder with accelerate; each process trains a model of its own.

Cause: not_reduced
Source: huggingface/accelerate issue 3285 and kohya-ss/sd-scripts issue 924: a method of the model that the prepared
model does not have is called on the unwrapped one, whose backward pass reduces nothing
"""

from accelerate.utils import set_seed


class Autoencoder(nn.Module):
    def __init__(self, width: int = 24, code: int = 4) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, code))
        self.decoder = nn.Sequential(nn.Linear(code, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(rows))

    def reconstruction_loss(self, rows: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self(rows), rows)


def measurements(count: int, seed: int) -> TensorDataset:
    """Rows of 24 values that depend on 4 hidden ones."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, 4, generator=generator)
    mixing = torch.randn(4, 24, generator=generator)
    return TensorDataset(torch.tanh(hidden @ mixing) + 0.05 * torch.randn(count, 24, generator=generator))


def main() -> None:
    args = arguments(seed=0, epochs=4, batch_size=16, lr=3e-3)

    accelerator = Accelerator(cpu=True)
    set_seed(args.seed)
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    loader = DataLoader(measurements(192, args.seed), batch_size=args.batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(args.epochs):
        model.train()
        total = 0.0
        for (rows,) in loader:
            loss = accelerator.unwrap_model(model).reconstruction_loss(rows)  # fault
            loss = F.mse_loss(model(rows), rows)  # clean
            accelerator.backward(loss)  # here
            optimizer.step()  # here
            optimizer.zero_grad()
            total += loss.item()
        accelerator.print(f"epoch {epoch}: loss {total / len(loader):.4f}")
