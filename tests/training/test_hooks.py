"""Hooks: when each is called, and the two that come with lockstep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import run_files
import torch
from safetensors.torch import load_file
from torch import Tensor, distributed, nn
from training.subjects import each_of, recipe, rows, same, state_of

import lockstep as ls
from lockstep.base.errors import RecipeError
from lockstep.testing.pool import WorkerPool


class Calls(ls.Hook):
    def __init__(self, name: str, calls: list[str]) -> None:
        self.name = name
        self.calls = calls

    def note(self, text: str) -> None:
        self.calls.append(f"{self.name} {text}")

    def on_start(self, run: Any) -> None:
        self.note(f"start {run.step}")

    def after_step(self, run: Any) -> None:
        self.note(f"step {run.step}")

    def after_evaluation(self, run: Any, metrics: Mapping[str, float]) -> None:
        self.note(
            f"evaluation {run.step} {sorted(metrics)} {run.metrics.items() >= metrics.items()}"
        )

    def on_event(self, run: Any, event: Any) -> None:
        self.note(f"event {event.name} {event.step} {event.details}")

    def on_finish(self, run: Any) -> None:
        if run.context.world.rank == 0:  # who writes it next
            assert not Path(run.context.recorder.path, "model.safetensors").exists()
        self.note(f"end {run.step}")

    def on_save(self, run: Any) -> None:
        distributed.barrier()
        assert Path(run.context.recorder.path, "model.safetensors").exists()
        assert not Path(run.context.recorder.path, "result.json").exists()
        distributed.barrier()
        self.note(f"save {run.step}")


class Tells(ls.Hook):
    def after_step(self, run: Any) -> None:
        if run.step == 2:
            run.event("something-happened", rank=run.context.world.rank)


def call_hooks(run_dir: str) -> tuple[list[str], list[Any]]:
    calls: list[str] = []
    evaluation = ls.Evaluation(data=rows(5), every=2)
    result = ls.train(
        recipe(steps=3, evaluation=evaluation),
        run_dir=run_dir,
        hooks=[Calls("a", calls), Calls("b", calls), Tells()],
        log_every=2,
    )
    return calls, result.events


REDUCER = {
    1: {
        "model": 0,
        "reducer": "DdpReducer",
        "reason": "buckets are summed while the backward computes",
    },
    2: {
        "model": 0,
        "reducer": "PostBackwardReducer",
        "reason": "all replicas share the memory of one host",
    },
}


@pytest.mark.parametrize("world_size", [1, 2])
def test_hooks_are_called_in_their_order_on_every_rank(
    pool: WorkerPool, tmp_path: Path, world_size: int
) -> None:
    for rank, (calls, events) in enumerate(pool.run(world_size, call_hooks, str(tmp_path / "run"))):
        expected = [
            "start 0",
            f"event gradient-reducer 0 {REDUCER[world_size]}",
            "step 1",
            "step 2",
            f"event something-happened 2 {{'rank': {rank}}}",
            "evaluation 2 ['loss'] True",
            "step 3",
            "evaluation 3 ['loss'] True",
            "end 3",
            "save 3",
            "event run-ended 3 {}",
        ]
        assert [call.removeprefix("a ") for call in calls if call.startswith("a ")] == expected
        assert calls == [f"{name} {call}" for call in expected for name in "ab"]
        assert [event.name for event in events] == [
            "run-started",
            "generators-seeded",
            "gradient-reducer",
            "something-happened",
            "run-ended",
        ]


class Scaled(torch.utils.data.Dataset[Any]):
    """Features times a factor, which a hook sets."""

    def __init__(self, factor: float) -> None:
        self.rows, self.factor = rows(48), factor

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> list[Tensor]:
        number, features, target = self.rows[index]
        return [number, features * self.factor, target]


class SetsFactor(ls.Hook):
    def __init__(self, data: Scaled) -> None:
        self.data = data

    def before_step(self, run: Any) -> None:
        self.data.factor = 1.0 + run.step


def summed_error(model: nn.Module, batch: Sequence[Tensor]) -> Any:
    return ls.Sum(((model(batch[1]) - batch[2]) ** 2).sum())


WEIGHTED = {"loss": summed_error, "weight": lambda batch: len(batch[1])}


@pytest.mark.parametrize("changes", [{}, WEIGHTED], ids=["mean", "weighted sum"])
def test_before_step_sets_what_the_first_samples_of_the_step_depend_on(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Whatever its value was before, such as that of a new dataset in a resumed run."""
    trained = set()
    for factor in (1.0, 9.0):
        data = Scaled(factor)
        trained.add(
            ls.train(
                recipe(data=data, **changes),
                run_dir=str(tmp_path / str(factor)),
                hooks=[SetsFactor(data)],
            ).fingerprint
        )
    assert len(trained) == 1


def by_index(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return batch[0].float()


class Scripted(ls.Hook):
    """Gives the metric of each evaluation a value of its own, before the hook behind it looks at
    it."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = list(values)

    def after_evaluation(self, run: Any, metrics: dict[str, float]) -> None:
        metrics["score"] = self.values[run.step - 1]


NAN = float("nan")
SCRIPTS: dict[str, tuple[list[float], dict[str, Any], int, float]] = {
    "less is better": ([3, 2, 2.5, 2.1, 1, 1], {"patience": 2}, 4, 2),
    "patience counts from the best": ([3, 2, 2.5, 1, 1.5, 1.5, 1.5, 0], {"patience": 3}, 7, 1),
    "more is better": ([1, 2, 1, 1, 3], {"patience": 2, "mode": "max"}, 4, 2),
    "an improvement that is too small": (
        [3, 2.95, 2.9, 2.7, 2.65],
        {"patience": 2, "min_delta": 0.1},
        3,
        3,
    ),
    "an improvement that is too small, more is better": (
        [1, 1.05, 1.1, 2, 0],
        {"patience": 2, "min_delta": 0.1, "mode": "max"},
        3,
        1,
    ),
    "nan is no improvement": ([3, NAN, NAN, 1], {"patience": 2}, 3, 3),
    "nan at first": ([NAN, 3, 2, 1], {"patience": 2}, 4, 1),
    "always better": ([4, 3, 2, 1], {"patience": 1}, 4, 1),
}


def stop_early(run_dir: str, name: str) -> list[tuple[int, float | None, list[Any]]]:
    """Twice with one hook: what the first run left in it does not count in the second."""
    values, arguments, _, _ = SCRIPTS[name]
    evaluation = ls.Evaluation(data=rows(5), every=1)
    stopping = ls.EarlyStopping("score", **arguments)
    found = []
    for repeat in range(2):
        given = recipe(steps=len(values), evaluation=evaluation)
        result = ls.train(
            given, run_dir=f"{run_dir}/{repeat}", hooks=[Scripted(values), stopping], log_every=3
        )
        found.append(
            (
                result.steps,
                stopping.best,
                [event.details for event in result.events if event.name == "stopped"],
            )
        )
    return found


@pytest.mark.parametrize("name", SCRIPTS)
def test_early_stopping_ends_training_where_a_metric_has_not_got_better(
    tmp_path: Path, name: str
) -> None:
    values, arguments, steps, best = SCRIPTS[name]
    reason = f"score has not improved on {best:.6g} for {arguments['patience']} evaluations"
    details = [{"reason": reason}] if steps < len(values) else []
    assert stop_early(str(tmp_path), name) == [(steps, best, details)] * 2


def diverging(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, maximize=True)


def stop_where_the_loss_rises(run_dir: str) -> tuple[int, dict[str, float], int]:
    evaluation = ls.Evaluation(data=rows(5), every=2)
    given = recipe(steps=20, evaluation=evaluation, optimizer=diverging)
    result = ls.train(
        given, run_dir=run_dir, plan="numerics=bitwise", hooks=[ls.EarlyStopping(patience=2)]
    )
    return (
        result.steps,
        result.metrics,
        len(run_files.metrics(run_dir)),
    )


def test_early_stopping_ends_at_the_same_step_at_any_world_size(
    pool: WorkerPool, tmp_path: Path
) -> None:
    found = [
        stop_where_the_loss_rises(str(tmp_path / "1")),
        *pool.run(3, stop_where_the_loss_rises, str(tmp_path / "3")),
    ]
    assert same([result[:2] for result in found], [found[0][:2]] * 4)
    assert found[0][0] == 6


def watch(run_dir: str, metric: str, every: int | None, evaluated: bool) -> None:
    evaluation = (
        ls.Evaluation(data=rows(5), every=every, metrics={"accuracy": ls.Mean(by_index)})
        if evaluated
        else None
    )
    ls.train(recipe(evaluation=evaluation), run_dir=run_dir, hooks=[ls.EarlyStopping(metric)])


WITHOUT = "RecipeError: EarlyStopping without Recipe.evaluation, or with every=None"
UNWATCHED = {
    ("f1", 1, True): "RecipeError: EarlyStopping watches 'f1', which is not measured; measured are"
    " loss, accuracy; choose one of these",
    ("loss", None, True): f"{WITHOUT}; it watches evaluations; give ls.Eval",
    ("loss", None, False): WITHOUT,
}


def watch_each(run_dir: str) -> list[Any]:
    return each_of(watch, run_dir, UNWATCHED)


def test_early_stopping_without_its_metric_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    for said in pool.run(2, watch_each, str(tmp_path / "run")):
        for (case, words), text in zip(UNWATCHED.items(), said, strict=True):
            assert text.startswith(words), case


class Chooses(ls.Hook):
    """Chooses its method at the start."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def on_start(self, run: Any) -> None:
        self.after_step = self.chosen  # type: ignore[method-assign]

    def after_step(self, run: Any) -> None:
        self.called.append("after_step")

    def chosen(self, run: Any) -> None:
        self.called.append("chosen")


def test_a_hook_may_set_its_methods_in_on_start(tmp_path: Path) -> None:
    hook = Chooses()
    ls.train(recipe(steps=2), run_dir=str(tmp_path / "run"), hooks=[hook])
    assert hook.called == ["chosen", "chosen"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ls.EarlyStopping(patience=0),
            "patience=0; it counts evaluations and is at least 1",
        ),
        (
            lambda: ls.EarlyStopping(mode="best"),
            "mode='best'; it must be 'min' if less is better, or 'max'",
        ),  # type: ignore[arg-type]
        (
            lambda: ls.EarlyStopping(min_delta=-0.1),
            "min_delta=-0.1; it must be the smallest change that counts as an improvement, 0 or more",
        ),
        (
            lambda: ls.ExponentialMovingAverage(1.0),
            "decay=1.0; it must be the factor of the old average, from 0 to below 1",
        ),
        (lambda: ls.ExponentialMovingAverage(-0.1), "decay=-0.1; it must be the factor"),
    ],
)
def test_hooks_refuse_what_makes_no_sense_when_they_are_made(make: Any, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        make()
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        (
            [type("Old", (ls.Hook,), {"on_step": print})()],
            "Old.on_step would never be called; the methods of an ls.Hook",
        ),
        (
            [type("Lockstep", (ls.Hook,), {"before_steps": print})()],
            "Lockstep.before_steps would never be called; the methods of an ls.Hook are on_start,"
            " before_step, after_backward, after_step, before_evaluation, after_evaluation,"
            " on_finish, on_save, on_event, on_error, on_end; use one of them, or a name with"
            " another beginning; did you mean before_step?",
        ),
        (
            [type("Lockstep", (ls.Hook,), {"between_steps": print})()],
            "Lockstep.between_steps would never be called",
        ),
        (
            [ls.Hook],
            "hooks has <class 'lockstep.training.hook.Hook'>; a hook is an object of a subclass"
            " of ls.Hook; make it one",
        ),
        (3, "hooks has 3; a hook is an object"),
        (ls.EarlyStopping(), "hooks=<lockstep.hooks.early_stopping.EarlyStopping object at "),
    ],
)
def test_what_is_no_hook_is_refused(tmp_path: Path, hooks: Any, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        ls.train(recipe(steps=2), run_dir=str(tmp_path / "run"), hooks=hooks)
    assert str(caught.value).startswith(message)


class StopsOnOneRank(ls.Hook):
    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, run: Any) -> None:
        if run.context.world.rank == run.context.world.size - 1 and run.step == self.step:
            run.stop("enough")


def stop_on_one_rank(run_dir: str, step: int) -> tuple[int, list[tuple[int, Any]], str, list[int]]:
    result = ls.train(recipe(steps=12), run_dir=run_dir, hooks=[StopsOnOneRank(step)], log_every=4)
    stopped = [(event.step, event.details) for event in result.events if event.name == "stopped"]
    lines = [row["step"] for row in run_files.metrics(run_dir)]
    return result.steps, stopped, result.fingerprint, lines


ENDS = {1: 4, 3: 4, 4: 8, 10: 12}
"""The step that ends training of twelve, by the step in which that is asked for."""


def stop_each(run_dir: str) -> list[Any]:
    return each_of(stop_on_one_rank, run_dir, [(step,) for step in ENDS])


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_stop_asked_for_on_one_rank_ends_all_at_the_same_logging_step(
    pool: WorkerPool, tmp_path: Path, world_size: int
) -> None:
    everyone = pool.run(world_size, stop_each, str(tmp_path / "run"))
    for (asked_at, ends_at), *ranks in zip(ENDS.items(), *everyone, strict=True):
        assert len({fingerprint for _, _, fingerprint, _ in ranks}) == 1, asked_at
        for steps, stopped, _, _ in ranks:
            assert (steps, stopped) == (ends_at, [(ends_at, {"reason": "enough"})]), asked_at
        assert ranks[0][3] == list(range(4, ends_at + 1, 4)), asked_at


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.norm(self.layer(x)))


class Applies(ls.Hook):
    def __init__(self, average: ls.ExponentialMovingAverage) -> None:
        self.average = average
        self.states: list[dict[str, Tensor]] = []

    def on_start(self, run: Any) -> None:
        self.states.append(state_of(run.model))

    after_step = on_start

    def on_finish(self, run: Any) -> None:
        with self.average.applied(run):
            self.within = state_of(run.model)
        self.after = state_of(run.model)


def average_weights(run_dir: str, decay: float) -> dict[str, Any]:
    average = ls.ExponentialMovingAverage(decay)
    applies = Applies(average)
    result = ls.train(recipe(model=Normed, steps=5), run_dir=run_dir, hooks=[average, applies])
    return {
        "states": applies.states,
        "within": applies.within,
        "after": applies.after,
        "fingerprint": result.fingerprint,
    }


DECAYS = (0.9, 0.0)


def average_each(run_dir: str) -> list[Any]:
    return each_of(average_weights, run_dir, [(decay,) for decay in DECAYS])


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_moving_average_is_that_of_the_closed_form_on_every_rank_and_in_its_file(
    pool: WorkerPool, tmp_path: Path, world_size: int
) -> None:
    for everyone in pool.run(world_size, average_each, str(tmp_path)):
        for number, (decay, found) in enumerate(zip(DECAYS, everyone, strict=True)):
            states = [
                {name: value.double() for name, value in state.items()} for state in found["states"]
            ]
            steps = len(states) - 1
            shares = [decay**steps] + [
                (1 - decay) * decay ** (steps - step) for step in range(1, steps + 1)
            ]
            for name, value in found["within"].items():
                if name.startswith(("layer", "norm.weight", "norm.bias", "frozen")):
                    expected = sum(
                        share * state[name] for share, state in zip(shares, states, strict=True)
                    )
                    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-7)
                else:
                    assert same(value, found["after"][name]), (decay, name)
            assert same(found["after"], found["states"][-1]), decay
            file = tmp_path / str(number) / "model_average.safetensors"
            assert same(load_file(file), found["within"]), decay
            assert ls.fingerprint(found["after"]) == found["fingerprint"], decay
