"""How long a rank may make no progress before the watchdog acts, and what it does then. Part of how a run is executed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast, get_args

from lockstep.base.errors import LaunchError
from lockstep.base.units import seconds

OnHang = Literal["end", "report"]
"""`end`: report the hang, save the last whole step, and end with an exit status of its own. `report`: report it and wait on."""

TIMES_USUAL = 20.0
"""A phase may take this many times what it usually takes."""
LEAST_STEP_SECONDS = 60.0
"""Smallest timeout of `STEP_PHASES`."""
LEAST_OTHER_SECONDS = 300.0
"""Smallest timeout of all other phases. Data, saves and evaluations depend on disks, networks and users' code, whose times vary."""
FIRST_SECONDS = 540.0
"""Timeout of a phase that has never ended yet. Gloo and NCCL give up after 600 seconds."""
STEP_PHASES = ("compute", "exchange", "update")


@dataclass(frozen=True, slots=True)
class WatchdogTimeouts:
    """How long each phase of a rank may last."""

    fixed_seconds: float | None = None
    """The timeout of every phase. None: a multiple of what the phase usually takes."""
    on_hang: OnHang = "end"

    @classmethod
    def parse(cls, hang_after: str | None, on_hang: str | None) -> WatchdogTimeouts | None:
        """Read the values of `--hang-after` and `--on-hang`. Return None for "off". Raises `LaunchError`.

        `hang_after`: "auto" (also None), "off", or a time. `on_hang`: see `OnHang`; None is "end".
        """
        if on_hang is not None and on_hang not in get_args(OnHang):
            raise LaunchError(f"--on-hang={on_hang!r}; it is one of {', '.join(get_args(OnHang))}")
        if hang_after == "off":
            return None
        fixed = None if hang_after in (None, "auto") else seconds(str(hang_after), "--hang-after", LaunchError)
        return cls(fixed, cast(OnHang, on_hang or "end"))

    def limit_seconds(self, phase: str, usual_seconds: float | None) -> float:
        """The timeout of a phase. `usual_seconds`: how long it took recently; None if it has never ended yet."""
        if self.fixed_seconds is not None:
            return self.fixed_seconds
        if usual_seconds is None:
            return FIRST_SECONDS
        return max(LEAST_STEP_SECONDS if phase in STEP_PHASES else LEAST_OTHER_SECONDS, TIMES_USUAL * usual_seconds)
