"""The values in the manifest of a checkpoint that others have written: restored, or damage."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from hostile.folders import mutated
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.base.dtypes import tensor_spec
from lockstep.base.errors import CheckpointError, DataError
from lockstep.checkpoint.manifest import DamagedError, Manifest
from lockstep.comm.world import World
from lockstep.data.digests import check_unchanged
from lockstep.data.positions import MixturePosition, PackedPosition, ShardPosition, beginning
from lockstep.training.microbatches import positions_in
from lockstep.training.state import damage_in, restore, state_of
from lockstep.training.training import LoopState


class Kept:
    """A state with all that a checkpoint can hold."""

    def state_dict(self) -> dict[str, Any]:
        return {
            "rows": torch.ones(3),
            "pair": (1, 2.0),
            5: float("nan"),
            "array": torch.ones(2).numpy(),
        }

    def load_state_dict(self, state: Any) -> None:
        pass


class Given:
    """Reads values, and the tensors of a run."""

    def __init__(self, values: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.manifest = Manifest(step=1, files={}, values=values, metadata={})
        self.tensors = {name: tensor_spec(tensor) for name, tensor in tensors.items()}

    def load_into(self, state: Mapping[str, Tensor], world: World) -> None:
        for tensor in state.values():
            tensor.zero_()


def test_any_values_are_restored_or_damage(tmp_path: Path) -> None:
    with ls.Session(run_dir=str(tmp_path / "run"), precision="bf16") as session:
        session.prepare(
            lambda: nn.Linear(2, 1),
            lambda model: torch.optim.AdamW(model.parameters()),
            schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
        )
        for step in session.steps(TensorDataset(torch.ones(4, 2)), global_batch=4, steps=1):
            step.compute(lambda batch: batch[0], lambda output, batch: output.mean())
            step.commit()
        modules, others, mesh = (
            session.run.training.modules,
            {"kept": Kept()},
            session.run.context.mesh,
        )
        state = state_of(modules, others)
        text, chance, counts = json.dumps(state.values), random.Random(0), Counter[str]()
        for _ in range(1500):
            values = mutated(json.loads(text), chance)
            if not isinstance(values, dict):
                continue
            try:
                restore(Given(values, state.tensors), modules, others, mesh)
            except (DamagedError, CheckpointError):
                counts["refused"] += 1
            else:
                counts["restored"] += 1
        assert min(counts["refused"], counts["restored"]) > 100
        restore(Given(state.values, state.tensors), modules, others, mesh)


def test_any_position_in_the_data_is_taken_up_or_damage() -> None:
    digests = {"sample 0": {"[0]": "1f", "[1]": "2e"}}
    plain = ls.Stream(iter, shards=2)
    stream = ls.Stream.mix({"a": plain, "b": ls.pack(plain, 8)}, weights={"a": 1, "b": 2})
    mixed = MixturePosition(7, {"a": ShardPosition(1, 2), "b": PackedPosition(ShardPosition(), 5)})
    saved = LoopState(
        loops=2,
        steps_before=3,
        shards={"0": beginning(stream), "1": mixed},
        data={"2": digests},
    )
    text, chance, counts = json.dumps(saved.values()), random.Random(0), Counter[str]()
    for _ in range(3000):
        values = mutated(json.loads(text), chance)
        if not isinstance(values, dict):
            continue
        try:
            with damage_in("the values"):
                LoopState.check(values, 7)
            state = LoopState(loops=1, resumed={**values, "step": 7})
            assert state.begin_loop(3) >= 0
            positions_in(values, stream)
            check_unchanged("data", values["data"].get("2", {}), digests)
        except (DamagedError, CheckpointError, DataError):
            counts["refused"] += 1
        else:
            counts["taken up"] += 1
    assert min(counts["refused"], counts["taken up"]) > 50, counts
