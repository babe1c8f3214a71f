"""Training on accelerators: the same model under every plan, and no wait of the host in a step that
does not log."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from device.ranks import on_device
from tiers import tiered
from torch import nn
from training.subjects import recipe, rows

import lockstep as ls
from lockstep.base.errors import LossError, PlanError
from lockstep.comm import world as comm_world
from lockstep.comm.world import World
from lockstep.testing.pool import WorkerPool
from lockstep.training.consensus import Request
from lockstep.training.hook import ControlHook

SAME_BITS = {
    "replicate=1": 1,
    "replicate=2": 2,
    "replicate=3": 3,
    "shard=2": 2,
    "replicate=2,shard=2": 4,
}
PLANS = {**SAME_BITS, "tensor=2": 2, "split=2": 1, "pipeline=2": 2, "pipeline=2,replicate=2": 4}
"""Plan -> its number of processes."""
SMALL = [plan for plan in PLANS if plan != "replicate=3"]
IN_ALL_PRECISIONS = ("replicate=2", "shard=2")
EXCHANGES = "exchanges between hosts"
HOST_WAITS = {"pipeline=2": {EXCHANGES: 2}, "pipeline=2,replicate=2": {EXCHANGES: 2}}
"""Collectives between hosts in a step: stages learn of the shapes of microbatches, and of failed
forwards."""


def network() -> nn.Module:
    """Draws dropout masks."""
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )


def fused(model: nn.Module) -> torch.optim.Optimizer:
    """Its update is gated on the device. Of others the host must know whether the gradient is
    finite."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def foreach(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


def of_outputs(output: torch.Tensor, batch: Any) -> ls.Sum:
    return ls.Sum(((output - batch[2]) ** 2).mean(1).sum())


def steps(**changes: Any) -> ls.Recipe:
    """Five steps of three microbatches, changed as asked."""
    given: dict[str, Any] = {
        "loss": of_outputs,
        "weight": lambda batch: len(batch[1]),
        "inputs": lambda batch: batch[1],
        "model": network,
        "optimizer": fused,
        "global_batch": 12,
        "steps": 5,
        "clip_norm": 0.5,
        "tensor": {"0": "colwise", "3": "rowwise"},
    }
    return recipe(**{**given, **changes})


class Waits(ls.Hook):
    """Notes the model's device, and counts what the host waits for in each step."""

    def __init__(self) -> None:
        self.device = ""
        self.waits: list[dict[str, int]] = []
        self.exchanges = 0

    @contextmanager
    def watching_hosts(self) -> Iterator[None]:
        """Count the collectives of tensors on the CPU too, but for the all-gather of the batches'
        weights."""
        with pytest.MonkeyPatch.context() as patch:
            for name in ("all_reduce", "broadcast"):
                patch.setattr(dist, name, self._counting(getattr(dist, name)))
            yield

    def _counting(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def counting(tensor: torch.Tensor, *given: Any, **settings: Any) -> Any:
            self.exchanges += tensor.is_cpu
            return collective(tensor, *given, **settings)

        return counting

    def on_start(self, run: Any) -> None:
        self.device = str(next(run.model.parameters()).device)

    def before_step(self, run: Any) -> None:
        import standin

        waits = standin.take_counters().host_waits
        self.waits.append({**waits, EXCHANGES: self.exchanges} if self.exchanges else waits)
        self.exchanges = 0


def train(plan: str, run_dir: str, **changes: Any) -> tuple[str, str, list[dict[str, int]]]:
    """Return the fingerprint, the device, and the host's waits in the third and the fourth step. In
    the first it sets up, and tries the loss."""
    hook = Waits()
    with hook.watching_hosts():
        result = ls.train(steps(**changes), plan=plan, run_dir=run_dir, hooks=[hook], log_every=100)
    assert len(hook.waits) == 5
    return result.fingerprint, hook.device, hook.waits[3:]


# What is trained under a plan


def bitwise(plan: str, run_dir: str) -> tuple[str, str, list[dict[str, int]]]:
    return train(f"{plan},numerics=bitwise", run_dir, global_batch=20)


def fast(plan: str, run_dir: str) -> dict[str, list[dict[str, int]]]:
    """Return the host's waits in each precision. In fp16 it has the most to wait for: autocast and
    a loss scale."""
    return {
        precision: train(plan, f"{run_dir}-{precision}", precision=precision, global_batch=20)[2]
        for precision in (("fp32", "bf16", "fp16") if plan in IN_ALL_PRECISIONS else ("fp16",))
    }


class Overflows(ls.Hook):
    def __init__(self) -> None:
        self.skipped: list[int] = []

    def on_event(self, run: Any, event: Any) -> None:
        if event.name == "step-skipped":
            self.skipped.append(event.step)


def overflowing(output: torch.Tensor, batch: Any) -> ls.Sum:
    return ls.Sum(300 * ((output - batch[2]) ** 2).mean(1).sum())


def loss_scale(plan: str, run_dir: str) -> list[tuple[list[int], float]]:
    """Return the steps that were skipped, and the loss, with the scale on the device and on the
    host."""
    found = []
    for optimizer in (fused, foreach):
        hook = Overflows()
        given = steps(precision="fp16", loss=overflowing, optimizer=optimizer, steps=8)
        result = ls.train(
            given,
            plan=plan,
            run_dir=f"{run_dir}-{optimizer.__name__}",
            hooks=[hook],
            log_every=3,
            saving=ls.Saving(every=4),
        )
        found.append((hook.skipped, result.loss))
    return found


class Asks(ControlHook):
    """Asks for a save on rank 1 alone, from step 3 on, and notes when all agree on it."""

    def __init__(self) -> None:
        self.agreed: list[int] = []

    def request(self, run: Any) -> Request:
        return Request(save=run.rank == 1 and run.step >= 3 and not self.agreed)

    def on_agreement(self, run: Any, agreed: Request) -> None:
        if agreed.save:
            self.agreed.append(run.step)


def asking(plan: str, run_dir: str) -> list[int]:
    hook = Asks()
    ls.train(steps(steps=6), plan=plan, run_dir=run_dir, hooks=[hook], log_every=100)
    return hook.agreed


class EvaluationWaits(ls.Hook):
    """Counts what the host waits for in each evaluation."""

    def __init__(self) -> None:
        self.waits: list[dict[str, int]] = []

    def before_evaluation(self, run: Any) -> None:
        import standin

        standin.take_counters()

    def after_evaluation(self, run: Any, metrics: dict[str, float]) -> None:
        import standin

        self.waits.append(standin.take_counters().host_waits)


def errors(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return (output - batch[2]).abs().mean(1)


def both(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return output.norm(dim=1), batch[2].norm(dim=1)


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.isfinite().all()
    return float((ours - theirs).abs().sum())


def evaluated(plan: str, run_dir: str) -> tuple[dict[str, float], dict[str, int]]:
    """Return the metrics, and the host's waits in the second evaluation: a pipeline discovers
    shapes in the first."""
    hook = EvaluationWaits()
    metrics = {"error": ls.Mean(errors), "difference": ls.Gathered(both, difference)}
    evaluation = ls.Evaluation(data=rows(37, seed=6), every=1, metrics=metrics)
    given = steps(steps=2, evaluation=evaluation)
    result = ls.train(given, plan=plan, run_dir=run_dir, hooks=[hook], log_every=100)
    return result.metrics, hook.waits[1]


class Puts(nn.Sequential):
    """Writes into a tensor by `put_`, or by what the refusal of that names."""

    def __init__(self, by: str) -> None:
        super().__init__(nn.Linear(6, 3))
        self.by = by

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scores = super().forward(rows)
        places, values = torch.zeros(1, dtype=torch.long, device=rows.device), scores.new_ones(1)
        added = scores.new_zeros(3)
        if self.by == "put_":
            return scores + added.put_(places, values)
        return scores + added.view(-1).index_copy_(0, places, values)


def puts(plan: str, run_dir: str) -> dict[str, str]:
    """Return the error or the fingerprint with each operation."""
    found = {}
    for by in ("put_", "index_copy_"):
        given = steps(model=lambda by=by: Puts(by), tensor=None, steps=2)
        try:
            result = ls.train(given, plan=f"{plan},numerics=bitwise", run_dir=f"{run_dir}-{by}")
            found[by] = result.fingerprint
        except PlanError as error:
            found[by] = str(error)
    return found


class WithSpare(nn.Module):
    """Has parameters that nothing uses, which weight decay must not change."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()
        self.spare = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def with_spare(plan: str, run_dir: str) -> tuple[str, list[dict[str, int]]]:
    """Train with one microbatch a step: other ranks have none."""
    given: dict[str, Any] = {"model": WithSpare, "global_batch": 4, "tensor": None}
    fingerprint, _, _ = train(f"{plan},numerics=bitwise", f"{run_dir}-bitwise", **given)
    return fingerprint, train(plan, f"{run_dir}-fast", **given)[2]


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


def running_statistics(plan: str, run_dir: str) -> list[dict[str, int]]:
    return train(plan, run_dir, model=normalized, tensor=None)[2]


class ReadsBeforeItWrites(nn.Module):
    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.layer, self.reads, self.fills = nn.Linear(6, 3), reads, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.fills.append(torch.utils.deterministic.fill_uninitialized_memory)
        output = self.layer(x)
        return output + torch.empty_like(output) if self.reads else output


def fills(plan: str, run_dir: str) -> list[tuple[list[bool], str]]:
    """Return whether new tensors are filled in each forward and after the run, and the error, of a
    model that does not read one before it writes it and of one that does."""
    found = []
    for reads in (False, True):
        model, error = ReadsBeforeItWrites(reads=reads), ""
        try:
            ls.train(
                steps(model=lambda m=model: m, microbatch=12, steps=3, tensor=None),
                plan=f"{plan},numerics=bitwise",
                run_dir=f"{run_dir}-{reads}",
                log_every=100,
            )
        except LossError as raised:
            error = str(raised)
        flags = [*model.fills, torch.utils.deterministic.fill_uninitialized_memory]
        found.append((flags, error))
    return found


def failing(output: torch.Tensor, batch: Any) -> ls.Sum:
    raise ValueError("on purpose")


def failed_forward(plan: str, run_dir: str) -> str:
    try:
        ls.train(steps(loss=failing), plan=plan, run_dir=run_dir)
    except Exception as error:
        return str(error)
    return "no error"


DONE: dict[Callable[[str, str], Any], list[str]] = {
    bitwise: list(SAME_BITS),
    fast: SMALL,
    loss_scale: ["replicate=1", "replicate=2", "shard=2"],
    asking: ["tensor=2", "pipeline=2"],
    evaluated: ["replicate=1", "replicate=2", "shard=2", "pipeline=2"],
    with_spare: ["replicate=1", "replicate=2", "shard=2"],
    running_statistics: ["shard=2"],
    fills: ["replicate=1"],
    puts: ["replicate=1", "replicate=2"],
    failed_forward: ["pipeline=2"],
}
"""The trainings, and the plans of each. The ranks of a plan do all of them, in this order."""

Found = Callable[[Callable[[str, str], Any], str], list[Any]]


def all_of(plan: str, folder: str) -> dict[str, Any]:
    """Return what each training returns, or its traceback after FAILED."""
    found: dict[str, Any] = {}
    for name in (function.__name__ for function, plans in DONE.items() if plan in plans):
        try:
            found[name] = globals()[name](plan, f"{folder}/{name}")
        except Exception:
            found[name] = (FAILED, traceback.format_exc())
    return found


FAILED = "the training failed"


@pytest.fixture(scope="module")
def found(devices: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each rank returns of a training under a plan."""

    @cache
    def ranks(plan: str) -> list[dict[str, Any]]:
        return devices.run(
            PLANS[plan], on_device, all_of, plan, str(tmp_path_factory.mktemp("all"))
        )

    def of_each_rank(function: Callable[[str, str], Any], plan: str) -> list[Any]:
        answers = [each[function.__name__] for each in ranks(plan)]
        for answer in answers:
            if isinstance(answer, tuple) and answer[0] == FAILED:
                pytest.fail(f"{function.__name__} under {plan}: {answer[1]}", pytrace=False)
        return answers

    return of_each_rank


def plans_of(function: Callable[[str, str], Any]) -> Any:
    return pytest.mark.parametrize("plan", tiered({plan: PLANS[plan] for plan in DONE[function]}))


@plans_of(bitwise)
def test_the_bits_are_those_of_one_process_and_the_host_waits_for_nothing(
    found: Found, plan: str
) -> None:
    ((expected, _, _),) = found(bitwise, "replicate=1")
    assert found(bitwise, plan) == [
        (expected, f"standin:{rank}", [{}, {}]) for rank in range(PLANS[plan])
    ]


@plans_of(fast)
def test_in_fast_numerics_the_host_waits_for_nothing(found: Found, plan: str) -> None:
    waits = [HOST_WAITS.get(plan, {})] * 2
    for by_precision in found(fast, plan):
        assert len(by_precision) == (3 if plan in IN_ALL_PRECISIONS else 1)
        assert by_precision == dict.fromkeys(by_precision, waits)


@plans_of(loss_scale)
def test_a_loss_scale_on_the_device_skips_the_steps_that_one_on_the_host_skips(
    found: Found, plan: str
) -> None:
    for (skipped, loss), (expected, expected_loss) in found(loss_scale, plan):
        assert skipped == expected != []
        assert loss == pytest.approx(expected_loss, rel=1e-3)


def test_a_failed_forward_of_a_stage_is_raised_on_every_rank(found: Found) -> None:
    assert found(failed_forward, "pipeline=2") == [
        "rank 1 of the pipeline failed: ValueError: on purpose",
        "on purpose",
    ]


@plans_of(asking)
def test_ranks_of_an_axis_agree_on_a_request_of_one_a_step_later(found: Found, plan: str) -> None:
    assert found(asking, plan) == [[5], [5]]


@plans_of(evaluated)
def test_an_evaluation_waits_for_the_device_once(found: Found, plan: str) -> None:
    """The last microbatch may be under way when it is taken."""
    for metrics, waits in (everyone := found(evaluated, plan)):
        assert metrics == everyone[0][0]
        others = {name: count for name, count in waits.items() if name != "event.synchronize"}
        assert waits.get("event.synchronize", 0) <= 1
        assert sum(others.values()) <= 1, others


def test_an_operation_that_does_not_repeat_is_refused_and_its_remedy_has_the_bits_of_one_process(
    found: Found,
) -> None:
    everyone = found(puts, "replicate=1") + found(puts, "replicate=2")
    for said in everyone:
        assert "torch has no implementation of put_" in said["put_"]
        assert "index_copy_" in said["put_"]
    assert len({said["index_copy_"] for said in everyone}) == 1


def test_bitwise_fills_new_tensors_in_the_first_step_where_reading_one_is_seen(
    found: Found,
) -> None:
    (((flags, none), (_, error)),) = found(fills, "replicate=1")
    assert (flags[0], flags[-3:], none) == (True, [False, False, True], "")
    assert "after step 0: the loss is nan" in error


def test_the_host_does_not_wait_for_running_statistics(found: Found) -> None:
    assert found(running_statistics, "shard=2") == [[{}, {}]] * 2


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2"])
def test_the_host_does_not_wait_to_know_what_other_ranks_have_used(found: Found, plan: str) -> None:
    ((expected, _),) = found(with_spare, "replicate=1")
    assert found(with_spare, plan) == [(expected, [{EXCHANGES: 1}] * 2)] * 2


# Sums over replicas


class Summed(ls.Hook):
    """Counts the tensors that the latest step has summed over replicas before its backward has
    ended, and after it."""

    def __init__(self) -> None:
        self.during = self.after = 0

    def sum_each(self, world: World, tensors: Any) -> None:
        self.after = len(tensors)
        SUM_EACH(world, tensors)

    def after_backward(self, run: Any, model: nn.Module) -> None:
        scatters = getattr(run.training.modules[0].reducer, "_scatters", [])
        self.during = sum(len(scatter.summed) for scatter in scatters)


SUM_EACH = World.sum_each


def summing(plans: list[str], folder: str) -> list[tuple[float, int, int]]:
    """Return the loss under each plan, and what `Summed` has counted. All tensors are as large as
    tensors that are summed in place."""
    found = []
    for plan in plans:
        hook = Summed()
        with (
            patch.object(comm_world, "IN_PLACE_BYTES", 1),
            patch.object(World, "sum_each", lambda *given, hook=hook: hook.sum_each(*given)),
        ):
            result = ls.train(
                steps(steps=3), plan=plan, run_dir=f"{folder}/{plan}", hooks=[hook], log_every=100
            )
        found.append((result.loss, hook.during, hook.after))
    return found


def test_replicas_sum_in_the_last_backward_or_in_place(
    devices: WorkerPool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = str(tmp_path_factory.mktemp("summing"))
    (((alone, _, _),),) = devices.run(1, on_device, summing, ["replicate=1"], folder)
    plans = ["replicate=2,shard=2", "replicate=2,tensor=2"]
    for found in devices.run(4, on_device, summing, plans, folder):
        loss = pytest.approx(alone, rel=1e-5)
        assert found == [(loss, 6, 0), (loss, 0, 7)]
