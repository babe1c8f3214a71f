"""What is said of the machine before training."""

from __future__ import annotations

import pytest
from worlds import ALONE

from lockstep.base.errors import LaunchError
from lockstep.comm.mesh import Mesh
from lockstep.plan import Plan
from lockstep.training.set_up import NEWEST_TESTED_TORCH, check_torch, remarks, untested_torch

NEWEST = ".".join(map(str, NEWEST_TESTED_TORCH))


@pytest.mark.parametrize("version", ["2.13.0+cpu", f"{NEWEST}.0", f"{NEWEST}.1+cu132"])
def test_a_tested_torch_is_not_mentioned(version: str) -> None:
    assert untested_torch(version) is None


def test_an_older_torch_than_lockstep_works_on_is_refused() -> None:
    check_torch("2.13.0+cpu")
    with pytest.raises(
        LaunchError,
        match=(
            r"torch 2\.12\.1\+cu130; lockstep needs torch 2\.13 or newer; pip install"
            r" 'torch>=2\.13'"
        ),
    ):
        check_torch("2.12.1+cu130")


@pytest.mark.parametrize("version", [f"2.{NEWEST_TESTED_TORCH[1] + 1}.0a0+git12ab", "3.0.0"])
def test_a_newer_torch_is_an_event_and_a_warning(version: str) -> None:
    remark = untested_torch(version)
    assert remark is not None
    assert (remark.event, remark.details) == (
        "untested-torch",
        {"torch": version, "newest_tested": NEWEST},
    )
    expected = (
        f"warning: torch {version} is newer than {NEWEST}, the newest that lockstep is tested with;"
        " lockstep verify shows whether it"
    )
    assert remark.line == f"{expected} trains the same model"


@pytest.mark.parametrize(
    ("text", "is_said"),
    [
        ("compile=yes,checkpointing=selective", True),
        ("compile=yes,checkpointing=full", False),
        ("compile=yes", False),
        ("checkpointing=selective", False),
    ],
)
def test_selective_checkpointing_of_compiled_code_is_said_to_recompute_everything(
    text: str, is_said: bool
) -> None:
    plan = Plan.parse(text).resolve(1)
    mesh = Mesh.of(ALONE, plan)
    assert (
        "selective-as-full" in [remark.event for remark in remarks(plan, mesh, "fp32")]
    ) is is_said
