"""A pool of workers that compute on the stand-in accelerator (tests/stand_in)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from stand_in import build

from lockstep.testing.pool import WorkerPool

DEVICES = 4
FOLDER = Path(__file__).parent
PRELOADED = (
    "lockstep.run",
    "lockstep.model.pipeline.stage",
    "torch.distributed.checkpoint",
    "lockstep.launch.run_workers",
    "lockstep.launch.worker",
    "lockstep.cli.main",
)
"""What trainings import, and commands that are forks (`ranks.command`)."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give whichever test comes first the time to build the device."""
    for item in items:
        if item.path.parent == FOLDER:
            item.add_marker(pytest.mark.timeout(240))


class DevicePool(WorkerPool):
    """Its workers inherit the device from the process that they are forks of."""

    def _start(self) -> None:
        with (
            patch.dict(os.environ, build.environment(DEVICES)),
            patch.object(sys, "path", [str(build.PATH), *sys.path]),
        ):
            super()._start()

    def run(self, *args: Any, **keywords: Any) -> list[Any]:
        with patch.dict(os.environ, STAND_IN_DEVICES=str(DEVICES)):
            return super().run(*args, **keywords)


@pytest.fixture(scope="session")
def devices() -> Iterator[WorkerPool]:
    with DevicePool(max_workers=4, preload=PRELOADED) as pool:
        yield pool
