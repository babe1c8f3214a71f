"""The balance of experts under `ls.train`: gradients, loads and biases are those of one process
that computes the global batch at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import run_files
import torch
import torch.distributed as dist
from model.mixtures import CHOSEN, EXPERTS, WORDS, Mixture, MixtureBlock
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from training.subjects import each_of, samples_at, state_of

import lockstep as ls
from lockstep.base.errors import LossError, RecipeError
from lockstep.comm.mesh import full_tensor
from lockstep.testing.pool import WorkerPool

SAMPLES, BATCH, LONGEST = 16, 8, 9
COEFFICIENT, Z = 0.3, 0.05


def texts() -> TensorDataset:
    """Texts that are padded, and True for each of their words."""
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(WORDS, (SAMPLES, LONGEST), generator=generator)
    length = torch.randint(3, LONGEST + 1, (SAMPLES, 1), generator=generator)
    return TensorDataset(text, torch.arange(LONGEST) < length)


def inputs(batch: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (batch[0],)


def mask(batch: Sequence[Tensor]) -> Tensor:
    return batch[1]


def entropy(output: Tensor, batch: Sequence[Tensor]) -> ls.Sum:
    each = F.cross_entropy(output.flatten(0, 1), batch[0].flatten(), reduction="none")
    return ls.Sum((each * batch[1].flatten()).sum())


def words(batch: Sequence[Tensor]) -> Tensor:
    return batch[1].sum()


def recipe(**changes: Any) -> ls.Recipe:
    given: dict[str, Any] = {
        "model": Mixture,
        "data": texts(),
        "inputs": inputs,
        "loss": entropy,
        "weight": words,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "global_batch": BATCH,
        "microbatch": 2,
        "steps": 3,
        "balance": balance(),
        **changes,
    }
    return ls.Recipe(**given)


def balance(**changes: Any) -> ls.Balance:
    given: dict[str, Any] = {
        "coefficient": COEFFICIENT,
        "over": "step",
        "z": Z,
        "bias_rate": 0.01,
        "tokens": mask,
        **changes,
    }
    return ls.Balance(**given)


class Watched(ls.Hook):
    """Keeps the first state and gradient, the state of each step, and the last one."""

    def on_start(self, run: Any) -> None:
        self.first = state_of(run.model)
        self.gradients: list[dict[str, Tensor]] = []

    def after_backward(self, run: Any, model: nn.Module) -> None:
        self.gradients.append(
            {name: full_tensor(p.grad).clone() for name, p in model.named_parameters()}  # type: ignore[arg-type]
        )

    def on_finish(self, run: Any) -> None:
        self.last = state_of(run.model)


Trained = tuple[dict[str, Tensor], list[dict[str, Tensor]], dict[str, Tensor], str]


def train(
    run_dir: str, plan: str, hooks: Sequence[ls.Hook] = (), saving: Any = None, **changes: Any
) -> Trained:
    """Return the first state, the gradients of all steps, the last state, and the run directory."""
    watched = Watched()
    given: dict[str, Any] = {"hooks": [watched, *hooks], "log_every": 1, "saving": saving}
    ls.train(recipe(**changes), plan=plan, run_dir=run_dir, **given)
    return watched.first, watched.gradients, watched.last, run_dir


def losses(run_dir: str) -> list[float]:
    rows = run_files.metrics(run_dir)
    return [row[name] for row in rows for name in row if name.startswith(("loss", "load"))]


def off(found: Trained, expected: Trained) -> float:
    """The largest difference of a tensor or number, relative to its norm."""
    states = zip([*found[1], found[2]], [*expected[1], expected[2]], strict=True)
    tensors = [
        (one[name].double(), other[name].double()) for one, other in states for name in other
    ]
    numbers = zip(losses(found[3]), losses(expected[3]), strict=True)
    each = [float((one - other).norm() / other.norm().clamp(min=1e-9)) for one, other in tensors]
    each += [abs(one - other) / max(abs(other), 1e-9) for one, other in numbers]
    return float(torch.tensor(each).max())  # NaN if any is


def by_hand(
    first: dict[str, Tensor], of: Callable[[list[tuple[Tensor, Tensor]]], Tensor]
) -> dict[str, Tensor]:
    """Return the gradient of the first step, computed without lockstep. `of`: (logits and counts of
    each layer's counting tokens, by sample) -> the balance loss."""
    model = Mixture()
    model.load_state_dict(first)
    seen: list[Tensor] = []
    for block in model.blocks:
        assert isinstance(block, MixtureBlock)
        block.router.register_forward_hook(lambda _, __, output: seen.append(output))
    text, counted = (each[samples_at(0, BATCH, of=SAMPLES)] for each in texts().tensors)
    output = model(text)
    loss = entropy(output, [text, counted]).total / counted.sum()
    for logits in seen:
        of_samples = [
            (rows[kept], one_hot(rows[kept]))
            for rows, kept in zip(logits.view(BATCH, LONGEST, -1), counted, strict=True)
        ]
        loss = loss + COEFFICIENT * of(of_samples)
        each = logits.logsumexp(-1).square() * counted.flatten()
        loss = loss + Z * each.sum() / counted.sum()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def one_hot(logits: Tensor) -> Tensor:
    return F.one_hot(logits.topk(CHOSEN).indices, EXPERTS).sum(1).double()


def of_rows(rows: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """E Σ f P of all these tokens."""
    logits = torch.cat([each for each, _ in rows])
    chosen = torch.cat([each for _, each in rows])
    return EXPERTS * (chosen.mean(0) * logits.softmax(-1).mean(0)).sum()


def of_microbatches(rows: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    parts = [rows[start : start + 2] for start in range(0, BATCH, 2)]
    tokens = [sum(len(logits) for logits, _ in part) for part in parts]
    each = [count * of_rows(part) for part, count in zip(parts, tokens, strict=True)]
    return torch.stack(each).sum() / sum(tokens)


def of_each_sample(rows: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    return torch.stack([of_rows([each]) for each in rows]).mean()


@pytest.mark.parametrize(
    ("over", "of"),
    [("step", of_rows), ("microbatch", of_microbatches), ("sample", of_each_sample)],
)
def test_the_gradient_is_that_of_the_loss_written_out(
    tmp_path: Path, over: Any, of: Callable[..., Tensor]
) -> None:
    first, gradients, _, _ = train(
        str(tmp_path), "replicate=1", steps=1, balance=balance(over=over)
    )
    expected = by_hand(first, of)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-15)


STAGES = ["words", "blocks.*", "head"]


class Shared(Mixture):
    """Its blocks are one block, so several stages of a pipeline have its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = self.blocks[0]


CASES: list[dict[str, Any]] = [
    {"microbatch": 2},
    {"microbatch": 3, "model": lambda: Mixture(dropout=0.2)},
    {"balance": balance(over="microbatch", per_layer=False)},
    {"balance": balance(over="sample", scores="sigmoid", per_layer=False)},
    {"balance": balance(over="previous", tokens=None, bias_rate=0.0), "weight": None, "loss": None},
    {"balance": balance(over="microbatch"), "model": Shared},
    {"balance": balance(over="microbatch"), "microbatch": 1},
    {"balance": balance(over="sample", coefficient=0.0)},
]
FOR_PIPELINES = 5
"""The number of the first case that only pipelines train: a stage's loads are a part of the
layer's, or all of them, or in no term."""
PLANS = {
    1: ("checkpointing=full", "checkpointing=selective"),
    2: (
        "replicate=2",
        "shard=2",
        "expert=2",
        "context=2",
        "replicate=2,checkpointing=full",
        "expert=2,checkpointing=full",
        "tensor=2",
        "pipeline=2",
        "pipeline=2,schedule=zero-bubble,checkpointing=full",
        "pipeline=2,schedule=interleaved",
        "pipeline=2,schedule=1f1b",
    ),
    3: ("replicate=3",),
    4: (
        "shard=2,expert=2",
        "expert=2,context=2",
        "replicate=4,checkpointing=full",
        "pipeline=2,replicate=2",
        "pipeline=2,context=2",
        "pipeline=2,shard=2",
        "pipeline=2,expert=2",
    ),
}

ONE_AXIS = ("replicate=2", "context=2", "pipeline=2")
"""Plans that train all cases in the fast tier; the others train two of them there. The ranks of
expert share out microbatches as those of replicate do."""

SLOW_PLANS = (
    "replicate=4,checkpointing=full",
    "expert=2,checkpointing=full",
    "pipeline=2,schedule=interleaved",
    "pipeline=2,schedule=1f1b",
    "pipeline=2,context=2",
    "pipeline=2,shard=2",
    "pipeline=2,expert=2",
)


def mean_entropy(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
    """A mean over samples, of a sum over tokens."""
    each = F.cross_entropy(output.flatten(0, 1), batch[0].flatten(), reduction="none")
    return each.view(batch[0].shape).sum(1).mean() / LONGEST


def cases_of(plan: str, whole: bool) -> list[int]:
    """Numbers of `CASES`: all of them, or those over the step and over the step before."""
    is_pipeline = "pipeline" in plan
    chosen = range(len(CASES)) if is_pipeline else range(FOR_PIPELINES)
    if not whole and plan not in ONE_AXIS:
        chosen = (0, FOR_PIPELINES - 1)
    found = []
    for number in chosen:
        drops = number == 1  # dropout needs Recipe.sequence, and draws other numbers
        too_few = CASES[number].get("microbatch", 2) * 4 > BATCH and "interleaved" in plan
        # one stage on each rank; or experts that several layers share
        cannot_share = "1f1b" in plan or "expert" in plan
        is_refused = CASES[number].get("model") is Shared and cannot_share
        if not (drops and "context" in plan) and not too_few and not is_refused:
            found.append(number)
    return found


def train_each(folder: str, plans: Sequence[str], whole: bool) -> list[Any]:
    given = [(plan, cases_of(plan, whole)) for plan in plans]
    return each_of(train_all, folder, given, may_refuse=False)


def train_all(folder: str, plan: str, cases: Sequence[int]) -> list[Trained]:
    found = []
    for number in cases:
        changes = dict(CASES[number])
        if "loss" in changes:
            changes["loss"] = mean_entropy
        if "context" in plan:
            changes["sequence"] = ls.Sequence(chunks=4)
        changes |= {"stages": STAGES, "steps": 2}
        changes["tensor"] = {"blocks.*.mix": "colwise_gathered"} if "tensor" in plan else None
        found.append(train(f"{folder}/{number}", plan, **changes))
    return found


@pytest.fixture(scope="module")
def alone(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> list[Trained]:
    cases = range(len(CASES))
    (found,) = pool.run(1, train_all, str(tmp_path_factory.mktemp("alone")), "replicate=1", cases)
    return found


@pytest.mark.parametrize(
    ("size", "whole"),
    [
        *((size, False) for size in PLANS),
        *(pytest.param(size, True, marks=pytest.mark.slow) for size in PLANS),
    ],
)
def test_every_plan_learns_what_one_process_learns(
    pool: WorkerPool, tmp_path: Path, alone: list[Trained], size: int, whole: bool
) -> None:
    plans = [plan for plan in PLANS[size] if whole or plan not in SLOW_PLANS]
    ranks = pool.run(size, train_each, str(tmp_path), plans, whole, timeout_seconds=110)
    for place, plan in enumerate(plans):
        expected = [alone[number] for number in cases_of(plan, whole)]
        of_ranks = [rank[place] for rank in ranks]
        if "pipeline" in plan:
            of_ranks = [list(map(of_all_stages, *of_ranks))]
        for found in of_ranks:
            for mine, one in zip(found, expected, strict=True):
                assert off(mine, one) < 1e-12, plan


def of_all_stages(*ranks: Trained) -> Trained:
    """Join what the ranks of a pipeline have; each has the tensors of its stages."""
    return (
        joined(*(rank[0] for rank in ranks)),
        list(map(joined, *(rank[1] for rank in ranks))),
        joined(*(rank[2] for rank in ranks)),
        ranks[0][3],
    )


def joined(*parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: each for part in parts for name, each in part.items()}


def test_loads_are_counts_of_the_global_batch_and_move_the_biases(
    pool: WorkerPool, tmp_path: Path
) -> None:
    ((first, _, last, folder),) = pool.run(1, train, str(tmp_path / "one"), "replicate=1")
    several = pool.run(3, train, str(tmp_path / "three"), "replicate=3")
    for _, _, state, _ in several:
        for name in ("blocks.0.bias", "blocks.1.bias"):
            assert torch.equal(state[name], last[name])
            steps = (last[name] / 0.01).round()
            torch.testing.assert_close(last[name], 0.01 * steps)
            assert 1 <= int(steps.abs().max()) <= 3
    rows, of_three = (
        run_files.rows(Path(run, "experts.jsonl")) for run in (folder, tmp_path / "three")
    )
    assert [row["loads"] for row in rows] == [row["loads"] for row in of_three]
    assert [row["step"] for row in rows] == [1, 2, 3]
    text, counted = (each[samples_at(0, BATCH, of=SAMPLES)] for each in texts().tensors)
    model = Mixture()
    model.load_state_dict(first)
    seen: list[Tensor] = []
    block = model.blocks[0]
    assert isinstance(block, MixtureBlock)
    block.router.register_forward_hook(lambda _, __, output: seen.append(output))
    model(text)
    chosen = one_hot(seen[0])[counted.flatten()].sum(0)
    expected = [round(float(each), 4) for each in chosen / chosen.mean()]
    assert rows[0]["loads"]["blocks.0.experts"] == expected
    metrics = run_files.metrics(folder)
    assert all(row["weight_per_second"] > 0 for row in metrics)  # of the recipe's own term
    assert metrics[0]["load/blocks.0.experts"] == pytest.approx(max(expected), abs=1e-4)


def train_bitwise(folder: str, plan: str) -> str:
    given = recipe(model=lambda: Mixture(dropout=0.2).float())
    plan = f"numerics=bitwise,{plan}"
    return ls.train(given, run_dir=f"{folder}/{plan}", plan=plan).fingerprint


def train_both(folder: str, plan: str) -> tuple[str, str]:
    """Counting first, and holding the backwards."""
    return train_bitwise(folder, plan), train_bitwise(folder, f"{plan},checkpointing=full")


def test_a_balance_over_the_step_has_the_same_bits(pool: WorkerPool, tmp_path: Path) -> None:
    found = {
        bits
        for size in (1, 3)
        for rank in pool.run(size, train_both, str(tmp_path), f"replicate={size}")
        for bits in rank
    }
    assert len(found) == 1


def overflowing(output: Tensor, batch: Sequence[Tensor]) -> ls.Sum:
    """A loss whose gradient overflows at the first loss scales of fp16."""
    return ls.Sum(entropy(output, batch).total * 1e36)


def test_a_step_that_is_skipped_moves_no_bias(tmp_path: Path) -> None:
    given = {"precision": "fp16", "model": lambda: Mixture().float(), "steps": 1}
    with pytest.raises(LossError, match="the model was updated in none of the 1 steps"):
        train(str(tmp_path), "replicate=1", loss=overflowing, hooks=[watched := Last()], **given)
    assert len(watched.biases) == 2
    assert not any(bias.any() for bias in watched.biases)


class Last(ls.Hook):
    def after_step(self, run: Any) -> None:
        self.biases = [block.bias.clone() for block in run.model.blocks]


class Stop(ls.Hook):
    def after_step(self, run: Any) -> None:
        if run.step == 2:
            raise KeyboardInterrupt


def train_previous(folder: str, plan: str, *hooks: ls.Hook) -> Trained:
    return train(
        folder, plan, balance=balance(over="previous"), hooks=hooks, saving=ls.Saving(every=1)
    )


def interrupted(folder: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        train_previous(folder, "replicate=1", Stop())


def test_a_resumed_run_knows_the_loads_of_the_step_before(pool: WorkerPool, tmp_path: Path) -> None:
    (straight,) = pool.run(1, train_previous, str(tmp_path / "straight"), "replicate=1")
    pool.run(1, interrupted, str(tmp_path / "killed"))
    for _, gradients, state, _ in pool.run(
        2, train_previous, str(tmp_path / "killed"), "replicate=2"
    ):
        assert len(gradients) == 2  # saved after the first step
        assert (
            off(
                (straight[0], gradients, state, str(tmp_path / "killed")),
                (straight[0], straight[1][1:], straight[2], straight[3]),
            )
            < 1e-12
        )


class Normed(Mixture):
    """A mixture with SyncBatchNorm, over slices of microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(LONGEST).double()
        self.words.register_forward_hook(lambda _, __, output: self.norm(output))


def train_normed(folder: str, plan: str) -> list[Trained | str]:
    """Over the step, and over microbatches."""
    given: dict[str, Any] = {"model": Normed, "microbatch": 4}
    found: list[Trained | str] = [train(f"{folder}/step", plan, **given)]
    try:
        found.append(train(f"{folder}/parts", plan, balance=balance(over="microbatch"), **given))
    except RecipeError as error:
        found.append(str(error))
    return found


def test_the_balance_of_a_slice_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    ((expected, parts),) = pool.run(1, train_normed, str(tmp_path / "one"), "replicate=1")
    assert not isinstance(parts, str)
    for found, said in pool.run(2, train_normed, str(tmp_path / "two"), "replicate=2"):
        assert off(found, expected) < 1e-12
        assert "splits each microbatch over the ranks" in said


def test_the_balance_of_the_step_does_not_depend_on_splits(tmp_path: Path) -> None:
    whole = train(str(tmp_path / "whole"), "replicate=1", microbatch=4)
    assert off(train(str(tmp_path / "parts"), "microbatch_splits=1", microbatch=4), whole) < 1e-12


class Masked(Mixture):
    """Its routers leave out the last expert."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            assert isinstance(block, MixtureBlock)
            block.router.register_forward_hook(without_the_last)


def without_the_last(_: nn.Module, __: Any, logits: Tensor) -> Tensor:
    return logits.masked_fill(torch.arange(EXPERTS) == EXPERTS - 1, -torch.inf)


def test_a_router_may_mask_experts(tmp_path: Path) -> None:
    _, gradients, _, _ = train(str(tmp_path), "replicate=1", model=Masked)
    assert all(torch.isfinite(each).all() for of_step in gradients for each in of_step.values())
    assert {
        row["loads"]["blocks.0.experts"][-1] for row in run_files.rows(tmp_path / "experts.jsonl")
    } == {0}


class OneForAll(MixtureBlock):
    """All tokens choose the first experts."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, _ = self.router(tokens).softmax(-1).topk(CHOSEN)
        index = torch.arange(CHOSEN).expand(len(tokens), -1)
        return x + self.experts(tokens, index, weights).view_as(x)  # type: ignore[no-any-return]


def lazy_mixture() -> nn.Module:
    model = Mixture(blocks=0)
    model.blocks.append(OneForAll(0.0).double())
    return model


def test_experts_that_no_token_chooses_are_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.hooks.expert_loads.DEAD_AFTER_STEPS", 3)
    measured = ls.Balance(tokens=mask)
    ls.train(
        recipe(model=lazy_mixture, balance=measured, steps=6), run_dir=str(tmp_path), log_every=1
    )
    dead = run_files.events(tmp_path, "experts-dead")
    assert [(row["step"], row["experts"]) for row in dead] == [(3, {"blocks.0.experts": [2, 3]})]


class Odd(Mixture):
    """A model whose router or index is wrong in some way."""

    def __init__(self, fault: str) -> None:
        super().__init__(blocks=1)
        block = self.blocks[0]
        assert isinstance(block, MixtureBlock)
        if fault == "range":
            block.experts.register_forward_pre_hook(lambda _, args: (args[0], args[1] + 2, args[2]))
        if fault == "range of rank 1":
            block.experts.register_forward_pre_hook(
                lambda _, args: (args[0], args[1] - 2 * dist.get_rank(), args[2])
            )
        if fault == "nan":
            block.router.register_forward_hook(lambda _, __, output: output * torch.nan)
        if fault == "no expert":
            block.router.register_forward_hook(lambda _, __, output: output - torch.inf)
        if fault == "probabilities":
            block.router.register_forward_hook(lambda _, __, output: output.softmax(-1))
        if fault == "frozen":
            block.router.register_forward_hook(lambda _, __, output: output.detach())
        if fault == "two routers":
            block.other = nn.Linear(block.router.in_features, EXPERTS, bias=False).double()
        if fault == "two biases":
            block.register_buffer("other", torch.zeros(EXPERTS).double())
        if fault == "not saved":
            biases = block.bias
            del block.bias
            block.register_buffer("bias", biases, persistent=False)
        if fault == "rows":
            self.register_forward_pre_hook(lambda _, args: (args[0][:, 1:],))


def square(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
    return output.square().mean()


def forward_known(output: Tensor, batch: Sequence[Tensor]) -> ls.Loss:
    return ls.Loss(entropy(output, batch).total, batch[1].sum())


def named_balance(output: Tensor, batch: Sequence[Tensor]) -> dict[str, Any]:
    return {"balance": output.square().mean()}


REFUSED: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (
        LossError,
        "choices of the experts 'blocks.0.experts' are not in 0 to 3; the model was not changed",
        {"model": lambda: Odd("range")},
    ),
    (
        LossError,
        "router 'blocks.0.router' returned logits that are not finite for",
        {"model": lambda: Odd("nan")},
    ),
    (
        LossError,
        "logits that are not finite for",
        {"model": lambda: Odd("no expert"), "balance": balance(over="microbatch", z=0.0)},
    ),
    (RecipeError, "returned probabilities", {"model": lambda: Odd("probabilities")}),
    (RecipeError, "have no gradient", {"model": lambda: Odd("frozen")}),
    (
        RecipeError,
        "blocks.0.router, blocks.0.other beside it",
        {"model": lambda: Odd("two routers")},
    ),
    (RecipeError, "2 buffers around the router", {"model": lambda: Odd("two biases")}),
    (
        RecipeError,
        "were called with 16 tokens in a microbatch of 2 x 9",
        {"model": lambda: Odd("rows"), "loss": square, "weight": None},
    ),
    (
        RecipeError,
        "the bias of the router 'blocks.0.router' was registered with persistent=False",
        {"model": lambda: Odd("not saved")},
    ),
    (
        RecipeError,
        "so half a microbatch has another balance loss; leave microbatch_splits out",
        {"balance": balance(over="microbatch"), "plan": "microbatch_splits=1"},
    ),
    (RecipeError, "a model without experts", {"model": lambda: Mixture(blocks=0)}),
    (RecipeError, "matches no module", {"balance": balance(routers=["gates.*"])}),
    (
        RecipeError,
        "each layer has one router",
        {"balance": balance(routers=["blocks.0.router"])},
    ),
    (
        RecipeError,
        "Balance.tokens returned a tensor of shape (18,)",
        {"balance": balance(tokens=lambda batch: batch[1].flatten())},
    ),
    (LossError, "Recipe.balance with an ls.Loss", {"loss": forward_known, "weight": None}),
    (LossError, "Recipe.balance adds one of that name", {"loss": named_balance, "weight": None}),
]


@pytest.mark.parametrize(
    ("error", "text", "changes"), REFUSED, ids=[text[:30] for _, text, _ in REFUSED]
)
def test_what_cannot_be_balanced_is_refused_by_name(
    tmp_path: Path, error: type[Exception], text: str, changes: dict[str, Any]
) -> None:
    given = dict(changes)
    plan = given.pop("plan", "replicate=1")
    with pytest.raises(error, match=re.escape(text)):
        ls.train(recipe(**given), run_dir=str(tmp_path), plan=plan)


def train_odd(folder: str, plan: str) -> str:
    with pytest.raises(LossError) as caught:
        train(folder, plan, model=lambda: Odd("range of rank 1"))
    return str(caught.value)


def test_a_choice_out_of_range_is_the_same_error_on_all_ranks(
    pool: WorkerPool, tmp_path: Path
) -> None:
    for number, plan in enumerate(("replicate=2", "replicate=2,checkpointing=full")):
        said = pool.run(2, train_odd, str(tmp_path / str(number)), plan)
        assert said[0] == said[1]
        assert "choices of the experts 'blocks.0.experts' are not in 0 to 3" in said[0]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"coefficient": -1}, "it must be a finite number of at least 0"),
        ({"coefficient": "0.1"}, "'0.1' (a str); it must be a finite number"),
        ({"z": float("nan")}, "it must be a finite number"),
        ({"bias_rate": True}, "it must be a finite number"),
        ({"over": "batch"}, "the known values are microbatch, step, previous, sample"),
        ({"scores": "tanh"}, "the known values are softmax, sigmoid"),
        ({"per_layer": 1}, "it must be True or False"),
        ({"routers": "blocks.*"}, "it must be a list of module names"),
        ({"tokens": 3}, "Balance.tokens is 3 (a int); it must be a function or None"),
    ],
)
def test_a_balance_checks_its_values(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(text)):
        balance(**changes)


def test_a_recipe_checks_its_balance() -> None:
    with pytest.raises(RecipeError, match=r"balance is 0.01 \(a float\); give ls.Balance"):
        recipe(balance=0.01)
    with pytest.raises(RecipeError, match="the tokens of a batch are counted in what inputs"):
        recipe(inputs=None, balance=balance(tokens=None))
    gathered = ls.Gathered(lambda output, batch: (output,), lambda rows: rows.sum())
    with pytest.raises(RecipeError, match=r"Balance with a coefficient or z, and batch_loss"):
        recipe(loss=None, weight=None, batch_loss=gathered)
