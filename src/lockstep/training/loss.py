"""Checks and scales the results of the user's loss and weight functions."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from functools import lru_cache
from numbers import Real
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.base import accelerator
from lockstep.base.errors import LossError, RecipeError
from lockstep.base.torch_private import labels_averaged_by
from lockstep.recipe.checks import not_a_scalar
from lockstep.recipe.recipe import Loss, Recipe, Sum
from lockstep.training.reducers.step_stats import Number

_LISTS = (list, tuple)


def rows_per_sample(name: str, batch: Any, samples: int) -> int:
    """Return the number of rows per sample. The number is above 1 if the batch has several views of
    each sample."""
    kind = type(batch)  # common cases first, for speed: called for each microbatch
    first = (
        batch[0]
        if kind in _LISTS and batch
        else next(iter(batch.values()), None)
        if kind is dict
        else batch
    )
    if type(first) is Tensor and first.shape[:1] == (samples,):
        return 1
    if (rows := batch_rows(batch, samples)) is None or rows == samples:
        return 1
    if rows and rows % samples == 0:
        return rows // samples
    found = f"has {rows} rows" if rows >= 0 else "has nothing with one row per sample"
    raise LossError(
        f"term {name!r} of the loss is a plain scalar, the mean over this microbatch's samples, and"
        f" the batch {found} for {samples} samples, as where collate leaves samples out, filters,"
        f" packs or crops; a mean over what it holds would be weighted as one over {samples};"
        " return ls.Sum(loss * n) with Recipe.weight = batch -> n, what the mean is over (its"
        " rows, or its tokens), or ls.Loss(loss * n, n)"
    )


def batch_rows(batch: Any, samples: int) -> int | None:
    """Return the number of rows of the batch's tensors or lists. Returns None if the batch has no
    rows. Returns -1 if the tensors have different numbers of rows, and none has `samples` rows."""
    if isinstance(batch, Tensor | np.ndarray):
        return len(batch) if batch.ndim else None
    if is_dataclass(batch):
        batch = vars(batch)
    if not isinstance(batch, list | tuple | Mapping):
        return None
    parts = list(batch.values() if isinstance(batch, Mapping) else batch)
    tensors = set(_tensor_rows(parts))
    lists = {len(part) for part in parts if isinstance(part, list | tuple)}
    if samples in tensors:
        return samples
    if not any(isinstance(part, Tensor | np.ndarray) for part in parts):
        if len(lists) == 1 and all(isinstance(part, list | tuple) for part in parts):
            return lists.pop()  # a list of images and a list of targets
        if not isinstance(batch, Mapping) and not lists and parts:
            return len(parts)  # a list of samples, each a dict or a text
    if len(tensors) == 1:
        return tensors.pop()
    if samples in lists or (len(parts) == samples and not isinstance(batch, Mapping)):
        return samples
    return -1 if tensors else None


def _tensor_rows(parts: Iterable[Any]) -> Iterable[int]:
    for part in parts:
        if isinstance(part, Tensor | np.ndarray):
            if part.ndim:
                yield len(part)
        elif isinstance(part, list | tuple):
            yield from _tensor_rows(part)
        elif isinstance(part, Mapping):
            yield from _tensor_rows(part.values())


NAME = "loss_module"
"""Name of the submodule that holds `Recipe.loss`, if the loss has parameters."""


def with_loss_in_model(recipe: Recipe) -> Recipe:
    """Make a loss that has parameters a submodule of the model. The optimizer and checkpoints then
    include the loss's parameters."""
    if not isinstance(recipe.loss, nn.Module) or not any(
        parameter.requires_grad for parameter in recipe.loss.parameters()
    ):
        return recipe
    joined = _LossInModel(recipe.model, recipe.loss)
    return replace(recipe, model=joined.build, loss=joined)


class _LossInModel:
    def __init__(self, build_model: Callable[[], Any], loss: nn.Module) -> None:
        self._build_model = build_model
        self._loss = loss
        self._model: Any = None

    def build(self) -> Any:
        model = self._build_model()
        if not isinstance(model, nn.Module):
            return model
        if hasattr(model, NAME):
            raise RecipeError(
                f"Recipe.loss is a module with parameters, and the model has a {NAME!r} already;"
                " rename that attribute"
            )
        if type(model).forward is nn.Sequential.forward:
            model.__class__ = type(type(model).__name__, (_SequentialBeforeLoss, type(model)), {})
        model.add_module(NAME, copy.deepcopy(self._loss))
        self._model = model
        return model

    def __call__(self, output: Any, batch: Any) -> Any:
        return getattr(self._model, NAME)(output, batch)


class _SequentialBeforeLoss(nn.Sequential):
    def forward(self, input: Any) -> Any:
        # includes repeated modules, which `named_children` omits
        for name, module in self._modules.items():
            if name != NAME:
                input = module(input)
        return input


_PASSED_THROUGH = ("AddBackward0", "ViewBackward0", "UnsafeViewBackward0", "ToCopyBackward0")
IGNORE_INDEX = -100  # torch's cross entropy ignores this label by default
SINGLE = "loss"  # the name of the only term, if the loss is not a dict
Weights = dict[str, float]
Sums = dict[str, tuple[Number, Number]]
"""Maps the name of a loss term or metric to its (total, weight) in one microbatch."""


class LossKind(NamedTuple):
    """Properties of a loss function's result that all microbatches must share."""

    has_weight: bool
    terms: list[str]
    repeats: int
    """Number of rows per sample, if the loss is a mean over rows."""
    counted: dict[str, list[tuple[float, bool]]]
    """See `counted_labels`."""


class Contribution(NamedTuple):
    """One microbatch's part of a step. The backward of `grad_output * total` computes the
    microbatch's gradient."""

    total: Tensor  # scalar with a gradient
    grad_output: Tensor
    """NaN if the loss is not finite. A NaN makes the summed gradient NaN on all ranks."""
    # scalar: the microbatch's part of the step's loss; the unscaled total of an `ls.Loss`
    value: Tensor | float
    weight: Tensor | None  # scalar; for an `ls.Loss` only
    terms: dict[str, Tensor]  # the part of each term in the step's loss, if there are several
    repeats: int = 1  # as in `LossKind`
    counted: Mapping[str, list[tuple[float, bool]]] = MappingProxyType({})

    def kind(self) -> LossKind:
        return LossKind(self.weight is not None, list(self.terms), self.repeats, dict(self.counted))

    def with_terms(self, more: Mapping[str, Tensor]) -> Contribution:
        own = self.terms or {SINGLE: torch.as_tensor(self.value, dtype=torch.float64)}
        return self._replace(terms={**own, **more})


def contribution(
    loss: Any,
    *,
    samples: int,
    step_samples: int,
    batch: Any,
    weights: Weights | None,
    prescale: Tensor,
) -> Contribution:
    if isinstance(loss, Loss):
        return _forward_known(loss, weights, prescale)
    _check_terms(loss, weights)
    # the test for Tensor is ten times faster
    if isinstance(loss, Tensor) or not isinstance(loss, Mapping):
        total = _term(SINGLE, loss, batch=batch, weights=weights)
        _check_zero(SINGLE, loss, total, weights)
        repeats = _repeats(SINGLE, loss, batch, samples)
        scale = _scale(SINGLE, loss, samples / step_samples, weights)
        if total.is_cpu:
            number = total.item()
            start = _constant(scale if math.isfinite(number) else math.nan, total.dtype)
            return Contribution(total, start, number * scale, None, {}, repeats)
        value = _recorded(total) * scale
        return Contribution(total, _grad_output(total, value, scale), value, None, {}, repeats)
    scaled, repeats = {}, 1
    for name, term in loss.items():
        repeats = max(repeats, _repeats(name, term, batch, samples))
        total = _term(name, term, batch=batch, weights=weights)
        _check_zero(name, term, total, weights)
        scaled[name] = total * _scale(name, term, samples / step_samples, weights)
    total = sum(scaled.values(), start=torch.zeros((), device=next(iter(scaled.values())).device))
    value = _recorded(total)
    terms = {name: term.detach() for name, term in scaled.items()}
    return Contribution(total, _grad_output(total, value, 1.0), value, None, terms, repeats)


def counted_labels(loss: Any, samples: int) -> dict[str, list[tuple[float, bool]]]:
    """For each term that is a plain scalar, return the means over labels that it sums: the
    proportion of labels that are not ignored, and True if all samples have equally many. Waits for
    the device."""
    terms = loss.items() if isinstance(loss, Mapping) else [(SINGLE, loss)]
    means = {
        name: list(_label_means(term.grad_fn, samples))
        for name, term in terms
        if isinstance(term, Tensor)
    }
    return {name: each for name, each in means.items() if each}


def _label_means(node: Any, samples: int) -> Iterator[tuple[float, bool]]:
    left, seen = [node], {None}
    while left:
        if (node := left.pop()) in seen:
            continue
        seen.add(node)
        if node.name() in _PASSED_THROUGH:
            left += [each for each, _ in reversed(node.next_functions)]
        elif (averaged := labels_averaged_by(node)) is not None and averaged[0].numel():
            labels, ignored, number = averaged
            counted = number.item() / labels.numel()
            yield counted, counted == 1.0 or is_even_over_samples(labels == ignored, samples)


def is_even_over_samples(is_ignored: Tensor, samples: int) -> bool:
    """Return True if all samples have equally many ignored labels."""
    if is_ignored.numel() % samples:
        return False
    counts = is_ignored.reshape(samples, -1).sum(1)
    return not bool((counts != counts[0]).any())


def weighted_unequally(
    one: Sequence[tuple[float, bool]], other: Sequence[tuple[float, bool]]
) -> bool:
    """Return True if two microbatches' means over labels are no means over samples."""
    return [each for each, _ in one] != [each for each, _ in other] and not all(
        is_even for _, is_even in (*one, *other)
    )


def measured(loss: Any, *, samples: int, batch: Any, weights: Weights | None) -> Sums:
    if isinstance(loss, Loss):
        part = _forward_known(loss, weights, torch.ones(()), learns=False)
        assert part.weight is not None
        return {SINGLE: (number_of(part.total), number_of(part.weight))}
    _check_terms(loss, weights)
    several = isinstance(loss, Mapping)
    sums: Sums = {}
    for name, term in loss.items() if several else [(SINGLE, loss)]:
        total = number_of(_term(name, term, batch=batch, weights=weights, learns=False))
        if isinstance(term, Sum) and weights is not None:
            pair: tuple[Number, Number] = total, weights[name]
        else:
            rows = float(samples * _repeats(name, term, batch, samples))
            pair = total * rows, rows
        sums[f"{SINGLE}/{name}" if several else SINGLE] = pair
    return sums


def number_of(scalar: Tensor) -> Number:
    """Return a tensor on an accelerator, because reading the number would make the host wait."""
    return (
        scalar.detach().double()
        if accelerator.has_streams(scalar.device)
        else float(scalar.detach())
    )


def numbers_on_host(numbers: Sequence[Number]) -> list[float]:
    """Wait once for all numbers that are on a device."""
    on_device = [number for number in numbers if isinstance(number, Tensor)]
    read = iter(
        torch.stack([number.to(on_device[0].device) for number in on_device]).tolist()
        if on_device
        else ()
    )
    return [next(read) if isinstance(number, Tensor) else number for number in numbers]


def weights_of(raw: Any) -> Weights:
    named = raw if isinstance(raw, Mapping) else {SINGLE: raw}
    _check_names("weight", named)
    weights = {name: _number(name, value) for name, value in named.items()}
    for name, value in weights.items():
        if not 0 <= value < float("inf"):
            raise LossError(
                f"the weight of term {name!r} is {value}; it counts what the term sums over and is"
                " finite and not negative"
            )
    return weights


def _check_terms(loss: Any, weights: Weights | None) -> None:
    if not isinstance(loss, Tensor) and isinstance(loss, Mapping):
        if not loss:
            raise LossError(
                "the loss is an empty dict; give it one term at least, or return the loss itself"
            )
        _check_names("loss", loss)
        if weights is not None:
            _check_same_names(loss, weights)
    elif weights is not None and weights.keys() != {SINGLE}:
        _check_same_names({SINGLE: loss}, weights)


def _check_names(whose: str, terms: Mapping[Any, Any]) -> None:
    for name in terms:
        if not isinstance(name, str):
            raise LossError(
                f"the {whose} has a term named {name!r} (a {type(name).__name__}); a name is text,"
                f" under which the term is recorded; name it {str(name)!r}, in the loss and in the"
                " weight"
            )


def _check_same_names(terms: Mapping[str, Any], weights: Weights) -> None:
    if missing := set(weights) ^ {name for name, term in terms.items() if isinstance(term, Sum)}:
        raise LossError(
            f"the loss has terms {sorted(terms)} and the weight has {sorted(weights)};"
            f" {sorted(missing)} is not a Sum in one and a weight in the other; a weight goes with"
            " each ls.Sum of the loss, by the same name"
        )


def _repeats(name: str, term: Any, batch: Any, samples: int) -> int:
    return 1 if isinstance(term, Sum) else rows_per_sample(name, batch, samples)


def _scale(name: str, term: Any, fraction: float, weights: Weights | None) -> float:
    if not isinstance(term, Sum) or weights is None:
        return fraction
    return 1.0 / weights[name] if weights[name] else 0.0


def _check_zero(name: str, term: Any, total: Tensor, weights: Weights | None) -> None:
    if (
        weights is not None
        and isinstance(term, Sum)
        and not weights[name]
        and (value := float(total.detach())) != 0.0
    ):
        raise LossError(no_weight(name, value))


def no_weight(term: str, value: float) -> str:
    return (
        f"term {term!r} of the loss is {value:.6g} in a global batch in which its weights add up to"
        " 0; a term that counts nothing is the sum of nothing, 0: return ls.Sum(total) of a sum"
        " (not of a mean, which is NaN for nothing), or let the weight count what the term sums"
        " over"
    )


def _term(
    name: str, term: Any, *, batch: Any, weights: Weights | None, learns: bool = True
) -> Tensor:
    if isinstance(term, Loss):
        raise LossError(
            f"term {name!r} of the loss is an ls.Loss; several terms have several denominators,"
            " which must be known before the forward; return {name: ls.Sum(total)} and give"
            " Recipe.weight = batch -> {name: denominator}"
        )
    if isinstance(term, Sum):
        if weights is None:
            raise LossError(
                f"term {name!r} of the loss is an ls.Sum, and there is no weight to divide it by;"
                " give Recipe.weight = batch -> its denominator, or return ls.Loss(total, weight)"
            )
        return _checked(name, term.total, learns)
    total = _checked(name, term, learns)
    if weights is not None and name in weights:
        raise LossError(
            f"term {name!r} of the loss is a plain scalar, the mean over this microbatch's samples,"
            " and Recipe.weight gives it another denominator; return ls.Sum(total), the sum over"
            " what the weight counts, or drop the weight"
        )
    if (where := _ignore_index_in(batch)) is not None:
        part = f"batch{where}"
        raise LossError(
            f"term {name!r} of the loss is a plain scalar, and {part} holds the ignore index"
            f" {IGNORE_INDEX}; a mean over tokens that are not ignored would be weighted as a mean"
            f" over samples; return ls.Sum(total) with Recipe.weight = batch -> ({part} !="
            f" {IGNORE_INDEX}).sum(), or ls.Loss(total, weight); where {part} is no label, return"
            " ls.Sum(loss * n) with Recipe.weight = batch -> n, the samples of the microbatch"
        )
    return total


def _forward_known(
    loss: Loss, weights: Weights | None, prescale: Tensor, *, learns: bool = True
) -> Contribution:
    if weights is not None:
        raise LossError(
            "the loss is an ls.Loss, which brings its own weight, and Recipe.weight is given too;"
            " return ls.Sum, or drop the weight"
        )
    total = _checked(SINGLE, loss.total, learns)
    value = _recorded(total)
    if isinstance(loss.weight, Tensor) and loss.weight.numel() != 1:
        raise LossError(
            f"the weight of ls.Loss has shape {tuple(loss.weight.shape)}; it must be a number or a"
            " scalar tensor"
        )
    if isinstance(loss.weight, Tensor):
        weight = loss.weight.detach().to(total.device, value.dtype, non_blocking=True).reshape(())
    else:
        weight = torch.full(
            (), _number(SINGLE, loss.weight), dtype=value.dtype, device=total.device
        )
    return Contribution(total, _grad_output(total, value, 1.0 / prescale), value, weight, {})


@lru_cache(maxsize=64)
def _constant(value: float, dtype: torch.dtype) -> Tensor:
    """Return a cached scalar. The cached tensor must not be changed in place."""
    return torch.tensor(value, dtype=dtype)


def _recorded(total: Tensor) -> Tensor:
    value = total.detach()
    return value if value.dtype in (torch.float32, torch.float64) else value.float()


def _grad_output(total: Tensor, value: Tensor, scale: float | Tensor) -> Tensor:
    return ((value - value) + scale).to(total.dtype)


def _checked(name: str, total: Any, learns: bool) -> Tensor:
    if not isinstance(total, Tensor):
        raise not_a_scalar(name, total)
    if total.numel() != 1:
        raise LossError(
            f"term {name!r} of the loss has shape {tuple(total.shape)}; it must be a scalar; take"
            " its mean() if it has one value per sample, or return ls.Sum of its sum() with"
            " Recipe.weight"
        )
    if total.is_complex():
        raise LossError(
            f"term {name!r} of the loss is complex ({total.dtype}); only a real number can be"
            " minimized; take its .abs() or its .real"
        )
    if learns and not total.requires_grad:
        raise LossError(
            f"term {name!r} of the loss has no gradient; it must depend on the model's parameters"
            " through differentiable operations: look for .detach(), torch.no_grad() or an argmax"
            " on the way"
        )
    return total.reshape(()) if total.dim() else total


def _number(name: Any, value: Any) -> float:
    if (isinstance(value, Tensor) and value.numel() == 1) or (
        isinstance(value, Real) and not isinstance(value, bool)
    ):
        return float(value)
    kind = (
        f"of shape {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else f"a {type(value).__name__}"
    )
    raise LossError(
        f"the weight of term {name!r} is {kind}; it must be a number or a scalar tensor: the"
        " denominator of the term in this microbatch"
    )


def _ignore_index_in(batch: Any) -> str | None:
    """Return where in the batch a tensor contains torch's ignore index, such as "['labels'][1]".
    Return the empty string if the batch itself is this tensor, and None if no tensor contains
    it."""
    if isinstance(batch, Tensor):
        if batch.dtype not in (torch.int64, torch.int32) or not batch.is_cpu or not batch.numel():
            return None
        return "" if int(batch.min()) < 0 and bool((batch == IGNORE_INDEX).any()) else None
    if not isinstance(batch, list | tuple | Mapping):
        return None
    for name, part in enumerate(batch) if isinstance(batch, list | tuple) else batch.items():
        if (where := _ignore_index_in(part)) is not None:
            return f"[{name!r}]{where}"
    return None
