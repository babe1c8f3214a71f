"""What errors about a plan recommend, on accelerators: each remedy trains the model of one
process."""

from __future__ import annotations

from pathlib import Path

import pytest
from device.ranks import on_device
from device.test_training import steps

import lockstep as ls
from lockstep.base.errors import UserError
from lockstep.testing.pool import WorkerPool

REMEDIES = {
    1: {
        "data_parallel=2": ("use replicate=2, which works on every device", []),
        "data_parallel=2,numerics=bitwise": ("or use replicate=2, which goes with everything", []),
        "split=5": ("each device needs its own GPU; split over 4", ["split=4"]),
        "split=1+1": (
            "the numbers must add up to the layers; correct the plan, or name the layers",
            ["split=3+3"],
        ),
        "offload=yes": ("or leave offload=yes out", ["replicate=1"]),
        "shard=1,offload=yes": ("or leave offload=yes out", ["shard=1"]),
        "replicate=2": (
            "change the plan, or the number of processes to 2",
            ["replicate=1", "replicate=auto"],
        ),
    },
    2: {
        "replicate=2,offload=yes": (
            "give shard two processes or more, or leave",
            ["shard=2,offload=yes", "replicate=2"],
        ),
        "shard=2,offload=yes,numerics=bitwise,threads=2": (
            "leave threads out",
            ["shard=2,offload=yes,numerics=bitwise"],
        ),
        "tensor=2,numerics=bitwise": (
            "write tensor=2,slices=2,numerics=bitwise, with the same slices in each plan",
            ["tensor=2,numerics=bitwise,slices=2", "tensor=2"],
        ),
        "tensor=2,slices=2": (
            "add numerics=bitwise, or leave slices out",
            ["tensor=2,slices=2,numerics=bitwise", "tensor=2"],
        ),
        "expert=2,slices=2,numerics=bitwise": (
            "leave slices out, or use replicate instead of expert",
            ["replicate=2,slices=2,numerics=bitwise"],
        ),
        "replicate=2,slices=2,numerics=bitwise,compile=yes": (
            "leave compile=yes out, or leave slices out",
            ["replicate=2,slices=2,numerics=bitwise"],
        ),
        "pipeline=2,schedule=zero-bubble,checkpointing=selective": (
            "choose checkpointing=full, or schedule=1f1b",
            [
                "pipeline=2,schedule=zero-bubble,checkpointing=full",
                "pipeline=2,schedule=1f1b,checkpointing=selective",
            ],
        ),
        "tensor=2,compile=yes": ("leave compile=yes out, or use replicate and shard", ["tensor=2"]),
        "shard=2,assignment=measured": (
            "leave assignment=measured out, or",
            ["shard=2", "replicate=2,assignment=measured"],
        ),
        "split=2,replicate=2": (
            "leave one of the two out; over processes, pipeline does what",
            ["replicate=2", "pipeline=2"],
        ),
        "data_parallel=2,replicate=2": (
            "over processes, replicate does what data_parallel does",
            ["replicate=2"],
        ),
        "shard=3": ("change the plan, or the number of processes to 3", ["shard=2", "shard=auto"]),
        "replicate=auto,shard=auto": (
            "only one axis can be auto; give the others a size",
            ["replicate=auto,shard=2"],
        ),
    },
}
"""Number of processes -> mistaken plan -> words of the error, and the plans that it recommends."""


def train(plan: str, run_dir: str) -> float:
    return ls.train(steps(steps=2), plan=plan, run_dir=run_dir).loss


def follow(size: int, folder: str) -> list[tuple[str, dict[str, float]]]:
    """Return what is said about each mistake, and the loss under each plan that is recommended."""
    found = []
    for number, (mistake, (_, remedies)) in enumerate(REMEDIES[size].items()):
        said = "nothing"
        try:
            train(mistake, f"{folder}/{number}")
        except UserError as error:
            said = str(error)
        found.append((said, {plan: train(plan, f"{folder}/{number}-{plan}") for plan in remedies}))
    return found


@pytest.mark.parametrize("size", REMEDIES)
def test_the_plans_that_an_error_recommends_train_the_model_of_one_process(
    devices: WorkerPool, tmp_path: Path, size: int
) -> None:
    (expected,) = devices.run(1, on_device, train, "replicate=1", str(tmp_path / "one"))
    everyone = devices.run(size, on_device, follow, size, str(tmp_path / "run"), timeout_seconds=50)
    assert all(found == everyone[0] for found in everyone)
    for (mistake, (words, _)), (said, losses) in zip(
        REMEDIES[size].items(), everyone[0], strict=True
    ):
        assert words in said, mistake
        assert losses == {plan: pytest.approx(expected, rel=1e-4) for plan in losses}, mistake


def on_the_cpu(folder: str) -> tuple[str, float, float]:
    said = "nothing"
    try:
        train("shard=2,offload=yes", f"{folder}/run")
    except UserError as error:
        said = str(error)
    return said, train("shard=2", f"{folder}/run"), train("replicate=2", f"{folder}/other")


def test_offload_on_a_cpu_is_left_out(pool: WorkerPool, tmp_path: Path) -> None:
    for said, sharded, replicated in pool.run(2, on_the_cpu, str(tmp_path)):
        assert said.endswith("leave offload=yes out")
        assert sharded == pytest.approx(replicated, rel=1e-4)
