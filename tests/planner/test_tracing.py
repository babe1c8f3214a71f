"""What a trace needs of a script, and what it leaves behind: nothing."""

from __future__ import annotations

import gc
import random
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from planner.subjects import (
    LENGTH,
    MICROBATCH,
    WORDS,
    Transformer,
    loss,
    mean_loss,
    plain,
    recipe,
    traced,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import lockstep as ls
from lockstep.base.errors import DataError, RecipeError
from lockstep.base.torch_private import FakeTensor, FakeTensorMode, process_group_count
from lockstep.comm.shared_memory import SharedMemoryGroup
from lockstep.comm.world import World
from lockstep.data.fetch import Fetcher
from lockstep.planner.trace import Compute, memory_peak
from lockstep.planner.tracing.fake_world import fake_world
from lockstep.planner.tracing.recorder import TraceRecorder
from lockstep.planner.tracing.stand_ins import ValueNeeded, Values
from lockstep.training import loss as losses
from lockstep.training.optim import gradient_norm

HERE = Path(__file__)


class Branching(Transformer):
    def forward(self, words: Tensor) -> Tensor:
        scores = super().forward(words)
        return -scores if scores.sum() > 0 else scores  # a value


class Masking(Transformer):
    def forward(self, words: Tensor) -> Tensor:
        scores = super().forward(words)
        return scores + scores[words > 3].mean()  # a shape


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.embedding(words)
        return scores


def listing_loss(scores: Tensor, batch: Any) -> Tensor:
    factor = scores.mean().tolist()  # a list
    return (scores * factor).mean()


def line_of(comment: str) -> int:
    return next(
        number
        for number, line in enumerate(HERE.read_text().splitlines(), 1)
        if line.endswith(f"# {comment}")
    )


NEEDY: dict[str, dict[str, Any]] = {
    "a value": {"model": Branching},
    "a shape": {"model": Masking},
    "a list": {"loss": listing_loss, "weight": None},
}


@pytest.mark.parametrize(
    ("what", "plan"),
    [("a value", "shard=2"), ("a shape", "replicate=2"), ("a list", "replicate=1")],
)
def test_a_script_that_needs_values_is_told_where_and_is_traced_with_them(
    what: str, plan: str
) -> None:
    given = recipe(**NEEDY[what], tensor=None)
    where = rf"{HERE.name}:{line_of(what)}: .* needs values of a tensor"
    with pytest.raises(ValueNeeded, match=where):
        traced(plan, given)
    trace = traced(plan, given, is_fake=False)
    assert memory_peak(trace).bytes > 0
    assert trace.collectives() or plan == "replicate=1"


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2", "pipeline=2"])
def test_with_values_the_same_is_exchanged(plan: str) -> None:
    fake, real = plain(plan), traced(plan, is_fake=False)
    assert [(each.kind, each.bytes) for each in fake.collectives()] == [
        (each.kind, each.bytes) for each in real.collectives()
    ]


class Words(torch.utils.data.Dataset[list[int]]):
    """Lists of words, made with values when they are asked for."""

    def __init__(self) -> None:
        self.asked: set[int] = set()

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> list[int]:
        self.asked.add(index)
        made = torch.arange(LENGTH + 1) * index % WORDS
        assert made.sum() >= 0
        return [int(word) for word in made.tolist()]


def test_the_dataset_collate_and_weight_compute_with_values() -> None:
    data, seen = Words(), list[Tensor]()

    def collate(samples: list[list[int]]) -> list[Tensor]:
        rows = torch.tensor(samples)
        assert (rows[rows > 0] < WORDS).all()
        seen.append(rows)
        return [rows[:, :-1], rows[:, 1:]]

    def weight(batch: list[Tensor]) -> float:
        return float((batch[1] >= 0).sum().item())

    trace = traced("shard=2", recipe(data=data, collate=collate, weight=weight))
    assert data.asked
    assert all(type(rows) is Tensor for rows in seen)
    assert seen[-1].shape == (MICROBATCH, LENGTH + 1), "those before are of the trial of collate"
    assert trace.tokens_per_sample == LENGTH


def test_inputs_model_and_loss_compute_without_values() -> None:
    kinds = set[type]()

    def loss(scores: Tensor, batch: Any) -> Tensor:
        kinds.update({type(scores), type(batch[1])})
        return nn.functional.cross_entropy(scores.flatten(0, 1), batch[1].flatten())

    traced("replicate=1", recipe(loss=loss, weight=None))
    assert kinds == {FakeTensor}


def two_views(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    words, targets = (torch.stack(each) for each in zip(*samples, strict=True))
    return words.repeat(2, 1), targets.repeat(2, 1)


def test_a_mean_over_several_rows_a_sample_is_traced() -> None:
    trace = traced("replicate=2", recipe(collate=two_views, loss=mean_loss, weight=None))
    assert trace.items


def test_evaluations_are_no_part_of_a_step() -> None:
    evaluation = ls.Evaluation(data=recipe().data, every=1, loss=fails)
    assert traced("replicate=1", recipe(evaluation=evaluation)).collectives() == []


# What is left behind


def fails(scores: Any, batch: Any) -> Tensor:
    raise ZeroDivisionError("on purpose")


def fails_in_the_traced_step(scores: Tensor, batch: Any) -> Any:
    if any(
        isinstance(mode, TraceRecorder)
        for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    ):
        fails(scores, batch)
    return loss(scores, batch)


PATCHED: list[tuple[Any, str]] = [
    *((Fetcher, name) for name in ("__getitem__", "_rows")),
    *((DeviceMesh, name) for name in ("__init__", "_concatenate")),
    *((torch.cpu, name) for name in ("Stream", "Event", "current_stream", "stream")),
    *(
        (DistributedDataParallel, "_pre_forward"),
        (torch.UntypedStorage, "resize_"),
        (FakeTensor, "tolist"),
        (SharedMemoryGroup, "create"),
    ),
    *((World, name) for name in ("gather_rows", "gather_values", "value_of")),
]


def state_of_torch() -> list[Any]:
    numbers: tuple[Any, ...] = np.random.get_state()  # type: ignore[assignment]
    return [
        [vars(owner).get(name) for owner, name in PATCHED],
        (
            dist.is_initialized(),
            process_group_count(),
            torch.get_rng_state().tolist(),
            random.getstate(),
            numbers[1].tolist(),
            numbers[2],
        ),
        (
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
        ),
        (
            torch.is_autocast_enabled("cpu"),
            type(torch.ones(1)),
            torch.utils._python_dispatch._len_torch_dispatch_stack(),
        ),
        len(torch.overrides._get_current_function_mode_stack()),
        sorted(path.name for path in Path(tempfile.gettempdir()).glob("lockstep-plan-*")),
        sorted(path.name for path in Path().iterdir()),
    ]


@pytest.fixture
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_in_a_folder")
@pytest.mark.parametrize(
    ("plan", "changes", "error"),
    [
        ("replicate=2,numerics=bitwise", {}, None),
        ("pipeline=2,shard=2,tensor=2,checkpointing=full", {"precision": "bf16"}, None),
        ("shard=2", {"loss": fails}, ZeroDivisionError),
        ("replicate=2", {"loss": fails_in_the_traced_step}, ZeroDivisionError),
        ("replicate=2", {"model": Branching}, ValueNeeded),
        ("tensor=2", {"tensor": {"nowhere": "colwise"}}, RecipeError),
        ("shard=4,tensor=2", {"data": []}, DataError),
    ],
)
def test_torch_is_afterwards_as_it_was(
    plan: str, changes: dict[str, Any], error: type[Exception] | None
) -> None:
    plain("shard=2")  # imports, and torch's own caches
    before = state_of_torch()
    with nullcontext() if error is None else pytest.raises(error) as kept:  # with its frames
        traced(plan, recipe(**changes))
    gc.collect()
    for then, now in zip(before, state_of_torch(), strict=True):
        assert now == then
    assert error is None or isinstance(kept.value, error)


def test_a_run_after_a_trace_in_the_same_process_has_its_own_constants() -> None:
    losses._constant.cache_clear()
    traced("replicate=1")
    assert losses._constant.cache_info().currsize == 0
    trace = traced("replicate=1", is_fake=False, is_gpu=False)
    assert losses._constant.cache_info().currsize > 0
    assert memory_peak(trace).bytes > 0


def test_on_a_gpu_the_clipping_norm_is_not_computed_in_pieces_for_a_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = recipe(model=Small, global_batch=MICROBATCH, stages=None, tensor=None)

    def kernels(*, is_gpu: bool) -> int:
        trace = traced("numerics=bitwise", small, is_gpu=is_gpu)
        return sum(isinstance(item, Compute) for item in trace.items)

    whole = {is_gpu: kernels(is_gpu=is_gpu) for is_gpu in (True, False)}
    monkeypatch.setattr(gradient_norm, "PIECE_ELEMENTS", 8)
    assert kernels(is_gpu=True) == whole[True]
    assert kernels(is_gpu=False) > whole[False]


def test_two_traces_are_the_same() -> None:
    first, second = plain("shard=2"), traced("shard=2")
    assert [type(item) for item in first.items] == [type(item) for item in second.items]
    assert first.collectives() == second.collectives()
    assert memory_peak(first) == memory_peak(second)


def test_the_hook_for_uncaught_errors_is_as_before() -> None:
    before = sys.excepthook
    with fake_world(0, 4, 4):
        pass
    assert sys.excepthook is before


def test_a_product_that_names_the_dtype_of_its_result_is_compared_by_its_factors() -> None:
    with FakeTensorMode(), Values():
        half = torch.empty(4, 4, device="cuda", dtype=torch.bfloat16)
        assert torch.mm(half, half, out_dtype=torch.float32).dtype is torch.float32
        with pytest.raises(RuntimeError, match=r"same dtype, but got: c10::BFloat16 != float"):
            torch.mm(half, half.float(), out_dtype=torch.float32)
