"""`Sequence`, the field of a recipe for sequences of tokens and the documents in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.base.errors import RecipeError
from lockstep.base.field_docs import with_field_docs
from lockstep.recipe.checks import check_callable, check_count, in_words


@with_field_docs
@dataclass(frozen=True, kw_only=True, slots=True)
class Sequence:
    """The layout of the token sequences in a batch, and the chunks into which context parallelism
    cuts them. Raises `RecipeError`."""

    dim: int = 1
    """The dim of tokens in the model's inputs and output. Dim 0 is the samples."""
    chunks: int = 16
    """Number of chunks in each sequence. Each chunk has its own random numbers, which do not depend
    on the plan. The axis `context` can have at most half as many ranks as chunks."""
    documents: Callable[[Any], Any] | None = None
    """Function of the collated batch that returns the id of each token's document: integers of
    shape (samples, tokens). Tokens attend only to tokens of the same document. None: each sample is
    one document."""
    positions: str | None = None
    """The model's keyword argument that takes the positions of tokens, such as `position_ids`.
    None: the model computes the positions itself."""

    def __post_init__(self) -> None:
        check_count("Sequence.dim", self.dim, "dims before that of the tokens (dim 0: samples)")
        check_count("Sequence.chunks", self.chunks, "chunks of a sequence")
        check_callable("Sequence.documents", self.documents, optional=True)
        if self.positions is not None and not (
            isinstance(self.positions, str) and self.positions.isidentifier()
        ):
            raise RecipeError(
                f"Sequence.positions is {in_words(self.positions)}; it must be the name of a"
                " keyword argument of the model's forward, such as 'position_ids', or None"
            )
