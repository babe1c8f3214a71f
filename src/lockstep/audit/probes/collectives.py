"""Watches the collectives that Python code calls, in their order, and the process group that they
belong to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join

from lockstep.audit.probes.gradients import is_compiling
from lockstep.audit.probes.recorder import RecordWriter, guarded, wrap
from lockstep.base import torch_private

NAMES = (
    *(
        "all_reduce",
        "broadcast",
        "reduce",
        "all_gather",
        "all_gather_into_tensor",
        "gather",
        "scatter",
        "reduce_scatter",
    ),
    *(
        "reduce_scatter_tensor",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "all_gather_object",
        "gather_object",
    ),
    *("broadcast_object_list", "scatter_object_list", "monitored_barrier"),
)
SHAPED = {"all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor"}
"""Collectives whose tensors must have one shape on all ranks."""


class Collectives:
    def __init__(self, recorder: RecordWriter) -> None:
        self._recorder = recorder
        self._depth = 0

    def install(self) -> None:
        wrap(self._recorder, dist, "init_process_group", after=self._after_init)
        dist.distributed_c10d.init_process_group = dist.init_process_group
        wrap(
            self._recorder,
            Join,
            "__enter__",
            before=lambda *_: self._recorder.write("join", line=self._recorder.line()),
        )
        for name in NAMES:
            watched = self._watched(name, getattr(dist, name))
            setattr(dist, name, watched)
            setattr(dist.distributed_c10d, name, watched)

    def _after_init(self, *_: Any, **__: Any) -> None:
        self._recorder.write(
            "rank",
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            backend=dist.get_backend(),
        )

    def _watched(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(*args, **kwargs)
            if not self._depth:
                guarded(self._recorder, self._note)(name, args, kwargs)
            self._depth += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._depth -= 1

        return collective

    def _note(self, name: str, args: Any, kwargs: Any) -> None:
        group = kwargs.get("group") or next(
            (each for each in args if isinstance(each, dist.ProcessGroup)), None
        )
        tensors = [each for each in [*args, *kwargs.values()] if isinstance(each, Tensor)]
        first = tensors[0] if tensors else None
        floats = min((each.numel() for each in tensors if each.is_floating_point()), default=0)
        shape = (
            [list(first.shape), str(first.dtype).removeprefix("torch.")]
            if first is not None and name in SHAPED
            else []
        )
        ranks = (
            dist.get_process_group_ranks(group)
            if group is not None
            else list(range(dist.get_world_size()))
        )
        operation = kwargs.get("op") or next(
            (each for each in args if isinstance(each, dist.ReduceOp | dist.ReduceOp.RedOpType)),
            None,
        )
        operation = "" if operation is None else str(operation).rpartition(".")[2]
        write_collective(
            self._recorder,
            name,
            ranks,
            self._recorder.line(),
            shape=shape,
            floats=floats,
            operation=operation,
        )


def write_collective(
    recorder: RecordWriter,
    name: str,
    ranks: Sequence[int],
    line: str,
    *,
    shape: Sequence[Any] = (),
    floats: int = 0,
    operation: str = "",
) -> None:
    row = {"ranks": ranks, "shape": shape, "floats": floats, "operation": operation}
    recorder.write(
        "collective", name=name, line=line, in_backward=torch_private.in_backward(), **row
    )
