"""Where a process stands, by its stack."""

from __future__ import annotations

import torch.distributed.distributed_c10d as torch_exchanges

from lockstep.comm import wait_times as waits
from lockstep.hooks.hang.snapshot import Frame, called_in

MINE = Frame("train.py", 3, "main")
RECV = Frame(torch_exchanges.__file__, 1, "recv")
COUNTED = Frame(waits.__file__, 1, "count_torch_waits.<locals>.wait")


def test_what_goes_from_one_rank_to_another_is_named_by_its_stack_while_waits_are_counted() -> None:
    for stack in ((MINE, RECV), (MINE, RECV, COUNTED)):
        call = called_in(stack)
        assert call is not None
        assert call.name == "recv"


def test_a_stack_that_has_left_torchs_exchanges_is_in_none() -> None:
    for stack in ((MINE,), (MINE, RECV, MINE), (MINE, RECV, MINE, COUNTED), ()):
        assert called_in(stack) is None
