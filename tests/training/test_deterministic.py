"""An operation without a deterministic implementation is refused by name, with what to write
instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.base.errors import PlanError
from lockstep.training.deterministic import INSTEAD, error_of_determinism

PLAN = "replicate=2,numerics=bitwise"


def refusal(name: str) -> PlanError | None:
    text = (
        f"{name} does not have a deterministic implementation, but you set"
        " 'torch.use_deterministic_algorithms(True)'."
    )
    return error_of_determinism(RuntimeError(text), PLAN)


@pytest.mark.parametrize(
    "name", ["grid_sampler_2d_backward_cuda", "median CUDA with indices output", "put_"]
)
def test_the_error_names_the_plan_and_the_operation(name: str) -> None:
    text = str(refusal(name))
    assert text.startswith(f"{PLAN}: ")
    assert f" {name} " in text
    assert "leave numerics=bitwise out" in text


def test_another_error_stays_as_it_is() -> None:
    assert error_of_determinism(RuntimeError("out of memory"), PLAN) is None
    assert (
        error_of_determinism(ValueError("x does not have a deterministic implementation"), PLAN)
        is None
    )
    assert error_of_determinism(None, PLAN) is None


IMAGE = torch.randn(2, 3, 4, 6, generator=torch.Generator().manual_seed(0))
TARGETS = torch.arange(48).view(2, 4, 6) % 3
INDICES = torch.tensor([5, 0, 7])
POOLED, PLACES = F.max_pool2d(IMAGE, 2, return_indices=True)
SAME: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
    "nll_loss2d": (
        lambda: F.cross_entropy(IMAGE, TARGETS),
        lambda: F.cross_entropy(IMAGE.movedim(1, -1).flatten(0, -2), TARGETS.flatten()),
    ),
    "adaptive_avg_pool": (
        lambda: F.adaptive_avg_pool2d(IMAGE, (2, 3)),
        lambda: F.avg_pool2d(IMAGE, (4 // 2, 6 // 3)),
    ),
    "adaptive_max_pool": (
        lambda: F.adaptive_max_pool2d(IMAGE, (2, 3)),
        lambda: F.max_pool2d(IMAGE, (4 // 2, 6 // 3)),
    ),
    "max_unpooling": (
        lambda: F.max_unpool2d(POOLED, PLACES, 2),
        lambda: (
            torch.zeros(2, 3, 24).scatter(-1, PLACES.flatten(2), POOLED.flatten(2)).view(2, 3, 4, 6)
        ),
    ),
    "reflection_pad": (
        lambda: F.pad(IMAGE[0], (1, 1), mode="reflect"),
        lambda: IMAGE[0].index_select(-1, torch.tensor([1, 0, 1, 2, 3, 4, 5, 4])),
    ),
    "bincount": (
        lambda: torch.bincount(TARGETS.flatten(), weights=IMAGE[:, 0].flatten()),
        lambda: torch.zeros(3).index_add_(0, TARGETS.flatten(), IMAGE[:, 0].flatten()),
    ),
    "median": (
        lambda: IMAGE.median(-1).values,
        lambda: IMAGE.sort(-1).values.select(-1, (6 - 1) // 2),
    ),
    "put_": (
        lambda: torch.zeros(2, 4).put_(INDICES, torch.ones(3)),
        lambda: torch.zeros(2, 4).view(-1).index_copy_(0, INDICES, torch.ones(3)).view(2, 4),
    ),
}


@pytest.mark.parametrize("name", INSTEAD)
def test_what_the_error_says_to_write_instead_is_the_same(name: str) -> None:
    before, instead = SAME[name]
    torch.testing.assert_close(instead(), before())
    assert INSTEAD[name] in str(refusal(f"{name}_cuda"))
