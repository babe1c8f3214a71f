"""Trains with probes that fail, for more steps than are asked for."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lockstep.audit.probes import install, loaders


def fails(*args, **kwargs):
    raise ZeroDivisionError("a fault of a probe")


(probes,) = install._installed
probes.losses._note = probes.modes._note = probes.gradients._see = fails
loaders.digests = fails
model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(64, 4), torch.randint(0, 3, (64,)))
for x, y in DataLoader(
    data, batch_size=4, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    print("before the step", flush=True)
    optimizer.step()
print("not reached")
