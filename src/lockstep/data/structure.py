"""The structure of a batch: containers, keys and dtypes, but not shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def structure(value: Any) -> Any:
    """Return a value that is equal for batches of one structure: a tensor's dtype, (type, parts) of
    a container, None for anything else. A list of equal parts has one part here."""
    if isinstance(value, Tensor):
        return value.dtype
    kind = type(value)
    if kind is list:
        parts = [structure(part) for part in value]
        return kind, parts[:1] if all(part == parts[0] for part in parts) else parts
    if isinstance(value, tuple):
        return kind, [structure(part) for part in value]
    if isinstance(value, Mapping):
        return kind, {name: structure(part) for name, part in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return kind, {field.name: structure(getattr(value, field.name)) for field in fields(value)}
    dtype = getattr(value, "dtype", None)
    # numpy's dtypes are not kept: float64 is equal to None
    return None if dtype is None else f"an array of {dtype}"


def structure_difference(then: Any, now: Any, path: str = "batch") -> str | None:
    """Describe how two structures differ: `batch['x'] is torch.int64 and was torch.float32`."""
    if then == now:
        return None
    if not (isinstance(then, tuple) and isinstance(now, tuple) and then[0] is now[0]):
        return f"{path} is {_name(now)} and was {_name(then)}"
    if isinstance(then[1], dict):
        if then[1].keys() != now[1].keys():
            return f"{path} has {list(now[1])} and had {list(then[1])}"
        pairs = {f"{path}[{name!r}]": (then[1][name], now[1][name]) for name in then[1]}
    else:
        if then[0] is list and not (then[1] and now[1]):
            return None  # an empty list fits any other
        if len(then[1]) != len(now[1]):
            return f"{path} has {_parts(now)} and had {_parts(then)}"
        pairs = {f"{path}[{i}]": pair for i, pair in enumerate(zip(then[1], now[1], strict=True))}
    return next(
        (
            found
            for where, pair in pairs.items()
            if (found := structure_difference(*pair, where)) is not None
        ),
        None,
    )


def _parts(made: tuple[type, list[Any]]) -> str:
    kind, parts = made
    return (
        f"any number of {_name(parts[0])}"
        if kind is list and len(parts) == 1
        else f"{len(parts)} parts"
    )


def _name(made: Any) -> str:
    if isinstance(made, tuple):
        return f"a {made[0].__name__}"
    return str(made) if made is not None else "no tensor or container"
