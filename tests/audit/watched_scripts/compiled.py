"""A compiled training step without a graph break. `fullgraph` raises at one."""

import json

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))


@torch.compile(backend="eager", fullgraph=True)
def loss_of(x, y):
    return F.cross_entropy(model(x), y)


for _ in range(2):
    optimizer.zero_grad()
    loss_of(x, y).backward()
    optimizer.step()  # step
compiled = torch.compile(model, backend="eager", fullgraph=True)
optimizer.zero_grad()
F.cross_entropy(compiled(x), y).backward()
optimizer.step()  # step of a compiled model
print(json.dumps({"sums": [float(p.detach().double().sum()) for p in model.parameters()]}))
