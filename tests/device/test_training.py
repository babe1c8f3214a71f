"""Training on accelerators: the same model under every plan, and no wait of the host in a step that
does not log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
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

PLANS = {
    "replicate=1": 1,
    "replicate=2": 2,
    "replicate=3": 3,
    "shard=2": 2,
    "shard=3": 3,
    "replicate=2,shard=2": 4,
}
STAGES = {"tensor=2": 2, "split=2": 1, "pipeline=2": 2, "pipeline=2,replicate=2": 4}
HOST_EXCHANGES = {"pipeline=2": 2, "pipeline=2,replicate=2": 2}
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


def of_outputs(output: torch.Tensor, batch: Any) -> ls.Sum:
    return ls.Sum(((output - batch[2]) ** 2).mean(1).sum())


def steps(**changes: Any) -> ls.Recipe:
    given: dict[str, Any] = {
        "loss": of_outputs,
        "weight": lambda batch: len(batch[1]),
        "inputs": lambda batch: batch[1],
    }
    given |= {
        "model": network,
        "optimizer": fused,
        "global_batch": 20,
        "steps": 8,
        "clip_norm": 0.5,
    }
    return recipe(**{**given, "tensor": {"0": "colwise", "3": "rowwise"}, **changes})


EXCHANGES = "exchanges between hosts"


class Waits(ls.Hook):
    """Counts what the host waits for in each step, but for the first: there it sets up, and tries
    the loss."""

    def __init__(self) -> None:
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

    def before_step(self, run: Any) -> None:
        import standin

        waits = standin.take_counters().host_waits
        self.waits.append({**waits, EXCHANGES: self.exchanges} if self.exchanges else waits)
        self.exchanges = 0


def train(plan: str, run_dir: str, **changes: Any) -> tuple[str, str, list[dict[str, int]]]:
    """Return the fingerprint, the device, and the host's waits in each step between the third and
    the last."""
    hook, where = Waits(), []
    with hook.watching_hosts():
        result = ls.train(
            steps(**changes), plan=plan, run_dir=run_dir, hooks=[hook, Where(where)], log_every=100
        )
    return result.fingerprint, where[0], hook.waits[3:]


class Where(ls.Hook):
    def __init__(self, found: list[str]) -> None:
        self.found = found

    def on_start(self, run: Any) -> None:
        self.found.append(str(next(run.model.parameters()).device))


@pytest.fixture(scope="module")
def expected(devices: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The fingerprint of one process."""
    ((fingerprint, device, _),) = devices.run(
        1, on_device, train, "numerics=bitwise", str(tmp_path_factory.mktemp("one") / "run")
    )
    assert device == "standin:0"
    return fingerprint


@pytest.mark.parametrize("plan", tiered(PLANS))
def test_the_bits_are_those_of_one_process_and_the_host_waits_for_nothing(
    devices: WorkerPool, tmp_path: Path, expected: str, plan: str
) -> None:
    everyone = devices.run(
        PLANS[plan], on_device, train, f"{plan},numerics=bitwise", str(tmp_path / "run")
    )
    for rank, (fingerprint, device, waits) in enumerate(everyone):
        assert (fingerprint, device) == (expected, f"standin:{rank}")
        assert waits == [{}] * 5


class ReadsBeforeItWrites(nn.Module):
    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.layer, self.reads, self.fills = nn.Linear(6, 3), reads, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.fills.append(torch.utils.deterministic.fill_uninitialized_memory)
        output = self.layer(x)
        return output + torch.empty_like(output) if self.reads else output


def trained_with(plan: str, run_dir: str, reads: bool) -> tuple[list[bool], str]:
    """Return whether new tensors are filled in each forward and after the run, and the error."""
    model, error = ReadsBeforeItWrites(reads=reads), ""
    changes = {
        "model": lambda: model,
        "global_batch": 20,
        "microbatch": 20,
        "steps": 3,
        "tensor": None,
    }
    try:
        train(plan, run_dir, **changes)
    except LossError as raised:
        error = str(raised)
    return [*model.fills, torch.utils.deterministic.fill_uninitialized_memory], error


def test_bitwise_fills_new_tensors_in_the_first_step_where_reading_one_is_seen(
    devices: WorkerPool, tmp_path: Path
) -> None:
    ((fills, error),) = devices.run(
        1, on_device, trained_with, "numerics=bitwise", str(tmp_path / "right"), False
    )
    assert (fills[0], fills[-3:], error) == (True, [False, False, True], "")
    ((_, error),) = devices.run(
        1, on_device, trained_with, "numerics=bitwise", str(tmp_path / "reads"), True
    )
    assert "after step 0: the loss is nan" in error


@pytest.mark.parametrize("plan", tiered({**PLANS, **STAGES}))
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_in_fast_numerics_the_host_waits_for_nothing(
    devices: WorkerPool, tmp_path: Path, plan: str, precision: str
) -> None:
    everyone = devices.run(
        {**PLANS, **STAGES}[plan], on_device, train_in, precision, plan, str(tmp_path / "run")
    )
    exchanges = HOST_EXCHANGES.get(plan)
    for _, _, waits in everyone:
        assert waits == [{} if exchanges is None else {EXCHANGES: exchanges}] * 5


def train_in(precision: str, plan: str, run_dir: str) -> Any:
    return train(plan, run_dir, precision=precision)


class Summed(ls.Hook):
    """Counts the tensors that the latest step has summed over replicas before its backward has
    ended, and after it."""

    def __init__(self) -> None:
        self.during = self.after = 0

    def on_start(self, run: Any) -> None:
        original = World.sum_each

        def noting(world: World, tensors: Any) -> None:
            self.after = len(tensors)
            original(world, tensors)

        World.sum_each = noting  # type: ignore[method-assign]

    def after_backward(self, run: Any, model: nn.Module) -> None:
        scatters = getattr(run.training.modules[0].reducer, "_scatters", [])
        self.during = sum(len(scatter.summed) for scatter in scatters)

    def on_end(self, run: Any) -> None:
        World.sum_each = SUM_EACH  # type: ignore[method-assign]


SUM_EACH = World.sum_each


def train_summing(plan: str, run_dir: str) -> tuple[float, int, int]:
    """Return the loss, and what `Summed` has counted. All tensors are as large as those that are
    summed in place."""
    hook = Summed()
    with patch.object(comm_world, "IN_PLACE_BYTES", 1):
        result = ls.train(steps(), plan=plan, run_dir=run_dir, hooks=[hook], log_every=100)
    return result.loss, hook.during, hook.after


@pytest.mark.parametrize(
    ("plan", "during", "after"), [("replicate=2,shard=2", 6, 0), ("replicate=2,tensor=2", 0, 7)]
)
def test_replicas_sum_in_the_last_backward_or_in_place(
    devices: WorkerPool, tmp_path: Path, plan: str, during: int, after: int
) -> None:
    ((alone, _, _),) = devices.run(
        1, on_device, train_summing, "replicate=1", str(tmp_path / "alone")
    )
    for found in devices.run(4, on_device, train_summing, plan, str(tmp_path / "run")):
        assert found == (pytest.approx(alone, rel=1e-5), during, after)


class Overflows(ls.Hook):
    def __init__(self) -> None:
        self.skipped: list[int] = []

    def on_event(self, run: Any, event: Any) -> None:
        if event.name == "step-skipped":
            self.skipped.append(event.step)


def overflowing(output: torch.Tensor, batch: Any) -> ls.Sum:
    return ls.Sum(300 * ((output - batch[2]) ** 2).mean(1).sum())


def train_fp16(plan: str, run_dir: str, is_fused: bool) -> tuple[str, list[int], float]:
    """Return the fingerprint, the steps that were skipped, and the loss scale that was saved."""
    hook = Overflows()
    optimizer = fused if is_fused else foreach
    given = steps(precision="fp16", loss=overflowing, optimizer=optimizer)
    result = ls.train(
        given, plan=plan, run_dir=run_dir, hooks=[hook], log_every=3, saving=ls.Saving(every=4)
    )
    return result.fingerprint, hook.skipped, result.loss


def foreach(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


@pytest.mark.parametrize("plan", ["replicate=1", "replicate=2", "shard=2"])
def test_a_loss_scale_on_the_device_skips_the_steps_that_one_on_the_host_skips(
    devices: WorkerPool, tmp_path: Path, plan: str
) -> None:
    ranks = PLANS[plan]
    on_the_device = devices.run(ranks, on_device, train_fp16, plan, str(tmp_path / "device"), True)
    on_the_host = devices.run(ranks, on_device, train_fp16, plan, str(tmp_path / "host"), False)
    for (_, skipped, loss), (_, expected, expected_loss) in zip(
        on_the_device, on_the_host, strict=True
    ):
        assert skipped == expected != []
        assert loss == pytest.approx(expected_loss, rel=1e-3)


def failing(output: torch.Tensor, batch: Any) -> ls.Sum:
    raise ValueError("on purpose")


def train_failing(run_dir: str) -> str:
    try:
        ls.train(steps(loss=failing), plan="pipeline=2", run_dir=run_dir)
    except Exception as error:
        return str(error)
    return "no error"


def test_a_failed_forward_of_a_stage_is_raised_on_every_rank(
    devices: WorkerPool, tmp_path: Path
) -> None:
    first, last = devices.run(2, on_device, train_failing, str(tmp_path / "run"))
    assert last == "on purpose"
    assert first == "rank 1 of the pipeline failed: ValueError: on purpose"


class Asks(ControlHook):
    """Asks for a save on rank 1 alone, from step 3 on, and notes when all agree on it."""

    def __init__(self) -> None:
        self.agreed: list[int] = []

    def request(self, run: Any) -> Request:
        return Request(save=run.rank == 1 and run.step >= 3 and not self.agreed)

    def on_agreement(self, run: Any, agreed: Request) -> None:
        if agreed.save:
            self.agreed.append(run.step)


def train_asking(plan: str, run_dir: str) -> list[int]:
    hook = Asks()
    ls.train(steps(), plan=plan, run_dir=run_dir, hooks=[hook], log_every=100)
    return hook.agreed


@pytest.mark.parametrize("plan", ["tensor=2", "pipeline=2"])
def test_ranks_of_an_axis_agree_on_a_request_of_one_a_step_later(
    devices: WorkerPool, tmp_path: Path, plan: str
) -> None:
    first, second = devices.run(2, on_device, train_asking, plan, str(tmp_path / "run"))
    assert first == second == [5]


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


def evaluated(plan: str, run_dir: str) -> tuple[dict[str, float], list[dict[str, int]]]:
    hook = EvaluationWaits()
    metrics = {"error": ls.Mean(errors), "difference": ls.Gathered(both, difference)}
    given = steps(
        steps=4, evaluation=ls.Evaluation(data=rows(37, seed=6), every=2, metrics=metrics)
    )
    result = ls.train(given, plan=plan, run_dir=run_dir, hooks=[hook], log_every=100)
    return result.metrics, hook.waits


@pytest.mark.parametrize("plan", ["replicate=1", "replicate=2", "shard=2", "pipeline=2"])
def test_an_evaluation_waits_for_the_device_once(
    devices: WorkerPool, tmp_path: Path, plan: str
) -> None:
    """The second one: a pipeline discovers shapes in the first. The last microbatch may be under
    way when taken."""
    ranks = {**PLANS, **STAGES}[plan]
    everyone = devices.run(ranks, on_device, evaluated, plan, str(tmp_path / "run"))
    for metrics, waits in everyone:
        assert metrics == everyone[0][0]
        assert waits[-1].pop("event.synchronize", 0) <= 1
        assert sum(waits[-1].values()) <= 1, waits[-1]


class Puts(nn.Sequential):
    """Writes into a tensor by `put_`, or by what the refusal of that names."""

    def __init__(self, by: str) -> None:
        super().__init__(nn.Linear(6, 3))
        self.by = by

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scores = super().forward(rows)
        places, values = torch.zeros(1, dtype=torch.long, device=rows.device), scores.new_ones(1)
        added = scores.new_zeros(3)
        added = (
            added.put_(places, values)
            if self.by == "put_"
            else added.view(-1).index_copy_(0, places, values)
        )
        return scores + added


def puts(by: str, plan: str, run_dir: str) -> str:
    try:
        return ls.train(
            steps(model=lambda: Puts(by), tensor=None), plan=plan, run_dir=run_dir
        ).fingerprint
    except PlanError as error:
        return str(error)


def test_an_operation_that_does_not_repeat_is_refused_in_the_words_of_the_plan(
    devices: WorkerPool, tmp_path: Path
) -> None:
    found: dict[str, list[str]] = {"put_": [], "index_copy_": []}
    for ranks in (1, 2):
        plan = f"replicate={ranks},numerics=bitwise"
        for by in found:
            found[by] += devices.run(
                ranks, on_device, puts, by, plan, str(tmp_path / f"{by}-{ranks}")
            )
    assert all(
        "torch has no implementation of put_" in text and "index_copy_" in text
        for text in found["put_"]
    )
    assert len(set(found["index_copy_"])) == 1


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


def train_normalized(plan: str, run_dir: str) -> list[dict[str, int]]:
    return train(plan, run_dir, model=normalized, tensor=None)[2]


def test_the_host_does_not_wait_for_running_statistics(devices: WorkerPool, tmp_path: Path) -> None:
    assert (
        devices.run(2, on_device, train_normalized, "shard=2", str(tmp_path / "run"))
        == [[{}] * 5] * 2
    )


class WithSpare(nn.Module):
    """Has parameters that nothing uses, which weight decay must not change."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()
        self.spare = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def train_with_spare(plan: str, run_dir: str) -> tuple[str, list[dict[str, int]]]:
    """Train with one microbatch a step: other ranks have none."""
    given: dict[str, Any] = {"model": WithSpare, "global_batch": 4, "tensor": None}
    fingerprint, _, _ = train(f"{plan},numerics=bitwise", f"{run_dir}/bitwise", **given)
    return fingerprint, train(plan, f"{run_dir}/fast", **given)[2]


def test_the_host_does_not_wait_to_know_what_other_ranks_have_used(
    devices: WorkerPool, tmp_path: Path
) -> None:
    ((expected, _),) = devices.run(
        1, on_device, train_with_spare, "replicate=1", str(tmp_path / "one")
    )
    for plan in ("replicate=2", "shard=2"):
        for fingerprint, waits in devices.run(
            2, on_device, train_with_spare, plan, str(tmp_path / plan)
        ):
            assert fingerprint == expected
            assert waits == [{EXCHANGES: 1}] * 5
