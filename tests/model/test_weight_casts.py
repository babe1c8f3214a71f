"""What autograd keeps of gathered weights from forward to backward, in bf16: no casts, however a
model uses them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.base.errors import PlanError
from lockstep.base.torch_private import saved_tensors
from lockstep.model import weight_casts
from lockstep.model.weight_casts import drop_from_graph
from lockstep.testing.pool import WorkerPool

WIDTH, WORDS, EXPERTS, SAMPLES, LENGTH = 32, 64, 4, 4, 2
"""Each weight has more elements than an activation."""
SMALLEST = 2 * WIDTH * WIDTH
"""Bytes of the cast of a weight."""


class OwnLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t() + self.bias


class Block(nn.Module):
    """Weights of its own, used in all ways; `twice` is used twice."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"own": 2, "twice": 2, "experts": 3, "summed": 3, "picked": 3, "unbound": 3}
        for name, dims in shapes.items():
            shape = (EXPERTS, WIDTH, WIDTH)[3 - dims :]
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / WIDTH**0.5))
        self.layer, self.convolution = OwnLinear(WIDTH, WIDTH), nn.Conv1d(WIDTH, WIDTH, 1)
        self.attention, self.norm = (
            nn.MultiheadAttention(WIDTH, 2, batch_first=True),
            nn.LayerNorm(WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(F.linear(x @ self.own, self.twice)) @ self.twice.bfloat16()
        routed = torch.bmm(x, self.experts) + torch.einsum("ecd,edh->ech", x, self.summed)
        picked = [
            each @ self.picked[place] + each @ more
            for place, (each, more) in enumerate(zip(x, self.unbound, strict=True))
        ]
        x = self.layer(self.norm(routed + torch.stack(picked)))
        x = self.convolution(x.transpose(1, 2)).transpose(1, 2)
        attended: Tensor = x + self.attention(x, x, x)[0]
        return attended


class Model(nn.Module):
    """Has a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks = (
            nn.Embedding(WORDS, WIDTH),
            nn.ModuleList(Block() for _ in range(2)),
        )

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.words.weight)


class Found(NamedTuple):
    kept: int
    """Bytes of casts of weights that a loss finds kept."""
    fingerprint: str
    norms: list[float]


def kept_casts(output: Tensor) -> int:
    sizes: dict[int, int] = {}
    waiting = [output.grad_fn]
    found = set(waiting)
    while waiting:
        node = waiting.pop()
        assert node is not None
        for _, tensor in saved_tensors(node):
            storage = tensor.untyped_storage()
            if tensor.dtype is torch.bfloat16 and storage.nbytes() >= SMALLEST:
                sizes[storage.data_ptr()] = storage.nbytes()
        waiting += (
            following := {each for each, _ in node.next_functions if each is not None} - found
        )
        found |= following
    return sum(sizes.values())


def train(plan: str, run_dir: str, *, offloads: bool = False) -> Found:
    words = torch.randint(WORDS, (8 * SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    kept = 0
    with ls.Session(run_dir=run_dir, plan=plan, precision="bf16", seed=1) as session:
        made, optimizer = session.prepare(
            Model, lambda model: torch.optim.SGD(model.parameters(), lr=0.1)
        )

        def loss(output: Tensor, batch: Any) -> Tensor:
            nonlocal kept
            kept = max(kept, kept_casts(output))
            return F.cross_entropy(output.flatten(0, 1), batch[0].flatten())

        for step in session.steps(
            TensorDataset(words), global_batch=4 * SAMPLES, microbatch=SAMPLES, steps=2
        ):
            if offloads:
                with save_on_cpu():
                    step.compute(lambda batch: batch[0], loss)
            else:
                step.compute(lambda batch: batch[0], loss)
            step.commit(optimizer, clip_norm=1.0)
        norms = [float(each.norm()) for each in session.full_state_dict().values()]
        return Found(kept, ls.fingerprint(made), norms)


SHARDED = (
    "shard=2,numerics=bitwise",
    "shard=2,numerics=bitwise,sharding=gradients",
    "shard=2,numerics=bitwise,checkpointing=full",
)


def train_on_two(folder: str) -> dict[str, Found]:
    plans = (*SHARDED, "replicate=2,numerics=bitwise", "shard=2")
    found = {plan: train(plan, f"{folder}/{plan}") for plan in plans}
    return {**found, "on the CPU": train(SHARDED[0], f"{folder}/saved", offloads=True)}


def test_no_casts_of_gathered_weights_are_kept_and_the_bits_stay(
    pool: WorkerPool, tmp_path: Path
) -> None:
    (alone,) = pool.run(1, train, "replicate=1,numerics=bitwise", str(tmp_path / "one"))
    assert alone.kept >= 2 * sum(
        each.numel() for name, each in Model().named_parameters() if each.dim() > 1
    )
    found, other = pool.run(2, train_on_two, str(tmp_path / "two"))
    fast = found["shard=2"]
    for plan, (kept, fingerprint, _) in found.items():
        assert other[plan].fingerprint == fingerprint, plan
        assert kept == 0 or plan in ("replicate=2,numerics=bitwise", "on the CPU"), plan
        assert fingerprint == alone.fingerprint or found[plan] is fast, plan
    assert fast.norms == pytest.approx(alone.norms, rel=1e-2)


def doubled(cast: Tensor) -> Tensor:
    with torch.no_grad():
        return cast.mul_(2)


@pytest.mark.parametrize(
    ("change", "is_kept"),
    [
        (lambda weight: weight.bfloat16(), False),
        (
            lambda weight: (
                weight.permute(1, 2, 0)
                .unsqueeze(0)
                .transpose(-1, -2)
                .squeeze(0)
                .bfloat16()
                .movedim(-1, 0)
            ),
            False,
        ),
        (lambda weight: weight.view(6, 4).t()[-1].bfloat16(), False),
        (lambda weight: weight.to(torch.bfloat16, memory_format=torch.contiguous_format), False),
        (
            lambda weight: weight.transpose(1, 2).to(
                torch.bfloat16, memory_format=torch.contiguous_format
            ),
            True,
        ),
        (lambda weight: weight[1].t()[2:, 1::2].bfloat16()[0], False),
        (lambda weight: weight[-1, :, :-1].bfloat16(), False),
        (lambda weight: weight.unbind(2)[3].bfloat16(), False),
        (lambda weight: weight.chunk(3, -1)[1].bfloat16(), False),
        (lambda weight: weight.split([1, 2], 1)[1].bfloat16(), False),
        (lambda weight: weight.expand(2, 2, 3, 4).bfloat16(), False),
        (lambda weight: weight.double(), False),
        (lambda weight: weight[torch.tensor([1, 0])].bfloat16(), True),
        (lambda weight: (weight * 2).bfloat16(), True),
        (lambda weight: doubled(weight.bfloat16()), True),
        (lambda weight: weight[1:].to(torch.float32, copy=True), True),
        (lambda weight: torch.ops.aten.slice(weight, 1, None, 2)[:, 1:].bfloat16(), False),
    ],
)
def test_a_cast_is_made_again_where_its_memory_can_be_told_and_kept_elsewhere(
    change: Callable[[Tensor], Tensor], is_kept: bool
) -> None:
    weight = nn.Parameter(torch.arange(24.0).view(2, 3, 4) / 7)
    cast = change(weight)
    product = cast * torch.ones_like(cast).requires_grad_()
    assert product.grad_fn is not None
    expected = cast.detach().clone()
    drop_from_graph([product.grad_fn], {id(weight): "weight"}, lambda _: False, set())
    saved = product.grad_fn._raw_saved_self  # type: ignore[attr-defined]
    assert (saved.unpack_hook is None) is is_kept
    again = product.grad_fn._saved_self if not is_kept else cast  # type: ignore[attr-defined]
    assert (again.dtype, again.stride()) == (cast.dtype, cast.stride())
    assert torch.equal(again, expected)


def test_a_backward_that_does_not_use_a_weight_needs_none_of_its_memory() -> None:
    weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2)
    product = x.bfloat16() @ weight.bfloat16()
    assert product.grad_fn is not None
    drop_from_graph([product.grad_fn], {id(weight): "weight"}, lambda _: False, set())
    weight.untyped_storage().resize_(0)
    product.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_a_cast_changed_through_data_is_refused_once_and_without_data_kept() -> None:
    weight, x = nn.Parameter(torch.arange(4.0).view(2, 2) / 7), torch.ones(2, 2, requires_grad=True)
    compared: set[str] = set()

    def gradient(quantizes: Callable[[Tensor], object]) -> Tensor:
        cast = weight.bfloat16()
        quantizes(cast)
        product = x.bfloat16() @ cast
        drop_from_graph([product.grad_fn], {id(weight): "block.weight"}, lambda _: False, compared)
        (found,) = torch.autograd.grad(product.sum(), x)
        return found

    with pytest.raises(
        PlanError,
        match=r"'block\.weight' .* through \.data.* within torch\.no_grad\(\) and without \.data",
    ):
        gradient(lambda cast: cast.data.copy_((cast.data * 8).round() / 8))
    assert not compared

    def as_recommended(cast: Tensor) -> None:
        with torch.no_grad():
            cast.copy_((cast * 8).round() / 8)

    assert gradient(as_recommended).tolist() == [[0.125, 0.625]] * 2
    gradient(lambda cast: None)
    assert compared == {"block.weight"}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(weight_casts, "_sum_of_bits", None)  # is called no more
        gradient(lambda cast: None)


def test_a_graph_of_which_a_part_is_freed() -> None:
    weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2, requires_grad=True)
    hidden = (x.bfloat16() @ weight.bfloat16()).view(2, 2)[torch.tensor([1, 0])]
    torch.autograd.grad(hidden.sum(), x)
    output = (hidden * weight.bfloat16()) @ weight.bfloat16()
    drop_from_graph([output.grad_fn], {id(weight): "weight"}, lambda _: False, set())
    assert output.grad_fn._raw_saved_mat2.unpack_hook is not None  # type: ignore[union-attr]


def test_a_negated_view_of_a_cast() -> None:
    weight = nn.Parameter(torch.ones(2))
    cast = weight.bfloat16()
    product = torch._neg_view(cast) * cast
    drop_from_graph([product.grad_fn], {id(weight): "weight"}, lambda _: False, set())
    product.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [-2.0, -2.0]
