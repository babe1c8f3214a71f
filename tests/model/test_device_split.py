"""Layers on several devices of one process: which go where, and that whatever meets there has been
moved."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from model.second_device import ELSEWHERE, SecondDevice
from torch import Tensor, nn

from lockstep.base import accelerator
from lockstep.base.errors import PlanError, RecipeError
from lockstep.model.device_split import (
    PlacedLayer,
    device_indices,
    devices_of,
    layers_of,
    move_tensors,
    split_over_devices,
)
from lockstep.model.pipeline.stages import sequential_parts

CPU = torch.device("cpu")
TWO = [CPU, ELSEWHERE]
Point = namedtuple("Point", ["x", "y"])


@given(
    nbytes=st.lists(st.integers(0, 1000), min_size=1, max_size=12),
    rest=st.integers(0, 2000),
    devices=st.integers(2, 4),
)
def test_layers_are_placed_in_runs_and_no_other_runs_need_less_memory(
    nbytes: list[int], rest: int, devices: int
) -> None:
    names = [str(place) for place in range(len(nbytes))]
    if len(names) < devices:
        with pytest.raises(
            RecipeError, match=f"^split={devices} and a model of {len(names)} layers "
        ):
            device_indices(names, nbytes, rest, devices)
        return
    found = device_indices(names, nbytes, rest, devices)
    assert found == sorted(found)
    assert set(found) == set(range(devices))
    assert _most(found, nbytes, rest) == min(
        _most(other, nbytes, rest) for other in _runs(len(names), devices)
    )


def _most(found: list[int], nbytes: list[int], rest: int) -> int:
    held = [rest] + [0] * max(found)
    for place, size in zip(found, nbytes, strict=True):
        held[place] += size
    return max(held)


def _runs(layers: int, devices: int) -> list[list[int]]:
    if devices == 1:
        return [[0] * layers]
    shorter = (
        (first, rest)
        for first in range(1, layers - devices + 2)
        for rest in _runs(layers - first, devices - 1)
    )
    return [[0] * first + [number + 1 for number in rest] for first, rest in shorter]


def test_a_user_may_say_how_many_layers_each_device_has() -> None:
    assert device_indices(["a", "b", "c"], [1, 1, 9], 5, (0, 1, 2)) == [1, 2, 2]
    with pytest.raises(RecipeError) as caught:
        device_indices(["a", "b", "c"], [1, 1, 9], 5, (2, 2))
    assert (
        str(caught.value)
        == "split=2+2 places 4 layers, but the model has 3 (a, b, c); the numbers must add up to "
        "the layers; correct the plan, or name the layers in Recipe.blocks"
    )


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.decoder = nn.ModuleDict({"one": nn.Linear(2, 2), "other": nn.Linear(2, 2)})


def _layers(
    model: nn.Module, patterns: list[str] | None = None, stages: list[str] | None = None
) -> list[PlacedLayer]:
    return layers_of(model, patterns, sequential_parts(model, stages))


def _names(layers: list[PlacedLayer]) -> list[str]:
    return [f"{layer.name}{' ->' if layer.feeds_next else ''}" for layer in layers]


def test_the_layers_of_a_sequential_are_its_members_and_each_is_called_with_what_the_one_before_returns() -> (
    None
):
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert _names(_layers(nn.Sequential(nn.Linear(2, 2), inner, nn.BatchNorm1d(2)))) == [
        "0 ->",
        "1.0 ->",
        "1.1 ->",
        "2",
    ]
    alike = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)))
    assert _names(_layers(nn.Sequential(nn.Linear(2, 2), alike))) == ["0 ->", "1.0 ->", "1.1"]
    tied = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 2))
    tied[2].weight = tied[0].weight
    assert _names(_layers(tied)) == ["1", "3"]


def test_of_lists_the_members_but_the_last_hand_on_and_other_blocks_do_not() -> None:
    assert _names(_layers(Named())) == ["encoder.0 ->", "encoder.1"]
    assert _names(_layers(Named(), ["encoder.*", "decoder.*"])) == [
        "encoder.0 ->",
        "encoder.1",
        "decoder.one",
        "decoder.other",
    ]
    stages = ["decoder.other", "encoder.*", "decoder.one"]
    assert _names(_layers(Named(), stages=stages)) == [
        "decoder.other ->",
        "encoder.0 ->",
        "encoder.1 ->",
        "decoder.one",
    ]
    assert _layers(nn.Linear(2, 2)) == []


def test_what_moves_keeps_its_kind_and_what_need_not_move_is_the_same_object() -> None:
    x, cache = torch.ones(2), object()
    nest = {"a": [x, (Point(x, 1), cache)], "b": OrderedDict(c=x)}
    assert move_tensors(nest, CPU) is nest
    with SecondDevice():
        copies: list[Any] = []
        found = move_tensors(nest, ELSEWHERE, copies)
        assert found["a"][1][1] is cache
        assert (type(found["b"]), type(found["a"][1][0])) == (OrderedDict, Point)
        assert [t.device for t in (found["a"][0], found["a"][1][0].x, found["b"]["c"])] == [
            ELSEWHERE
        ] * 3
        assert move_tensors(found, ELSEWHERE) is found
    assert nest["a"][0] is x
    assert [type(copied) for copied, _ in copies] == [list, OrderedDict, dict]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.tensor([0.5]))

    def forward(self, x: Tensor, *, mask: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        return torch.tanh(self.linear(x)) * mask[0] * self.scale, mask


class Model(nn.Module):
    """Parameters that the model's own code uses, and a norm behind the blocks, which is in none."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.shift = nn.Parameter(torch.randn(4))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor, mask: list[Tensor]) -> Tensor:
        x = x + self.shift
        for block in self.blocks:
            x, _ = block(x, mask=mask)
        return self.norm(x) + self.shift


def _gradients(model: nn.Module, *inputs: Any) -> tuple[Tensor, list[Tensor]]:
    output = model(*inputs)
    output.square().sum().backward()
    return output.detach(), [parameter.grad.cpu() for parameter in model.parameters()]


def _models(kind: type[nn.Module] = Model) -> tuple[nn.Module, nn.Module]:
    one, other = kind(), kind()
    other.load_state_dict(one.state_dict())
    return one, other


@pytest.mark.parametrize("devices", [TWO, TWO[::-1]], ids=["from the CPU", "to the CPU"])
def test_values_and_gradients_are_those_of_one_device_and_an_activation_crosses_once_a_cut(
    devices: list[torch.device],
) -> None:
    whole, parted = _models()
    x, mask = torch.randn(3, 4), [torch.rand(3, 4)]
    output, gradients = _gradients(whole, x, mask)
    home, other = devices
    with SecondDevice() as second:
        split_over_devices(parted, _layers(parted), devices, 2)
        device_indices = {
            name: tensor.device
            for name, tensor in [*parted.named_parameters(), *parted.named_buffers()]
        }
        assert device_indices == {
            name: other if name.startswith(("blocks.2", "blocks.3")) else home
            for name in device_indices
        }
        given = move_tensors((x, mask), home)
        second.moves.clear()
        found = parted(*given)
        assert found.device == home
        found.square().sum().backward()
        # x and the mask for the first block there, the mask for the second, both home
        forward = [12] * 5
        backward = [12] * 2
        assert second.moves == forward + backward
        assert torch.equal(found.cpu(), output)
        assert all(
            torch.equal(p.grad.cpu(), gradient)
            for p, gradient in zip(parted.parameters(), gradients, strict=True)
        )


class Interleaved(nn.Module):
    """Norms between the blocks, which are in none, and what each block returns as an output."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.norms = nn.ModuleList(
            [nn.LayerNorm(4), nn.Identity(), nn.BatchNorm1d(4), nn.LayerNorm(4)]
        )

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        hidden = []
        for block, norm in zip(self.blocks, self.norms, strict=True):
            hidden.append(block(x))
            x = norm(hidden[-1])
        return x, hidden


def test_modules_between_blocks_and_intermediate_outputs_are_on_the_first_device() -> None:
    whole, parted = _models(Interleaved)
    x = torch.randn(3, 4)
    expected = whole(x)
    with SecondDevice():
        split_over_devices(parted, _layers(parted), TWO, 2)
        last, hidden = parted(x)
        assert [tensor.device for tensor in (last, *hidden)] == [CPU] * 5
        assert all(map(torch.equal, (last, *hidden), (expected[0], *expected[1])))


class Skips(Model):
    def forward(self, x: Tensor, mask: list[Tensor]) -> Tensor:
        first = x
        for block in self.blocks:
            x = block(x, mask=mask)[0] + first
        return self.norm(x)


def test_code_of_the_model_that_mixes_devices_is_refused_with_what_to_write() -> None:
    model = Skips()
    with SecondDevice():
        split_over_devices(model, _layers(model), TWO, 2)
        with pytest.raises(RecipeError) as caught:
            model(torch.randn(3, 4), [torch.rand(3, 4)])
    assert str(caught.value).startswith(
        "the model is split, and its code uses tensors of two devices (aten::add"
    )
    assert "write other.to(x.device) where the two are combined" in str(caught.value)


class Fails(Model):
    def forward(self, x: Tensor, mask: list[Tensor]) -> Tensor:
        raise RuntimeError("shapes do not fit")


def test_other_errors_of_a_model_stay_what_they_are() -> None:
    model = Fails()
    split_over_devices(model, _layers(model), [CPU, CPU], 2)
    with pytest.raises(RuntimeError, match=r"^shapes do not fit$"):
        model(torch.randn(3, 4), [])


class Collects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, collected: list[Tensor]) -> Tensor:
        collected.append(self.linear(collected[-1]))
        return collected[-1]


class Collected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Collects() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        collected = [x]
        for block in self.blocks:
            block(collected)
        return torch.stack(collected).sum()


def test_a_change_to_a_list_that_would_be_lost_with_its_copy_is_refused() -> None:
    model, x = Collected(), torch.randn(3, 4)
    whole = model(x)
    with SecondDevice():
        split_over_devices(model, _layers(model), TWO, 2)
        with pytest.raises(
            RecipeError, match=r"^the forward of a Collects changed a list among its arguments"
        ):
            model(x)
    model = Collected()
    split_over_devices(model, _layers(model), [CPU, CPU], 2)
    assert model(x).shape == whole.shape


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = nn.Module()
        table.register_buffer("angles", torch.ones(3))
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"linear": nn.Linear(4, 4), "table": table}) for _ in range(2)
        )


def test_a_buffer_of_layers_on_two_devices_is_refused() -> None:
    model = Rotary()
    with pytest.raises(RecipeError) as caught:
        split_over_devices(model, _layers(model), [CPU, CPU], 2)
    assert str(caught.value).startswith(
        "the layers 'blocks.0' and 'blocks.1' share a buffer of shape (3,), and are placed on two"
        " devices"
    )
    split_over_devices(model, _layers(model), [CPU, CPU], (0, 2))


def test_a_cpu_stands_for_any_number_of_devices_and_gpus_must_be_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert devices_of(CPU, 3) == [CPU] * 3
    monkeypatch.setattr(accelerator, "count", lambda: 2)
    assert devices_of(torch.device("cuda", 0), 2) == [
        torch.device("cuda", 0),
        torch.device("cuda", 1),
    ]
    with pytest.raises(
        PlanError, match=r"^split over 3 devices and 2 GPUs; each device needs its own GPU"
    ):
        devices_of(torch.device("cuda", 0), 3)


def test_the_generator_goes_with_the_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """What layers on two GPUs draw is what they would draw on one, one after another."""
    from lockstep.model import device_split as module

    gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]
    generators = [torch.Generator(), torch.Generator()]
    current: list[torch.device] = []
    monkeypatch.setattr(accelerator, "generator", lambda device: generators[device.index])
    monkeypatch.setattr(
        accelerator, "current", lambda device: current.append(device) or nullcontext()
    )
    alone = torch.Generator().manual_seed(5)
    generators[0].manual_seed(5)
    for number in (0, 1, 1, 0, 1):
        with module._current_device(gpus[number], gpus[0]):
            assert torch.equal(
                torch.rand(4, generator=generators[number]), torch.rand(4, generator=alone)
            )
    assert current == [gpus[1]] * 3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_two_gpus_compute_what_one_does(dropout: float) -> None:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Linear(4, 64),
            nn.Dropout(dropout),
            nn.Linear(64, 64),
            nn.Dropout(dropout),
            nn.Linear(64, 2),
        )

    whole, parted = _models(build)
    x = torch.randn(32, 4, device="cuda:0")
    whole.to("cuda:0")
    split_over_devices(parted, _layers(parted), devices_of(torch.device("cuda", 0), 2), (3, 2))
    torch.cuda.manual_seed(7)
    output, gradients = _gradients(whole, x)
    torch.cuda.manual_seed(7)
    found, moved_gradients = _gradients(parted, x)
    assert parted[4].weight.device == torch.device("cuda", 1)
    torch.testing.assert_close(found, output)
    torch.testing.assert_close(moved_gradients, gradients)
