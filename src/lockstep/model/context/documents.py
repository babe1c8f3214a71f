"""Documents packed into the rows of a batch, and positions that restart at each document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lockstep.base import accelerator
from lockstep.base.dtypes import dtype_name
from lockstep.base.errors import DataError
from lockstep.base.torch_private import assert_async

PADDING = -1
"""The id of tokens that belong to no document, at the end of a row."""
RULE = (
    "each row has its documents one behind the other, with ids that never decrease, such as"
    f" [0, 0, 0, 1, 1]; padding at its end has the id {PADDING}"
)


@dataclass(frozen=True)
class Documents:
    """The documents in the rows of one microbatch."""

    ids: Tensor
    """The number of each token's document, counted from 0 in each row. Padding counts as the last
    document."""
    positions: Tensor
    """The position of each token in its document."""

    @classmethod
    def of(cls, ids: Any, device: torch.device) -> Documents:
        """On an accelerator, the order of ids along a row is asserted on the device. The host does
        not wait for the device."""
        ids = _checked(ids).to(device).long()
        # padding comes last
        order = torch.where(ids == PADDING, torch.iinfo(torch.long).max, ids)
        steps = order.diff(dim=1)
        wrong = (order < 0) | torch.nn.functional.pad(steps < 0, (1, 0))
        if accelerator.is_accelerator(ids):
            assert_async(~wrong.any(), f"the ids of documents are not in order: {RULE}")
        elif wrong.any():
            row, place = wrong.nonzero()[0].tolist()
            raise DataError(
                f"Sequence.documents: row {row} has the id {ids[row, place]} at token {place}"
                + (f", after {ids[row, place - 1]}" if place else "")
                + f"; {RULE}"
            )
        begins = torch.nn.functional.pad(steps != 0, (1, 0))
        indices = torch.arange(ids.shape[1], device=device)
        first = torch.where(begins, indices, 0).cummax(1).values
        return cls(begins.cumsum(1), indices - first)

    @property
    def tokens(self) -> int:
        return self.ids.shape[1]

    @cached_property
    def lengths(self) -> list[list[int]]:
        """The number of tokens of each document, for each row. On an accelerator, the host waits
        for the device once per microbatch."""
        return [row.unique_consecutive(return_counts=True)[1].tolist() for row in self.ids.cpu()]

    def places(self, indices: Tensor) -> Tensor:
        positions = self.positions[:, indices]
        return positions[0] if len(positions) == 1 else positions

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return a mask of shape (samples, 1, queries, keys). The mask is True within a
        document."""
        return self.ids[:, None, queries, None] == self.ids[:, None, None, keys]

    def by_document(
        self,
        compute: Callable[[int, int, Tensor, Tensor, Tensor], Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        """Return the attention of whole rows, computed for one document after another."""
        rows = []
        samples = zip(*(torch.split(each, 1) for each in (query, key, value)), strict=True)
        for row, (sample, lengths) in enumerate(zip(samples, self.lengths, strict=True)):
            parts = zip(*(torch.split(each, lengths, 2) for each in sample), strict=True)
            firsts = accumulate(lengths, initial=0)
            outputs = [compute(row, first, *part) for first, part in zip(firsts, parts)]  # noqa: B905  # one more first
            rows.append(torch.cat(outputs, 2))
        return torch.cat(rows)

    def earliest_key(self, token: int) -> int:
        return token - int(self.positions[:, token].max())

    def lasts(self) -> Tensor:
        """Return a mask of shape (samples, tokens). The mask is True at the last token of a
        document, except for the last document in a row."""
        return torch.nn.functional.pad(self.ids.diff(dim=1) != 0, (0, 1))


def _checked(ids: Any) -> Tensor:
    if isinstance(ids, list | tuple) and all(isinstance(row, Tensor) for row in ids):
        lengths = sorted({len(row) for row in ids})
        if len(lengths) > 1:
            raise DataError(
                f"Sequence.documents returned rows of {lengths[0]} to {lengths[-1]} tokens; the"
                f" rows of a batch have one length; pad them in collate, with the id {PADDING}"
            )
        ids = torch.stack([*ids])
    if (
        not isinstance(ids, Tensor)
        or ids.dim() != 2
        or ids.is_nested
        or ids.is_floating_point()
        or ids.dtype == torch.bool
    ):
        problem = (
            f"{dtype_name(ids.dtype)} of shape {tuple(ids.shape)}"
            if isinstance(ids, Tensor) and not ids.is_nested
            else f"a {'nested tensor' if isinstance(ids, Tensor) else type(ids).__name__}"
        )
        raise DataError(
            f"Sequence.documents returned {problem}; it must return the document of each token, a"
            " tensor of whole numbers of shape (samples, tokens); write lambda batch:"
            " batch['document']"
        )
    return ids
