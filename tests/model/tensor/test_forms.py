"""The forms in which functions of sharded tensors are called: the same bits for a part as for the
whole, and a refusal of everything else. No processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from worlds import ALONE

from lockstep.base.errors import RecipeError
from lockstep.model.tensor.marks import ONE, mark_sharded, sharded_dim
from lockstep.model.tensor.operators import EXPONENTS
from lockstep.model.tensor.sharded_features import ShardedFeatures, SlicedModel
from lockstep.model.tensor.sliced import Slices

BATCH, TOKENS, HEADS, WIDTH = 2, 7, 4, 6
Compute = Callable[[Tensor], Any]


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def watched(compute: Compute, tensor: Tensor, dim: int) -> Any:
    features = ShardedFeatures(None, SlicedModel(nn.Module(), [], Slices(4, ALONE)))
    given = mark_sharded(tensor.view_as(tensor), dim)
    with features:
        return compute(given)


def outcome(compute: Compute, tensor: Tensor, slope: Tensor) -> list[Tensor]:
    """The result, and the gradient for `slope`, both without the strides of their calls."""
    leaf = tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    out = watched(compute, leaf, 1)
    (gradient,) = torch.autograd.grad(out, leaf, slope)
    return [out.detach(), gradient]


def rotated(x: Tensor) -> Tensor:
    return torch.cat((-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]), -1)


def in_place(x: Tensor) -> Tensor:
    y = F.silu(x)
    y[:, :, 0] = 0
    y *= 2
    y += x
    return y.exp_()


SAME: dict[str, Compute] = {
    "gelu": F.gelu,
    "softplus": F.softplus,
    "new gelu": lambda x: 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3.0)))),
    "hardswish": F.hardswish,
    "add with alpha": lambda x: torch.add(x, x.abs(), alpha=0.3),
    "powers": lambda x: sum(x.abs() ** each for each in EXPONENTS) + x.abs() ** 1.7,
    "in place": in_place,
    "softmax": lambda x: x.softmax(-1),
    "softmax of another layout": lambda x: x.transpose(2, 3).softmax(-1).transpose(2, 3),
    "norm of each head": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "rms_norm": lambda x: F.rms_norm(x, (WIDTH,)),
    "layer_norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "rope": lambda x: x * 0.3 + rotated(x) * 0.7,
    "gate of a head": lambda x: x * x[..., :1],
    "groups": lambda x: x[:, :, None].expand(-1, -1, 3, -1, -1).flatten(1, 2).exp()[:, ::3],
    "repeats": lambda x: x.repeat_interleave(3, 1)[:, 1::3],
    "unbound": lambda x: torch.stack([each.sigmoid() for each in x.unbind(2)], 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SAME)
def test_a_part_has_the_bits_of_the_whole(name: str, dtype: torch.dtype) -> None:
    """Also where the tensor, or its gradient, is not contiguous."""
    shape = BATCH, TOKENS, HEADS, WIDTH
    whole, slope = drawn(*shape, dtype=dtype), drawn(*shape, seed=1, dtype=dtype)
    expected = outcome(SAME[name], whole.transpose(1, 2), slope.transpose(1, 2))
    leaf = whole.transpose(1, 2).detach().requires_grad_()
    plain = SAME[name](leaf)
    (gradient,) = torch.autograd.grad(plain, leaf, slope.transpose(1, 2))
    torch.testing.assert_close([plain, gradient], expected, atol=0.1, rtol=0.1)
    for own in (2, 1):
        for first in range(0, HEADS, own):
            part, its_slope = (
                each[:, :, first : first + own].clone().transpose(1, 2) for each in (whole, slope)
            )
            for one, other in zip(outcome(SAME[name], part, its_slope), expected, strict=True):
                assert torch.equal(one, other[:, first : first + own]), (own, first)


@pytest.mark.parametrize("compute", [F.gelu, F.softplus])
def test_the_gradient_of_another_layout_gives_the_same_bits(compute: Compute) -> None:
    """The tensor itself needs no padding."""
    whole, slope = drawn(2, HEADS, 8, 8), drawn(2, 8, HEADS, 8, seed=1).transpose(1, 2)
    expected = outcome(compute, whole, slope)
    for head in range(HEADS):
        at = slice(head, head + 1)
        found = outcome(compute, whole[:, at].contiguous(), slope[:, at].contiguous())
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other[:, at])


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].exp()


REFUSED: dict[str, tuple[Compute, str]] = {
    "trapezoid": (lambda x: torch.trapezoid(x, dim=2), "trapezoid of .* which adds over dims"),
    "nanmean": (lambda x: x.nanmean(2), "nanmean of .* whose forward calls aten.nansum"),
    "a loss of each": (
        lambda x: F.binary_cross_entropy_with_logits(x, x.detach() * 0, reduction="none"),
        "whose forward calls aten.binary_cross_entropy_with_logits",
    ),
    "sum": (lambda x: x.sum(), "sum of .* adds over dims before its last"),
    "transposed sum": (lambda x: x.sum(2), "sum of .* adds over dims before its last"),
    "stacked sum": (lambda x: torch.stack([x, x]).sum(0), "sum of .* adds over dims before its"),
    "broadcast": (lambda x: x * x[:, :, :1], "mul of .* whose gradient is a sum over dims"),
    "variance": (lambda x: x.var(-1), "var of .* whose forward calls aten.var"),
    "cumsum": (lambda x: x.cumsum(-1), "cumsum of .* aten.cumsum"),
    "an index": (lambda x: x[:, :, torch.tensor([0, 0])], "whose backward calls aten.index_put"),
    "einsum": (lambda x: torch.einsum("bhtd,bhsd->bhts", x, x), "einsum of .* products between"),
    "merged": (lambda x: torch.matmul(x.flatten(0, 1), x.flatten(0, 1).mT), "matmul of"),
    "numpy": (lambda x: x.detach().numpy(), "numpy of .* values of its heads"),
    "item": (lambda x: x[0, 0, 0, 0].item(), "item of .* values of its heads"),
    "a list": (lambda x: x.detach().tolist(), "tolist of .* values of its heads"),
    "a hook": (lambda x: x.register_hook(torch.exp), "register_hook of .* values of its heads"),
    "a branch": (lambda x: bool(x[0, 0, 0, 0] > 0), "__bool__ of .* values of its heads"),
    "noise": (lambda x: x * torch.rand(x.shape), "mul of random numbers of shape"),
    "a noisy mask": (
        lambda x: F.scaled_dot_product_attention(x, x, x, torch.rand(*x.shape[:3], x.shape[2])),
        "scaled_dot_product_attention of random numbers of shape",
    ),
    "out": (lambda x: torch.exp(x.detach(), out=torch.empty(0)), r"exp of .* result \(in out=\)"),
    "random numbers": (torch.rand_like, "rand_like of"),
    "a Function": (lambda x: Custom.apply(x) * 2, "the backward of Custom"),
    "a checkpoint": (
        lambda x: checkpoint(F.silu, x, use_reentrant=False),
        "torch.utils.checkpoint, between layers that are sharded",
    ),
    "an old checkpoint": (
        lambda x: checkpoint(F.silu, x, use_reentrant=True) * 2,
        "the backward of CheckpointFunction",
    ),
    "dropout": (
        lambda x: F.dropout(x.flatten(0, 1), 0.5),
        r"dropout of a tensor of shape \(8, 7, 6\) that is sharded",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused(name: str) -> None:
    compute, words = REFUSED[name]
    with pytest.raises(RecipeError, match=words):
        watched(compute, drawn(BATCH, HEADS, TOKENS, WIDTH).requires_grad_(), 1)


MOVED: list[tuple[Compute, int, int | None]] = [
    (lambda x: x.view(BATCH, TOKENS, -1, WIDTH), 2, 2),
    (lambda x: x.unflatten(-1, (-1, WIDTH)).transpose(1, 2), 2, 1),
    (lambda x: x.view(BATCH, TOKENS, -1, WIDTH).permute(2, 0, 1, 3).exp(), 2, 0),
    (lambda x: x.view(BATCH, TOKENS, -1, WIDTH).flatten(2), 2, 2),
    (lambda x: x.view(BATCH, TOKENS, -1, WIDTH).transpose(1, 2).flatten(0, 1), 2, None),
    (lambda x: x.view(BATCH, TOKENS, -1, WIDTH).sum(-1), 2, 2),
    (lambda x: x[:, None].unsqueeze(-1), 2, 3),
    (lambda x: torch.stack([x, x]), 2, 3),
    (lambda x: torch.cat([x, x], -1), 2, None),
    (lambda x: x.unflatten(-1, (-1, WIDTH))[:, 0], 2, 1),
    (lambda x: torch.view_as_complex(x.view(BATCH, TOKENS, -1, 3, 2)), 2, 2),
]


@pytest.mark.parametrize("heads", [HEADS, 1])
@pytest.mark.parametrize("place", range(len(MOVED)))
def test_the_sharded_dim_is_followed(place: int, heads: int) -> None:
    compute, dim, expected = MOVED[place]
    found = sharded_dim(watched(compute, drawn(BATCH, TOKENS, heads * WIDTH), dim))
    assert found == expected or (heads == 1 and found == ONE and expected is None)


def test_a_number_of_heads_that_code_names_is_followed_if_it_is_clear() -> None:
    def split(heads: int) -> int | None:
        def compute(x: Tensor) -> Tensor:
            return x.view(BATCH, TOKENS, heads, WIDTH).transpose(1, 2)

        return sharded_dim(watched(compute, drawn(BATCH, TOKENS, heads * WIDTH), 2))

    assert [split(HEADS), split(1)] == [1, None]


def test_numbers_that_change_are_tried_once() -> None:
    features = ShardedFeatures(None, SlicedModel(nn.Module(), [], Slices(4, ALONE)))
    given = mark_sharded(drawn(2, 8), 1)
    with features:
        for factor in (0.3, 0.31, 0.32):
            given.mul(factor)
    assert len(features._forms._known) == 1


def test_one_head_is_multiplied_with_those_of_the_query() -> None:
    """As transformers repeats keys, by sizes."""

    def attend(x: Tensor) -> Tensor:
        batch, heads, tokens, width = x.shape
        keys = x[:, :, None].expand(batch, heads, 2, tokens, width)
        keys = keys.reshape(batch, heads * 2, tokens, width)
        return x.repeat_interleave(2, 1) @ keys.transpose(2, 3)

    for heads in (HEADS, 1):
        assert sharded_dim(watched(attend, drawn(BATCH, heads, TOKENS, WIDTH), 1)) == 1
