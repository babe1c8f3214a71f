"""`Balance`, the field of a recipe for load balancing of a mixture of experts."""

from __future__ import annotations

import math
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lockstep.base.errors import RecipeError
from lockstep.base.field_docs import with_field_docs
from lockstep.recipe.checks import check_callable, in_words, is_int_or_float

Over = Literal["microbatch", "step", "previous", "sample"]
Scores = Literal["softmax", "sigmoid"]


@with_field_docs
@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """Keeps the load of experts even, and measures it. An expert's load is the number of tokens
    that it gets. Each balance term is added to the loss with its own denominator. Raises
    `RecipeError`."""

    coefficient: float = 0.0
    """Factor of each layer's balance loss, E Σ f P over its E experts. f is the number of tokens
    that choose the expert, divided by the number of tokens. P is the mean of the router's
    probability for the expert. 0: no balance loss."""
    over: Over = "microbatch"
    """The tokens over which f and P are measured. `microbatch`: the tokens of each microbatch.
    `step`: the global batch, exact for any size of microbatch. `sample`: each sample. `previous`: f
    over the previous step's global batch, P over this step's."""
    bias_rate: float = 0.0
    """Change of the router's bias after each step (DeepSeek-V3). The bias rises for experts with
    fewer tokens of the global batch than the mean, and falls for the other experts. 0: the bias is
    unchanged."""
    z: float = 0.0
    """Factor of the router z-loss of each layer, the mean over tokens of logsumexp(logits)**2. 0:
    no z-loss."""
    per_layer: bool = True
    """True: the sum of the layers' balance losses. False: one loss of f and P averaged over the
    layers (`aux_loss` of transformers). In the averaged loss, one layer can make up for another
    layer."""
    routers: abc.Sequence[str] | None = None
    """Names of the modules that return the routers' logits, in the order of the layers. `*` stands
    for any text. None: the sibling of each module of experts whose weight has a row for each
    expert."""
    scores: Scores = "softmax"
    """Function that turns logits into probabilities: `softmax`, or `sigmoid` divided by its sum
    (DeepSeek-V3)."""
    tokens: Callable[[Any], Any] | None = None
    """Function of the collated batch that returns a mask of shape (samples, tokens), True for each
    token that counts. None: the `attention_mask` that `inputs` returns. Without an
    `attention_mask`, every token counts, including padding."""

    def __post_init__(self) -> None:
        for name in ("coefficient", "bias_rate", "z"):
            _check_factor(name, getattr(self, name))
        for name, kind in (("over", Over), ("scores", Scores)):
            if getattr(self, name) not in get_args(kind):
                raise RecipeError(
                    f"Balance.{name}={getattr(self, name)!r}; the known values are"
                    f" {', '.join(get_args(kind))}"
                )
        if not isinstance(self.per_layer, bool):
            raise RecipeError(f"Balance.per_layer={self.per_layer!r}; it must be True or False")
        routers = self.routers
        if routers is not None and (
            isinstance(routers, str) or not all(isinstance(name, str) for name in routers)
        ):
            raise RecipeError(
                f"Balance.routers={routers!r}; it must be a list of module names or patterns, such"
                " as ['blocks.*.router'], or None"
            )
        check_callable("Balance.tokens", self.tokens, optional=True)

    @property
    def has_terms(self) -> bool:
        """True if the balance adds a term to the loss."""
        return self.coefficient > 0 or self.z > 0

    @property
    def is_of_microbatches(self) -> bool:
        """True if the balance loss depends on the grouping of samples into microbatches."""
        return self.coefficient > 0 and self.over == "microbatch"


def _check_factor(name: str, value: Any) -> None:
    if not is_int_or_float(value) or not 0 <= value < math.inf:
        raise RecipeError(
            f"Balance.{name} is {in_words(value)}; it must be a finite number of at least 0"
        )
