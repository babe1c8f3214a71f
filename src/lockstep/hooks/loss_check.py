"""The hook that detects a loss that depends on the split into microbatches, or on a value that the
loss keeps between calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lockstep.base import accelerator
from lockstep.base.counters import (
    Numbers,
    carried,
    changed_each_time,
    numbers_of_functions,
    numbers_of_model,
)
from lockstep.base.errors import DataError, LossError, PlanError, RecipeError, first_few
from lockstep.base.nested import map_tensors, tensors_in, tree_tensors
from lockstep.base.torch_private import (
    MODULE_ATTRIBUTES,
    RECURRENT_CACHES,
    own_buffers,
    tree_leaves,
    version,
    without_torch_function_modes,
)
from lockstep.comm.mesh import to_local
from lockstep.comm.segment import ExchangeError
from lockstep.comm.torch_collectives import CollectiveCalled
from lockstep.data.generators import seed_generators
from lockstep.data.loader import Microbatch
from lockstep.hooks.label_means import LabelMean, LabelMeans
from lockstep.keys import RandomStream, key
from lockstep.launch.failures import out_of_memory
from lockstep.logging.flops import is_compiled
from lockstep.model.chunked_logits import hidden_states
from lockstep.model.shard import reset_after_error, reshard
from lockstep.recipe.recipe import Gathered, Recipe
from lockstep.training.checksum import checksum
from lockstep.training.evaluate import in_evaluation_mode
from lockstep.training.hook import ControlHook
from lockstep.training.loss import Weights, measured, numbers_on_host, weights_of
from lockstep.training.run import Run
from lockstep.training.set_up import Remark

TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2, "fp16": 2e-2}
"""Largest relative difference between the loss of a microbatch and the mean loss of its two
halves."""
SAME = 1e-6
"""Largest relative difference between two losses of the same microbatch."""

# term of the loss -> (total, weight): the sum over samples, and its divisor
Sums = dict[str, tuple[float, float]]


class Findings(NamedTuple):
    """The findings of one rank about the loss, as text for a warning. None without a finding."""

    kept: str | None = None
    """Text if the loss of the same microbatch changes from call to call."""
    counts: str | None = None
    """Text if each forward changes a Python number, such as a counter."""
    cut: str | None = None
    """Text if the loss of a microbatch differs from the mean loss of its two halves."""
    unchecked: str | None = None
    """The reason why the loss could not be checked."""
    collective: str | None = None
    """The torch.distributed collective that the loss calls."""


class LossTrial(NamedTuple):
    """The loss of a microbatch or half microbatch, checksums of the model's output, and the means
    over labels."""

    sums: Sums
    output: list[int]
    means: Sequence[LabelMean] = ()


class CalledCollective(str):
    """The name of a collective that the loss called in a trial."""

    __slots__ = ()


class Failed(str):
    """The error of a trial, as text."""

    error: Exception

    @classmethod
    def of(cls, error: Exception) -> Failed:
        first_line = str(error).partition(chr(10))[0][:200]
        failed = cls(f"{type(error).__name__}: {first_line}")
        failed.error = error
        return failed


Outcome = LossTrial | str
"""The result of a trial, or the reason why the trial has no result."""
NOTHING = Findings()
IS_RANDOM = Findings(unchecked="it draws random numbers, without dropout too")


@dataclass(eq=False)
class LossCheck(ControlHook):
    """Computes the loss of the first microbatch, and of its halves in evaluation mode. Restores the
    model and the loss. Only the loss function runs, on halves of the model's output, if the forward
    has collectives, is compiled, or draws random numbers in evaluation mode."""

    _is_done: bool = False
    _is_watching: bool = False
    _is_tried: bool = False
    _item: Microbatch | None = None
    _found: Findings = NOTHING

    def before_step(self, run: Run) -> None:
        if self._is_done or run.recipe is None or run.recipe.loss is None:
            return
        self._is_done = True
        if run.context.recovered_from is not None and run.step > 0:
            # the script has passed this check before the recovery, for which other ranks wait
            return
        with restored([*attributes_of(run.model), *_kept_by(run.recipe)]):
            if not _takes_outputs(run):
                item = run.training.current.peek()
                found = NOTHING if item is None else _check_alone(run, run.recipe, item)
                is_random = run.context.world.any(found == IS_RANDOM)
                if run.recipe.inputs is None or not is_random:
                    _report(run, found)
                    return
                if _report(run, NOTHING if found == IS_RANDOM else found):
                    return
            elif _may_fail(run) and _report(run, _check_twice(run, run.recipe)):
                return
        if run.recipe.inputs is not None:
            self._is_watching, self._item = True, run.training.current.peek()
        else:
            run.event(
                "loss-not-checked",
                reason=(
                    "a forward that other ranks wait for cannot be tried on halves without"
                    " Recipe.inputs"
                ),
            )

    def watched(self, run: Run, recipe: Recipe) -> Callable[[Any, Any], Any] | Gathered:
        """Return the recipe's loss function. In the first step, the returned function also computes
        the loss on halves of the model's output."""
        if self._is_watching and recipe.loss is not None:
            return partial(self._watch, run, recipe.loss)
        return recipe.objective

    def _watch(self, run: Run, loss: Callable[[Any, Any], Any], output: Any, batch: Any) -> Any:
        # a repeated call, or one without gradients
        if self._is_tried or not torch.is_grad_enabled():
            return loss(output, batch)
        self._is_tried = True
        assert run.recipe is not None, "a recipe's loss is watched"
        with (
            torch.no_grad(),
            accelerator.preserved_generators(run.context.device),
            restored(_kept_by(run.recipe)),
            # modes that watch the training step do not see these calls
            without_torch_function_modes(),
        ):
            if self._item is not None:
                item = replace(self._item, batch=[output, batch])
                self._found = _check_on_halves(item, partial(_try_loss, run, loss), run)
        return loss(output, batch)

    def after_step(self, run: Run) -> None:
        if self._is_watching:
            self._is_watching, self._item = False, None
            _report(run, self._found)


def _kept_by(recipe: Recipe) -> Iterator[dict[str, Any]]:
    for function in (recipe.loss, recipe.inputs, recipe.weight):
        yield from attributes_of(getattr(function, "__self__", function))


def _takes_outputs(run: Run) -> bool:
    in_forward = any(axis.in_forward for axis in run.context.plan.larger)
    in_slices = bool(run.training.current.layout.assignment.slices)
    return in_forward or in_slices or _is_compiled(run)


def _may_fail(run: Run) -> bool:
    plan = run.context.plan
    communicate = sum(axis.in_forward for axis in plan.larger)
    stage_has_collectives = plan.divides("layers") and communicate > 1
    return not _is_compiled(run) and not stage_has_collectives


def _is_compiled(run: Run) -> bool:
    return bool(run.context.plan.compile) or is_compiled(run.model)


def _report(run: Run, found: Findings) -> bool:
    """Report the findings of all ranks. Returns True if the loss keeps a value or depends on the
    microbatches. Every rank must call this function."""
    everyone = run.context.world.gather_values(found)
    kept, counts, cut, unchecked, collective = (
        next((each for each in reasons if each), None) for reasons in zip(*everyone, strict=True)
    )
    if collective is not None:
        raise LossError(
            f"the loss calls {collective} of torch.distributed; ranks may have unequally many"
            " microbatches, so the call would mix them up, or wait for ever; to divide by a sum"
            " over all ranks, return ls.Sum(total) and give Recipe.weight = batch -> this"
            " microbatch's part of the sum; to compare samples of all ranks, give"
            " Recipe.batch_loss"
        )
    if kept is not None:
        report_kept_value(run, kept)
    elif counts is not None:
        report_state(run, counts)
    elif cut is not None:
        run.training.remark(
            Remark(
                "loss-depends-on-microbatches",
                {"reason": cut},
                f"warning: the loss depends on how a batch is cut into microbatches: {cut}. If it"
                " is a mean over something else than samples (tokens, pixels, class weights),"
                " return ls.Sum(total) and give Recipe.weight; if it compares samples, give"
                " Recipe.batch_loss; a network outside of the recipe's model that has BatchNorm in"
                " training mode belongs into the model",
            )
        )
    if unchecked is not None:
        run.event("loss-not-checked", reason=unchecked)
    return kept is not None or counts is not None or cut is not None


def report_kept_value(run: Run, kept: str) -> None:
    """Every rank must call this function."""
    report_state(
        run,
        f"{kept}; the loss or the model keeps a value that it changes (a hidden state, a running"
        " centre, a queue), and each rank would change its own, by its own microbatches; make it a"
        " buffer of the model, named in self_updating_buffers, or change it between steps, in a"
        " hook for instance; a value for each sample (the hidden state of a text that goes on in"
        " the next batch) has no place in a model: compute it in the forward, from a sample that"
        " holds the text before it too",
    )


def report_state(run: Run, text: str) -> None:
    """Warn about state that the microbatches of each rank change. Every rank must call this
    function."""
    if run.context.plan.numerics == "bitwise":
        raise LossError(f"{text}; or drop numerics=bitwise")
    run.training.remark(Remark("loss-keeps-state", {"reason": text}, f"warning: {text}"))


def _check_alone(run: Run, recipe: Recipe, item: Microbatch) -> Findings:
    """Check the loss on a microbatch whose forward has no collectives."""
    twice, numbers = [], [_numbers(run, recipe)]
    for _ in range(2):
        twice.append(_try_model(run, recipe, _piece(item), training=True))
        numbers.append(_numbers(run, recipe))
    counts = _changed_counters(run, *numbers)
    found = Findings(collective=_called_collective(twice), kept=_kept(run, twice), counts=counts)
    if found != NOTHING:
        return found
    return _check_on_halves(item, lambda piece: _try_model(run, recipe, piece), run)


def _check_twice(run: Run, recipe: Recipe) -> Findings:
    """Compute the loss of the first microbatch twice, if all ranks' first microbatches have the
    same size. A forward that fails for one size would leave ranks waiting in its collectives. Every
    rank must call this function."""
    item = run.training.current.peek()
    sizes = set(run.context.world.gather_values(None if item is None else item.size))
    what = "whether it keeps state"
    if item is None or len(sizes) > 1:
        why = "the ranks' first microbatches have unequally many samples"
        return Findings(unchecked=f"{what}: {why}")
    trials: list[list[Outcome]] = []
    numbers = [_numbers(run, recipe)]
    # always both: a rank that stopped early would leave the others waiting
    for training in (True, False):
        tried: list[Outcome] = []
        for _ in range(2):
            tried.append(_try_model(run, recipe, _piece(item), training=training))
            numbers.append(_numbers(run, recipe))
            if _any_failed(run, tried[-1]):
                break
        trials.append(tried)
    kept = next(filter(None, (_kept(run, tried) for tried in trials)), None)
    counts = _changed_counters(run, *numbers[:3]) if len(trials[0]) == 2 else None
    found = Findings(
        kept=kept,
        counts=counts,
        collective=next(filter(None, map(_called_collective, trials)), None),
    )
    failed = [tried[0] for tried in trials if isinstance(tried[0], str)]
    if found == NOTHING and failed:
        return Findings(unchecked=f"{what}: it fails in the trial: {failed[0]}")
    return found


def _any_failed(run: Run, outcome: Outcome) -> bool:
    """True if a forward failed on any rank. Raises the error of this rank's forward if ranks still
    wait in its collectives. Every rank must call this function."""
    run.training.modules[0].agreement.end_trial()
    try:
        # first the ranks that exchange shards: if one of them still waits in its forward, this
        # raises an error
        failed = run.context.mesh.shards().any(isinstance(outcome, str))
        failed = run.context.world.any(failed)
    except Exception:
        if isinstance(outcome, Failed):
            raise outcome.error from None
        raise
    run.training.modules[0].agreement.settle()
    return failed


def _numbers(run: Run, recipe: Recipe) -> Numbers:
    functions = [each for each in (recipe.loss, recipe.inputs, recipe.weight) if each is not None]
    return {**numbers_of_model(run.model), **numbers_of_functions(functions)}


def _changed_counters(run: Run, before: Numbers, between: Numbers, after: Numbers) -> str | None:
    changed = set(changed_each_time(before, between, after))
    of_model = numbers_of_model(run.model).keys() & changed
    return counters_text(sorted((changed - of_model) | {*carried(run.model, of_model)}))


def counters_text(names: Sequence[str]) -> str | None:
    if not names:
        return None
    return (
        f"each forward changes the number {first_few(names)}; each rank would count its own"
        " microbatches; to count steps, set it from run.step in a hook's before_step; if it is for"
        " a log, leave it out, or append it to a list"
    )


def _check_on_halves(
    item: Microbatch, compute: Callable[[Microbatch], Outcome], run: Run
) -> Findings:
    """Compare the loss of a microbatch with the losses of its halves. The last call of `compute`
    finds values that change only with different samples, such as a running proportion of
    classes."""
    whole: list[Outcome] = [compute(_piece(item)) for _ in range(2)]
    if (kept := _kept(run, whole)) is not None:
        return Findings(kept=kept)
    if (collective := _called_collective(whole)) is not None:
        return Findings(collective=collective)
    if isinstance(whole[0], str):
        return Findings(unchecked=f"it fails in the trial: {whole[0]}")
    if (rows := _common_rows(item.batch)) < 2:
        return Findings(
            unchecked=(
                "its first microbatch cannot be cut in two: its tensors do not all have one row"
                " per sample, and two or more"
            )
        )
    sums, halves = [whole[0].sums], []
    for index, span in enumerate([(0, None), (0, rows // 2), (rows // 2, rows)], start=1):
        tried = compute(_piece(item, span, index))
        if isinstance(tried, str):
            return Findings(unchecked=f"it fails on a half of the first microbatch: {tried}")
        sums.append(tried.sums)
        halves.append(tried.means)
    for span in ((0, rows // 2), (0, None)):
        at_last = compute(_piece(item, span, 0))
    if (kept := _kept(run, [whole[0], at_last])) is not None:
        return Findings(kept=kept)
    found = _cut_differs(*sums, tolerance=TOLERANCE[run.context.precision])
    if found.cut is None and (over := _unseen_mean(whole[0].means, *halves[1:], found=found)):
        return Findings(cut=f"it is a mean over {over}")
    return found


def _unseen_mean(
    whole: Sequence[LabelMean],
    first: Sequence[LabelMean],
    second: Sequence[LabelMean],
    *,
    found: Findings,
) -> str | None:
    """Return a mean over labels that may depend on the split although the losses of the halves
    agree. The halves may have labels of one class or no ignored labels, or draw random numbers."""
    if len(first) < len(whole):  # the loss computes a mean for each sample by itself
        return None
    alike = [mean.weight for mean in first] == [mean.weight for mean in second]
    if not alike and found != IS_RANDOM:
        return None
    return next((mean.over for mean in whole if mean.may_differ), None)


def _common_rows(batch: Any) -> int:
    rows = {len(tensor) if tensor.dim() else 0 for tensor in tensors_in(batch)}
    return rows.pop() if len(rows) == 1 else 0


def _piece(
    item: Microbatch, rows: tuple[int, int | None] = (0, None), index: int = 0
) -> Microbatch:
    start, stop = rows
    is_whole = rows == (0, None)
    batch = map_tensors(
        item.batch, lambda tensor: (tensor if is_whole else tensor[start:stop]).clone()
    )
    return replace(item, batch=batch, size=item.size if stop is None else stop - start, index=index)


def _try_loss(run: Run, loss: Callable[[Any, Any], Any], piece: Microbatch) -> Outcome:
    weight = None if run.recipe is None else run.recipe.weight
    output, batch = piece.batch
    stream = key(run.context.seed, RandomStream.EVALUATION, run.step, piece.index)
    seed_generators(stream, run.context.device)
    try:
        weights = None if weight is None else weights_of(weight(batch))
        with _watching(run, piece.size) as watched:
            value = loss(output, batch)
        measured = _measured(value, samples=piece.size, batch=batch, weights=weights)
        return LossTrial(measured, [], _of_samples(value, watched))
    except CollectiveCalled as error:
        return CalledCollective(error)
    except Exception as error:  # a loss may accept microbatches of one size only
        return Failed.of(error)


def _measured(loss: Any, *, samples: int, batch: Any, weights: Weights | None) -> Sums:
    terms = measured(loss, samples=samples, batch=batch, weights=weights)
    on_host = {name: numbers_on_host(pair) for name, pair in terms.items()}
    return {name: (total, weight) for name, (total, weight) in on_host.items()}


def _try_model(run: Run, recipe: Recipe, piece: Microbatch, *, training: bool = False) -> Outcome:
    def score(item: Microbatch, batch: Any, output: Any, loss: Any) -> LossTrial:
        weights = None if recipe.weight is None else weights_of(recipe.weight(item.batch))
        leaves = tree_tensors(output)
        tensors = map(hidden_states, leaves)
        sums = [int(checksum(to_local(tensor)).item()) for tensor in tensors]
        measured = _measured(loss, samples=item.size, batch=item.batch, weights=weights)
        return LossTrial(measured, sums, _of_samples(loss, watched[-1]))

    def position(item: Microbatch) -> tuple[int, ...]:
        return recipe.seed, RandomStream.EVALUATION, run.step, item.index

    def loss(output: Any, batch: Any) -> Any:
        assert recipe.loss is not None, "a batch loss is not checked"
        is_unwatched = recipe.inputs is None and _takes_outputs(run)
        with nullcontext() if is_unwatched else _watching(run, piece.size) as mode:
            watched.append(mode)
            return recipe.loss(output, batch)

    watched: list[LabelMeans | None] = []
    parameters = list(run.model.parameters())
    versions = [version(parameter) for parameter in parameters]
    try:
        with (
            _buffers_restored(run),
            nullcontext() if training else in_evaluation_mode(run.model),
            torch.no_grad(),
        ):
            executor = run.training.modules[0].executor
            scored = list(executor.evaluate(iter([piece]), position, recipe.inputs, loss, score))
        if training:
            reshard(run.model)
    except Exception as error:
        if training and isinstance(error, RecipeError | PlanError | DataError):
            raise  # raised by a check that runs once, in the first forward
        if isinstance(error, ExchangeError):
            raise  # the ranks cannot exchange any more
        if _takes_outputs(run) and out_of_memory(error):
            # the other ranks may have enough memory, and wait for this rank in the forward's
            # collectives
            raise
        reset_after_error(run.model)
        return CalledCollective(error) if isinstance(error, CollectiveCalled) else Failed.of(error)
    if versions != [version(parameter) for parameter in parameters]:
        # the training step finds this too, and its error names the parameter
        return "it changes a parameter"
    return scored[0][1] if scored else LossTrial({}, [])


@contextmanager
def _buffers_restored(run: Run) -> Iterator[None]:
    """Restore the buffers of the models. The training step reports a forward that changes
    buffers."""
    with restored([own_buffers(module) for module in run.model.modules()]):
        yield
    for statistics in run.training.modules[0].statistics:
        statistics.discard()


def _watching(run: Run, samples: int) -> AbstractContextManager[LabelMeans | None]:
    return nullcontext() if run.context.plan.divides("features") else LabelMeans(samples)


def _of_samples(loss: Any, watched: LabelMeans | None) -> Sequence[LabelMean]:
    terms = loss.values() if isinstance(loss, Mapping) else [loss]
    by_samples = any(isinstance(term, Tensor) for term in terms)
    return watched.found if watched is not None and by_samples else ()


def _called_collective(tried: Sequence[Outcome]) -> str | None:
    return next((str(each) for each in tried if isinstance(each, CalledCollective)), None)


def _kept(run: Run, tried: Sequence[Outcome]) -> str | None:
    whole, again = tried[0], tried[-1]
    if isinstance(whole, str):
        return None
    if isinstance(again, str):
        return (
            "the loss of the first microbatch can be computed, and a second time, with the same"
            f" random numbers, fails ({again})"
        )
    is_bitwise = run.context.plan.numerics == "bitwise"
    allowed = 0.0 if is_bitwise else SAME
    for name, (total, weight) in whole.sums.items():
        second, divisor = again.sums[name][0], weight or 1.0
        if abs(second - total) > allowed * max(abs(total), abs(second)):
            return (
                f"{name} of the first microbatch is {total / divisor:.6g} the first time, and"
                f" {second / divisor:.6g} the second, with the same random numbers"
            )
    if is_bitwise and whole.output != again.output:
        return (
            "the output for the first microbatch has other bits the second time, with the same"
            " random numbers"
        )
    return None


def _cut_differs(
    whole: Sums, otherwise: Sums, first: Sums, second: Sums, *, tolerance: float
) -> Findings:
    for name, (total, weight) in whole.items():
        if otherwise[name] != (total, weight):
            return IS_RANDOM
        halves, weights = first[name][0] + second[name][0], first[name][1] + second[name][1]
        if not weight or not weights:
            return Findings(unchecked=f"{name} has no weight in the first microbatch")
        mean, of_halves = total / weight, halves / weights
        if abs(mean - of_halves) > tolerance * max(abs(mean), abs(of_halves)):
            cut = f"{name} is {mean:.4g} for the first microbatch, and {of_halves:.4g} for its"
            return Findings(cut=f"{cut} two halves together")
    return NOTHING


@contextmanager
def restored(dicts: Iterable[dict[str, Any]]) -> Iterator[None]:
    """At the end of a `with` block, restore the items of each dict, and the contents of the tensors
    and containers in the dict."""
    kept = [_Attributes(attributes) for attributes in dicts]
    try:
        yield
    finally:
        for attributes in kept:
            attributes.restore()


def attributes_of(each: object) -> Iterator[dict[str, Any]]:
    """Yield the attributes of an object. For a module, also yield its buffers and the attributes of
    its children."""
    if isinstance(each, nn.Module):
        for module in each.modules():
            yield from (vars(module), own_buffers(module))
    elif hasattr(each, "__dict__") and not isinstance(each, type):
        yield vars(each)


class _Attributes:
    def __init__(self, attributes: dict[str, Any]) -> None:
        self._attributes = attributes
        self._values = dict(attributes)
        self._contents = {
            name: _copied(value)
            for name, value in attributes.items()
            if name not in MODULE_ATTRIBUTES
        }

    def restore(self) -> None:
        for name in self._attributes.keys() - self._values.keys():
            del self._attributes[name]
        for name, value in self._values.items():
            if self._attributes.get(name) is not value:
                self._attributes[name] = value
        for name, content in self._contents.items():
            if content is not None:
                _put_back(self._values[name], content)


def _copied(value: Any) -> Any:
    if type(value) is Tensor and value.layout == torch.strided:
        return value.detach().clone()
    return value.copy() if type(value) in (list, dict, set, deque) else None


def _put_back(value: Any, content: Any) -> None:
    if not isinstance(value, Tensor):
        value.clear()
        value.update(content) if isinstance(value, dict | set) else value.extend(content)
    elif value.shape == content.shape and not torch.equal(value, content):
        with torch.no_grad():
            value.copy_(content)


STEPS, MICROBATCHES = 2, 4
"""`CarriedState` watches the models during this number of steps and microbatches of each rank."""

_ABOUT = frozenset(
    {
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "requires_grad",
        "is_leaf",
        "grad_fn",
        "size",
        "dim",
        "numel",
        "__len__",
    }
)
_SAVED = MODULE_ATTRIBUTES | RECURRENT_CACHES
_ITEMS = (Tensor.__getitem__, Tensor.__setitem__)

# name of a module's attribute -> its tensors, each with its version counter
Marks = dict[str, list[tuple[Tensor, int]]]


class CarriedState(ControlHook):
    """Finds attributes by which a model carries values from one microbatch to the next. A forward
    reads a tensor that the forward of an earlier microbatch stored in the attribute, and replaces
    the tensor (unlike a cache)."""

    def __init__(self) -> None:
        self._steps = 0
        self._watches: list[_Watch] = []

    def before_step(self, run: Run) -> None:
        if self._steps or (run.recipe is not None and run.recipe.loss is not None):
            return
        if run.context.recovered_from is not None and run.step > 0:
            return  # the same script has passed this check before
        if not run.context.plan.compile and not any(
            is_compiled(module.model) for module in run.training.modules
        ):
            held = {
                id(tensor)
                for module in run.training.modules
                for tensor in (*module.model.parameters(), *module.model.buffers())
            }
            self._watches = [
                _Watch(module.model, held, lambda: run.training.microbatches)
                for module in run.training.modules
            ]

    def after_step(self, run: Run) -> None:
        if not self._watches:
            return
        self._steps += 1
        mine = {
            "read": sorted({name for watch in self._watches for name in watch.found}),
            "changed": sorted({name for watch in self._watches for name in watch.counted()}),
        }
        everyone = run.context.world.gather_values(mine)
        read: list[str] = next((found["read"] for found in everyone if found["read"]), [])
        changed: list[str] = next((found["changed"] for found in everyone if found["changed"]), [])
        counts = counters_text(changed)
        if read or counts or self._steps == STEPS:
            self._close()
        if read:
            report_kept_value(
                run,
                f"the model's forward reads {', '.join(read)}, which the forward of another"
                " microbatch has set",
            )
        elif counts:
            report_state(run, counts)

    def after_steps(self, run: Run) -> None:
        self._close()

    def _close(self) -> None:
        for watch in self._watches:
            watch.close()
        self._watches = []


class _Watch:
    def __init__(
        self, model: nn.Module, held: Iterable[int], microbatches: Callable[[], int]
    ) -> None:
        self.found: set[str] = set()
        self._changed_twice: set[str] = set()
        self._changed: set[str] = set()  # names of the numbers changed in this microbatch
        self._changed_before: set[str] = set()
        self._numbers = numbers_of_model(model)
        self._model, self._held, self._microbatches = model, held, microbatches
        self._first = self._latest = microbatches()
        self._known = self._before = self._marks()
        self._uses = _Uses({})
        self._entered: list[ExitStack | None] = []
        self._handles = [
            model.register_forward_pre_hook(self._enter),
            model.register_forward_hook(self._leave, always_call=True),
        ]

    def counted(self) -> list[str]:
        return carried(self._model, self._changed_twice) if self._changed_twice else []

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, *_: Any) -> None:
        if not torch.is_grad_enabled() or self._microbatches() - self._first > MICROBATCHES:
            self._entered.append(None)
            return
        if self._microbatches() != self._latest:
            self._latest, self._before = self._microbatches(), self._marks()
            self._changed_before |= self._changed
            self._changed = set()
            known = {
                (id(tensor), writes)
                for tensors in self._known.values()
                for tensor, writes in tensors
            }
            left = {
                id(tensor): name
                for name, tensors in self._before.items()
                for tensor, writes in tensors
                if (id(tensor), writes) not in known
            }
            self._uses = _Uses(left)
        self._numbers = numbers_of_model(self._model)
        entered = ExitStack()
        entered.enter_context(self._uses)
        self._entered.append(entered)

    def _leave(self, *_: Any) -> None:
        if (entered := self._entered.pop()) is None:
            return
        entered.close()
        numbers = numbers_of_model(self._model)
        self._changed |= {
            name for name, value in self._numbers.items() if numbers.get(name, value) != value
        }
        self._changed_twice |= self._changed & self._changed_before
        if self._uses.names:
            now = self._marks()
            self.found |= {
                name
                for name in self._uses.names
                if not _are_same(self._before[name], now.get(name, []))
            }

    def _marks(self) -> Marks:
        marks: Marks = {}
        for prefix, module in self._model.named_modules():
            for name, value in vars(module).items():
                if name not in _SAVED:
                    tensors = [
                        leaf
                        for leaf in tree_leaves(value)
                        if isinstance(leaf, Tensor) and id(leaf) not in self._held
                    ]
                    if tensors:
                        marks[f"{prefix}.{name}".lstrip(".")] = [
                            (tensor, version(tensor)) for tensor in tensors
                        ]
        return marks


def _are_same(before: list[tuple[Tensor, int]], now: list[tuple[Tensor, int]]) -> bool:
    return [(id(tensor), writes) for tensor, writes in before] == [
        (id(tensor), writes) for tensor, writes in now
    ]


class _Uses(TorchFunctionMode):
    def __init__(self, left: Mapping[int, str]) -> None:
        super().__init__()
        self.names: set[str] = set()
        self._left = left
        self._overwritten: set[tuple[int, str]] = set()  # as `buffer[:n] = x`

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        read: Any = (args, kwargs)
        if function in _ITEMS and (item := _item_of(*args)) is not None:
            if function is Tensor.__setitem__:
                self._overwritten.add(item)
            if item in self._overwritten:
                read = args[2:]
        name = getattr(function, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(function, "__self__", None), "__name__", "")
        if self._left and name not in _ABOUT:
            self.names |= {
                self._left[id(leaf)] for leaf in tree_leaves(read) if id(leaf) in self._left
            }
        return function(*args, **(kwargs or {}))


def _item_of(tensor: Tensor, index: Any, *_: Any) -> tuple[int, str] | None:
    """Return the name of an item such as `buffer[:n]`. None if the index contains a tensor."""
    parts = index if isinstance(index, tuple) else (index,)
    is_plain = all(isinstance(each, int | slice | None) or each is ... for each in parts)
    return (id(tensor), repr(index)) if is_plain else None
