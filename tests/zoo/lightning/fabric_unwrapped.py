"""Trains an embedding with Fabric: the triplet loss keeps the module from before setup, and DDP never reduces.

Cause: not_reduced
Source: Lightning-AI/pytorch-lightning #20293 and #17424: gradients that differ across the ranks with Fabric, and what
    bypasses the forward of the module that setup returned is not reduced by DDP, without an error.
"""

class TripletObjective:
    """Pulls an anchor to its positive, and away from its negative."""

    def __init__(self, encoder, margin):
        self.encoder = encoder
        self.margin = margin

    def __call__(self, anchor, positive, negative):
        embedded = self.encoder(torch.cat([anchor, positive, negative]))  # here
        first, second, third = F.normalize(embedded, dim=1).chunk(3)
        return F.triplet_margin_loss(first, second, third, margin=self.margin)


def triplets(count, seed):
    generator = torch.Generator().manual_seed(seed)
    anchor = torch.randn(count, 16, generator=generator)
    positive = anchor + 1.2 * torch.randn(count, 16, generator=generator)
    negative = torch.randn(count, 16, generator=generator)
    return TensorDataset(anchor, positive, negative)


def main():
    args = arguments(seed=0, epochs=3, batch_size=8, lr=3e-3, margin=1.2)

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(args.seed)

    loader = fabric.setup_dataloaders(DataLoader(triplets(128, args.seed), batch_size=args.batch_size, shuffle=True))
    encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.SGD(encoder.parameters(), lr=args.lr, momentum=0.9)
    objective = TripletObjective(encoder, args.margin)  # fault
    model, optimizer = fabric.setup(encoder, optimizer)
    objective = TripletObjective(model, args.margin)  # clean

    for epoch in range(args.epochs):
        for anchor, positive, negative in loader:
            optimizer.zero_grad()
            loss = objective(anchor, positive, negative)
            fabric.backward(loss)  # here
            optimizer.step()  # here
        fabric.print(f"epoch {epoch} loss {loss.item():.4f}")
