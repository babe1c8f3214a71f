"""Traces, written and read: tensor summaries, projections, files, and requests in environment
variables."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_files
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lockstep.evidence import sketch
from lockstep.evidence.sketch import project
from lockstep.evidence.tensors import TensorSummary, distance
from lockstep.evidence.trace import read_traces
from lockstep.evidence.tracer import Tracer, summarize_tensor, tensor_file


def summarized(name: str, tensor: Tensor) -> TensorSummary:
    found = TensorSummary.from_json(summarize_tensor(name, tensor))
    assert found is not None
    return found


def test_projections_estimate_the_distance_of_two_tensors() -> None:
    ratios = []
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(300, generator=generator)
        y = x + 1e-3 * torch.randn(300, generator=generator)
        ratios.append(
            distance(summarized("w", x), summarized("w", y))
            / float((x.double() - y.double()).norm())
        )
    assert min(ratios) > 0.3
    assert max(ratios) < 1.9
    assert np.mean(np.square(ratios)) == pytest.approx(1.0, abs=0.15)


def test_the_distance_in_one_element_is_exact() -> None:
    x = torch.randn(1000)
    y = x.clone()
    y[777] += 0.5
    assert distance(summarized("w", x), summarized("w", y)) == pytest.approx(
        abs(float(y[777].double() - x[777].double())), rel=1e-9
    )


def test_projections_are_linear_and_differ_by_name() -> None:
    x, y = torch.randn(2, 500, dtype=torch.float64)
    total = summarized("w", x + y).projection
    np.testing.assert_allclose(
        total, summarized("w", x).projection + summarized("w", y).projection, rtol=1e-9
    )


def test_a_summary_does_not_depend_on_the_size_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1000)
    once = summarize_tensor("w", x)
    monkeypatch.setattr(sketch, "_CHUNK", 77)
    chunked = summarize_tensor("w", x)
    assert chunked["sha256"] == once["sha256"]
    np.testing.assert_allclose(chunked["sketch"], once["sketch"], rtol=1e-12)
    np.testing.assert_allclose(chunked["sketch"][-1], float(x.double().norm()) ** 2, rtol=1e-12)


def test_the_signs_are_fair_and_pinned() -> None:
    ones = project(np.ones(4096), 12345, 0)
    assert np.all(np.abs(ones) < 4 * 64)
    assert {abs(value) for value in project(np.array([2.0]), 7, 3)} == {2.0}
    assert [int(value) for value in project(np.array([1.0]), 0, 0)] == [-1, -1, -1, 1, 1, 1, -1, 1]


def test_a_projection_rounds_no_more_than_float64_does() -> None:
    values = np.abs(np.random.default_rng(0).standard_normal(20_000))
    signs = np.array([project(np.ones(1), 7, number) for number in range(len(values))])
    exact = [math.fsum((values * column).tolist()) for column in signs.T]
    assert np.max(np.abs(project(values, 7, 0) - exact)) < 1e-15 * np.linalg.norm(values)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 6).t(),
        torch.randn(3, 6)[:, ::2],
        torch.tensor(3.5),
        torch.empty(0),
        torch.randn(5).bfloat16(),
        torch.randn(5, dtype=torch.complex64),
        torch.arange(4),
        torch.tensor([True, False]),
    ],
    ids=["transposed", "strided", "scalar", "empty", "bfloat16", "complex", "int64", "bool"],
)
def test_any_tensor_is_summarized_and_saved(tmp_path: Path, tensor: Tensor) -> None:
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    found = summarized("w", tensor)
    assert found.norm == pytest.approx(float(values.double().norm()), rel=1e-9)
    assert found.sha256 == summarized("w", tensor.clone().contiguous()).sha256
    with tensor_file(tmp_path / "one.safetensors") as add:
        add("w", tensor)
        add("again", tensor)
    kept = load_file(tmp_path / "one.safetensors")
    assert kept.keys() == {"w", "again"}
    assert torch.equal(kept["w"].to(values.dtype), values)
    assert [path.name for path in tmp_path.iterdir()] == ["one.safetensors"]


def test_numbers_that_are_not_finite_are_infinitely_far() -> None:
    line = json.dumps(summarize_tensor("w", torch.tensor([1.0, math.inf])))
    broken = TensorSummary.from_json(json.loads(line))
    assert math.isinf(distance(broken, summarized("w", torch.ones(2))))
    assert (
        distance(
            broken, TensorSummary.from_json(summarize_tensor("w", torch.tensor([math.inf, 2.0])))
        )
        == 0.0
    )


def test_a_tensor_missing_on_one_side_is_infinitely_far() -> None:
    assert distance(None, None) == 0.0
    assert math.isinf(distance(None, summarized("w", torch.ones(2))))
    assert math.isinf(distance(summarized("w", torch.ones(3)), summarized("w", torch.ones(2))))


def named(scale: float = 1.0) -> list[tuple[str, Tensor | None]]:
    return [("a", scale * torch.ones(3)), ("b", None)]


def trace_steps(
    folder: Path, steps: int, *, rank: int = 0, replicated: bool = True, asked: int | None = None
) -> list[bool]:
    folder.mkdir(exist_ok=True)
    tracer = Tracer(
        folder,
        asked,
        rank=rank,
        world_size=2,
        plan="replicate=2",
        replicated=replicated,
        writes=rank == 0,
    )
    tracer.metadata(batchnorm=False)
    tracer.start(0, named(), [])
    last = []
    for step in range(steps):
        tracer.before_forward()
        tracer.microbatch(0, step, rank, [7 * rank, 8], {"": "0a"}, named() if replicated else None)
        tracer.gradients(0, step, named(2.0), gain=0.5)
        last.append(
            tracer.step(
                0,
                step,
                loss=1.5,
                weight=None,
                norm=None,
                lr=0.1,
                parameters=named(3.0),
                buffers=[],
                states=[],
            )
        )
    tracer.close()
    return last


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    for rank in (0, 1):
        assert trace_steps(tmp_path, 3, rank=rank, asked=3) == [False, False, True]
    (found,) = read_traces(tmp_path)
    assert (found.plan, found.world_size, found.module_index, found.steps, sorted(found.ranks)) == (
        "replicate=2",
        2,
        0,
        3,
        [0, 1],
    )
    assert found.metadata == {"batchnorm": False, "modules": 1}
    assert [
        (m.rank, m.index, m.samples, m.drew_random_numbers) for m in found.microbatches_of(1)
    ] == [
        (0, 0, (0, 8), False),
        (1, 1, (7, 8), False),
    ]
    step = found.rank_0.steps[2]
    assert (step.loss, step.weight, step.norm, step.lr, step.gain) == (1.5, None, None, 0.1, 0.5)
    assert step.tensors["gradients"]["b"] is None
    assert step.tensors["parameters"]["a"] is not None
    assert step.tensors["parameters"]["a"].norm == pytest.approx(3 * 3**0.5)
    for number, kept in ((0, True), (1, False), (2, True)):
        value = found.tensor(number, "gradients", "a")
        assert (value is not None and value.tolist() == [2.0, 2.0, 2.0]) == kept
    assert found.tensor(0, "gradients", "b") is None


def test_a_rank_that_does_not_write_iterates_over_all_tensors(tmp_path: Path) -> None:
    looked: list[str] = []

    def gathered() -> Any:
        for name, tensor in named():
            looked.append(name)
            yield name, tensor

    trace_steps(tmp_path, 1, rank=0, replicated=False)
    tracer = Tracer(
        tmp_path,
        None,
        rank=1,
        world_size=2,
        plan="shard=2",
        replicated=False,
        writes=False,
    )
    tracer.start(0, gathered(), gathered())
    tracer.gradients(0, 0, gathered())
    tracer.step(
        0,
        0,
        loss=1.0,
        weight=None,
        norm=None,
        lr=None,
        parameters=gathered(),
        buffers=gathered(),
        states=gathered(),
    )
    tracer.close()
    assert looked == ["a", "b"] * 6
    (found,) = read_traces(tmp_path)
    assert sorted(found.ranks) == [0]


def test_the_parts_of_pipeline_stages_are_merged(tmp_path: Path) -> None:
    stages = {
        0: [("first", torch.ones(2))],
        2: [("last", torch.full((3,), 2.0)), ("first", torch.zeros(2))],
    }
    for rank in range(4):
        tracer = Tracer(
            tmp_path,
            None,
            rank=rank,
            world_size=4,
            plan="pipeline=2",
            replicated=False,
            writes=rank in stages,
        )
        mine = stages[rank - rank % 2]
        tracer.start(0, mine, [])
        tracer.gradients(0, 0, mine)
        tracer.step(
            0, 0, loss=1.0, weight=None, norm=None, lr=None, parameters=mine, buffers=[], states=[]
        )
        tracer.close()
    (found,) = read_traces(tmp_path)
    assert sorted(found.ranks) == [0]
    step = found.rank_0.steps[0]
    assert {
        name: summary.norm for name, summary in step.tensors["gradients"].items() if summary
    } == pytest.approx({"first": 2**0.5, "last": 12**0.5})
    assert found.rank_0.initial["parameters"].keys() == {"first", "last"}
    last = found.tensor(0, "gradients", "last")
    assert last is not None
    assert last.tolist() == [2.0, 2.0, 2.0]


def test_a_run_that_never_trained_has_no_trace(tmp_path: Path) -> None:
    assert read_traces(tmp_path) == []
    Tracer(
        tmp_path,
        None,
        rank=0,
        world_size=1,
        plan="replicate=1",
        replicated=True,
        writes=True,
    ).close()
    assert read_traces(tmp_path) == []


def test_an_incomplete_line_is_ignored(tmp_path: Path) -> None:
    trace_steps(tmp_path, 2)
    path = tmp_path / "rank-0.jsonl"
    path.write_text(path.read_text()[:-20])
    (found,) = read_traces(tmp_path)
    assert found.steps == 1


def test_the_order_of_the_backward_is_recorded(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tracer = Tracer(
        tmp_path,
        None,
        rank=0,
        world_size=1,
        plan="replicate=1",
        replicated=True,
        writes=True,
    )
    tracer.start(0, model.named_parameters(), [])
    tracer.watch(0, model.named_parameters())
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    tracer.gradients(0, 0, [(name, p.grad) for name, p in model.named_parameters()])
    tracer.step(
        0,
        0,
        loss=1.0,
        weight=None,
        norm=None,
        lr=None,
        parameters=model.named_parameters(),
        buffers=[],
        states=[],
    )
    tracer.close()
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    order = read_traces(tmp_path)[0].backward_order
    assert sorted(order) == sorted(name for name, _ in model.named_parameters())
    assert {name[0] for name in order[:2]} == {"1"}


def test_random_numbers_drawn_by_a_forward_are_recorded(tmp_path: Path) -> None:
    tracer = Tracer(
        tmp_path,
        None,
        rank=0,
        world_size=1,
        plan="replicate=1",
        replicated=True,
        writes=True,
    )
    for index, draws in enumerate((False, True)):
        tracer.before_forward()
        if draws:
            torch.rand(1)
        tracer.microbatch(0, 0, index, [], {}, None)
    tracer.close()
    rows = run_files.rows(tmp_path / "rank-0.jsonl")
    assert [
        row["rng_after"] != row["rng_before"] for row in rows if row["kind"] == "microbatch"
    ] == [False, True]
