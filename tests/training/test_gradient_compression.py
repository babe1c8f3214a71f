"""Gradients sent in fewer bytes: near the exact ones, alike on all ranks, with nothing lost
unsaid."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import run_files
import torch
from torch import Tensor, distributed, nn
from training import kept
from training.subjects import each_of, network, recipe, rows, same, samples_at

import lockstep as ls
from lockstep.base.errors import CheckpointError, RecipeError
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


SENT = (*ROUNDED[:1], "int8", "powersgd:1")
"""What stands for all with every change, with each thing that can happen to it."""


def trained_each(run_dir: str, size: int) -> dict[tuple[str, str], Any]:
    """By the way and what carries it: shared memory, Gloo, or both in a run of two hosts."""
    carriers = {"memory": ("auto", "aaa"), "gloo": ("torch", "aaa"), "hosts": ("auto", "aba")}
    given = [
        (way, carrier)
        for way in NEAR
        for carrier in carriers
        if size > 1 or carrier == "memory"
        if carrier != "hosts" or way in SENT
    ]
    found = each_of(
        trained,
        run_dir,
        [
            (f"replicate={size},transport={carriers[carrier][0]}", way, carriers[carrier][1])
            for way, carrier in given
        ],
    )
    return dict(zip(given, found, strict=True))


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_ranks_stay_alike_and_near_the_exact_way_whatever_carries_it(
    pool: WorkerPool, tmp_path: Path, size: int
) -> None:
    (alone,) = pool.run(1, trained_each, str(tmp_path / "alone"), 1)
    fingerprint, exact, loss = alone["none", "memory"]
    assert {name: found[0] for name, found in alone.items()} == dict.fromkeys(alone, fingerprint), (
        "one process sends nothing and computes exactly"
    )
    everyone = pool.run(size, trained_each, str(tmp_path / "run"), size, timeout_seconds=50)
    for (way, carrier), (made, so_far, first_loss) in everyone[0].items():
        assert {found[way, carrier][0] for found in everyone} == {made}, (way, carrier)
        # exact sums the mean over three ranks, whose last digit is rounded
        if way != "none" or size == 2:
            assert first_loss == loss, (way, carrier)
        if way != "none" and carrier == "gloo":
            assert made == everyone[0][way, "memory"][0], way
        away = float((so_far - exact).norm() / exact.norm())
        # it is what was asked for, and not the exact sum
        asked = way in ALL and carrier != "memory"
        assert (1e-5 if asked else -1) < away <= NEAR[way], (way, carrier)


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


def stepped_each(run_dir: str) -> dict[tuple[Any, ...], Any]:
    return dict(zip(STEPPED, each_of(stepped, run_dir, STEPPED), strict=True))


@pytest.fixture(scope="module")
def two_ranks(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """What both of two ranks have after each of `STEPPED`: they are alike."""
    one, other = pool.run(2, stepped_each, str(tmp_path_factory.mktemp("stepped")))
    assert same(one, other)
    return one  # type: ignore[no-any-return]


def mean(gradient: Callable[[int, int], Tensor]) -> Tensor:
    return torch.stack([gradient(3, rank) for rank in range(2)]).mean(dim=0)


@pytest.mark.parametrize("way", ["int8", "powersgd:2"])
def test_what_is_not_sent_in_one_step_is_sent_in_the_next_ones(
    two_ranks: dict[Any, Any], way: str
) -> None:
    """So the way falls short by what the last steps lost, however many there were."""
    short = {
        steps: float((two_ranks[way, steps, directions, None] + steps * mean(directions)).norm())
        for steps in (1, 40)
    }
    assert short[1] > 0
    assert short[40] < (3 if way == "int8" else 12) * short[1]


def test_a_matrix_whose_gradient_was_zero_is_sent_once_it_is_not(
    two_ranks: dict[Any, Any],
) -> None:
    exact = -37 * mean(late)
    assert float((two_ranks["powersgd:1", 40, late, None] - exact).norm()) < 0.5 * float(
        exact.norm()
    )


def test_what_is_left_keeps_its_size_where_the_scale_of_losses_changes(
    two_ranks: dict[Any, Any],
) -> None:
    """The weight of a step that only the forward knows: the first step's scale is a guess, 500
    times off."""
    weighted, plain = (
        float((two_ranks["int8", 3, directions, weights] + 3 * mean(directions)).norm())
        for weights in (THOUSANDS, None)
    )
    assert weighted < 2 * plain


def huge(step: int, rank: int) -> Tensor:
    return directions(step, rank) * 1e6


def broken(step: int, rank: int) -> Tensor:
    made = directions(step, rank)
    made[3, 3] = math.inf if rank == 1 and step == 1 else 1.0
    return made


THOUSANDS = (1000.0,) * 3
STEPPED: list[tuple[str, int, Callable[[int, int], Tensor], Sequence[float] | None]] = [
    *((way, steps, directions, None) for way in ("int8", "powersgd:2") for steps in (1, 40)),
    ("powersgd:1", 40, late, None),
    ("int8", 3, directions, THOUSANDS),
    ("int8", 3, directions, None),
    *((way, 1, huge, None) for way in ROUNDED),
    *((way, 3, broken, None) for way in ALL),
]


def test_gradients_beyond_the_range_of_a_short_type_come_out_right(
    two_ranks: dict[Any, Any],
) -> None:
    for way in ROUNDED:
        away = float((two_ranks[way, 1, huge, None] + mean(huge)).norm())
        assert away < 0.04 * float(mean(huge).norm()), way


def test_a_gradient_that_is_not_finite_on_one_rank_ends_the_run_on_all(
    two_ranks: dict[Any, Any],
) -> None:
    for way in ALL:
        said = two_ranks[way, 3, broken, None]
        assert said.startswith("LossError: after step 1: "), way
        assert "a step needs a finite" in said, way


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


SCALED = {
    (way, behind): [(way, 1e35), (way, first)]
    for way, first, behind in (("int8", 0.0, 0), ("powersgd:1", 1.0, 1))
}


def scaled_each(run_dir: str) -> list[Any]:
    return each_of(scaled, run_dir, [row for rows in SCALED.values() for row in rows])


def test_a_step_that_is_skipped_leaves_nothing_behind(pool: WorkerPool, tmp_path: Path) -> None:
    """The steps after it are those of a run without it: the loss scale, half of what it was,
    changes no bits.

    DDP lays out its buckets anew after the first step, and so the blocks of int8: there that run
    begins with a step that sends nothing.
    """
    found = iter(pool.run(2, scaled_each, str(tmp_path))[0])
    for way, behind in SCALED:
        skipped, plain = next(found), next(found)
        assert not bool(skipped[0].any()), way
        assert bool(skipped[1].any()), way
        assert all(map(torch.equal, skipped[behind:], plain[: 3 - behind])), way


def goes_on(run_dir: str) -> dict[str, list[tuple[str, str]]]:
    """How a run ends that is asked to end, and the second time, by way; with bf16, first how one
    ends that is not asked."""
    found = {}
    for way in SENT:
        given = {"gradient_compression": way}
        found[way] = [
            kept.run("replicate=2", f"{run_dir}/{way}/{name}", at, given)
            for name, at in (("whole", None), ("run", kept.STOPPED_AT), ("run", None))
            if name == "run" or way == "bf16"
        ]
    return found


def test_a_run_goes_on_and_says_what_is_not_saved(pool: WorkerPool, tmp_path: Path) -> None:
    one, other = pool.run(2, goes_on, str(tmp_path))
    for way, (*whole, stopped, ended) in one.items():
        assert stopped[0] == "preempted", way
        assert ended == other[way][-1], way
        said = run_files.events(tmp_path / way / "run", "error-feedback-dropped")
        assert [each["gradient_compression"] for each in said] == (
            [] if way in ("bf16", "fp16") else [way]
        )
        if way == "bf16":
            assert [ended] == whole
    run = tmp_path / "int8" / "run"
    assert json.loads((run / "run.json").read_text())["recipe"]["gradient_compression"] == "int8"
    (run / "result.json").unlink()
    with pytest.raises(CheckpointError) as refused:
        ls.train(kept.recipe(), plan="replicate=1", run_dir=str(run))
    assert "gradient_compression: 'int8', now 'none'" in str(refused.value)


def double() -> nn.Module:
    return network().double()


def refusing(run_dir: str, plan: str, changes: dict[str, Any]) -> None:
    ls.train(recipe(gradient_compression="int8", **changes), run_dir=run_dir, plan=plan)


REPLICAS = "only gradients of full replicas"
REFUSED = {
    "replicate=2,numerics=bitwise": (
        {},
        "numerics=bitwise; each process rounds the gradients",
    ),
    "shard=2": ({}, f"shard=2; {REPLICAS} can be compressed; use a plan with replicate"),
    "tensor=2": ({}, f"tensor=2; {REPLICAS}"),
    "pipeline=2": ({}, f"pipeline=2; {REPLICAS}"),
    "replicate=2": (
        {"model": double},
        "the parameter '0.weight' of torch.float64; only gradients of",
    ),
}
ALONE = {
    "split=2": ({}, f"split=2; {REPLICAS}"),
    "replicate=1": REFUSED["replicate=2"],
}


def refused_each(run_dir: str, processes: int) -> list[Any]:
    rows = REFUSED if processes == 2 else ALONE
    return each_of(refusing, run_dir, [(plan, changes) for plan, (changes, _) in rows.items()])


def test_what_cannot_be_sent_in_fewer_bytes_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    alone = refused_each(str(tmp_path / "alone"), 1)
    for table, everyone in (
        (ALONE, [alone]),
        (REFUSED, pool.run(2, refused_each, str(tmp_path / "run"), 2)),
    ):
        for (plan, (_, text)), *said in zip(table.items(), *everyone, strict=True):
            for each in said:
                assert each.startswith(f"RecipeError: gradient_compression='int8' with {text}"), (
                    plan
                )


def test_a_session_refuses_what_a_recipe_does() -> None:
    with pytest.raises(RecipeError) as refused:
        ls.Session(gradient_compression="int4")
    for words in ("gradient_compression='int4'", "none, bf16, fp16, int8 and powersgd:RANK"):
        assert words in str(refused.value)


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
    return samples_at(0, 4, of=len(rows(48)))


def on_one_rank_each(run_dir: str) -> list[Any]:
    return each_of(on_one_rank, run_dir, [(way,) for way in ALL])


def test_a_parameter_that_nobody_used_has_no_gradient(pool: WorkerPool, tmp_path: Path) -> None:
    found = pool.run(2, on_one_rank_each, str(tmp_path / "run"))[0]
    for way, parts in zip(ALL, found, strict=True):
        assert [bool(part.any()) for part in parts] == [True, True, True, False], way
