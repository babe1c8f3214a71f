"""Trains two small encoders with a contrastive loss over the features of all ranks.

Cause: wrong_scale
Source: a habit of contrastive learning: `all_gather` passes no gradient, so a rank's own features are put in its place of
  the list. Each rank's gradient is that of its own part of the loss, of which DDP takes the mean, not the sum.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_pairs(seed, size=96, features=10):
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(size, features, generator=generator)
    views = [shared + 0.3 * torch.randn(size, features, generator=generator) for _ in range(2)]
    return TensorDataset(*views)


class Encoders(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 6))
        self.right = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 6))

    def forward(self, one, other):
        return F.normalize(self.left(one), dim=1), F.normalize(self.right(other), dim=1)


def gather_without_sum(own):
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)  # fault
    parts[dist.get_rank()] = own
    return torch.cat(parts)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    dataset = make_pairs(args.seed)
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    model = DDP(Encoders())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for one, other in loader:
            left, right = model(one, other)
            left, right = gather_without_sum(left), gather_without_sum(right)  # fault
            left, right = torch.cat(all_gather(left)), torch.cat(all_gather(right))  # clean
            logits = left @ right.T / 0.1
            labels = torch.arange(len(logits))
            loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
