import os
import signal
import subprocess
import sys
from itertools import islice

import psutil
import pytest
import torch
from torch.utils.data import TensorDataset

from lockstep.data.loader import Loader, Span

DATA = TensorDataset(torch.arange(10))


def spans(count=6):
    return (Span(step=step, index=0, start=2 * step, stop=2 * step + 2) for step in range(count))


@pytest.fixture
def loader():
    loader = Loader(DATA, seed=0, workers=2, device=torch.device("cpu"))
    yield loader
    loader.close()


def children():
    return {process.pid for process in psutil.Process().children() if process.status() != psutil.STATUS_ZOMBIE}


def test_workers_start_with_the_first_fetch_serve_all_and_end_on_closing(loader):
    before = children()
    first = list(loader.fetch(spans()))
    workers = children() - before
    assert len(workers) == 2
    assert repr(list(loader.fetch(spans()))) == repr(first)
    assert children() - before == workers
    loader.close()
    assert children() == before
    loader.close()


def test_a_fetch_that_is_left_off_does_not_disturb_the_next(loader):
    whole = repr(list(loader.fetch(spans())))
    assert len(list(islice(loader.fetch(spans()), 2))) == 2
    assert repr(list(loader.fetch(spans()))) == whole


def test_closing_in_the_middle_of_a_fetch_ends_the_workers(loader):
    before = children()
    next(loader.fetch(spans()))
    assert len(children() - before) == 2
    loader.close()
    assert children() == before


def test_workers_do_not_outlive_a_training_process_that_is_killed(tmp_path):
    script = """
import os, psutil, signal, torch
from torch.utils.data import TensorDataset
from lockstep.data.loader import Loader, Span
loader = Loader(TensorDataset(torch.arange(10)), seed=0, workers=2, device=torch.device("cpu"))
fetched = loader.fetch(Span(step=i, index=0, start=i, stop=i + 1) for i in range(1000))
next(fetched)
print(*(process.pid for process in psutil.Process().children()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # a killed process leaves multiprocessing's folder behind
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment) as process:
        workers = [int(pid) for pid in process.stdout.readline().split()]
        assert process.wait() == -signal.SIGKILL
    assert len(workers) == 2
    alive = [psutil.Process(pid) for pid in workers if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(alive, timeout=3)
    assert alive == []
