"""The writer process, which hashes, writes and commits saves: `python -m lockstep.checkpoint.writer
MEMORY`. Does not import torch.

MEMORY names the `SharedFile` that contains this rank's file. Standard input has the file's layout,
then one save per line. Standard output has one result per line. All lines are JSON. Every rank's
writer writes the rank's file, and a note with the hashes of its blocks. Rank 0's writer waits for
the notes, writes the manifest and commits.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Literal

from lockstep.base.system import BINARY, signals
from lockstep.checkpoint.manifest import (
    BlockHashes,
    FileEntry,
    Manifest,
    hash_bytes,
    merge_objects,
    split_blocks,
)
from lockstep.checkpoint.object_store import open_storage
from lockstep.checkpoint.storage import (
    MANIFEST,
    CheckpointName,
    Storage,
    discarding_after_failure,
)
from lockstep.checkpoint.tensor_shards import TensorShard

Scores = Mapping[CheckpointName, float]
NICENESS = 10


class SharedFile:
    """Memory shared with the writer process, initially zero. On Linux, the memory is freed with the
    last process that uses it. On other systems, the memory is a temporary file."""

    def __init__(self, size_bytes: int) -> None:
        self._path: str | None = None
        if sys.platform == "linux":
            self._descriptor = os.memfd_create("lockstep-checkpoint")
        else:
            self._descriptor, self._path = tempfile.mkstemp(prefix="lockstep-checkpoint-")
        os.ftruncate(self._descriptor, size_bytes)
        self.mapped = mmap.mmap(self._descriptor, size_bytes)

    @property
    def name(self) -> str:
        """Argument for `map_shared_file`."""
        return str(self._descriptor) if self._path is None else self._path

    @property
    def inherited(self) -> list[int]:
        """File descriptors that a process must inherit to map the file."""
        return [self._descriptor] if self._path is None else []

    def close(self) -> None:
        """Call this method when no tensor uses the memory and the other process has ended."""
        del self.mapped
        os.close(self._descriptor)
        if self._path is not None:
            with suppress(OSError):  # fails on Windows if something still maps the file
                os.unlink(self._path)


def map_shared_file(name: str, size_bytes: int) -> mmap.mmap:
    descriptor = int(name) if name.isdecimal() else os.open(name, os.O_RDONLY | BINARY)
    return mmap.mmap(descriptor, size_bytes, access=mmap.ACCESS_READ)


def save(job: dict[str, Any], shards: Mapping[TensorShard, int], content: memoryview) -> None:
    """Write this rank's file. Rank 0 also commits the checkpoint. After an `OSError`, each rank
    removes its own files."""
    folder, name = open_storage(job["folder"]), _name(job)
    folder.begin(name)
    with discarding_after_failure(folder, name) as written:
        _write(job, shards, content, folder, written)


def _write(
    job: dict[str, Any],
    shards: Mapping[TensorShard, int],
    content: memoryview,
    folder: Storage,
    written: list[str],
) -> None:
    name, own = _name(job), job["file"]
    blocks: list[str] = []

    def hashed(block: memoryview) -> memoryview:
        blocks.append(hash_bytes([block]))
        return block

    written += [own, note(own)]
    folder.write(name, own, map(hashed, split_blocks(content)))
    files = {own: FileEntry(BlockHashes(len(content), tuple(blocks)), shards)}
    if "files" not in job:
        text = json.dumps([job["save"], files[own].to_json(), job["values"]])
        folder.write(name, note(own), [text.encode()])
        return
    values = [job["values"]]
    others = [file for file in job["files"] if file != own]
    for file in others:
        entry, theirs = _awaited(folder, name, file, job["save"])
        files[file] = FileEntry.from_json(entry)
        values.append(theirs)
    written += [MANIFEST, *others, *map(note, others)]
    for file in others:
        folder.remove(name, note(file))
    manifest = Manifest(
        step=name.step, files=files, values=merge_objects(values), metadata=job["metadata"]
    )
    folder.commit(name, manifest.encode())


def _name(job: dict[str, Any]) -> CheckpointName:
    return CheckpointName(job["step"], job["attempt"])


def _awaited(folder: Storage, name: CheckpointName, file: str, save: str) -> tuple[Any, Any]:
    """Wait for another rank's note. Return the file's entry for the manifest, and the rank's
    values."""
    while True:
        if (text := folder.read_uncommitted(name, note(file))) is not None:
            try:
                identifier, entry, values = json.loads(text)
            except ValueError:
                identifier = None  # still being written
            if identifier == save:
                return entry, values
        time.sleep(folder.wait_seconds)


def checkpoints_to_delete(
    names: Collection[CheckpointName],
    *,
    newest: CheckpointName,
    last: int,
    every: int | None,
    sparse: bool,
    agreed: int | None,
    scores: Scores,
    mode: Literal["min", "max"],
) -> list[CheckpointName]:
    """Keeps the `last` newest checkpoints (at least 1), multiples of `every` steps, and
    `sparse_steps` if `sparse`. Keeps the newest checkpoint with at most `agreed` steps. Keeps the
    earliest checkpoint with the best of `scores`; NaN counts as no score. Keeps checkpoints later
    than `newest`, which were damaged when the run was resumed."""
    ordered = sorted(name for name in names if name <= newest)
    kept = set(ordered[-last:])
    if every is not None:
        kept |= {name for name in ordered if name.step % every == 0}
    if sparse:
        steps = sparse_steps(sorted({name.step for name in ordered}))
        kept |= {name for name in ordered if name.step in steps}
    if agreed is not None:
        kept |= set([name for name in ordered if name.step <= agreed][-1:])
    scored = [name for name in ordered if not math.isnan(scores.get(name, math.nan))]
    if scored:
        kept.add((min if mode == "min" else max)(scored, key=scores.__getitem__))
    return [name for name in ordered if name not in kept]


def sparse_steps(steps: Sequence[int]) -> set[int]:
    """Return the steps to keep. A step is dropped if the distance between its neighbours is at most
    the distance from the later neighbour to the last step. Distances between neighbours double with
    age: about 2 log2(n) of n equidistant steps are kept. A step that is dropped now would also be
    dropped later."""
    kept: list[int] = []
    for step, following in itertools.pairwise(steps):
        if not kept or following - kept[-1] > steps[-1] - following:
            kept.append(step)
    return {*kept, *steps[-1:]}


def _retire(job: dict[str, Any]) -> str | None:
    """Return the reason why deletion failed."""
    if "keep" not in job:
        return None
    folder, keep = open_storage(job["folder"]), job["keep"]
    names = {str(name): name for name in folder.names()}
    scores = {names[text]: score for text, score in keep["scores"].items() if text in names}
    keep = keep | {"newest": _name(job), "scores": scores}
    try:
        for name in checkpoints_to_delete(names.values(), **keep):
            folder.delete(name)
    except OSError as error:
        return _words(error)
    return None


def _words(error: OSError) -> str:
    return f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")


def note(file: str) -> str:
    """Name of a small file that marks `file` as complete."""
    return f"{file}.json"


def main() -> None:
    for number in signals("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(os, "nice"):
        os.nice(NICENESS)
    lines: SimpleQueue[str] = SimpleQueue()
    threading.Thread(
        target=_read_lines, args=[lines], name="lockstep-checkpoint-writer", daemon=True
    ).start()
    described = json.loads(lines.get())
    shards = {TensorShard.from_json(shard): start for *shard, start in described["shards"]}
    content = memoryview(map_shared_file(sys.argv[1], described["bytes"]))
    while True:
        job = json.loads(lines.get())
        try:
            save(job, shards, content)
            result = {"error": None, "not_deleted": _retire(job)}
        except OSError as error:
            result = {"error": _words(error)}
        try:
            print(json.dumps(result), flush=True)
        except BrokenPipeError:  # the training process has ended
            os._exit(0)


def _read_lines(lines: SimpleQueue[str]) -> None:
    """Ends this process at the end of its input."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
