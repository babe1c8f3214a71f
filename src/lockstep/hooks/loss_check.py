"""The hook that finds a loss that depends on how a batch is cut into microbatches, or on a value that it keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.base import accelerator
from lockstep.base.errors import LossError
from lockstep.base.torch_private import tree_leaves, version
from lockstep.comm.mesh import to_local
from lockstep.data.device import map_tensors
from lockstep.data.generators import seed_generators
from lockstep.data.loader import Microbatch
from lockstep.hooks.replica_audit import checksum
from lockstep.keys import RandomStream, key
from lockstep.launch.failures import out_of_memory
from lockstep.logging.flops import is_compiled
from lockstep.model.shard import reset_after_error
from lockstep.recipe.recipe import Gathered, Recipe
from lockstep.training.evaluate import in_evaluation_mode
from lockstep.training.hook import ControlHook, Run
from lockstep.training.losses.loss import measured, weights_of
from lockstep.training.set_up import Remark

TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2, "fp16": 2e-2}
"""Largest relative difference, by precision, between the loss of a microbatch and that of its halves together."""
SAME = 1e-6
"""Largest relative difference between two losses of one microbatch where bits do not count."""

Sums = dict[str, tuple[float, float]]  # (total, weight) of each term of the loss


class Found(NamedTuple):
    """The findings of a rank, in words; None for nothing."""

    kept: str | None = None
    """The loss of one microbatch changes from call to call."""
    cut: str | None = None
    """The loss of a microbatch is not that of its halves."""


NOTHING = Found()


class Tried(NamedTuple):
    """The loss of a piece, and checksums of the output's tensors."""

    sums: Sums
    output: list[int]


@dataclass(eq=False)
class LossCheck(ControlHook):
    """Tries the loss at the first step, on a microbatch, again, and on its halves, without dropout.

    Where a forward has collectives (shard, tensor, pipeline), one that fails on a half would leave ranks waiting; where
    it is compiled, each new shape would be. There the loss is tried on halves of the first microbatch's output, and all
    ranks try their first microbatch twice, unless it is compiled or a pipeline's stage has collectives.
    """

    _is_done: bool = False
    _is_watching: bool = False
    _is_tried: bool = False
    _item: Microbatch | None = None
    _found: Found = NOTHING

    def before_step(self, run: Run) -> None:
        if self._is_done or run.recipe is None or run.recipe.loss is None:
            return
        self._is_done = True
        if run.context.recovered_from is not None and run.step > 0:
            return  # the same script has passed it, and a recovery is waited for
        if not _takes_outputs(run):
            item = run.source.peek() if run.source is not None else None
            _tell(run, _found(run, _computed(run, run.recipe, _cut_up(item) if item is not None else ()) or []))
            return
        if _may_fail(run) and _tell(run, _found(run, _tried_twice(run, run.recipe))):
            return
        if run.recipe.inputs is not None:
            assert run.source is not None, "a step begins"
            self._is_watching, self._item = True, run.source.peek()

    def watched(self, run: Run, recipe: Recipe) -> Callable[[Any, Any], Any] | Gathered:
        """Return the recipe's objective, or in the first step one that tries it on halves of the first output."""
        return partial(self._watch, run, recipe.loss) if self._is_watching and recipe.loss is not None else recipe.objective

    def _watch(self, run: Run, loss: Callable[[Any, Any], Any], output: Any, batch: Any) -> Any:
        if self._is_tried:
            return loss(output, batch)
        self._is_tried = True
        with torch.no_grad(), accelerator.preserved_generators(run.context.device):
            pieces = () if self._item is None else _cut_up(replace(self._item, batch=[output, batch]))
            self._found = _found(run, _of_outputs(run, loss, pieces))
        return loss(output, batch)

    def after_step(self, run: Run) -> None:
        if self._is_watching:
            self._is_watching, self._item = False, None
            _tell(run, self._found)


def _takes_outputs(run: Run) -> bool:
    has_collectives = run.context.mesh.data.size < run.context.world.size or run.modules[0].mesh.assignment.round_robin
    return has_collectives or _is_compiled(run)


def _may_fail(run: Run) -> bool:
    """True if training goes on after a forward that has failed on all ranks."""
    plan = run.context.plan
    stage_has_collectives = plan.pipeline != 1 and (plan.shard != 1 or plan.tensor != 1)
    return not _is_compiled(run) and not stage_has_collectives


def _is_compiled(run: Run) -> bool:
    return bool(run.context.plan.compile) or is_compiled(run.model)


def _tell(run: Run, found: Found) -> bool:
    """Report what ranks have found, and return True if any has found something. Every rank calls it. Raises `LossError`
    where bits count."""
    kept, cut = (next((each for each in reasons if each), None) for reasons in zip(*run.context.world.gather_values(found), strict=True))
    if kept is not None:
        text = (
            f"{kept}, with the same random numbers; the loss or the model keeps a value that it changes (a hidden state, a running "
            "centre, a queue), and each rank would change its own, by its own microbatches; make it a buffer of the model, named in "
            "self_updating_buffers, or change it in a hook between steps"
        )
        if run.context.plan.numerics == "bitwise":
            raise LossError(f"{text}; or drop numerics=bitwise")
        run.remark(Remark("loss-keeps-state", {"reason": kept}, f"warning: {text}"))
    elif cut is not None:
        run.remark(
            Remark(
                "loss-depends-on-microbatches",
                {"reason": cut},
                f"warning: the loss depends on how a batch is cut into microbatches: {cut}. If it is a mean over something else than "
                "samples (tokens, pixels, class weights), return ls.Sum(total) and give Recipe.weight; if it compares samples, give "
                "Recipe.batch_loss; a network outside of the recipe's model that has BatchNorm in training mode belongs into the model",
            )
        )
    return kept is not None or cut is not None


def _tried_twice(run: Run, recipe: Recipe) -> list[Tried]:
    """Try this rank's first microbatch twice. Every rank calls it. Empty unless all ranks have one of the same size: a
    forward that fails for the size of a few ranks' alone would leave the others waiting in its collectives."""
    assert run.source is not None, "a step begins"
    item = run.source.peek()
    sizes = set(run.context.world.gather_values(None if item is None else item.size))
    if item is None or len(sizes) > 1:
        return []
    tried = []
    for _ in range(2):
        once = _computed(run, recipe, [replace(item, batch=map_tensors(item.batch, Tensor.clone), index=0)])
        if run.context.world.any(once is None):
            return []
        tried += once or []
    return tried


def _cut_up(item: Microbatch) -> Iterator[Microbatch]:
    """Yield the microbatch three times, once with other random numbers, and its halves; nothing if it cannot be cut,
    because it is one sample, or a tensor has not one row a sample. Each is a copy, because the loss may change it in
    place, and is made when it is asked for: all of them need the memory of four more outputs."""
    fits = item.size > 1

    def look(tensor: Tensor) -> Tensor:
        nonlocal fits
        fits &= tensor.dim() > 0 and len(tensor) == item.size
        return tensor

    map_tensors(item.batch, look)
    whole, half = (0, item.size), item.size // 2
    for start, stop, index in [(*whole, 0), (*whole, 0), (*whole, 1), (0, half, 2), (half, item.size, 3)] if fits else []:
        batch = map_tensors(item.batch, partial(_rows, start, stop))
        yield replace(item, batch=batch, size=stop - start, index=index)


def _rows(start: int, stop: int, tensor: Tensor) -> Tensor:
    return tensor[start:stop].clone()


def _of_outputs(run: Run, loss: Callable[[Any, Any], Any], pieces: Iterable[Microbatch]) -> list[Tried]:
    """Try each piece, whose batch is an output with its batch; empty if one fails."""
    weight = None if run.recipe is None else run.recipe.weight
    found = []
    try:
        for piece in pieces:
            output, batch = piece.batch
            seed_generators(key(run.context.seed, RandomStream.EVALUATION, run.step, piece.index), run.context.device)
            weights = None if weight is None else weights_of(weight(batch))
            found.append(Tried(measured(loss(output, batch), samples=piece.size, batch=batch, weights=weights), []))
    except Exception:  # a loss may take microbatches of one size alone
        return []
    return found


def _computed(run: Run, recipe: Recipe, pieces: Iterable[Microbatch]) -> list[Tried] | None:
    """Try each piece, and return what this rank has of it; None if one fails or changes a parameter."""

    def score(item: Microbatch, batch: Any, output: Any, loss: Any) -> Tried:
        weights = None if recipe.weight is None else weights_of(recipe.weight(item.batch))
        sums = [int(checksum(to_local(leaf)).item()) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        return Tried(measured(loss, samples=item.size, batch=item.batch, weights=weights), sums)

    def position(item: Microbatch) -> tuple[int, ...]:
        return recipe.seed, RandomStream.EVALUATION, run.step, item.index

    def computed() -> Iterator[Tried]:
        with in_evaluation_mode(run.model), torch.no_grad():
            assert recipe.loss is not None, "a batch loss is not checked"
            for _, tried in run.modules[0].executor.evaluate(iter(pieces), position, recipe.inputs, recipe.loss, score):
                yield tried

    parameters = list(run.model.parameters())
    versions = [version(parameter) for parameter in parameters]
    try:
        tried = list(computed())
    except Exception as error:  # the step computes the same, and reports it; so with a parameter
        if _takes_outputs(run) and out_of_memory(error):
            raise  # the others may have room, and wait for this rank in the forward's collectives
        reset_after_error(run.model)
        return None
    return tried if versions == [version(parameter) for parameter in parameters] else None


def _found(run: Run, tried: list[Tried]) -> Found:
    """Say what differs between the pieces, or the first two of them."""
    if not tried:
        return NOTHING
    is_bitwise = run.context.plan.numerics == "bitwise"
    whole, again, *others = tried
    for name, (total, _) in whole.sums.items():
        second, allowed = again.sums[name][0], 0.0 if is_bitwise else SAME
        if abs(second - total) > allowed * max(abs(total), abs(second)):
            return Found(kept=f"{name} of the first microbatch is {total:.6g} the first time, and {second:.6g} the second")
    if is_bitwise and whole.output != again.output:
        return Found(kept="the output for the first microbatch has other bits the second time")
    return _cut_differs(whole.sums, *(each.sums for each in others), tolerance=TOLERANCE[run.context.precision]) if others else NOTHING


def _cut_differs(whole: Sums, otherwise: Sums, first: Sums, second: Sums, *, tolerance: float) -> Found:
    """`otherwise`: the whole with other random numbers."""
    for name, (total, weight) in whole.items():
        if otherwise[name] != (total, weight):
            return NOTHING  # it draws random numbers
        halves, weights = first[name][0] + second[name][0], first[name][1] + second[name][1]
        if not weight or not weights:
            return NOTHING
        mean, of_halves = total / weight, halves / weights
        if abs(mean - of_halves) > tolerance * max(abs(mean), abs(of_halves)):
            return Found(cut=f"{name} is {mean:.4g} for the first microbatch, and {of_halves:.4g} for its two halves together")
    return NOTHING
