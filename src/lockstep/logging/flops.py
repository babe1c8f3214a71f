"""Model FLOPs utilisation (MFU): the arithmetic that a model is made of, as a share of what its GPU could do in the time.

As Chowdhery et al. define it (PaLM, 2022, appendix B): what is computed again for want of memory does not count. A backward is taken to
have twice the operations of its forward, so that only a forward is counted, as torch's FlopCounterMode does: products of matrices,
convolutions and attention.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from lockstep.base.torch_private import has_compiled_forward, is_compiled_in_place
from lockstep.recipe import Precision

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
"""FLOP/s of dense products in bf16 and fp16 that are summed in fp32, from the makers' data sheets, by words of the device's name; the first
that fits counts."""


def peak(device_name: str, precision: Precision) -> float | None:
    """FLOP/s that one device can do at most; None where that is not known: another device, or fp32."""
    words = set(re.split(r"[\s-]+", device_name))
    return None if precision == "fp32" else next((flops for name, flops in _PEAKS.items() if words.issuperset(name.split())), None)


def peak_of(device: torch.device, precision: Precision) -> float | None:
    return peak(torch.cuda.get_device_name(device), precision) if device.type == "cuda" else None


class Flops:
    """What a model's forward takes, counted in the first microbatch that is computed."""

    def __init__(self, model: nn.Module, peak: float | None) -> None:
        """`peak`: FLOP/s of the device. Where it is None, or the model is compiled (no operation is seen then), nothing is counted."""
        self._peak = None if peak is None or is_compiled(model) else peak
        self._forward: float | None = None

    def counting(self, samples: int) -> AbstractContextManager[None]:
        """Around the forward of a microbatch of so many samples."""
        return nullcontext() if self._peak is None or self._forward is not None else self._counted(samples)

    @contextmanager
    def _counted(self, samples: int) -> Iterator[None]:
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter:
            yield
        self._forward = counter.get_total_flops() / samples

    def utilisation(self, samples_per_second: float, devices: int) -> float | None:
        """MFU, from 0 to 1; None where nothing was counted. `devices`: those that compute the samples together."""
        if not self._forward or self._peak is None:
            return None
        return 3 * self._forward * samples_per_second / (devices * self._peak)


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile has made any part of it."""
    return any(is_compiled_in_place(module) or has_compiled_forward(module) for module in model.modules())
