"""The position in a stream's shard at which reading continues. Checkpoints contain the position."""

from __future__ import annotations

from typing import Any, NamedTuple

from lockstep.recipe.data import Mixture, PackedStream, Stream


class ShardPosition(NamedTuple):
    epoch: int = 0
    seen: int = 0
    """Number of samples of `epoch` that were read."""


class MixturePosition(NamedTuple):
    seen: int
    """Number of samples read."""
    streams: dict[str, Position]


class PackedPosition(NamedTuple):
    documents: Position
    """Position of the first document of the current group. The documents of a group are packed
    together."""
    rows: int
    """Number of the group's rows that were read."""


Position = ShardPosition | MixturePosition | PackedPosition


def beginning(stream: Stream) -> Position:
    match stream.open:
        case Mixture(streams=streams):
            return MixturePosition(0, {name: beginning(each) for name, each in streams.items()})
        case PackedStream(stream=documents):
            return PackedPosition(beginning(documents), 0)
        case _:
            return ShardPosition()


def position_in(value: Any) -> Position:
    """Raises `ValueError` or `TypeError`."""
    first, second = value
    if isinstance(second, dict):
        return MixturePosition(
            _count(first), {name: position_in(each) for name, each in second.items()}
        )
    if isinstance(first, list | tuple):
        return PackedPosition(position_in(first), _count(second))
    return ShardPosition(_count(first), _count(second))


def fits(position: Position, stream: Stream) -> bool:
    match stream.open, position:
        case Mixture(streams=streams), MixturePosition(streams=positions):
            return streams.keys() == positions.keys() and all(
                fits(positions[name], each) for name, each in streams.items()
            )
        case PackedStream(stream=documents), PackedPosition(documents=begin):
            return fits(begin, documents)
        case Mixture() | PackedStream(), _:
            return False
        case _:
            return isinstance(position, ShardPosition)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} does not count samples")
    return value
