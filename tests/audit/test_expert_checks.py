"""Faults of mixtures of experts are read from records: their experts' gradients, norms, copies and
initial values, their routers, and their balance losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from audit.given_records import (
    Gradients,
    Values,
    causes,
    collective,
    given,
    only,
    row,
    scaled,
    sketched,
    step,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lockstep.audit.checks.experts import check_experts, divided
from lockstep.audit.checks.gradients import check_applied_gradients
from lockstep.audit.checks.losses import check_losses
from lockstep.audit.checks.replicas import check_replicas
from lockstep.audit.finding import AreaResult, Cause
from lockstep.audit.probes.balance import loads_of_balance
from lockstep.audit.records import Records
from lockstep.evidence.rows import Row

DENSE, ROUTER, EXPERT = "blocks.0.up.weight", "blocks.0.router.weight", "blocks.0.experts.up"
PAIR, PAIRS = ([0, 1],), ([0, 1], [2, 3])
Applied = Callable[[int, Gradients, Gradients], Gradients]


def values(*place: int) -> Values:
    return np.random.default_rng(place).standard_normal(24)


def ranks(
    applied: Applied | None = None,
    *,
    groups: Sequence[list[int]] = PAIR,
    expert: str = EXPERT,
    before: Callable[[int], Values] = lambda place: values(9, place),
    change: Callable[[int, Row], Row] = lambda rank, row: row,
    rows: Sequence[Row] = (),
) -> Records:
    """Ranks that exchange tokens in groups, and take a step. `applied(rank, mean, own)`: what a
    rank applies to its expert. `before(place)`: its initial values."""
    count, size = sum(map(len, groups)), len(groups[0])
    parts = [
        {name: values(number, rank) for number, name in enumerate((DENSE, ROUTER, EXPERT))}
        for rank in range(count)
    ]
    mean = {name: np.mean([part[name] for part in parts], axis=0) for name in parts[0]}
    found = []
    for rank, part in enumerate(parts):
        copies = [parts[each][EXPERT] for each in range(count) if each % size == rank % size]
        own = {EXPERT: np.sum(copies, axis=0) / count}
        gradients = {**mean, **(own if applied is None else applied(rank, mean, own))}
        named = {expert if name == EXPERT else name: each for name, each in gradients.items()}
        start = {
            name: sketched(before(rank % size) if name == expert else values(7, 7))
            for name in named
        }
        group = next(each for each in groups if rank in each)
        made = step(
            applied={name: sketched(each) for name, each in named.items()},
            added={
                "0": {
                    expert if name == EXPERT else name: sketched(each)
                    for name, each in part.items()
                }
            },
            before=start,
            parameters=start,
        )
        exchange = collective("all_to_all_single", "train.py:11", ranks=group, shape=[])
        found.append([exchange, *rows, change(rank, made)])
    return given(*found)


def checked(records: Records) -> AreaResult:
    return check_experts(divided(records))


def test_right_experts_raise_no_alarm_anywhere() -> None:
    for groups in (PAIR, PAIRS):
        apart = divided(ranks(groups=groups))
        assert apart.names == [EXPERT]
        assert apart.groups == [tuple(each) for each in groups]
        result = check_experts(apart)
        assert (result.findings, result.unseen) == ([], [])
        assert "1 steps apply their gradients with the factor of all others" in result.right
        for check in (check_applied_gradients, check_replicas, check_losses):
            assert not check(apart.others).findings, check


@pytest.mark.parametrize("groups", [PAIR, PAIRS])
@pytest.mark.parametrize(("factor", "text"), [(2.0, "2 times"), (0.5, "1/2 times")])
def test_a_gradient_with_another_factor_than_all_others_is_found(
    groups: Sequence[list[int]], factor: float, text: str
) -> None:
    finding = only(checked(ranks(lambda _, __, own: scaled(own, factor), groups=groups)))
    assert (finding.cause, finding.line) == (Cause.EXPERT_GRADIENT_SCALE, "train.py:19")
    assert finding.names == [EXPERT]
    assert f"that of experts is {text} what it should be" in finding.evidence


def test_a_factor_of_the_scripts_own_is_no_finding() -> None:
    result = checked(ranks(lambda _, __, own: scaled(own, 1.3)))
    assert not result.findings
    assert "1.3 times as much as others" in result.unseen[0]


def test_experts_that_are_averaged_with_other_experts_are_found() -> None:
    finding = only(checked(ranks(lambda _, mean, __: {EXPERT: mean[EXPERT]})))
    assert (finding.cause, finding.line) == (Cause.EXPERTS_MIXED, "train.py:19")
    assert "0.5 × rank 0's + 0.5 × rank 1's" in finding.evidence


def test_copies_whose_gradients_are_not_summed_differ() -> None:
    def drifted(rank: int, row: Row) -> Row:
        moved = {**row["parameters"], EXPERT: sketched(values(9, rank % 2) + values(3, rank))}
        return {**row, "parameters": moved}

    finding = only(checked(ranks(groups=PAIRS, change=drifted)))
    assert (finding.cause, finding.line) == (Cause.EXPERT_COPIES_DIFFER, "train.py:20")
    assert "differs between ranks 0 and 2, which are both number 0" in finding.evidence


def test_copies_that_begin_with_other_values_differ() -> None:
    def other(rank: int, row: Row) -> Row:
        return {**row, "before": {**row["before"], EXPERT: sketched(values(9, rank))}}

    finding = only(checked(ranks(groups=PAIRS, change=other)))
    assert (finding.cause, finding.line) == (Cause.EXPERT_COPIES_DIFFER, "train.py:5")


def test_experts_that_begin_alike_are_found_by_their_name() -> None:
    finding = only(checked(ranks(before=lambda _: values(9, 9))))
    assert (finding.cause, finding.line) == (Cause.EXPERTS_ALIKE, "train.py:5")
    unnamed = divided(ranks(before=lambda _: values(9, 9), expert="blocks.0.up"))
    assert unnamed.names == []
    assert causes(check_applied_gradients(unnamed.others)) == {Cause.NOT_REDUCED}


def test_shared_experts_are_no_divided_experts() -> None:
    apart = divided(ranks(expert="blocks.0.shared_experts.up", before=lambda _: values(9, 9)))
    assert apart.names == []
    assert causes(check_applied_gradients(apart.others)) == {Cause.NOT_REDUCED}


def test_experts_of_ranks_may_have_names_of_their_own() -> None:
    def renamed(rank: int, row: Row) -> Row:
        def of(sketches: Any) -> Any:
            return {
                f"experts.{rank}" if name == EXPERT else name: each
                for name, each in sketches.items()
            }

        return {
            **row,
            **{kind: of(row[kind]) for kind in ("applied", "before", "parameters")},
            "added": {"0": of(row["added"]["0"])},
        }

    right = ranks(change=renamed)
    assert divided(right).names == ["experts.0", "experts.1"]
    assert not checked(right).findings
    twice = only(checked(ranks(lambda _, __, own: scaled(own, 2.0), change=renamed)))
    assert twice.cause is Cause.EXPERT_GRADIENT_SCALE


NORMS = {
    "whole": lambda dense, own: np.sqrt(dense + sum(own)),
    "own": lambda dense, own: np.sqrt(dense + own[0]),
    "others": lambda dense, own: np.sqrt(dense),
}


@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_without_other_ranks_experts_is_found(norm: str) -> None:
    squares = [
        {name: each[-1] for name, each in row["applied"].items()}
        for row in (rank.steps[0] for rank in ranks().ranks)
    ]

    def clipped(rank: int, row: Row) -> Row:
        own = [squares[each % 2][EXPERT] for each in (rank, rank + 1)]
        dense = squares[0][DENSE] + squares[0][ROUTER]
        clip = {"line": "train.py:18", "scaled": False, "backward": 0, "reduced": row["applied"]}
        clip["norm"] = float(NORMS[norm](dense, own))
        return {**row, "clip": clip, "clipped": [{"backward": 0, "line": "train.py:18"}]}

    result = checked(ranks(change=clipped))
    if norm == "whole":
        assert not result.findings
        return
    finding = only(result)
    assert (finding.cause, finding.line) == (Cause.NORM_WITHOUT_EXPERTS, "train.py:18")
    what = "its own experts and of all other" if norm == "own" else "the parameters that are no"
    assert f"the norm of {what}" in finding.evidence


SCALES: dict[str, Callable[[float, Sequence[float]], tuple[float, float]]] = {
    **{
        name: lambda dense, own, norm=norm: (norm(dense, own),) * 2  # type: ignore[misc]
        for name, norm in NORMS.items()
    },
    "others alone": lambda dense, own: (dense**0.5, 1.0),
    "not at all": lambda dense, own: (1.0, 1.0),
}
"""Way to scale -> the norms by which a script divides the gradients of others and of experts."""


def steps_scaled_by(scale: str, count: int = 4) -> Records:
    """Steps of two ranks, whose gradients a script scales by a norm, without torch's function."""
    found: list[list[Row]] = [
        [collective("all_to_all_single", "train.py:11", ranks=[0, 1], shape=[])] for _ in range(2)
    ]
    for index in range(count):
        parts = [
            {name: values(number, rank, index) for number, name in enumerate((DENSE, EXPERT))}
            for rank in range(2)
        ]
        mean, own = (parts[0][DENSE] + parts[1][DENSE]) / 2, [each[EXPERT] / 2 for each in parts]
        squares = [float(each @ each) for each in own]
        for rank, part in enumerate(parts):
            norms = SCALES[scale](float(mean @ mean), [squares[rank], squares[1 - rank]])
            applied = {DENSE: 0.1 * mean / norms[0], EXPERT: 0.1 * own[rank] / norms[1]}
            before = {DENSE: sketched(values(7, 7)), EXPERT: sketched(values(9, rank))}
            found[rank].append(
                step(
                    index,
                    applied={name: sketched(each) for name, each in applied.items()},
                    added={"0": {name: sketched(each) for name, each in part.items()}},
                    before=before,
                    parameters=before,
                )
            )
    return given(*found)


@pytest.mark.parametrize("scale", SCALES)
def test_gradients_that_a_script_scales_by_a_norm_without_other_ranks_experts(scale: str) -> None:
    result = checked(steps_scaled_by(scale))
    if scale in ("own", "others"):
        finding = only(result)
        assert (finding.cause, finding.line) == (Cause.NORM_WITHOUT_EXPERTS, "train.py:20")
        what = {
            "own": "its own experts and of all other parameters",
            "others": "the parameters that are no experts",
        }[scale]
        assert f"in 4 steps the norm of {what} of rank 0 is 0.1" in finding.evidence
        assert not checked(steps_scaled_by(scale, count=2)).findings, "two norms are a coincidence"
        return
    assert not result.findings


def test_the_norm_of_own_experts_is_whole_if_others_have_no_gradient() -> None:
    def clipped(rank: int, row: Row) -> Row:
        zero = {**row["applied"], **({EXPERT: sketched(np.zeros(24))} if rank else {})}
        norm = sum(each[-1] for each in row["applied"].values()) ** 0.5
        clip = {"line": "train.py:18", "scaled": False, "backward": 0, "reduced": zero}
        clip["norm"] = norm if rank == 0 else (sum(each[-1] for each in zero.values()) + own) ** 0.5
        return {**row, "clip": clip, "clipped": [{"backward": 0, "line": "train.py:18"}]}

    own = ranks().ranks[0].steps[0]["applied"][EXPERT][-1]
    assert not checked(ranks(change=clipped)).findings


def test_a_router_without_a_gradient_is_found() -> None:
    def lost(rank: int, row: Row) -> Row:
        return {**row, "applied": {**row["applied"], ROUTER: None}, "unused": [ROUTER]}

    def zero(rank: int, row: Row) -> Row:
        return {**row, "applied": {**row["applied"], ROUTER: sketched(np.zeros(24))}}

    for change in (lost, zero):
        finding = only(checked(ranks(change=change)))
        assert (finding.cause, finding.names) == (Cause.ROUTER_WITHOUT_GRADIENT, [ROUTER])

    def frozen(rank: int, row: Row) -> Row:
        return {**row, "applied": {**row["applied"], ROUTER: None}}

    assert not checked(ranks(change=frozen)).findings


def balances(*loads: Sequence[float]) -> Records:
    return given(
        *[[row("balance", "train.py:19", number=0, loads=[load]), step()] for load in loads]
    )


def test_a_balance_of_a_ranks_own_tokens_is_found() -> None:
    finding = only(checked(balances([0.5, 0.3, 0.2], [0.1, 0.3, 0.6])))
    assert (finding.cause, finding.line) == (Cause.BALANCE_OF_OWN_TOKENS, "train.py:19")
    assert "expert 0 has 0.5, 0.1 of the choices" in finding.evidence
    right = checked(balances([0.5, 0.3, 0.2], [5.0, 3.0, 2.0]))
    assert not right.findings
    assert "take one load of experts on all ranks" in right.right
    assert not checked(balances([0.5, 0.5])).right, "one process has nothing to compare"


# The probe

LOGITS = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 3.0]], requires_grad=True)
LOAD = torch.tensor([0.75, 0.0, 0.25])
FORMULAS: dict[str, Callable[[], Tensor]] = {
    "sum": lambda: 3 * (LOAD * LOGITS.softmax(-1).mean(0)).sum(),
    "other order": lambda: torch.sum(LOGITS.softmax(-1).mean(dim=0) * LOAD),
    "dot": lambda: LOAD.dot(LOGITS.softmax(-1).mean(0)),
    "normalized scores": lambda: (LOAD * (LOGITS.sigmoid() / 2).sum(0)).sum(),
    "padded": lambda: (LOAD * ((LOGITS.softmax(-1) * torch.ones(2, 1)).sum(0) / 2)).sum(),
    "choices apart": lambda: (LOAD.div(2).expand(2, 3) * LOGITS.softmax(-1).mean(0)[None]).sum(),
    "layers added": lambda: (LOAD * (LOGITS.softmax(-1).sum(0) + LOGITS.softmax(-1).sum(0))).sum(),
}


@pytest.mark.parametrize("formula", FORMULAS)
def test_the_load_of_a_balance_loss_is_found_in_its_graph(formula: str) -> None:
    rest = torch.nn.functional.cross_entropy(LOGITS, torch.tensor([0, 2]))
    for loss in (FORMULAS[formula](), (rest + 0.01 * FORMULAS[formula]()) / 4):
        ((load),) = loads_of_balance(loss)
        assert load == pytest.approx(LOAD.tolist())


def test_other_losses_have_no_load() -> None:
    probabilities = LOGITS.softmax(-1)
    for loss in (
        (probabilities * torch.ones(2, 3)).sum(),
        (LOAD * LOGITS.mean(0)).sum(),
        torch.nn.functional.cross_entropy(LOGITS, torch.tensor([0, 2])),
        (probabilities.mean(0) * probabilities.mean(0)).sum(),
    ):
        assert loads_of_balance(loss) == []


def test_a_checkpointed_balance_is_not_seen_and_not_computed_again() -> None:
    calls = []

    def computed(logits: Tensor) -> Tensor:
        calls.append(1)
        return (LOAD * logits.softmax(-1).mean(0)).sum()

    loss: Any = checkpoint(computed, LOGITS, use_reentrant=False)
    assert loads_of_balance(loss) == []
    assert len(calls) == 1
