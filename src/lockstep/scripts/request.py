"""The request of a command to the processes that run its script: a JSON file, which one variable
names. No torch.

A request names the module that answers it, and the function of it that is called: `install`, which
returns the overrides and hooks of a run, or `train(recipe)`, in the place of training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from lockstep.base.errors import LaunchError
from lockstep.base.files import write_atomically
from lockstep.base.foreign_files import parse_object
from lockstep.options import variable

T = TypeVar("T")
REQUEST = variable("request")
FILE = "request.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptRequest:
    """A request; each command has a child of this class."""

    answered_by: ClassVar[str]
    """The module that answers it."""
    calls: str = ""
    """The function of that module: `install`, `train`, or none."""

    def write(self, folder: Path) -> dict[str, str]:
        """Write the request. Returns the variable by which processes find it."""
        return write_request(folder, self.as_json())

    def as_json(self) -> dict[str, Any]:
        return {"answered_by": self.answered_by, **asdict(self)}

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Self | None:
        """Return None if no command asks, or another one does. Raises `LaunchError` for a damaged
        file."""
        found = _read(environ)
        if found is None or found.pop("answered_by") != cls.answered_by:
            return None
        try:
            return from_json(cls, found)
        except ValueError as error:
            raise _damaged(environ, error) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateRequest(ScriptRequest):
    """Evaluate these weights, a file or a Hugging Face folder, instead of training."""

    answered_by: ClassVar[str] = "lockstep.run"
    calls: str = "evaluate"
    weights: str


def write_request(folder: Path, request: Mapping[str, Any]) -> dict[str, str]:
    """Write a request that is JSON already. Returns the variable by which processes find it."""
    write_atomically(folder / FILE, json.dumps(request, default=str))
    return {REQUEST: str(folder / FILE)}


def answered_by(environ: Mapping[str, str], *calls: str) -> str | None:
    """Return the module that answers the request to this process, if it has one of these functions
    called. Raises `LaunchError`."""
    found = _read(environ)
    return None if found is None or found["calls"] not in calls else found["answered_by"]


def _read(environ: Mapping[str, str]) -> dict[str, Any] | None:
    if REQUEST not in environ:
        return None
    try:
        found = parse_object(Path(environ[REQUEST]).read_text(encoding="utf-8"))
        if not all(isinstance(found.get(name), str) for name in ("answered_by", "calls")):
            raise ValueError("it does not say who answers it")
    except (OSError, ValueError) as error:
        raise _damaged(environ, error) from None
    return found


def _damaged(environ: Mapping[str, str], error: Exception) -> LaunchError:
    why = error.strerror if isinstance(error, OSError) else error
    return LaunchError(
        f"{REQUEST}={environ[REQUEST]} is no request ({why}); a command of lockstep writes it for"
        f" the script that it starts; start that command again, or unset {REQUEST}"
    )


def from_json(kind: type[T], values: Mapping[str, Any]) -> T:
    """Return the dataclass whose fields have these values from JSON. Raises `ValueError` if they do
    not fit."""
    known = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(values.keys() - known.keys()):
        raise ValueError(f"it has no field {unknown[0]!r}")
    for name, each in known.items():
        if name not in values and each.default is MISSING and each.default_factory is MISSING:
            raise ValueError(f"{name!r} is missing")
    kinds = get_type_hints(kind)
    return kind(**{name: _value(kinds[name], value, name) for name, value in values.items()})


def _value(kind: Any, value: Any, name: str) -> Any:
    """Return the value of a field of the type `kind`. Raises `ValueError`."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None and NoneType in inner:
            return None
        (kind,) = [each for each in inner if each is not NoneType]
        return _value(kind, value, name)
    if origin is not None and issubclass(origin, Mapping) and isinstance(value, dict):
        return {key: _value(inner[1], each, name) for key, each in value.items()}
    if origin is not None and not issubclass(origin, Mapping) and isinstance(value, list):
        return tuple(_value(inner[0], each, name) for each in value)
    if kind is Any:
        return value
    if type(value) is (str if kind is Path else kind) or (kind is float and type(value) is int):
        return kind(value)
    raise ValueError(f"{name!r} is {value!r}")
