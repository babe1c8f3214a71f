"""The request of `lockstep verify` to a run that it starts, as environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.base.errors import LaunchError

FOLDER = "LOCKSTEP_TRACE"
STEPS = "LOCKSTEP_TRACE_STEPS"
NOISE = "LOCKSTEP_TRACE_NOISE"
FLOAT64 = "LOCKSTEP_TRACE_FLOAT64"
MICROBATCH = "LOCKSTEP_TRACE_MICROBATCH"
EVAL_MODE = "LOCKSTEP_TRACE_EVAL_MODE"
EXACT = "LOCKSTEP_TRACE_EXACT"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tracing:
    """The content of a run's trace, and the changes to the run. `lockstep verify` makes one for each run; the probe reads it."""

    folder: Path
    """The folder of the trace, which exists."""
    steps: int | None = None
    """Commits of each pair after which the process ends, with status 0. None: the run goes on to its own end."""
    noise: int | None = None
    """A noise twin: the seed of its noise. None: no noise."""
    float64: bool = False
    """True if the model is converted to float64, and all that follows it."""
    microbatch: int | None = None
    """Samples in a microbatch, instead of the recipe's. None: the recipe's."""
    eval_mode: bool = False
    """True if the model trains in eval mode: no dropout, and BatchNorm by its running statistics."""
    exact: bool = False
    """True if gradients are sent uncompressed, whatever the recipe's `gradient_compression`."""

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Tracing | None:
        """None where LOCKSTEP_TRACE is not set. Raises `LaunchError` for a value that is none, and for the others without it."""
        if FOLDER not in environ:
            stray = [name for name in (STEPS, NOISE, FLOAT64, MICROBATCH, EVAL_MODE, EXACT) if name in environ]
            if stray:
                raise LaunchError(f"{stray[0]}={environ[stray[0]]} without {FOLDER}; lockstep verify sets both; unset {stray[0]}")
            return None
        return cls(
            folder=Path(environ[FOLDER]),
            steps=_whole(environ, STEPS, least=1),
            noise=_whole(environ, NOISE, least=0),
            float64=_switch(environ, FLOAT64),
            microbatch=_whole(environ, MICROBATCH, least=1),
            eval_mode=_switch(environ, EVAL_MODE),
            exact=_switch(environ, EXACT),
        )

    def variables(self) -> dict[str, str]:
        """Return the environment variables that `read` reads."""
        given: dict[str, object | None] = {
            "LOCKSTEP_PROBE": "lockstep.verify.probe",
            FOLDER: self.folder,
            STEPS: self.steps,
            NOISE: self.noise,
            FLOAT64: 1 if self.float64 else None,
            MICROBATCH: self.microbatch,
            EVAL_MODE: 1 if self.eval_mode else None,
            EXACT: 1 if self.exact else None,
        }
        return {name: str(value) for name, value in given.items() if value is not None}


def _whole(environ: Mapping[str, str], name: str, *, least: int) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < least:
        raise LaunchError(f"{name}={text!r}; it is a whole number of at least {least}; unset it: lockstep verify sets it")
    return int(text)


def _switch(environ: Mapping[str, str], name: str) -> bool:
    if environ.get(name, "0") not in ("0", "1"):
        raise LaunchError(f"{name}={environ[name]!r}; it is 1 or 0; unset it: lockstep verify sets it")
    return environ.get(name) == "1"
