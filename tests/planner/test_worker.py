"""What a plan that cannot be run is refused with."""

from __future__ import annotations

import pytest
import torch

from lockstep.planner.worker import _fault


def test_an_error_in_a_library_names_the_line_of_the_script_that_called_it() -> None:
    with pytest.raises(TypeError) as raised:
        torch.optim.SGD([torch.nn.Linear(1, 1)])
    line = raised.traceback[0].lineno + 1
    assert _fault(raised.value).startswith("it could not be traced: TypeError: optimizer can only optimize Tensors")
    assert _fault(raised.value).endswith(
        f"(at {__file__}:{line} in {test_an_error_in_a_library_names_the_line_of_the_script_that_called_it.__name__})"
    )


def test_an_error_in_no_line_of_the_script_names_none() -> None:
    """As in the forward of an `nn.Sequential`."""
    with pytest.raises(RuntimeError) as raised:
        torch.nn.Linear(2, 1)(torch.ones(3))
    inside = raised.value.with_traceback(raised.tb.tb_next)
    assert _fault(inside) == f"it could not be traced: RuntimeError: {inside}"
