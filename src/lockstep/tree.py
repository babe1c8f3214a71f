"""The binary tree in which values are added, for any number of processes. Floating-point addition
is not associative, so a sum has the same bits at any world size only if it is always computed by
one tree.

The node [a, b) splits at a plus the largest power of two below b - a. A rank has a contiguous range
of leaves, and adds all nodes in its range (`Counter`). The largest nodes in the ranges of all ranks
(`cover`) are added after the exchange (`fold`). `combine(left, right)` returns the sum of two
values. `combine` may write into `left` and return it, because no value is combined twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
Node = tuple[int, int]
"""The leaves [start, stop) below a node."""


def cover(start: int, stop: int, count: int) -> list[Node]:
    """Return the shortest list of nodes of the tree over [0, count) that together cover [start,
    stop), in order."""

    def inside(a: int, b: int) -> list[Node]:
        if stop <= a or b <= start:
            return []
        if start <= a and b <= stop:
            return [(a, b)]
        middle = _middle(a, b)
        return inside(a, middle) + inside(middle, b)

    return inside(0, count) if start < stop else []


class Counter(Generic[T]):
    """A binary counter that adds leaves start, start + 1, … as they arrive. The counter holds at
    most about 2 log2(count) values. After leaf stop - 1, the counter has the values of
    `cover(start, stop, count)`. `combine` may write into a pushed value."""

    def __init__(self, combine: Callable[[T, T], T], *, start: int, count: int) -> None:
        self.nodes: list[Node] = []
        self.values: list[T] = []
        self._combine = combine
        self._next = start
        self._count = count

    def push(self, value: T) -> None:
        self.push_node((self._next, self._next + 1), value)

    def push_node(self, node: Node, value: T) -> None:
        """Add several leaves at once. `node` covers the next leaves, and `value` is their sum by
        the tree."""
        if node[0] != self._next or not node[0] < node[1] <= self._count:
            raise ValueError(
                f"node {node} after leaf {self._next - 1} of {self._count}: nodes must be"
                " consecutive and end at the count"
            )
        self._next = node[1]
        while self.nodes and self._siblings(self.nodes[-1], node):
            node = (self.nodes.pop()[0], node[1])
            value = self._combine(self.values.pop(), value)
        self.nodes.append(node)
        self.values.append(value)

    def _siblings(self, left: Node, right: Node) -> bool:
        """True if two nodes are siblings. The parent of siblings starts at a multiple of its
        width."""
        start, stop = left[0], right[1]
        width = 1 << (stop - start - 1).bit_length()
        return (
            left[1] == _middle(start, stop)
            and start % width == 0
            and (stop - start == width or stop == self._count)
        )


class LeavesInAnyOrder(Generic[T]):
    """Adds leaves of the tree over [0, count) as they arrive, in any order. `combine` must not
    write into its arguments."""

    def __init__(self, combine: Callable[[T, T], T], *, count: int) -> None:
        self.values: dict[Node, T] = {}
        """Maps a node whose leaves have all arrived to its sum, until its sibling is complete."""
        self._combine = combine
        self._count = count
        self._arrived: set[int] = set()

    def add(self, leaf: int, value: T) -> None:
        self._arrived.add(leaf)
        node = leaf, leaf + 1
        while (family := _family(node, self._count)) is not None:
            left, right = family
            sibling = right if node == left else left
            if sibling not in self.values:
                break
            other = self.values.pop(sibling)
            value = self._combine(*((value, other) if node == left else (other, value)))
            node = left[0], right[1]
        self.values[node] = value

    def missing(self, leaves: range) -> list[int]:
        return [leaf for leaf in leaves if leaf not in self._arrived]


def fold(nodes: Sequence[Node], values: Sequence[T], count: int, combine: Callable[[T, T], T]) -> T:
    """Return the sum of all leaves [0, count). `nodes` together cover [0, count), in order, and
    `values` has the sum of each node."""
    counter = Counter(combine, start=0, count=count)
    for node, value in zip(nodes, values, strict=True):
        counter.push_node(node, value)
    if counter.nodes != [(0, count)]:
        raise ValueError(f"nodes {list(nodes)} do not make up the tree over [0, {count})")
    return counter.values[0]


def _family(node: Node, count: int) -> tuple[Node, Node] | None:
    start, stop = 0, count
    while (start, stop) != node:
        middle = _middle(start, stop)
        if node in ((start, middle), (middle, stop)):
            return (start, middle), (middle, stop)
        start, stop = (start, middle) if node[1] <= middle else (middle, stop)
    return None


def _middle(start: int, stop: int) -> int:
    return start + (1 << (stop - start - 1).bit_length() - 1)
