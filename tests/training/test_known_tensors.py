"""The tensors of a module are searched once, and again as soon as the module or an optimizer holds
others."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.training import state
from lockstep.training.optim.modes import OptimizerModes
from lockstep.training.state import KnownTensors, state_of


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.other = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.other.weight = self.one.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def prepared() -> Any:
    """A stand-in for a `TrainModule` after a step."""
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model.other(model.norm(model.one(torch.randn(4, 3)))).sum().backward()
    optimizer.step()
    held = dict(model.named_parameters())
    parts = {"modes": OptimizerModes([optimizer], held), "left_out": None}
    parts |= {
        "host_values": lambda: SimpleNamespace(groups=[optimizer.param_groups]),
        "state_dict": lambda host: {"loss_scale": None},
    }
    return SimpleNamespace(model=model, optimizers=[optimizer], held=held, **parts)


def replace_buffer(module: Any) -> None:
    module.model.norm.running_mean = torch.ones(3)


def load_optimizer(module: Any) -> None:
    module.optimizers[0].load_state_dict(module.optimizers[0].state_dict())


def replace_moment(module: Any) -> None:
    module.optimizers[0].state[module.model.one.bias]["exp_avg"] = torch.full((3,), 7.0)


def add_state(module: Any) -> None:
    module.optimizers[0].state[module.model.one.bias]["more"] = torch.full((3,), 7.0)


def add_number(module: Any) -> None:
    module.optimizers[0].state[module.model.one.bias]["number"] = 7


def replace_module(module: Any) -> None:
    module.model.norm = nn.BatchNorm1d(3)


def replace_parameter(module: Any) -> None:
    module.model.one.bias = nn.Parameter(torch.ones(3))


def replace_states(module: Any) -> None:
    optimizer = module.optimizers[0]
    optimizer.state = {parameter: {"momentum": torch.ones(3)} for parameter in optimizer.state}


@pytest.mark.parametrize(
    "change",
    [
        replace_buffer,
        load_optimizer,
        replace_moment,
        add_state,
        add_number,
        replace_module,
        replace_parameter,
        replace_states,
    ],
)
def test_other_objects_are_found(change: Callable[[Any], None]) -> None:
    module, known = prepared(), KnownTensors()
    state_of([module], {}, known)
    change(module)
    found, fresh = state_of([module], {}, known), state_of([module], {})
    assert found.values == fresh.values
    assert found.tensors.keys() == fresh.tensors.keys()
    for name, tensor in fresh.tensors.items():
        assert found.tensors[name].data_ptr() == tensor.data_ptr(), name


def test_the_same_objects_are_not_searched_and_their_values_are_those_of_the_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, known = prepared(), KnownTensors()
    state_of([module], {}, known)
    monkeypatch.setattr(state, "tensors_in_state", lambda _: pytest.fail("searched again"))
    module.optimizers[0].step()
    module.model.one.bias.data = torch.full((3,), 5.0)  # the same parameter, other memory
    module.optimizers[0].param_groups[0]["lr"] = 0.5
    found = state_of([module], {}, known)
    assert found.tensors["0/model/one.bias"].tolist() == [5.0] * 3
    assert found.tensors["0/optimizer/0/one.bias/step"].item() == 2
    assert found.values["modules"]["0"]["optimizers"]["0"]["groups"][0]["lr"] == 0.5
    assert found.values["modules"]["0"]["tied"] == {"other.weight": "one.weight"}
    assert "0/model/scratch" not in found.tensors


def test_without_it_the_tensors_have_no_gradient() -> None:
    assert all(not tensor.requires_grad for tensor in state_of([prepared()], {}).tensors.values())
