"""The output of a sequence model, from which `lockstep verify` traces each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.base.nested import tensors_in
from lockstep.evidence.tracer import Tracer
from lockstep.model.context.active import active


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """The output of one forward, for the tokens of this rank."""

    tensor: Tensor
    dim: int
    """The dimension of the output that indexes tokens."""
    places: Tensor
    """The index of each of this rank's tokens in the sequence."""
    documents: Tensor | None
    """The document of each token, of shape (samples, tokens of the whole sequence). None if each
    sample is one document."""

    @classmethod
    def of(cls, output: Any, dim: int) -> SequenceOutput | None:
        """Return the first tensor of a model's output that has tokens along `dim` and requires a
        gradient."""
        sequence = active()
        documents = None if sequence is None or sequence.documents is None else sequence.documents
        for each in tensors_in(output):
            if type(each) is not Tensor or each.dim() <= dim or not each.requires_grad:
                continue
            places = torch.arange(each.shape[dim]) if sequence is None else sequence.layout.places
            if len(places) == each.shape[dim]:
                return cls(each, dim, places, None if documents is None else documents.ids)
        return None

    def write(self, tracer: Tracer, module: int, index: int, gradient: Tensor | None) -> None:
        sketched = {"output": self.tensor}
        if gradient is not None:
            sketched["gradient"] = gradient
        tracer.tokens(
            module,
            index,
            places=self.places,
            documents=self.documents,
            **{name: each.movedim(self.dim, 1) for name, each in sketched.items()},
        )
