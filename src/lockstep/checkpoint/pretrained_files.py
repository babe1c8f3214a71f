"""Reads parts of pretrained weights from safetensors and torch.save files. Runs no code that the
files contain."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lockstep.base.dtypes import TensorSpec, tensor_spec, torch_dtype
from lockstep.base.errors import RecipeError
from lockstep.checkpoint.manifest import UnreadableError
from lockstep.checkpoint.object_store import open_storage
from lockstep.checkpoint.saved_model import StateDictReader, StoredCheckpoint
from lockstep.checkpoint.storage import CheckpointName
from lockstep.checkpoint.tensor_shards import TORCH_DTYPES, Box

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SUPPORTED = (
    "weights are a .safetensors file, a checkpoint of a run, a folder of Hugging Face"
    " (model.safetensors, or model.safetensors.index.json), or a file of torch.save (.pt, .pth,"
    " .bin, .ckpt)"
)
_PICKLED = (".pt", ".pth", ".bin", ".ckpt")


@dataclass(frozen=True, slots=True)
class TensorFiles:
    specs: Mapping[str, TensorSpec]
    """Dtype and shape of each tensor."""
    read: Callable[[str, Box], Tensor]
    """Reads slices of a tensor to the CPU."""
    close: Callable[[], None]


def open_tensors(path: str) -> TensorFiles:
    """Open a safetensors or torch.save file, a checkpoint, or a Hugging Face folder."""
    parent, _, last = path.rstrip("/").rpartition("/")
    if (name := CheckpointName.parse(last)) is not None:
        return _checkpoint(parent or ".", name)
    if "://" in path:
        raise RecipeError(
            f"weights {path!r} is a URL; weights are read from a path, or from a checkpoint;"
            " download the file first"
        )
    file = Path(path)
    if file.is_dir():
        return _in_folder(file)
    if not file.is_file():
        what = "is neither a file nor a folder" if file.exists() else "does not exist"
        raise RecipeError(
            f"weights {path!r} {what}; {SUPPORTED}; every process must be able to read it"
        )
    if file.suffix == ".safetensors":
        return _safetensors({file: None})
    if file.name.endswith(".index.json"):
        return _indexed(file)
    if file.suffix in _PICKLED:
        return _pickled(file)
    raise RecipeError(f"weights {path!r} has an unsupported format; {SUPPORTED}")


def _in_folder(folder: Path) -> TensorFiles:
    if (folder / INDEX).is_file():
        return _indexed(folder / INDEX)
    if (folder / SINGLE).is_file():
        return _safetensors({folder / SINGLE: None})
    if (folder / "checkpoints").is_dir():
        raise RecipeError(
            f"weights {str(folder)!r} is a run that has not ended; {SUPPORTED}; name one of the"
            f" checkpoints in {folder / 'checkpoints'}"
        )
    raise RecipeError(
        f"weights {str(folder)!r} is a folder that holds neither {SINGLE} nor {INDEX}; {SUPPORTED}"
    )


def _checkpoint(folder: str, name: CheckpointName) -> TensorFiles:
    """Verifies every byte that it reads."""

    @contextmanager
    def reading() -> Iterator[None]:
        try:
            yield
        except (UnreadableError, OSError) as error:
            raise RecipeError(
                f"weights: checkpoint {name} in {folder} cannot be read ({error}); name another one"
            ) from error

    def read(key: str, box: Box) -> Tensor:
        with reading():
            return as_tensor(model, key)[box]

    with reading():
        model = StoredCheckpoint(open_storage(folder), name).model(0)
    return TensorFiles(model.specs, read, lambda: None)


def as_tensor(model: StateDictReader, name: str) -> Tensor:
    (dtype, shape), data = model.specs[name], model.read(name)
    if not len(data):
        return torch.empty(shape, dtype=torch_dtype(dtype))
    return torch.frombuffer(data, dtype=torch.uint8).view(torch_dtype(dtype)).view(shape)


def _indexed(index: Path) -> TensorFiles:
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        parts: dict[Path, list[str]] = {}
        for name, file in files.items():
            path = index.parent / file
            if os.path.basename(file) != file or (path.exists() and not path.is_file()):
                raise ValueError(f"it names {file!r}, which is not a file in the same folder")
            parts.setdefault(path, []).append(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecipeError(
            f"weights {str(index)!r} cannot be read as an index of safetensors files"
            f" ({_first_line(error)}); fetch it again"
        ) from error
    return _safetensors(parts)


def _safetensors(files: Mapping[Path, list[str] | None]) -> TensorFiles:
    """`files` maps each file to the tensors to read, or to None for all tensors."""
    specs: dict[str, TensorSpec] = {}
    slices: dict[str, tuple[Path, Any]] = {}
    with ExitStack() as stack:
        for path, names in files.items():
            try:
                opened = stack.enter_context(safe_open(path, framework="pt"))
                for name in opened.keys() if names is None else names:
                    part = opened.get_slice(name)
                    dtype = part.get_dtype()
                    specs[name] = TORCH_DTYPES.get(dtype, dtype), tuple(part.get_shape())
                    slices[name] = path, part
            except (OSError, SafetensorError) as error:
                raise RecipeError(
                    f"weights {str(path)!r} cannot be read as safetensors ({_first_line(error)});"
                    " fetch it again"
                ) from error
        stack.callback(slices.clear)  # the slices must be dropped before the files are closed
        close = stack.pop_all().close

    def read(name: str, box: Box) -> Tensor:
        path, part = slices[name]
        try:
            tensor: Tensor = part[box] if box else part[...]
        except (OSError, SafetensorError) as error:
            raise RecipeError(
                f"{name!r} in weights {str(path)!r} cannot be read ({_first_line(error)}); fetch"
                " the file again"
            ) from error
        return tensor

    return TensorFiles(specs, read, close)


def _pickled(path: Path) -> TensorFiles:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises exceptions of many types for a foreign file
        raise _cannot_load(path, error) from error
    tensors = dict(_flat(content, "", path))
    specs = {name: tensor_spec(tensor) for name, tensor in tensors.items()}
    return TensorFiles(specs, lambda name, box: tensors[name][box], tensors.clear)


def _flat(value: Any, name: str, path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors by paths such as model.fc.weight."""
    holds = f"weights {str(path)!r} holds"
    if isinstance(value, Tensor):
        if not name or value.layout != torch.strided or value.is_quantized or value.is_meta:
            raise RecipeError(
                f"{holds} a tensor of layout {value.layout}, type {value.dtype} as {name!r};"
                " weights are dense tensors with names; convert it and save again"
            )
        yield name, value.detach()
    elif isinstance(value, Mapping | list | tuple):
        tensors: dict[str, Tensor] = {}
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            for full_name, tensor in _flat(part, f"{name}.{key}" if name else str(key), path):
                if full_name in tensors:
                    raise RecipeError(
                        f"{holds} two tensors as {full_name!r}; names must be unique; rename one"
                        " and save the file again"
                    )
                tensors[full_name] = tensor
        yield from tensors.items()


def _cannot_load(path: Path, error: Exception) -> RecipeError:
    if isinstance(error, pickle.UnpicklingError):
        needs = re.search(r"GLOBAL (\S+)", str(error))
        what = f" ({needs[1]})" if needs else ""
        return RecipeError(
            f"weights {str(path)!r} cannot be read without running code that the file names{what};"
            " only tensors are loaded; if you trust its source, load it yourself and save its"
            " state dict: safetensors.torch.save_file(torch.load(path, weights_only=False),"
            " 'weights.safetensors')"
        )
    if "mmap can only be used" in str(error):
        return RecipeError(
            f"weights {str(path)!r} is not a torch.save file, or has the format from before torch"
            " 1.6, which cannot be memory-mapped; save it again: torch.save(torch.load(path,"
            " weights_only=True), path)"
        )
    return RecipeError(
        f"weights {str(path)!r} cannot be read as a file of torch.save ({_first_line(error)});"
        " fetch it again"
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
