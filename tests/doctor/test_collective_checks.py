"""Which collectives a group is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.doctor import collective_checks
from lockstep.doctor.collective_checks import RankGroup, collective_rows
from lockstep.doctor.coordination import ProbeCoordinator
from lockstep.doctor.expected_results import CollectiveCase


class OneRank:
    """A coordinator of one rank, without a store."""

    def probe(self, name: str) -> Any:
        return torch.no_grad()

    def all_gather(self, value: Any) -> list[Any]:
        return [value]

    def record_error(self, error: Exception) -> None: ...


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], set[str]]:
    """Returns the data types that a group on this backend is asked for."""

    def types(backend: str) -> set[str]:
        found = set()

        def call(case: CollectiveCase, group: RankGroup) -> Tensor:
            found.add(case.data_type.name)
            raise RuntimeError("not run in this test")

        monkeypatch.setattr(collective_checks, "call", call)
        monkeypatch.setattr(collective_checks, "_check_barrier", lambda coordinator, group: [])
        group = RankGroup("all ranks", [0], 0, None, torch.device("cpu"), backend)
        coordinator: ProbeCoordinator = OneRank()  # type: ignore[assignment]
        rows = list(collective_rows(coordinator, group))
        assert all("unsupported" in each for row in rows for each in row["outcomes"].values())
        return found

    return types


def test_nccl_is_not_asked_for_int16_because_it_leaves_its_group_of_calls_open(
    called: Callable[[str], set[str]],
) -> None:
    assert called("gloo") - called("nccl") == {"int16"}
