"""What a recipe or a plan leaves to the run: chosen, kept, cached, written down, and the same run
as with those values given by hand."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import random
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributed, nn
from training.kept import Asked, recipe as kept_recipe
from training.subjects import (
    FEATURES,
    OUTPUTS,
    each_of,
    recipe,
    rows,
    same,
    squared_error,
    state_of,
)

import lockstep as ls
from lockstep.autotune import timing
from lockstep.autotune.timing import MicrobatchTiming
from lockstep.base.errors import LockstepError
from lockstep.launch.termination import Preempted
from lockstep.testing.pool import WorkerPool
from lockstep.training import precision as precisions

EVERYTHING = "workers=auto,threads=auto,prefetch=auto"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lockstep" / "measured"


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Dropout(0.5), nn.Linear(16, OUTPUTS))


def with_batchnorm() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Linear(16, OUTPUTS))


class Drawn(ls.Hook):
    """What the default generators give before the first step, and whether a parameter has a
    gradient then."""

    def on_start(self, run: Any) -> None:
        gradients = [parameter.grad is not None for parameter in run.model.parameters()]
        self.found = [random.random(), float(np.random.rand()), float(torch.rand(())), gradients]


def start(
    run_dir: str, plan: str | None, **changes: Any
) -> tuple[ls.Result, dict[str, Any], list[Any]]:
    """The result, run.json, and what was drawn before the first step."""
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    drawn = Drawn()
    result = ls.train(recipe(**changes), run_dir=run_dir, plan=plan, hooks=[drawn])
    return result, json.loads(Path(result.run_dir, "run.json").read_text()), drawn.found


def chosen(result: ls.Result) -> dict[str, Any]:
    """The event's settings."""
    (event,) = [event for event in result.events if event.name == "settings-chosen"]
    settings: dict[str, Any] = event.details["settings"]
    return settings


def values(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: said["value"] for name, said in settings.items()}


def sources(settings: dict[str, Any]) -> dict[str, str]:
    return {name: said["source"] for name, said in settings.items()}


def nothing_is_timed(*_: Any, **__: Any) -> Any:
    raise AssertionError("it was timed")


def on_a_cpu(folder: str) -> None:
    MicrobatchTiming.compute_seconds = MicrobatchTiming.fetched = nothing_is_timed  # type: ignore[method-assign]
    result, written, _ = start(f"{folder}/auto", None, precision="auto")
    assert chosen(result) == {"precision": {"value": "fp32", "source": "rule"}}
    assert (written["recipe"]["precision"], written["recipe"]["microbatch"]) == ("fp32", 4)
    assert written["auto"]["settings"] == chosen(result)
    assert start(f"{folder}/fp32", None)[0].fingerprint == result.fingerprint


def test_on_a_cpu_fp32_is_chosen_without_spending_time(
    pool: WorkerPool, tmp_path: Path, cache: Path
) -> None:
    pool.run(2, on_a_cpu, str(tmp_path))
    assert not cache.exists()


def as_by_hand(folder: str) -> dict[str, Any]:
    auto, written, drawn = start(
        f"{folder}/auto", EVERYTHING, model=with_dropout, precision="auto", microbatch="auto"
    )
    found = values(chosen(auto))
    assert found.keys() == {"precision", "microbatch", "threads", "workers", "prefetch"}
    given = {name: found[name] for name in ("precision", "microbatch")}
    assert {name: written["recipe"][name] for name in given} == given
    assert {name: written["plan"][name] for name in ("threads", "workers", "prefetch")} == {
        name: found[name] for name in ("threads", "workers", "prefetch")
    }
    assert written["environment"]["threads"]["intra_op"] == found["threads"]
    by_hand, again, drawn_by_hand = start(
        f"{folder}/by-hand", auto.plan, model=with_dropout, **given
    )
    assert (by_hand.fingerprint, by_hand.plan, by_hand.loss) == (
        auto.fingerprint,
        auto.plan,
        auto.loss,
    )
    assert drawn == drawn_by_hand
    assert not any(drawn[-1])
    assert {name: written[name] for name in ("recipe", "plan")} == {
        name: again[name] for name in ("recipe", "plan")
    }
    assert "auto" not in again
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_is_the_one_with_the_chosen_values_given_by_hand(
    pool: WorkerPool, tmp_path: Path, world_size: int
) -> None:
    everyone = pool.run(world_size, as_by_hand, str(tmp_path))
    assert everyone == [everyone[0]] * world_size
    assert everyone[0]["microbatch"] in (1, 2, 4, 8, 16)[: 5 if world_size == 1 else 4]


class Looks(ls.Hook):
    """Keeps the model's initial values, how many of the models that were built are still there, and
    the context at each moment."""

    def __init__(self, built: list[weakref.ref[nn.Module]]) -> None:
        self.built = built
        self.contexts: list[Any] = []

    def on_start(self, run: Any) -> None:
        gc.collect()
        self.initial = state_of(run.model)
        self.alive = [model() is run.model for model in self.built if model() is not None]
        self.after_step(run)

    def after_step(self, run: Any) -> None:
        context = run.context
        self.contexts.append(
            (context, context.plan, context.mesh, context.precision, str(context.plan))
        )

    on_finish = after_step


def measured_apart(folder: str) -> None:
    built: list[weakref.ref[nn.Module]] = []

    def factory() -> nn.Module:
        model = with_dropout()
        built.append(weakref.ref(model))
        return model

    auto, plain = Looks(built), Looks([])
    result = ls.train(
        recipe(model=factory, precision="auto", microbatch="auto"),
        run_dir=f"{folder}/auto",
        plan=EVERYTHING,
        hooks=[auto],
    )
    ls.train(recipe(model=with_dropout), run_dir=f"{folder}/plain", hooks=[plain])
    assert same(auto.initial, plain.initial)
    assert (len(built) > 1, auto.alive) == (True, [True])
    for looks in (auto, plain):
        first = looks.contexts[0]
        assert len(looks.contexts) == 4
        assert all(
            one is other
            for found in looks.contexts
            for one, other in zip(found[:4], first, strict=False)
        )
        assert {found[4] for found in looks.contexts} == {str(first[1])}
    assert str(auto.contexts[0][1]) == result.plan
    assert "auto" not in result.plan
    with pytest.raises(dataclasses.FrozenInstanceError):
        auto.contexts[0][0].plan = plain.contexts[0][1]


@pytest.mark.parametrize("world_size", [1, 2])
def test_settings_are_measured_on_a_model_that_is_dropped_before_the_run(
    pool: WorkerPool, tmp_path: Path, world_size: int
) -> None:
    """The trained model begins as it does without `auto`; and nothing of the context changes from
    its start to its end."""
    pool.run(world_size, measured_apart, str(tmp_path))


def with_running_statistics(folder: str) -> None:
    auto, _, _ = start(f"{folder}/auto", EVERYTHING, model=with_batchnorm)
    by_hand, _, _ = start(f"{folder}/by-hand", auto.plan, model=with_batchnorm)
    assert by_hand.fingerprint == auto.fingerprint


def test_running_statistics_are_left_alone(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(1, with_running_statistics, str(tmp_path))


def weighed(model: nn.Module, batch: Sequence[Tensor]) -> ls.Loss:
    """By what only the forward knows."""
    return ls.Loss(((model(batch[1]) - batch[2]) ** 2).sum(), batch[2].numel())


def of_any_kind(folder: str, kind: str) -> None:
    def given(**changes: Any) -> ls.Recipe:
        return (
            recipe(loss=weighed, **changes)
            if kind == "ls.Loss"
            else kept_recipe(evaluation=None, **changes)
        )

    auto = ls.train(given(microbatch="auto"), run_dir=f"{folder}/auto")
    size = values(chosen(auto))["microbatch"]
    assert sources(chosen(auto)) == {"microbatch": "measurement"}
    assert (
        ls.train(given(microbatch=size), run_dir=f"{folder}/by-hand").fingerprint
        == auto.fingerprint
    )


def of_each_kind(folder: str) -> None:
    for kind in ("ls.Loss", "ls.Sum of a GPT with tied weights, in stages"):
        of_any_kind(f"{folder}/{kind}", kind)


def test_losses_of_any_kind_are_timed(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, of_each_kind, str(tmp_path))


def given_numbers(folder: str) -> None:
    before = start(f"{folder}/plain", "workers=1,threads=1,prefetch=3", microbatch=3)
    result, written, _ = start(
        f"{folder}/auto", "workers=auto,threads=1,prefetch=3", microbatch=3, precision="auto"
    )
    assert chosen(result).keys() == {"precision", "workers"}
    assert written["recipe"] == before[1]["recipe"]
    assert (written["plan"]["threads"], written["plan"]["prefetch"]) == (1, 3)
    assert result.fingerprint == before[0].fingerprint


def test_a_number_that_is_given_is_never_changed(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(1, given_numbers, str(tmp_path))


def again(folder: str) -> None:
    first, written, _ = start(f"{folder}/first", EVERYTHING, microbatch="auto")
    assert set(sources(chosen(first)).values()) <= {"measurement", "rule"}
    timed, fetched = MicrobatchTiming.compute_seconds, MicrobatchTiming.fetch_seconds
    MicrobatchTiming.compute_seconds = MicrobatchTiming.fetch_seconds = nothing_is_timed  # type: ignore[method-assign]
    second, rewritten, _ = start(f"{folder}/second", EVERYTHING, microbatch="auto")
    assert values(chosen(second)) == values(chosen(first))
    assert sources(chosen(second))["microbatch"] == "cache"
    assert rewritten["auto"]["seconds"] == written["auto"]["seconds"]
    assert second.fingerprint == first.fingerprint
    MicrobatchTiming.compute_seconds, MicrobatchTiming.fetch_seconds = timed, fetched  # type: ignore[method-assign]
    for number, other in enumerate(
        ({"model": with_dropout}, {"global_batch": 15}, {"data": TensorsOfTwo()})
    ):
        assert (
            sources(chosen(start(f"{folder}/{number}", EVERYTHING, microbatch="auto", **other)[0]))[
                "microbatch"
            ]
            == "measurement"
        )


class TensorsOfTwo:
    """Batches of float64 targets."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        _, features, targets = rows(48)[index]
        return index, features, targets.double()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_second_start_reads_what_the_first_measured(
    pool: WorkerPool, tmp_path: Path, cache: Path, world_size: int
) -> None:
    pool.run(world_size, again, str(tmp_path))
    assert len(list(cache.iterdir())) == 4


def damaged(folder: str, cache: str) -> None:
    start(f"{folder}/first", None, microbatch="auto")
    (file,) = Path(cache).iterdir()
    whole = json.loads(file.read_text())
    for number, text in enumerate(
        (
            "{",
            json.dumps({**whole, "chosen": {"microbatch": 3}}),
            json.dumps({**whole, "chosen": {}}),
        )
    ):
        file.write_text(text)
        result, _, _ = start(f"{folder}/{number}", None, microbatch="auto")
        (ignored,) = [event.details for event in result.events if event.name == "cache-ignored"]
        assert ignored == {"path": str(file), "reason": "its content is damaged"}
        assert sources(chosen(result)) == {"microbatch": "measurement"}
        assert json.loads(file.read_text())["chosen"] == values(chosen(result))


def test_a_damaged_cache_is_reported_and_measured_again(
    pool: WorkerPool, tmp_path: Path, cache: Path
) -> None:
    pool.run(1, damaged, str(tmp_path), str(cache))


def without_a_cache(folder: str) -> None:
    result, _, _ = start(f"{folder}/run", None, microbatch="auto")
    assert sources(chosen(result)) == {"microbatch": "measurement"}
    assert [event.name for event in result.events if event.name.startswith("cache")] == [
        "cache-ignored",
        "cache-not-written",
    ]


def test_an_unusable_cache_does_not_end_the_run(
    pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    pool.run(1, without_a_cache, str(tmp_path))


def asked_to_end(folder: str) -> tuple[str, dict[str, Any]]:
    try:
        ls.train(
            recipe(microbatch="auto", precision="auto", steps=6),
            run_dir=folder,
            hooks=[Asked(2)],
            log_every=1,
        )
    except Preempted:
        return "preempted", json.loads(Path(folder, "run.json").read_text())["recipe"]
    raise AssertionError("it was not asked to end")


def go_on(folder: str, plan: str) -> tuple[int, dict[str, str]]:
    MicrobatchTiming.compute_seconds = MicrobatchTiming.fetched = nothing_is_timed  # type: ignore[method-assign]
    result = ls.train(
        recipe(microbatch="auto", precision="auto", steps=6), run_dir=folder, plan=plan
    )
    written = json.loads(Path(folder, "run.json").read_text())
    return written["recipe"]["microbatch"], sources(chosen(result))


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2", "replicate=1,numerics=bitwise"])
def test_a_run_keeps_its_microbatch_under_any_plan(
    pool: WorkerPool, tmp_path: Path, plan: str
) -> None:
    ((ended, frozen),) = pool.run(1, asked_to_end, str(tmp_path / "run"))
    assert ended == "preempted"
    size = 1 if plan.startswith("replicate=1") else 2
    (microbatch, kept), *_ = pool.run(size, go_on, str(tmp_path / "run"), plan)
    assert microbatch == frozen["microbatch"]
    assert kept == {"precision": "checkpoint", "microbatch": "checkpoint"}


def choose_again(folder: str) -> tuple[int, dict[str, str]]:
    MicrobatchTiming.compute_seconds = lambda self, *, microbatch, **_: (
        1.0 if microbatch == 2 else 100.0
    )  # type: ignore[method-assign, assignment]
    result = ls.train(
        recipe(microbatch="auto", precision="auto", steps=6),
        run_dir=folder,
        plan="workers=1",
        allow_change=["microbatch"],
    )
    return values(chosen(result))["microbatch"], sources(chosen(result))


def test_a_microbatch_that_allow_change_is_chosen_again(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(1, asked_to_end, str(tmp_path / "run"))
    assert pool.run(1, choose_again, str(tmp_path / "run")) == [
        (2, {"precision": "checkpoint", "microbatch": "measurement"})
    ]


def change_it(folder: str, microbatch: int) -> str:
    try:
        ls.train(recipe(microbatch=microbatch, precision="auto", steps=6), run_dir=folder)
    except LockstepError as error:
        return str(error)
    raise AssertionError("it went on")


def test_another_number_than_the_run_chose_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    ((_, frozen),) = pool.run(1, asked_to_end, str(tmp_path / "run"))
    (text,) = pool.run(1, change_it, str(tmp_path / "run"), 3)
    assert f"microbatch: {frozen['microbatch']}, now 3" in text


def no_time(folder: str) -> None:
    timing.SECONDS = 0.0
    result, written, _ = start(f"{folder}/run", None, microbatch="auto")
    assert values(chosen(result)) == {"microbatch": 8}
    assert list(written["auto"]["seconds"]["microbatch"]) == ["8"]


def test_after_the_time_limit_the_choice_is_among_the_candidates_timed_so_far(
    pool: WorkerPool, tmp_path: Path
) -> None:
    pool.run(1, no_time, str(tmp_path))


def runs_out(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """There is room for four samples, on the last rank."""
    if len(batch[1]) > 4 and distributed.get_rank() == distributed.get_world_size() - 1:
        raise torch.OutOfMemoryError("there is no room")
    return squared_error(model, batch)


def out_of_memory(folder: str) -> int:
    result, written, _ = start(
        f"{folder}/run", None, microbatch="auto", loss=runs_out, global_batch=64, data=rows(64)
    )
    seconds = written["auto"]["seconds"]["microbatch"]
    assert (seconds["8"], seconds.keys()) == (None, {"8", "1", "2", "4"})
    found: int = values(chosen(result))["microbatch"]
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_microbatch_that_runs_out_of_memory_on_a_rank_is_not_chosen(
    pool: WorkerPool, tmp_path: Path, world_size: int
) -> None:
    found = pool.run(world_size, out_of_memory, str(tmp_path))
    assert found[0] in (1, 2, 4)
    assert found == [found[0]] * world_size


class Slow(TensorsOfTwo):
    """Each sample takes a while to fetch."""

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        time.sleep(0.005)
        return rows(48)[index]


def loading(folder: str) -> None:
    MicrobatchTiming.compute_seconds = lambda self, **_: 0.001  # type: ignore[method-assign]
    slow, _, _ = start(f"{folder}/slow", "workers=auto", data=Slow())
    assert values(chosen(slow))["workers"] == len(os.sched_getaffinity(0))
    plain, _, _ = start(f"{folder}/plain", None, data=Slow())
    assert plain.fingerprint == slow.fingerprint
    MicrobatchTiming.compute_seconds = lambda self, **_: 10.0  # type: ignore[method-assign]
    cheap, _, _ = start(f"{folder}/cheap", "workers=auto,prefetch=auto", data=rows(47))
    assert values(chosen(cheap)) == {"workers": 0, "prefetch": 2}


def test_loader_workers_are_for_data_that_are_slow_to_fetch(
    pool: WorkerPool, tmp_path: Path
) -> None:
    pool.run(1, loading, str(tmp_path))


def two_precisions(folder: str, seconds: dict[str, float]) -> str:
    precisions.candidates = lambda device: ["fp32", "bf16"]
    MicrobatchTiming.compute_seconds = lambda self, *, precision, **_: seconds[precision]  # type: ignore[method-assign, assignment]
    auto, written, _ = start(f"{folder}/auto", None, precision="auto")
    assert written["auto"]["seconds"] == {"precision": seconds}
    by_hand = {
        each: start(f"{folder}/{each}", None, precision=each)[0].fingerprint
        for each in ("fp32", "bf16")
    }
    assert len(set(by_hand.values())) == 2
    found: str = values(chosen(auto))["precision"]
    assert auto.fingerprint == by_hand[found]
    return found


@pytest.mark.parametrize(("bf16_seconds", "precision"), [(0.95, "fp32"), (0.5, "bf16")])
def test_a_shorter_precision_must_be_worth_it(
    pool: WorkerPool, tmp_path: Path, bf16_seconds: float, precision: str
) -> None:
    assert pool.run(1, two_precisions, str(tmp_path), {"fp32": 1.0, "bf16": bf16_seconds}) == [
        precision
    ]


def streamed(shard: int, epoch: int, begin: int) -> Any:
    _, features, targets = rows(64).tensors
    for sample in range(begin, 64):
        yield sample, features[sample], targets[sample]


def of_a_stream(folder: str) -> None:
    data = ls.Stream(streamed, shards=4)
    auto, _, _ = start(f"{folder}/auto", EVERYTHING, data=data)
    by_hand, _, _ = start(f"{folder}/by-hand", auto.plan, data=data)
    assert by_hand.fingerprint == auto.fingerprint


def test_a_stream_is_read_from_its_beginning_after_it_was_timed(
    pool: WorkerPool, tmp_path: Path
) -> None:
    pool.run(2, of_a_stream, str(tmp_path))


def of_four_only(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    if len(batch[1]) != 4:
        raise ValueError("four of them")
    return squared_error(model, batch)


def of_sizes(run_dir: str) -> list[str]:
    with pytest.raises(ValueError, match="four of them") as caught:
        ls.train(recipe(microbatch="auto", loss=of_four_only), run_dir=run_dir)
    return caught.value.__notes__


def test_a_loss_that_takes_one_size_only_is_told_that_others_are_timed(
    pool: WorkerPool, tmp_path: Path
) -> None:
    for notes in pool.run(1, of_sizes, str(tmp_path / "run")):
        assert (
            "raised in a timing of 8 samples at once, for microbatch='auto'; give a number" in notes
        )


def refused(run_dir: str, plan: str | None, changes: dict[str, Any]) -> None:
    ls.train(recipe(**changes), run_dir=run_dir, plan=plan)


REFUSED: dict[str, tuple[str | None, dict[str, Any], str]] = {
    "bitwise": (
        "numerics=bitwise",
        {"microbatch": "auto"},
        "RecipeError: numerics=bitwise with microbatch='auto'; another machine or number of"
        " processes may choose another microbatch; give",
    ),
    "BatchNorm": (
        None,
        {"microbatch": "auto", "model": with_batchnorm},
        "RecipeError: microbatch='auto' with BatchNorm ('1'); it takes its statistics over one"
        " microbatch, so the size changes what is",
    ),
    "a stream": (
        None,
        {"microbatch": "auto", "data": ls.Stream(streamed, shards=4)},
        "RecipeError: microbatch=auto with an ls.Stream; each microbatch reads from its own shards",
    ),
    "a model that is cut": (
        "shard=2,workers=auto",
        {"microbatch": "auto"},
        "PlanError: microbatch=auto with shard=2; it can be measured only if each process holds"
        " the whole model (replicate); give",
    ),
    "threads that change bits": (
        "numerics=bitwise,threads=2",
        {},
        "PlanError: threads=2 with numerics=bitwise; on a CPU the number of threads changes"
        " bits, so it is 1; leave threads out",
    ),
    "a word": (
        None,
        {"microbatch": "some"},
        "RecipeError: Recipe.microbatch='some'; give a number of samples, 'auto' to have it"
        " measured",
    ),
}


IN_WORDS = ("a stream", "a word")
"""What the recipe itself refuses."""


def refused_each(run_dir: str) -> list[Any]:
    return each_of(
        refused,
        run_dir,
        [row[:2] for name, row in REFUSED.items() if name not in IN_WORDS],
    )


def test_settings_that_cannot_be_measured_are_refused(pool: WorkerPool, tmp_path: Path) -> None:
    messages = [row[2] for name, row in REFUSED.items() if name not in IN_WORDS]
    for everyone in pool.run(2, refused_each, str(tmp_path / "run")):
        for message, said in zip(messages, everyone, strict=True):
            assert said.startswith(message), said
    for name in IN_WORDS:
        _, changes, message = REFUSED[name]
        with pytest.raises(LockstepError) as caught:
            recipe(**changes)
        assert f"{type(caught.value).__name__}: {caught.value}".startswith(message), name


def of_ones_own(run_dir: str, plan: str, microbatch: Any) -> None:
    given = recipe()
    with ls.Session(run_dir=run_dir, plan=plan) as session:
        session.prepare(given.model, given.optimizer)
        session.steps(given.data, global_batch=16, microbatch=microbatch, steps=2)


def test_a_custom_loop_cannot_measure(tmp_path: Path) -> None:
    only = "in your own loop; only ls.train has a loss to measure with; give a number"
    one, other = each_of(of_ones_own, str(tmp_path), [("workers=auto", 4), ("", "auto")])
    assert one.startswith(f"PlanError: workers=auto {only}: workers=2")
    assert other.startswith(f"RecipeError: microbatch='auto' {only} of")
    with pytest.raises(LockstepError) as caught:
        ls.Session(precision="auto")  # type: ignore[arg-type]
    assert "precision='auto' in your own loop" in str(caught.value)


def pinned(folder: str) -> None:
    result, _, _ = start(f"{folder}/run", "numerics=bitwise,threads=auto")
    assert chosen(result) == {"threads": {"value": 1, "source": "rule"}}
    assert start(f"{folder}/plain", "numerics=bitwise")[0].fingerprint == result.fingerprint


def test_bitwise_numerics_keep_one_thread(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(1, pinned, str(tmp_path))
