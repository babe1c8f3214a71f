"""Records collectives, learning-rate schedules, seeds, and files that are saved or loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join
from torch.optim import lr_scheduler

from lockstep.audit.probes.draws import Draws
from lockstep.audit.probes.optimizers import Optimizers
from lockstep.audit.probes.recorder import RecordWriter, frames
from lockstep.base.dtypes import dtype_name

SHAPED = ("all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
COLLECTIVES = (
    *SHAPED,
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
)


class Events:
    def __init__(self, recorder: RecordWriter, optimizers: Optimizers, draws: Draws) -> None:
        self._recorder, self._optimizers, self._draws = recorder, optimizers, draws
        # collectives and schedules may call others of their kind; a new schedule steps itself once
        self._depths = {"collective": 0, "schedule": 0}

    def install(self) -> None:
        recorder, c10d = self._recorder, dist.distributed_c10d
        recorder.wrap([dist, c10d], "init_process_group", after=self._after_init)
        recorder.wrap(Join, "__enter__", before=lambda _: self._write("join"))
        for name in COLLECTIVES:
            recorder.watch([dist, c10d], name, self._outermost("collective", name), traced=True)
        kinds = {each for each in vars(lr_scheduler).values() if isinstance(each, type)}
        for kind in kinds:
            if issubclass(kind, lr_scheduler.LRScheduler):
                for name in {"step", "__init__"} & vars(kind).keys():
                    recorder.watch(kind, name, self._outermost("schedule", name))
        recorder.wrap(
            [torch, torch.random], "manual_seed", before=self._seed, around=self._draws.others
        )
        recorder.wrap([torch, torch.serialization], "save", before=self._save)
        recorder.wrap(torch, "load", before=lambda *_, **__: self._write("load"))

    def _write(self, kind: str, **row: Any) -> None:
        self._recorder.write(kind, line=self._recorder.line(), **row)

    def _outermost(self, kind: str, name: str) -> Callable[..., Any]:
        """Return a probe that ignores nested calls of the same kind."""

        def probe(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not self._depths[kind]:
                if kind == "collective":
                    self._recorder.safely(self._collective, name, args, kwargs)
                elif name == "step":
                    self._recorder.safely(self._schedule, *args)
            self._depths[kind] += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._depths[kind] -= 1

        return probe

    def _after_init(self, *_: Any, **__: Any) -> None:
        self._recorder.write(
            "rank",
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
        )

    def _collective(self, name: str, args: Any, kwargs: Any) -> None:
        def given(keyword: str, *kinds: type) -> Any:
            return kwargs.get(keyword) or next(
                (each for each in args if isinstance(each, kinds)), None
            )

        group = given("group", dist.ProcessGroup)
        operation = given("op", dist.ReduceOp, dist.ReduceOp.RedOpType)
        tensors = [each for each in [*args, *kwargs.values()] if isinstance(each, Tensor)]
        shape: list[Any] = []
        if tensors and name in SHAPED:
            shape = [list(tensors[0].shape), dtype_name(tensors[0].dtype)]
        everyone = list(range(dist.get_world_size()))
        self._recorder.write_collective(
            name,
            everyone if group is None else dist.get_process_group_ranks(group),
            self._recorder.line(),
            shape=shape,
            floats=min((each.numel() for each in tensors if each.is_floating_point()), default=0),
            operation="" if operation is None else str(operation).rpartition(".")[2],
        )

    def _schedule(self, schedule: Any, *_: Any) -> None:
        callers = (frame.f_globals.get("__name__", "") for frame in frames())
        self._write(
            "schedule",
            type=type(schedule).__name__,
            schedule=id(schedule),
            optimizer=self._optimizers.number(schedule.optimizer),
            horizon=horizon(schedule),
            by=next(name for name in callers if not name.startswith(__package__)),
        )

    def _seed(self, seed: Any, *_: Any) -> None:
        if self._recorder.line():
            self._write("seed", seed=int(seed), step=self._optimizers.steps)

    def _save(self, _: Any = None, to: Any = None, *__: Any, **kwargs: Any) -> None:
        to = kwargs.get("f", to)
        if not isinstance(to, str | os.PathLike):
            to = getattr(to, "name", None)
        if isinstance(to, str | os.PathLike) and str(to) != os.devnull:
            path = Path(to).resolve()
            self._write(
                "save",
                path=str(path),
                step=self._optimizers.steps,
                existed=path.exists(),
            )


def horizon(schedule: Any) -> int | None:
    found = [getattr(schedule, name, None) for name in ("T_max", "total_iters", "total_steps")]
    for function in getattr(schedule, "lr_lambdas", ()):
        found.append(getattr(function, "keywords", {}).get("num_training_steps"))
    return next((value for value in found if isinstance(value, int)), None)
