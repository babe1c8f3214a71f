"""Four ranks: one fails as its argument says, while the others are where they are hard to stop."""

import itertools
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 2:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
dist.barrier()
if rank == 0:
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("boom")
if rank == 1:
    dist.all_reduce(torch.ones(3))  # in a collective with the rank that fails
if rank == 2:
    time.sleep(1000)  # deaf to SIGTERM
signal.signal(signal.SIGTERM, lambda *_: None)
sum(itertools.repeat(0))  # in C, where Python handles no signal
