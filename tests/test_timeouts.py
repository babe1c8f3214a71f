"""How long a rank may stand still."""

from __future__ import annotations

import pytest

from lockstep.base.errors import LaunchError
from lockstep.options import (
    FIRST_SECONDS,
    LEAST_OTHER_SECONDS,
    LEAST_STEP_SECONDS,
    TIMES_USUAL,
    WatchdogTimeouts,
)


def test_by_itself_it_is_many_times_what_the_phase_took_and_at_least_minutes() -> None:
    timeouts = WatchdogTimeouts.parse(None, None)
    assert timeouts == WatchdogTimeouts.parse("auto", "end") == WatchdogTimeouts()
    assert timeouts is not None
    assert [timeouts.limit_seconds(phase, 0.01) for phase in ("compute", "evaluation")] == [
        LEAST_STEP_SECONDS,
        LEAST_OTHER_SECONDS,
    ]
    assert [timeouts.limit_seconds(phase, 20.0) for phase in ("compute", "evaluation")] == [
        TIMES_USUAL * 20.0
    ] * 2
    assert [timeouts.limit_seconds(phase, None) for phase in ("compute", "evaluation")] == [
        FIRST_SECONDS
    ] * 2


def test_a_time_holds_for_every_phase() -> None:
    timeouts = WatchdogTimeouts.parse("1m30s", "report")
    assert timeouts is not None
    assert (
        timeouts.limit_seconds("data", None),
        timeouts.limit_seconds("compute", 100.0),
        timeouts.on_hang,
    ) == (90.0, 90.0, "report")


def test_off_is_none() -> None:
    assert WatchdogTimeouts.parse("off", None) is None


@pytest.mark.parametrize(
    ("after", "on_hang", "text"),
    [
        ("90", None, "--hang-after='90'; it must be a time with its unit"),
        (None, "wait", "--on-hang='wait'; it must be one of end, report"),
    ],
)
def test_anything_else_is_refused(after: str | None, on_hang: str | None, text: str) -> None:
    with pytest.raises(LaunchError, match=f"^{text}"):
        WatchdogTimeouts.parse(after, on_hang)
