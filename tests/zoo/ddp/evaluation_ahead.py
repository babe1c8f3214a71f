"""Trains a regression with dropout under DDP; the next batch is fetched before the backward, and rank 0 evaluates.

Cause: evaluation_in_train_mode
Source: karpathy/llama2.c: `train.py` fetches the next batch while the model computes. Without its `model.eval()`, the
  evaluation has dropout.
"""

def make_dataset(seed, size, features=8):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, features, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh())


def batches(dataset, args):
    sampler = DistributedSampler(dataset, seed=args.seed)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
        epoch += 1


@torch.no_grad()
def evaluate(model, dataset):
    model.eval()  # clean
    losses = [F.mse_loss(model(x), y).item() for x, y in DataLoader(dataset, batch_size=8)]  # here
    model.train()
    return sum(losses) / len(losses)


def main():
    args = arguments(steps=20, batch_size=8, seed=0)

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed + rank)
    held_out = make_dataset(args.seed + 10_000, 16)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    stream = batches(make_dataset(args.seed, 128), args)
    x, y = next(stream)
    for step in range(args.steps):
        if step % 4 == 0 and rank == 0:
            print(f"step {step}: validation loss {evaluate(model.module, held_out):.4f}")
        loss = F.mse_loss(model(x), y)
        x, y = next(stream)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()
