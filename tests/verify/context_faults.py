"""Faulty engines whose ranks share out sequences, each with a mistake of other libraries'
history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from verify.context_engine import IGNORED, LENGTH, ContextEngine
from verify.engine import Gradients, added


class StaleKeysInTheBackward(ContextEngine):
    """The backward takes keys and values of another moment than the forward (diffusers #14265)."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        if self.context == 1:
            return super().attend(query, key, value, mask)
        attended: Tensor = _Stale.apply(query, key, value, mask)  # type: ignore[no-untyped-call]
        return attended


class _Stale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(query, key.roll(LENGTH // 2, 1), value.roll(LENGTH // 2, 1), mask)
        return functional.scaled_dot_product_attention(query, key, value, mask)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        *given, mask = ctx.saved_tensors
        with torch.enable_grad():
            given = [each.detach().requires_grad_() for each in given]
            again = functional.scaled_dot_product_attention(*given, mask)
        return *torch.autograd.grad(again, given, gradients), None


class OwnKeysGradientAlone(ContextEngine):
    """The gradients of other ranks' keys and values are dropped: wrong dK and dV (reported as
    Megatron-LM #1464)."""

    def gathered(self, rank: int, parts: Sequence[Tensor]) -> list[Tensor]:
        own = rank % self.context
        return [part if at == own else part.detach() for at, part in enumerate(parts)]


class PairDropped(ContextEngine):
    """The last token of each run of a rank's tokens has no label there (LlamaFactory #10475)."""

    factor_at_cuts = 0.0

    def losses(self, rank: int, each: Tensor) -> Tensor:
        at = self.places(rank)
        ends = torch.ones(len(at), dtype=torch.bool)
        ends[:-1] = at.diff() != 1
        return torch.where(ends & (at != LENGTH - 1), each * self.factor_at_cuts, each)


class PairTwice(PairDropped):
    factor_at_cuts = 2.0


class LabelsShiftedInAPart(ContextEngine):
    """Each rank shifts the labels of its own tokens."""

    def labels(self, rank: int, labels: Tensor) -> Tensor:
        if self.context == 1:
            return super().labels(rank, labels)
        own = labels.roll(1, 1)[:, self.places(rank)].roll(-1, 1)
        own[:, -1] = IGNORED
        return own


class DoublePositions(ContextEngine):
    """Each rank counts the positions of its own tokens from 0."""

    def positions(self, rank: int) -> Tensor:
        return torch.arange(len(self.places(rank)))


class PositionsInOrder(ContextEngine):
    """Tokens are shared out in paired order, and positions in the order of ranks."""

    def positions(self, rank: int) -> Tensor:
        counts = [len(self.places(each)) for each in range(self.context)]
        first = sum(counts[: rank % self.context])
        return torch.arange(first, first + counts[rank % self.context])


class TokenOnTwoRanks(ContextEngine):
    """Parts of the sequence overlap: the last rank takes the token before its first instead."""

    def places(self, rank: int) -> Tensor:
        found = super().places(rank)
        if self.context > 1 and rank % self.context == self.context - 1:
            found[0] -= 1
        return found


class GradientOfOnePart(ContextEngine):
    """Gradients are summed over replicas alone."""

    def over_context(self, parts: list[Gradients], rank: int) -> Gradients:
        return parts[rank]


class MeanOverContext(ContextEngine):
    def over_context(self, parts: list[Gradients], rank: int) -> Gradients:
        return {name: each / self.context for name, each in added(parts).items()}


class PackedEngine(ContextEngine):
    packed = True


class MaskOfOnes(PackedEngine):
    """Attention gets a mask of ones, and forgets the documents (transformers with an
    attention_mask)."""

    def documents(self, documents: Tensor) -> Tensor:
        return torch.zeros_like(documents) if self.context > 1 else documents


class Replicated(ContextEngine):
    replicas = 2


class GradientOfOnePartReplicated(GradientOfOnePart):
    replicas = 2
