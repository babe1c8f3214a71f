"""Checks of a recipe's values."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeGuard, get_args

from lockstep.base.errors import LossError, RecipeError

Precision = Literal["fp32", "bf16", "fp16"]
COMPRESSIONS = ("none", "bf16", "fp16", "int8")
"""Values of `gradient_compression`, besides `powersgd:RANK`."""


def in_words(value: Any) -> str:
    return f"{value!r} (a {type(value).__name__})"


def not_a_scalar(term: str, total: Any) -> LossError:
    return LossError(
        f"term {term!r} of the loss is {in_words(total)}; it must be a scalar tensor with a"
        " gradient: do not call .item() or float() on it"
    )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_int_or_float(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_count(name: str, value: Any, unit: str) -> None:
    if not _is_int(value) or value < 1:
        raise RecipeError(
            f"{name}={value!r}; it counts {unit} and must be a whole number of at least 1"
        )


def check_batch(global_batch: Any, microbatch: Any, *, of: str = "") -> None:
    check_count(f"{of}global_batch", global_batch, "samples")
    if microbatch is None:
        return
    check_count(f"{of}microbatch", microbatch, "samples")
    if microbatch > global_batch:
        raise RecipeError(
            f"microbatch={microbatch} is larger than global_batch={global_batch}; a microbatch is"
            f" a part of a global batch; give microbatch={global_batch} or less, or a larger"
            " global_batch"
        )


def check_length(steps: Any, epochs: Any, *, of: str = "") -> None:
    if (steps is None) == (epochs is None):
        raise RecipeError(
            f"steps={steps} and epochs={epochs}; a recipe has one length; give exactly one of"
            " the two"
        )
    if steps is not None:
        check_count(f"{of}steps", steps, "steps")
    if epochs is not None:
        check_count(f"{of}epochs", epochs, "epochs")


def check_drop_last(value: Any, epochs: Any, samples: int | None, global_batch: int) -> None:
    if not isinstance(value, bool):
        raise RecipeError(
            f"drop_last={value!r}; it must be True to leave out the last batch of an epoch if it"
            " is short, or False"
        )
    if value and epochs is None:
        raise RecipeError(
            "drop_last=True without epochs; with steps, a batch may span two epochs, so none is"
            " short; leave it out"
        )
    if value and samples is not None and samples < global_batch:
        raise RecipeError(
            f"drop_last=True with {samples} samples and global_batch={global_batch}; the only batch"
            " of each epoch is short, so nothing would be left; give a smaller global_batch, or"
            " drop_last=False"
        )


def check_clip_norm(value: Any) -> None:
    if value is not None and not (is_int_or_float(value) and 0 < value < math.inf):
        raise RecipeError(
            f"clip_norm={value!r}; a maximum norm is positive and finite; None turns clipping off"
        )


def check_precision(value: Any) -> None:
    if value == "auto":
        raise RecipeError(
            "precision='auto' in your own loop; only ls.train has a loss to measure with; give a"
            " precision: 'fp32'"
        )
    if value not in get_args(Precision):
        raise RecipeError(
            f"precision={value!r}; the known values are {', '.join(get_args(Precision))}, and with"
            " ls.train auto"
        )


def check_compression(value: Any) -> None:
    if value in COMPRESSIONS:
        return
    if not isinstance(value, str) or value.partition(":")[0] != "powersgd":
        raise RecipeError(
            f"gradient_compression={value!r}; the known values are {', '.join(COMPRESSIONS)} and"
            " powersgd:RANK, such as powersgd:4"
        )
    if powersgd_rank(value) is None:
        raise RecipeError(
            f"gradient_compression={value!r}; the rank of powersgd is a whole number of at least 1"
            " after a colon; a higher rank is more exact and sends more bytes; write for example"
            " gradient_compression='powersgd:4'"
        )


def powersgd_rank(gradient_compression: str) -> int | None:
    word, _, rank = gradient_compression.partition(":")
    return (
        int(rank)
        if word == "powersgd" and rank.isascii() and rank.isdecimal() and int(rank)
        else None
    )


def has_error_feedback(gradient_compression: str) -> bool:
    """True if the compression error of a step is added to the next step's gradient."""
    return gradient_compression == "int8" or gradient_compression.startswith("powersgd")


def check_seed(value: Any) -> None:
    if not _is_int(value) or not 0 <= value < 2**63:
        raise RecipeError(f"seed={value!r}; a seed is a whole number from 0 to 2**63 - 1")


def check_factory(name: str, value: Any, *, remedy: str) -> None:
    if hasattr(value, "state_dict") and not isinstance(value, type):
        raise RecipeError(
            f"{name} is a {type(value).__name__}, not a function that makes one; every process"
            f" builds its own, after seeding and as the plan lays it out; give a function: {remedy}"
        )
    check_callable(name, value, optional=False)


def check_callable(name: str, value: Any, *, optional: bool) -> None:
    if not callable(value) and not (optional and value is None):
        raise RecipeError(
            f"{name} is {in_words(value)}; it must be a function{' or None' if optional else ''}"
        )
    try:
        hasattr(value, "__wrapped__")
    except Exception as error:
        raise RecipeError(
            f"{name} is a {type(value).__name__}, whose __getattr__ raises {type(error).__name__}"
            " for an attribute that it does not have; hasattr and getattr expect AttributeError;"
            " raise AttributeError(name) there"
        ) from error
