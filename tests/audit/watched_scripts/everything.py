"""A process group of one process, schedules, seeds, saves, modes, TorchScript, and a script that
replaces functions."""

import io
import json
import os
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.optim.swa_utils import update_bn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

folder = os.environ["FOLDER"]


def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
torch.manual_seed(7)  # seed
# wrapped
model = DistributedDataParallel(
    nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)  # made
x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
warnings.simplefilter("ignore")

# Collectives

dist.all_reduce(torch.ones(2, 3), op=dist.ReduceOp.MAX)  # all_reduce
dist.all_gather_object([None], "an object")  # object
dist.barrier(group=dist.new_group([0]))  # barrier

# Training

schedules = [
    lr_scheduler.LinearLR(optimizer, total_iters=2),
    lr_scheduler.CosineAnnealingLR(optimizer, T_max=9),
]
schedule = lr_scheduler.SequentialLR(optimizer, schedules, milestones=[2])
plateau = lr_scheduler.ReduceLROnPlateau(optimizer)


class Own(lr_scheduler.LambdaLR):
    def step(self, *args):
        return super().step(*args)  # own schedule's step


own = Own(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0), lambda step: 1.0)
for number in range(3):
    if number == 2:
        torch.manual_seed(8)  # seed again
    if number == 1:
        with model.no_sync():
            F.cross_entropy(model(x), y).backward()
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()  # backward
    optimizer.step()  # step
    schedule.step()  # schedule
plateau.step(1.0)  # plateau
own.step()

# Modes

model.eval()
with torch.no_grad():
    model(x)  # evaluation
F.cross_entropy(model(x), y).backward()  # backward in eval mode
ones = torch.ones(8, 8)
defaults = [
    name
    for name in ("dropout", "alpha_dropout", "feature_alpha_dropout")
    if not torch.equal(getattr(F, name)(ones), ones)
]
F.dropout(ones, 0.0)
frozen, prompt = (
    nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval().requires_grad_(False),
    torch.zeros(4, requires_grad=True),
)
frozen(x + prompt).sum().backward()  # backward through a frozen model
batches = DataLoader(TensorDataset(x), batch_size=4)
norm = nn.Sequential(nn.BatchNorm1d(4))
update_bn(DataLoader(TensorDataset(x), batch_size=8), norm)  # update_bn
twin = DataLoader(TensorDataset(x), batch_size=4)
for (one,), (two,) in zip(batches, twin, strict=True):
    model(torch.cat([one, two])).sum().backward()  # backward of two loaders
for (one,) in batches:
    with torch.no_grad():
        list(DataLoader(TensorDataset(x), batch_size=2))
    model(one).sum().backward()  # backward after an evaluation

# The next batch before the backward

dropped = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
stream = iter(batches)
(one,) = next(stream)
with torch.no_grad():
    list(DataLoader(TensorDataset(x), batch_size=2))
output = dropped(one)  # forward ahead
(one,) = next(stream)
output.sum().backward()  # backward of the batch before
checkpoint(dropped, one, use_reentrant=False).sum().backward()  # recomputed
dropped[0](one).sum().backward()  # draws nothing
torch.rand(1)
dropped[0](one).sum().backward()  # after a draw
for mode in (True, False):
    given = one.clone().requires_grad_()
    checkpoint(dropped.train(mode), given, use_reentrant=True).sum().backward()  # reentrant

# Files

torch.save({"model": model.state_dict(), "step": 3}, f"{folder}/a.pt")  # save
with open(f"{folder}/b.pt", "wb") as file:
    torch.save([1], f=file)  # save to a file
torch.save([1], io.BytesIO())
torch.load(f"{folder}/a.pt")  # load

# TorchScript

errors = []
try:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)))
    scripted(x)

    @torch.jit.script
    class Doubles:
        def __init__(self, x: torch.Tensor):
            self.doubled = twice(x)

except Exception as error:
    errors.append(f"{type(error).__name__}: {error}"[-300:])

# Replacements

original, calls = torch.save, []


def save(*args, **kwargs):
    calls.append("save")
    return original(*args, **kwargs)


torch.save = torch.serialization.save = save
torch.save([1], f"{folder}/c.pt")  # save replaced
original_step = torch.optim.SGD.step
torch.optim.SGD.step = lambda self, closure=None: (
    calls.append("step") or original_step(self, closure)
)
small = nn.Linear(4, 3)
other = torch.optim.SGD(small.parameters(), lr=1.0)
F.cross_entropy(small(x), y).backward()
other.step()  # step replaced
original_loss = F.cross_entropy
F.cross_entropy = lambda *args, **kwargs: calls.append("loss") or original_loss(*args, **kwargs)
F.cross_entropy(small(x), y).backward()  # loss replaced
sums = [float(p.detach().double().sum()) for p in model.parameters()]
dist.destroy_process_group()
found = {
    "defaults": defaults,
    "errors": errors,
    "calls": calls,
    "sums": sums,
}
print(json.dumps(found | {"random": torch.rand(1).item()}))
