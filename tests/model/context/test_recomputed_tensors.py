"""What an attention saves while its keys are made again in the backward."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.model.context.recomputed_tensors import RecomputedTensors


class Held:
    """Something that a graph keeps alive."""


def attended(x: Tensor) -> Tensor:
    query = x * 2
    whole = torch.cat([query, query.sin()], -1).clone()
    key, value = torch.split(whole, x.shape[-1], -1)
    recomputed, again = RecomputedTensors(), query.detach()
    recomputed.add(whole, lambda: torch.cat([again, again.sin()], -1))
    with recomputed:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def held_by(output: Tensor) -> weakref.ref[Held]:
    held = Held()
    assert output.grad_fn is not None
    output.grad_fn.register_hook(lambda *_, held=held: None)
    return weakref.ref(held)


def test_a_graph_without_a_backward_is_freed() -> None:
    held = held_by(attended(torch.randn(1, 2, 5, 4, requires_grad=True)))
    assert held() is None


def test_a_gradient_of_a_gradient_is_that_of_a_usual_attention() -> None:
    found = []
    for with_remade in (True, False):
        x = torch.linspace(-1, 1, 40, dtype=torch.float64).view(1, 2, 5, 4).requires_grad_()
        y = x * 2
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            output = (
                attended(x)
                if with_remade
                else F.scaled_dot_product_attention(y, y, y.sin(), is_causal=True)
            )
        (slope,) = torch.autograd.grad(output.sin().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), x)[0])
    torch.testing.assert_close(*found)
