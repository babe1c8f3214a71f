"""What sharded layers and the code between them compute in slices: torch's results, and the same
bits for a part as for the whole. No processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from worlds import ALONE

from lockstep.base.errors import RecipeError
from lockstep.model.shard import _pass_through_block
from lockstep.model.tensor.apply import tensor_parallel
from lockstep.model.tensor.elementwise import elementwise
from lockstep.model.tensor.marks import Shard, is_sharded, mark_sharded
from lockstep.model.tensor.sharded_dims import shards_of
from lockstep.model.tensor.sliced import Slices, linear, of_heads


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def outcome(out: Tensor, *leaves: Tensor) -> list[Tensor]:
    """The output, and the gradients of a sum of its squares."""
    gradients = torch.autograd.grad(out.double().square().sum(), leaves)
    return [out.detach(), *gradients]


@pytest.mark.parametrize("over", ["outputs", "inputs"])
@pytest.mark.parametrize("transposed", [False, True], ids=["linear", "transposed"])
@pytest.mark.parametrize("shape", [(2, 3, 8), (8,), (0, 8)], ids=str)
def test_a_layer_in_slices_computes_what_torch_does(
    over: str, transposed: bool, shape: tuple[int, ...]
) -> None:
    given, bias = drawn(*shape), drawn(16, seed=2)
    weight = drawn(*((8, 16) if transposed else (16, 8)), seed=1)
    used = weight.t() if transposed else weight
    expected = outcome(F.linear(given, used, bias), given, weight, bias)
    found = outcome(linear(given, used, bias, Slices(4, ALONE), over=over), given, weight, bias)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("over", ["outputs", "inputs"])
def test_slices_are_added_in_float32_under_autocast(over: str) -> None:
    given, weight = drawn(64, 512, dtype=torch.float32), drawn(512, 512, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = linear(given, weight, None, Slices(8, ALONE), over=over)
        expected = F.linear(given, weight)
    assert out.dtype is torch.bfloat16
    exact = F.linear(given.bfloat16().double(), weight.bfloat16().double())
    errors = [(each.double() - exact).norm() for each in (out, expected)]
    assert errors[0] <= 1.01 * errors[1]
    (found,) = torch.autograd.grad(out.float().sum(), given)
    assert found.dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_an_element_has_the_same_bits_in_a_part_as_in_the_whole(dtype: torch.dtype) -> None:
    names = "sigmoid tanh exp erf sin"
    functions = [getattr(torch, name) for name in names.split()]
    functions += [F.gelu, F.silu, F.softplus, F.mish]
    whole = drawn(5, 7, 24, dtype=dtype)
    for function in functions:
        expected = outcome(elementwise(function, (whole,), {}), whole)
        for start in range(0, 24, 6):
            part = whole.detach()[..., start : start + 6].clone().requires_grad_()
            found = outcome(elementwise(function, (part,), {}), part)
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other[..., start : start + 6]), function


def test_an_embedding_gives_no_negative_zero() -> None:
    """A sum over ranks, of which one has the word, gives none."""
    model = nn.Sequential(nn.Embedding(4, 3))
    with torch.no_grad():
        model[0].weight.fill_(-0.0)
    slices = Slices(2, ALONE)
    tensor_parallel(model, None, {"0": "embedding"}, materialize=lambda _: None, slices=slices)
    assert not torch.signbit(model(torch.arange(4))).any()


def test_a_function_in_place_writes_its_tensor() -> None:
    whole = drawn(3, 7).detach()
    expected, before = whole.tanh(), whole.clone()
    for function, arguments, keywords in (
        (Tensor.tanh_, (whole,), {}),
        (F.silu, (before,), {"inplace": True}),
    ):
        assert elementwise(function, arguments, keywords, in_place=True) is arguments[0]
    torch.testing.assert_close(whole, expected)
    torch.testing.assert_close(before, F.silu(drawn(3, 7).detach()))


def test_a_function_of_several_tensors_broadcasts_them() -> None:
    one, other = drawn(3, 7), drawn(7, seed=1)
    arguments: tuple[Any, ...] = (one, other, 0.3)
    torch.testing.assert_close(elementwise(torch.lerp, arguments, {}), torch.lerp(*arguments))


def mixed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.transpose(2, 3)) @ value


@pytest.mark.parametrize("compute", [mixed, F.scaled_dot_product_attention])
@pytest.mark.parametrize("sizes", [(5, 8, 11, 4), (2, 8, 7, 6), (1, 8, 7, 10)], ids=str)
def test_heads_have_the_same_bits_in_a_part_as_in_the_whole(
    compute: Any, sizes: tuple[int, ...]
) -> None:
    """Heads of 6 or 10 features begin between the vectors of a processor."""
    batch, heads, length, width = sizes
    shape = batch, length, heads, width
    flat = [drawn(*shape, seed=seed, dtype=torch.float32) for seed in range(3)]

    def attended(leaves: list[Tensor], own: int) -> list[Tensor]:
        views = [leaf.transpose(1, 2) for leaf in leaves]
        out = of_heads(compute, views, 1, Slices(own, ALONE))
        found, *gradients = outcome(out, *leaves)
        return [found.transpose(1, 2), *gradients]

    whole = attended(flat, 8)
    expected = compute(*(leaf.transpose(1, 2) for leaf in flat)).transpose(1, 2)
    torch.testing.assert_close(whole[0], expected, atol=1e-4, rtol=1e-4)
    for ranks in (2, 4, 8):
        own = heads // ranks
        for rank in range(ranks):
            at = slice(rank * own, (rank + 1) * own)
            part = [each.detach()[:, :, at].clone().requires_grad_() for each in flat]
            for one, other in zip(attended(part, own), whole, strict=True):
                assert torch.equal(one, other[:, :, at]), (ranks, rank)


def test_a_skipped_layer_passes_its_input_on() -> None:
    """Where FSDP2 must gather the block that a forward skips."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    styles = {"0": "colwise", "1": "rowwise"}
    tensor_parallel(model, None, styles, materialize=lambda _: None, slices=Slices(2, ALONE))
    given = drawn(2, 3, dtype=torch.float32)
    for block in model:
        passed = _pass_through_block(block, given)
        assert torch.equal(passed, given)
        assert not is_sharded(passed)
    with pytest.raises(RecipeError, match="0, called outside of the forward of its module"):
        model[0](given)


def test_a_vector_of_features_has_one_dim() -> None:
    given = mark_sharded(torch.ones(4), 0)
    assert shards_of(Tensor.clone, (given,), {}, {"keeps"}, [given]) == [Shard(0)]
