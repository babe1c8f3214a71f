"""Trains a regression with Fabric over 4 microbatches: the forward is outside no_backward_sync, so each is all-reduced.

Cause: reduced_every_microbatch
Source: lucidrains/alphafold3-pytorch #23 and huggingface/accelerate #1726: DDP decides in the forward whether to
    reduce, so a context around the backward alone changes nothing.
"""

def main():
    args = arguments(seed=0, epochs=2, batch_size=4, accumulate=4, lr=1e-2)

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(args.seed)

    generator = torch.Generator().manual_seed(args.seed)
    x = torch.randn(256, 16, generator=generator)
    y = torch.tanh(x @ torch.randn(16, 3, generator=generator))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, y), batch_size=args.batch_size, shuffle=True))

    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    model, optimizer = fabric.setup(model, optimizer)

    for epoch in range(args.epochs):
        for index, (inputs, targets) in enumerate(loader):
            accumulating = (index + 1) % args.accumulate != 0
            loss = F.mse_loss(model(inputs), targets) / args.accumulate  # fault
            with fabric.no_backward_sync(model, enabled=accumulating):  # here
                loss = F.mse_loss(model(inputs), targets) / args.accumulate  # clean
                fabric.backward(loss)  # here
            if not accumulating:
                optimizer.step()
                optimizer.zero_grad()
        mean = fabric.all_reduce(loss.detach() * args.accumulate, reduce_op="mean")
        fabric.print(f"epoch {epoch} loss {mean:.4f}")
