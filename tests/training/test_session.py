"""Session: the lower level, for loops with several models or without data."""

from __future__ import annotations

import inspect
import math
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import run_files
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import softplus
from training.subjects import (
    FEATURES,
    adamw,
    each_of,
    network,
    recipe,
    rows,
    same,
    sgd,
    squared_error,
    state_of,
)

import lockstep as ls
from lockstep.base.errors import (
    CheckpointError,
    LockstepError,
    LossError,
    RecipeError,
    RunDirectoryError,
)
from lockstep.base.events import EventLog
from lockstep.testing.pool import WorkerPool

NOISE = 4


def generator() -> nn.Module:
    return nn.Sequential(
        nn.Linear(NOISE, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6)
    )


def critic() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)
    )


def train_gan(run_dir: str, numerics: str) -> dict[str, Any]:
    """Each loss reaches both models."""
    strays = []
    with ls.Session(run_dir=run_dir, plan=f"numerics={numerics}", seed=3, log_every=1) as session:
        made, made_optimizer = session.prepare(generator, sgd)
        judge, judge_optimizer = session.prepare(critic, sgd)
        first = state_of(made), state_of(judge)
        for step in session.steps(rows(40), global_batch=14, microbatch=4, steps=3):
            for batch in step.microbatches():
                fake = made(torch.randn(len(batch[0]), NOISE))
                step.backward(
                    (softplus(judge(fake)) + softplus(-judge(batch[1]))).mean(), judge_optimizer
                )
            strays += [p.grad for p in made.parameters()] if step.index == 0 else []
            step.commit(judge_optimizer)
            before = [None if p.grad is None else p.grad.clone() for p in judge.parameters()]
            for batch in step.microbatches():
                fake = made(torch.randn(len(batch[0]), NOISE))
                step.backward(softplus(-judge(fake)).mean(), made_optimizer)
            step.commit(made_optimizer, clip_norm=1.0)
            assert same([p.grad for p in judge.parameters()], before)
            step.log(
                {
                    "of the generator": step.committed[0].loss(),
                    "of the critic": step.committed[1].loss(),
                }
            )
    assert strays == [None] * len(strays)
    return {"first": first, "last": (state_of(made), state_of(judge))}


def train_gans(run_dir: str) -> list[dict[str, Any]]:
    return each_of(train_gan, run_dir, [("fast",), ("bitwise",)])


def test_two_models_whose_losses_reach_both_train_alike_at_any_world_size(
    pool: WorkerPool, tmp_path: Path
) -> None:
    alone = train_gans(str(tmp_path / "1"))
    ranks = pool.run(3, train_gans, str(tmp_path / "3"))
    for place, numerics in enumerate(("fast", "bitwise")):
        expected = alone[place]
        for first, last in zip(expected["first"], expected["last"], strict=True):
            weights = [part for part in first if part.endswith("weight")]
            assert not any(same(first[part], last[part]) for part in weights)
        for result in (expected, *(rank[place] for rank in ranks)):
            assert same(result["first"], expected["first"]), numerics
            assert same(
                result["last"], (expected if result is expected else ranks[0][place])["last"]
            )
            if numerics == "bitwise":
                assert same(result["last"], expected["last"])
            for one, other in zip(result["last"], expected["last"], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert int(expected["last"][0]["1.num_batches_tracked"]) == 3 * 4 * 2
        assert int(expected["last"][1]["1.num_batches_tracked"]) == 3 * 4 * 3
    lines = run_files.metrics(tmp_path / "3" / "0")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["of the generator"] == line["loss"] != line["of the critic"] for line in lines)


def full_states(run_dir: str) -> list[dict[str, torch.Tensor]]:
    """Of two models, before and after a step of the second."""
    with ls.Session(run_dir=run_dir, plan="numerics=bitwise", seed=3) as session:
        _model, optimizer = session.prepare(network, sgd)
        other, its_optimizer = session.prepare(critic, sgd)
        found = [session.full_state_dict(), session.full_state_dict(other)]
        for step in session.steps(rows(12), global_batch=8, microbatch=4, steps=1):
            for batch in step.microbatches():
                step.backward(other(batch[1]).square().mean(), its_optimizer)
            step.commit(its_optimizer)
            step.skip(optimizer)
        return [*found, session.full_state_dict(), session.full_state_dict(other)]


def test_a_full_state_dict_is_a_copy_alike_under_every_plan(
    pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = full_states(str(tmp_path / "alone"))
    assert same(alone[0], alone[2])
    assert not same(alone[1]["0.weight"], alone[3]["0.weight"]), (
        "a copy, which training does not change"
    )
    monkeypatch.setenv("LOCKSTEP_PLAN", "shard=2,numerics=bitwise")
    for sharded in pool.run(2, full_states, str(tmp_path / "shard")):
        assert all(same(one, other) for one, other in zip(sharded, alone, strict=True))
        assert not any(
            isinstance(tensor, DTensor) for state in sharded for tensor in state.values()
        )


def draw_in_two_passes(run_dir: str) -> list[float]:
    drawn = []
    with ls.Session(run_dir=run_dir) as session:
        models = [session.prepare(network, sgd) for _ in range(2)]
        for step in session.steps(rows(12), global_batch=12, microbatch=4, steps=2):
            for model, optimizer in models:
                for batch in step.microbatches():
                    drawn.append(float(torch.rand((), dtype=torch.float64)))
                    step.backward(squared_error(model, batch), optimizer)
                step.commit(optimizer)
    return drawn


def test_each_microbatch_of_each_step_and_pass_has_random_numbers_of_its_own(
    pool: WorkerPool, tmp_path: Path
) -> None:
    alone = sorted(draw_in_two_passes(str(tmp_path / "1")))
    found = pool.run(2, draw_in_two_passes, str(tmp_path / "2"))
    assert sorted(number for drawn in found for number in drawn) == alone
    assert len(set(alone)) == 2 * 2 * 3


def train_without_data(run_dir: str) -> dict[str, Any]:
    """A microbatch is a range of fixed indices; each index has its own value, as an environment has
    its own state."""
    dealt, means, draws = [], [], []
    with ls.Session(run_dir=run_dir, plan="numerics=bitwise", log_every=1) as session:
        model, optimizer = session.prepare(network, adamw)
        for step in session.steps(None, global_batch=10, microbatch=3, steps=2):
            values = []
            for batch in step.microbatches():
                dealt.append((step.index, batch))
                draws.append((step.index, batch.start, float(torch.rand(()))))
                features = torch.tensor([[float(index)] * FEATURES for index in batch])
                step.backward(
                    (
                        model(features).mean(1)
                        * torch.tensor([1.0 / (1 + index) for index in batch])
                    ).mean()
                )
                values += [float(index) for index in batch]
            step.commit(optimizer)
            means.append(session.mean(torch.tensor(values)))
            step.log({"return": means[-1], "rank": session.rank})
        empty = session.mean(torch.zeros(0))
        matrix = session.mean(torch.full((2, 2), float(session.rank), dtype=torch.float16))
    return {
        "dealt": dealt,
        "means": means,
        "draws": draws,
        "empty": empty,
        "matrix": matrix,
        "fingerprint": ls.fingerprint(model),
    }


def test_without_data_fixed_indices_are_dealt_to_the_ranks(
    pool: WorkerPool, tmp_path: Path
) -> None:
    alone = [train_without_data(str(tmp_path / "1"))]
    for everyone in (alone, pool.run(3, train_without_data, str(tmp_path / "3"))):
        for step in (0, 1):
            assert [
                span for found in everyone for number, span in found["dealt"] if number == step
            ] == [range(3), range(3, 6), range(6, 9), range(9, 10)]
        draws = sorted(draw for found in everyone for draw in found["draws"])
        assert draws == sorted(alone[0]["draws"])
        for found in everyone:
            assert found["means"] == [4.5, 4.5]
            assert math.isnan(found["empty"])
            assert found["matrix"] == (len(everyone) - 1) / 2
            assert found["fingerprint"] == alone[0]["fingerprint"]
        lines = run_files.metrics(tmp_path / str(len(everyone)))
        assert [(line["step"], line["return"], line["rank"]) for line in lines] == [
            (1, 4.5, 0),
            (2, 4.5, 0),
        ]


def a_list_of_optimizers(model: nn.Sequential) -> list[torch.optim.Optimizer]:
    return [sgd(model[0]), sgd(model[2])]


def name_the_pair(run_dir: str, several: bool) -> list[str]:
    """By the optimizer, by any of a list of them, by the list, or not at all where there is one
    pair."""
    fingerprints = []
    for number, name in enumerate(
        (lambda made: made, lambda made: made[-1] if several else made, lambda made: None)
    ):
        with ls.Session(run_dir=f"{run_dir}/{number}") as session:
            model, made = session.prepare(network, a_list_of_optimizers if several else sgd)
            assert isinstance(made, list) == several
            for step in session.steps(rows(8), global_batch=8, microbatch=4, steps=2):
                for batch in step.microbatches():
                    step.backward(squared_error(model, batch), name(made))
                step.commit(name(made))
        fingerprints.append(ls.fingerprint(model))
    return fingerprints


def test_a_second_compute_in_a_step_is_refused(tmp_path: Path) -> None:
    with ls.Session(run_dir=str(tmp_path / "run")) as session:
        session.prepare(network, sgd)
        for step in session.steps(rows(16), global_batch=8, microbatch=4, steps=1):
            step.compute(None, squared_error)
            with pytest.raises(LossError) as caught:
                step.compute(None, squared_error)
            assert str(caught.value).startswith("after step 0: a second step.compute; the first")
            step.commit()


@pytest.mark.parametrize("several", [False, True])
def test_a_pair_is_named_by_what_prepare_returned(tmp_path: Path, several: bool) -> None:
    assert len(set(name_the_pair(str(tmp_path), several))) == 1


def misuse(run_dir: str, loop: Callable[[ls.Session, Any, Any], None]) -> str:
    with ls.Session(run_dir=run_dir) as session:
        model, optimizer = session.prepare(network, sgd)
        try:
            loop(session, model, optimizer)
        except LockstepError as error:
            return f"{type(error).__name__}: {error}"
    raise AssertionError("nobody minded")


def steps_of(session: ls.Session, **changes: Any) -> Any:
    return session.steps(
        **{"data": rows(16), "global_batch": 8, "microbatch": 4, "steps": 2, **changes}
    )


def looping(
    body: Callable[[Any, Any, Any], object], pairs: int = 1, **changes: Any
) -> Callable[[ls.Session, Any, Any], None]:
    """A loop whose steps call `body(step, model, optimizer)`."""

    def loop(session: ls.Session, model: Any, optimizer: Any) -> None:
        for _ in range(pairs - 1):
            session.prepare(network, sgd)
        for step in steps_of(session, **changes):
            body(step, model, optimizer)

    return loop


def backwards(
    step: Any, model: Any, *optimizer: Any, times: int = 1, only: Sequence[int] = (0, 1)
) -> None:
    for number, batch in enumerate(step.microbatches()):
        for _ in range(times if number in only else 0):
            step.backward(squared_error(model, batch), *optimizer)


def two_pairs_at_once(session: ls.Session, model: Any, optimizer: Any) -> None:
    other, its_optimizer = session.prepare(network, sgd)
    for step in steps_of(session):
        for batch in step.microbatches():
            step.backward(squared_error(model, batch), optimizer)
            step.backward(squared_error(other, batch), its_optimizer)


MISUSES: dict[str, tuple[Callable[[ls.Session, Any, Any], None], str]] = {
    "a second backward": (
        looping(lambda step, model, _: backwards(step, model, times=2)),
        "LossError: after step 0, microbatch 0: a second backward; each microbatch has one: add the"
        " losses and call it on their sum",
    ),
    "a missing backward": (
        looping(lambda step, model, _: (backwards(step, model, only=[0]), step.commit())),
        "LossError: after step 0: commit without a backward for microbatches [1] of this rank; call"
        " step.backward once for each microbatch; to leave the microbatch out",
    ),
    "no backward": (
        looping(lambda step, model, optimizer: step.commit(optimizer)),
        "LossError: after step 0: commit without a backward for microbatches [0, 1] of this rank",
    ),
    "a missing commit": (
        looping(lambda step, model, _: backwards(step, model)),
        "LossError: after step 0: the step ended with 0 of 1 prepared models committed; call "
        "step.commit(optimizer) for each on every rank, in every step",
    ),
    "a second commit": (
        looping(lambda step, model, _: (backwards(step, model), step.commit(), step.commit())),
        "LossError: after step 0: a commit or skip after a commit of the same model; each model has"
        " one per step",
    ),
    "a backward outside": (
        looping(lambda step, model, _: step.backward(squared_error(model, rows(4).tensors))),
        "LossError: after step 0: backward outside of a loop over step.microbatches(); call it"
        " inside the loop",
    ),
    "an optimizer of its own": (
        looping(lambda step, model, _: backwards(step, model, adamw(model))),
        "LossError: after step 0: an optimizer (AdamW) that this session did not prepare, with 1"
        " models prepared; name one that session.prepare",
    ),
    "no optimizer where there are two": (
        looping(lambda step, model, _: backwards(step, model), pairs=2),
        "LossError: after step 0: no optimizer, with 2 models prepared; name one that"
        " session.prepare returned",
    ),
    "two pairs at once": (
        two_pairs_at_once,
        "LossError: after step 0: backward for a second model before the first one's commit; loop"
        " over step.microbatches() and commit for one",
    ),
    "one of two commits": (
        looping(
            lambda step, model, optimizer: (
                backwards(step, model, optimizer),
                step.commit(optimizer),
            ),
            pairs=2,
        ),
        "LossError: after step 0: the step ended with 1 of 2 prepared models committed",
    ),
    "a clip norm of nothing": (
        looping(lambda step, model, _: (backwards(step, model), step.commit(clip_norm=0.0))),
        "RecipeError: clip_norm=0.0; a maximum norm is positive and finite",
    ),
    "a name of the row": (
        looping(lambda step, *_: step.log({"step": 3})),
        "DataError: log({'step': ...}); every line has 'step' already; choose",
    ),
    "no number": (
        looping(lambda step, *_: step.log({"return": [1.0, 2.0]})),
        "DataError: metric 'return' is [1.0, 2.0] (a list); a metric is a single number",
    ),
    **{
        f"{changes}": (looping(lambda *_: None, **changes), message)
        for changes, message in (
            (
                {"global_batch": 0},
                "RecipeError: global_batch=0; it counts samples and must be a whole number of at",
            ),
            ({"microbatch": 0}, "RecipeError: microbatch=0; it counts samples"),
            (
                {"microbatch": 9},
                "RecipeError: microbatch=9 is larger than global_batch=8; a microbatch is a part of"
                " a global batch; give microbatch=8 or less",
            ),
            (
                {"steps": None},
                "RecipeError: steps=None and epochs=None; a recipe has one length; give exactly",
            ),
            (
                {"epochs": 1},
                "RecipeError: steps=2 and epochs=1; a recipe has one length; give exactly one",
            ),
            ({"steps": 0}, "RecipeError: steps=0; it counts steps"),
            ({"steps": None, "epochs": 0}, "RecipeError: epochs=0; it counts epochs"),
            (
                {"data": []},
                "DataError: data is empty (its len() is 0); training needs at least one sample",
            ),
            (
                {"data": iter([1])},
                "DataError: data is a list_iterator; it must be a map-style dataset",
            ),
        )
    },
}


def test_a_loop_that_is_wrong_is_told_so(tmp_path: Path) -> None:
    for place, (name, (loop, message)) in enumerate(MISUSES.items()):
        assert misuse(str(tmp_path / str(place)), loop).startswith(message), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "fp8"}, "precision='fp8'; the known values are fp32, bf16, fp16"),
        ({"seed": -1}, "seed=-1; a seed is a whole number from 0 to 2**63 - 1"),
        ({"log_every": 0}, "log_every=0; it counts steps"),
    ],
)
def test_a_session_that_contradicts_itself_is_refused_when_it_is_made(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        ls.Session(**changes)
    assert str(caught.value).startswith(message)


def test_the_best_of_evaluations_that_a_session_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        ls.Session(run_dir=str(tmp_path / "run"), saving=ls.Saving(best="loss"))
    assert str(caught.value).startswith(
        "Saving(best='loss') in your own loop, which has no evaluations; it names a metric of"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["evaluations", "resolve"])
def test_what_a_session_would_ignore_is_no_argument_of_it(name: str) -> None:
    assert name not in inspect.signature(ls.Session).parameters


def test_objects_instead_of_functions_that_make_them_are_refused(tmp_path: Path) -> None:
    with ls.Session(run_dir=str(tmp_path / "run")) as session:
        for model, optimizer, start, remedy in (
            (network(), sgd, "build_model) is a Sequential", "session.prepare(lambda: Net(),"),
            (
                network,
                sgd(network()),
                "build_optimizer) is a SGD",
                "session.prepare(..., lambda",
            ),
        ):
            with pytest.raises(RecipeError) as caught:
                session.prepare(model, optimizer)  # type: ignore[arg-type]
            assert str(caught.value).startswith(
                f"session.prepare({start}, not a function that makes one; "
            )
            assert f": {remedy}" in str(caught.value)


@pytest.mark.parametrize(
    ("run_dir", "text"),
    [("", "run_dir is empty"), ("gs://bucket/run", "a URL"), (Path("s3://bucket/run"), "a URL")],
)
def test_a_run_dir_that_is_no_path_is_refused(run_dir: Any, text: str) -> None:
    with pytest.raises(RunDirectoryError, match=text):
        ls.Session(run_dir=run_dir)


def test_an_event_says_how_many_steps_were_done(tmp_path: Path) -> None:
    def fail_in_the_third_step(session: ls.Session) -> None:
        model, optimizer = session.prepare(network, sgd)
        for step in session.steps(rows(12), global_batch=4, microbatch=4, steps=3):
            for batch in step.microbatches():
                session.event("forward")
                step.backward(squared_error(model, batch))
            if step.index == 2:
                raise ValueError("boom")
            step.commit(optimizer)
            session.event("committed")

    with (
        pytest.raises(ValueError, match="boom"),
        ls.Session(run_dir=str(tmp_path / "run")) as session,
    ):
        fail_in_the_third_step(session)
    found = run_files.events(tmp_path / "run")
    assert [(row["event"], row["step"]) for row in found] == [
        ("run-started", 0),
        ("gradient-reducer", 0),
        *[("forward", 0), ("committed", 1), ("forward", 1), ("committed", 2), ("forward", 2)],
        ("run-failed", 2),
        ("rescued", 2),
    ]


def test_training_goes_on_without_a_stderr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    assert ls.train(recipe(steps=2, precision="fp16"), run_dir=str(tmp_path / "run")).steps == 2


def test_a_session_that_fails_while_it_is_entered_gives_its_directory_up(tmp_path: Path) -> None:
    before = torch.default_generator.get_state(), torch.get_num_threads()
    with pytest.raises(TypeError, match="not JSON serializable"):
        ls.Session(run_dir=str(tmp_path / "run"), recipe={"model": object()}).__enter__()
    assert "lock" not in {path.name for path in (tmp_path / "run").iterdir()}
    assert same((torch.default_generator.get_state(), torch.get_num_threads()), before)


def test_steps_without_a_model_or_in_bitwise_without_a_microbatch_are_refused(
    tmp_path: Path,
) -> None:
    with ls.Session(run_dir=str(tmp_path / "run"), plan="numerics=bitwise") as session:
        with pytest.raises(RecipeError) as caught:
            session.steps(rows(8), global_batch=8, steps=1)
        assert str(caught.value).startswith("session.steps before session.prepare;")
        session.prepare(network, sgd)
        with pytest.raises(RecipeError) as caught:
            session.steps(rows(8), global_batch=8, steps=1)
        assert str(caught.value).startswith("numerics=bitwise with microbatch=None; ")
        assert str(caught.value).endswith("; give a microbatch, for example microbatch=1")


def test_a_full_disk_ends_the_run_with_the_name_of_the_file(
    pool: WorkerPool, tmp_path: Path
) -> None:
    with pytest.raises(RunDirectoryError) as caught:
        pool.run(1, on_a_full_disk, str(tmp_path / "run"))
    assert "cannot write /dev/full: No space left on device; " in str(caught.value)
    assert "make room" in str(caught.value)


def on_a_full_disk(run_dir: str) -> None:
    with ls.Session(run_dir=run_dir) as session:
        session.context.recorder.events.close()
        session.context.recorder.events = EventLog(Path("/dev/full"))
        session.event("something")


def test_torch_is_not_told_the_number_of_threads_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(number: int) -> None:
        raise AssertionError(f"set_num_threads({number})")

    monkeypatch.setattr(torch, "set_num_threads", told)
    ls.train(
        recipe(steps=1), run_dir=str(tmp_path / "run"), plan=f"threads={torch.get_num_threads()}"
    )


def seen_samples(run_dir: str, plan: str, dummies: bool, sizes: dict[str, int]) -> Any:
    """The samples that all ranks' loops have counted; or the refusal, and whether anything was
    computed before it."""
    seen: list[Tensor] = []
    try:
        with ls.Session(run_dir=run_dir, plan=plan) as session:
            model, optimizer = session.prepare(network, sgd)
            for step in session.steps(rows(20), microbatch=4, **sizes):
                for batch in step.microbatches(dummies=dummies):
                    step.backward(squared_error(model, batch))
                    if not step.is_dummy:
                        seen.append(batch[0])
                assert not step.is_dummy
                step.commit(optimizer)
            return sorted(session.gather(torch.cat(seen)).tolist())
    except RecipeError as error:
        return str(error), len(seen)


Sizes = dict[str, int]
REMEDIES: list[tuple[Sizes, Sizes, int, int]] = [
    ({"global_batch": 12, "steps": 1}, {"global_batch": 8, "steps": 1}, 3, 12),
    ({"global_batch": 8, "epochs": 1}, {"global_batch": 8, "epochs": 1, "drop_last": 1}, 1, 20),
]
"""Sizes of a loop with steps of an odd number of microbatches, and with none; that number; the
samples."""


def seen_each(run_dir: str, plans: Sequence[str]) -> dict[Any, Any]:
    rows = [
        (plan, dummies, sizes)
        for plan in plans
        for odd, even, _, _ in REMEDIES
        for dummies, sizes in ((False, odd), (True, odd), (False, even))
    ]
    found = each_of(seen_samples, run_dir, rows)
    return {
        (plan, dummies, str(sizes)): seen
        for (plan, dummies, sizes), seen in zip(rows, found, strict=True)
    }


def test_a_loop_that_would_count_dummies_is_refused_and_the_remedies_work(
    pool: WorkerPool, tmp_path: Path
) -> None:
    alone = seen_each(str(tmp_path / "1"), ["shard=1"])
    everyone = pool.run(2, seen_each, str(tmp_path / "2"), ["replicate=2", "shard=2"])
    for odd, even, count, samples in REMEDIES:
        seen = alone["shard=1", False, str(odd)]
        assert len(seen) == len(set(seen)) == samples
        assert alone["shard=1", True, str(odd)] == seen
        for found in everyone:
            refused, computed = found["shard=2", False, str(odd)]
            assert computed == 0
            assert f"with steps of {count} microbatches, computed in rounds by 2 ranks" in refused
            assert "step.microbatches(dummies=True)" in refused
            assert found["replicate=2", False, str(odd)] == seen
            assert found["shard=2", True, str(odd)] == seen
            assert found["shard=2", False, str(even)] == alone["shard=1", False, str(even)]
        assert everyone[0] == everyone[1]


def test_the_ported_loop_logs_the_same_under_every_plan(pool: WorkerPool, tmp_path: Path) -> None:
    train_ported(str(tmp_path / "1"), "shard=1")
    pool.run(2, train_ported, str(tmp_path / "2"), "shard=2")
    alone, sharded = (
        [line["accuracy"] for line in run_files.metrics(tmp_path / ranks)] for ranks in ("1", "2")
    )
    assert len(alone) == 3
    assert alone == sharded


def train_ported(run_dir: str, plan: str) -> None:
    runpy.run_path("examples/cookbook/ported.py")["train"](run_dir=run_dir, plan=plan)
