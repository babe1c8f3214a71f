"""Trains a mixture of experts. Arguments: the rank that is killed, once, while it sends tokens to
the experts of other ranks in step 3, or `none`."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.comm.world import World
from lockstep.training.run import Run

WIDTH, EXPERTS = 8, 4
KILLED = Path("killed")


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        rows = torch.einsum("sd,skdh->skh", tokens, self.up[index]).tanh()
        return (rows * weights[..., None]).sum(1)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()
        self.head = nn.Linear(WIDTH, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(2)
        return self.head(x + self.experts(x, index, weights))


class Kill(ls.Hook):
    """Kills the process in the second all-to-all of its step: other ranks wait for its tokens."""

    def __init__(self, rank: str) -> None:
        self.rank, self.calls = rank, 0

    def before_step(self, run: Run) -> None:
        self.calls = 0
        is_time = run.step == 2 and str(run.context.world.rank) == self.rank
        if is_time and not KILLED.exists():
            original = World.all_to_all

            def killed(*given: Any) -> Tensor:
                self.calls += 1
                if self.calls == 2:
                    KILLED.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*given)

            World.all_to_all = killed  # type: ignore[method-assign]


def main() -> None:
    x = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ls.train(
        ls.Recipe(
            model=Mixture,
            data=TensorDataset(x, x.sum(1, keepdim=True)),
            loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
            global_batch=8,
            microbatch=4,
            steps=5,
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
            clip_norm=1.0,
        ),
        saving=ls.Saving(every=1),
        hooks=[Kill(sys.argv[1])],
    )


if __name__ == "__main__":
    main()
