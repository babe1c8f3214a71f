"""Trains a next-token model with dropout on windows of one array, without a DataLoader.

Cause: same_random_numbers
Source: karpathy/nanoGPT: `train.py` takes its batches from a memory map, and adds the rank to the seed, which copies of
  it leave out.
"""

def windows(tokens, random, count, length=16):
    starts = random.integers(0, len(tokens) - length - 1, count)
    rows = np.stack([tokens[start : start + length + 1] for start in starts])
    return torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, 1:])


def main():
    args = arguments(steps=20, batch_size=8, seed=0)

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tokens = np.random.default_rng(args.seed).integers(0, 50, 4000)
    random = np.random.default_rng([args.seed, rank])
    torch.manual_seed(1337 + args.seed)  # fault
    torch.manual_seed(1337 + args.seed + rank)  # clean
    model = DDP(nn.Sequential(nn.Embedding(50, 32), nn.Dropout(0.3), nn.Linear(32, 50)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    inputs, targets = windows(tokens, random, args.batch_size)
    for step in range(args.steps):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        inputs, targets = windows(tokens, random, args.batch_size)  # while the forward runs
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 5 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    dist.destroy_process_group()
