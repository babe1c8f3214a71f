"""Evaluates a model on held-out data. Every sample counts exactly once at any world size."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.assignment import MicrobatchAssignment, microbatch_spans, split_spans
from lockstep.base import accelerator
from lockstep.base.errors import DataError, LossError
from lockstep.comm.gather import in_order
from lockstep.comm.torch_collectives import CollectiveCalled, as_one_process
from lockstep.comm.world import exact_sum
from lockstep.data.loader import Loader, Microbatch, Span
from lockstep.keys import RandomStream
from lockstep.logging.metrics import as_number
from lockstep.model.shard import reshard
from lockstep.recipe.recipe import Evaluation, Gathered, Loss, Mean, Recipe
from lockstep.training.batch_loss import Columns, checked_columns, distinct_kinds, gather_columns
from lockstep.training.context import Context
from lockstep.training.loss import (
    SINGLE,
    Sums,
    measured,
    number_of,
    numbers_on_host,
    weights_of,
)
from lockstep.training.reducers.step_stats import Number
from lockstep.training.train_module import TrainModule

ALONE = (
    "torcheval's metric.compute() does without, as torchmetrics do; code of your own can ask"
    " torch.distributed.is_initialized()"
)


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """On exit, restores each module's training or evaluation mode, and frees all-gathered
    parameters."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(modes[0][1])  # some models override `train`
        for module, training in modes:
            module.training = training
        reshard(model)


class Evaluator:
    """Computes the loss and the metrics of one evaluation of a recipe, on one rank."""

    def __init__(
        self, recipe: Recipe, evaluation: Evaluation, context: Context, module: TrainModule
    ) -> None:
        self.recipe, self.evaluation, self.module = recipe, evaluation, module
        self.plan, self.mesh = context.plan, context.mesh
        self.loader = Loader(
            evaluation.data,
            collate=evaluation.collate,
            seed=recipe.seed,
            shuffle=False,
            workers=int(context.plan.workers),
            prefetch=int(context.plan.prefetch),
            device=context.device,
        )
        metrics = dict(evaluation.metrics)
        if recipe.batch_loss is not None and evaluation.loss is None:
            metrics = {SINGLE: recipe.batch_loss, **metrics}
        self._mean = {name: each for name, each in metrics.items() if isinstance(each, Mean)}
        self._gathered = {
            name: each for name, each in metrics.items() if isinstance(each, Gathered)
        }
        # metrics are checked for collectives in the first microbatch
        self._is_first = True

    def measure(self, step: int, speeds: tuple[float, ...]) -> dict[str, float]:
        """Every rank must call this method. Seeds the default random generators before each
        microbatch."""
        plan = self.plan
        self.assignment = MicrobatchAssignment(plan.data_ranks, plan.has_rounds, speeds=speeds)
        with in_evaluation_mode(self.module.model), torch.no_grad():
            return self._measure(step)

    def _measure(self, step: int) -> dict[str, float]:
        assert self.recipe.microbatch != "auto", "autotune has chosen one"
        size = self.evaluation.microbatch or self.recipe.microbatch or self.recipe.global_batch or 1
        unsplit = microbatch_spans(len(self.evaluation.data), size, self.assignment.ranks)
        bounds = split_spans(unsplit, 2**self.plan.microbatch_splits)
        spans = [
            Span(
                step=0,
                index=index,
                start=bounds[index][0],
                stop=bounds[index][1],
                is_dummy=is_dummy,
            )
            for index, is_dummy in self.assignment.with_dummies(len(bounds), self.mesh.data.rank)
        ]
        rows: dict[int, Sums] = {}
        ahead: deque[tuple[int, _ToHost]] = deque()
        collected: dict[str, dict[int, Columns]] = {name: {} for name in self._gathered}
        executor, items = self.module.executor, self.loader.fetch(spans)
        agreement = self.module.agreement
        agreement.doing.text = "in an evaluation"
        for item, (sums, parts) in executor.evaluate(
            items,
            partial(self._position, step),
            self.recipe.inputs,
            self.evaluation.loss or self.recipe.loss or _no_loss,
            self._measured,
        ):
            if item.is_dummy:
                continue
            rows[item.index] = sums
            ahead.append((item.index, parts))
            if len(ahead) > 1:
                _arrive(*ahead.popleft(), collected)
        for index, parts in ahead:
            _arrive(index, parts, collected)
        agreement.compare_now()
        self.module.check_counts()
        agreement.doing.text = ""
        metrics: dict[str, float] = executor.on_output_rank(
            lambda: {**self._means(rows, len(bounds)), **self._computed(collected, bounds)}
        )
        return metrics

    def _position(self, step: int, item: Microbatch) -> tuple[int, ...]:
        return self.recipe.seed, RandomStream.EVALUATION, step, item.index

    def _measured(
        self, item: Microbatch, batch: Any, output: Any, loss: Any
    ) -> tuple[Sums, _ToHost]:
        # metrics do not get a dummy's output, which they might keep; without `inputs` they call the
        # model, which has collectives
        if item.is_dummy and self.recipe.inputs is not None:
            return {}, _ToHost({}, self.module.device)
        sums = self._loss_of(item, loss)
        columns = {}
        if self._mean or self._gathered:
            output = self.module.executor.whole(output)
        for name, mean in self._mean.items():
            values = self._called(name, mean.values, output, batch)
            sums[name] = _sum_and_number(name, values, item.size)
            if self.mesh.loss_parts.rank:
                sums[name] = 0.0, 0.0  # the first rank has counted all tokens
        for name, gathered in self._gathered.items():
            collected = self._called(name, gathered.collect, output, batch)
            columns[name] = checked_columns(f"metric {name!r}", collected, item.size)
        self._is_first = False
        return sums, _ToHost(columns, self.module.device)

    def _loss_of(self, item: Microbatch, loss: Any) -> Sums:
        if loss is None:
            return {}
        weighs = self.recipe.weight if self.evaluation.loss is None else None
        weights = None if weighs is None else weights_of(weighs(item.batch))
        sums = measured(loss, samples=item.size, batch=item.batch, weights=weights)
        if self.mesh.loss_parts.rank and not isinstance(loss, Loss):
            return {name: (total, 0.0) for name, (total, _) in sums.items()}
        return sums

    def _called(
        self, name: str, function: Callable[[Any, Any], Any], output: Any, batch: Any
    ) -> Any:
        if self.recipe.inputs is None or self.plan.divides("features"):
            return function(output, batch)  # `function` may call the model, which has collectives
        try:
            with as_one_process(watched=self._is_first):
                return function(output, batch)
        except CollectiveCalled as error:
            raise DataError(
                f"metric {name!r} calls {error} of torch.distributed for a microbatch; ranks have"
                " unequally many, so it would mix them up, or wait for ever, and lockstep gathers"
                f" the values of all ranks itself; leave it out: {ALONE}"
            ) from None

    def _means(self, rows: dict[int, Sums], microbatches: int) -> dict[str, float]:
        names = self._names(rows)
        numbers = [number for row in rows.values() for name in names for number in row[name]]
        mine = torch.tensor(numbers_on_host(numbers), dtype=torch.float64).reshape(
            len(rows), 2 * len(names)
        )
        self.mesh.loss_parts.all_reduce(mine)
        columns = in_order(mine, microbatches, self.assignment, self.mesh.data).T.tolist()
        totals = [exact_sum(column) for column in columns]
        means = {
            name: totals[2 * i] / totals[2 * i + 1] if totals[2 * i + 1] else float("nan")
            for i, name in enumerate(names)
        }
        if SINGLE not in means and SINGLE not in self._gathered:
            means = {
                SINGLE: sum(value for name, value in means.items() if name not in self._mean),
                **means,
            }
        return means

    def _names(self, rows: dict[int, Sums]) -> list[str]:
        """Every rank must call this method."""
        (_, names), *others = distinct_kinds(
            self.mesh.data, {index: list(row) for index, row in rows.items()}
        )
        for index, other_names in others:
            if set(other_names) != set(names):
                terms, before = (
                    [name.removeprefix(f"{SINGLE}/") for name in each if name not in self._mean]
                    for each in (other_names, names)
                )
                raise LossError(
                    f"evaluation, microbatch {index}: the loss has terms {terms} and had {before}"
                    " before; it must have the same terms for every microbatch: give one that does"
                    " not apply as a zero, (output * 0).sum()"
                )
        return list(names)

    def _computed(
        self, collected: dict[str, dict[int, Columns]], bounds: list[tuple[int, int]]
    ) -> dict[str, float]:
        sizes = [stop - start for start, stop in bounds]
        found = {}
        for name, parts in collected.items():
            everyone = gather_columns(
                self.mesh.data, self.assignment, f"metric {name!r}", parts, sizes
            )
            try:
                with as_one_process():
                    computed = self._gathered[name].compute(*everyone)
            except CollectiveCalled as error:
                raise DataError(
                    f"metric {name!r} calls {error} of torch.distributed in its compute; every"
                    " rank calls compute with the rows of all samples, so these would be counted"
                    f" once per rank; leave it out: {ALONE}"
                ) from None
            found[name] = _one_number(name, computed)
        return found


class _ToHost:
    """Copies tensors to the host without waiting. `take` waits for the copies, and keeps the host
    at most one microbatch ahead of the device."""

    def __init__(self, columns: Mapping[str, Columns], device: torch.device) -> None:
        devices = {device, *(tensor.device for each in columns.values() for tensor in each)}
        streams = [each for each in devices if accelerator.has_streams(each)]
        behind = bool(streams)
        self._columns = {
            name: tuple(tensor.to("cpu", non_blocking=behind) for tensor in each)
            for name, each in columns.items()
        }
        self._events = list(map(accelerator.recorded_event, streams))

    def take(self) -> dict[str, Columns]:
        if not self._events:
            return self._columns
        for event in self._events:
            event.synchronize()
        # copy the rows out of pinned memory, so that it can be used again
        return {
            name: tuple(tensor.clone() for tensor in each) for name, each in self._columns.items()
        }


def _arrive(index: int, parts: _ToHost, collected: Mapping[str, dict[int, Columns]]) -> None:
    for name, part in parts.take().items():
        collected[name][index] = part


def _no_loss(output: Any, batch: Any) -> None: ...


def _one_number(name: str, computed: Any) -> float:
    shape = tuple(getattr(computed, "shape", ()))
    if math.prod(shape) != 1:
        raise DataError(
            f"metric {name!r} computed an array of shape {shape}; a metric is one number; reduce it"
            " to one, or give one metric each"
        )
    return as_number(name, computed)


def _sum_and_number(name: str, values: Any, samples: int) -> tuple[Number, Number]:
    if not isinstance(values, Tensor):
        raise DataError(
            f"metric {name!r} has values {values!r} (a {type(values).__name__}); a Mean's values"
            " are a tensor, one a sample"
        )
    if values.dim() == 0 and samples > 1:
        raise DataError(
            f"metric {name!r} has one value for a microbatch of {samples} samples; an ls.Mean"
            " divides the sum of the values by their number, and would take a mean of means;"
            " return one value per sample: leave out .mean() (or .sum()) over them"
        )
    return number_of(values.double().sum()), float(values.numel())
