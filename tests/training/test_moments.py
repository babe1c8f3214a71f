"""The moments of a run at which hooks are called: their order, and what a hook finds at each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed, nn
from training.subjects import network, recipe, rows, samples_at, sgd, squared_error

import lockstep as ls
from lockstep.launch.termination import Preempted
from lockstep.testing.pool import WorkerPool
from lockstep.training.hook import ControlHook
from lockstep.training.training import Hooks

CLIP_NORM = 1e-3
TOLD = ("gradient-reducer", "run-failed", "run-ended", "preempted")


class Moments(ls.Hook):
    """Notes each moment, with the optimizer steps done then."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.errors: list[BaseException] = []
        self.gradient_errors: list[float] = []
        """After each backward: the relative error of the gradient against that of the whole global
        batch."""

    def note(self, moment: str, run: Any) -> None:
        self.seen.append(f"{moment} {run.step}")

    def on_start(self, run: Any) -> None:
        self.note("on_start", run)

    def before_step(self, run: Any) -> None:
        assert all(parameter.grad is None for parameter in run.model.parameters()) or run.step > 0
        self.note("before_step", run)

    def after_backward(self, run: Any, model: nn.Module) -> None:
        assert model is run.model
        reference = network()
        reference.load_state_dict(model.state_dict())
        data = rows(48)
        samples = samples_at(16 * run.step, 16 * (run.step + 1), of=48)
        squared_error(reference, [column[samples] for column in data.tensors]).backward()
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        error = sum(float((own.grad - other.grad).square().sum()) for own, other in pairs) ** 0.5
        norm = sum(float(other.grad.square().sum()) for other in reference.parameters()) ** 0.5
        assert norm > 10 * CLIP_NORM
        self.gradient_errors.append(error / norm)
        self.note("after_backward", run)

    def after_step(self, run: Any) -> None:
        self.note("after_step", run)

    def before_evaluation(self, run: Any) -> None:
        self.note("before_evaluation", run)

    def after_evaluation(self, run: Any, metrics: Mapping[str, float]) -> None:
        self.note("after_evaluation", run)

    def on_finish(self, run: Any) -> None:
        distributed.barrier() if run.context.world.size > 1 else None  # collectives are allowed
        self.note("on_finish", run)

    def on_save(self, run: Any) -> None:
        self.note("on_save", run)

    def on_event(self, run: Any, event: Any) -> None:
        if event.name in TOLD:
            self.note(f"on_event {event.name}", run)

    def on_error(self, run: Any, error: BaseException) -> None:
        self.errors.append(error)
        self.note(f"on_error {type(error).__name__}", run)

    def on_end(self, run: Any) -> None:
        self.note("on_end", run)


def in_train(run_dir: str, *hooks: ls.Hook) -> None:
    given = recipe(
        steps=3, clip_norm=CLIP_NORM, optimizer=sgd, evaluation=ls.Evaluation(data=rows(5), every=2)
    )
    ls.train(given, run_dir=run_dir, hooks=hooks, log_every=2)


def in_a_loop(run_dir: str, *hooks: ls.Hook) -> None:
    with ls.Session(run_dir=run_dir, hooks=hooks) as session:
        model, optimizer = session.prepare(network, sgd)
        for step in session.steps(rows(48), global_batch=16, microbatch=4, steps=3):
            for batch in step.microbatches():
                step.backward(squared_error(model, batch))
            step.commit(optimizer, clip_norm=CLIP_NORM)


STEP = ["before_step {0}", "after_backward {0}", "after_step {1}"]
EVALUATION = ["before_evaluation {1}", "after_evaluation {1}"]
BEGIN = ["on_start 0", "on_event gradient-reducer 0"]


def steps(*numbers: int, evaluated: tuple[int, ...] = ()) -> list[str]:
    return [
        moment.format(each - 1, each)
        for each in numbers
        for moment in (*STEP, *(EVALUATION if each in evaluated else []))
    ]


WHOLE: dict[Any, list[str]] = {
    in_train: [
        *BEGIN,
        *steps(1, 2, 3, evaluated=(2, 3)),
        "on_finish 3",
        "on_save 3",
        "on_event run-ended 3",
        "on_end 3",
    ],
    in_a_loop: [*BEGIN, *steps(1, 2, 3), "on_finish 3", "on_event run-ended 3", "on_end 3"],
}


def seen_of(train: Any, run_dir: str) -> tuple[list[str], list[float]]:
    moments = Moments()
    train(run_dir, moments)
    return moments.seen, moments.gradient_errors


class Fails(ls.Hook):
    """Raises `error` at a moment of the second step."""

    def __init__(self, moment: str, error: BaseException) -> None:
        self.moment = moment
        self.error = error

    def fail(self, moment: str, run: Any) -> None:
        if moment == self.moment and run.step == (2 if moment == "after_step" else 1):
            raise self.error

    def before_step(self, run: Any) -> None:
        self.fail("before_step", run)

    def after_backward(self, run: Any, model: nn.Module) -> None:
        self.fail("after_backward", run)

    def after_step(self, run: Any) -> None:
        self.fail("after_step", run)


def fail(moment: str, train: Any, run_dir: str) -> tuple[list[str], bool]:
    moments, error = (
        Moments(),
        (Preempted("asked to") if moment == "preempted" else ValueError("on purpose")),
    )
    with pytest.raises((ValueError, Preempted)):
        train(run_dir, moments, Fails("before_step" if moment == "preempted" else moment, error))
    return moments.seen, moments.errors in ([error], [])


FAILED = {
    "before_step": ["before_step 1", "on_event run-failed 1", "on_error ValueError 1", "on_end 1"],
    "after_backward": [
        "before_step 1",
        "after_backward 1",
        "on_event run-failed 1",
        "on_error ValueError 1",
        "on_end 1",
    ],
    "after_step": [*steps(2), "on_event run-failed 2", "on_error ValueError 2", "on_end 2"],
    "preempted": ["before_step 1", "on_event preempted 1", "on_end 1"],
}


def moments_of_all(run_dir: str) -> list[tuple[str, Any, Any, Any]]:
    """Runs that end, and runs that fail at each moment on every rank."""
    found = []
    for train in WHOLE:
        found.append(("", train, *seen_of(train, f"{run_dir}/{train.__name__}")))
        found += [
            (moment, train, *fail(moment, train, f"{run_dir}/{train.__name__}-{moment}"))
            for moment in FAILED
        ]
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_moments_of_a_run_that_ends_or_fails(
    pool: WorkerPool, tmp_path: Path, world_size: int
) -> None:
    for rank in pool.run(world_size, moments_of_all, str(tmp_path)):
        for moment, train, seen, noted in rank:
            case = (moment, train.__name__)
            if moment:
                assert seen == [*BEGIN, *steps(1), *FAILED[moment]], case
                assert noted, case  # the error itself
            else:
                assert seen == WHOLE[train], case
                assert len(noted) == 3, case
                assert max(noted) < 1e-5, case  # summed over all ranks, and not yet clipped


def test_a_run_ends_in_any_case(tmp_path: Path) -> None:
    """Before its first step, and if another hook fails at the end."""

    class FailsAtTheEnd(ls.Hook):
        def on_error(self, run: Any, error: BaseException) -> None:
            raise RuntimeError("in on_error")

        def on_end(self, run: Any) -> None:
            raise RuntimeError("in on_end")

    moments = Moments()
    with (
        pytest.raises(RuntimeError, match="in on_end"),
        ls.Session(run_dir=str(tmp_path / "run"), hooks=[FailsAtTheEnd(), moments]),
    ):
        raise ValueError("before the first step")
    assert moments.seen == ["on_error ValueError 0", "on_end 0"]
    with ls.Session(run_dir=str(tmp_path / "other")) as session:  # what the first one held is free
        assert session.world_size == 1


def test_finish_is_called_once(tmp_path: Path) -> None:
    moments = Moments()
    with ls.Session(run_dir=str(tmp_path / "run"), hooks=[moments]) as session:
        model, optimizer = session.prepare(network, sgd)
        for step in session.steps(rows(48), global_batch=16, microbatch=16, steps=1):
            for batch in step.microbatches():
                step.backward(squared_error(model, batch))
            step.commit(optimizer)
        session.finish()
        assert moments.seen[-1] == "on_finish 1"
    assert moments.seen == [*BEGIN, *steps(1), "on_finish 1", "on_event run-ended 1", "on_end 1"]


def test_an_error_in_on_finish_is_an_error_of_the_run(tmp_path: Path) -> None:
    class FailsToFinish(ls.Hook):
        def on_finish(self, run: Any) -> None:
            raise ValueError("in on_finish")

    moments = Moments()
    with pytest.raises(ValueError, match="in on_finish"):
        in_a_loop(str(tmp_path / "run"), FailsToFinish(), moments)
    assert moments.seen == [
        *BEGIN,
        *steps(1, 2, 3),
        "on_event run-failed 3",
        "on_error ValueError 3",
        "on_end 3",
    ]


class Asked(ls.Hook):
    """Has a method with the name of a moment that is lockstep's own."""

    def between_steps(self, run: Any) -> None:
        raise AssertionError("only lockstep's own hooks are called between steps")


def test_hooks_of_users_are_called_at_their_moments_only() -> None:
    class Own(ControlHook):
        def __init__(self) -> None:
            self.calls = 0

        def between_steps(self, run: Any) -> None:
            self.calls += 1

    own = Own()
    context: Any = SimpleNamespace(seed=0, device=torch.device("cpu"), plan=ls.Plan())
    hooks = Hooks([Asked(), ls.Hook(), own], context)
    run: Any = SimpleNamespace(step=0)
    hooks.call("between_steps", run)
    hooks.call("after_step", run)
    assert own.calls == 1


def test_every_hook_is_called_though_one_raises() -> None:
    class Raises(ls.Hook):
        def on_end(self, run: Any) -> None:
            raise ValueError("first")

    run: Any = SimpleNamespace(step=0)
    context: Any = SimpleNamespace(seed=0, device=torch.device("cpu"))
    moments = Moments()
    with pytest.raises(ValueError, match="first"):
        Hooks([Raises(), moments, Raises()], context).call_every("on_end", run)
    assert moments.seen == ["on_end 0"]


def test_no_moment_is_left_out_of_these_tests() -> None:
    assert {name for name in vars(ls.Hook) if name[0] != "_"} == {
        name for name in vars(Moments) if name[0] != "_"
    } - {"note"}
    assert torch.is_grad_enabled()
