"""BatchNorm's running statistics under `replicate`: those of one process that computes all
microbatches in their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from training.subjects import (
    EachState,
    recipe,
    rows,
    same,
    samples_at,
    sgd,
    squared_error,
    state_of,
)
from worlds import ALONE

import lockstep as ls
from lockstep.assignment import MicrobatchAssignment
from lockstep.base.errors import RecipeError
from lockstep.comm.mesh import Mesh
from lockstep.model.running_statistics import RunningStatistics, SelfUpdatingBuffers
from lockstep.plan import Plan
from lockstep.testing.pool import WorkerPool

SAMPLES, GLOBAL_BATCH, MICROBATCH, STEPS = 60, 22, 4, 4
"""Six microbatches a step, the last one short; a batch of the second epoch too."""


class Normed(nn.Module):
    """Ways to use a BatchNorm: with a momentum, without (a cumulative average), twice, recomputed,
    frozen, without statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.moving = nn.BatchNorm1d(5, momentum=0.3)
        self.cumulative = nn.BatchNorm1d(5, momentum=None)
        self.twice = nn.BatchNorm1d(5)
        self.recomputed = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Tanh())
        self.frozen = nn.BatchNorm1d(5)
        self.bare = nn.BatchNorm1d(5, track_running_stats=False)
        self.last = nn.Linear(5, 3)

    def train(self, mode: bool = True) -> Normed:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = self.cumulative(torch.tanh(self.moving(self.first(x))))
        x = torch.tanh(self.twice(torch.tanh(self.twice(x)) * 2 + 1))
        x = self.cumulative(x * 3 - 1)
        x = checkpoint(self.recomputed, x, use_reentrant=False)
        return self.last(self.frozen(self.bare(x)))


class Spectral(nn.Module):
    """Its forward changes a buffer that is not BatchNorm's."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.replaces = replaces
        self.register_buffer("calls_seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.replaces:
            self.calls_seen = self.calls_seen + 1
        else:
            self.calls_seen += 1
        return self.layer(x)


def normed(**changes: Any) -> ls.Recipe:
    return recipe(
        model=Normed,
        data=rows(SAMPLES),
        optimizer=sgd,
        global_batch=GLOBAL_BATCH,
        microbatch=MICROBATCH,
        steps=STEPS,
        **{"evaluation": ls.Evaluation(data=rows(7), every=2), **changes},
    )


def train_normed(run_dir: str) -> list[dict[str, Tensor]]:
    states = EachState()
    ls.train(normed(), run_dir=run_dir, hooks=[states])
    return states.states


def errors_of_changed_buffers(folder: str) -> list[str]:
    """Return what is said of each way to change a buffer, and each microbatch."""
    found = []
    for replaces, microbatch in product((False, True), (4, 8, 16)):
        given = recipe(model=lambda r=replaces: Spectral(r), microbatch=microbatch)
        try:
            ls.train(given, run_dir=f"{folder}/{replaces}-{microbatch}")
            found.append("it trained")
        except RecipeError as error:
            found.append(str(error))
    return found


def by_hand(first: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Plain torch on one process, one microbatch after another, with torch's own updates of the
    statistics."""
    model = Normed().train()
    model.load_state_dict(first)
    optimizer = sgd(model)
    states = [state_of(model)]
    data = rows(SAMPLES).tensors
    for step in range(STEPS):
        samples = samples_at(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH, of=SAMPLES)
        optimizer.zero_grad()
        for start in range(0, GLOBAL_BATCH, MICROBATCH):
            chosen = samples[start : start + MICROBATCH]
            buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
            loss = squared_error(model, [tensor[chosen] for tensor in data])
            after_forward = {name: buffer.clone() for name, buffer in model.named_buffers()}
            assert not same(buffers, after_forward)
            (loss * len(chosen) / GLOBAL_BATCH).backward()
            # torch counts what is recomputed a second time
            for name, buffer in model.named_buffers():
                buffer.copy_(after_forward[name])
        optimizer.step()
        states.append(state_of(model))
    return states


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_running_statistics_are_those_of_one_process_in_every_step(
    pool: WorkerPool, tmp_path: Any, world_size: int
) -> None:
    everyone: Sequence[list[dict[str, Tensor]]] = pool.run(
        world_size, train_normed, str(tmp_path / "run")
    )
    expected = by_hand(everyone[0][0])
    for states in everyone:
        assert same(states, everyone[0])
        for step, (found, truth) in enumerate(zip(states, expected, strict=True)):
            for name, value in truth.items():
                torch.testing.assert_close(
                    found[name],
                    value,
                    rtol=1e-4,
                    atol=1e-5,
                    msg=lambda text, at=(step, name): f"{at}: {text}",
                )
    microbatches = STEPS * -(-GLOBAL_BATCH // MICROBATCH)
    last = everyone[0][-1]
    assert (
        last["moving.num_batches_tracked"]
        == last["recomputed.1.num_batches_tracked"]
        == microbatches
    )
    assert (
        last["twice.num_batches_tracked"]
        == last["cumulative.num_batches_tracked"]
        == 2 * microbatches
    )
    assert same(last["frozen.running_mean"], torch.zeros(5))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_forward_that_changes_another_buffer_is_refused_by_its_name(
    pool: WorkerPool, tmp_path: Any, world_size: int
) -> None:
    for errors in pool.run(world_size, errors_of_changed_buffers, str(tmp_path)):
        for said in errors:
            assert "forward changed its buffer 'calls_seen'" in said
            assert "update it outside the forward, between steps" in said


class Codebook(nn.Module):
    """Its forward changes a buffer through `.data`, which torch does not count; from the
    `begins`-th call in training on."""

    def __init__(self, begins: int) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.begins, self.calls = begins, 0
        self.register_buffer("code", torch.tensor([[1.0, torch.nan], [0.0, -0.0]]).T)
        self.register_buffer("number", torch.ones((), dtype=torch.complex64).conj())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.training and self.calls >= self.begins:
            self.code.data.mul_(0.9)
        return self.layer(x) * self.code[0, 0].abs()


class MovesBuffers(ls.Hook):
    """Between steps they may change, counted or not."""

    def after_step(self, run: Any) -> None:
        run.model.code.data.mul_(2)
        run.model.number.add_(1)


def train_codebooks(folder: str) -> list[str]:
    """Return the error, or the number of steps, of codebooks that change in the first call, in the
    third, and never."""
    found = []
    for begins, steps in ((1, 4), (3, 4), (1000, 7)):
        given = recipe(
            model=lambda b=begins: Codebook(b),
            microbatch=8,
            steps=steps,
            evaluation=ls.Evaluation(data=rows(7), every=1),
        )
        try:
            result = ls.train(
                given, run_dir=f"{folder}/{begins}", hooks=[MovesBuffers()], log_every=3
            )
            found.append(str(result.steps))
        except RecipeError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_change_of_a_buffer_that_torch_does_not_count_is_refused_in_the_forward_on_all_ranks(
    pool: WorkerPool, tmp_path: Any, world_size: int
) -> None:
    for *errors, between_steps in pool.run(world_size, train_codebooks, str(tmp_path)):
        assert between_steps == "7"
        for said in errors:
            assert said.startswith(
                "the model's forward changed its buffer 'code'; microbatches are computed on"
                " different ranks"
            )


class Renormed(nn.Module):
    """torch shortens the rows that a forward reads, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(60, 6, max_norm=0.5)
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.embedding((x[:, 0].abs() * 9).long()))


class Momentum(nn.Module):
    """A frozen copy follows the weights, in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Linear(6, 3)
        self.target = nn.Linear(6, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.target.weight.lerp_(self.online.weight, 0.1)
        return self.online(x) - self.target(x)


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.block, self.first(x), use_reentrant=True))


class Freezes(ls.Hook):
    def after_step(self, run: Any) -> None:
        if run.step == 2:
            run.model.last.requires_grad_(False)


def attempt(run_dir: str, model: type[nn.Module], numerics: str) -> tuple[str, int]:
    hooks = [Freezes()] if model is Normed else []
    states = EachState()
    try:
        ls.train(
            recipe(model=model, steps=4),
            run_dir=run_dir,
            hooks=[*hooks, states],
            plan=f"numerics={numerics}",
        )
    except RecipeError as error:
        return str(error), len(states.states) - 1
    raise AssertionError("it trained")


CHANGED = "the model's forward, or a hook of its backward, changed its parameter "
MISTAKES = {
    Renormed: (f"{CHANGED}'embedding.weight'; microbatches", 0),
    Momentum: (f"{CHANGED}'target.weight'; microbatches", 0),
    Normed: (
        "parameter 'last.weight' has requires_grad=False and had True when the model was "
        "prepared, or after run.freeze; ranks sum the gradients of the parameters that "
        "were trainable then; call run.freeze(name) or run.unfreeze(name) in a hook, on "
        "every rank",
        2,
    ),
}
"""Model -> what is said of it, and after how many steps."""


def attempts(folder: str) -> dict[tuple[type[nn.Module], str], tuple[str, int]]:
    return {
        (model, numerics): attempt(f"{folder}/{model.__name__}-{numerics}", model, numerics)
        for model in MISTAKES
        for numerics in ("fast", "bitwise")
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_parameter_that_changes_otherwise_than_by_a_step_is_refused_on_all_ranks(
    pool: WorkerPool, tmp_path: Any, world_size: int
) -> None:
    for found in pool.run(world_size, attempts, str(tmp_path)):
        for (model, numerics), (text, done) in found.items():
            message, steps = MISTAKES[model]
            assert text.startswith(message), numerics
            assert done == steps, (model, numerics)


def test_a_reentrant_checkpoint_is_refused_where_gradients_are_sent_amid_the_backward(
    pool: WorkerPool, tmp_path: Any
) -> None:
    for text, _ in pool.run(2, attempt, str(tmp_path / "run"), Reentrant, "fast,transport=torch"):
        assert text.endswith("pass use_reentrant=False to torch.utils.checkpoint.checkpoint")


@pytest.mark.parametrize("momentum", [0.1, None])
def test_where_a_gpu_decides_a_step_that_is_not_applied_leaves_the_statistics_alone(
    momentum: float | None,
) -> None:
    mesh = Mesh.of(ALONE, Plan(replicate=1))
    norm = nn.BatchNorm1d(2, momentum=momentum)
    statistics = RunningStatistics(norm, mesh)
    seen = []
    for gate in (True, False):
        statistics.begin(compare=False)
        norm(torch.tensor([[0.0, 4.0], [2.0, 8.0]]) if gate else torch.full((2, 2), torch.nan))
        statistics.note_microbatch()
        statistics.commit(MicrobatchAssignment(1), 1, apply=torch.tensor(gate))
        seen.append({name: value.clone() for name, value in norm.named_buffers()})
    share = 1.0 if momentum is None else momentum
    assert seen[0]["running_mean"].tolist() == pytest.approx([share * 1.0, share * 6.0])
    assert same(seen[0], seen[1])
    statistics.close()


class Unused(nn.Module):
    """Cumulative averages that start from given statistics: one frozen, one that no forward
    reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.apart = (nn.BatchNorm1d(6, momentum=None) for _ in range(2))
        for norm in (self.frozen, self.apart):
            norm.running_mean.fill_(3.0)
            norm.running_var.fill_(0.1)
        self.layer = nn.Linear(6, 3)

    def train(self, mode: bool = True) -> Unused:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.frozen(x))


def train_beside_statistics(run_dir: str) -> dict[str, Tensor]:
    states = EachState()
    ls.train(recipe(model=Unused), run_dir=run_dir, hooks=[states])
    return states.states[-1]


@pytest.mark.parametrize("world_size", [1, 2])
def test_statistics_that_no_forward_updates_stay_as_they_are(
    pool: WorkerPool, tmp_path: Any, world_size: int
) -> None:
    first = Unused().state_dict()
    for state in pool.run(world_size, train_beside_statistics, str(tmp_path / "run")):
        assert all(
            same(state[name], value)
            for name, value in first.items()
            if "running" in name or "tracked" in name
        )


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_a_large_buffer_that_a_rank_has_updated_is_copied_once_in_a_commit() -> None:
    module = nn.Module()
    module.register_buffer("codes", torch.zeros(3))
    updating = SelfUpdatingBuffers("", module, ["codes"])
    updating._first = {"codes": torch.ones(3)}
    one: Any = SimpleNamespace(broadcast=lambda tensor, source: None)
    with Operations() as called:
        updating.commit(MicrobatchAssignment(1, False), one, 2, apply=True)
    assert called.counts == {"copy_": 1}
    assert torch.equal(updating.kept["codes"], torch.ones(3))
