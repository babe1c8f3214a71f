"""How long a rank may stand still before somebody asks why, and what happens then. Part of how a run is executed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast, get_args

from lockstep.base.errors import LaunchError
from lockstep.base.units import seconds

OnHang = Literal["end", "report"]
"""`end`: report it, save what is whole, and end with a status of its own. `report`: report it, and go on waiting."""

TIMES = 20.0
LEAST_SECONDS = 60.0
"""Of what a step itself is made of."""
LEAST_SECONDS_OUTSIDE = 300.0
"""Of what disks, networks and users' hooks do, whose time may be odd: data, saves, evaluations."""
FIRST_SECONDS = 540.0
"""Where nothing is known. Gloo and NCCL give up after 600."""
STEADY = ("compute", "exchange", "update")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a phase of a rank may last."""

    fixed_seconds: float | None = None
    """So long, whatever the phase. None: by what it took before."""
    on_hang: OnHang = "end"

    @classmethod
    def parse(cls, after: str | None, on_hang: str | None) -> Patience | None:
        """`after`: "auto" (None is that), "off", or a time; None is returned where it is off. Raises `LaunchError`."""
        if on_hang is not None and on_hang not in get_args(OnHang):
            raise LaunchError(f"--on-hang={on_hang!r}; it is one of {', '.join(get_args(OnHang))}")
        if after == "off":
            return None
        fixed = None if after in (None, "auto") else seconds(str(after), "--hang-after", LaunchError)
        return cls(fixed, cast(OnHang, on_hang or "end"))

    def limit_seconds(self, phase: str, usual_seconds: float | None) -> float:
        """`usual_seconds`: what the phase took of late; None: it has never ended yet."""
        if self.fixed_seconds is not None:
            return self.fixed_seconds
        if usual_seconds is None:
            return FIRST_SECONDS
        return max(LEAST_SECONDS if phase in STEADY else LEAST_SECONDS_OUTSIDE, TIMES * usual_seconds)
