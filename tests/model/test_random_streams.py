"""The random streams of a model's parts on one process: what makes a pipeline's masks the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.model.random_streams import ModuleRandomStreams


class Parts(nn.Module):
    """Calls its parts as `how` says: as they are, or each recomputed in the backward, or two of
    them together."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(3)
        )
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "together":
            return checkpoint(
                lambda x: self.parts[2](self.parts[1](x)), self.parts[0](x), use_reentrant=False
            )  # type: ignore[no-any-return]
        for part in self.parts:
            x = (
                part(x)
                if self.how == "plain"
                else checkpoint(part, x, use_reentrant=self.how == "reentrant")
            )
        return x


def begin(key: int) -> None:
    torch.default_generator.manual_seed(key)


def streams_of(model: nn.Module) -> ModuleRandomStreams:
    return ModuleRandomStreams(model, ["parts.0", "parts.1", "parts.2"], begin)


X = torch.ones(4, 8, requires_grad=True)


def gradient(how: str, forwards: int) -> Tensor:
    """Of the sum of some forwards of one microbatch; another's forward lies between them and the
    backward."""
    model = Parts(how)
    streams = streams_of(model)
    streams.start((7, 0))
    loss = sum((place + 1) * model(X).sum() for place in range(forwards))
    streams.start((7, 1))
    model(X)
    return (
        torch.autograd.grad(loss, list(model.parameters()))[0]
        if how != "reentrant"
        else _backward(model, loss)
    )


def _backward(model: nn.Module, loss: Tensor) -> Tensor:
    loss.backward()
    found = next(model.parameters()).grad
    assert found is not None
    return found


@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("how", ["not reentrant", "reentrant", "together"])
def test_a_recomputed_part_draws_what_its_forward_drew(how: str, forwards: int) -> None:
    assert torch.equal(gradient(how, forwards), gradient("plain", forwards))


def test_a_part_draws_the_same_whatever_was_computed_before_it() -> None:
    model = Parts()
    streams = streams_of(model)
    streams.start((7, 0))
    x = model.parts[1](model.parts[0](X))
    whole = model.parts[2](x)
    streams.start((7, 0), part=2)
    assert torch.equal(model.parts[2](x), whole)
    streams.start((7, 1), part=2)
    assert not torch.equal(model.parts[2](x), whole)


def test_a_second_forward_of_a_microbatch_draws_anew_in_every_part() -> None:
    model = Parts()
    streams = streams_of(model)
    masks: list[list[Tensor]] = [[] for _ in model.parts]
    for place, part in enumerate(model.parts):
        part.register_forward_hook(lambda _, __, made, place=place: masks[place].append(made != 0))
    streams.start((7, 0))
    model(X)
    model(X)
    assert not any(torch.equal(first, second) for first, second in masks)
    before = [first for first, _ in masks]
    streams.start((7, 0))
    model(X)
    assert all(torch.equal(first, seen[2]) for first, seen in zip(before, masks, strict=True))


def test_a_module_that_is_two_parts_draws_as_two() -> None:
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    model = nn.Sequential(layer, nn.Tanh(), layer)
    streams = ModuleRandomStreams(model, ["0", "1", "2"], begin)
    streams.start((7,))
    x = model[1](model[0](X))
    whole = model[2](x)
    streams.start((7,), part=2)
    assert torch.equal(model[2](x), whole)


def test_without_a_microbatch_generators_are_left_alone() -> None:
    model = Parts()
    streams = streams_of(model)
    state = torch.get_rng_state()
    model.eval()(X)
    assert torch.equal(torch.get_rng_state(), state)
    streams.start((7, 0))
    streams.stop()
    state = torch.get_rng_state()
    model(X)
    assert torch.equal(torch.get_rng_state(), state)
    streams.start((7, 0))
    streams.close()
    state = torch.get_rng_state()
    model(X)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_follows_the_last_part_has_a_stream_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    streams = ModuleRandomStreams(model, ["0", "1"], begin)
    streams.start((7,))
    model(X)
    after = torch.rand(3)
    model(X.repeat(5, 1))
    streams.start((7,))
    model(X.repeat(5, 1))
    assert torch.equal(torch.rand(3), after)
