"""The arithmetic of loads and balance losses, for random routers."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st
from model.mixtures import Mixture
from torch import Tensor

from lockstep.model.expert.balance import (
    MORE,
    balance_loss,
    bias_step,
    chosen_per_token,
    loads_of_samples,
    probabilities,
    relative_load,
    summed_probabilities,
    z_loss,
)
from lockstep.model.expert.routers import RoutingRecorder, find_routers
from lockstep.model.trial import trial

seeds = st.integers(0, 2**31)
counts = st.integers(1, 12)


def routed(seed: int, tokens: int, experts: int, chosen: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, index, and which tokens count."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=generator, dtype=torch.float64)
    counted = torch.rand(tokens, generator=generator) < 0.7
    return logits, logits.topk(chosen).indices, counted


def load_of(index: Tensor, is_finite: Tensor, counted: Tensor | None, experts: int) -> Tensor:
    return loads_of_samples(index, is_finite, counted, experts, samples=1)[0]


def finite(logits: Tensor) -> Tensor:
    return torch.isfinite(logits).all(-1)


@given(seeds, counts, st.integers(1, 6), st.data())
@settings(deadline=None)
def test_a_load_is_the_sum_of_the_loads_of_any_parts(
    seed: int, tokens: int, experts: int, data: st.DataObject
) -> None:
    chosen = data.draw(st.integers(1, experts))
    cuts = sorted(data.draw(st.lists(st.integers(0, tokens), max_size=4)))
    logits, index, counted = routed(seed, tokens, experts, chosen)
    whole = load_of(index, finite(logits), counted, experts)
    parts = [
        load_of(index[a:b], finite(logits[a:b]), counted[a:b], experts)
        for a, b in pairwise([0, *cuts, tokens])
    ]
    assert torch.equal(torch.stack(parts).sum(0), whole)
    by_hand = [int(((index == e) & counted[:, None]).sum()) for e in range(experts)]
    assert whole.tolist() == [*by_hand, int(counted.sum()), 0, 0]
    assert whole[:experts].sum() == chosen * counted.sum()


@given(seeds, st.integers(1, 4), counts, st.integers(2, 6))
@settings(deadline=None)
def test_a_balance_loss_is_e_times_f_times_mean_probability(
    seed: int, samples: int, tokens: int, experts: int
) -> None:
    logits, index, counted = routed(seed, samples * tokens, experts, 2)
    for mask in (None, counted):
        kept = slice(None) if mask is None else mask
        rows, of_rows = logits[kept], index[kept]
        if not len(rows):
            continue
        f = torch.stack([(of_rows == e).sum().double() / len(rows) for e in range(experts)])
        expected = experts * (f * rows.softmax(-1).mean(0)).sum()
        load = load_of(index, finite(logits), mask, experts)
        given_ = probabilities(logits, "softmax")
        summed = summed_probabilities(given_, mask, samples=samples)
        found = balance_loss(chosen_per_token(load), summed.sum(0)) / len(rows)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        z = z_loss(logits, mask)
        torch.testing.assert_close(z, rows.exp().sum(-1).log().square().sum())


def test_an_even_router_has_the_loss_of_its_choices() -> None:
    index = torch.arange(8).view(4, 2)  # 8 experts, each chosen once
    load = load_of(index, torch.ones(4, dtype=torch.bool), None, 8)
    summed = torch.full((8,), 4 / 8, dtype=torch.float64)
    assert balance_loss(chosen_per_token(load), summed) / 4 == pytest.approx(2.0)
    assert relative_load(load).tolist() == [1.0] * 8
    assert bias_step(load).tolist() == [0] * 8


def test_choices_out_of_range_and_logits_that_are_not_finite_are_counted() -> None:
    index = torch.tensor([[0, 3], [-1, 1], [2, 0]])
    is_finite = torch.tensor([True, False, True])
    assert load_of(index, is_finite, None, 3).tolist() == [2, 1, 1, 3, 2, 1]
    by_sample = loads_of_samples(index, is_finite, None, 3, samples=3)
    assert by_sample.tolist() == [
        [1, 0, 0, 1, 1, 0],
        [0, 1, 0, 1, 1, 1],
        [1, 0, 1, 1, 0, 0],
    ]
    only_third = torch.tensor([False, False, True])
    assert load_of(index, is_finite, only_third, 3).tolist() == [1, 0, 1, 1, 2, 0]
    nothing = load_of(index[:0], is_finite[:0], None, 3)
    assert nothing.tolist() == [0] * 6
    assert not chosen_per_token(nothing).any()
    assert not relative_load(nothing).any()


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=9))
def test_a_bias_moves_up_for_fewer_tokens_than_the_mean(loads: list[int]) -> None:
    moved = bias_step(torch.tensor([*loads, *[0] * MORE])).tolist()
    total, number = sum(loads), len(loads)
    assert moved == [(total > each * number) - (total < each * number) for each in loads]


def test_sigmoid_scores_are_divided_by_their_sum() -> None:
    logits = torch.tensor([[0.0, 2.0, -1.0]], dtype=torch.float64)
    found = probabilities(logits, "sigmoid")
    assert found.sum() == pytest.approx(1.0)
    assert found[0, 1] / found[0, 0] == pytest.approx(float(torch.sigmoid(logits[0, 1])) / 0.5)


def test_a_forward_in_which_a_module_checks_itself_is_not_recorded() -> None:
    model = Mixture()
    recorder = RoutingRecorder(model, find_routers(model, None, None))
    recorder.start()
    text = torch.zeros(2, 3, dtype=torch.int64)
    with trial():
        model(text)
    model(text)
    assert [(len(each.index), len(each.logits)) for each in recorder.take()] == [(1, 1)] * 2
