"""Evaluates a model on data it is not trained on: every sample counts exactly once, at any world size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.assignment import microbatch_spans, split_spans
from lockstep.base.errors import DataError, LossError
from lockstep.comm.mesh import Mesh
from lockstep.comm.world import exact_sum
from lockstep.data.loader import Loader, Microbatch, Span
from lockstep.keys import RandomStream
from lockstep.logging.metrics import as_number
from lockstep.model.shard import reshard
from lockstep.recipe.recipe import Evaluation, Gathered, Mean, Recipe
from lockstep.training.context import Context
from lockstep.training.loss import SINGLE, measured, weights_of
from lockstep.training.train_module import TrainModule

Row = dict[str, tuple[float, float]]  # one microbatch's (total, weight) of each loss term and each `Mean`
Columns = tuple[Tensor, ...]
"""The tensors that a `Gathered` metric collected from one microbatch, each with one row per sample."""


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode. Afterwards restore each module's mode, and free parameters that forwards have
    all-gathered."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(modes[0][1])  # some models override `train`
        for module, training in modes:
            module.training = training
        reshard(model)


@dataclass(slots=True)
class Evaluator:
    """A recipe's evaluation on one rank."""

    recipe: Recipe
    evaluation: Evaluation
    mesh: Mesh
    loader: Loader
    module: TrainModule
    microbatch_splits: int  # see `Plan`

    @classmethod
    def of(cls, recipe: Recipe, evaluation: Evaluation, context: Context, module: TrainModule) -> Evaluator:
        loader = Loader(
            evaluation.data,
            collate=evaluation.collate,
            seed=recipe.seed,
            shuffle=False,
            workers=int(context.plan.workers),
            prefetch=int(context.plan.prefetch),
            device=context.device,
        )
        return cls(recipe, evaluation, context.mesh, loader, module, context.plan.microbatch_splits)

    def measure(self, step: int) -> dict[str, float]:
        """Return the loss and every metric after `step` steps, the same on every rank. Every rank calls it.

        Restores each module's `training` flag. Seeds the default generators before each microbatch.
        """
        with in_evaluation_mode(self.module.model), torch.no_grad():
            return self._measure(step)

    def _measure(self, step: int) -> dict[str, float]:
        assert self.recipe.microbatch != "auto", "autotune has chosen one"
        size = self.evaluation.microbatch or self.recipe.microbatch or self.recipe.global_batch
        unsplit = microbatch_spans(len(self.evaluation.data), size, self.mesh.assignment.ranks)
        bounds = split_spans(unsplit, 2**self.microbatch_splits)
        spans = [
            Span(step=0, index=index, start=bounds[index][0], stop=bounds[index][1], is_dummy=is_dummy)
            for index, is_dummy in self.mesh.assignment.with_dummies(len(bounds), self.mesh.data.rank)
        ]
        rows: dict[int, Row] = {}
        collected: dict[str, dict[int, Columns]] = {name: {} for name in self._metrics(Gathered)}
        executor, items = self.module.executor, self.loader.fetch(spans)
        for item, (sums, parts) in executor.evaluate(
            items, partial(self._position, step), self.recipe.inputs, self.recipe.loss, self._measured
        ):
            if item.is_dummy:
                continue
            for name, part in parts.items():
                collected[name][item.index] = part
            rows[item.index] = sums
        found: dict[str, float] = executor.on_output_rank(lambda: {**self._means(rows, len(bounds)), **self._gathered(collected, bounds)})
        return found

    def _position(self, step: int, item: Microbatch) -> tuple[int, ...]:
        """The key of a microbatch's random streams."""
        return self.recipe.seed, RandomStream.EVALUATION, step, item.index

    def _measured(self, item: Microbatch, batch: Any, output: Any, loss: Any) -> tuple[Row, dict[str, Columns]]:
        weights = None if self.recipe.weight is None else weights_of(self.recipe.weight(item.batch))
        sums = measured(loss, samples=item.size, batch=item.batch, weights=weights)
        for name, metric in self._metrics(Mean).items():
            sums[name] = _sum_and_number(name, metric.values(output, batch), item.size)
        return sums, {name: _checked(name, metric.collect(output, batch), item.size) for name, metric in self._metrics(Gathered).items()}

    def _metrics(self, kind: type[Any]) -> dict[str, Any]:
        return {name: metric for name, metric in self.evaluation.metrics.items() if isinstance(metric, kind)}

    def _means(self, rows: dict[int, Row], microbatches: int) -> dict[str, float]:
        names = self._names(rows)
        numbers = [[number for name in names for number in row[name]] for row in rows.values()]
        mine = torch.tensor(numbers, dtype=torch.float64).reshape(len(rows), 2 * len(names))
        columns = self.mesh.in_order(mine, microbatches).T.tolist()
        totals = [exact_sum(column) for column in columns]
        means = {name: totals[2 * i] / totals[2 * i + 1] if totals[2 * i + 1] else float("nan") for i, name in enumerate(names)}
        if SINGLE not in means:
            means = {SINGLE: sum(value for name, value in means.items() if name not in self.evaluation.metrics), **means}
        return means

    def _names(self, rows: dict[int, Row]) -> list[str]:
        """The names of the sums. Every rank calls it. Raises `LossError` if they differ between microbatches."""
        (_, names), *others = self._kinds({index: list(row) for index, row in rows.items()})
        for index, found in others:
            if set(found) != set(names):
                terms, before = (
                    [name.removeprefix(f"{SINGLE}/") for name in each if name not in self.evaluation.metrics] for each in (found, names)
                )
                raise LossError(
                    f"evaluation, microbatch {index}: the loss has terms {terms} and had {before} before; it must have the same terms for "
                    "every microbatch: give one that does not apply as a zero, (output * 0).sum()"
                )
        return list(names)

    def _gathered(self, collected: dict[str, dict[int, Columns]], bounds: list[tuple[int, int]]) -> dict[str, float]:
        sizes = [stop - start for start, stop in bounds]
        found = {}
        for name, parts in collected.items():
            mine = list(parts.values())
            columns = self._columns(name, parts)
            everyone = [self.mesh.samples_in_order(torch.cat([part[i] for part in mine]) if mine else None, sizes) for i in range(columns)]
            compute: Callable[..., Any] = self._metrics(Gathered)[name].compute
            found[name] = _one_number(name, compute(*everyone))
        return found

    def _columns(self, name: str, parts: dict[int, Columns]) -> int:
        """The number of tensors that a metric collects. Every rank calls it. Raises `DataError` if rows differ."""
        kinds = {
            index: [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape[1:])] for tensor in part] for index, part in parts.items()
        }
        (first, before), *others = self._kinds(kinds)
        if others:
            index, found = others[0]
            raise DataError(
                f"metric {name!r} collected {_words(found)} from microbatch {index}, and {_words(before)} from microbatch {first}; the "
                "rows of all samples are concatenated, so they must have one dtype and one shape: pad them to one width for all "
                "microbatches, or collect one number a sample"
            )
        return len(before)

    def _kinds(self, kinds: dict[int, Any]) -> list[tuple[int, Any]]:
        """(microbatch, kind) of each distinct kind (JSON) on any rank: the first microbatch of that kind, in order."""
        everyone = self.mesh.data.gather_values(_firsts(kinds.items()))
        return _firsts(sorted(chain.from_iterable(everyone), key=itemgetter(0)))


def _firsts(kinds: Iterable[tuple[int, Any]]) -> list[tuple[int, Any]]:
    firsts: dict[str, tuple[int, Any]] = {}
    for index, kind in kinds:
        firsts.setdefault(repr(kind), (index, kind))
    return list(firsts.values())


def _words(kinds: list[Any]) -> str:
    return " and ".join(f"{dtype} rows of shape {tuple(shape)}" for dtype, shape in kinds) or "nothing"


def _one_number(name: str, computed: Any) -> float:
    shape = tuple(getattr(computed, "shape", ()))
    if math.prod(shape) != 1:
        raise DataError(
            f"metric {name!r} computed an array of shape {shape}; a metric is one number; reduce it to one, or give one metric each"
        )
    return as_number(name, computed)


def _sum_and_number(name: str, values: Any, samples: int) -> tuple[float, float]:
    if not isinstance(values, Tensor):
        raise DataError(f"metric {name!r} has values {values!r} (a {type(values).__name__}); a Mean's values are a tensor, one a sample")
    if values.dim() == 0 and samples > 1:
        raise DataError(
            f"metric {name!r} has one value for a microbatch of {samples} samples; an ls.Mean divides the sum of the values by their "
            "number, and would take a mean of means; return one value a sample: leave out .mean() (or .sum()) over them"
        )
    return float(values.double().sum()), float(values.numel())


def _checked(name: str, collected: Any, samples: int) -> Columns:
    tensors = tuple(collected) if isinstance(collected, list | tuple) else (collected,)
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or tensor.dim() == 0 or len(tensor) != samples:
            shape = f"shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
            raise DataError(f"metric {name!r} collected {shape} from a microbatch of {samples} samples; each tensor has one row a sample")
    return tuple(tensor.cpu() for tensor in tensors)
