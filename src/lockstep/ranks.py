"""`rank` returns the rank of this process, also before and after training. `once` calls a function,
such as a download, first on one process of each machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from lockstep.base.errors import LaunchError
from lockstep.launch.environment import Environment
from lockstep.launch.slurm import set_task_variables

T = TypeVar("T")


def rank() -> int:
    """Return the rank of this process, from 0. Works before, during and after training, under every
    launcher, without communication. Raises `LaunchError` if the environment contradicts itself."""
    return _environment().rank


def once(function: Callable[[], T]) -> T:
    """Call `function` on one process of each machine first, and then on all processes of the
    machine that have not called it. Every process gets the result of its own call. Use `once` for
    downloads: only the first process then downloads. Every rank must call `once`, before training.
    If the call raises on the first process of a machine, this process raises the error, and all
    other ranks raise a `LaunchError`."""
    from lockstep.comm.world import join  # imports torch

    environment = _environment()
    world = join(**environment.place)
    result, failure = None, None
    if environment.local_rank == 0:
        try:
            result = function()
        except Exception as error:
            failure = error
    everyone = world.gather_values(
        None if failure is None else f"{type(failure).__name__}: {failure}"
    )
    if failure is not None:
        raise failure
    for number, said in enumerate(everyone):
        if said is not None:
            raise LaunchError(
                f"ls.once: the function failed on rank {number}, the first of its machine ({said});"
                " see its traceback"
            )
    return function() if environment.local_rank else result  # type: ignore[return-value]


def _environment() -> Environment:
    set_task_variables(os.environ)
    return Environment.read(os.environ)
