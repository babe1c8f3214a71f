"""The script that every launcher starts: python contend.py CONTENDER ADDRESS TASK, with TASK as
JSON. See `conductor`."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path


def main() -> None:
    contender, address, task = sys.argv[1:]
    # Loaders and launchers start further processes, which import this file again or import what
    # they need by name.
    sys.path.insert(0, str(Path(__file__).resolve().parent / "contenders"))
    module = importlib.import_module(contender)

    import torch.distributed as dist
    from baton import Baton
    from workloads import Task, load

    work = load(Task(**json.loads(task)))
    module.train(work, Baton(address, work.accumulated))
    if dist.is_initialized():  # a process that ends with a process group may abort
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
