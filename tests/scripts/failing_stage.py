"""The forward of one pipeline stage fails, on the rank and at the call that the arguments give."""

import os
import sys

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls


class Fails(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if [os.environ["RANK"], str(self.calls)] == sys.argv[1:]:
            raise ValueError("boom")
        return super().forward(x)


recipe = ls.Recipe(
    model=lambda: nn.Sequential(Fails(4, 4), Fails(4, 4)),
    data=TensorDataset(torch.ones(64, 4)),
    inputs=lambda batch: batch[0],
    loss=lambda output, batch: output.square().mean(),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    global_batch=32,
    microbatch=4,
    steps=4,
)
ls.train(recipe)
