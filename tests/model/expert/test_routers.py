"""The recorder of routers' choices."""

from __future__ import annotations

import pytest
import torch
from model.mixtures import CHOSEN, EXPERTS, WIDTH, MixtureBlock
from torch import Tensor

from lockstep.model.expert.routers import RoutingRecorder, find_routers


class Misrouted(MixtureBlock):
    """Chooses experts that do not exist."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        index = torch.arange(2 * len(tokens)).view(-1, CHOSEN)
        return self.experts(tokens, index, self.router(tokens)[:, :CHOSEN])  # type: ignore[no-any-return]


def watched(block: MixtureBlock) -> tuple[torch.nn.Module, RoutingRecorder]:
    model = torch.nn.Sequential(block)
    return model, RoutingRecorder(model, find_routers(model, None, None))


def test_the_choices_of_a_compiled_block_are_recorded() -> None:
    block = MixtureBlock(0.0)
    model, recorder = watched(block)
    x = torch.randn(3, WIDTH)
    recorder.start()
    model(x)
    (expected,) = recorder.take()
    block.forward = torch.compile(block.forward, backend="eager", dynamic=False)  # type: ignore[method-assign]
    model(x)
    assert recorder.take()[0].logits == []
    recorder.start()
    model(x).sum().backward()
    (found,) = recorder.take()
    assert torch.equal(found.logits[0], expected.logits[0])
    assert found.logits[0].requires_grad
    assert torch.equal(found.index[0], expected.index[0])
    assert len(found.logits) == len(found.index) == 1


def test_a_choice_out_of_range_is_recorded_and_not_computed() -> None:
    model, recorder = watched(Misrouted(0.0))
    x = torch.randn(EXPERTS, WIDTH)
    recorder.start()
    model(x)
    assert int(recorder.take()[0].index[0].max()) == 2 * EXPERTS - 1
    with pytest.raises(IndexError):  # that no step records
        model(x)
