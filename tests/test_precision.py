"""Precision: what the forward computes in, the loss scale, the global norm and clipping."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from processes import ran
from torch import nn

from lockstep.base import accelerator
from lockstep.training import precision
from lockstep.training.optim import gradient_norm

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_the_forward_computes_in_what_was_asked_for_and_parameters_stay(
    name: Any, dtype: torch.dtype
) -> None:
    layer = nn.Linear(3, 2)
    autocast = precision.autocast(name, CPU)
    with autocast, autocast:  # as a check inside a pipeline's stage does
        assert layer(torch.ones(1, 3)).dtype is dtype
    assert layer.weight.dtype is torch.float32
    assert not torch.is_autocast_enabled("cpu")


def test_the_loss_scale_is_halved_at_an_overflow_and_doubled_after_2000_steps_in_a_row() -> None:
    scale = precision.LossScale()
    assert scale.value == 2.0**16
    gradient = torch.tensor([2.0**16])
    scale.unscale([gradient])
    assert gradient.tolist() == [1.0]
    for _ in range(1999):
        scale.update(overflowed=False)
    scale.update(overflowed=True)
    assert scale.value == 2.0**15
    for _ in range(1999):
        scale.update(overflowed=False)
    assert scale.value == 2.0**15
    scale.update(overflowed=False)
    assert scale.value == 2.0**16


@pytest.mark.parametrize(
    ("name", "bf16", "amx", "slow"),
    [
        ("fp32", False, False, False),
        ("bf16", False, False, True),
        ("bf16", True, False, False),
        ("bf16", False, True, False),
        ("fp16", False, False, True),
    ],
)
def test_a_precision_that_is_slow_on_this_cpu_says_so(
    monkeypatch: pytest.MonkeyPatch, name: Any, bf16: bool, amx: bool, slow: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    expected = (
        f"this CPU has no {name} matrix instructions: expect {name} to be many times slower than"
        " fp32"
        if slow
        else None
    )
    assert precision.slow_on_this_cpu(name, CPU) == expected
    assert precision.slow_on_this_cpu(name, CUDA) is None


@pytest.mark.parametrize(
    ("name", "capability", "chosen", "slow"),
    [
        ("fp32", (9, 0), "none", True),
        ("fp32", (8, 0), "none", True),
        ("fp32", (7, 5), "none", False),
        ("fp32", None, "none", False),
        ("bf16", (9, 0), "none", False),
        ("fp32", (9, 0), "tf32", False),
        ("fp32", (9, 0), "ieee", False),
    ],
)
def test_products_in_fp32_that_leave_a_gpus_tf32_unused_say_so(
    monkeypatch: pytest.MonkeyPatch,
    name: Any,
    capability: tuple[int, int] | None,
    chosen: str,
    slow: bool,
) -> None:
    monkeypatch.setattr(accelerator, "compute_capability", lambda _: capability)
    torch.backends.cuda.matmul.fp32_precision = chosen
    try:
        assert ("TF32" in (precision.slow_without_tf32(name, CUDA) or "")) is slow
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"


def test_torch_keeps_a_choice_of_tf32_where_it_is_looked_for() -> None:
    choose = "; ".join(
        f"torch.set_float32_matmul_precision({text!r});"
        " print(torch.backends.cuda.matmul.fp32_precision)"
        for text in ("high", "highest")
    )
    code = f"import torch; print(torch.backends.cuda.matmul.fp32_precision); {choose}"
    found = ran([sys.executable, "-c", code], check=True).stdout
    assert found.split() == ["none", "tf32", "ieee"]


def test_a_gradient_within_the_limit_keeps_its_bits() -> None:
    gradient = torch.tensor([3.0, 4.0])
    gradient_norm.clip([gradient], 5.0, 5.0)
    assert gradient.tolist() == [3.0, 4.0]
    gradient_norm.clip([gradient], 5.0, 2.5)
    assert gradient.tolist() == [1.5, 2.0]


def test_a_gradient_that_is_not_finite_is_left_to_be_looked_at() -> None:
    gradients = [torch.tensor([1.0, 2.0]), torch.tensor([math.inf, 0.0])]
    gradient_norm.clip(gradients, math.inf, 1.0)
    assert [gradient.tolist() for gradient in gradients] == [[1.0, 2.0], [math.inf, 0.0]]


def test_a_rank_whose_stage_got_no_gradient_clips_nothing() -> None:
    gradient_norm.clip([], 5.0, 1.0)
    gradient_norm.clip([], torch.tensor(5.0), 1.0)
