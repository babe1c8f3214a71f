"""Recomputation changes what is kept, and nothing else."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.base.errors import RecipeError
from lockstep.model import parallelize
from lockstep.model.block_wrappers import checkpoint_activations, compile_forward
from lockstep.plan import Plan


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 16)
        )

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x + scale * self.inner(x)


def kept_and_gradients(model: nn.Module) -> tuple[int, list[Tensor]]:
    """The bytes that a forward keeps for its backward, parameters aside, and the gradients."""
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in parameters:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    torch.manual_seed(3)
    inputs = torch.randn(32, 16)
    with saved_tensors_hooks(note, lambda tensor: tensor):
        output = model(inputs)
        bytes_kept = sum(kept.values())
    output.square().sum().backward()
    return bytes_kept, [parameter.grad for parameter in model.parameters()]


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)))


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_gradients_have_the_same_bits_dropout_included(mode):
    plain, wrapped = blocks(), blocks()
    for block in wrapped:
        checkpoint_activations(block, mode)
    _, expected = kept_and_gradients(plain)
    _, found = kept_and_gradients(wrapped)
    assert all(map(torch.equal, found, expected))


def test_full_keeps_the_inputs_of_the_blocks_only():
    model = blocks()
    for block in model:
        checkpoint_activations(block, "full")
    assert kept_and_gradients(model)[0] == 3 * 32 * 16 * 4 < kept_and_gradients(blocks())[0]


def test_each_of_several_backwards_draws_what_the_forward_drew_and_leaves_the_generator_alone():
    plain, wrapped = blocks(), blocks()
    for block in wrapped:
        checkpoint_activations(block, "full")
    found = []
    for model in (plain, wrapped):
        torch.manual_seed(3)
        loss = model(torch.ones(32, 16)).square().sum()
        before = torch.get_rng_state()
        for _ in range(2):
            loss.backward(retain_graph=True)
        assert torch.equal(torch.get_rng_state(), before)
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


class Products(TorchDispatchMode):
    """Counts the matrix products with a bias, which no backward has of its own."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.addmm.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("mode", "computed_again"), [("full", 3), ("selective", 0)])
def test_selective_does_not_compute_matrix_products_again(mode, computed_again):
    """Nor does full the second one of a block, whose result nothing keeps."""
    model = blocks()
    for block in model:
        checkpoint_activations(block, mode)
    loss = model(torch.randn(4, 16)).sum()
    with Products() as products:
        loss.backward()
    assert products.count == computed_again


def test_names_and_keywords_stay():
    model = Block()
    before = copy.deepcopy(model.state_dict())
    checkpoint_activations(model, "full")
    assert list(model.state_dict()) == list(before)
    x = torch.randn(2, 16)
    with torch.no_grad():
        assert torch.equal(model(x, scale=0.0), x)


class Cache:
    """As far as it matters, that of transformers: each forward of a block lengthens it."""

    __module__ = "transformers.cache_utils"

    def __init__(self) -> None:
        self.keys: list[Tensor] = []

    def get_seq_length(self) -> int:
        return sum(keys.shape[0] for keys in self.keys)


class Remembers(nn.Linear):
    def forward(self, x: Tensor, past_key_values: Cache | None = None) -> Tensor:
        keys = [super().forward(x)]
        if past_key_values is not None:
            past_key_values.keys += keys
            keys = past_key_values.keys
        return torch.cat(keys).square()


def test_a_block_that_is_computed_again_is_not_given_a_cache_to_lengthen():
    block = Remembers(4, 4)
    checkpoint_activations(block, "full")
    cache = Cache()
    block(torch.ones(2, 4), past_key_values=cache).sum().backward()
    assert not cache.keys
    with torch.no_grad():
        block(torch.ones(2, 4), past_key_values=cache)
    assert cache.get_seq_length() == 2
    with pytest.raises(
        RecipeError,
        match=(r"a cache of 2 keys \(a Cache\) .*use_cache=False, or choose checkpointing=none"),
    ):
        block(torch.ones(2, 4), past_key_values=cache)


@pytest.mark.parametrize("bitwise", [True, False])
def test_kernels_are_not_chosen_by_their_time_where_bits_count(monkeypatch, bitwise):
    given = {}
    monkeypatch.setattr(
        torch, "compile", lambda forward, **options: given.update(options) or forward
    )
    compile_forward(Block(), bitwise=bitwise)
    assert given["options"]["deterministic"] is bitwise


def test_compiled_blocks_keep_no_results_that_they_overwrite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(parallelize, "compile_forward", lambda block, *, bitwise: None)
    monkeypatch.setattr(
        parallelize, "checkpoint_activations", lambda block, mode: asked.append(mode)
    )
    for plan in ("checkpointing=selective", "compile=yes,checkpointing=selective", "compile=yes"):
        parallelize._wrap_blocks(nn.Sequential(Block()), ["0"], Plan.parse(plan))
    assert asked == ["selective", "full"]
