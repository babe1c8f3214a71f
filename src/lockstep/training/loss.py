"""What a user's loss and weight functions may return, and what it means: terms of Σ total / Σ weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.errors import LossError
from lockstep.recipe import Loss, Sum

IGNORE_INDEX = -100
"""The label that torch's cross entropy leaves out by default."""
SINGLE = "loss"
"""The name of the only term where the loss is not a dict."""
Weights = dict[str, float]


class Contribution(NamedTuple):
    """One microbatch's part of a step: the gradient of `seed * total` belongs to it, and `value` and `weight` go to its record."""

    total: Tensor
    """Scalar with a gradient."""
    seed: Tensor
    """Scalar. NaN where the loss is not finite, so that the summed gradient shows it to every rank."""
    value: Tensor | float
    """Scalar: this microbatch's part of the step's loss; its raw total where only the forward knows the weight."""
    weight: Tensor | None
    """Scalar: the weight, where only the forward knows it."""
    terms: dict[str, Tensor]
    """Each term's part of the step's loss, where there are several."""


def contribution(loss: Any, *, samples: int, step_samples: int, batch: Any, weights: Weights | None, prescale: Tensor) -> Contribution:
    """Read what a loss function returned for a microbatch of `samples` in a step of `step_samples`. Raises `LossError`.

    `weights`: each term's denominator over the whole step, where `Recipe.weight` gives it. `prescale`: what a total is divided by before
    its backward where only the forward knows the weight.
    """
    if isinstance(loss, Loss):
        return _forward_known(loss, weights, prescale)
    if not isinstance(loss, Mapping):
        if weights is not None and weights.keys() != {SINGLE}:
            _check_names({SINGLE: loss}, weights)
        total, scale = _term(SINGLE, loss, samples=samples, step_samples=step_samples, batch=batch, weights=weights)
        if total.is_cpu:
            number = total.item()
            return Contribution(total, _constant(scale if math.isfinite(number) else math.nan, total.dtype), number * scale, None, {})
        value = _recorded(total) * scale
        return Contribution(total, _seed(total, value, scale), value, None, {})
    if not loss:
        raise LossError("the loss is an empty dict; give it one term at least, or return the loss itself")
    if weights is not None:
        _check_names(loss, weights)
    scaled = {}
    for name, term in loss.items():
        total, scale = _term(name, term, samples=samples, step_samples=step_samples, batch=batch, weights=weights)
        scaled[name] = total * scale
    total = sum(scaled.values(), start=torch.zeros((), device=next(iter(scaled.values())).device))
    value = _recorded(total)
    terms = {name: term.detach() for name, term in scaled.items()}
    return Contribution(total, _seed(total, value, 1.0), value, None, terms)


def weights_of(raw: Any) -> Weights:
    """Read what a weight function returned for one microbatch: each term's name and denominator. Raises `LossError`."""
    weights = {str(name): _number(name, value) for name, value in (raw.items() if isinstance(raw, Mapping) else [(SINGLE, raw)])}
    for name, value in weights.items():
        if not 0 <= value < float("inf"):
            raise LossError(f"the weight of term {name!r} is {value}; it counts what the term sums over and is finite and not negative")
    return weights


def _check_names(terms: Mapping[str, Any], weights: Weights) -> None:
    if missing := set(weights) ^ {name for name, term in terms.items() if isinstance(term, Sum)}:
        raise LossError(
            f"the loss has terms {sorted(terms)} and the weight has {sorted(weights)}; {sorted(missing)} is not a Sum in one and a "
            "weight in the other; a weight goes with each ls.Sum of the loss, by the same name"
        )


def _term(name: str, term: Any, *, samples: int, step_samples: int, batch: Any, weights: Weights | None) -> tuple[Tensor, float]:
    """A term's total as it came, and what to multiply it by: 1 / Σ weight."""
    if isinstance(term, Loss):
        raise LossError(
            f"term {name!r} of the loss is an ls.Loss; several terms have several denominators, which must be known before the forward; "
            "return {name: ls.Sum(total)} and give Recipe.weight = batch -> {name: denominator}"
        )
    if isinstance(term, Sum):
        if weights is None:
            raise LossError(
                f"term {name!r} of the loss is an ls.Sum, and there is no weight to divide it by; give Recipe.weight = batch -> its "
                "denominator, or return ls.Loss(total, weight)"
            )
        return _checked(name, term.total), 1.0 / weights[name]
    total = _checked(name, term)
    if weights is not None and name in weights:
        raise LossError(
            f"term {name!r} of the loss is a plain scalar, the mean over this microbatch's samples, and Recipe.weight gives it another "
            "denominator; return ls.Sum(total), the sum over what the weight counts, or drop the weight"
        )
    if _holds_ignore_index(batch):
        raise LossError(
            f"term {name!r} of the loss is a plain scalar, and the batch holds the ignore index {IGNORE_INDEX}; a mean over tokens "
            "that are not ignored would be weighted as a mean over samples; return ls.Sum(total) with Recipe.weight = batch -> "
            f"(labels != {IGNORE_INDEX}).sum(), or ls.Loss(total, weight)"
        )
    return total, samples / step_samples


def _forward_known(loss: Loss, weights: Weights | None, prescale: Tensor) -> Contribution:
    if weights is not None:
        raise LossError(
            "the loss is an ls.Loss, which brings its own weight, and Recipe.weight is given too; return ls.Sum, or drop the weight"
        )
    total = _checked(SINGLE, loss.total)
    value = _recorded(total)
    if isinstance(loss.weight, Tensor) and loss.weight.numel() != 1:
        raise LossError(f"the weight of ls.Loss has shape {tuple(loss.weight.shape)}; it is a number or a scalar tensor")
    if isinstance(loss.weight, Tensor):
        weight = loss.weight.detach().to(total.device, value.dtype, non_blocking=True).reshape(())
    else:
        weight = torch.full((), loss.weight, dtype=value.dtype, device=total.device)
    return Contribution(total, _seed(total, value, 1.0 / prescale), value, weight, {})


@lru_cache(maxsize=64)
def _constant(value: float, dtype: torch.dtype) -> Tensor:
    """A scalar on the CPU, made once. Backward only reads it."""
    return torch.tensor(value, dtype=dtype)


def _recorded(total: Tensor) -> Tensor:
    value = total.detach()
    return value if value.dtype in (torch.float32, torch.float64) else value.float()


def _seed(total: Tensor, value: Tensor, scale: float | Tensor) -> Tensor:
    return ((value - value) + scale).to(total.dtype)


def _checked(name: str, total: Any) -> Tensor:
    if not isinstance(total, Tensor):
        raise LossError(
            f"term {name!r} of the loss is {total!r} (a {type(total).__name__}); it must be a scalar tensor with a gradient: do not call "
            ".item() or float() on it"
        )
    if total.numel() != 1:
        raise LossError(f"term {name!r} of the loss has shape {tuple(total.shape)}; it must be a scalar; take its mean() or sum()")
    if not total.requires_grad:
        raise LossError(
            f"term {name!r} of the loss has no gradient; it must depend on the model's parameters through differentiable operations: look "
            "for .detach(), torch.no_grad() or an argmax on the way"
        )
    return total.reshape(()) if total.dim() else total


def _number(name: Any, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, Real) and not isinstance(value, bool):
        return float(value)
    kind = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise LossError(
        f"the weight of term {name!r} is {kind}; it is a number or a scalar tensor: the denominator of the term in this microbatch"
    )


def _holds_ignore_index(batch: Any) -> bool:
    if isinstance(batch, Tensor):
        if batch.dtype not in (torch.int64, torch.int32) or not batch.is_cpu or not batch.numel():
            return False
        return int(batch.min()) < 0 and bool((batch == IGNORE_INDEX).any())
    if isinstance(batch, Mapping):
        batch = batch.values()
    elif not isinstance(batch, list | tuple):
        return False
    for part in batch:  # noqa: SIM110  # a generator costs a microsecond, every microbatch
        if _holds_ignore_index(part):
            return True
    return False
