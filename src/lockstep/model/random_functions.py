"""The torch functions that draw random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F, init

DROPOUT = frozenset({F.dropout, torch.dropout, torch.dropout_})
_IF_TRAINING: dict[Any, tuple[int, bool]] = {
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d), (2, True)),
    **dict.fromkeys((F.alpha_dropout, F.feature_alpha_dropout), (2, False)),
    **{
        getattr(torch, f"{name}{end}"): (2, True)
        for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
        for end in ("", "_")
    },
    **dict.fromkeys((F.rrelu, torch.rrelu, torch.rrelu_), (3, False)),
}
"""Maps functions that draw in training only to the position and the default of their argument
`training`."""
RANDOM = frozenset(_IF_TRAINING) | {
    getattr(owner, name)
    for owner, names in {
        init: "kaiming_normal_ kaiming_uniform_ normal_ orthogonal_ sparse_ trunc_normal_ uniform_"
        " xavier_normal_ xavier_uniform_",
        F: "fractional_max_pool2d fractional_max_pool3d gumbel_softmax",
        torch: "bernoulli binomial multinomial native_dropout normal poisson rand rand_like randint"
        " randint_like randn randn_like randperm _standard_gamma",
        Tensor: "bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ multinomial"
        " normal_ random_ uniform_",
    }.items()
    for name in names.split()
}


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    if func not in RANDOM:
        return False
    place, training = _IF_TRAINING.get(func, (0, None))
    if training is None:
        return True
    if place == 2 and not (args[1] if len(args) > 1 else kwargs.get("p", 0.5)):
        return False
    given = args[place] if len(args) > place else kwargs.get("training", training)
    return bool(kwargs.get("train", given))


def writes(func: Any, args: Any, kwargs: Any) -> bool:
    if func.__name__.endswith("_"):
        return True
    place = _IF_TRAINING.get(func, (0, None))[0] + 1
    return place > 1 and bool(args[place] if len(args) > place else kwargs.get("inplace", False))
