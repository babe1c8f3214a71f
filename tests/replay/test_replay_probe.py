"""The probe of `lockstep replay`: the step is that of the run, and its parts are those of the
microbatches."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import test_context_axis
from training.subjects import network, recipe, rows

import lockstep as ls
from lockstep.base.errors import DataError
from lockstep.logging.run_files import CHECKSUM
from lockstep.replay.request import ReplayRequest
from lockstep.replay.step import STEP, ReplayedMicrobatch, joined_parts, microbatch_file
from lockstep.testing.pool import WorkerPool

STEPS = 6
SAMPLES = rows(48)


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.2), network())


def in_slices() -> nn.Module:
    model = network()
    model.tensor_plan = {"0": "colwise", "2": "rowwise"}  # type: ignore[assignment]
    return model


def of_the_rows(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return (model(batch[1]) - batch[2]).square().mean()


def train(folder: str, plan: str, model: Callable[[], nn.Module], data: Any = SAMPLES) -> None:
    ls.train(
        recipe(model=model, data=data, loss=of_the_rows, steps=STEPS, clip_norm=0.5),
        plan=f"{plan},numerics=bitwise",
        run_dir=folder,
        log_every=1,
        saving=ls.Saving(every=2, last=3),
    )


def replay(
    folder: Path,
    made: Path,
    plan: str,
    model: Callable[[], nn.Module],
    step: int,
    without: Sequence[int] = (),
    data: Any = SAMPLES,
) -> None:
    """Train as `lockstep replay` starts it."""
    request = ReplayRequest(
        folder=folder,
        checkpoints=str(made / "checkpoints"),
        before=step,
        begins_anew=step < 3,
        step=step,
        without=without,
    )
    answer(request, lambda: train(f"{folder}/run", plan, model, data))


def answer(request: ReplayRequest, trains: Callable[[], object]) -> None:
    folder = request.folder
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as environment:
        for name, value in request.write(folder).items():
            environment.setenv(name, value)
        with pytest.raises(SystemExit, check=lambda ended: ended.code == 0):
            trains()


def read(folder: Path, ranks: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    parts = [
        each
        for rank in range(ranks)
        for each in json.loads((folder / microbatch_file(rank)).read_text())
    ]
    whole = json.loads((folder / STEP).read_text())
    return whole, sorted(parts, key=lambda each: each["microbatch"])


def row(folder: Path, step: int) -> dict[str, Any]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    found: dict[str, Any] = next(r for r in map(json.loads, lines) if r["step"] == step)
    return found


@pytest.mark.parametrize(("made_by", "ranks"), [("shard=2", 1), ("replicate=1", 2)])
def test_a_step_is_made_again_on_another_number_of_processes(
    pool: WorkerPool, tmp_path: Path, made_by: str, ranks: int
) -> None:
    made, again = tmp_path / "made", tmp_path / "again"
    pool.run(2 if "2" in made_by else 1, train, str(made), made_by, with_dropout)
    before = sorted(path.name for path in (made / "checkpoints").rglob("*"))
    pool.run(ranks, replay, again, made, f"replicate={ranks}", with_dropout, 4)
    assert sorted(path.name for path in (made / "checkpoints").rglob("*")) == before
    whole, parts = read(again, ranks)
    assert whole["begin"] == 2
    assert [row(again / "run", step)[CHECKSUM] for step in (3, 4)] == [
        row(made, step)[CHECKSUM] for step in (3, 4)
    ]
    assert whole["loss"] == row(made, 4)["loss"]
    assert math.sqrt(sum(whole["squares"].values())) == pytest.approx(row(made, 4)["gradient_norm"])
    assert [each["microbatch"] for each in parts] == [0, 1, 2, 3]
    assert sum(each["part"] for each in parts) == pytest.approx(whole["loss"])
    assert sum(each["total"] for each in parts) / 4 == pytest.approx(whole["loss"])
    assert all(set(each["squares"]) == set(whole["squares"]) == {"1"} for each in parts)
    samples = [sample for each in parts for sample in each["samples"]]
    assert len(set(samples)) == 16


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay") / "made"
    train(str(folder), "replicate=1", network)
    return folder


def by_hand(made: Path, samples: list[int]) -> tuple[float, float]:
    """The loss of these samples before step 3, and the sum of squares of its gradient."""
    (name,) = (path for path in (made / "checkpoints").glob("step-00000002-*"))
    model = network()
    model.load_state_dict(ls.load(str(name)))
    columns = [column[torch.tensor(samples)] for column in rows(48).tensors]
    loss = of_the_rows(model, columns)
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return loss.item(), sum(float(each.double().square().sum()) for each in gradients)


def test_a_microbatchs_part_is_its_share_of_the_gradient(made: Path, tmp_path: Path) -> None:
    replay(tmp_path / "again", made, "replicate=1", network, 3)
    for each in read(tmp_path / "again", 1)[1]:
        loss, squares = by_hand(made, each["samples"])
        assert each["total"] == pytest.approx(loss)
        assert sum(each["squares"].values()) == pytest.approx(squares / 4**2)


def test_without_a_checkpoint_it_begins_anew(made: Path, tmp_path: Path) -> None:
    replay(tmp_path / "again", made, "replicate=1", network, 2)
    assert read(tmp_path / "again", 1)[0]["begin"] == 0
    assert row(tmp_path / "again" / "run", 2)[CHECKSUM] == row(made, 2)[CHECKSUM]


def test_layers_in_slices_are_watched(tmp_path: Path) -> None:
    made, again = tmp_path / "made", tmp_path / "again"
    train(str(made), "slices=2", in_slices)
    replay(again, made, "slices=2", in_slices, 4)
    assert row(again / "run", 4)[CHECKSUM] == row(made, 4)[CHECKSUM]


def test_a_damaged_checkpoint_is_passed_over(made: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(made, copy)
    (whole,) = (copy / "checkpoints").glob("step-00000002-*")
    damaged = whole.with_name("step-00000003-0000000a")
    shutil.copytree(whole, damaged)
    tensors = damaged / "rank-0.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-8])
    replay(tmp_path / "again", copy, "replicate=1", network, 4)
    assert read(tmp_path / "again", 1)[0]["begin"] == 2
    assert row(tmp_path / "again" / "run", 4)[CHECKSUM] == row(made, 4)[CHECKSUM]


def test_a_step_without_a_sample_is_that_of_the_others(made: Path, tmp_path: Path) -> None:
    replay(tmp_path / "with", made, "replicate=1", network, 3)
    out = read(tmp_path / "with", 1)[1][1]["samples"][2]
    replay(tmp_path / "out", made, "replicate=1", network, 3, (out,))
    whole, others = read(tmp_path / "out", 1)
    assert [len(each["samples"]) for each in others] == [4, 3, 4, 4]
    taken = [sample for each in others for sample in each["samples"]]
    assert out not in taken
    loss, squares = by_hand(made, taken)
    assert whole["loss"] == pytest.approx(loss)
    assert sum(whole["squares"].values()) == pytest.approx(squares)


def test_samples_that_cannot_be_left_out_are_refused(made: Path, tmp_path: Path) -> None:
    replay(tmp_path / "with", made, "replicate=1", network, 3)
    parts = read(tmp_path / "with", 1)[1]
    with pytest.raises(DataError, match=r"the step does not have the samples \[1000\] that are to"):
        replay(tmp_path / "out", made, "replicate=1", network, 3, (1000, parts[0]["samples"][0]))
    with pytest.raises(DataError, match="every microbatch needs a sample; leave out fewer"):
        replay(tmp_path / "all", made, "replicate=1", network, 3, parts[2]["samples"])
    with pytest.raises(DataError, match="the step does not have the samples"):
        replay(tmp_path / "late", made, "replicate=1", network, 4, (1000,))
    lines = (tmp_path / "late" / "run" / "metrics.jsonl").read_text()
    assert not lines, "step 3 was trained before"


def part(shard: int, epoch: int, start: int) -> Iterator[tuple[Tensor, ...]]:
    return islice(SAMPLES, 12 * shard + start, 12 * shard + 12)


def stream() -> ls.Stream:
    return ls.Stream(part, shards=4)


def of_a_stream(folder: Path) -> str:
    train(f"{folder}/made", "replicate=auto", network, stream())
    with pytest.raises(DataError) as refused:
        replay(folder / "out", folder / "made", "replicate=auto", network, 4, (3,), stream())
    replay(folder / "all", folder / "made", "replicate=auto", network, 4, (), stream())
    return str(refused.value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_of_a_stream_is_made_again_with_all_samples(
    pool: WorkerPool, tmp_path: Path, ranks: int
) -> None:
    for said in pool.run(ranks, of_a_stream, tmp_path):
        assert said.endswith("replay the step with all samples")
    made, again = row(tmp_path / "made", 4), row(tmp_path / "all" / "run", 4)
    assert again[CHECKSUM] == made[CHECKSUM]


def begun_anew(folder: Path, plan: str, given: ls.Recipe) -> None:
    """Make step 2 without a checkpoint."""
    checkpoints = f"{folder}/none"
    request = ReplayRequest(
        folder=folder, step=2, checkpoints=checkpoints, before=2, begins_anew=True
    )
    answer(request, lambda: ls.train(given, plan=plan, run_dir=f"{folder}/run", log_every=1))


def share_out_microbatches(folder: Path, plans: Sequence[str]) -> None:
    for plan in plans:
        begun_anew(folder / plan, plan, test_context_axis.recipe(evaluation=None))


def test_ranks_that_share_out_a_microbatch_make_one_row(pool: WorkerPool, tmp_path: Path) -> None:
    plans = "tensor=2", "context=2", "context=2,numerics=bitwise"
    pool.run(2, share_out_microbatches, tmp_path, plans)
    for plan in plans:
        whole, parts = read(tmp_path / plan, 2)
        found = joined_parts(ReplayedMicrobatch(**each) for each in parts)
        assert [each.microbatch for each in found] == [0, 1, 2]
        assert math.fsum(each.part or 0.0 for each in found) == pytest.approx(whole["loss"])
        assert [each.norm for each in found] == [None] * 3


def test_a_part_of_the_loss_is_without_the_loss_scale(tmp_path: Path) -> None:
    given = recipe(loss=of_the_rows, precision="fp16")
    begun_anew(tmp_path, "replicate=1", given)
    whole, parts = read(tmp_path, 1)
    assert sum(each["part"] for each in parts) == pytest.approx(whole["loss"], rel=1e-3)


def test_a_step_that_is_begun_anew_has_the_microbatch_that_the_run_has_chosen(
    tmp_path: Path,
) -> None:
    made = tmp_path / "made"
    train(str(made), "replicate=1", network)
    request = ReplayRequest(
        folder=tmp_path / "again",
        step=2,
        checkpoints=str(made / "checkpoints"),
        before=2,
        begins_anew=True,
    )
    given = recipe(loss=of_the_rows, steps=STEPS, microbatch="auto")
    answer(request, lambda: ls.train(given, run_dir=str(tmp_path / "run")))
    assert len(read(tmp_path / "again", 1)[1]) == 4


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 3, bias=False), nn.Linear(6, 3, bias=False)
        self.back = nn.Linear(3, 6)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.back(self.first(x)))


def test_a_parameter_that_parts_share_has_the_gradient_of_all_parts(tmp_path: Path) -> None:
    given = recipe(
        model=Tied, loss=of_the_rows, microbatch=16, stages=["first", "back", "last"], steps=3
    )
    begun_anew(tmp_path, "replicate=1,numerics=bitwise", given)
    whole, (part,) = read(tmp_path, 1)
    assert part["squares"] == pytest.approx(whole["squares"])
    request = ReplayRequest(
        folder=tmp_path, step=2, checkpoints="", before=2, begins_anew=True, by_sample=0
    )
    answer(request, lambda: ls.train(given, plan="numerics=bitwise", run_dir=f"{tmp_path}/again"))
    (part,) = read(tmp_path, 1)[1]
    one = recipe(
        model=Tied, loss=of_the_rows, microbatch=1, stages=["first", "back", "last"], steps=3
    )
    begun_anew(tmp_path / "one", "replicate=1,numerics=bitwise", one)
    by_hand = [sum(each["squares"].values()) for each in read(tmp_path / "one", 1)[1]]
    assert part["by_sample"] == pytest.approx(by_hand, rel=1e-4)
