"""Plain tensors that are sharded over the tensor axis, without slices: their dims are followed, and
random numbers are those of the full tensor. No processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lockstep.base.errors import RecipeError
from lockstep.model.random_functions import RANDOM
from lockstep.model.tensor.marks import UNKNOWN, mark_of, mark_sharded, sharded_dim
from lockstep.model.tensor.sharded_features import ShardedFeatures

BATCH, TOKENS, WIDTH = 2, 5, 3
Compute = Callable[[Tensor], Any]


class OneRank:
    """The mesh of one rank among several, which are not there."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def get_local_rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def get_group(self) -> None:
        return None


def watched(compute: Compute, part: Tensor, rank: int = 0, size: int = 2) -> Any:
    mesh: Any = OneRank(rank, size)
    torch.manual_seed(1)
    with ShardedFeatures(mesh):
        return compute(mark_sharded(part.view_as(part), part.dim() - 1))


def heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], -1, WIDTH)


def drop(x: Tensor) -> Tensor:
    return F.dropout(x, 0.4)


def written(x: Tensor) -> Tensor:
    out = torch.zeros(x.shape)
    out[:, 1:] = x[:, :-1]
    return out


def in_place(x: Tensor) -> Tensor:
    out = x * 1
    F.dropout(out, 0.4, inplace=True)
    return out


def attend(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


LAYOUTS: dict[str, Compute] = {
    "features": drop,
    "tokens in front": lambda x: drop(x.flatten(0, 1)).view(x.shape),
    "one token": lambda x: x + drop(x[:, 0])[:, None],
    "features in front": lambda x: drop(x.permute(2, 0, 1)).permute(1, 2, 0),
    "features in front, copied": lambda x: drop(x.mT.contiguous()).mT,
    "features in front, computed": lambda x: drop(x.mT * 2).mT,
    "tokens, heads": lambda x: drop(heads(x)).flatten(2),
    "heads, tokens": lambda x: drop(heads(x).transpose(1, 2)).transpose(1, 2).flatten(2),
    "heads, tokens, computed": lambda x: (
        drop(heads(x).transpose(1, 2) * 2).transpose(1, 2).flatten(2)
    ),
    "heads, tokens, copied": lambda x: (
        drop(heads(x).transpose(1, 2).contiguous()).transpose(1, 2).flatten(2)
    ),
    "heads in front": lambda x: drop(heads(x).permute(2, 0, 1, 3)).permute(1, 2, 0, 3).flatten(2),
    "heads and batch": lambda x: (
        drop(heads(x).permute(2, 0, 1, 3).flatten(0, 1))
        .view(-1, BATCH, TOKENS, WIDTH)
        .permute(1, 2, 0, 3)
        .flatten(2)
    ),
    "heads last": lambda x: drop(heads(x).permute(0, 3, 1, 2)).permute(0, 2, 3, 1).flatten(2),
    "scores": lambda x: (
        x
        * drop(torch.einsum("bthd,bshd->bhts", heads(x), heads(x)).softmax(-1))
        .sum(-1)
        .mT.repeat_interleave(WIDTH, -1)
    ),
    "attention": lambda x: drop(attend(heads(x).transpose(1, 2)).transpose(1, 2)).flatten(2),
    "a number of each head": lambda x: x * drop(heads(x).mean(-1)).repeat_interleave(WIDTH, -1),
    "stacked": lambda x: drop(torch.stack([x, -x])).sum(0),
    "padded": lambda x: drop(F.pad(x, (0, 0, 1, 0)))[:, 1:],
    "written": lambda x: drop(written(x)),
    "in place": in_place,
    "each token": lambda x: torch.stack([drop(each) for each in x.unbind(1)], 1),
    "running sums": lambda x: drop(x.cumsum(1)),
    "sorted": lambda x: drop(x.sort(1)[0]),
}


@pytest.mark.parametrize("own", [2, 1])
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_rank_drops_what_one_process_drops(name: str, own: int) -> None:
    """Whatever the layout, also with one head on a rank, whose dim may have any stride."""
    size = 2
    whole = torch.randn(BATCH, TOKENS, size * own * WIDTH)
    torch.manual_seed(1)
    expected = LAYOUTS[name](whole)
    assert not torch.equal(expected, LAYOUTS[name](whole))
    for rank, part in enumerate(whole.chunk(size, -1)):
        for _ in range(2):
            found = watched(LAYOUTS[name], part.contiguous(), rank, size)
            assert torch.equal(found, expected.chunk(size, -1)[rank])


def test_dropout_of_a_dim_that_is_not_followed_is_refused() -> None:
    part = torch.randn(BATCH, TOKENS, 2 * WIDTH)
    merged: list[Compute] = [
        lambda x: heads(x).transpose(1, 2).flatten(0, 1),
        lambda x: torch.cat([x, x], -1),
        lambda x: x.roll(1, -1),
    ]
    for compute in merged:
        with pytest.raises(RecipeError, match=r"dropout of a tensor of shape .* can follow"):
            watched(lambda x, compute=compute: drop(compute(x)), part)


def noise(x: Tensor) -> Tensor:
    return torch.rand(x.shape)


DRAWN: dict[str, Compute] = {
    "multiplied": lambda x: x * noise(x),
    "scaled before": lambda x: x + (noise(x) - 0.5) * torch.ones((), requires_grad=True),
    "a mask": lambda x: x.masked_fill(noise(x) > 0.5, 0.0),
    "of features": lambda x: x * torch.randn(x.shape[-1]),
    "of heads": lambda x: heads(x) * torch.randn(x.shape[-1] // WIDTH, 1),
    "a choice": lambda x: torch.where(torch.rand(x.shape) > 0.5, x, -x),
    "an order": lambda x: x[..., torch.randperm(x.shape[-1])],
    "dropped ones": lambda x: x * F.dropout(torch.ones(x.shape), 0.5),
    "in place": lambda x: x * torch.empty(x.shape).uniform_(),
    "initialized": lambda x: x * nn.init.normal_(torch.empty(x.shape)),
    "its own generator": lambda x: x * torch.rand(x.shape, generator=torch.Generator()),
    "a distribution": lambda x: x + torch.distributions.Normal(0.0, 1.0).sample(x.shape),
    "an operator": lambda x: torch.ops.aten.dropout(x, 0.5, True),
}
ALLOWED: dict[str, Compute] = {
    "of samples": lambda x: x * (torch.rand(x.shape[0], 1, 1) > 0.5),
    "of samples, by a method": lambda x: x * x.new_empty((x.shape[0], 1, 1)).bernoulli_(0.5),
    "of tokens": lambda x: x * torch.rand(x.shape[:2])[..., None],
    "an order of tokens": lambda x: x[:, torch.randperm(TOKENS)],
    "a number": lambda x: x * torch.rand(1),
    "dropout that is off": lambda x: F.dropout(F.alpha_dropout(heads(x).flatten(0, 1), 0.5), 0.0),
}


@pytest.mark.parametrize("name", DRAWN)
def test_random_numbers_in_the_shape_of_a_shard_are_refused(name: str) -> None:
    with pytest.raises(RecipeError, match="random numbers"):
        watched(DRAWN[name], torch.randn(BATCH, TOKENS, 2 * WIDTH))


@pytest.mark.parametrize("name", ALLOWED)
def test_random_numbers_of_all_heads_are_those_of_one_process(name: str) -> None:
    part = torch.randn(BATCH, TOKENS, 2 * WIDTH)
    torch.manual_seed(1)
    expected = ALLOWED[name](part)
    assert torch.equal(watched(ALLOWED[name], part), expected)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: bool(x[0, 0, 0] > 0),
        lambda x: (x > 0).any(-1).tolist(),
        lambda x: x.sum().item(),
        lambda x: x.detach().tolist(),
        lambda x: x.detach().numpy(),
        lambda x: torch.equal(x, x),
        lambda x: x.register_hook(torch.exp),
    ],
)
def test_values_of_a_shard_are_refused(compute: Compute) -> None:
    with pytest.raises(RecipeError, match="only the values of its heads or features"):
        watched(compute, torch.randn(BATCH, TOKENS, 4, requires_grad=True))


def test_dropout_in_a_checkpoint_of_a_function_is_refused() -> None:
    """Its recomputation would draw another mask."""
    with pytest.raises(RecipeError, match=r"torch\.utils\.checkpoint, between layers"):
        watched(
            lambda x: checkpoint(drop, x, use_reentrant=False),
            torch.randn(BATCH, 4, requires_grad=True),
        )


def test_a_function_changes_the_shape_of_its_argument() -> None:
    found = watched(lambda x: x.clone().transpose_(0, 2), torch.randn(2, 3, 4))
    assert mark_of(found) == UNKNOWN


def test_a_constant_is_no_shard() -> None:
    assert mark_of(watched(lambda x: x.new_zeros(2, 2), torch.randn(2, 3, 4))) is None
    assert sharded_dim(watched(lambda x: x.new_zeros(x.shape), torch.randn(2, 3, 4))) == 2
    assert mark_of(watched(lambda x: x.flatten(), torch.randn(2, 3, 4))) == UNKNOWN


def test_all_functions_that_draw_random_numbers_are_known() -> None:
    internal = ("_", "gru", "lstm", "rnn_", "cudnn", "miopen", "normal_functional")
    names = {
        name.removesuffix("_with_noise").removesuffix("_with_noise_")
        for name in dir(torch.ops.aten)
        if not name.startswith(internal)
        for operator in [getattr(torch.ops.aten, name)]
        if hasattr(operator, "overloads")
        if any(
            torch.Tag.nondeterministic_seeded in getattr(operator, each).tags
            for each in operator.overloads()
        )
    }
    assert {"rand", "bernoulli_", "dropout"} <= names
    for name in names:
        for owner in (torch, Tensor):
            # torch has no function for the others: they are made by tracing
            if hasattr(owner, name):
                assert getattr(owner, name) in RANDOM, name
