"""Perturbed runs: noise, float64, eval mode."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import nn

from lockstep.evidence.noise import add_noise
from lockstep.verify.jobs import TraceRequest
from lockstep.verify.probe import ShortDtypeOperations, change_model, to_float64


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))


def gradient(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    torch.manual_seed(1)
    model(x).square().sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_noise_changes_every_parameter_by_one_ulp() -> None:
    quiet, noisy = model(), model()
    add_noise(noisy, 0)
    moved = 0
    for before, after in zip(quiet.parameters(), noisy.parameters(), strict=True):
        up, down = (
            torch.nextafter(before, torch.full_like(before, way)) for way in (torch.inf, -torch.inf)
        )
        assert bool(((after == up) | (after == down)).all())
        moved += int((after == up).sum())
    assert 20 < moved < 60


def test_noise_is_the_same_for_one_seed_and_draws_from_no_default_generator() -> None:
    x = torch.randn(16, 4)
    found = []
    for seed in (0, 0, 1):
        perturbed = model()
        state = torch.default_generator.get_state()
        add_noise(perturbed, seed)
        assert torch.equal(torch.default_generator.get_state(), state)
        found.append(gradient(perturbed, x))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    apart = (found[0] - found[2]).norm() / found[0].norm()
    assert 1e-8 < apart < 1e-5


def test_noise_is_in_the_backward_too() -> None:
    quiet = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 2, bias=False))
    noisy = copy.deepcopy(quiet)
    add_noise(noisy, 0)
    noisy.load_state_dict(quiet.state_dict())
    for net in (quiet, noisy):
        net(torch.ones(1, 4)).sum().backward()  # a gradient in which no output counts
    exact, found = (net[0].weight.grad for net in (quiet, noisy))
    apart = float((found - exact).norm() / exact.norm())
    assert 1e-8 < apart < 1e-6


def test_noise_has_the_dtype_that_a_layer_computes_in() -> None:
    x = torch.randn(16, 4)
    apart = []
    for autocast in (False, True):
        found = []
        for seed in (0, 1):
            perturbed = model()
            add_noise(perturbed, seed)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                found.append(gradient(perturbed, x))
        apart.append(float((found[0] - found[1]).norm() / found[0].norm()))
    assert apart[1] > 1e3 * apart[0]


def test_float64_keeps_parameter_values_and_converts_the_batch(tmp_path: Path) -> None:
    perturbed, original = model(), model()
    change_model(perturbed, TraceRequest(folder=tmp_path, float64=True))
    assert all(
        after.dtype is torch.float64 and torch.equal(after, before.double())
        for before, after in zip(original.parameters(), perturbed.parameters(), strict=True)
    )
    batch = [to_float64(part) for part in (torch.ones(2, 4), torch.arange(2))]
    assert [part.dtype for part in batch] == [torch.float64, torch.int64]
    assert perturbed(batch[0]).dtype is torch.float64


def test_a_model_in_eval_mode_stays_in_it(tmp_path: Path) -> None:
    perturbed = model()
    change_model(perturbed, TraceRequest(folder=tmp_path, eval_mode=True))
    assert perturbed.train() is perturbed
    assert not any(module.training for module in perturbed.modules())


class RoundsToFloat32(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float().square().double()


def test_operations_that_return_a_shorter_dtype_are_found() -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    for layers, found, eps in (
        ([], set(), 2.0**-52),
        ([RoundsToFloat32()], {"aten._to_copy"}, 2.0**-23),
    ):
        net = nn.Sequential(nn.Linear(4, 4), *layers).double()
        with ShortDtypeOperations() as operations:
            net(x).sum()
        assert (operations.found, operations.eps) == (found, eps)
