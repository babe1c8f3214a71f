"""Gradients sent in fewer bytes: near the exact ones, alike on all ranks, with nothing lost
unsaid."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import tiered
from torch import Tensor, distributed, nn
from training import kept
from training.subjects import network, recipe, rows

import lockstep as ls
from lockstep.base.errors import CheckpointError, LossError, RecipeError
from lockstep.comm import segment
from lockstep.testing.pool import WorkerPool

NEAR = {
    "none": 1e-6,
    "fp16": 3e-3,
    "bf16": 3e-2,
    "int8": 3e-2,
    "powersgd:1": 0.6,
    "powersgd:3": 1e-5,
}
"""How near to exact five steps of SGD stay, in units of their way. A rank of 3 is that of the
network's smaller matrix."""
ROUNDED = ("bf16", "fp16", "int8")
ALL = (*ROUNDED, "powersgd:1")


def wide() -> nn.Module:
    return network(width=64)


def trained(
    run_dir: str, plan: str, gradient_compression: str, hosts: str = "aaa"
) -> tuple[str, Tensor, float]:
    """Each rank is on the host that its letter names. Returns the fingerprint, the way of all
    parameters as one vector, the first loss."""
    segment.process_id_space = lambda: [
        hosts[distributed.get_rank()] if distributed.is_initialized() else "a",
        1,
    ]  # type: ignore[attr-defined]
    way = Way()
    optimizer: Callable[..., Any] = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)  # noqa: E731
    changes = {
        "model": wide,
        "optimizer": optimizer,
        "steps": 5,
        "gradient_compression": gradient_compression,
        "clip_norm": 100.0,
    }
    result = ls.train(recipe(**changes), run_dir=run_dir, plan=plan, hooks=[way])
    return result.fingerprint, way.so_far, way.first_loss


class Way(ls.Hook):
    def on_start(self, run: Any) -> None:
        self.first = torch.cat([p.detach().reshape(-1).clone() for p in run.model.parameters()])

    def after_step(self, run: Any) -> None:
        if run.step == 1:
            self.first_loss = run.loss
        self.so_far = (
            torch.cat([p.detach().reshape(-1) for p in run.model.parameters()]) - self.first
        )


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("gradient_compression", NEAR)
def test_ranks_stay_alike_and_near_the_exact_way_whatever_carries_it(
    pool: WorkerPool, tmp_path: Path, gradient_compression: str, size: int
) -> None:
    ((_, exact, loss),) = pool.run(1, trained, str(tmp_path / "alone"), "replicate=1", "none")
    ways = {"memory": "auto", "gloo": "torch"}
    found = {
        name: pool.run(
            size,
            trained,
            str(tmp_path / name),
            f"replicate={size},transport={transport}",
            gradient_compression,
        )
        for name, transport in ways.items()
    }
    for everyone in found.values():
        assert len({fingerprint for fingerprint, _, _ in everyone}) == 1
        # exact sums the mean over three ranks, whose last digit is rounded
        if gradient_compression != "none" or size == 2:
            assert everyone[0][2] == loss
    if gradient_compression != "none":
        assert found["memory"][0][0] == found["gloo"][0][0]
    away = float((found["gloo"][0][1] - exact).norm() / exact.norm())
    assert away <= NEAR[gradient_compression]
    if gradient_compression in ("bf16", "fp16", "int8", "powersgd:1"):
        assert away > 1e-5  # it is what was asked for, and not the exact sum


@pytest.mark.parametrize(
    "gradient_compression", tiered(dict.fromkeys(ALL, 2), always=["int8", "powersgd:1"], most=1)
)
def test_ranks_of_several_hosts_stay_alike(
    pool: WorkerPool, tmp_path: Path, gradient_compression: str
) -> None:
    ((_, exact, loss),) = pool.run(1, trained, str(tmp_path / "alone"), "replicate=1", "none")
    everyone = pool.run(
        3, trained, str(tmp_path / "hosts"), "replicate=3", gradient_compression, "aba"
    )
    assert len({fingerprint for fingerprint, _, _ in everyone}) == 1
    assert everyone[0][2] == loss
    assert (
        1e-5 < float((everyone[0][1] - exact).norm() / exact.norm()) <= NEAR[gradient_compression]
    )


@pytest.mark.parametrize(
    "gradient_compression", tiered(dict.fromkeys(ALL, 2), always=["int8", "powersgd:1"], most=1)
)
def test_one_process_sends_nothing_and_computes_exactly(
    pool: WorkerPool, tmp_path: Path, gradient_compression: str
) -> None:
    found = [
        pool.run(1, trained, str(tmp_path / each), "replicate=1", each)[0][0]
        for each in ("none", gradient_compression)
    ]
    assert found[0] == found[1]


class Table(nn.Module):
    """One matrix, from zeros, and a vector that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(12, 40))
        self.unused = nn.Parameter(torch.ones(3))


def directions(step: int, rank: int) -> Tensor:
    """A gradient of numbers of very different sizes and full rank, the same in every step."""
    del step
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(12, 40, generator=generator) * 10.0 ** (torch.arange(40) % 4)


def late(step: int, rank: int) -> Tensor:
    return directions(step, rank) * (step >= 3)


def stepped(
    run_dir: str,
    gradient_compression: str,
    steps: int,
    gradient: Callable[[int, int], Tensor],
    weights: Sequence[float] | None,
) -> Tensor:
    """The matrix after so many steps of length 1 along the mean of the ranks' gradients. `weights`:
    each step's, if any."""
    with ls.Session(
        run_dir=run_dir,
        plan="replicate=auto,transport=torch",
        gradient_compression=gradient_compression,
    ) as session:
        model, optimizer = session.prepare(
            Table, lambda model: torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.0)
        )
        rank = session.rank
        for step in session.steps(None, global_batch=session.world_size, microbatch=1, steps=steps):
            for _ in step.microbatches():
                loss = (model.matrix * gradient(step.index, rank)).sum()
                step.backward(
                    loss
                    if weights is None
                    else ls.Loss(loss * weights[step.index], weights[step.index])
                )
            step.commit(optimizer)
        assert torch.equal(model.unused, torch.ones(3))
        return model.matrix.detach().clone()


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("gradient_compression", ["int8", "powersgd:2"])
def test_what_is_not_sent_in_one_step_is_sent_in_the_next_ones(
    pool: WorkerPool, tmp_path: Path, gradient_compression: str, size: int
) -> None:
    """So the way falls short by what the last steps lost, however many there were."""
    short = {}
    for steps in (1, 40):
        everyone = pool.run(
            size, stepped, str(tmp_path / f"{steps}"), gradient_compression, steps, directions, None
        )
        assert all(torch.equal(each, everyone[0]) for each in everyone)
        exact = -steps * torch.stack([directions(0, rank) for rank in range(size)]).mean(dim=0)
        short[steps] = float((everyone[0] - exact).norm())
    assert short[1] > 0
    assert short[40] < (3 if gradient_compression == "int8" else 12) * short[1]


def test_a_matrix_whose_gradient_was_zero_is_sent_once_it_is_not(
    pool: WorkerPool, tmp_path: Path
) -> None:
    everyone = pool.run(2, stepped, str(tmp_path / "run"), "powersgd:1", 40, late, None)
    exact = -37 * torch.stack([directions(0, rank) for rank in range(2)]).mean(dim=0)
    assert torch.equal(everyone[0], everyone[1])
    assert float((everyone[0] - exact).norm()) < 0.5 * float(exact.norm())


def test_what_is_left_keeps_its_size_where_the_scale_of_losses_changes(
    pool: WorkerPool, tmp_path: Path
) -> None:
    """The weight of a step that only the forward knows: the first step's scale is a guess, 500
    times off."""
    found = pool.run(2, stepped, str(tmp_path / "weighted"), "int8", 3, directions, [1000.0] * 3)[0]
    plain = pool.run(2, stepped, str(tmp_path / "plain"), "int8", 3, directions, None)[0]
    exact = -3 * torch.stack([directions(0, rank) for rank in range(2)]).mean(dim=0)
    assert float((found - exact).norm()) < 2 * float((plain - exact).norm())


def huge(step: int, rank: int) -> Tensor:
    return directions(step, rank) * 1e6


@pytest.mark.parametrize("gradient_compression", ROUNDED)
def test_gradients_beyond_the_range_of_a_short_type_come_out_right(
    pool: WorkerPool, tmp_path: Path, gradient_compression: str
) -> None:
    found = pool.run(2, stepped, str(tmp_path / "run"), gradient_compression, 1, huge, None)[0]
    exact = -torch.stack([huge(0, rank) for rank in range(2)]).mean(dim=0)
    assert float((found - exact).norm()) < 0.04 * float(exact.norm())


def broken(step: int, rank: int) -> Tensor:
    made = directions(step, rank)
    made[3, 3] = math.inf if rank == 1 and step == 1 else 1.0
    return made


@pytest.mark.parametrize(
    "gradient_compression", tiered(dict.fromkeys(ALL, 2), always=["int8", "powersgd:1"], most=1)
)
def test_a_gradient_that_is_not_finite_on_one_rank_ends_the_run_on_all(
    pool: WorkerPool, tmp_path: Path, gradient_compression: str
) -> None:
    with pytest.raises(LossError, match="finite"):
        pool.run(2, stepped, str(tmp_path / "run"), gradient_compression, 3, broken, None)


def scaled(run_dir: str, gradient_compression: str, first: float) -> list[Tensor]:
    """The matrix after each of three steps in fp16. `first`: another parameter's gradient in the
    first step, in which the matrix has none where it is 0."""
    found = []
    with ls.Session(
        run_dir=run_dir,
        plan="replicate=2,transport=torch",
        gradient_compression=gradient_compression,
        precision="fp16",
    ) as session:
        model, optimizer = session.prepare(
            Table, lambda model: torch.optim.SGD(model.parameters(), lr=1.0)
        )
        for step in session.steps(None, global_batch=2, microbatch=1, steps=3):
            for _ in step.microbatches():
                loss = (model.matrix * directions(0, session.rank)).sum()
                step.backward(
                    loss if step.index else loss * bool(first) + model.unused.sum() * first
                )
            step.commit(optimizer)
            found.append(model.matrix.detach().clone())
    return found


@pytest.mark.parametrize(
    ("gradient_compression", "first", "behind"), [("int8", 0.0, 0), ("powersgd:1", 1.0, 1)]
)
def test_a_step_that_is_skipped_leaves_nothing_behind(
    pool: WorkerPool, tmp_path: Path, gradient_compression: str, first: float, behind: int
) -> None:
    """The steps after it are those of a run without it: the loss scale, half of what it was,
    changes no bits.

    DDP lays out its buckets anew after the first step, and so the blocks of int8: there that run
    begins with a step that sends nothing.
    """
    skipped, plain = (
        pool.run(2, scaled, str(tmp_path / str(each)), gradient_compression, each)[0]
        for each in (1e35, first)
    )
    assert not bool(skipped[0].any())
    assert bool(skipped[1].any())
    for after, without in zip(skipped[behind:], plain, strict=False):
        assert torch.equal(after, without)


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [
        row
        for row in map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
        if row["event"] == name
    ]


@pytest.mark.parametrize(
    "gradient_compression", tiered(dict.fromkeys(ALL, 2), always=["int8", "powersgd:1"], most=1)
)
def test_a_run_goes_on_and_says_what_is_not_saved(
    pool: WorkerPool, tmp_path: Path, gradient_compression: str
) -> None:
    whole = pool.run(
        2,
        kept.run,
        "replicate=2",
        str(tmp_path / "whole"),
        None,
        {"gradient_compression": gradient_compression},
    )
    assert (
        pool.run(
            2,
            kept.run,
            "replicate=2",
            str(tmp_path / "run"),
            kept.STOPPED_AT,
            {"gradient_compression": gradient_compression},
        )[0][0]
        == "preempted"
    )
    ended = pool.run(
        2,
        kept.run,
        "replicate=2",
        str(tmp_path / "run"),
        None,
        {"gradient_compression": gradient_compression},
    )
    assert ended[0] == ended[1]
    said = events(tmp_path / "run", "error-feedback-dropped")
    assert [each["gradient_compression"] for each in said] == (
        [] if gradient_compression in ("bf16", "fp16") else [gradient_compression]
    )
    if gradient_compression == "bf16":
        assert ended == whole


def test_another_comm_is_another_recipe(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(
        2,
        kept.run,
        "replicate=2",
        str(tmp_path / "run"),
        kept.STOPPED_AT,
        {"gradient_compression": "int8"},
    )
    assert (
        json.loads((tmp_path / "run" / "run.json").read_text())["recipe"]["gradient_compression"]
        == "int8"
    )
    with pytest.raises(CheckpointError, match="gradient_compression: 'int8', now 'none'"):
        pool.run(1, kept.run, "replicate=1", str(tmp_path / "run"), None, {})


def double() -> nn.Module:
    return network().double()


def refusing(run_dir: str, plan: str, changes: dict[str, Any]) -> None:
    ls.train(recipe(gradient_compression="int8", **changes), run_dir=run_dir, plan=plan)


@pytest.mark.parametrize(
    ("plan", "size", "changes", "text"),
    [
        (
            "replicate=2,numerics=bitwise",
            2,
            {},
            "gradient_compression='int8' with numerics=bitwise; each process rounds the gradients",
        ),
        (
            "shard=2",
            2,
            {},
            (
                "gradient_compression='int8' with shard=2; only gradients of full replicas can be"
                " compressed; use a plan with replicate"
            ),
        ),
        (
            "tensor=2",
            2,
            {},
            "gradient_compression='int8' with tensor=2; only gradients of full replicas",
        ),
        (
            "pipeline=2",
            2,
            {},
            "gradient_compression='int8' with pipeline=2; only gradients of full replicas",
        ),
        (
            "split=2",
            1,
            {},
            "gradient_compression='int8' with split=2; only gradients of full replicas",
        ),
        (
            "replicate=2",
            2,
            {"model": double},
            (
                "gradient_compression='int8' with the parameter '0.weight' of torch.float64; only"
                " gradients of"
            ),
        ),
        (
            "replicate=1",
            1,
            {"model": double},
            (
                "gradient_compression='int8' with the parameter '0.weight' of torch.float64; only"
                " gradients of"
            ),
        ),
    ],
)
def test_what_cannot_be_sent_in_fewer_bytes_is_refused(
    pool: WorkerPool, tmp_path: Path, plan: str, size: int, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(RecipeError) as refused:
        pool.run(size, refusing, str(tmp_path / "run"), plan, changes)
    assert text in str(refused.value)


def test_a_session_refuses_what_a_recipe_does() -> None:
    with pytest.raises(
        RecipeError,
        match="gradient_compression='int4'; known are none, bf16, fp16, int8 and powersgd:RANK",
    ):
        ls.Session(gradient_compression="int4")


def on_one_rank(run_dir: str, gradient_compression: str) -> list[Tensor]:
    """The last matrix is used by the microbatches of one rank alone, the bias by none. AdamW would
    decay what has a gradient of zeros."""

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        hidden = torch.tanh(model[0](batch[1]))  # type: ignore[index]
        if int(batch[0][0]) in {int(sample) for sample in first_samples()}:
            return (hidden @ model[2].weight.T - batch[2]).square().mean()  # type: ignore[index]
        return hidden.square().mean()

    changes = {
        "loss": loss,
        "steps": 1,
        "gradient_compression": gradient_compression,
        "optimizer": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.5),
    }
    way = Way()
    ls.train(recipe(**changes), run_dir=run_dir, plan="replicate=auto", hooks=[way])
    return list(way.so_far.split([6 * 16, 16, 16 * 3, 3]))


def first_samples() -> list[int]:
    """Of the first microbatch of the first step."""
    from training.subjects import samples_at

    return samples_at(0, 4, of=len(rows(48)))


@pytest.mark.parametrize(
    "gradient_compression", tiered(dict.fromkeys(ALL, 2), always=["int8", "powersgd:1"], most=1)
)
def test_a_parameter_that_nobody_used_has_no_gradient(
    pool: WorkerPool, tmp_path: Path, gradient_compression: str
) -> None:
    found = pool.run(2, on_one_rank, str(tmp_path / "run"), gradient_compression)[0]
    assert [bool(way.any()) for way in found] == [True, True, True, False]
