"""Every object whose contents can be read is read: equal for equal contents, other for others; what
cannot is said."""

from __future__ import annotations

import argparse
import array
import collections
import datetime
import decimal
import enum
import functools
import io
import threading
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.base import contents
from lockstep.base.contents import Reader, digest_parts

Make = Callable[[int], Any]


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value


class Slots:
    __slots__ = ("__hidden", "value")

    def __init__(self, value: int) -> None:
        self.value = 0
        self.__hidden = value


class AttributeOf:
    """A factory of containers and arrays with an attribute of their own."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __call__(self, value: int) -> Any:
        made = self.make()
        made.extra = value
        return made


class Dict(dict[str, int]):
    pass


class List(list[Any]):
    pass


class Annotated(torch.Tensor):
    pass


class Kind(enum.Enum):
    ONE, TWO = 1, 2


@dataclass(frozen=True, slots=True)
class Frozen:
    value: int


def itself(value: int) -> Plain:
    made = Plain([value])
    made.value.append(made)
    return made


def objects(value: int) -> Any:
    made = np.empty(2, dtype=object)
    made[:] = [Plain(1), value]
    return made


def closure(value: int) -> Callable[[], int]:
    return lambda: value


class Image:
    """As a palette image of Pillow."""

    mode = "P"

    def __init__(self, palette: int) -> None:
        self.palette = palette

    @property
    def __array_interface__(self) -> Any:
        return np.zeros(2).__array_interface__

    def getpalette(self) -> list[int]:
        return [self.palette]


READ: dict[str, Make] = {
    "attribute": Plain,
    "slot": Slots,
    "dict's": AttributeOf(lambda: Dict(x=1)),
    "list's": AttributeOf(lambda: List([1])),
    "tensor's": AttributeOf(lambda: torch.zeros(2).as_subclass(Annotated)),
    "frozen": Frozen,
    "cycle": itself,
    "objects": objects,
    "masked": lambda value: np.ma.masked_equal(np.arange(4), value),
    "closure": closure,
    "partial": lambda value: functools.partial(print, value),
    "method": lambda value: Plain(value).__init__,  # type: ignore[misc]
    "random": Random,
    "numpy": np.random.default_rng,
    "torch": lambda value: torch.Generator().manual_seed(value),
    "coo": lambda value: (torch.eye(3) * value).to_sparse(),
    "csr": lambda value: (torch.eye(3) * value).to_sparse_csr(),
    "csc": lambda value: (torch.eye(3) * value).to_sparse_csc(),
    "jagged": lambda value: torch.nested.nested_tensor(
        [torch.ones(2) * value, torch.ones(3)], layout=torch.jagged
    ),
    "conjugate": lambda value: torch.tensor([1j * value]).conj(),
    "deque": lambda value: collections.deque([Plain(value)]),
    "decimal": decimal.Decimal,
    "date": lambda value: datetime.date(2000, 1, value),
    "namespace": lambda value: argparse.Namespace(a=value),
    "simple": lambda value: types.SimpleNamespace(a=value),
    "enum": Kind,
    "bytes": lambda value: io.BytesIO(bytes([value])),
    "array": lambda value: array.array("i", [value]),
    "view": lambda value: memoryview(bytes([value])),
    "set": lambda value: {Plain(value)},
    "iterator": lambda value: iter([value, 2]),
    "mapping": lambda value: collections.UserDict(a=value),
    "key": lambda value: {Plain(1): Plain(value)},
    "empty": lambda value: {i: i for i in range(value - 1)},
    "range": range,
    "image": Image,
}
UNREAD: dict[str, Make] = {
    "generator": lambda value: (each for each in [value]),
    "lock": lambda value: threading.Lock(),
    "within": lambda value: Plain([threading.Lock()]),
    "set": lambda value: {Plain(threading.Lock())},
    "deep": lambda value: functools.reduce(lambda inner, _: Plain(inner), range(100), value),
}


def read(value: Any) -> tuple[dict[str, str], list[str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sparse tensors are in beta
        return digest_parts(Reader().parts(value))


@pytest.mark.parametrize("make", READ.values(), ids=READ.keys())
def test_other_contents_of_any_object_are_seen(make: Make) -> None:
    (one, unread), (same, _), (other, _) = read(make(1)), read(make(1)), read(make(2))
    assert not unread
    assert one == same
    assert one != other


@pytest.mark.parametrize("make", UNREAD.values(), ids=UNREAD.keys())
def test_what_cannot_be_read_is_said(make: Make) -> None:
    assert read(make(1))[1]


def test_of_an_object_with_too_many_others_the_rest_is_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(contents, "MOST_OBJECTS", 5)
    assert read([Plain(i) for i in range(4)])[1] == []
    assert read([Plain(i) for i in range(5)])[1] == [" beyond its first 5 objects"]


def test_an_iterator_is_not_moved() -> None:
    given = iter([1, 2])
    read(given)
    assert list(given) == [1, 2]


def test_a_device_is_that_of_a_rank_and_no_contents() -> None:
    one, other = (Plain(torch.device("cuda", index)) for index in range(2))
    assert read(one) == read(other)
