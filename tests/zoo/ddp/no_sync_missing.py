"""Trains with gradient accumulation under DDP and synchronizes the gradients in every microbatch: right, but slow.

Cause: reduced_every_microbatch
Source: huggingface/accelerate #106 and pytorch/pytorch #43201: examples accumulate without no_sync, which reduces K
  times as often as needed. The loop is in the style of small GPT trainers, which set `require_backward_grad_sync`.
"""

def make_dataset(seed, size=192, features=12):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, features, generator=generator)
    weight = torch.randn(features, 2, generator=generator) / features**0.5
    return TensorDataset(inputs, torch.sin(inputs @ weight))


def batches(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main():
    args = arguments(max_iters=18, batch_size=4, gradient_accumulation_steps=4, learning_rate=0.01, seed=0)

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)

    dataset = make_dataset(args.seed)
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    stream = batches(loader, sampler)

    model = DDP(nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    criterion = nn.MSELoss()

    for iter_num in range(args.max_iters):
        for micro_step in range(args.gradient_accumulation_steps):  # here
            inputs, targets = next(stream)
            model.require_backward_grad_sync = micro_step == args.gradient_accumulation_steps - 1  # clean
            loss = criterion(model(inputs), targets) / args.gradient_accumulation_steps  # here
            loss.backward()  # here
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if rank == 0 and iter_num % 4 == 0:
            print(f"iter {iter_num}: loss {loss.item() * args.gradient_accumulation_steps:.4f}")

    dist.destroy_process_group()
