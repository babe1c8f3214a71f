"""Whatever happens to a checkpoint's bytes, or in the middle of a save: what loads is what was
saved, and nothing is executed."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.states import ATTEMPT, alone, save, values, with_right_hash
from processes import ran
from torch import Tensor

from lockstep.checkpoint.load import CheckpointReader
from lockstep.checkpoint.manifest import (
    BLOCK_BYTES,
    DamagedError,
    FileEntry,
    Manifest,
    check,
    hash_blocks,
)
from lockstep.checkpoint.saver import Saver
from lockstep.checkpoint.storage import MANIFEST, CheckpointName, FolderStorage
from lockstep.checkpoint.tensor_shards import TensorShard
from lockstep.testing.pool import WorkerPool


def loaded(folder: FolderStorage, name: CheckpointName, truth: dict[str, Tensor]) -> str:
    """What came of it: `same`, `other`, or what is damaged."""
    state = {key: torch.zeros_like(value) for key, value in truth.items()}
    try:
        reader = CheckpointReader(folder, name)
        reader.load_into(state, alone())
    except DamagedError as error:
        return f"damaged: {error}"
    same = all(
        torch.equal(state[key].view(-1).view(torch.uint8), truth[key].view(-1).view(torch.uint8))
        for key in truth
    )
    return "same" if same and reader.manifest.values == {"step": name.step} else "other"


def damage(chance: random.Random, path: Path, others: list[Path]) -> str:
    """Do something to a file. Returns what."""
    right = path.read_bytes()
    # its header more often
    place = (
        chance.randrange(len(right))
        if chance.random() < 0.7
        else chance.randrange(min(len(right), 3000))
    )
    kind = chance.choice(
        ["flip", "flip", "truncate", "remove", "replace", "append", "lose", "repeat", "insert"]
    )
    if kind == "flip":
        path.write_bytes(
            right[:place] + bytes([right[place] ^ 1 << chance.randrange(8)]) + right[place + 1 :]
        )
    elif kind == "truncate":
        path.write_bytes(right[:place])
    elif kind == "remove":
        path.unlink()
    elif kind == "replace":
        other = chance.choice(others)
        path.write_bytes(other.read_bytes())
        kind += f" by {other}"
    elif kind == "append":
        path.write_bytes(right + chance.randbytes(chance.choice([1, 64, 5000])))
    elif kind == "lose":
        length = min(chance.choice([1, 512, 4096, 1 << 20]), len(right) - place)
        path.write_bytes(right[:place] + bytes(length) + right[place + length :])
    elif kind == "repeat":
        path.write_bytes(
            right[:place] + right[place // 2 : place // 2 + 4096] + right[place + 4096 :]
        )
    elif kind == "insert":
        path.write_bytes(right[:place] + chance.randbytes(chance.choice([1, 8])) + right[place:])
    return f"{kind} at {place} of {path.name}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "seeds",
    [range(80), pytest.param(range(80, 300), marks=pytest.mark.slow)],
    ids=["some", "more"],
)
def test_each_of_many_damages_is_found_or_harmless(
    pool: WorkerPool, tmp_path: Path, seeds: range
) -> None:
    pool.run(2, save, str(tmp_path), [1, 2])
    folder = FolderStorage(tmp_path)
    first, second = folder.names()
    files = sorted((tmp_path / str(first)).iterdir())
    others = [*files, *sorted((tmp_path / str(second)).iterdir())]
    right = {path: path.read_bytes() for path in files}
    truth = values(1)
    said: list[str] = []
    for seed in seeds:
        chance = random.Random(seed)
        path = chance.choice(files)
        what = f"seed {seed}: {damage(chance, path, others)}"
        outcome = loaded(folder, first, truth)
        found = check(folder, first)
        assert outcome != "other", what
        unchanged = path.exists() and path.read_bytes() == right[path]
        assert unchanged == (not found), f"{what}: {found}"
        assert outcome == "same" or found, what
        if outcome == "same" and not unchanged:
            assert ": append" in what, f"{what}: only what lies behind the end is harmless"
        said.append(outcome)
        path.write_bytes(right[path])
    assert loaded(folder, first, truth) == "same"
    assert said.count("same") < len(seeds) / 4, "most of them do harm"


def test_every_damage_is_reported(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, save, str(tmp_path), [1])
    folder = FolderStorage(tmp_path)
    (name,) = folder.names()
    first, second = (tmp_path / str(name) / f"rank-{rank}.safetensors" for rank in range(2))
    size = max(path.stat().st_size for path in (first, second))
    large, small = (first, second) if first.stat().st_size == size else (second, first)
    right = large.read_bytes()
    for length in (0, BLOCK_BYTES, size - 1):
        large.write_bytes(right[:length])
        assert check(folder, name) == [
            f"{large.name} ends too early: it has {length} of {size} bytes"
        ]
    large.write_bytes(right + b"more")
    small.unlink()
    assert sorted(check(folder, name)) == sorted(
        [
            f"{large.name} goes on behind its end: it has {size + 4} bytes for {size}",
            f"{small.name} is missing",
        ]
    )
    large.write_bytes(bytes([right[0] ^ 1]) + right[1:-1] + bytes([right[-1] ^ 1]))
    last = (size - 1) // BLOCK_BYTES * BLOCK_BYTES
    assert check(folder, name) == [
        f"{small.name} is missing",
        f"{large.name} has other bytes than were written between 0 and {BLOCK_BYTES}",
        f"{large.name} has other bytes than were written between {last} and {size}",
    ]


def state_of(megabytes: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"{number}": torch.randn(1 << 18, generator=generator) for number in range(megabytes)}


def hidden(folder: Path) -> list[str]:
    return [entry for entry in os.listdir(folder) if entry.startswith(".")]


@pytest.mark.command
def test_a_save_killed_at_every_twentieth_of_its_length(tmp_path: Path) -> None:
    folder = FolderStorage(tmp_path)
    tensors = state_of(48, 0)
    states = {step: {name: each + step for name, each in tensors.items()} for step in range(1, 30)}
    saver = Saver(alone(), tmp_path, ATTEMPT)

    def start(step: int) -> float:
        saver.save(step, states[step], values={"step": step}, metadata={})
        return time.perf_counter()

    lengths = []
    for step in range(1, 6):
        begun = start(step)
        assert (ended := saver.poll(100)) is not None
        assert ended.error is None
        lengths.append(time.perf_counter() - begun)
    length, killed = sorted(lengths)[2], 0
    for twentieth in range(1, 21):
        step = 5 + twentieth
        begun = start(step)
        time.sleep(max(0.0, begun + length * twentieth / 20 - time.perf_counter()))
        assert saver._writer is not None
        os.kill(saver._writer._process.pid, signal.SIGKILL)
        ended = saver.poll(100)
        assert ended is not None
        there = folder.names()
        assert there[-1].step == (step if ended.error is None else there[-1].step)
        for name in there[-2:]:
            assert loaded(folder, name, states[name.step]) == "same"
        if there[-1].step == step:  # the machine is faster than it was
            length *= twentieth / 20
        else:
            killed += 1
        folder.remove_uncommitted()
        assert hidden(tmp_path) == []
        for name in there[:-1]:
            folder.delete(name)
    start(29)
    ended = saver.poll(100)
    saver.close()
    assert ended is not None
    assert ended.error is None
    assert loaded(folder, folder.names()[-1], states[29]) == "same"
    assert killed >= 10, "most were killed before they were complete"


def on_a_small_disk(place: str) -> None:
    """Runs alone, as root of its own namespaces: a script of its own mounts the disk."""
    path, chance = Path(place), random.Random(0)
    folder = FolderStorage(path / "run")
    first, second = state_of(8, 1), state_of(8, 2)
    saver = Saver(alone(), path / "run", ATTEMPT)
    saver.save(1, first, values={"step": 1}, metadata={})
    assert (ended := saver.poll(100)) is not None
    assert ended.error is None
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    for step in range(2, 22):
        left = chance.randrange(size)
        free = os.statvfs(path).f_bavail * 4096
        (path / "ballast").write_bytes(bytes(max(0, free - left)))
        saver.save(step, second, values={"step": step}, metadata={})
        ended = saver.poll(100)
        assert ended is not None
        assert ended.error is not None
        assert ended.error.startswith("No space left on device"), ended
        assert [name.step for name in folder.names()] == [1]
        assert loaded(folder, folder.names()[0], first) == "same"
        assert hidden(path / "run") == [], "what a failed save wrote is removed"
        (path / "ballast").unlink()
    saver.save(30, second, values={"step": 30}, metadata={})
    saver.poll(100)
    assert loaded(folder, folder.names()[-1], second) == "same"
    saver.close()


def test_a_disk_that_fills_up_at_any_byte(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("this system lets no user mount a file system (unshare -rm)")
    work = (
        "import sys; sys.path[:0] = [sys.argv[2]]; from checkpoint.test_damage import"
        " on_a_small_disk; on_a_small_disk(sys.argv[1])"
    )
    script = 'mount -t tmpfs -o size=20m tmpfs "$1" && exec "$0" -c "$2" "$1" "$3"'
    command = [
        "unshare",
        "-rm",
        "sh",
        "-c",
        script,
        sys.executable,
        str(tmp_path),
        work,
        str(Path(__file__).parents[1]),
    ]
    done = ran(command)
    assert done.returncode == 0, done.stderr


class Trap:
    """A pickle of it makes a file where it is loaded."""

    def __init__(self, flag: Path) -> None:
        self._flag = flag

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self._flag), "w")


def forged(data: bytes, dtype: str) -> bytes:
    """The manifest of a checkpoint of one file, by someone who knows how to make it."""
    places = {TensorShard("weight", dtype, (2,), (0,), (2,)): 0}
    return Manifest(
        step=1,
        files={"rank-0.safetensors": FileEntry(hash_blocks(memoryview(data)), places)},
        values={"step": 1},
        metadata={},
    ).encode()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of the file that the trap opens
def test_nothing_in_a_checkpoint_is_executed(pool: WorkerPool, tmp_path: Path) -> None:
    flag = tmp_path / "executed"
    torch.save(Trap(flag), tmp_path / "trap.pt")
    zipped, plain = (tmp_path / "trap.pt").read_bytes(), pickle.dumps(Trap(flag))
    torch.load(tmp_path / "trap.pt", weights_only=False)
    assert flag.exists(), "it works where it is loaded"
    flag.unlink()
    pool.run(2, save, str(tmp_path / "run"), [1])
    folder = FolderStorage(tmp_path / "run")
    (name,) = folder.names()
    place = folder.path / str(name)
    shutil.copytree(place, tmp_path / "right")
    truth = values(1)
    for trap in (zipped, plain):
        for file in (MANIFEST, "rank-0.safetensors", "rank-1.safetensors"):
            (place / file).write_bytes(trap)
            assert loaded(folder, name, truth).startswith("damaged: ")
            assert check(folder, name) != []
            shutil.copy(tmp_path / "right" / file, place / file)
        for beside in (
            ".metadata",
            "model.pt",
            "pytorch_model.bin",
            "rank-0.safetensors.json",
            "rank-2.safetensors",
            "manifest.pkl",
        ):
            (place / beside).write_bytes(trap)
            (folder.path / beside).write_bytes(trap)
        assert loaded(folder, name, truth) == "same"
        assert check(folder, name) == []
    for dtype in ("float32", "load", "nothing"):
        (place / "rank-0.safetensors").write_bytes(zipped)
        (place / MANIFEST).write_bytes(forged(zipped, dtype))
        assert loaded(folder, name, {"weight": torch.zeros(2)}) in (
            "other",
            f"damaged: the manifest cannot be parsed: it names the type {dtype!r}",
        )
    for content in (
        [],
        {"files": 3},
        {"files": {"a": None}},
        {"files": {"a": {"bytes": "x", "blocks": 1, "shards": {}}}, "step": 1},
    ):
        (place / MANIFEST).write_bytes(with_right_hash(content))
        assert loaded(folder, name, truth).startswith("damaged: the manifest cannot be parsed")
    (place / MANIFEST).write_bytes(b"[" * 200_000)
    assert loaded(folder, name, truth).startswith("damaged: the manifest cannot be parsed")
    assert not flag.exists()


def test_a_writer_that_ended_between_two_saves_is_replaced_and_closed(tmp_path: Path) -> None:
    saver = Saver(alone(), tmp_path, ATTEMPT)
    for step in (1, 2):
        saver.save(step, state_of(4, step), values={}, metadata={})
        assert (ended := saver.poll(100)) is not None
        assert ended.error is None
        writer = saver._writer
        assert writer is not None
        if step == 1:
            first = writer._process
            first.kill()
            first.wait()
    assert writer._process is not first
    assert first.stdin is not None
    assert first.stdin.closed
    saver.close()
    assert [name.step for name in FolderStorage(tmp_path).names()] == [1, 2]
