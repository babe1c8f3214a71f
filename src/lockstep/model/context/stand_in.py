"""A tensor that the backward of an attention reads instead of the attention's output. With
`exchange="heads"`, each rank computes all tokens in some heads, and the output would be saved
twice. The output projection saves a rank's tokens of all heads, and the attention's backward reads
all tokens of some heads.

The attention's backward uses the output only in the sum of output times gradient for each token and
head. The stand-in is zero except for one or two numbers for each token and head, which give the
same sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

NEAR = 2.0**-8
"""The stand-in's second number, at the gradient's second largest element, corrects the sum's
rounding error. The stand-in has no second number if the element is smaller than this fraction of
the largest element."""


class StandIn:
    """Replaces the output of one attention in the backward. The shape is (samples, heads, tokens,
    features)."""

    def __init__(self, output: Tensor) -> None:
        self._place = output.size(), output.stride(), output.storage_offset()
        self._numbers = output.untyped_storage().nbytes() // output.element_size()
        self._gradient: Tensor
        self._sums: Tensor

    def receive(self, gradient: Tensor, sums: Tensor) -> None:
        self._gradient, self._sums = gradient, sums

    def make(self) -> Tensor:
        """Return the stand-in, with the output's memory order."""
        gradient, sums = self._gradient, self._sums.view(wide(self._gradient.dtype))
        del self._gradient, self._sums
        stand_in = gradient.new_zeros(self._numbers)
        places = gradient.abs().topk(min(2, gradient.shape[-1]), -1).indices
        largest = gradient.gather(-1, places).to(sums.dtype)
        first, second = largest[..., :1], largest[..., 1:]
        main = torch.where(first == 0, 0, sums / first).to(gradient.dtype)
        rest = sums - main * first
        is_near = second.abs() > NEAR * first.abs()
        minor = torch.where(is_near, rest / second, 0).to(gradient.dtype)
        stand_in.as_strided(*self._place).scatter_(-1, places, torch.cat([main, minor], -1))
        return stand_in


def sums_of(output: Tensor, gradient: Tensor) -> Tensor:
    """Return the sum over features of output times gradient, in at least float32, as a view of the
    gradient's dtype."""
    dtype = wide(gradient.dtype)
    sums = (output.to(dtype) * gradient.to(dtype)).sum(-1, keepdim=True)
    return sums.view(gradient.dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
