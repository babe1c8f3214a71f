"""Trains with gradient accumulation under DDP; an off-by-one keeps the last microbatch of each step in no_sync.

Cause: not_reduced
Source: modelscope/FunASR #3472: `batch_idx % accum_grad` synchronizes the first microbatch of a step instead of the
  last, so what the later ones add stays on its rank.
"""

def make_dataset(seed, size=240, frames=12, classes=5):
    """Short signals, each a noisy sine of one of a few frequencies."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(classes, (size,), generator=generator)
    time = torch.linspace(0, 3, frames)
    phase = torch.rand(size, 1, generator=generator)
    signals = torch.sin(time * (1.0 + targets[:, None]) + phase) + 0.1 * torch.randn(size, frames, generator=generator)
    return TensorDataset(signals, targets)


class Recognizer(nn.Module):
    def __init__(self, frames=12, hidden=32, classes=5):
        super().__init__()
        self.encoder = nn.Linear(frames, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.decoder = nn.Linear(hidden, classes)

    def forward(self, signals):
        return self.decoder(F.silu(self.norm(self.encoder(signals))))


def train_epoch(model, loader, optimizer, accum_grad):
    total = 0.0
    for batch_idx, (signals, targets) in enumerate(loader):
        my_context = model.no_sync if batch_idx % accum_grad != 0 else nullcontext  # fault
        my_context = model.no_sync if (batch_idx + 1) % accum_grad != 0 else nullcontext  # clean
        with my_context():  # here
            loss = F.cross_entropy(model(signals), targets)
            (loss / accum_grad).backward()  # here
        total += loss.item()
        if (batch_idx + 1) % accum_grad == 0:
            optimizer.step()
            optimizer.zero_grad()
    return total / len(loader)


def main():
    args = arguments(epochs=2, batch_size=4, accum_grad=2, lr=0.01, seed=0)

    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    dataset = make_dataset(args.seed)
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    model = DDP(Recognizer())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, loader, optimizer, args.accum_grad)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}")

    dist.destroy_process_group()
