"""The request of an audit: environment variables carry it to every process that the script starts.
No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.base.errors import LaunchError
from lockstep.base.parent import die_with_parent

_FOLDER = "LOCKSTEP_AUDIT"
_STEPS = "LOCKSTEP_AUDIT_STEPS"
_ROOTS = "LOCKSTEP_AUDIT_ROOTS"
_PERTURB = "LOCKSTEP_AUDIT_PERTURB"
_RUNNER = "LOCKSTEP_AUDIT_RUNNER"
_LAUNCHER = "LOCKSTEP_AUDIT_LAUNCHER"
_REMEDY = "unset it: lockstep audit sets it"


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditRequest:
    """The records that an audit asks of a process."""

    folder: Path
    """Folder of the records, which exists."""
    steps: int
    """Optimizer steps after which each process ends, with status 0."""
    roots: list[str]
    """Directories of the user's own code: that of the script, or for a module the working
    directory."""
    runner: int = 0
    """Process id of `lockstep audit`. 0: none."""
    perturb: int = 0
    """Seed of noise of one unit in the last place on the initial parameters. 0: none."""

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> AuditRequest | None:
        """Return None without LOCKSTEP_AUDIT. Raises `LaunchError` for an invalid value, and for a
        stray variable."""
        if _FOLDER not in environ:
            if stray := next(
                (name for name in (_STEPS, _ROOTS, _RUNNER, _PERTURB) if name in environ), None
            ):
                raise LaunchError(
                    f"{stray}={environ[stray]} without {_FOLDER}; lockstep audit sets both; unset"
                    f" {stray}"
                )
            return None
        return cls(
            folder=Path(environ[_FOLDER]),
            steps=_number(environ, _STEPS, 1),
            roots=_names(environ, _ROOTS),
            runner=_number(environ, _RUNNER, 0),
            perturb=_number(environ, _PERTURB, 0) if _PERTURB in environ else 0,
        )

    @property
    def marker(self) -> str:
        """The entry of the environment by which the processes of this audit are told from
        others."""
        return f"{_FOLDER}={self.folder}"

    def variables(self) -> dict[str, str]:
        """Return the environment variables that `read` reads."""
        numbers = {_STEPS: self.steps, _RUNNER: self.runner, _PERTURB: self.perturb}
        return {
            _FOLDER: str(self.folder),
            _ROOTS: json.dumps(self.roots),
            **{name: str(value) for name, value in numbers.items()},
        }

    def die_with_launcher(self, environ: MutableMapping[str, str]) -> None:
        """Have the kernel end this process with its parent, if that is `lockstep audit` or the
        process that it started. Linux only.

        Called in each process before the script: so a killed audit leaves no rank behind. Processes
        that ranks start are not tied: the kernel would end them with the thread that started them.
        """
        parent = os.getppid()
        if parent == self.runner:
            die_with_parent(parent)
            environ[_LAUNCHER] = str(os.getpid())
        elif environ.get(_LAUNCHER) == str(parent):
            die_with_parent(parent)


def _number(environ: Mapping[str, str], name: str, least: int) -> int:
    text = environ.get(name, "")
    if not text.isdecimal() or int(text) < least:
        raise LaunchError(f"{name}={text!r}; it is a whole number of at least {least}; {_REMEDY}")
    return int(text)


def _names(environ: Mapping[str, str], name: str) -> list[str]:
    text = environ.get(name, "")
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise LaunchError(f"{name}={text!r}; it is a JSON list of directories; {_REMEDY}")
    return found
