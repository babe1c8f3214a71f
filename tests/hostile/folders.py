"""A small run directory, and what somebody may do to it before handing it on. Needs no torch."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import run_files
from checkpoint.states import with_right_hash
from report.run_directories import whole

from lockstep.checkpoint.manifest import FileEntry, Manifest, hash_blocks
from lockstep.checkpoint.saved_model import read_safetensors
from lockstep.checkpoint.tensor_shards import FileLayout, TensorShard
from lockstep.cli.target import fingerprint_of_saved

STEPS = (3, 5)
TENSORS = {
    "weight": ("float32", (4, 3)),
    "bias": ("float32", (3,)),
    "count": ("int64", ()),
    "none": ("float32", (0, 2)),
}
CONSTANTS = [
    *(
        None,
        True,
        False,
        -1,
        0,
        1,
        2**31,
        2**63,
        2**70,
        10**400,
        -(2**63),
        1e308,
        1e-320,
        0.5,
        float("nan"),
        float("inf"),
    ),
    *(
        "",
        "x",
        "\ud800",
        "../../x",
        "/etc/passwd",
        "a/b",
        "\x1b]0;x\x07",
        "<planted>",
        "\x00",
        "9" * 5000,
        "s3://127.0.0.1:9/x",
    ),
    *(
        "//127.0.0.1/x",
        "nan",
        "step-00000005-00c0ffee",
        "float32",
        "rank-0.safetensors",
        "x" * 100_000,
    ),
    *([], {}, [[]], [1], ["x"], [None], {"x": 1}, {"": {}}, [0] * 3000, {"a": [{"b": {"c": [1]}}]}),
]


def write_run(folder: Path) -> None:
    """Write a run that has ended, with two checkpoints of two ranks each."""
    whole(folder, steps=40, every=10, world=2)
    for step in STEPS:
        _write_checkpoint(folder / "checkpoints" / f"step-{step:08d}-00c0ffee", step)
    shards = [
        TensorShard(name, dtype, shape, (0,) * len(shape), shape)
        for name, (dtype, shape) in TENSORS.items()
    ]
    _write_tensors(folder / "model.safetensors", shards, seed=40)
    result = run_files.result(folder)
    result["fingerprint"] = fingerprint_of_saved(read_safetensors(folder / "model.safetensors"))
    result["best"] = {
        "metric": "loss",
        "value": 1.5,
        "step": 3,
        "checkpoint": "step-00000003-00c0ffee",
    }
    (folder / "result.json").write_text(json.dumps(result))
    holder = {
        "pid": os.getpid(),
        "host": "a",
        "process_ids": "x",
        "started": "2026-01-01T00:00:00+00:00",
    }
    (folder / "lock").write_text(json.dumps(holder))
    (folder / "huggingface").mkdir()
    (folder / "huggingface" / "config.json").write_text('{"model_type": "x"}')
    (folder / "profile").mkdir()
    memory = {
        "seconds": [0.0, 1.0],
        "bytes_by_cause": {"weights": [1, 2]},
        "at_peak": {"weights": 2},
        "peak_bytes": 2,
    }
    memory |= {"peak_seconds": 1.0, "peak_phase": "forward", "largest": [[2, "weights", "w"]]}
    (folder / "profile" / "memory.json").write_text(
        json.dumps({"ranks": [memory], "steps": [1, 2]})
    )


def _write_tensors(path: Path, shards: list[TensorShard], seed: int) -> FileEntry:
    layout = FileLayout(shards)
    content = layout.header + np.random.default_rng(seed).bytes(layout.bytes - len(layout.header))
    path.write_bytes(content)
    return FileEntry(hash_blocks(memoryview(content)), layout.starts)


def _write_checkpoint(folder: Path, step: int) -> None:
    folder.mkdir(parents=True)
    mine: list[list[TensorShard]] = [[], []]
    for number, (name, (dtype, shape)) in enumerate(TENSORS.items()):
        full = f"0/model/{name}"
        if name == "weight":
            for rank in range(2):
                mine[rank].append(TensorShard(full, dtype, shape, (2 * rank, 0), (2, 3)))
        else:
            mine[number % 2].append(TensorShard(full, dtype, shape, (0,) * len(shape), shape))
    files = {
        f"rank-{rank}.safetensors": _write_tensors(
            folder / f"rank-{rank}.safetensors", mine[rank], seed=step + rank
        )
        for rank in range(2)
    }
    manifest = Manifest(
        step=step,
        files=files,
        values={
            "modules": {"0": {"tied": {"other": "bias"}, "optimizers": {}, "training": {}}},
            "state": {"hook": 1},
            "step": step,
        },
        metadata={
            "recipe": {"steps": 40},
            "plan": "replicate=2",
            "world_size": 2,
            "saved": "2026-01-01T00:00:00+00:00",
            "score": {"metric": "loss", "mode": "min", "value": 1.0 + step},
            "optimizers": [],
            "code": {},
            "versions": {"python": "3"},
        },
    )
    (folder / "manifest.json").write_bytes(manifest.encode())


class Mutator:
    """Changes a run directory at random, and puts it back."""

    def __init__(self, folder: Path, outside: Path) -> None:
        self.folder, self.outside = folder, outside
        self.files = {
            path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
        }
        self.folders = [path for path in sorted(folder.rglob("*")) if path.is_dir()]
        self.is_forged = False
        """True if a manifest has the hash of changed content."""

    def change(self, chance: random.Random) -> str:
        """Make one to three changes. Returns what they are."""
        self.is_forged = False
        return "; ".join(self._change(chance) for _ in range(chance.choice([1, 1, 1, 2, 3])))

    def restore(self) -> None:
        """Make it what it was. Names are compared, and the contents of what `change` or a run
        writes."""
        for folder in (self.folder, *self.folders):
            if folder.is_symlink() or not folder.is_dir():
                self._remove(folder)
                folder.mkdir()
            for entry in list(os.scandir(folder)):
                is_folder = entry.is_dir(follow_symlinks=False)
                if not (
                    Path(entry.path) in (self.folders if is_folder else self.files)
                    and (is_folder or entry.is_file(follow_symlinks=False))
                ):
                    self._remove(Path(entry.path))
        for path, content in self.files.items():
            if (
                not path.exists()
                or path.stat().st_size != len(content)
                or path.read_bytes() != content
            ):
                path.write_bytes(content)

    def _remove(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def _change(self, chance: random.Random) -> str:
        if chance.random() < 0.06:
            path = chance.choice(self.folders)
            if path.parent.is_symlink() or not path.parent.is_dir():
                return f"nothing at {path.relative_to(self.folder)}"
            return f"{self._put(path, chance)} at {path.relative_to(self.folder)}"
        path = chance.choice(
            [*self.files, *(path for path in self.files if path.name == "manifest.json")]
        )
        name = path.relative_to(self.folder)
        if not path.is_file() or path.is_symlink():
            return f"nothing at {name}"
        if chance.random() < 0.15:
            return f"{self._put(path, chance)} at {name}"
        return self.change_file(path, chance)

    def change_file(self, path: Path, chance: random.Random) -> str:
        """Change the bytes of a file. Returns how."""
        name = path.relative_to(self.folder)
        how: Callable[[bytes, random.Random], bytes] = _bytes
        if chance.random() < 0.75:
            how = (
                self._manifest
                if path.name == "manifest.json"
                else _tensors
                if path.suffix == ".safetensors"
                else _json
            )
        path.write_bytes(how(path.read_bytes(), chance))
        if path.suffix == ".safetensors" and path.parent != self.folder and chance.random() < 0.5:
            self._forge_hashes(path)
            how = self._forge_hashes  # type: ignore[assignment]
        return f"{how.__name__} of {name}"

    def _put(self, path: Path, chance: random.Random) -> str:
        """Put something else in the place of a file or folder."""
        self._remove(path)
        secret, kind = self.outside / "secret", chance.randrange(9)
        if kind == 0:
            os.mkfifo(path)
        elif kind < 5:
            target = [secret, self.outside, path, self.outside / "absent"][kind - 1]
            path.symlink_to(target)
        elif kind == 5:
            path.mkdir()
        elif kind == 6:
            with path.open("wb") as file:
                file.truncate(5 << 30)
        elif kind == 7:
            path.touch()
        return [
            "a FIFO",
            "a link to a file",
            "a link to a folder",
            "a link to itself",
            "a dangling link",
            "a folder",
            "5 GB",
            "empty",
            "none",
        ][kind]

    def _manifest(self, data: bytes, chance: random.Random) -> bytes:
        try:
            content = json.loads(data)["content"]
            changed = with_right_hash(mutated(content, chance))
        except (ValueError, LookupError, TypeError, RecursionError):
            return data
        self.is_forged = True
        return changed

    def _forge_hashes(self, path: Path) -> None:
        """Give a file of a checkpoint the hashes of its bytes, in the manifest."""
        manifest = path.parent / "manifest.json"
        try:
            content = json.loads(manifest.read_bytes())["content"]
            data = path.read_bytes()
            found = hash_blocks(memoryview(data))
            content["files"][path.name] |= {"bytes": len(data), "blocks": list(found.blocks)}
            manifest.write_bytes(with_right_hash(content))
        except (ValueError, LookupError, TypeError, AttributeError, OSError, RecursionError):
            return
        self.is_forged = True


def mutated(value: Any, chance: random.Random) -> Any:
    """JSON with one value changed, somewhere inside."""
    places: list[tuple[Any, Any]] = []

    def walk(inside: Any) -> None:
        for key, each in inside.items() if isinstance(inside, dict) else enumerate(inside):
            places.append((inside, key))
            if isinstance(each, dict | list):
                walk(each)

    if not isinstance(value, dict | list) or chance.random() < 0.03:
        return chance.choice(CONSTANTS)
    walk(value)
    if not places:
        return chance.choice(CONSTANTS)
    inside, key = chance.choice(places)
    kind = chance.randrange(8)
    if kind == 0:
        del inside[key]
    elif kind == 1 and isinstance(inside[key], int | float) and abs(inside[key]) < 1e9:
        inside[key] += chance.choice([-1, 1, -4, 4, 0.5, 1 << 33])
    elif kind == 2 and isinstance(inside, dict):
        inside[
            chance.choice(["x", "../x", "\x1b[2J", "<planted>", "\ud800", "step", "", "time"])
        ] = inside.pop(key)
    elif kind == 3 and isinstance(inside, list):
        inside.insert(key, json.loads(json.dumps(chance.choice(inside))))
    elif kind == 4:
        other, where = chance.choice(places)
        inside[key] = json.loads(json.dumps(other[where]))
    elif kind == 5:
        for _ in range(chance.choice([2, 70, 2000 if chance.random() < 0.1 else 200])):
            inside[key] = [inside[key]] if chance.random() < 0.5 else {"x": inside[key]}
    else:
        inside[key] = chance.choice(CONSTANTS)
    return value


def _json(data: bytes, chance: random.Random) -> bytes:
    """A file of JSON, or of lines of it, with changed values."""
    lines = data.splitlines() or [b"{}"]
    if chance.random() < 0.03:
        row = {"step": 1, "time": 1.0, **{f"metric {number}": 1.0 for number in range(30_000)}}
        return data + b"\n" + json.dumps(row).encode() + b"\n"
    for number in [chance.randrange(len(lines))] if chance.random() < 0.7 else range(len(lines)):
        try:
            lines[number] = json.dumps(mutated(json.loads(lines[number]), chance)).encode()
        except (ValueError, RecursionError):
            continue
    if chance.random() < 0.1:
        chance.shuffle(lines)
    return b"\n".join(lines) + (b"\n" if data.endswith(b"\n") else b"")


def _tensors(data: bytes, chance: random.Random) -> bytes:
    """A safetensors file with another header."""
    length = int.from_bytes(data[:8], "little")
    if chance.random() < 0.2:
        return (
            chance.choice([0, 1, length + 1, 1 << 33, (1 << 64) - 1, 99_000_000]).to_bytes(
                8, "little"
            )
            + data[8:]
        )
    try:
        header = json.dumps(mutated(json.loads(data[8 : 8 + length]), chance)).encode()
    except (ValueError, RecursionError):
        return data
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def _bytes(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    kind = chance.randrange(5)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + chance.randbytes(chance.choice([1, 8, 100])) + data[at:]
    if kind == 2:
        return data[:at] + data[at // 2 : at] + data[at:]
    if kind == 3:
        return data[:at] + bytes(min(50, len(data) - at)) + data[at + 50 :]
    return (
        data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
        if at < len(data)
        else data + b"\0"
    )
