"""What sharded layers and the code between them compute in slices: torch's results, and the same
bits for a part as for the whole. No processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.comm.world import World
from lockstep.model.shard import _pass_through_block
from lockstep.model.tensor.apply import tensor_parallel
from lockstep.model.tensor.elementwise import ROUNDED_BY_PLACE, elementwise, is_rounded_by_place
from lockstep.model.tensor.sharded_features import is_sharded
from lockstep.model.tensor.sliced import Slices, linear, product_of_heads
from lockstep.model.tensor.token_sums import gradient_sums_tokens, sums_tokens

ALONE = World(
    rank=0, size=1, local_rank=0, local_size=1, device=torch.device("cpu"), owns_group=False
)


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
    unary = ("gelu", "silu", "sigmoid", "tanh", "exp", "erf", "sin", "softplus", "mish")
    functions = [each for each in ROUNDED_BY_PLACE if each.__name__ in unary]
    assert len(functions) >= len(unary)
    whole = drawn(5, 7, 24, dtype=dtype)
    for function in functions:
        expected = outcome(elementwise(function, (whole,), {}), whole)
        for start in range(0, 24, 6):
            part = whole.detach()[..., start : start + 6].clone().requires_grad_()
            found = outcome(elementwise(function, (part,), {}), part)
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other[..., start : start + 6]), function


@pytest.mark.parametrize(
    "function", [torch.special.expit, torch.exp2_, Tensor.sigmoid_, F.silu, Tensor.__pow__]
)
def test_functions_that_are_rounded_by_place(function: Any) -> None:
    assert is_rounded_by_place(function, {})
    assert is_rounded_by_place(torch.add, {"alpha": 0.3})
    assert not is_rounded_by_place(torch.add, {})


@pytest.mark.parametrize(
    ("function", "arguments", "over_tokens"),
    [
        (Tensor.mean, {"dim": 2}, True),
        (Tensor.sum, {}, True),
        (F.softmax, {"dim": 1}, True),
        (F.normalize, {}, True),
        (Tensor.var, {"dim": (2, 3)}, True),
        (F.group_norm, {"num_groups": 2}, True),
        (F.softmax, {"dim": -1, "dtype": torch.float64}, False),
        (Tensor.mean, {"dim": 3, "keepdim": True}, False),
        (F.normalize, {"dim": -1}, False),
        (F.gelu, {}, False),
    ],
)
def test_sums_over_tokens(function: Any, arguments: dict[str, Any], over_tokens: bool) -> None:
    """Or samples, or heads."""
    assert sums_tokens(function, (drawn(2, 4, 3, 5),), arguments) == over_tokens


def test_the_gradient_of_what_is_broadcast_is_a_sum() -> None:
    whole, gate, scores = drawn(2, 3, 5), drawn(2, 1, 5), drawn(2, 3, 1)
    for few, expected in ((gate, True), (scores, False), (whole, False), (gate.detach(), False)):
        given = (whole, few)
        assert gradient_sums_tokens(whole * few, given, {}, lambda _: True) == expected
    both = [[whole, gate]]
    assert not gradient_sums_tokens(torch.cat([whole, gate], 1), both, {}, lambda _: True)


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
        assert elementwise(function, arguments, keywords) is arguments[0]
    torch.testing.assert_close(whole, expected)
    torch.testing.assert_close(before, F.silu(drawn(3, 7).detach()))


def test_a_function_of_several_tensors_broadcasts_them() -> None:
    one, other = drawn(3, 7), drawn(7, seed=1)
    arguments: tuple[Any, ...] = (one, other, 0.3)
    torch.testing.assert_close(elementwise(torch.lerp, arguments, {}), torch.lerp(*arguments))


@pytest.mark.parametrize("sizes", [(5, 8, 11, 4), (2, 8, 7, 16), (4, 8, 16, 8)], ids=str)
def test_heads_have_the_same_bits_in_a_part_as_in_the_whole(sizes: tuple[int, ...]) -> None:
    batch, heads, length, width = sizes
    shape = batch, length, heads, width
    flat = [drawn(*shape, seed=seed, dtype=torch.float32) for seed in (0, 1)]

    def scores(leaves: list[Tensor], own: int) -> list[Tensor]:
        left, right = (leaf.transpose(1, 2) for leaf in leaves)
        out = product_of_heads(left, right.transpose(2, 3), Slices(own, ALONE))
        found, *gradients = outcome(out, *leaves)
        return [found.transpose(1, 2), *gradients]

    whole = scores(flat, 8)
    torch.testing.assert_close(whole[0], torch.einsum("blhw,bmhw->blhm", *flat))
    for ranks in (2, 4, 8):
        own = heads // ranks
        for rank in range(ranks):
            at = slice(rank * own, (rank + 1) * own)
            part = [each.detach()[:, :, at].clone().requires_grad_() for each in flat]
            for one, other in zip(scores(part, own), whole, strict=True):
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
    assert is_sharded(model[0](given))
