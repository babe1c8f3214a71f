"""The order in which a sharded model's blocks are gathered, and that each is on its way while the
one before it computes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import spread
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from training.subjects import FEATURES, OUTPUTS, recipe, rows

import lockstep as ls
from lockstep.testing.pool import WorkerPool

ORDERS = {
    "in order": ([0, 1, 2, 3], [0, 1, 2, 3]),
    "some leave blocks out": ([0, 1, 2, 3], [0, 3]),
    "some leave the last ones out": ([0, 1, 2, 3], [0]),
    "a block is run again after the next": ([0, 2, 1, 3], [0, 2, 1, 3]),
    "all blocks are run twice": ([0, 1, 2, 3] * 2, [0, 1, 2, 3] * 2),
}
"""The blocks that even and odd microbatches run."""
SETTINGS = {"sharding=full": 2, "sharding=gradients": 2, "checkpointing=full": 3}
"""And the processes."""
on_their_way: tuple[list[set[int]], list[set[int]]] = ([], [])
"""Which blocks were, after each in forwards, and before each in backwards."""


def gathering(blocks: Sequence[nn.Module]) -> set[int]:
    """The blocks whose parameters have been asked for, without waiting, and not been used yet."""
    groups: dict[int, Any] = {
        place: block._get_fsdp_state()
        for place, block in enumerate(blocks)
        if isinstance(block, FSDPModule)
    }
    results = {place: state._fsdp_param_group._all_gather_result for place, state in groups.items()}
    return {
        place
        for place, result in results.items()
        if result is not None and result.all_gather_work is not None
    }


class Stack(nn.Module):
    def __init__(self, order: str) -> None:
        super().__init__()
        self.orders = ORDERS[order]
        self.blocks = nn.ModuleList([nn.Linear(FEATURES, FEATURES) for _ in range(4)])
        self.head = nn.Linear(FEATURES, OUTPUTS)

    def forward(self, index: Tensor, x: Tensor) -> Tensor:
        for place in self.orders[int(index[0]) % 2]:
            x = torch.tanh(self.blocks[place](x))
            on_their_way[0].append(gathering(self.blocks))
            if x.requires_grad:
                x.register_hook(lambda _: on_their_way[1].append(gathering(self.blocks)))
        return self.head(x)


class NothingIsLeft(ls.Hook):
    """After a forward without a backward, which would clear what nobody has used."""

    def after_evaluation(self, run: Any, metrics: Any) -> None:
        assert gathering(run.model.blocks) == set()


def train(
    order: str, plan: str, run_dir: str
) -> tuple[str, float, tuple[list[set[int]], list[set[int]]]]:
    evaluation = ls.Evaluation(data=rows(8, seed=9), every=1, metrics={})
    described = recipe(
        model=lambda: Stack(order),
        inputs=lambda batch: (batch[0], batch[1]),
        loss=lambda output, batch: ((output - batch[2]) ** 2).mean(),
        evaluation=evaluation,
        global_batch=20,
        clip_norm=0.1,
    )
    result = ls.train(
        described, plan=f"{plan},numerics=bitwise", run_dir=run_dir, hooks=[NothingIsLeft()]
    )
    return result.fingerprint, result.metrics["loss"], on_their_way


@pytest.mark.parametrize(("order", "setting"), spread(ORDERS, SETTINGS, every=3))
def test_gathering_a_block_ahead_changes_no_bit(
    pool: WorkerPool, tmp_path: Path, order: str, setting: str
) -> None:
    (alone,) = pool.run(1, train, order, "replicate=1", str(tmp_path / "alone"))
    size = SETTINGS[setting]
    for fingerprint, loss, _ in pool.run(
        size, train, order, f"shard={size},{setting}", str(tmp_path / "sharded")
    ):
        assert (fingerprint, loss) == alone[:2]


def test_a_block_is_on_its_way_while_the_one_before_it_computes(
    pool: WorkerPool, tmp_path: Path
) -> None:
    for _, _, (forwards, backwards) in pool.run(
        2, train, "in order", "shard=2", str(tmp_path / "run")
    ):
        assert len(forwards) > len(backwards) >= 4
        assert forwards == [{1}, {2}, {3}, set()] * (len(forwards) // 4)
        assert backwards == [{3}, {2}, {1}, {0}] * (len(backwards) // 4)
