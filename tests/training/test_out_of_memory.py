"""A run that ran out of memory resumes under a plan that needs less of it, and results in the same
model."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import run_files
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from training.kept import recipe as gpt, run as undisturbed
from training.scarce import run
from training.subjects import network, recipe, rows, sgd, squared_error

import lockstep as ls
from lockstep.base.errors import PlanError, RecipeError, RunDirectoryError
from lockstep.hooks.out_of_memory import FILE
from lockstep.launch.failures import out_of_memory
from lockstep.testing.pool import WorkerPool

AT = 3
RESUMES = (
    "lockstep: the run in {} resumes after step 3 with {} if the same command is given again with"
    " that run directory"
)


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    found = run_files.events(run_dir)
    return [
        {key: value for key, value in row.items() if key not in ("time", "event")}
        for row in found
        if row["event"] == name
    ]


def fired(run_dir: Path) -> int:
    """How often memory ran out."""
    return len(list(run_dir.parent.glob("fired-*")))


def injected(
    plan: str, run_dir: Path, *, enough: str, setting: str = "retry", given: Any = None
) -> tuple[str, Any]:
    return run(plan, str(run_dir), AT, enough, setting, given or {})


@pytest.mark.parametrize("numerics", ["fast", "bitwise"])
def test_with_checkpointing_it_resumes_with_the_same_bits(tmp_path: Path, numerics: str) -> None:
    plan, run_dir = f"replicate=1,numerics={numerics}", tmp_path / "run"
    assert injected(plan, run_dir, enough="with checkpointing") == (
        "OutOfMemoryError",
        [RESUMES.format(run_dir, "checkpointing=full")],
    )
    assert fired(run_dir) == 1
    _, fingerprint = undisturbed(plan, str(tmp_path / "undisturbed"), None, {})
    assert injected(plan, run_dir, enough="with checkpointing") == (
        "ended",
        [fingerprint, f"{plan},checkpointing=full"],
    )
    assert fired(run_dir) == 1
    assert events(run_dir, "out-of-memory") == [{"step": AT, "then": "checkpointing=full"}]
    assert events(run_dir, "plan-changed") == [
        {
            "step": AT,
            "reason": (
                "memory ran out after step 3 on rank 0: OutOfMemoryError: injected: tried to"
                " allocate 2.00 GiB"
            ),
            "change": "checkpointing=full",
            "given": plan,
            "plan": f"{plan},checkpointing=full",
        }
    ]
    assert [row["step"] for row in events(run_dir, "resumed")] == [AT]
    assert json.loads((run_dir / "run.json").read_text())["plan"]["checkpointing"] == "full"


def test_in_bitwise_numerics_it_stops_before_bits_change_unless_that_is_allowed(
    tmp_path: Path,
) -> None:
    plan, run_dir = "replicate=1,numerics=bitwise", tmp_path / "run"
    assert injected(plan, run_dir, enough="with 2 samples")[0] == "OutOfMemoryError"
    written = (run_dir / FILE).read_text()
    kind, (note,) = injected(plan, run_dir, enough="with 2 samples")
    assert (kind, fired(run_dir)) == ("OutOfMemoryError", 2)
    assert "lockstep: memory ran out with checkpointing=full; the only fallback left" in note
    assert "allow it with --out-of-memory halve" in note
    assert events(run_dir, "out-of-memory")[1]["why_not"] in note
    assert (run_dir / FILE).read_text() == written
    kind, (note,) = injected(plan, run_dir, enough="with 2 samples", setting="halve")
    assert (kind, fired(run_dir)) == ("OutOfMemoryError", 3)
    assert note == RESUMES.format(run_dir, "microbatch_splits=1")
    kind, (_, ended_under) = injected(plan, run_dir, enough="with 2 samples")
    assert (kind, ended_under, fired(run_dir)) == (
        "ended",
        f"{plan},checkpointing=full,microbatch_splits=1",
        3,
    )
    assert "other dropout masks" in events(run_dir, "plan-changed")[-1]["note"]


def test_it_splits_down_to_single_samples_and_then_names_the_fallbacks(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    ends = [injected("replicate=1", run_dir, enough="never") for _ in range(5)]
    assert fired(run_dir) == 5
    assert [kind for kind, _ in ends] == ["OutOfMemoryError"] * 5
    tried = json.loads((run_dir / FILE).read_text())["failures"]
    assert [(each["step"], each["then"]) for each in tried] == [
        (3, "checkpointing=full"),
        (3, "microbatch_splits=1"),
        (3, "microbatch_splits=2"),
    ]
    assert ends[3] == ends[4]
    assert ends[4][1][0].startswith(
        "lockstep: memory ran out with checkpointing=full,microbatch_splits=2; microbatches have"
        " one sample each"
    )


@pytest.mark.parametrize("setting", ["stop", "same-bits"])
def test_a_setting_limits_the_fallbacks(tmp_path: Path, setting: str) -> None:
    run_dir = tmp_path / "run"
    kind, (note,) = injected(
        "replicate=1,checkpointing=full", run_dir, enough="never", setting=setting
    )
    assert (kind, fired(run_dir)) == ("OutOfMemoryError", 1)
    assert f"--out-of-memory {setting}" in note
    assert not (run_dir / FILE).exists()


def test_the_setting_is_one_of_four_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_OUT_OF_MEMORY", "try")
    with pytest.raises(
        PlanError,
        match="LOCKSTEP_OUT_OF_MEMORY='try'; it must be one of retry, halve, same-bits, stop",
    ):
        ls.train(recipe(), run_dir=str(tmp_path / "run"))


def test_a_plan_that_already_has_the_fallbacks_is_not_changed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert injected("replicate=1", run_dir, enough="with checkpointing")[0] == "OutOfMemoryError"
    given = "replicate=1,numerics=fast,checkpointing=full,transport=torch"
    kind, (_, plan) = injected(given, run_dir, enough="with checkpointing")
    assert (kind, plan, fired(run_dir)) == ("ended", given, 1)
    assert events(run_dir, "plan-changed") == []


def test_an_ended_run_and_one_that_is_not_gone_on_with_are_refused_as_ever(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert injected("replicate=1", run_dir, enough="with checkpointing")[0] == "OutOfMemoryError"
    with pytest.raises(RunDirectoryError, match="already holds a run"):
        ls.train(gpt(), run_dir=str(run_dir), resume="never")
    assert injected("replicate=1", run_dir, enough="with checkpointing")[0] == "ended"
    with pytest.raises(RunDirectoryError, match="already holds a run that has ended"):
        ls.train(gpt(), run_dir=str(run_dir))


def test_what_another_run_left_behind_is_not_read(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("{")
    assert ls.train(recipe(), run_dir=str(tmp_path)).plan == "replicate=1,numerics=fast"


def test_what_is_damaged_is_named(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert injected("replicate=1", run_dir, enough="with checkpointing")[0] == "OutOfMemoryError"
    (run_dir / FILE).write_text("{")
    assert injected("replicate=1", run_dir, enough="with checkpointing") == (
        "RunDirectoryError",
        [],
    )
    assert fired(run_dir) == 1


def test_where_nothing_can_be_written_down_the_error_says_so(tmp_path: Path) -> None:
    def build() -> nn.Module:
        (tmp_path / "run" / FILE).mkdir()
        return network()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        raise MemoryError

    with pytest.raises(MemoryError) as caught:
        ls.train(recipe(model=build, loss=loss), run_dir=str(tmp_path / "run"))
    assert caught.value.__notes__[0].startswith(
        "lockstep: memory ran out; the change of the plan could not be written: "
    )
    assert (
        sorted(path.name for path in (tmp_path / "run").iterdir() if path.name.startswith("."))
        == []
    )


def test_in_the_first_step_there_is_nothing_to_go_on_from_and_it_begins_anew(
    tmp_path: Path,
) -> None:
    given, run_dir = {"steps": 2}, tmp_path / "run"
    kind, (note,) = run("replicate=1", str(run_dir), 0, "with checkpointing", "retry", given)
    assert (kind, fired(run_dir)) == ("OutOfMemoryError", 1)
    assert f"the run in {run_dir} starts again with checkpointing=full" in note
    _, fingerprint = undisturbed("replicate=1", str(tmp_path / "undisturbed"), None, given)
    assert (
        run("replicate=1", str(run_dir), 0, "with checkpointing", "retry", given)[1][0]
        == fingerprint
    )


def test_after_a_commit_the_state_is_no_whole_step_and_it_goes_on_from_the_last_checkpoint(
    tmp_path: Path,
) -> None:
    class Full(ls.Hook):
        def after_step(self, run: Any) -> None:
            if run.step == 2 and run.context.plan.checkpointing == "none":
                raise MemoryError

    arguments: dict[str, Any] = {"hooks": [Full()], "run_dir": str(tmp_path / "run")}
    with pytest.raises(MemoryError) as caught:
        ls.train(recipe(steps=3), **arguments)
    assert (
        "resumes from its last checkpoint, or starts again, with checkpointing=full if"
        in caught.value.__notes__[0]
    )
    assert ls.train(recipe(steps=3), **arguments).plan.endswith("checkpointing=full")


def test_a_model_that_there_is_no_room_for_is_none_that_less_activations_help(
    tmp_path: Path,
) -> None:
    def build() -> nn.Module:
        torch.empty(2**50, dtype=torch.uint8)
        return network()

    with pytest.raises(RuntimeError) as caught:
        ls.train(recipe(model=build), run_dir=str(tmp_path / "run"))
    assert out_of_memory(caught.value)
    assert caught.value.__notes__ == [
        "lockstep: memory ran out; no step had begun, so the model itself is too large; shard it"
        " over more processes (shard, tensor, pipeline)"
    ]
    assert not (tmp_path / "run" / FILE).exists()


def test_another_error_leaves_the_plan_as_it_is(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom") as caught:
        ls.train(recipe(loss=loss), run_dir=str(tmp_path / "run"))
    assert not hasattr(caught.value, "__notes__")
    assert not (tmp_path / "run" / FILE).exists()


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def test_with_batchnorm_no_microbatch_is_halved(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError) as caught:
        ls.train(
            recipe(model=normed, loss=loss),
            plan="checkpointing=full",
            run_dir=str(tmp_path / "run"),
        )
    assert (
        "split each microbatch, and BatchNorm ('1') takes its statistics over one microbatch"
        in caught.value.__notes__[0]
    )
    assert not (tmp_path / "run" / FILE).exists()


@pytest.mark.parametrize(
    "convert", [nn.Module, nn.SyncBatchNorm.convert_sync_batchnorm], ids=["plain", "sync"]
)
def test_a_plan_with_halves_is_refused_for_batchnorm(tmp_path: Path, convert: Any) -> None:
    def build() -> nn.Module:
        return normed() if convert is nn.Module else convert(normed())

    with pytest.raises(
        RecipeError,
        match=(
            r"microbatch_splits=1, and BatchNorm \('1'\) takes its statistics over one microbatch"
        ),
    ):
        ls.train(recipe(model=build), plan="microbatch_splits=1", run_dir=str(tmp_path / "run"))


def test_nor_is_one_of_a_stream(tmp_path: Path) -> None:
    data = ls.Stream(
        lambda shard, epoch, start: islice(rows(12, seed=shard), start, None), shards=4
    )
    with pytest.raises(
        RecipeError,
        match=(
            r"microbatch_splits=1, and an ls.Stream reads each microbatch from a shard of its own"
        ),
    ):
        ls.train(recipe(data=data), plan="microbatch_splits=1", run_dir=str(tmp_path / "run"))


def weighted(model: nn.Module, batch: Any) -> ls.Loss:
    each = ((model(batch[1]) - batch[2]) ** 2).mean(1)
    weight = 1 + batch[0] % 5
    return ls.Loss((each * weight).sum(), weight.sum())


def scored(output: Tensor, batch: Any) -> ls.Sum:
    return ls.Sum((((output - batch[2]) ** 2).mean(1) * (1 + batch[0] % 5)).sum())


LOSSES: dict[str, dict[str, Any]] = {
    "a mean": {"loss": squared_error},
    "a weight that the forward knows": {"loss": weighted},
    "a weight that the batch has": {
        "inputs": lambda batch: batch[1],
        "loss": scored,
        "weight": lambda batch: (1 + batch[0] % 5).sum(),
    },
}


def in_double(name: str, plan: str, run_dir: str, microbatch: int | None) -> float:
    """One step of gradient descent in float64. Returns the evaluation's loss after it."""
    data = TensorDataset(
        *(each.double() if each.is_floating_point() else each for each in rows(48).tensors)
    )
    evaluation = ls.Evaluation(data=data, every=1, microbatch=7)
    given: dict[str, Any] = {
        "data": data,
        "optimizer": sgd,
        "steps": 1,
        "global_batch": 23,
        "microbatch": microbatch,
        "evaluation": evaluation,
    }
    given |= {
        "model": lambda: network().double(),
        "tensor": {"0": "colwise", "2": "rowwise"},
        **LOSSES[name],
    }
    result = ls.train(recipe(**given), plan=plan, run_dir=run_dir)
    return result.metrics["loss"]


ALONE: list[tuple[str, str, int | None, int]] = [
    ("replicate=1", name, microbatch, splits)
    for name in LOSSES
    for microbatch, splits in ((5, 2), (None, 3))
]
ON_TWO: list[tuple[str, str, int | None, int]] = [
    *(
        (plan, "a weight that the batch has", 5, 1)
        for plan in ("replicate=2", "shard=2", "pipeline=2", "tensor=2")
    ),
    ("replicate=2", "a mean", None, 1),
    ("replicate=2", "a weight that the forward knows", 5, 2),
]
"""Plans, losses, samples of a microbatch, and how often it is halved."""


def whole_and_halves(run_dir: str, cases: list[Any]) -> list[list[float]]:
    return [
        [
            in_double(
                name, f"{plan},microbatch_splits={splits}", f"{run_dir}/{place}-{splits}", size
            )
            for splits in (0, most)
        ]
        for place, (plan, name, size, most) in enumerate(cases)
    ]


@pytest.mark.parametrize("cases", [ALONE, ON_TWO], ids=["1", "2"])
def test_halves_have_the_gradient_of_the_whole(
    pool: WorkerPool, tmp_path: Path, cases: list[Any]
) -> None:
    """With microbatches of 5, 5, 5, 5 and 3 samples of unlike weight, a mean of means is
    another."""
    losses = (
        whole_and_halves(str(tmp_path), cases)
        if cases is ALONE
        else pool.run(2, whole_and_halves, str(tmp_path), cases)[0]
    )
    for place, (case, (loss, of_halves)) in enumerate(zip(cases, losses, strict=True)):
        assert of_halves == pytest.approx(loss, rel=1e-12), case
        folders = [tmp_path / f"{place}-{splits}" for splits in (0, case[3])]
        whole, halves = (load_file(folder / "model.safetensors") for folder in folders)
        torch.testing.assert_close(halves, whole, rtol=1e-12, atol=1e-12)
        plan = json.loads((folders[1] / "run.json").read_text())["plan"]
        assert plan["microbatch_splits"] == case[3], case


def test_evaluations_are_halved_too(tmp_path: Path) -> None:
    seen: dict[bool, list[int]] = {True: [], False: []}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen[torch.is_grad_enabled()].append(len(batch[0]))
        return squared_error(model, batch)

    evaluation = ls.Evaluation(data=rows(16), every=1, microbatch=8)
    ls.train(
        recipe(loss=loss, evaluation=evaluation, steps=1),
        plan="microbatch_splits=1",
        run_dir=str(tmp_path / "run"),
    )
    # the first microbatch of the run: twice in training mode, three times, in halves, a half again
    tried = [2, 2, 2, 2, 2, 1, 1, 1, 2]
    assert seen == {True: [2] * 8, False: [*tried, *[4] * 4]}
