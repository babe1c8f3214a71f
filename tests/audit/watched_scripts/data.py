"""Loaders of all kinds."""

import json

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.arange(20.0).view(10, 2), torch.arange(10))


class Noisy(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index + np.random.rand()


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.arange(6.0)


def texts(samples):
    return [str(each) for each in samples]


shuffled = DataLoader(data, batch_size=4, shuffle=True)  # shuffled
seen = [[batch[1].tolist() for batch in shuffled] for _ in range(2)]  # the loop
part = DataLoader(Subset(data, [9, 3, 5]), batch_size=2)  # subset
seen.append([batch[1].tolist() for batch in part])
noisy = DataLoader(Noisy(), batch_size=2, num_workers=2, multiprocessing_context="fork")  # noisy
for _ in range(2):
    list(noisy)
stream = DataLoader(Stream(), batch_size=4)  # stream
list(stream)
for _ in DataLoader(data, batch_size=4):  # left
    break
seen.append([int(each[1]) for each in DataLoader(data, batch_size=None)])  # unbatched
# workers
workers = DataLoader(
    data,
    batch_size=3,
    shuffle=True,
    num_workers=2,
    persistent_workers=True,
    multiprocessing_context="fork",
)
seen += [[batch[1].tolist() for batch in workers] for _ in range(2)]
list(DataLoader(data, batch_size=4, collate_fn=texts))  # texts
for _ in range(3):
    fresh = DataLoader(data, batch_size=5, shuffle=True)  # made in a loop
    list(fresh)
one, other = iter(shuffled), iter(DataLoader(data, batch_size=5))  # interleaved
seen.append([next(each)[1].tolist() for each in (one, other, one, other)])
library = {}
exec(
    compile(
        "def remade(loader): return type(loader)(loader.dataset, batch_size=loader.batch_size)",
        "<library>",
        "exec",
    ),
    library,
)
inner = DataLoader(data, batch_size=2)  # remade by a library
remade = library["remade"](inner)
list(remade)
print(json.dumps({"seen": seen, "random": torch.rand(1).item()}))
