"""A process that ends with its parent also ends if the parent was gone before it could ask for that."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from lockstep.base.parent import die_with_parent
from lockstep.data import workers
from lockstep.launch import worker


def begin_launched_worker(parent: int) -> None:
    os.environ[worker.AGENT] = str(parent)
    worker.begin()


def begin_loader_worker(parent: int) -> None:
    workers._set_up("", parent, 0)


@pytest.mark.parametrize("begin", [die_with_parent, begin_launched_worker, begin_loader_worker])
def test_a_process_whose_parent_has_ended_before_it_asks_to_end_with_it_ends(begin: Callable[[int], None]) -> None:
    reader, writer = os.pipe()
    if (parent := os.fork()) == 0:
        own = os.getpid()
        if os.fork() == 0:
            try:
                while os.getppid() == own:
                    time.sleep(0.001)
                os.write(writer, b"began;")
                begin(own)
                os.write(writer, b"lives on")
            finally:
                os._exit(0)
        os._exit(0)
    os.close(writer)
    os.waitpid(parent, 0)
    with open(reader, "rb") as said:
        assert said.read() == b"began;"


def test_a_process_whose_parent_lives_goes_on() -> None:
    if (child := os.fork()) == 0:
        try:
            die_with_parent(os.getppid())
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
