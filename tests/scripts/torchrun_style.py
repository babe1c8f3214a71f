"""A script written for torchrun, without lockstep: DDP, all_reduce, @record, a loader that spawns
workers.

It prints one JSON line per rank about its environment, and does not destroy its process group.
"""

import json
import os
import pickle
import sys

import psutil
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.tensor(float(index * index))


@record
def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    value = torch.ones(3) * (rank + 1)
    dist.all_reduce(value)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    model(torch.full((2, 4), float(rank))).sum().backward()
    squares = []
    if rank == 0:
        squares = [
            batch.tolist()
            for batch in DataLoader(
                Squares(), batch_size=3, num_workers=1, multiprocessing_context="spawn"
            )
        ]
    family = (psutil.Process(), psutil.Process().parent())
    listening = [
        c.laddr.ip
        for process in family
        for c in process.net_connections("inet")
        if c.status == psutil.CONN_LISTEN
    ]
    found = {
        "rank": rank,
        "size": size,
        "local_rank": int(os.environ["LOCAL_RANK"]),
        "sum": value.tolist(),
        "gradient": model.module.weight.grad.tolist(),
        "squares": squares,
        "pickled": type(pickle.loads(pickle.dumps(Squares()))) is Squares,
        "arguments": sys.argv[1:],
        "listening": listening,
        "plan": os.environ.get("LOCKSTEP_PLAN"),
        "run_dir": os.environ.get("LOCKSTEP_RUN_DIR"),
        "threads": torch.get_num_threads(),
    }
    # One write per line: two ranks print to one pipe.
    os.write(1, f"{json.dumps(found)}\n".encode())


if __name__ == "__main__":
    main()
