"""Trains a small convolutional network under DDP; each rank validates with its own BatchNorm statistics.

Cause: buffers_differ
Source: facebookresearch/maskrcnn-benchmark #692 and open-mmlab/mmdetection #2539: `broadcast_buffers=False` is copied
  from a model with frozen BatchNorm to one that trains it, and the saved model is not the one that was validated.
"""

def make_images(seed, size, noise=1.2):
    """Images with a bright row or column: the class is where it is."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (size,), generator=generator)
    images = noise * torch.randn(size, 1, 6, 6, generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        row = 1 + 3 * (label // 2)
        (image[0] if label % 2 else image[0].T)[row] += 2.0
    return TensorDataset(images, labels)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, kernel_size=3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 8, kernel_size=3, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8 * 4 * 4, 4)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(x.flatten(1))


@torch.no_grad()
def validate(model, loader):
    model.eval()
    sums = torch.zeros(2)
    for images, labels in loader:
        logits = model(images)  # here
        sums += torch.tensor([F.cross_entropy(logits, labels, reduction="sum").item(), len(labels)])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main():
    args = arguments(epochs=3, batch_size=8, lr=0.05, seed=0)

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    train_set, validation_set = make_images(args.seed, 96), make_images(args.seed + 10_000, 48)
    sampler = DistributedSampler(train_set, seed=args.seed)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    part = Subset(validation_set, range(rank, len(validation_set), world_size))
    validation_loader = DataLoader(part, batch_size=args.batch_size)

    model = DDP(ConvNet(), broadcast_buffers=False)  # fault
    model = DDP(ConvNet())  # clean
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in train_loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        validation_loss = validate(model, validation_loader)  # here
        if rank == 0:
            print(f"epoch {epoch}: validation loss {validation_loss:.4f}")

    if rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            torch.save(model.module.state_dict(), Path(folder) / "model.pt")
    dist.barrier()
    dist.destroy_process_group()
