"""`torch.nn.DataParallel` around a model's forward, and what it is refused for. On a CPU only how
the model is wrapped can be seen."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.base import accelerator
from lockstep.base.errors import PlanError, RecipeError
from lockstep.model.device_split import gpus_of, wrap_data_parallel


class Model(nn.Module):
    config = "the user's own"

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.calls: list[tuple[int, int]] = []

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        self.calls.append((id(self), len(x)))
        return self.linear(x) * scale


class OnTheCPU(nn.DataParallel[Any]):
    """Cuts and puts together as on GPUs, with copies of the module that share its lists and
    functions, as torch's have."""

    def __init__(self, module: nn.Module, device_ids: list[int]) -> None:
        nn.Module.__init__(self)
        self.module, self.device_ids, self.dim = module, device_ids, 0
        self.src_device_obj = self.output_device = torch.device("cpu")  # type: ignore[assignment]

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        count = len(device_ids)
        named = [
            dict(zip(kwargs, parts, strict=True))
            for parts in zip(*(value.chunk(count) for value in kwargs.values()), strict=True)
        ]
        return list(zip(*(value.chunk(count) for value in inputs), strict=True)), named

    def replicate(self, module: nn.Module, device_ids: Any) -> Any:
        return [_replica(module) for _ in device_ids]

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
        return [
            replica(*args, **named)
            for replica, args, named in zip(replicas, inputs, kwargs, strict=True)
        ]

    def gather(self, outputs: Any, output_device: Any) -> Any:
        return torch.cat(outputs)


def _replica(module: nn.Module) -> nn.Module:
    replica = copy.copy(module)
    replica._modules = {
        name: _replica(child) for name, child in module._modules.items() if child is not None
    }
    return replica


def test_the_forward_is_cut_and_the_model_stays_the_users_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generators = [torch.Generator() for _ in range(3)]
    monkeypatch.setattr(nn, "DataParallel", OnTheCPU)
    monkeypatch.setattr(accelerator, "kind", lambda: "cuda")
    monkeypatch.setattr(accelerator, "generator", lambda device: generators[device.index])
    model, x, scale = Model(), torch.randn(6, 4), torch.rand(6, 1)
    names, expected = list(model.state_dict()), model(x, scale=scale)
    model.calls.clear()
    wrap_data_parallel(model, [0, 1, 2])
    hooked: list[Any] = []
    model.register_forward_hook(lambda *given: hooked.append(given[2].shape))

    torch.manual_seed(3)
    found = model(x, scale=scale)
    torch.testing.assert_close(found, expected)
    assert [rows for _, rows in model.calls] == [2, 2, 2]
    assert len({number for number, _ in model.calls}) == 3, "each part is computed by a copy"
    assert hooked == [found.shape]
    assert isinstance(model, Model)
    assert model.config == "the user's own"
    assert list(model.state_dict()) == names

    drawn = [torch.rand(3, generator=generator).tolist() for generator in generators[1:]]
    assert drawn[0] != drawn[1], "parts of a microbatch have masks of their own"
    torch.manual_seed(3)
    model(x, scale=scale)
    assert drawn == [torch.rand(3, generator=generator).tolist() for generator in generators[1:]]


def test_batchnorm_would_see_parts_of_a_microbatch_and_is_refused() -> None:
    with pytest.raises(RecipeError) as caught:
        wrap_data_parallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), [0, 1])
    assert str(caught.value).startswith(
        "data_parallel=2 and a model with BatchNorm ('1'); each GPU would take the statistics of"
        " its part"
    )


def test_it_needs_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "count", lambda: 2)
    assert gpus_of(torch.device("cuda", 0), 2) == [0, 1]
    for home, count, there in ((torch.device("cpu"), 2, 0), (torch.device("cuda", 0), 3, 2)):
        with pytest.raises(PlanError) as caught:
            gpus_of(home, count)
        assert str(caught.value).startswith(
            f"data_parallel={count} and {there} GPUs; it splits each microbatch over the GPUs of"
            f" one process; use replicate={count}, which "
        )


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_compute_what_one_does() -> None:
    model = Model().to("cuda:0")
    x, scale = torch.randn(7, 4, device="cuda:0"), torch.rand(7, 1, device="cuda:0")
    expected = model(x, scale=scale)
    expected.square().sum().backward()
    gradient = model.linear.weight.grad
    model.linear.weight.grad = None
    wrap_data_parallel(model, [0, 1])
    found = model(x, scale=scale)
    found.square().sum().backward()
    assert found.device == torch.device("cuda", 0)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(model.linear.weight.grad, gradient)
