"""The hook that finds a loss that depends on how a batch is cut into microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lockstep.data.device import map_tensors
from lockstep.data.loader import Microbatch
from lockstep.keys import RandomStream
from lockstep.logging.flops import is_compiled
from lockstep.recipe.recipe import Recipe
from lockstep.training.evaluate import in_evaluation_mode
from lockstep.training.hook import ControlHook, Run
from lockstep.training.loss import measured, weights_of
from lockstep.training.set_up import Remark

TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2, "fp16": 2e-2}
"""Largest relative difference, by precision, between the loss of a microbatch and that of its halves together."""

Sums = dict[str, tuple[float, float]]  # (total, weight) of each term of the loss


@dataclass(eq=False)
class LossCheck(ControlHook):
    """Computes the first microbatch of the run twice as a whole and once in halves, without dropout.

    Not where a forward has collectives (shard, tensor, pipeline): one that fails on a half would leave ranks waiting.
    """

    _is_done: bool = False

    def before_step(self, run: Run) -> None:
        if self._is_done or run.recipe is None:
            return
        self._is_done = True
        if run.context.mesh.data.size < run.context.world.size or run.modules[0].mesh.assignment.round_robin:
            return
        if run.context.plan.compile or is_compiled(run.model):
            return  # each new shape and mode would be compiled
        found = _difference(_computed(run, run.recipe, _pieces(run)), TOLERANCE[run.context.precision])
        reason = next((each for each in run.context.world.gather_values(found) if each is not None), None)
        if reason is not None:
            run.remark(
                Remark(
                    "loss-depends-on-microbatches",
                    {"reason": reason},
                    f"warning: the loss depends on how a batch is cut into microbatches: {reason}. It is perhaps a mean over something "
                    "else than samples (tokens, class weights), returned as ls.Sum(total) with Recipe.weight, or it compares samples",
                )
            )


def _pieces(run: Run) -> list[Microbatch]:
    """Return this rank's first microbatch twice, and its halves; empty if it has none, or one that cannot be cut."""
    assert run.source is not None, "a step begins"
    item = run.source.peek()
    if item is None:
        return []
    bounds = ((0, item.size), (0, item.size), (0, item.size // 2), (item.size // 2, item.size))
    cut = [_cut(item, start, stop, index) for index, (start, stop) in enumerate(bounds)] if item.size > 1 else []
    pieces = [piece for piece in cut if piece is not None]
    return pieces if len(pieces) == len(bounds) else []


def _cut(item: Microbatch, start: int, stop: int, index: int) -> Microbatch | None:
    """Return a copy of the samples [start, stop), with random numbers of its own; None if a tensor in the batch has not
    one row a sample. A copy, because the loss may change it in place."""
    fits = True

    def rows(tensor: Tensor) -> Tensor:
        nonlocal fits
        fits &= tensor.dim() > 0 and len(tensor) == item.size
        return tensor[start:stop].clone() if fits else tensor

    batch = map_tensors(item.batch, rows)
    return replace(item, batch=batch, size=stop - start, index=index) if fits else None


def _computed(run: Run, recipe: Recipe, pieces: list[Microbatch]) -> list[Sums]:
    """Return the loss of each piece; empty if one fails."""

    def score(item: Microbatch, batch: Any, output: Any, loss: Any) -> Sums:
        weights = None if recipe.weight is None else weights_of(recipe.weight(item.batch))
        return measured(loss, samples=item.size, batch=item.batch, weights=weights)

    def position(item: Microbatch) -> tuple[int, ...]:
        return recipe.seed, RandomStream.EVALUATION, run.step, item.index

    def computed() -> Iterator[Sums]:
        with in_evaluation_mode(run.model), torch.no_grad():
            for _, sums in run.modules[0].executor.evaluate(iter(pieces), position, recipe.inputs, recipe.loss, score):
                yield sums

    try:
        return list(computed())
    except Exception:  # the step computes the same, and reports it
        return []


def _difference(sums: list[Sums], tolerance: float) -> str | None:
    """Return in words how the loss of the halves differs from that of the whole. `sums`: of the pieces."""
    if not sums:
        return None
    whole, again, first, second = sums
    for name, (total, weight) in whole.items():
        if again[name] != (total, weight):
            return None  # it draws random numbers
        halves, weights = first[name][0] + second[name][0], first[name][1] + second[name][1]
        if not weight or not weights:
            return None
        mean, of_halves = total / weight, halves / weights
        if abs(mean - of_halves) > tolerance * max(abs(mean), abs(of_halves)):
            return f"{name} is {mean:.4g} for the first microbatch, and {of_halves:.4g} for its two halves together"
    return None
