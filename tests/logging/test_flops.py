"""How much of a GPU's arithmetic a model makes use of."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.logging.flops import Flops, is_compiled, peak


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756.5e12),
        ("NVIDIA A100-SXM4-80GB", 311.9e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362.05e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce GTX 4090", None),
        ("something else", None),
    ],
)
def test_what_a_gpu_can_do_is_known_by_its_whole_name(name: str, flops: float | None) -> None:
    assert peak(name, "bf16") == peak(name, "fp16") == flops
    assert peak(name, "fp32") is None


def test_the_utilisation_is_three_forwards_a_sample_over_what_all_devices_could_do() -> None:
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 4))
    flops = Flops(model, peak=1e6)
    assert flops.utilisation(100, devices=2) is None
    with flops.counting(samples=5):
        model(torch.ones(5, 16)).sum()
    with flops.counting(samples=1):
        model(torch.ones(1000, 16))
    forward = 2 * (16 * 32 + 32 * 4)
    assert flops.utilisation(100, devices=2) == pytest.approx(3 * forward * 100 / 2e6)


def test_nothing_is_counted_where_the_peak_is_not_known_or_a_part_is_compiled() -> None:
    part = nn.Linear(2, 2)
    model = nn.Sequential(part)
    for compiled in (False, True):
        if compiled:
            part.forward = torch.compile(part.forward, backend="eager")
        flops = Flops(model, peak=1e6 if compiled else None)
        with flops.counting(samples=1):
            model(torch.ones(1, 2))
        assert flops.utilisation(1, devices=1) is None


def test_what_is_compiled_is_known_however_it_was_done() -> None:
    by_call, in_place = nn.Linear(2, 2), nn.Linear(2, 2)
    in_place.compile()
    assert is_compiled(nn.Sequential(torch.compile(by_call)))
    assert is_compiled(nn.Sequential(in_place))
    assert not is_compiled(nn.Sequential(nn.Linear(2, 2)))
