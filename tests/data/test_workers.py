import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from itertools import islice

import psutil
import pytest
import torch
from torch.utils.data import TensorDataset

from lockstep.base import processes
from lockstep.base.errors import LaunchError
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
    return {
        process.pid
        for process in psutil.Process().children()
        if process.status() != psutil.STATUS_ZOMBIE
    }


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


@pytest.mark.parametrize(("workers", "prefetch"), [(1, 1), (2, 2), (2, 5)])
def test_each_worker_makes_so_many_microbatches_ahead(monkeypatch, workers, prefetch):
    asked = []
    all_requests = Loader._requests
    monkeypatch.setattr(
        Loader,
        "_requests",
        lambda self, spans: (asked.append(each) or each for each in all_requests(self, spans)),
    )
    loader = Loader(DATA, seed=0, workers=workers, prefetch=prefetch, device=torch.device("cpu"))
    fetched = loader.fetch(spans(30))
    for taken in range(1, 4):
        next(fetched)
        assert len(asked) == taken + workers * prefetch
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


def test_workers_that_are_killed_leave_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = children()
    killed = Loader(DATA, seed=0, workers=2, device=torch.device("cpu"))
    # they are idle then, and none is killed in the midst of handing over memory
    assert len(list(killed.fetch(spans()))) == 6
    assert len(list(tmp_path.glob("*/listener-*"))) >= 1
    for pid in children() - before:
        with suppress(RuntimeError):  # torch's, once it has noticed that a worker was killed
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    killed.close()
    assert list(tmp_path.iterdir()) == []


def test_a_temporary_folder_with_a_long_name_is_refused_before_workers_are_started(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/" + "a" * 75)
    message = (
        r"\(TMPDIR\), whose name has 76 bytes; .* leaves 75 bytes for this name; set TMPDIR to a"
        " shorter path"
    )
    with pytest.raises(LaunchError, match=message):
        Loader(DATA, seed=0, workers=1, device=torch.device("cpu"))


def test_the_longest_folder_that_is_not_refused_works(tmp_path, monkeypatch):
    folder = tmp_path / ("a" * (75 - len(str(tmp_path)) - 1))
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    loader = Loader(DATA, seed=0, workers=1, device=torch.device("cpu"))
    assert len(list(loader.fetch(spans()))) == 6
    loader.close()


def test_sockets_are_in_the_parents_folder_which_it_removes_however_this_process_ends(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "the system's"))
    monkeypatch.setattr(processes, "_folder", None)
    processes.use_parents_folder(tmp_path)
    loader = Loader(DATA, seed=0, workers=1, device=torch.device("cpu"))
    assert len(list(loader.fetch(spans()))) == 6
    assert len(list(tmp_path.glob("pymp-*/listener-*"))) == 1
    loader.close()


def test_a_parents_folder_with_a_long_name_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(processes, "_folder", None)
    long = tmp_path / ("a" * 75)
    long.mkdir()
    processes.use_parents_folder(long)
    loader = Loader(DATA, seed=0, workers=1, device=torch.device("cpu"))
    assert len(list(tmp_path.glob("pymp-*"))) == 1
    loader.close()


def test_a_batch_that_cannot_be_sent_is_an_error_and_no_wait_for_ever():
    loader = Loader(
        DATA, collate=lambda samples: lambda: samples, seed=0, workers=1, device=torch.device("cpu")
    )
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(loader.fetch(spans()))
    loader.close()


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
    # a killed process leaves multiprocessing's folder behind
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        workers = [int(pid) for pid in process.stdout.readline().split()]
        assert process.wait() == -signal.SIGKILL
    assert len(workers) == 2
    for worker in workers:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(worker).wait()
