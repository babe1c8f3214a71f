"""Storages that a test opens are closed at its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from search.storages import Open, end_as_killed, request

from lockstep.search.study import TrialStorage


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Open]:
    """Open the storage of a search in a folder of the test's."""
    opened: list[TrialStorage] = []

    def open_storage(folder: str = "search", **changes: Any) -> TrialStorage:
        opened.append(TrialStorage(request(tmp_path / folder, **changes)))
        return opened[-1]

    yield open_storage
    for each in opened:
        end_as_killed(each)
