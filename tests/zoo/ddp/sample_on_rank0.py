"""Trains a small convolutional autoencoder under DDP; rank 0 shows a reconstruction now and then.

Cause: collective_mismatch
Source: a habit of scripts that draw samples on rank 0: it alone calls the wrapped model, whose forward begins with a
  broadcast of BatchNorm's buffers. The next broadcast of the others is this one, and all collectives are shifted.
"""

def make_images(seed, size):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(6, (size,), generator=generator)
    images = 0.3 * torch.randn(size, 1, 6, 6, generator=generator)
    images[torch.arange(size), 0, rows] += 1.0
    return TensorDataset(images)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(1, 8, kernel_size=3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.decode = nn.Conv2d(8, 1, kernel_size=3, padding=1)

    def forward(self, x):
        return self.decode(self.encode(x))


def show(model, images):
    model.eval()
    error = F.mse_loss(model(images), images)  # here
    model.train()
    print(f"a reconstruction is off by {error.item():.4f}")


def main():
    args = arguments(epochs=2, batch_size=8, seed=0)

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    dataset = make_images(args.seed, 96)
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
    model = DDP(Autoencoder())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for number, (images,) in enumerate(loader):
            loss = F.mse_loss(model(images), images)  # here
            optimizer.zero_grad()
            loss.backward()  # here
            optimizer.step()
            if rank == 0 and number == 2:
                show(model, dataset.tensors[0][:4])  # fault
                show(model.module, dataset.tensors[0][:4])  # clean
    dist.barrier()
    dist.destroy_process_group()
