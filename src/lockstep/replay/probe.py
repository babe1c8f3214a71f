"""A hook that measures the replayed step."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lockstep.base.errors import LossError
from lockstep.base.files import write_atomically
from lockstep.base.nested import tensors_in
from lockstep.comm.mesh import to_local
from lockstep.data.loader import Microbatch, SamplesLeftOut
from lockstep.replay.not_finite import NotFinite
from lockstep.replay.request import ReplayRequest
from lockstep.replay.step import STEP, block_of, microbatch_file
from lockstep.replay.watch import FiniteWatch
from lockstep.training.consensus import Request
from lockstep.training.context import BeginAt, Overrides
from lockstep.training.hook import ControlHook
from lockstep.training.microbatches import StepLayout
from lockstep.training.run import Run
from lockstep.training.train_module import TrainModule


def install(environ: Mapping[str, str]) -> tuple[Overrides, list[ReplayHook]]:
    request = ReplayRequest.read(environ)
    if request is None:
        return Overrides(), []
    hook, left_out = ReplayHook(request), None
    if request.without:
        left_out = SamplesLeftOut(request.step - 1, frozenset(request.without))
    before = None if request.begins_anew else request.before
    begin_at = BeginAt(folder=request.checkpoints, before=before)
    overrides = Overrides(
        bare=True, probe=hook, begin_at=begin_at, left_out=left_out, change_batch=hook.see_batch
    )
    return overrides, [hook]


class ReplayHook(ControlHook):
    """Writes the loss and gradient norms of each microbatch of the requested step, and ends the
    process after the step."""

    run: Run

    def __init__(self, request: ReplayRequest) -> None:
        self._request = request
        self._microbatches: list[dict[str, Any]] = []
        self._squares: dict[int, dict[str, float]] = {}
        """Squared gradient norm of each block of the model, by step."""
        self._outputs: dict[nn.Module, list[Tensor]] = {}
        self._watch = FiniteWatch()

    def before_steps(self, run: Run) -> None:
        self.run, self._begin = run, run.step
        if self._request.by_sample is not None:
            for module in run.training.modules:
                module.model.register_forward_hook(self._see_output)

    def _see_output(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._is_now:
            self._outputs[model] = [each for each in tensors_in(output) if each.requires_grad]

    def before_step(self, run: Run) -> None:
        # in compiled blocks, torch does not call hooks of modules
        if self._is_now and self._has_whole_gradient and not run.context.plan.compile:
            self._watch.watch(module.model for module in run.training.modules)

    def see_batch(self, microbatch: Microbatch, batch: Any) -> Any:
        if self._is_now:
            self._watch.begin(self._rows_of(microbatch.index), batch)
        return batch

    def _rows_of(self, index: int) -> Sequence[int | str]:
        layout = self._layout
        if layout.origins is not None:
            return layout.origins[index].names()
        return [each for each in layout.samples_of(index) if each not in self._request.without]

    @property
    def _layout(self) -> StepLayout:
        return self.run.training.current.layout

    @contextmanager
    def forward(self) -> Iterator[None]:
        yield

    def result(self, name: str, value: float) -> None: ...

    @property
    def _has_whole_gradient(self) -> bool:
        context = self.run.context
        return not context.plan.state_divided and context.mesh.tokens.size == 1

    @property
    def _is_now(self) -> bool:
        return self.run.step + 1 == self._request.step

    def before_backward(
        self, module: int, microbatch: int, total: Tensor, grad_output: Tensor
    ) -> None:
        if not self._is_now:
            return
        each, squares = self.run.training.modules[module], None
        scale = each.scale
        seen: list[NotFinite] = []
        if self._has_whole_gradient:
            self._watch.before_backward(total)
            found = torch.autograd.grad(
                total, each.leaves, grad_output, retain_graph=True, allow_unused=True
            )
            squares = squares_by_block(each.by_parameter(found))
            squares = {name: value / scale**2 for name, value in squares.items()}
            seen = list(self._watch.seen)
        part = float((total.detach() * grad_output).double()) / scale
        by_sample = None
        if microbatch == self._request.by_sample and squares is not None:
            by_sample = self._by_sample(each, total, grad_output)
        self._note(
            module,
            microbatch,
            total=float(total.detach()),
            part=part,
            squares=squares,
            by_sample=by_sample,
            places=[asdict(each) for each in seen],
        )

    def _by_sample(
        self, module: TrainModule, total: Tensor, grad_output: Tensor
    ) -> list[float] | None:
        """Return the squared norm of the gradient that flows through each sample's rows of the
        model's output. Return None if no output has a row for each sample."""
        start, stop = self._layout.spans[self._request.by_sample or 0]
        rows = [
            each
            for each in self._outputs.get(module.model, [])
            if each.dim() and len(each) == stop - start
        ]
        if not rows:
            return None
        of_rows = torch.autograd.grad(
            total, rows, grad_output, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        squares = []
        for sample in range(stop - start):
            only = [torch.zeros_like(each) for each in of_rows]
            for each, whole in zip(only, of_rows, strict=True):
                each[sample] = whole[sample]
            gradients = torch.autograd.grad(
                rows, module.leaves, only, retain_graph=True, allow_unused=True
            )
            squares.append(math.fsum(squares_by_block(module.by_parameter(gradients)).values()))
        return squares

    def without_backward(self, module: int, microbatch: int) -> None:
        if self._is_now:
            self._note(module, microbatch)

    def _note(self, module: int, microbatch: int, **values: Any) -> None:
        mesh = self.run.context.mesh
        has_whole_loss = mesh.loss_parts.size == 1
        if mesh.axis("tensor").rank or (has_whole_loss and mesh.tokens.rank):
            return  # another rank, with index 0, writes the same loss
        index, samples = self._layout.full_microbatch(microbatch)
        left_out = {*self._request.without}
        named = [each for each in samples if each not in left_out]
        self._microbatches.append(
            {"model": module, "microbatch": index, "samples": named, **values}
        )

    def after_backward(self, run: Run, model: nn.Module) -> None:
        squares = self._squares.setdefault(run.step, {})
        for name, norm in run.gradient_norms(model).items():
            block = block_of(name)
            squares[block] = squares.get(block, 0.0) + norm**2

    def on_agreement(self, run: Run, agreed: Request) -> None:
        if run.step >= self._request.step:
            self._end(run, run.loss)

    def on_error(self, run: Run, error: BaseException) -> None:
        """If every rank raised an error about a loss or gradient that is not finite, write the
        files and end the process."""
        if isinstance(error, LossError) and error.not_finite_in == self._request.step:
            self._end(run, None)

    def _end(self, run: Run, loss: float | None) -> NoReturn:
        world, folder = run.context.world, self._request.folder
        write_atomically(folder / microbatch_file(world.rank), json.dumps(self._microbatches))
        if world.rank == 0:
            values = {
                "begin": self._begin,
                "loss": loss,
                "squares": self._squares.pop(self._request.step - 1, {}),
                "before": list(self._squares.values()),
            }
            write_atomically(folder / STEP, json.dumps(values))
        world.end_process()


def squares_by_block(gradients: Mapping[str, Tensor | None]) -> dict[str, float]:
    by_block: dict[str, float] = {}
    for name, gradient in gradients.items():
        if gradient is None:
            continue
        square = float(to_local(gradient).double().square().sum())
        by_block[block_of(name)] = by_block.get(block_of(name), 0.0) + square
    return by_block
