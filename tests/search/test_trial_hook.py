"""The hook of a trial: what it tells the search, and when it stops."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.search.request import TrialRequest
from lockstep.search.trial_hook import TrialHook


class Answering:
    """A channel whose other end always says to prune."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, Any]]] = []

    def send(self, kind: str, **fields: Any) -> None:
        self.sent.append((kind, fields))

    def receive(self) -> dict[str, Any]:
        return {"kind": "answer", "prune": True}


@pytest.mark.parametrize(
    ("step", "can_be_pruned", "stops"), [(20, True, True), (20, False, False), (40, True, False)]
)
def test_a_trial_is_pruned_before_its_last_step_only(
    step: int, can_be_pruned: bool, stops: bool
) -> None:
    channel, stopped = Answering(), []
    hook: Any = TrialHook(
        TrialRequest(metric="loss", can_be_pruned=can_be_pruned), channel, number=1
    )  # type: ignore[arg-type]
    hook.after_evaluation(
        SimpleNamespace(step=step, total_steps=40, stop=stopped.append), {"loss": 0.5}
    )
    assert channel.sent == [("report", {"step": step, "value": 0.5})]
    assert stopped == [f"pruned: loss 0.5 after step {step}"] * stops
