"""Shards on the CPU while their ranks exchange on GPUs. Where there is no GPU, what is moved is
tested with a second device that is none, and the whole run with gradients that are copies. That
CUDA and NCCL take part is tested where there are two GPUs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from model.second_device import ELSEWHERE, SecondDevice, There
from tiers import spread
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard
from training.subjects import recipe

import lockstep as ls
from lockstep.base.errors import PlanError
from lockstep.comm.world import World
from lockstep.model.parallelize import check_plan_devices
from lockstep.model.pipeline.stages import SharedParameter
from lockstep.plan import Plan
from lockstep.testing.pool import WorkerPool
from lockstep.training.optim import gradient_norm
from lockstep.training.reducers.fsdp import OrderedScatter
from lockstep.training.reducers.tied import TiedGradients

PLANS = {"shard=2": 2, "shard=3": 3, "replicate=2,shard=2": 4}
GPU = World(0, 2, 0, 2, ELSEWHERE, owns_group=False)
"""One of two ranks that exchange on the second device. The other has the same tensors."""


def test_on_a_cpu_there_is_nothing_to_offload() -> None:
    with pytest.raises(PlanError) as caught:
        check_plan_devices(Plan(shard=2, offload=True), torch.device("cpu"))
    assert (
        str(caught.value)
        == "offload=yes on a CPU, where parameters already are; it moves them from a GPU; leave "
        "offload=yes out"
    )


def train(plan: str, run_dir: str) -> str:
    return ls.train(
        recipe(global_batch=20, steps=3, clip_norm=0.1), plan=plan, run_dir=run_dir
    ).fingerprint


def train_offloaded(plan: str, run_dir: str) -> tuple[str, int]:
    """As on GPUs, so far as a gradient that FSDP2 moves to the CPU is a copy. (A torch function
    mode would not see its backward.)"""
    unpinned = partial(CPUOffloadPolicy, pin_memory=False)
    to = Tensor.to
    copies = []

    def copied(tensor: Tensor, *given: Any, **settings: Any) -> Tensor:
        moved = to(tensor, *given, **settings)
        if given == (torch.device("cpu"),) and settings == {"non_blocking": False}:
            copies.append(moved)
            return moved.clone()
        return moved

    with (
        patch("lockstep.opening.check_plan_devices"),
        patch("lockstep.model.shard.CPUOffloadPolicy", unpinned),
        patch.object(Tensor, "to", copied),
    ):
        return train(f"{plan},offload=yes", run_dir), len(copies)


@pytest.mark.parametrize(("plan", "numerics"), spread(PLANS, ["fast", "bitwise"], every=2))
def test_gradients_that_are_copies_on_the_cpu_are_the_sum_over_ranks(
    pool: WorkerPool, tmp_path: Path, plan: str, numerics: str
) -> None:
    expected = pool.run(
        PLANS[plan], train, f"{plan},numerics={numerics}", str(tmp_path / "on the device")
    )
    for fingerprint, copies in pool.run(
        PLANS[plan], train_offloaded, f"{plan},numerics={numerics}", str(tmp_path / "offloaded")
    ):
        assert fingerprint == expected[0]
        assert copies


def all_reduced(tensor: Tensor, group: Any = None) -> None:
    assert isinstance(tensor, There)
    tensor.mul_(2)


@pytest.mark.parametrize("bitwise", [False, True])
def test_the_norm_is_exchanged_on_the_device_and_clips_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, bitwise: bool
) -> None:
    monkeypatch.setattr(dist, "all_reduce", all_reduced)
    monkeypatch.setattr(
        World, "gather_rows", lambda _, rows, counts: There(torch.cat([rows.value, rows.value]))
    )
    alone = World(0, 1, 0, 2, ELSEWHERE, owns_group=False)
    mesh: Any = SimpleNamespace(
        larger=Plan(shard=2).larger,
        world=alone,
        shards=lambda: GPU,
        is_expert=lambda gradient: False,
        stages=alone,
        axis=lambda name: GPU if name == "shard" else alone,
    )
    gradients = [torch.tensor([3.0, 4.0]), torch.tensor([[12.0]])]
    with SecondDevice():
        # A gradient's shape is that of the whole, its part that of the shard.
        whole = [
            SimpleNamespace(
                shape=(2 * len(part), *part.shape[1:]),
                _local_tensor=part,
                device_mesh=SimpleNamespace(mesh_dim_names=("shard",)),
                placements=[Shard(0)],
            )
            for part in gradients
        ]
        norm: Any = gradient_norm.GradientNorm(mesh, bitwise=bitwise).of(whole)  # type: ignore[arg-type]
        assert isinstance(norm, There)
        assert norm.item() == pytest.approx(13.0 * 2**0.5)
        gradient_norm.clip(gradients, norm, 13.0)
    assert torch.cat([part.flatten() for part in gradients]).tolist() == pytest.approx(
        [3 / 2**0.5, 4 / 2**0.5, 12 / 2**0.5]
    )


def test_replicas_sum_offloaded_gradients_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", all_reduced)
    parameters = [
        nn.Parameter(torch.zeros(2, 2)),
        nn.Parameter(torch.zeros(3)),
        nn.Parameter(torch.zeros(1)),
    ]
    for parameter in parameters[:2]:
        parameter.grad = torch.ones_like(parameter)
    with SecondDevice() as device:
        GPU.sum_each([parameter.grad for parameter in parameters if parameter.grad is not None])
    assert device.moves == [7, 7]
    assert [p.grad if p.grad is None else p.grad.tolist() for p in parameters] == [
        [[2.0, 2.0], [2.0, 2.0]],
        [2.0, 2.0, 2.0],
        None,
    ]


def test_stages_sum_offloaded_gradients_of_tied_parameters_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[Tensor] = []

    def send(tensor: Tensor, **to: Any) -> None:
        assert isinstance(tensor, There)
        sent.append(tensor.value)

    monkeypatch.setattr(dist, "send", send)
    monkeypatch.setattr(
        dist, "recv", lambda tensor, **source: tensor.copy_(torch.tensor([10.0, 20.0, 1.0]))
    )
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([1.0, 2.0])
    tied = TiedGradients({"weight": parameter}, [SharedParameter("weight", (0, 1))], GPU)
    with SecondDevice():
        tied.sum()
    assert parameter.grad.tolist() == [11.0, 22.0]
    assert [each.tolist() for each in sent] == [[11.0, 22.0, 2.0]]


def test_the_canonical_sum_goes_from_the_device_to_gradients_on_the_cpu() -> None:
    """Where torch has padded them: five rows over two ranks are sent as three each, of which the
    second rank holds two."""
    first, second = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(3))
    frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
    first.grad, second.grad = torch.zeros(2, 2), torch.zeros(3)
    sizes = [torch.Size([3, 2]), torch.Size([4]), torch.Size([3])]
    held = [
        SimpleNamespace(sharded_param=p, padded_sharded_param_size=s)
        for p, s in zip([first, frozen, second], sizes, strict=True)
    ]
    group = SimpleNamespace(fsdp_params=held)
    agreement: Any = SimpleNamespace(over=lambda _: None)
    scatter = OrderedScatter(
        GPU, GPU, group, shards=2, leaves=[], places={}, label="", agreement=agreement
    )
    there = There(torch.arange(9.0))
    with SecondDevice() as device:
        scatter._write_gradients(there)
    assert device.moves == [9]
    assert first.grad.tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert second.grad.tolist() == [6.0, 7.0, 8.0]


def train_on_gpus(plan: str, run_dir: str) -> tuple[str, float, set[str]]:
    places: set[str] = set()

    class Look(ls.Hook):
        def after_step(self, run: Any) -> None:
            places.update(parameter.to_local().device.type for parameter in run.model.parameters())

    average = ls.ExponentialMovingAverage(0.5)
    result = ls.train(
        recipe(global_batch=20, steps=3, clip_norm=0.1),
        plan=plan,
        run_dir=run_dir,
        hooks=[Look(), average],
    )
    return result.fingerprint, result.loss, places


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_gpus_offloaded_runs_learn_the_same(tmp_path: Path) -> None:
    for numerics in ("fast", "bitwise"):
        plan = f"shard=2,numerics={numerics}"
        _, expected, there = ls.spawn(
            train_on_gpus, nproc=2, args=(plan, str(tmp_path / f"{numerics} on the device"))
        )
        fingerprint, loss, here = ls.spawn(
            train_on_gpus,
            nproc=2,
            args=(f"{plan},offload=yes", str(tmp_path / f"{numerics} offloaded")),
        )
        again, _, _ = ls.spawn(
            train_on_gpus,
            nproc=2,
            args=(f"{plan},offload=yes", str(tmp_path / f"{numerics} again")),
        )
        assert (there, here) == ({"cuda"}, {"cpu"})
        assert loss == pytest.approx(expected, rel=1e-4)
        assert fingerprint == again
