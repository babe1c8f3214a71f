"""Computes model FLOPs utilisation (MFU) without recomputation, as in PaLM (Chowdhery et al., 2022,
appendix B). Torch's FlopCounterMode counts the forward. A backward has twice as many FLOPs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from lockstep.base import accelerator
from lockstep.base.torch_private import has_compiled_forward, is_compiled_in_place
from lockstep.recipe.checks import Precision

_PEAKS = {
    "B200": 2250e12,
    "H200": 989.4e12,
    "GH200": 989.4e12,
    "H100 PCIe": 756.5e12,
    "H100 NVL": 835.5e12,
    "H100": 989.4e12,
    "A100": 311.9e12,
    "A30": 165.1e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362.05e12,
    "L4": 121e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
    "MI300X": 1307.4e12,
}
"""Peak FLOP/s of dense bf16 and fp16 products with fp32 accumulation, from data sheets, by words in
the device's name."""


NOTHING = nullcontext()


def peak(device_name: str, precision: Precision) -> float | None:
    """Return the peak FLOP/s of a device. None for fp32 or an unknown device."""
    if precision == "fp32":
        return None
    words = set(re.split(r"[\s-]+", device_name))
    return next((flops for name, flops in _PEAKS.items() if words.issuperset(name.split())), None)


def peak_of(device: torch.device, precision: Precision) -> float | None:
    name = accelerator.name(device)
    return None if name is None else peak(name, precision)


class Flops:
    """The FLOPs of a model's forward, counted in the first microbatch."""

    def __init__(self, model: nn.Module, peak: float | None) -> None:
        self._peak = None if peak is None or is_compiled(model) else peak
        self._forward: float | None = None

    def counting(self, samples: int) -> AbstractContextManager[None]:
        """Count the FLOPs of a forward of `samples` samples."""
        is_counted = self._peak is None or self._forward is not None
        return NOTHING if is_counted else self._counting(samples)

    @contextmanager
    def _counting(self, samples: int) -> Iterator[None]:
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter:
            yield
        self._forward = counter.get_total_flops() / samples

    def utilisation(self, samples_per_second: float, devices: int) -> float | None:
        """Return the utilisation, from 0 to 1. `devices` is the number of devices that divide the
        samples."""
        if not self._forward or self._peak is None:
            return None
        return 3 * self._forward * samples_per_second / (devices * self._peak)


def is_compiled(model: nn.Module) -> bool:
    return any(
        is_compiled_in_place(module) or has_compiled_forward(module) for module in model.modules()
    )
