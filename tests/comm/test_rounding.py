"""Numbers in fewer bytes: how far from themselves they come back, whatever they are."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from lockstep.comm.compressed_sum import BLOCK, Rounding

NAMES = ("bf16", "fp16", "int8")
LARGEST = torch.finfo(torch.float32).max
BYTES = {"bf16": 2 * BLOCK, "fp16": 2 * BLOCK + 4, "int8": BLOCK + 4}
rows = st.builds(
    lambda seed, shape, low, width: scattered(seed, shape, low, low + width),
    st.integers(0, 2**32 - 1),
    st.tuples(st.integers(1, 3), st.integers(0, 3)),
    st.integers(-149, 127),
    st.integers(0, 60),
)


def scattered(seed: int, shape: tuple[int, int], low: int, high: int) -> Tensor:
    """Numbers of either sign whose powers of two are from `low` to `high`, some of them 0, as
    float32 has them: at most its largest."""
    generator = torch.Generator().manual_seed(seed)
    size = (shape[0], shape[1] * BLOCK)
    powers = torch.randint(low, high + 1, size, generator=generator).double()
    numbers = torch.randn(size, generator=generator, dtype=torch.float64) * torch.exp2(powers)
    numbers[torch.rand(size, generator=generator) < 0.1] = 0.0
    return numbers.clamp(-LARGEST, LARGEST).float()


def allowed(name: str, numbers: Tensor) -> Tensor:
    """How far each may be away."""
    sizes = numbers.double().abs()
    largest = (
        sizes.view(len(numbers), numbers.shape[1] // BLOCK, BLOCK)
        .amax(dim=2)
        .repeat_interleave(BLOCK, dim=1)
    )
    if name == "bf16":
        return sizes * 2.0**-8 + 2.0**-134
    return (
        (largest / 253.9).clamp(min=2.0**-127)
        if name == "int8"
        else torch.maximum(sizes * 2.0**-11, largest * 2.0**-38)
    )


@given(rows)
def test_numbers_come_back_as_near_as_is_said(numbers: Tensor) -> None:
    for name in NAMES:
        rounding = Rounding(name)
        sent = rounding.encode(numbers)
        assert sent.dtype is torch.uint8
        assert sent.shape == (len(numbers), rounding.bytes(numbers.shape[1]))
        back = rounding.decode(sent)
        assert back.dtype is torch.float32
        # what is within half a step of the largest goes to infinity, and is found out by whoever
        # looks for that
        if name == "bf16":
            beyond = numbers.abs() >= LARGEST * (1 - 2.0**-9)
            assert bool(back[beyond].isinf().all())
            back = torch.where(beyond, numbers, back)
        assert bool(((back.double() - numbers.double()).abs() <= allowed(name, numbers)).all())


@given(rows, st.sampled_from(NAMES))
def test_rows_do_not_depend_on_one_another(numbers: Tensor, name: str) -> None:
    rounding = Rounding(name)
    sent = rounding.encode(numbers)
    for place, alone in enumerate(numbers):
        assert torch.equal(sent[place], rounding.encode(alone[None])[0])
        assert torch.equal(
            rounding.decode(sent)[place], rounding.decode(sent[place : place + 1])[0]
        )


@pytest.mark.parametrize("name", NAMES)
def test_so_many_bytes_are_sent(name: str) -> None:
    assert Rounding(name).bytes(3 * BLOCK) == 3 * BYTES[name]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_and_spoils_no_other_block(name: str, what: float) -> None:
    numbers = torch.ones(1, 2 * BLOCK)
    numbers[0, 5] = what
    back = Rounding(name).decode(Rounding(name).encode(numbers))
    assert not bool(back[0, 5].isfinite())
    torch.testing.assert_close(back[0, BLOCK:], numbers[0, BLOCK:], rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["fp16", "int8"])
def test_the_largest_number_there_is_stays_finite(name: str) -> None:
    numbers = torch.full((1, BLOCK), LARGEST)
    numbers[0, 1::2] *= -1
    back = Rounding(name).decode(Rounding(name).encode(numbers))
    torch.testing.assert_close(back, numbers, rtol=1e-3, atol=0)


def test_fp16_keeps_what_is_far_beyond_its_own_range() -> None:
    numbers = torch.full((1, BLOCK), 1e9)
    numbers[0, 0] = 7.0
    back = Rounding("fp16").decode(Rounding("fp16").encode(numbers))
    torch.testing.assert_close(back, numbers, rtol=1e-3, atol=0)
