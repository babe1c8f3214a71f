"""`--recompute-every`: a rank that computes wrong gradients is named, and nothing else changes."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from training import (
    faulty,
    test_balance,
    test_context_axis,
    test_context_pipeline,
    test_pipeline_axis,
)
from training.subjects import adamw, network, recipe, rows, squared_error

import lockstep as ls
from lockstep.base.errors import PlanError, UserError, WrongResultError
from lockstep.checkpoint.storage import FolderStorage
from lockstep.hooks.checkpointing import Checkpointing
from lockstep.hooks.recomputation_audit import Disagreement
from lockstep.recomputed import Computed, Recomputed, Reported
from lockstep.testing.pool import WorkerPool
from lockstep.training.set_up import check_recomputation

EVERY = 3


def trained(
    run_dir: str,
    plan: str,
    every: int,
    fault: tuple[int, dict[str, Any]] | faulty.InLayers | None,
    changes: dict[str, Any],
    save: int = 1,
    make: Callable[..., ls.Recipe] = recipe,
) -> dict[str, Any]:
    """Trains, and returns what this rank has seen of it."""
    found: dict[str, Any] = {"error": "", "events": []}
    hooks: list[ls.Hook] = []
    if isinstance(fault, tuple):
        hooks = [faulty.Planted(fault[0], **fault[1])]
    elif fault is not None:
        hooks = [fault]

    class Events(ls.Hook):
        def after_step(self, run: Any) -> None:
            for hook in run.training.hooks.all:
                if isinstance(hook, Checkpointing):
                    hook.wait()  # so that each step is saved

        def on_event(self, run: Any, event: Any) -> None:
            if event.name == "microbatch-differs":
                found["events"].append({"step": event.step, **event.details})

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_RECOMPUTE_EVERY", str(every))
        try:
            result = ls.train(
                make(**({"model": faulty.network, "steps": 8} if make is recipe else {}) | changes),
                run_dir=run_dir,
                plan=plan if "numerics" in plan else f"{plan},numerics=bitwise",
                hooks=[*hooks, Events()],
                saving=ls.Saving(every=save, last=2),
            )
            found |= {"fingerprint": result.fingerprint, "loss": result.loss}
        except WrongResultError as error:
            found["error"] = str(error)
        except UserError as error:
            found["error"] = f"{type(error).__name__}: {error}"
    return found


def several(run_dir: str, cases: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    return [trained(f"{run_dir}/{number}", *case) for number, case in enumerate(cases)]


KINDS_OF_FAULTS: list[dict[str, Any]] = [
    *({"product": product} for product in faulty.PRODUCTS),
    {"product": "weight gradient", "least": 200},
    {"product": "forward", "same": True},
]


def faults(ranks: int, number: int) -> list[tuple[int, dict[str, Any]]]:
    """Faults of all kinds, on ranks in turn, which begin at different steps."""
    several = [KINDS_OF_FAULTS[each % len(KINDS_OF_FAULTS)] for each in range(number)]
    return [
        (each % ranks, {**kind, "begin": 1 + each % 4, "seed": each})
        for each, kind in enumerate(several)
    ]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("plan", "ranks", "number"),
    [
        ("replicate=3", 3, 5),
        pytest.param("replicate=3", 3, 30, marks=pytest.mark.slow),
        pytest.param("shard=3", 3, 20, marks=pytest.mark.slow),
        pytest.param("replicate=2,shard=2", 4, 10, marks=pytest.mark.slow),
    ],
)
def test_the_rank_that_computes_wrong_results_is_named(
    pool: WorkerPool, tmp_path: Path, plan: str, ranks: int, number: int
) -> None:
    planted = faults(ranks, number)
    # of every other step, so that the one of the check is not saved already
    cases = [(plan, EVERY, fault, {}, 2) for fault in planted]
    by_rank = pool.run(ranks, several, str(tmp_path), cases, timeout_seconds=160)
    for place, (rank, fault) in enumerate(planted):
        found = [each[place] for each in by_rank]
        assert len({each["error"] for each in found}) == 1
        assert f"rank {rank} (" in found[0]["error"]
        assert "it computes wrong results" in found[0]["error"]
        (event,) = found[0]["events"]
        assert event["ranks"] == [rank]
        assert event["is_certain"]
        # the next check after the fault began
        assert event["step"] == -(-fault["begin"] // EVERY) * EVERY
        left = FolderStorage(tmp_path / str(place) / "checkpoints").names()
        assert max([name.step for name in left], default=0) <= event["agreed"]


class Norm(torch.nn.Module):
    """BatchNorm, a weight that is used twice, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice = torch.nn.Linear(6, 8), torch.nn.Linear(8, 8)
        self.norm, self.dropout = torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2)
        self.last = torch.nn.Linear(8, 3)
        self.frozen = torch.nn.Linear(8, 8).requires_grad_(False)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.norm(self.first(rows))
        hidden = self.twice(torch.tanh(self.frozen(self.twice(self.dropout(hidden)))))
        return self.last(hidden)


class Skips(torch.nn.Module):
    """A layer that some microbatches skip, which only replicas can."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.skipped = torch.nn.Linear(6, 8), torch.nn.Linear(8, 8)
        self.last = torch.nn.Linear(8, 3)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(rows))
        return self.last(hidden if rows[0, 0] > 0 else self.skipped(hidden))


def weighted(model: Any, batch: Any) -> ls.Loss:
    """A loss whose weight only the forward knows."""
    errors = ((model(batch[1]) - batch[2]) ** 2).sum(-1)
    counts = batch[1][:, 1] > -0.5
    return ls.Loss((errors * counts).sum(), counts.sum())


def unweighted(model: Any, batch: Any) -> dict[str, ls.Sum]:
    return {"error": ls.Sum(((model(batch[1]) - batch[2]) ** 2).sum())}


def weight(batch: Any) -> dict[str, int]:
    return {"error": int((batch[1][:, 1] > -0.5).sum())}


KINDS: dict[str, dict[str, Any]] = {
    "a short microbatch, weights of the forward": {
        "model": Norm,
        "loss": weighted,
        "global_batch": 14,
        "steps": None,
        "epochs": 1,
    },
    "three microbatches, weights of the batch": {
        "loss": unweighted,
        "weight": weight,
        "global_batch": 12,
    },
    "fewer microbatches than ranks, bf16": {
        "model": Norm,
        "precision": "bf16",
        "global_batch": 4,
        "evaluation": ls.Evaluation(data=rows(12, seed=6), every=2),
    },
    "fp16": {"model": network, "precision": "fp16", "clip_norm": 1.0},
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        ("replicate=2", 2),
        ("shard=2", 2),
        pytest.param("replicate=3", 3, marks=pytest.mark.slow),
        pytest.param("shard=3,checkpointing=full", 3, marks=pytest.mark.slow),
        pytest.param("replicate=2,shard=2", 4, marks=pytest.mark.slow),
    ],
)
def test_a_run_has_the_bits_that_it_has_without_checks_and_no_alarm(
    pool: WorkerPool, tmp_path: Path, plan: str, ranks: int
) -> None:
    kinds = {**KINDS, "a layer": {"model": Skips}} if "shard" not in plan else KINDS
    cases = [
        (plan, every, None, {"steps": 3, **kind}, 2) for kind in kinds.values() for every in (0, 1)
    ]
    found = pool.run(ranks, several, str(tmp_path), cases, timeout_seconds=160)[0]
    for number, name in enumerate(kinds):
        without, checked = found[2 * number : 2 * number + 2]
        assert (without["error"], checked["error"]) == ("", ""), name
        assert checked == without, name


def mixtures(run_dir: str, plan: str, overs: Sequence[str]) -> list[str]:
    """The fingerprints of mixtures of experts, without checks and with one in each step."""
    found = []
    for over in overs:
        for every in ("0", "1"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("LOCKSTEP_RECOMPUTE_EVERY", every)
                trained_one = ls.train(
                    test_balance.recipe(
                        steps=3,
                        balance=test_balance.balance(over=over),
                        stages=test_balance.STAGES,
                    ),
                    run_dir=f"{run_dir}/{over}-{every}",
                    plan=f"{plan},numerics=bitwise",
                )
            found.append(trained_one.fingerprint)
    return found


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        ("replicate=2", 2),
        pytest.param("shard=2", 2, marks=pytest.mark.slow),
        pytest.param("replicate=2,pipeline=2", 4, marks=pytest.mark.slow),
    ],
)
def test_experts_compute_the_rows_of_another_rank(
    pool: WorkerPool, tmp_path: Path, plan: str, ranks: int
) -> None:
    overs = ("step", "microbatch", "previous")
    found = pool.run(ranks, mixtures, str(tmp_path), plan, overs, timeout_seconds=160)[0]
    assert found[::2] == found[1::2]
    assert len(set(found)) == 3


def of_several_stages(run_dir: str) -> list[str]:
    found = []
    for over in ("microbatch", "step"):
        changed = {
            "balance": test_balance.balance(over=over, per_layer=False),
            "stages": test_balance.STAGES,
        }
        make = test_balance.recipe
        plan = "replicate=2,pipeline=2"
        found.append(trained(f"{run_dir}/{over}", plan, 1, None, changed, 9, make)["error"])
    return found


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_balance_loss_of_layers_in_several_stages_is_refused(
    pool: WorkerPool, tmp_path: Path
) -> None:
    for refused, instead in pool.run(4, of_several_stages, str(tmp_path), timeout_seconds=160):
        assert "RecipeError: --recompute-every 1 with Balance(over='microbatch')" in refused
        assert instead == ""


STAGED: dict[str, Any] = {
    "model": faulty.deep,
    "inputs": lambda batch: (batch[1],),
    "loss": lambda output, batch: ((output - batch[2]) ** 2).mean(),
    "stages": [str(part) for part in range(7)],
    "data": rows(96),
    "global_batch": 32,
}
IN_STAGES = [
    (0, "forward"),  # spoils what the later stage receives
    (1, "weight gradient"),
    (3, "input gradient"),  # spoils what the earlier stage receives
    (3, "forward"),
]
"""Ranks of two or three pipelines of two stages, and the products that they compute wrong."""


def staged(run_dir: str, plan: str) -> list[dict[str, Any]]:
    cases = [
        (plan, EVERY, (rank, {"product": product, "begin": 2, "seed": rank}), STAGED, 2)
        for rank, product in IN_STAGES
    ]
    return several(
        run_dir, [*cases, *((plan, every, None, {**STAGED, "steps": 3}, 2) for every in (0, 1))]
    )


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "plan",
    [
        "replicate=2,pipeline=2",
        pytest.param("shard=2,pipeline=2", marks=pytest.mark.slow),
        pytest.param("replicate=2,pipeline=2,schedule=interleaved", marks=pytest.mark.slow),
        pytest.param("replicate=2,pipeline=2,schedule=zero-bubble", marks=pytest.mark.slow),
    ],
)
def test_no_stage_is_accused_of_what_another_has_sent(
    pool: WorkerPool, tmp_path: Path, plan: str
) -> None:
    by_rank = pool.run(4, staged, str(tmp_path), plan, timeout_seconds=160)
    for place, (rank, _) in enumerate(IN_STAGES):
        assert len({each[place]["error"] for each in by_rank}) == 1
        (event,) = by_rank[0][place]["events"]
        ranks = [0, 1] if rank < 2 else [2, 3]  # those of its stage
        assert (event["ranks"], event["is_certain"]) == (ranks, False)
        assert f"pipeline rank {ranks[0] // 2}, " in by_rank[0][place]["error"]
    without, checked = by_rank[0][-2:]
    assert checked == without
    assert checked["error"] == ""


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_of_three_pipelines_the_rank_that_is_wrong_is_named(tmp_path: Path) -> None:
    with WorkerPool(max_workers=6) as larger:
        by_rank = larger.run(
            6, staged, str(tmp_path), "replicate=3,pipeline=2", timeout_seconds=300
        )
    for place, (rank, _) in enumerate(IN_STAGES):
        (event,) = by_rank[0][place]["events"]
        assert (event["ranks"], event["is_certain"]) == ([rank], True)


def pipelines(run_dir: str, plan: str, precisions: Sequence[str]) -> list[dict[str, Any]]:
    cases = [
        (plan, every, None, {"precision": precision}, 2, test_pipeline_axis.recipe)
        for precision in precisions
        for every in (0, 1)
    ]
    return several(run_dir, cases)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("plan", "ranks", "precisions"),
    [
        ("replicate=2", 2, ["fp32", "bf16"]),  # with the leaves of each part
        ("shard=2", 2, ["bf16"]),
        pytest.param("shard=2", 2, ["fp32"], marks=pytest.mark.slow),
        pytest.param("replicate=2,pipeline=2", 4, ["fp32", "bf16"], marks=pytest.mark.slow),
        pytest.param(
            "shard=2,pipeline=2,checkpointing=full", 4, ["fp32", "bf16"], marks=pytest.mark.slow
        ),
    ],
)
def test_a_model_in_stages_has_the_bits_that_it_has_without_checks(
    pool: WorkerPool, tmp_path: Path, plan: str, ranks: int, precisions: list[str]
) -> None:
    found = pool.run(ranks, pipelines, str(tmp_path), plan, precisions, timeout_seconds=160)[0]
    for without, checked in zip(found[::2], found[1::2], strict=True):
        assert (without["error"], checked["error"]) == ("", "")
        assert checked == without
    assert len({each["fingerprint"] for each in found}) == len(precisions)


MODULES = {"tensor": test_pipeline_axis, "context": test_context_axis}


def divided(run_dir: str, plan: str, axis: str) -> list[dict[str, Any]]:
    make = MODULES[axis].recipe
    faults = (0, None), (1, None), (2, faulty.InLayers(1, 1))
    return several(run_dir, [(plan, every, fault, {}, 2, make) for every, fault in faults])


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("plan", "axis"),
    [
        ("replicate=2,tensor=2,slices=2", "tensor"),
        ("shard=2,tensor=2,slices=2", "tensor"),
        ("replicate=2,context=2", "context"),
    ],
)
def test_ranks_that_exchange_inside_of_layers_are_named_together(
    pool: WorkerPool, tmp_path: Path, plan: str, axis: str
) -> None:
    without, checked, wrong = pool.run(4, divided, str(tmp_path), plan, axis, timeout_seconds=160)[
        0
    ]
    assert checked == without
    assert checked["error"] == ""
    (event,) = wrong["events"]
    assert (event["ranks"], event["is_certain"]) == ([0, 1, 2, 3], False)
    assert f"rank 1 ({socket.gethostname()}, " in wrong["error"]
    assert f"{axis} rank 1) and rank 2 (" in wrong["error"]


def sequences(**changes: Any) -> ls.Recipe:
    """In stages, with tied weights, dropout and texts of several lengths."""
    given = {"model": test_context_pipeline.Generator, "stages": test_context_pipeline.STAGES}
    few = {"tensor": None, "global_batch": 8, "steps": 2, "evaluation": None}
    shifting = {**test_context_pipeline.SHIFTING, "sequence": ls.Sequence(chunks=2)}
    return test_context_axis.recipe(**given | shifting | few | changes)


def in_chunks(run_dir: str, plan: str) -> list[dict[str, Any]]:
    faults = (0, None), (1, None), (1, faulty.InLayers(1, 1))
    return several(run_dir, [(plan, every, fault, {}, 2, sequences) for every, fault in faults])


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("plan", "ranks", "named"),
    [
        ("shard=3", 3, [1]),
        pytest.param("replicate=2,pipeline=2", 4, [0, 1], marks=pytest.mark.slow),
        pytest.param("shard=2,pipeline=2,schedule=zero-bubble", 4, [0, 1], marks=pytest.mark.slow),
    ],
)
def test_a_microbatch_of_sequences_in_chunks_is_compared(
    pool: WorkerPool, tmp_path: Path, plan: str, ranks: int, named: list[int]
) -> None:
    without, checked, wrong = pool.run(ranks, in_chunks, str(tmp_path), plan, timeout_seconds=160)[
        0
    ]
    assert checked == without
    assert checked["error"] == ""
    (event,) = wrong["events"]
    assert (event["ranks"], event["is_certain"]) == (named, len(named) == 1)


class Tied(torch.nn.Sequential):
    """The gradient of a weight's second use alone may be wrong."""

    def __init__(self) -> None:
        first, again = torch.nn.Linear(6, 6), faulty.Linear(6, 6)
        again.weight = first.weight
        super().__init__(first, torch.nn.Tanh(), again, torch.nn.Linear(6, 3))


def tied(run_dir: str) -> list[dict[str, Any]]:
    changed = {**STAGED, "model": Tied, "stages": ["0", "1", "2", "3"]}
    fault = (1, {"product": "weight gradient", "begin": 2})
    cases = [(plan, EVERY, fault, changed, 2) for plan in ("replicate=2", "shard=2")]
    return several(run_dir, cases)


def test_the_gradient_of_a_tied_weight_in_its_second_part_is_compared(
    pool: WorkerPool, tmp_path: Path
) -> None:
    for found in pool.run(2, tied, str(tmp_path))[0]:
        (event,) = found["events"]
        assert (event["first"], event["tensors"]) == ("0.weight", 1)


def test_of_two_ranks_either_may_be_wrong(pool: WorkerPool, tmp_path: Path) -> None:
    cases = [
        (plan, EVERY, (1, {"product": "weight gradient", "begin": 4}), {})
        for plan in ("replicate=2", "shard=2")
    ]
    first, second = pool.run(2, several, str(tmp_path), cases)
    assert first == second
    for each in first:
        assert "rank 0 (" in each["error"]
        assert "one of them computes wrong results" in each["error"]
        (event,) = each["events"]
        assert (event["ranks"], event["is_certain"], event["agreed"]) == ([0, 1], False, 3)
        assert len(event["deleted"]) == 2


def test_the_checkpoint_before_the_last_check_is_kept(pool: WorkerPool, tmp_path: Path) -> None:
    fault = (2, {"product": "forward", "begin": 5})
    (found,), *_ = pool.run(3, several, str(tmp_path), [("replicate=3", 5, fault, {"steps": 14})])
    assert found["events"][0]["agreed"] == 0  # the fault began in the step of the next check
    assert found["events"][0]["step"] == 5
    fault = (2, {"product": "forward", "begin": 6})
    (found,), *_ = pool.run(
        3, several, str(tmp_path / "later"), [("replicate=3", 5, fault, {"steps": 14})]
    )
    assert (found["events"][0]["agreed"], found["events"][0]["step"]) == (5, 10)
    names = FolderStorage(tmp_path / "later" / "0" / "checkpoints").names()
    assert [name.step for name in names] == [5]
    assert len(found["events"][0]["deleted"]) == 2


def features(batch: Any) -> Any:
    return (batch[1],)


def stream() -> ls.Stream:
    return ls.Stream(lambda shard, epoch, start: iter(rows(64)), shards=8)


def mean_of_all(output: Tensor) -> Tensor:
    return output.pow(2).mean()


def every_output(output: Tensor, batch: Any) -> Tensor:
    return output


def gathered() -> ls.Gathered:
    return ls.Gathered(every_output, mean_of_all)


def squares(output: Tensor, batch: Any) -> Tensor:
    return (output - batch[2]).pow(2).mean()


OF_BATCH = {"inputs": lambda: features, "loss": lambda: None, "batch_loss": gathered}
OF_STREAM = {"data": stream}
Case = tuple[str, dict[str, Any], int]
"""A plan, changes of the recipe (called on each rank), and the value of --recompute-every."""
REFUSED: list[tuple[Case, str, list[Case]]] = [
    (
        ("replicate=2,numerics=fast", {}, 2),
        "PlanError: --recompute-every 2 with numerics=fast",
        [("replicate=2,numerics=bitwise", {}, 2), ("replicate=2,numerics=fast", {}, 0)],
    ),
    (
        ("replicate=2,numerics=bitwise", OF_STREAM, 2),
        "RecipeError: --recompute-every 2 with an ls.Stream",
        [("replicate=2,numerics=bitwise", {}, 2), ("replicate=2,numerics=bitwise", OF_STREAM, 0)],
    ),
    (
        ("shard=2,numerics=bitwise", OF_BATCH, 2),
        "RecipeError: --recompute-every 2 with a batch_loss",
        [("shard=2,numerics=bitwise", {}, 2), ("shard=2,numerics=bitwise", OF_BATCH, 0)],
    ),
]
"""A mistake, what its error says, and what the error recommends."""


def briefly(run_dir: str, plan: str, changes: dict[str, Any], every: int) -> dict[str, Any]:
    made = {name: make() for name, make in changes.items()}
    return trained(run_dir, plan, every, None, {"steps": 2, **made}, save=3)


def looped(run_dir: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_RECOMPUTE_EVERY", "2")
        plan = "replicate=2,numerics=bitwise"
        with ls.Session(run_dir=run_dir, plan=plan) as session:
            session.prepare(faulty.network, adamw)
            steps = session.steps(rows(48), global_batch=16, microbatch=4, steps=2)
            with pytest.raises(UserError) as error:
                next(steps).microbatches()
        return str(error.value)


def computed(run_dir: str, every: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_RECOMPUTE_EVERY", str(every))
        plan = "shard=2,numerics=bitwise"
        with ls.Session(run_dir=run_dir, plan=plan) as session:
            _, optimizer = session.prepare(faulty.network, adamw)
            for step in session.steps(rows(48), global_batch=16, microbatch=4, steps=2):
                step.compute(None, squared_error)
                step.commit(optimizer)
            return ls.fingerprint(session.full_state_dict())


def refusals(run_dir: str) -> Any:
    found = [
        [
            briefly(f"{run_dir}/{number}-{place}", *case)
            for place, case in enumerate((mistake, *then))
        ]
        for number, (mistake, _, then) in enumerate(REFUSED)
    ]
    fingerprints = {computed(f"{run_dir}/every-{every}", every) for every in (0, 2)}
    return found, looped(f"{run_dir}/loop"), fingerprints


def test_what_cannot_be_recomputed_is_refused_and_the_remedies_work(
    pool: WorkerPool, tmp_path: Path
) -> None:
    first, second = pool.run(2, refusals, str(tmp_path))
    assert first == second
    found, of_a_loop, fingerprints = first
    for (_, expected, remedies), (mistake, *then) in zip(REFUSED, found, strict=True):
        assert expected in mistake["error"]
        assert [each["error"] for each in then] == [""] * len(remedies), expected
    assert "with a loop over step.microbatches()" in of_a_loop
    assert len(fingerprints) == 1  # step.compute, too, has the same bits with checks


def test_an_axis_whose_ranks_compute_rows_of_others_is_refused_by_name() -> None:
    plan = ls.Plan(expert=2, numerics="bitwise")
    with pytest.raises(PlanError, match="--recompute-every 50 with expert=2"):
        check_recomputation(plan, 50)
    check_recomputation(plan, 0)


def test_one_process_says_that_nothing_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_RECOMPUTE_EVERY", "2")
    result = ls.train(recipe(), run_dir=str(tmp_path), plan="numerics=bitwise")
    assert [each.details for each in result.events if each.name == "not-recomputed"] == [
        {"every": 2}
    ]


def test_the_text_names_tensors_ranks_and_hosts() -> None:
    chosen = [Recomputed(13, (5, 6, 2)), Recomputed(4, (1, 5, 0))]
    gradients = {rank: [[1, 1], [1, 1], [1, 1]] for rank in range(8)}
    gradients[5] = [[2, 3], [1, 9], [7, 7]]
    replicas = [
        [Reported([rank], [Computed([], each) for each in several])]
        for rank, several in gradients.items()
    ]
    disagreement = Disagreement.of(chosen, replicas, [["up", "down"]] * 8)
    assert disagreement == Disagreement(13, 2, "up", [5], True, [2, 6])
    hosts = [f"host-{rank}" for rank in range(8)]
    text = disagreement.text(1200, 1150, hosts, hosts, None)
    assert text.startswith(
        "after step 1200, microbatch 13: rank 5 (host-5) computed another gradient of up and 1"
        " more tensor than ranks 2 and 6: it computes wrong results;"
    )
    assert "checkpoints after step 1150, where all agreed, are deleted" in text
    kept = disagreement.text(1200, 1150, hosts, hosts, "Permission denied")
    assert "cannot be deleted (Permission denied): delete them before you resume" in kept
    assert "run without that device, or without host-5: give the same command on host-0," in text
    assert text.endswith(" alone, with --nnodes 7, and a plan of 7 processes")
    two = ["a"] * 5 + ["b"] * 3
    text = disagreement.text(1200, 1150, two, hosts, None)
    assert text.endswith(
        ", or without b: give the same command on a alone, with no --nnodes and no --rdzv, and a"
        " plan of 5 processes"
    )
    text = disagreement.text(1200, 1150, ["a"] * 8, hosts, None)
    assert text.endswith("; run without that device")
