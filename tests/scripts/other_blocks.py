"""A training whose ranks call different blocks in the second step: `other_blocks.py WIDTH RUN_DIR`.

WIDTH: of the hidden layer of the second block. The other blocks have 8.
"""

import os
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls

WIDTHS = 8, int(sys.argv[1]), 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.forwards = nn.Linear(4, 8), 0
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8)) for width in WIDTHS
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.forwards += torch.is_grad_enabled()
        calls_twice = self.forwards > 2 and os.environ["RANK"] == "1"
        for number in [0, 0, 1, 2] if calls_twice else [0, 1, 2]:
            x = torch.tanh(self.blocks[number](x))
        return x.mean(1)


def loss(output: torch.Tensor, batch: list[torch.Tensor]) -> torch.Tensor:
    return output.square().mean()


if __name__ == "__main__":
    ls.train(
        ls.Recipe(
            model=Model,
            data=TensorDataset(torch.linspace(-1, 1, 128).view(32, 4)),
            inputs=lambda batch: batch[0],
            loss=loss,
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            global_batch=8,
            microbatch=2,
            steps=4,
            blocks=["blocks.*"],
        ),
        run_dir=sys.argv[2],
    )
