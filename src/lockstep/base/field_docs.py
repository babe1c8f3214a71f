"""Makes `help()` show the docstrings of a dataclass's fields."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import TypeVar

Class = TypeVar("Class", bound=type)


def with_field_docs(cls: Class) -> Class:
    """Decorate a dataclass with slots, so that `help()` shows the docstring of each field."""
    cls.__slots__ = _FieldDocs(cls)  # type: ignore[attr-defined]
    return cls


class _FieldDocs(dict[str, str]):
    def __init__(self, cls: type) -> None:
        super().__init__(dict.fromkeys(vars(cls)["__slots__"], ""))
        self._class = cls

    def __getitem__(self, name: str) -> str:
        return _read(self._class).get(name, "")


def _read(cls: type) -> dict[str, str]:
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError, ValueError):
        return {}
    assert isinstance(tree, ast.ClassDef), "the source of a class"
    docs = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                value=ast.Constant(value=str(text))
            ):
                docs[name] = inspect.cleandoc(text)
    return docs
