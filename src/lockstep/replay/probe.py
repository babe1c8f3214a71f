"""The probe of `lockstep replay`: it answers a `ReplayRequest`. It writes what each microbatch of
the step adds to the loss and to the gradient, and ends the process after the step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.base.files import write_atomically
from lockstep.comm.mesh import to_local
from lockstep.data.loader import SamplesLeftOut
from lockstep.replay.request import ReplayRequest
from lockstep.replay.step import STEP, block_of, microbatch_file
from lockstep.training.consensus import Request
from lockstep.training.context import BeginAt, Overrides
from lockstep.training.hook import ControlHook
from lockstep.training.run import Run


def install(environ: Mapping[str, str]) -> tuple[Overrides, list[ReplayHook]]:
    """Return the overrides and hooks that the environment requests. Raises `LaunchError`."""
    request = ReplayRequest.read(environ)
    if request is None:
        return Overrides(), []
    hook, left_out = ReplayHook(request), None
    if request.without:
        left_out = SamplesLeftOut(request.step - 1, frozenset(request.without))
    begin = BeginAt(folder=request.checkpoints, before=request.step)
    begin_at = None if request.begins_anew else begin
    return Overrides(bare=True, probe=hook, begin_at=begin_at, left_out=left_out), [hook]


class ReplayHook(ControlHook):
    """Writes the microbatches of the requested step, and ends the process after it."""

    run: Run

    def __init__(self, request: ReplayRequest) -> None:
        self._request = request
        self._microbatches: list[dict[str, Any]] = []
        self._squares: dict[str, float] = {}
        """Block -> the sum of squares of the step's gradient."""

    def before_steps(self, run: Run) -> None:
        self.run, self._begin = run, run.step

    @contextmanager
    def forward(self) -> Iterator[None]:
        """See `Probe`."""
        yield

    def result(self, name: str, value: float) -> None:
        """See `Probe`."""

    @property
    def _is_now(self) -> bool:
        return self.run.step + 1 == self._request.step

    def before_backward(
        self, module: int, microbatch: int, total: Tensor, grad_output: Tensor
    ) -> None:
        """See `Probe`. Computes the gradient of this microbatch alone if this rank has the whole
        model."""
        if not self._is_now:
            return
        each, squares = self.run.training.modules[module], None
        if not self.run.context.plan.state_divided:
            found = torch.autograd.grad(
                total, each.parameters, grad_output, retain_graph=True, allow_unused=True
            )
            scale = 1.0 if each.loss_scale is None else each.loss_scale.value
            named = zip(each.names, found, strict=True)
            squares = squares_by_block((name, part) for name, part in named if part is not None)
            squares = {name: value / scale**2 for name, value in squares.items()}
        part = float((total.detach() * grad_output).double())
        self._note(module, microbatch, total=float(total.detach()), part=part, squares=squares)

    def without_backward(self, module: int, microbatch: int) -> None:
        """See `Probe`."""
        if self._is_now:
            self._note(module, microbatch)

    def _note(self, module: int, microbatch: int, **values: Any) -> None:
        assert self.run.training.source is not None, "a step has begun"
        index, samples = self.run.training.source.layout.full_microbatch(microbatch)
        left_out = {*self._request.without}
        named = [each for each in samples if each not in left_out]
        self._microbatches.append(
            {"model": module, "microbatch": index, "samples": named, **values}
        )

    def after_backward(self, run: Run, model: nn.Module) -> None:
        if not self._is_now:
            return
        for name, norm in run.gradient_norms(model).items():
            block = block_of(name)
            self._squares[block] = self._squares.get(block, 0.0) + norm**2

    def on_agreement(self, run: Run, agreed: Request) -> None:
        """Write the step, once its line is in metrics.jsonl, and end the process."""
        if run.step < self._request.step:
            return
        world, folder = run.context.world, self._request.folder
        write_atomically(folder / microbatch_file(world.rank), json.dumps(self._microbatches))
        if world.rank == 0:
            values = {
                "begin": self._begin,
                "loss": run.loss,
                "squares": self._squares,
            }
            write_atomically(folder / STEP, json.dumps(values))
        if world.size > 1:
            # the first process that ends may take the store of the rendezvous with it
            dist.barrier()
        raise SystemExit(0)


def squares_by_block(gradients: Iterable[tuple[str, Tensor]]) -> dict[str, float]:
    """Return block -> the sum of squares of its gradients."""
    found: dict[str, float] = {}
    for name, gradient in gradients:
        square = float(to_local(gradient).double().square().sum())
        found[block_of(name)] = found.get(block_of(name), 0.0) + square
    return found
