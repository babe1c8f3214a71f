"""Saving behind the training: a step stops for a copy into shared memory, and another process hashes, writes and commits it."""

from __future__ import annotations

import json
import mmap
import os
import secrets
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.file_layout import Image
from lockstep.checkpoint.pieces import Piece, dealt, pieces_of, torch_dtype
from lockstep.checkpoint.store import folder_at
from lockstep.comm.mesh import to_local
from lockstep.comm.world import World

END_SECONDS = 5.0
"""For the process that writes, once it is told to end."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What came of a save, on this rank."""

    step: int
    error: str | None
    """Why it failed, in words."""
    left: str | None = None
    """Why an old checkpoint could not be deleted, in words."""


class Saver:
    """One a rank; every rank makes it, and calls `save`, alike. At most one save is under way."""

    def __init__(self, world: World, folder: Path | str, attempt: str) -> None:
        """`folder`: a path or a URL, as `store.folder_at` takes it. `attempt`: see `folder.Name`; the same on every rank.

        Raises `RunDirectoryError` where no driver for such a URL is installed.
        """
        folder_at(folder)
        self._world = world
        self._folder = folder
        self._attempt = attempt
        self._held: dict[str, Piece] | None = None
        self._writer: _Writer | None = None
        self._memory: _Memory | None = None
        self._under_way: int | None = None

    def prepare(self, state: Mapping[str, Tensor]) -> None:
        """Find out who writes what, make room for it and start the process that writes, where that has not been done for such a state.

        The first `save` does it too, and training waits for it then: longer than for any save after it. Not while a save is under way.
        """
        self._agree(state)

    def _agree(self, state: Mapping[str, Tensor]) -> str:
        """Prepare. Returns what the next save is known by among the ranks: what an earlier one left must not be taken for it."""
        found = pieces_of(state)
        said = self._world.gather_rows(torch.tensor([[found != self._held, secrets.randbits(32)]]), [1] * self._world.size)
        if said[:, 0].any():
            everyone = self._world.gather_values([piece.say() for piece in found.values()])
            mine = dealt([[Piece.read(said) for said in pieces] for pieces in everyone])[self._world.rank]
            self.close()
            self._memory = _Memory(Image(mine), mine)
            self._held = found
        assert self._memory is not None
        if self._writer is not None and self._writer.has_ended:
            self._writer.close()
            self._writer = None
        if self._writer is None:
            self._writer = _Writer(self._memory)
        return f"{said[0, 1]:08x}"

    def save(
        self,
        step: int,
        state: Mapping[str, Tensor],
        *,
        values: Mapping[str, Any],
        facts: Mapping[str, Any],
        keep: Mapping[str, Any] | None = None,
    ) -> None:
        """Copy the state, and have it written behind what follows. Not while a save is under way.

        `state`: tensors by name, what this rank holds of them; a name may be on some ranks only. `values`: JSON, objects of all ranks are
        merged. `facts`: JSON, rank 0's count. `keep`: `retain.retired`'s other arguments, `scores` by the text of names; None: keep all.
        """
        assert self._under_way is None, "one save at a time"
        known_by = self._agree(state)
        assert self._memory is not None
        assert self._writer is not None
        self._memory.copy(state)
        job: dict[str, Any] = {
            "folder": str(self._folder),
            "step": step,
            "attempt": self._attempt,
            "save": known_by,
            "file": _file(self._world.rank),
            "values": values,
        }
        if self._world.rank == 0:
            job |= {"files": [_file(rank) for rank in range(self._world.size)], "facts": facts}
            if keep is not None:
                job["keep"] = keep
        self._writer.tell(job)
        self._under_way = step

    @property
    def is_under_way(self) -> bool:
        return self._under_way is not None

    def abandon(self) -> None:
        """End the save under way: another rank's part of it will not come."""
        if self._writer is not None:
            self._writer.close()
        self._writer = self._under_way = None

    def poll(self, timeout_seconds: float = 0.0) -> Ended | None:
        """What came of the save under way, once; None while it goes on, or where none is. `timeout_seconds`: to wait for it."""
        if self._under_way is None or self._writer is None:
            return None
        answer = self._writer.answer(timeout_seconds)
        if answer is None:
            return None
        step, self._under_way = self._under_way, None
        if answer["error"] is not None:  # what has failed may wait for a store yet; the next save has another process
            self._writer.close()
            self._writer = None
        return Ended(step, answer["error"], answer.get("left"))

    def close(self) -> None:
        """Give everything up: a save under way too."""
        if self._writer is not None:
            self._writer.close()
        if self._memory is not None:
            self._memory.close()
        self._writer = self._memory = self._held = self._under_way = None


class _Memory:
    """What a file is to be, in memory that another process sees too."""

    def __init__(self, image: Image, pieces: Sequence[Piece]) -> None:
        self.layout = {"bytes": image.bytes, "pieces": [[*piece.say(), image.span(piece)[0]] for piece in pieces]}
        """For the process that writes: what lies where."""
        self.descriptor = os.memfd_create("lockstep-checkpoint")
        os.ftruncate(self.descriptor, image.bytes)
        self._mapped = mmap.mmap(self.descriptor, image.bytes)
        everything = torch.frombuffer(self._mapped, dtype=torch.uint8)
        everything.zero_()  # the system gives memory when it is first written to, which takes ten times as long as to write to it again
        self._mapped[: len(image.header)] = image.header
        self._targets = {}
        for piece in pieces:
            start, stop = image.span(piece)
            self._targets[piece.name] = everything[start:stop].view(torch_dtype(piece.dtype)).view(piece.lengths)

    @torch.no_grad()
    def copy(self, state: Mapping[str, Tensor]) -> None:
        for name, target in self._targets.items():
            target.copy_(to_local(state[name]))

    def close(self) -> None:
        self._targets = {}
        os.close(self.descriptor)


class _Writer:
    """The process that writes (`lockstep.checkpoint.writer`)."""

    def __init__(self, memory: _Memory) -> None:
        command = [sys.executable, "-m", "lockstep.checkpoint.writer", str(memory.descriptor)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[memory.descriptor])
        self.tell(memory.layout)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def tell(self, said: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which `answer` says
            self._process.stdin.write(json.dumps(said).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, timeout_seconds: float) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_seconds)[0]:
            return None
        line = self._process.stdout.readline()
        found: dict[str, Any] = json.loads(line) if line else {"error": f"the process that writes ended with status {self._process.wait()}"}
        return found

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:  # it is held up, by a disk perhaps
            self._process.kill()
            self._process.wait()


def _file(rank: int) -> str:
    return f"rank-{rank}.safetensors"
