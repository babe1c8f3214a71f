"""The tensor that an attention's backward reads instead of the output."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.model.context.stand_in import StandIn, sums_of

SHAPE = 2, 3, 5, 8


def random(seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SHAPE, generator=generator, dtype=torch.float64).to(dtype)


def made(output: Tensor, gradient: Tensor) -> Tensor:
    stand_in = StandIn(output)
    stand_in.receive(gradient, sums_of(output, gradient))
    return stand_in.make().as_strided(output.size(), output.stride(), output.storage_offset())


@pytest.mark.parametrize(
    ("dtype", "off"),
    [(torch.float64, 1e-15), (torch.float32, 1e-6), (torch.bfloat16, 3e-4)],
)
def test_it_has_the_sum_of_the_output(dtype: torch.dtype, off: float) -> None:
    output, gradient = random(1, dtype), random(2, dtype)
    gradient[0, 0, 0], gradient[0, 0, 1, 1:], gradient[0, 0, 2] = 0, 0, 1e-30
    found = made(output.transpose(1, 2).contiguous().transpose(1, 2), gradient)
    assert found.dtype is dtype
    assert found.isfinite().all()
    assert (found != 0).sum(-1).max() <= 2
    sums = (found.double() * gradient.double()).sum(-1)
    expected = (output.double() * gradient.double()).sum(-1)
    scale = (output.double() * gradient.double()).abs().sum(-1)
    assert ((sums - expected).abs() <= off * scale).all()


@pytest.mark.parametrize("padded", [False, True])
def test_the_backward_of_sdpa_needs_no_more_of_the_output(padded: bool) -> None:
    query, key, value = (random(seed, torch.float64) for seed in (3, 4, 5))
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
    if padded:
        output = F.pad(output, (0, 3))[..., : SHAPE[-1]]
    gradient = random(6, torch.float64)

    def backward(output: Tensor) -> tuple[Tensor, ...]:
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        found: tuple[Tensor, ...] = backward(
            gradient, query, key, value, output, lse, dropout_p=0.0, is_causal=False
        )
        return found

    for one, other in zip(backward(made(output, gradient)), backward(output), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)
