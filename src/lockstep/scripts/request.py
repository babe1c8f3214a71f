"""A command's request to the processes that run the script. The request is a JSON file, whose path
is in an environment variable. The request names a module and the function in it that answers the
request. `install` returns the overrides and hooks of a run. `train(recipe)` is called in place of
`ls.train`. The module does not import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from lockstep.base.errors import LaunchError
from lockstep.base.files import from_json, parse_object, write_atomically
from lockstep.options import variable

REQUEST = variable("request")
FILE = "request.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptRequest:
    """A request of a `lockstep` command to the processes that run the user's script. Each command
    has a subclass of the request."""

    answered_by: ClassVar[str]
    calls: str = ""
    """The function of the module `answered_by`: `install`, `train`, or empty if no function is
    called."""

    def write(self, folder: Path) -> dict[str, str]:
        """Write the request. Returns the environment variable with its path."""
        return write_request(folder, self.as_json())

    def as_json(self) -> dict[str, Any]:
        return {"answered_by": self.answered_by, **asdict(self)}

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Self | None:
        """Return None if the request to this process belongs to another command."""
        found = _read(environ)
        if found is None or found.pop("answered_by") != cls.answered_by:
            return None
        try:
            return from_json(cls, found)
        except ValueError as error:
            raise _damaged(environ, error) from None


def write_request(folder: Path, request: Mapping[str, Any]) -> dict[str, str]:
    write_atomically(folder / FILE, json.dumps(request, default=str))
    return {REQUEST: str(folder / FILE)}


def answered_by(environ: Mapping[str, str], *calls: str) -> str | None:
    found = _read(environ)
    return None if found is None or found["calls"] not in calls else found["answered_by"]


def _read(environ: Mapping[str, str]) -> dict[str, Any] | None:
    if REQUEST not in environ:
        return None
    try:
        found = parse_object(Path(environ[REQUEST]).read_text(encoding="utf-8"))
        if not all(isinstance(found.get(name), str) for name in ("answered_by", "calls")):
            raise ValueError("it does not name the module that answers it")
    except (OSError, ValueError) as error:
        raise _damaged(environ, error) from None
    return found


def _damaged(environ: Mapping[str, str], error: Exception) -> LaunchError:
    why = error.strerror if isinstance(error, OSError) else error
    return LaunchError(
        f"{REQUEST}={environ[REQUEST]} is no request ({why}); a command of lockstep writes it for"
        f" the script that it starts; start that command again, or unset {REQUEST}"
    )
