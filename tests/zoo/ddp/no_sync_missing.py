"""Trains with gradient accumulation under DDP and synchronizes the gradients in every microbatch: right, but slow.

Cause: reduced_every_microbatch
Source: huggingface/accelerate #106 and pytorch/pytorch #43201: examples accumulate without no_sync, which reduces K
  times as often as needed. The loop is in the style of small GPT trainers, which set `require_backward_grad_sync`.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


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
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-iters", type=int, default=18)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--gradient-accumulation-steps", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

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


if __name__ == "__main__":
    main()
