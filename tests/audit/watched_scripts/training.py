"""Steps of all kinds: each optimizer is one case."""

import json

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
ignored = torch.where(torch.arange(8) < 3, -100, y)
kept, optimizers = [], []


def made(kind=torch.optim.SGD, **options):
    model = nn.Linear(4, 3)
    kept.append(model)
    optimizers.append(kind(model.parameters(), lr=0.1, **options))
    return model, optimizers[-1]


def again(model, optimizer, clear):
    for _ in range(3):
        clear(model, optimizer)
        F.cross_entropy(model(x), y).backward()
        yield optimizer


model, optimizer = made()
for _ in range(2):
    loss = F.cross_entropy(model(x), ignored)  # accumulated
    (loss / 2).backward()  # divided
with torch.no_grad():
    F.cross_entropy(model(x), y)
optimizer.step()  # accumulation

model, optimizer = made()
mask = torch.arange(8) < 3
losses = F.cross_entropy(model(x), y, reduction="none")
((losses * mask).sum() / mask.sum()).backward()
optimizer.step()  # masked

model, optimizer = made()
total = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 4.0]), ignore_index=0)(model(x), y)
total = total + nn.MSELoss()(model(x), x[:, :3]) + F.l1_loss(model(x), x[:, :3], reduction="sum")
total.backward()
optimizer.step()  # several losses

model, optimizer = made(torch.optim.LBFGS)


def closure():
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss


optimizer.step(closure)  # LBFGS
model, optimizer = made()
optimizer.step(closure=closure)  # a closure

model, optimizer = made()
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for case in ("overflow", "scaled", "unscaled"):
    optimizer.zero_grad()
    scaler.scale(
        F.cross_entropy(model(x), y) * (float("inf") if case == "overflow" else 1.0)
    ).backward()
    if case == "unscaled":
        scaler.unscale_(optimizer)
    if case != "overflow":
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)  # clip of the scaler
    scaler.step(optimizer)  # scaler
    scaler.update()

model, optimizer = made()
F.cross_entropy(model(x), y).backward()
nn.utils.clip_grad_norm_(model.parameters(), 1e-3)  # clip
optimizer.step()  # clipped

for each in again(*made(), lambda model, optimizer: None):
    each.step()  # never cleared
for each in again(*made(), lambda model, optimizer: optimizer.zero_grad()):
    each.step()  # cleared
for each in again(*made(), lambda model, optimizer: optimizer.zero_grad(set_to_none=False)):
    each.step()  # zeroed
for each in again(
    *made(), lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()]
):
    each.step()  # None by hand
for each in again(
    *made(),
    lambda model, optimizer: [p.grad.zero_() for p in model.parameters() if p.grad is not None],
):
    each.step()  # zero by hand

for to_none in (True, False):
    (critic, critic_optimizer), (maker, maker_optimizer) = made(), made()
    for _ in range(2):
        critic_optimizer.zero_grad(set_to_none=to_none)
        F.cross_entropy(critic(x), y).backward()
        critic_optimizer.step()  # the critic
        maker_optimizer.zero_grad(set_to_none=to_none)
        F.cross_entropy(critic(F.pad(maker(x), (0, 1))), y).backward()
        maker_optimizer.step()  # the maker

model, optimizer = made()
checkpoint(model, x.clone().requires_grad_(), use_reentrant=True).sum().backward()  # reentrant
optimizer.step()  # checkpointed

model, optimizer = made()
torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
F.cross_entropy(model(x), y).backward()
optimizer.step()  # after autograd.grad

model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
optimizer.add_param_group({"params": [model[1].weight], "lr": 0.01})
F.cross_entropy(model(x), y).backward()
optimizer.step()  # one is left out

optimizers.clear()
for _ in range(3):
    model, optimizer = made()
    optimizers.clear()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()  # one after the other

failures = []


class Fails(torch.optim.SGD):
    def step(self, closure=None):
        failures.append("out of memory")
        if len(failures) == 1:
            raise RuntimeError(*failures)
        return super().step(closure)


model, optimizer = made(Fails)
F.cross_entropy(model(x), y).backward()
try:
    optimizer.step()
except RuntimeError:
    optimizer.step()  # after a failure
sums = [float(p.detach().double().sum()) for model in kept for p in model.parameters()]
print(json.dumps({"sums": sums, "random": torch.rand(1).item()}))
