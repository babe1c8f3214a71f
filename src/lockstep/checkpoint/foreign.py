"""Tensors by name in files that others wrote: opened without running anything that they bring along, and read in parts (law 6)."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lockstep.base.errors import RecipeError
from lockstep.checkpoint.file_layout import DTYPES
from lockstep.checkpoint.folder import MANIFEST
from lockstep.checkpoint.pieces import Box

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TAKEN = (
    "weights are a .safetensors file, a folder of Hugging Face (model.safetensors, or model.safetensors.index.json), or a file of "
    "torch.save (.pt, .pth, .bin, .ckpt)"
)
_PICKLED = (".pt", ".pth", ".bin", ".ckpt")
_OURS = {theirs: ours for ours, theirs in DTYPES.items()}


class Tensors(Protocol):
    """What a file holds, or several."""

    @property
    def kinds(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Of each tensor, by its name: its dtype, as torch calls it where torch has it, and its shape."""

    def read(self, name: str, box: Box) -> Tensor:
        """Part of a tensor, on the CPU. Only that part is brought into memory. Raises `RecipeError`."""

    def close(self) -> None:
        """Give the files up."""


def open_tensors(path: str) -> Tensors:
    """Open a file of tensors, or a folder of Hugging Face. Raises `RecipeError`."""
    if "://" in path:
        raise RecipeError(f"weights {path!r} is a URL; weights are read from a path; bring the file to this machine")
    place = Path(path)
    if place.is_dir():
        return _in_folder(place)
    if not place.exists():
        raise RecipeError(f"weights {path!r} is not there; {TAKEN}; every process must be able to read it")
    if place.suffix == ".safetensors":
        return _Safetensors({place: None})
    if place.name.endswith(".index.json"):
        return _indexed(place)
    if place.suffix in _PICKLED:
        return _Pickled(place)
    raise RecipeError(f"weights {path!r} is a file of another kind; {TAKEN}")


def _in_folder(folder: Path) -> Tensors:
    if (folder / INDEX).exists():
        return _indexed(folder / INDEX)
    if (folder / SINGLE).exists():
        return _Safetensors({folder / SINGLE: None})
    if (folder / MANIFEST).exists() or (folder / "checkpoints").is_dir():
        raise RecipeError(
            f"weights {str(folder)!r} is a checkpoint, or a run that has not ended; {TAKEN}; make one of it: "
            f"lockstep export {folder} weights.safetensors"
        )
    raise RecipeError(f"weights {str(folder)!r} is a folder with neither {SINGLE} nor {INDEX} in it; {TAKEN}")


def _indexed(index: Path) -> Tensors:
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        parts: dict[Path, list[str]] = {}
        for name, file in files.items():
            parts.setdefault(index.parent / file, []).append(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecipeError(
            f"weights {str(index)!r} cannot be read as an index of safetensors files ({_said(error)}); fetch it again"
        ) from error
    return _Safetensors(parts)


class _Safetensors:
    """Files of safetensors, each with the names that are read of it; None: all."""

    def __init__(self, files: Mapping[Path, list[str] | None]) -> None:
        self.kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._slices: dict[str, tuple[Path, Any]] = {}
        self._files = ExitStack()
        with ExitStack() as stack:
            for path, names in files.items():
                try:
                    opened = stack.enter_context(safe_open(path, framework="pt"))
                    for name in opened.keys() if names is None else names:
                        part = opened.get_slice(name)
                        self.kinds[name] = _OURS.get(part.get_dtype(), part.get_dtype()), tuple(part.get_shape())
                        self._slices[name] = path, part
                except (OSError, SafetensorError) as error:
                    raise RecipeError(f"weights {str(path)!r} cannot be read as safetensors ({_said(error)}); fetch it again") from error
            self._files = stack.pop_all()

    def read(self, name: str, box: Box) -> Tensor:
        path, part = self._slices[name]
        try:
            found: Tensor = part[box] if box else part[...]
        except (OSError, SafetensorError) as error:
            raise RecipeError(f"{name!r} in weights {str(path)!r} cannot be read ({_said(error)}); fetch the file again") from error
        return found

    def close(self) -> None:
        self._slices.clear()
        self._files.close()


class _Pickled:
    """A file of torch.save. Its tensors stay on the disk until they are read."""

    def __init__(self, path: Path) -> None:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # whatever a file that is none makes torch say
            raise _cannot_load(path, error) from error
        self._tensors = dict(_flat(found, "", path))
        self.kinds = {name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in self._tensors.items()}

    def read(self, name: str, box: Box) -> Tensor:
        return self._tensors[name][box]

    def close(self) -> None:
        self._tensors.clear()


def _flat(value: Any, name: str, path: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors in a nest of dicts and lists, by their place in it: model.fc.weight."""
    if isinstance(value, Tensor):
        if not name or value.layout != torch.strided or value.is_quantized or value.is_meta:
            what = f"a tensor of layout {value.layout}, type {value.dtype}"
            raise RecipeError(f"weights {str(path)!r} holds {what} as {name!r}; weights are dense tensors, each with a name; save them so")
        yield name, value.detach()
    elif isinstance(value, Mapping | list | tuple):
        parts = value.items() if isinstance(value, Mapping) else enumerate(value)
        found: dict[str, Tensor] = {}
        for key, part in parts:
            for each, tensor in _flat(part, f"{name}.{key}" if name else str(key), path):
                if each in found:
                    raise RecipeError(f"weights {str(path)!r} holds two tensors as {each!r}; each has a name of its own; save them so")
                found[each] = tensor
        yield from found.items()


def _cannot_load(path: Path, error: Exception) -> RecipeError:
    if isinstance(error, pickle.UnpicklingError):
        needs = re.search(r"GLOBAL (\S+)", str(error))
        what = f" ({needs[1]})" if needs else ""
        return RecipeError(
            f"weights {str(path)!r} cannot be read without running code that the file names{what}; weights are tensors and nothing else; "
            "where you trust who made the file, load it yourself and save its state dict: "
            "safetensors.torch.save_file(torch.load(path, weights_only=False), 'weights.safetensors')"
        )
    if "mmap can only be used" in str(error):
        return RecipeError(
            f"weights {str(path)!r} is no file of torch.save, or in its format before torch 1.6, which can only be read whole; save it "
            "anew: torch.save(torch.load(path, weights_only=True), path)"
        )
    return RecipeError(f"weights {str(path)!r} cannot be read as a file of torch.save ({_said(error)}); fetch it again")


def _said(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
