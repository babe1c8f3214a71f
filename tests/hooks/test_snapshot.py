"""The collective that a stack is in."""

from __future__ import annotations

import torch.distributed.distributed_c10d as torch_exchanges

from lockstep.comm import wait_times as waits
from lockstep.hooks.hang.snapshot import Frame, call_in_stack

USER = Frame("train.py", 3, "main")
RECV = Frame(torch_exchanges.__file__, 1, "recv")
WRAPPED = Frame(waits.__file__, 1, "count_torch_waits.<locals>.wait")


def test_a_point_to_point_call_is_found_in_the_stack_even_if_its_wait_is_wrapped() -> None:
    for stack in ((USER, RECV), (USER, RECV, WRAPPED)):
        call = call_in_stack(stack)
        assert call is not None
        assert call.name == "recv"


def test_a_stack_outside_of_torch_distributed_is_in_no_call() -> None:
    for stack in ((USER,), (USER, RECV, USER), (USER, RECV, USER, WRAPPED), ()):
        assert call_in_stack(stack) is None
