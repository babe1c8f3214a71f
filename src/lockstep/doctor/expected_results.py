"""The inputs of the doctor's collectives, and the expected output on each rank.

[Note: exact] Every input, partial sum and product is exact in each data type, so the result does
not depend on the order of additions. In a sum over many ranks, most ranks contribute 0 at most
positions, but every rank contributes at some position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from lockstep.keys import GOLDEN, MIX_FIRST

Collective = Literal[
    "send/recv",
    "broadcast",
    "reduce",
    "all-reduce",
    "scatter",
    "gather",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "barrier",
]
Operation = Literal["sum", "min", "max", "product", "avg"]
Integers = NDArray[np.int64]

COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
REDUCTIONS: tuple[Collective, ...] = ("reduce", "all-reduce", "reduce-scatter")
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
_ONE_BLOCK_INPUTS = ("send/recv", "broadcast", "reduce", "all-reduce", "gather", "all-gather")

BLOCK_SIZE = 13


@dataclass(frozen=True, slots=True)
class DataType:
    name: str
    limit: int
    """The data type represents all integers from 0 to this limit."""
    signed: bool = True
    real: bool = True
    integer: bool = False


DATA_TYPES = (
    DataType("bool", 1, signed=False, integer=True),
    DataType("uint8", 255, signed=False, integer=True),
    DataType("int8", 127, integer=True),
    DataType("int16", 2**15 - 1, integer=True),
    DataType("int32", 2**20, integer=True),
    DataType("int64", 2**20, integer=True),
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
class CollectiveCase:
    collective: Collective
    operation: Operation | None
    data_type: DataType

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.collective, self.operation, self.data_type.name)))


def cases(collective: Collective) -> list[CollectiveCase]:
    if collective not in REDUCTIONS:
        return [CollectiveCase(collective, None, data_type) for data_type in DATA_TYPES]
    pairs = [
        (operation, data_type)
        for data_type in DATA_TYPES
        for operation in OPERATIONS
        if _is_defined(operation, data_type)
    ]
    return [CollectiveCase(collective, operation, data_type) for operation, data_type in pairs]


def _is_defined(operation: Operation, data_type: DataType) -> bool:
    if not data_type.real:
        return operation in ("sum", "avg")
    return operation != "avg" or not data_type.integer


def root(global_ranks: Sequence[int]) -> int:
    """Return the last rank. The first rank is the default of most collectives."""
    return len(global_ranks) - 1


def rank_input(case: CollectiveCase, global_ranks: Sequence[int], group_rank: int) -> Integers:
    blocks = 1 if case.collective in _ONE_BLOCK_INPUTS else len(global_ranks)
    return _values_of_rank(case, global_ranks, group_rank, np.arange(BLOCK_SIZE * blocks))


def expected_output(
    case: CollectiveCase, global_ranks: Sequence[int], group_rank: int
) -> NDArray[Any] | None:
    block, own_block = (
        np.arange(BLOCK_SIZE),
        np.arange(BLOCK_SIZE * group_rank, BLOCK_SIZE * (group_rank + 1)),
    )
    if case.collective in ("reduce", "gather") and group_rank != root(global_ranks):
        return None
    if case.collective == "send/recv":
        return _values_of_rank(case, global_ranks, (group_rank - 1) % len(global_ranks), block)
    if case.collective == "broadcast":
        return _values_of_rank(case, global_ranks, root(global_ranks), block)
    if case.collective == "scatter":
        return _values_of_rank(case, global_ranks, root(global_ranks), own_block)
    positions = own_block if case.collective in ("reduce-scatter", "all-to-all") else block
    values = _values(case, global_ranks, np.arange(len(global_ranks)), positions)
    return _reduce(case.operation, values) if case.collective in REDUCTIONS else values.reshape(-1)


def _reduce(operation: Operation | None, values: Integers) -> NDArray[Any]:
    if operation == "avg":
        mean: NDArray[Any] = values.mean(axis=0)
        return mean
    reducer = {"sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum}[
        operation or "sum"
    ]
    reduced: NDArray[Any] = reducer.reduce(values, axis=0)
    return reduced


def _values_of_rank(
    case: CollectiveCase, global_ranks: Sequence[int], group_rank: int, positions: Integers
) -> Integers:
    return _values(case, global_ranks, np.array([group_rank]), positions).reshape(-1)


def _values(
    case: CollectiveCase, global_ranks: Sequence[int], group_ranks: Integers, positions: Integers
) -> Integers:
    """Return inputs of shape (ranks, positions), see [Note: exact]."""
    limit, seeds = case.data_type.limit, np.array(global_ranks)[group_ranks]
    if case.operation in ("sum", "avg"):
        most = min(limit, 3)
        contributes = _is_contributor(group_ranks, positions, len(global_ranks), limit // most)
        return np.where(contributes, _pseudo_random(seeds, positions, most) + 1, 0)
    if case.operation == "product":
        doubles = _is_contributor(group_ranks, positions, len(global_ranks), limit.bit_length() - 1)
        return np.where(
            positions % 4 == 3, _pseudo_random(seeds, positions, 2), np.where(doubles, 2, 1)
        )
    return _pseudo_random(seeds, positions, limit + 1) - (
        limit // 2 if case.data_type.signed else 0
    )


def _is_contributor(
    group_ranks: Integers, positions: Integers, size: int, most: int
) -> NDArray[np.bool_]:
    """Return True where a rank's input is not 0. At each position, at most `most` ranks
    contribute."""
    if most == 0:
        return np.zeros((len(group_ranks), len(positions)), dtype=np.bool_)
    contributes: NDArray[np.bool_] = (group_ranks[:, None] + positions) % -(-size // most) == 0
    return contributes


def _pseudo_random(seeds: Integers, positions: Integers, below: int) -> Integers:
    mixed = seeds[:, None].astype(np.uint64) * np.uint64(GOLDEN) + positions.astype(
        np.uint64
    ) * np.uint64(MIX_FIRST)
    mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(MIX_FIRST)
    numbers: Integers = ((mixed >> np.uint64(32)) % np.uint64(below)).astype(np.int64)
    return numbers


def subgroups(size: int) -> dict[str, list[list[int]]]:
    """Return partitions of the ranks into process groups that run their collectives at the same
    time."""
    if size < 4:
        return {"a second group": [list(range(size))]}
    return {
        "halves": [list(range(size // 2)), list(range(size // 2, size))],
        "odd and even": [list(range(0, size, 2)), list(range(1, size, 2))],
    }
