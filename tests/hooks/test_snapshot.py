"""The collective that a stack is in, and the line that an error comes from."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.distributed_c10d as torch_exchanges

from lockstep.comm import torch_collectives as waits
from lockstep.hooks.hang.snapshot import Frame, call_in_stack, error_with_line

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


def test_an_error_in_a_library_names_the_line_of_the_script_that_called_it() -> None:
    with pytest.raises(TypeError) as raised:
        torch.optim.SGD([torch.nn.Linear(1, 1)])
    line = raised.traceback[0].lineno + 1
    assert error_with_line(raised.value).startswith(
        "TypeError: optimizer can only optimize Tensors"
    )
    assert error_with_line(raised.value).endswith(
        f"(at {__file__}:{line} in"
        f" {test_an_error_in_a_library_names_the_line_of_the_script_that_called_it.__name__})"
    )


def test_an_error_in_no_line_of_the_script_names_none() -> None:
    """As in the forward of an `nn.Sequential`."""
    with pytest.raises(RuntimeError) as raised:
        torch.nn.Linear(2, 1)(torch.ones(3))
    inside = raised.value.with_traceback(raised.tb.tb_next)
    assert error_with_line(inside) == f"RuntimeError: {inside}"
