"""SyncBatchNorm: what one process computes over the same microbatches, whichever ranks split
them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiers import tier, tiered
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from training.subjects import (
    FEATURES,
    OUTPUTS,
    recipe,
    rows,
    same,
    samples_at,
    sgd,
    squared_error,
    state_of,
)

import lockstep as ls
from lockstep.assignment import batch_span, microbatch_spans
from lockstep.base.errors import RecipeError
from lockstep.comm.mesh import full_tensor
from lockstep.model.sync_batchnorm import SyncBatchNormExchange, use_exchange
from lockstep.testing.pool import WorkerPool

pytestmark = pytest.mark.timeout(240)  # some hundred trainings, two processes at a time
PLANS = {
    "replicate=1": 1,
    "replicate=2": 2,
    "replicate=3": 3,
    "shard=2": 2,
    "replicate=2,shard=2": 4,
}
SOME_SLOW = tiered(PLANS, always=["shard=2"], most=0)
"""Plans to parametrize with. Two replicas, whom three stand for, are slow too."""
SAMPLES, STEPS = 31, 2


class Dense(nn.Module):
    """Ways to use it: moving and cumulative averages, without parameters, without statistics,
    twice, in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.moving = nn.SyncBatchNorm(8, momentum=0.3)
        self.cumulative = nn.SyncBatchNorm(8, momentum=None, affine=False)
        self.bare = nn.SyncBatchNorm(8, track_running_stats=False)
        self.twice = nn.SyncBatchNorm(8)
        self.frozen = nn.SyncBatchNorm(8)
        self.last = nn.Linear(8, OUTPUTS)

    def train(self, mode: bool = True) -> Dense:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.cumulative(torch.tanh(self.moving(self.first(x)))))
        x = self.twice(torch.tanh(self.twice(self.bare(x)) * 2 + 1))
        return self.last(torch.tanh(self.frozen(x)))


class Convolutional(nn.Module):
    """An ordinary one, converted as torch's documentation says."""

    def __init__(self) -> None:
        super().__init__()
        body = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 6, 2),
            nn.BatchNorm2d(6),
        )
        self.body = nn.SyncBatchNorm.convert_sync_batchnorm(body)
        self.volume = nn.SyncBatchNorm(3)
        self.last = nn.Linear(6, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.body(x.view(-1, 1, 2, 3))).flatten(2)
        return self.last(self.volume(x.view(len(x), 3, 2, 2, 1)).reshape(len(x), 6, 2).mean(2))


@dataclass(frozen=True)
class Case:
    global_batch: int
    microbatch: int | None
    model: type[nn.Module] = Dense
    epochs: bool = False
    plan: str = ""

    def recipe(self, dtype: torch.dtype) -> ls.Recipe:
        return recipe(
            model=lambda: self.model().to(dtype),
            data=data(dtype),
            optimizer=sgd,
            global_batch=self.global_batch,
            microbatch=self.microbatch,
            evaluation=ls.Evaluation(data=data(dtype), microbatch=SAMPLES),
            blocks=["moving", "last"] if self.model is Dense else ["body", "last"],
            **({"epochs": 1} if self.epochs else {"steps": STEPS}),
        )


CASES = {
    "uneven microbatches": Case(13, 5),
    "microbatches of fewer samples than ranks": Case(7, 2, Convolutional),
    "a last microbatch of fewer samples than ranks": Case(8, 3),
    "one microbatch a step": Case(13, None),
    "a short last batch": Case(12, 4, epochs=True),
    "convolutional": Case(13, 5, Convolutional),
    "convolutional, one sample in the last microbatch": Case(9, 4, Convolutional),
    "recomputed": Case(13, 5, Convolutional, plan=",checkpointing=full"),
    "recomputed selectively": Case(13, 5, Convolutional, plan=",checkpointing=selective"),
    "a block that is one layer, recomputed": Case(13, 5, plan=",checkpointing=full"),
}
IN_FLOAT32 = ["uneven microbatches", "one microbatch a step", "convolutional", "recomputed"]
Found = tuple[dict[str, Tensor], list[Tensor], list[float], list[dict[str, Tensor]], float]
"""The first weights; of each step the gradient, the loss, and the weights and buffers after it; the
evaluation."""


def data(dtype: torch.dtype) -> TensorDataset:
    return TensorDataset(
        *(
            tensor.to(dtype) if tensor.is_floating_point() else tensor
            for tensor in rows(SAMPLES).tensors
        )
    )


class Record(ls.Hook):
    def __init__(self) -> None:
        self.gradients: list[Tensor] = []
        self.losses: list[float] = []
        self.states: list[dict[str, Tensor]] = []

    def on_start(self, run: Any) -> None:
        self.first = state_of(run.model)

    def after_step(self, run: Any) -> None:
        self.gradients.append(
            torch.cat(
                [
                    full_tensor(p.grad).reshape(-1)
                    for p in run.model.parameters()
                    if p.grad is not None
                ]
            ).clone()
        )
        self.losses.append(run.loss)
        self.states.append(state_of(run.model))


def train_all_cases(plan: str, run_dir: str) -> dict[tuple[str, torch.dtype], Found]:
    found = {}
    for name, case in CASES.items():
        for dtype in (torch.float64, torch.float32)[: 2 if name in IN_FLOAT32 else 1]:
            record = Record()
            result = ls.train(
                case.recipe(dtype),
                plan=plan + case.plan,
                run_dir=f"{run_dir}/{name}-{dtype}",
                hooks=[record],
            )
            found[name, dtype] = (
                record.first,
                record.gradients,
                record.losses,
                record.states,
                result.metrics["loss"],
            )
    return found


def by_hand(case: Case, first: dict[str, Tensor], dtype: torch.dtype) -> Found:
    """Torch's own layers in one process without a process group, where they are those of
    BatchNorm."""
    model = case.model().to(dtype).train()
    model.load_state_dict(first)
    optimizer, columns, gradients, losses, states = sgd(model), data(dtype).tensors, [], [], []
    for step in range(3 if case.epochs else STEPS):
        span = batch_span(step, length=SAMPLES, global_batch=case.global_batch, epochs=case.epochs)
        chosen = samples_at(*span, of=SAMPLES)
        optimizer.zero_grad()
        losses.append(0.0)
        for start, stop in microbatch_spans(len(chosen), case.microbatch, 1):
            loss = (
                squared_error(model, [column[chosen[start:stop]] for column in columns])
                * (stop - start)
                / len(chosen)
            )
            loss.backward()
            losses[-1] += loss.item()
        gradients.append(
            torch.cat(
                [p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]
            ).clone()
        )
        optimizer.step()
        states.append(state_of(model))
    return first, gradients, losses, states, squared_error(model.eval(), columns).item()


def running(found: Found) -> Tensor:
    """The statistics after the first step, all together."""
    return torch.cat([value for name, value in found[3][0].items() if "running" in name])


def distance(measured: Tensor, exact: Tensor) -> float:
    return float((measured.double() - exact).norm() / exact.norm())


@pytest.fixture(scope="module")
def trained(
    pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[dict[tuple[str, torch.dtype], Found]]]:
    @cache
    def run(plan: str) -> Any:
        path: Path = tmp_path_factory.mktemp("plan")
        return pool.run(PLANS[plan], train_all_cases, plan, str(path))

    return run


@pytest.mark.parametrize("plan", SOME_SLOW)
def test_in_float64_it_is_one_process_and_every_rank_has_its_bits(
    trained: Callable[[str], Any], plan: str
) -> None:
    first, *others = trained(plan)
    for name, case in CASES.items():
        found = first[name, torch.float64]
        assert len(found[1]) == (3 if case.epochs else STEPS), name
        expected = by_hand(case, found[0], torch.float64)
        torch.testing.assert_close(
            found, expected, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )
    for (name, dtype), found in first.items():
        for other in others:
            theirs = other[name, dtype]
            assert same(theirs[3], found[3]), name
            assert (theirs[2], theirs[4]) == (found[2], found[4]), f"{name}: loss, evaluation"


@pytest.mark.parametrize("plan", SOME_SLOW)
def test_in_float32_its_error_is_at_most_4_times_float32s_own(
    trained: Callable[[str], Any], plan: str
) -> None:
    """Of the first gradient and the statistics after it, over four cases together: one case's own
    error may be small by luck."""
    for ranks in trained(plan)[:1]:
        ours, own = [], []
        for name in IN_FLOAT32:
            case, found = CASES[name], ranks[name, torch.float32]
            first = {
                name: value.double() if value.is_floating_point() else value
                for name, value in found[0].items()
            }
            exact, single = (
                by_hand(case, first, torch.float64),
                by_hand(case, found[0], torch.float32),
            )
            for errors, measured in ((ours, found), (own, single)):
                errors.append(
                    [
                        distance(measured[1][0], exact[1][0]),
                        distance(running(measured), running(exact)),
                    ]
                )
        assert (torch.tensor(ours).norm(dim=0) <= 4 * torch.tensor(own).norm(dim=0)).all()


def test_the_cases_are_what_they_are_called() -> None:
    assert [stop - start for start, stop in microbatch_spans(8, 3, 1)] == [3, 3, 2]
    assert [stop - start for start, stop in microbatch_spans(9, 4, 1)] == [4, 4, 1]
    assert max(PLANS.values()) > 3 > 2
    assert batch_span(2, length=SAMPLES, global_batch=12, epochs=True) == (24, 31)


def told(model: str, plan: str, microbatch: int, run_dir: str) -> list[Any]:
    """What the events say of BatchNorm, over two rounds of training."""
    layer = {"plain": nn.BatchNorm1d, "synchronised": nn.SyncBatchNorm, "none": nn.Identity}[model]
    found: list[Any] = []

    class Noted(ls.Hook):
        def on_event(self, run: Any, event: Any) -> None:
            found.append((event.name, event.details))

    with ls.Session(run_dir=run_dir, plan=plan, hooks=[Noted()]) as session:
        network, _ = session.prepare(
            lambda: nn.Sequential(nn.Linear(FEATURES, 4), layer(4), nn.Linear(4, OUTPUTS)), sgd
        )
        for _ in range(2):
            for step in session.steps(
                rows(SAMPLES), global_batch=12, microbatch=microbatch, steps=2
            ):
                for batch in step.microbatches(dummies=True):
                    step.backward(squared_error(network, batch))
                step.commit()
        return [details for name, details in found if name == "batchnorm-per-microbatch"]


TOLD: list[tuple[str, str, int, list[Any]]] = [
    ("plain", "replicate=1", 5, [{"layers": ["1"], "samples": 5}]),
    ("plain", "replicate=1", 12, []),
    ("plain", "replicate=2", 6, [{"layers": ["1"], "samples": 6}]),
    ("synchronised", "replicate=2", 5, []),
    ("none", "replicate=2", 5, []),
]


def told_in_turn(plan: str, folder: str) -> list[Any]:
    cases = [case for case in TOLD if case[1] == plan]
    return [told(*case[:3], f"{folder}/{number}") for number, case in enumerate(cases)]


@pytest.mark.parametrize("plan", ["replicate=1", "replicate=2"])
def test_plain_batchnorm_is_told_of_once_where_there_are_several_microbatches(
    pool: WorkerPool, tmp_path: Path, plan: str
) -> None:
    expected = [case[3] for case in TOLD if case[1] == plan]
    for found in pool.run(PLANS[plan], told_in_turn, plan, str(tmp_path)):
        assert found == expected


def refused(kind: str, plan: str, run_dir: str) -> str:
    layers: dict[str, Callable[[], nn.Module]] = {
        "bitwise": lambda: nn.SyncBatchNorm(4),
        "mixed": lambda: nn.Sequential(nn.SyncBatchNorm(4), nn.BatchNorm1d(4)),
        "one value": lambda: nn.SyncBatchNorm(4),
        "cut": lambda: nn.SyncBatchNorm(4),
    }
    try:
        ls.train(
            recipe(
                model=lambda: nn.Sequential(
                    nn.Linear(FEATURES, 4), layers[kind](), nn.Linear(4, OUTPUTS)
                ),
                microbatch=5 if kind == "one value" else 4,
                tensor={"0": "colwise", "2": "rowwise"},
            ),
            plan=plan,
            run_dir=run_dir,
        )
    except RecipeError as error:
        return str(error)
    return "it trained"


REFUSED = {
    ("bitwise", "replicate=2,numerics=bitwise"): (
        "numerics=bitwise with SyncBatchNorm on 2 data ranks; .* use numerics=fast, or plain"
    ),
    ("mixed", "replicate=2"): (
        "'1.1' is a BatchNorm1d, together with SyncBatchNorm on 2 data ranks; .* convert all with"
        " nn.SyncBatchNorm.conv"
    ),
    ("one value", "replicate=2"): (
        "a microbatch with one value per channel; a variance needs two; choose a microbatch"
    ),
    ("cut", "replicate=2,tensor=2"): (
        "failed with its layers 0, 2 sharded .*; have no norm over the features"
    ),
}


def refused_in_turn(cases: list[tuple[str, str]], folder: str) -> list[str]:
    return [refused(*case, f"{folder}/{number}") for number, case in enumerate(cases)]


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=tier(4))])
def test_what_cannot_be_is_refused_on_all_ranks_and_on_one_it_trains(
    pool: WorkerPool, tmp_path: Path, ranks: int
) -> None:
    cases = [each for each in REFUSED if (each[0] == "cut") == (ranks == 4)]
    if ranks == 1:
        cases = [("bitwise", "replicate=1,numerics=bitwise"), ("mixed", "replicate=1")]
    for everything in pool.run(ranks, refused_in_turn, cases, str(tmp_path)):
        for case, said in zip(cases, everything, strict=True):
            assert re.search(REFUSED.get(case, "^it trained$"), said), case


def test_a_process_group_of_the_users_own_is_refused() -> None:
    layer = nn.SyncBatchNorm(4)
    layer.process_group = "any"
    with pytest.raises(RecipeError, match=r"'1' has a process_group; .* leave process_group out"):
        use_exchange(nn.Sequential(nn.Linear(2, 4), layer), SyncBatchNormExchange())


class Louder(nn.SyncBatchNorm):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_a_layer_stays_what_it_is_and_so_does_a_subclass() -> None:
    model = nn.Sequential(nn.SyncBatchNorm(3), Louder(3))
    names = list(model.state_dict())
    for _ in range(2):
        use_exchange(model, SyncBatchNormExchange())
    assert list(model.state_dict()) == names
    assert [type(layer).__name__ for layer in model] == ["SyncBatchNorm", "Louder"]
    assert isinstance(model[0], nn.SyncBatchNorm)
    assert isinstance(model[1], Louder)
    x = torch.randn(5, 3)
    assert same(model[1](x), 2 * nn.BatchNorm1d(3)(x))
    assert copy.deepcopy(model)[0]._exchange is model[0]._exchange


def learn_from_each_other(
    plan: str, run_dir: str
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """As in a GAN, both models with SyncBatchNorm, and with an `ls.Loss` that weighs samples."""
    with ls.Session(run_dir=run_dir, plan=plan) as session:
        one, first = session.prepare(lambda: Dense().double(), sgd)
        two, second = session.prepare(lambda: Dense().double(), sgd)
        set_position = [state_of(one), state_of(two)]
        for step in session.steps(data(torch.float64), global_batch=13, microbatch=5, steps=2):
            for batch in step.microbatches(dummies=True):
                apart = ((one(batch[1]) - two(batch[1]).detach()) ** 2).sum(1)
                step.backward(ls.Loss((apart * batch[0]).sum(), batch[0].sum()), first)
            step.commit(first)
            for batch in step.microbatches(dummies=True):
                step.backward(((two(batch[1]) - one(batch[1])) ** 2).mean(), second)
            step.commit(second, clip_norm=0.1)
            # between steps these layers wait for nobody, and nothing counts
            if session.rank == 0 or "shard" in plan:
                two(data(torch.float64).tensors[1])
        return set_position, [state_of(one), state_of(two)]


@pytest.mark.parametrize("plan", tiered(dict(list(PLANS.items())[2:]), most=2))
def test_two_models_that_learn_from_each_other(pool: WorkerPool, tmp_path: Path, plan: str) -> None:
    alone = pool.run(1, learn_from_each_other, "replicate=1", str(tmp_path / "alone"))[0]
    for found in pool.run(PLANS[plan], learn_from_each_other, plan, str(tmp_path / "split")):
        torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-11)
    assert not same(*alone)


class Staged(nn.Sequential):
    """What a pipeline cuts. A sample has two values a channel, so that a microbatch may have one
    sample, and a rank none of it."""

    def __init__(self) -> None:
        norms = (
            nn.SyncBatchNorm(4, momentum=0.3),
            nn.SyncBatchNorm(4, momentum=None, affine=False),
            nn.SyncBatchNorm(4),
        )
        widths = FEATURES, 8, 8
        blocks = [
            nn.Sequential(
                nn.Linear(width, 8), nn.Unflatten(1, (4, 2)), norm, nn.Flatten(), nn.Tanh()
            )
            for width, norm in zip(widths, norms, strict=True)
        ]
        super().__init__(*blocks, nn.Linear(8, OUTPUTS))


class Losses(ls.Hook):
    def __init__(self) -> None:
        self.found: list[float] = []

    def after_step(self, run: Any) -> None:
        self.found.append(run.loss)


def train_in_stages(plans: list[str], run_dir: str) -> list[tuple[list[float], float]]:
    """Of each plan the losses, and the evaluation."""
    found = []
    for plan in plans:
        losses = Losses()
        trained = recipe(
            model=lambda: Staged().double(),
            data=data(torch.float64),
            inputs=lambda batch: batch[1],
            loss=lambda output, batch: ((output - batch[2]) ** 2).mean(),
            optimizer=sgd,
            blocks=["0", "1", "2"],
            tensor={"*.0": "colwise_gathered", "3": "rowwise_split"},
            global_batch=13,
            microbatch=3,
            steps=STEPS,
            clip_norm=0.5,
            evaluation=ls.Evaluation(data=data(torch.float64), microbatch=SAMPLES),
        )
        result = ls.train(trained, plan=plan, run_dir=f"{run_dir}/{plan}", hooks=[losses])
        found.append((losses.found, result.metrics["loss"]))
    return found


BESIDE = {
    "pipeline": [
        *(
            f"replicate=2,pipeline=2,schedule={schedule}"
            for schedule in ("gpipe", "1f1b", "interleaved", "zero-bubble")
        ),
        "replicate=2,pipeline=2,checkpointing=full",
        "shard=2,pipeline=2",
        "shard=2,pipeline=2,checkpointing=selective",
    ],
    "tensor": [
        "replicate=2,tensor=2",
        "shard=2,tensor=2",
        "replicate=2,tensor=2,checkpointing=full",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["pipeline", "tensor"])
def test_microbatches_are_split_beside_axes_that_cut_the_model(
    pool: WorkerPool, tmp_path: Path, axis: str
) -> None:
    plans = BESIDE[axis]
    ((alone,),) = pool.run(1, train_in_stages, ["replicate=1"], str(tmp_path))
    for everyone in zip(plans, *pool.run(4, train_in_stages, plans, str(tmp_path)), strict=True):
        plan, *ranks = everyone
        state, truth = (
            load_file(tmp_path / name / "model.safetensors") for name in (plan, "replicate=1")
        )
        for found in ranks:
            torch.testing.assert_close(
                (found, state),
                (alone, truth),
                rtol=1e-9,
                atol=1e-11,
                msg=lambda text, plan=plan: f"{plan}: {text}",
            )
