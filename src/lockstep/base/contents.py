"""Reads any Python object as a sequence of (path, bytes), to compare objects of two processes.
Imports neither torch nor numpy."""

from __future__ import annotations

import dis
import functools
import hashlib
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

Part = tuple[str, Iterable[bytes] | None]
"""The path of a value in an object, and the value's bytes (None if they cannot be read)."""
MOST_OBJECTS = 100_000
"""Maximum number of nested objects that are read. Objects beyond this maximum count as
unreadable."""
MOST_LEVELS = 60
_MOST_CODE = 4096
_CACHED = type(functools.cache(len))
_PYTHON = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_LOCKSTEP = str(Path(__file__).parents[1]) + os.sep
PLAIN = (bool, int, float, complex, str, bytes, type(None))


class _TooManyError(Exception): ...


class Reader:
    """Reads containers, tensors, arrays, and functions with their variables. Reads all remaining
    objects in the same way as `pickle`."""

    def __init__(self, most_bytes: int | None = None) -> None:
        """Reads only `most_bytes` bytes of a longer tensor or array: one half at its beginning, one
        half at its end."""
        self._most_bytes = most_bytes
        self._open: set[int] = set()  # the objects around the one that is being read
        self._seen: dict[int, Any] = {}  # functions and classes that have been read
        self._left = MOST_OBJECTS

    def parts(self, value: Any, path: str = "") -> Iterator[Part]:
        """Yield the parts of `value`. Several parts may have the same path."""
        try:
            yield from self.read(value, path)
        except _TooManyError:
            yield f"{path} beyond its first {MOST_OBJECTS:,} objects", None

    def read(self, value: Any, path: str) -> Iterator[Part]:
        if is_plain(value) or (type(value) in (list, tuple) and all(map(is_plain, value))):
            yield path, [f"{type(value).__qualname__} {value!r}".encode(errors="surrogatepass")]
        elif id(value) in self._open:
            yield path, [b"itself"]
        elif len(self._open) >= MOST_LEVELS:
            yield path, None
        else:
            self._left -= 1
            if self._left < 0:
                raise _TooManyError
            self._open.add(id(value))
            try:
                yield from self._inside(value, path)
            finally:
                self._open.remove(id(value))

    def _inside(self, value: Any, path: str) -> Iterator[Part]:
        if isinstance(value, type):
            yield from self._class(value, path)
        elif isinstance(value, FunctionType):
            yield from self._function(value, path)
        elif isinstance(value, MethodType):
            yield from self.read(value.__func__, path)
            yield from self.read(value.__self__, f"{path}.__self__")
        elif isinstance(value, ModuleType):
            yield path, [value.__name__.encode()]
        elif isinstance(value, functools.partial):
            yield from self.read(value.func, path)
            yield from self.read([*value.args, value.keywords], f"{path}()")
        elif value is os.environ:
            yield path, [b"the environment"]
        elif _is_of(value, "logging", "Logger"):
            yield path, [value.name.encode()]
        # left out, because each rank has another device of the same type
        elif _is_of(value, "torch", "device"):
            yield path, [b"a device"]
        elif _is_of(value, "torch", "Tensor"):
            yield from self._tensor(value, path)
        elif _is_of(value, "numpy", "ndarray"):
            yield from self._array(value, path)
        elif isinstance(value, Mapping):
            if not value:
                yield path, [f"an empty {type(value).__qualname__}".encode()]
            for place, (name, part) in enumerate(value.items()):
                if is_plain(name):
                    yield from self.read(part, f"{path}[{name!r}]")
                else:  # its repr may contain its address in memory
                    yield from self.read(name, f"{path}[key {place}]")
                    yield from self.read(part, f"{path}[key {place}] value")
            if type(value) is not dict:
                yield from self._state(value, path)
        elif isinstance(value, list | tuple):
            for place, part in enumerate(value):
                yield from self.read(part, f"{path}[{place}]")
            if type(value) not in (list, tuple):
                yield from self._state(value, path)
        elif isinstance(value, Set):
            yield from self._set(value, path)
        elif isinstance(value, memoryview):
            yield path, [value.tobytes()]
        elif isinstance(value, _CACHED):
            yield from self.read(value.__wrapped__, path)
        else:
            yield from self._object(value, path)

    def _set(self, value: Set[Any], path: str) -> Iterator[Part]:
        members = []
        for each in value:
            parts = list(self.read(each, ""))
            if any(pieces is None for _, pieces in parts):
                yield path, None
            read = (inner.encode() + piece for inner, pieces in parts for piece in pieces or ())
            members.append(b"".join(read))
        yield path, [f"{type(value).__qualname__} ".encode(), *sorted(members)]

    def _tensor(self, value: Any, path: str) -> Iterator[Part]:
        torch = sys.modules["torch"]
        value = value.to_local() if hasattr(value, "to_local") else value
        shape = "nested" if value.is_nested else tuple(value.shape)
        yield path, [f"{value.dtype} {shape}".encode()]
        if value.is_nested:
            yield from self.read(list(value.unbind()), path)
            return
        if value.is_quantized:
            yield from self.read(value.int_repr(), path)
            names = ("q_scale", "q_zero_point")
            per_channel = torch.per_channel_affine, torch.per_channel_affine_float_qparams
            if value.qscheme() in per_channel:
                names = ("q_per_channel_scales", "q_per_channel_zero_points")
            for name in names:
                yield from self.read(getattr(value, name)(), f"{path}.{name}")
        elif value.layout is torch.sparse_coo:
            coalesced = value.detach().coalesce()
            yield from self.read([coalesced.indices(), coalesced.values()], path)
        elif value.layout is not torch.strided:
            rows = value.layout in (torch.sparse_csr, torch.sparse_bsr)
            names = ("crow_indices", "col_indices") if rows else ("ccol_indices", "row_indices")
            parts = [getattr(value.detach(), name)() for name in (*names, "values")]
            yield from self.read(parts, path)
        elif not value.is_meta:
            yield path, self._tensor_bytes(value)
        for name, part in vars(value).items():
            yield from self.read(part, f"{path}.{name}")

    def _tensor_bytes(self, value: Any) -> Iterable[bytes] | None:
        uint8, flat = sys.modules["torch"].uint8, value.detach().reshape(-1)
        return [
            part.cpu().resolve_conj().resolve_neg().contiguous().view(uint8).numpy().tobytes()
            for part in self._read_of(flat)
        ]

    def _array(self, value: Any, path: str) -> Iterator[Part]:
        yield path, [f"{value.dtype} {value.shape}".encode()]
        if value.dtype.hasobject:
            yield from self.read(value.tolist(), path)
        else:
            yield path, self._array_bytes(value)
        if not _is_of(value, "numpy", "memmap"):
            for name, part in getattr(value, "__dict__", {}).items():
                yield from self.read(part, f"{path}.{name}")

    def _array_bytes(self, value: Any) -> Iterable[bytes] | None:
        return [part.tobytes() for part in self._read_of(value.reshape(-1))]

    def _read_of(self, flat: Any) -> list[Any]:
        if self._most_bytes is None or flat.nbytes <= self._most_bytes:
            return [flat]
        part = self._most_bytes // 2 // flat.itemsize
        return [flat[:part], flat[-part:]]

    def _object(self, value: Any, path: str) -> Iterator[Part]:
        kind = type(value)
        if is_dataclass(value):
            declared = [each.name for each in fields(value)]
            others = [name for name in attributes(value) if name not in declared]
            for name in (*declared, *others):
                yield from self.read(getattr(value, name, "not set"), f"{path}.{name}")
            return
        yield path, [name_of(kind)]
        if hasattr(kind, "__array_interface__"):  # such as an image
            yield from self.read(sys.modules["numpy"].asarray(value), path)
            if hasattr(value, "getpalette"):
                yield from self.read([value.mode, value.getpalette()], f"{path}.palette")
            return
        reduced = _reduced(value)
        if reduced is None and hasattr(kind, "__array__"):
            yield from self.read(sys.modules["numpy"].asarray(value), path)
        elif reduced is None:
            yield path, None  # a part of the object may not be in its attributes
            for name, part in attributes(value).items():
                yield from self.read(part, f"{path}.{name}")
        else:
            yield from self._reduced(value, reduced, path)

    def _reduced(self, value: Any, reduced: str | tuple[Any, ...], path: str) -> Iterator[Part]:
        if isinstance(reduced, str):
            yield path, [reduced.encode()]
            return
        made_by, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        if made_by is getattr:
            yield path, [str(arguments[1]).encode()]
        for place, argument in enumerate(arguments or ()):
            if argument is not type(value):
                yield from self.read(argument, f"{path}({place})")
        yield from self._read_state(state, path)
        for place, part in enumerate(items or ()):
            yield from self.read(part, f"{path}[{place}]")
        for place, (name, part) in enumerate(pairs or ()):
            yield from self.read([name, part], f"{path}[key {place}]")

    def _state(self, value: Any, path: str) -> Iterator[Part]:
        reduced = _reduced(value)
        if isinstance(reduced, tuple):
            yield from self._read_state((*reduced, None)[2], path)
        else:
            for name, part in attributes(value).items():
                yield from self.read(part, f"{path}.{name}")

    def _read_state(self, state: Any, path: str) -> Iterator[Part]:
        if (
            isinstance(state, tuple)
            and len(state) == 2
            and isinstance(state[1], dict)
            and isinstance(state[0], dict | None)
        ):
            state = {**(state[0] or {}), **state[1]}  # attributes, and values in slots
        if isinstance(state, dict):
            for name, part in state.items():
                yield from self.read(part, f"{path}.{name}")
        elif state is not None:
            yield from self.read(state, f"{path}.state")

    def _class(self, value: type, path: str) -> Iterator[Part]:
        yield path, [name_of(value)]

    def _function(self, function: FunctionType, path: str) -> Iterator[Part]:
        if id(function) in self._seen:
            yield path, [b"again"]
            return
        self._seen[id(function)] = function
        if not is_users(function.__module__):
            yield path, [f"{function.__module__}.{function.__qualname__}".encode()]
            for name, content in _closed_over(function):
                if is_plain(content) or (type(content) is tuple and all(map(is_plain, content))):
                    # the arguments of the function that made it: `warmup_cosine(warmup=5,
                    # total=1000)`
                    yield from self.read(content, name)
            return
        yield path, [_code(function.__code__)]
        defaults = [*(function.__defaults__ or ()), function.__kwdefaults__ or {}]
        yield from self.read(defaults, f"{path}'s defaults")
        for name, content in vars(function).items():
            yield from self.read(content, f"{path}.{name}")
        for name, content in variables_of(function).items():
            yield from self._used(function, name, content)

    def _used(self, function: FunctionType, name: str, content: Any) -> Iterator[Part]:
        of_it = _attributes_used(function.__code__, name)
        if of_it is None or isinstance(content, FunctionType | type):
            yield from self.read(content, name)
        elif not isinstance(content, ModuleType) or is_users(content.__name__):
            own = attributes(content)
            for each in sorted(of_it):
                if each in own:
                    yield from self.read(own[each], f"{name}.{each}")
                else:  # a method or a property: it may use all of the object
                    yield from self.read(content, name)
        else:
            yield name, [content.__name__.encode()]


class CodeReader(Reader):
    def _object(self, value: Any, path: str) -> Iterator[Part]:
        yield from self.read(type(value), path)
        yield from super()._object(value, path)

    def _class(self, value: type, path: str) -> Iterator[Part]:
        yield path, [value.__qualname__.encode()]
        if id(value) in self._seen or not is_users(value.__module__):
            return
        self._seen[id(value)] = value
        for name, part in vars(value).items():
            if not name.startswith("_abc_"):
                for each in _functions_of(part, is_data=not name.startswith("__")):
                    yield from self.read(each, f"{path or value.__name__}.{name}")
        for base in value.__bases__:
            yield from self.read(base, base.__name__)


def digest_parts(
    parts: Iterable[Part], most: int = sys.maxsize
) -> tuple[dict[str, str], list[str]]:
    """Return the digest of the bytes at each path, and the paths whose values cannot be read. At
    most `most` paths have a digest each. The remaining paths share one digest."""
    hashed: dict[str, Any] = {}
    unread = dict[str, None]()
    for path, pieces in parts:
        known = path if path in hashed or len(hashed) < most else f" beyond its first {most} parts"
        digest = hashed.setdefault(known, hashlib.blake2b(digest_size=8))
        for piece in pieces or ():
            digest.update(piece)
        if pieces is None:
            unread[known] = None
    return {path: digest.hexdigest() for path, digest in hashed.items()}, list(unread)


def is_plain(value: Any) -> bool:
    return type(value) in PLAIN or (_is_of(value, "numpy", "generic") and not value.dtype.hasobject)


def attributes(value: Any) -> dict[str, Any]:
    by_name = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            mangled = (
                f"_{kind.__name__.lstrip('_')}{name}"
                if name.startswith("__") and not name.endswith("__")
                else name
            )
            if hasattr(value, mangled) and name not in ("__dict__", "__weakref__"):
                by_name[name] = getattr(value, mangled)
    return by_name


@functools.cache
def is_users(module: str | None) -> bool:
    """False if the module belongs to the standard library, to an installed package, or to
    lockstep."""
    if module in ("__main__", "__mp_main__"):
        return True
    # getattr may import further modules
    file = vars(sys.modules[module]).get("__file__") if module in sys.modules else None
    return file is not None and is_users_file(file)


def is_users_file(file: str) -> bool:
    return not file.startswith(("<", _LOCKSTEP, _PYTHON)) and not any(
        folder in file for folder in _PACKAGES
    )


def name_of(kind: type) -> bytes:
    return f"{kind.__module__}.{kind.__qualname__}".encode()


def _is_of(value: Any, module: str, name: str) -> bool:
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name, ()))


def _reduced(value: Any) -> str | tuple[Any, ...] | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found: str | tuple[Any, ...] = value.__reduce_ex__(4)
    except Exception:
        return None
    return found


def _functions_of(part: Any, *, is_data: bool) -> list[Any]:
    if isinstance(part, staticmethod | classmethod):
        return [part.__func__]
    if isinstance(part, property):
        return [each for each in (part.fget, part.fset) if each is not None]
    if isinstance(part, functools.cached_property):
        return [part.func]
    if isinstance(part, FunctionType) and hasattr(part, "hooked"):
        return [part.__wrapped__]  # type: ignore[attr-defined]  # the `step` of an optimizer's class; torch wraps it when the first one is made
    is_descriptor = hasattr(type(part), "__get__")  # such as the member of a slot
    return [part] if isinstance(part, FunctionType) or (is_data and not is_descriptor) else []


def variables_of(function: FunctionType) -> dict[str, Any]:
    used = {name for code in inner_code(function.__code__) for name in code.co_names}
    variables = dict(_closed_over(function))
    for name in sorted(used & function.__globals__.keys() - variables.keys()):
        variables[name] = function.__globals__[name]
    return variables


def _closed_over(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # the variable is not set yet
            yield name, cell.cell_contents


# A recipe's functions are read several times in a training, and disassembling them takes as long as
# a step of a small model. Equal code has equal instructions.
@functools.lru_cache(_MOST_CODE)
def _code(code: CodeType) -> bytes:
    found = []
    for instruction in dis.get_instructions(code):
        value = instruction.argval
        found.append(instruction.opname.encode())
        if isinstance(value, CodeType):
            found.append(_code(value).removesuffix(b"\0"))
        elif isinstance(value, frozenset):
            found.append(repr(sorted(map(repr, value))).encode(errors="surrogatepass"))
        else:
            text = f"{type(value).__name__} {value!r}"
            found.append(text.encode(errors="surrogatepass"))
    return b"".join(part + b"\0" for part in found)


def inner_code(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from inner_code(constant)


def _attributes_used(code: CodeType, variable: str) -> Set[str] | None:
    return _attributes_by_variable(code).get(variable)


@functools.lru_cache(_MOST_CODE)
def _attributes_by_variable(code: CodeType) -> Mapping[str, Set[str] | None]:
    found = dict[str, set[str] | None]()
    for each in inner_code(code):
        instructions = [
            one
            for one in dis.get_instructions(each)
            if one.opname not in ("EXTENDED_ARG", "CACHE", "PRECALL")
        ]
        for one, following in zip(instructions, [*instructions[1:], None], strict=True):
            if not one.opname.startswith(
                ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME", "LOAD_CLASSDEREF")
            ):
                continue
            attributes = found.setdefault(one.argval, set())
            if following is None or following.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                found[one.argval] = None
            elif attributes is not None:
                attributes.add(following.argval)
    return found
