"""What every collective is: from what each rank gives to what each must hold afterwards. Pure: whole numbers in numpy arrays.

[Note: exact] The numbers are small enough that each data type holds them, and every partial sum and product of them, without rounding. So a
result is right or wrong, whatever the order of additions. In a sum most ranks give 0 at most places, where there are many ranks: no
place has more contributions than the type can hold, and all ranks contribute at some place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lockstep.keys import GOLDEN, MIX_FIRST

Collective = Literal[
    "send/recv", "broadcast", "reduce", "all-reduce", "scatter", "gather", "all-gather", "reduce-scatter", "all-to-all", "barrier"
]
Operation = Literal["sum", "min", "max", "product", "avg"]
Numbers = NDArray[np.int64]

COLLECTIVES: tuple[Collective, ...] = (
    "send/recv", "broadcast", "reduce", "all-reduce", "scatter", "gather", "all-gather", "reduce-scatter", "all-to-all", "barrier",
)  # fmt: skip
REDUCING: tuple[Collective, ...] = ("reduce", "all-reduce", "reduce-scatter")
OPERATIONS: tuple[Operation, ...] = ("sum", "min", "max", "product", "avg")
_ROW = ("send/recv", "broadcast", "reduce", "all-reduce", "gather", "all-gather")
"""Those in which a rank gives one block; in the others, one for each rank."""

BLOCK = 13
"""Numbers in a block: neither even nor a power of two."""


@dataclass(frozen=True, slots=True)
class DataType:
    """A data type as far as the definitions need it."""

    name: str
    """Torch's."""
    limit: int
    """It holds every whole number from 0 to this one."""
    signed: bool = True
    real: bool = True
    whole: bool = False
    """Whether it holds whole numbers alone, so that there is no average."""


DATA_TYPES = (
    DataType("bool", 1, signed=False, whole=True),
    DataType("uint8", 255, signed=False, whole=True),
    DataType("int8", 127, whole=True),
    DataType("int16", 2**15 - 1, whole=True),
    DataType("int32", 2**20, whole=True),
    DataType("int64", 2**20, whole=True),
    DataType("float8_e4m3fn", 16),
    DataType("float8_e5m2", 8),
    DataType("float16", 2048),
    DataType("bfloat16", 256),
    DataType("float32", 2**20),
    DataType("float64", 2**20),
    DataType("complex64", 2**20, real=False),
    DataType("complex128", 2**20, real=False),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One call to check."""

    collective: Collective
    operation: Operation | None
    """Of those in `REDUCING`."""
    kind: DataType

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.collective, self.operation, self.kind.name)))


def cases(collective: Collective) -> list[Case]:
    """Every one of a collective but the barrier: each data type, and each operation that has a meaning for it."""
    if collective not in REDUCING:
        return [Case(collective, None, kind) for kind in DATA_TYPES]
    return [Case(collective, operation, kind) for kind in DATA_TYPES for operation in OPERATIONS if _is_defined(operation, kind)]


def _is_defined(operation: Operation, kind: DataType) -> bool:
    if not kind.real:
        return operation in ("sum", "avg")
    return operation != "avg" or not kind.whole


def root(members: Sequence[int]) -> int:
    """The rank, in the group, that sends or receives where one does: not the first, which is every default."""
    return len(members) - 1


def given(case: Case, members: Sequence[int], me: int) -> Numbers:
    """What the rank `me` of a group hands in. `members`: the group's ranks among all. BLOCK numbers, or BLOCK for each rank."""
    return _row(case, members, me, np.arange(BLOCK if case.collective in _ROW else BLOCK * len(members)))


def held(case: Case, members: Sequence[int], me: int) -> NDArray[Any] | None:
    """What the rank `me` must hold afterwards. None: nothing is said of it. Averages are floats, all else whole numbers."""
    row, mine = np.arange(BLOCK), np.arange(BLOCK * me, BLOCK * (me + 1))
    if case.collective in ("reduce", "gather") and me != root(members):
        return None
    if case.collective == "send/recv":
        return _row(case, members, (me - 1) % len(members), row)
    if case.collective == "broadcast":
        return _row(case, members, root(members), row)
    if case.collective == "scatter":
        return _row(case, members, root(members), mine)
    values = _values(case, members, np.arange(len(members)), mine if case.collective in ("reduce-scatter", "all-to-all") else row)
    return _reduced(case.operation, values) if case.collective in REDUCING else values.reshape(-1)


def _reduced(operation: Operation | None, values: Numbers) -> NDArray[Any]:
    if operation == "avg":
        found: NDArray[Any] = values.mean(axis=0)
        return found
    reducer = {"sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum}[operation or "sum"]
    summed: NDArray[Any] = reducer.reduce(values, axis=0)
    return summed


def _row(case: Case, members: Sequence[int], who: int, places: Numbers) -> Numbers:
    return _values(case, members, np.array([who]), places).reshape(-1)


def _values(case: Case, members: Sequence[int], who: Numbers, places: Numbers) -> Numbers:
    """What some ranks of the group give at places: shape (ranks, places). They depend on the rank among all. See [Note: exact]."""
    limit, ranks = case.kind.limit, np.array(members)[who]
    if case.operation in ("sum", "avg"):
        most = min(limit, 3)
        gives = _contributes(who, places, len(members), limit // most)
        return np.where(gives, _scattered(ranks, places, most) + 1, 0)
    if case.operation == "product":
        doubles = _contributes(who, places, len(members), limit.bit_length() - 1)
        return np.where(places % 4 == 3, _scattered(ranks, places, 2), np.where(doubles, 2, 1))
    return _scattered(ranks, places, limit + 1) - (limit // 2 if case.kind.signed else 0)


def _contributes(who: Numbers, places: Numbers, size: int, most: int) -> NDArray[np.bool_]:
    """Which ranks of a group of `size` count at which places: at most `most` at each."""
    if most == 0:
        return np.zeros((len(who), len(places)), dtype=np.bool_)
    found: NDArray[np.bool_] = (who[:, None] + places) % -(-size // most) == 0
    return found


def _scattered(ranks: Numbers, places: Numbers, below: int) -> Numbers:
    """A number in 0..below-1 for each rank and place, which looks random."""
    mixed = ranks[:, None].astype(np.uint64) * np.uint64(GOLDEN) + places.astype(np.uint64) * np.uint64(MIX_FIRST)
    mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(MIX_FIRST)
    found: Numbers = ((mixed >> np.uint64(32)) % np.uint64(below)).astype(np.int64)
    return found


def subgroups(size: int) -> dict[str, list[list[int]]]:
    """Ways to part the ranks, by name: each a list of groups that exchange at the same time. Every rank is in one group of each way."""
    if size < 4:
        return {"a second group": [list(range(size))]}
    return {
        "halves": [list(range(size // 2)), list(range(size // 2, size))],
        "odd and even": [list(range(0, size, 2)), list(range(1, size, 2))],
    }
