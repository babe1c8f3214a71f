"""Asynchronous checkpoints. Training waits only for a copy of the state into shared memory. A
writer process hashes the copied state, writes it to the storage, and commits the checkpoint. If the
shared memory can be pinned (cudaHostRegister), copies are queued between the kernels of two steps,
and the host does not wait for them."""

from __future__ import annotations

import json
import secrets
import subprocess
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from lockstep.base import accelerator
from lockstep.base.dtypes import torch_dtype
from lockstep.base.processes import own_python
from lockstep.checkpoint.manifest import JsonObject
from lockstep.checkpoint.object_store import open_storage
from lockstep.checkpoint.tensor_shards import (
    SMALL_BYTES,
    FileLayout,
    TensorShard,
    assign_writes,
    local_shards,
)
from lockstep.checkpoint.writer import SharedFile
from lockstep.comm.mesh import to_local
from lockstep.comm.world import World

GROUP_BYTES = 16 << 20
"""Small shards are concatenated up to this size on the device, and then copied to the host at
once."""
END_SECONDS = 5.0
"""Time after which a writer process that has not ended is killed."""


@dataclass(frozen=True, slots=True)
class SaveResult:
    step: int
    error: str | None
    """None if the save succeeded."""
    not_deleted: str | None = None
    """None if every checkpoint to delete was deleted."""
    device_seconds: float = 0.0
    """Time from the device's last kernel before `Saver.begin` to the end of the copies. 0 if the
    host waited for the copies."""


class Saver:
    """Saves checkpoints, one at a time. Every rank creates a `Saver`, and calls `prepare` and
    `save` at the same points of the training."""

    def __init__(self, world: World, folder: Path | str, attempt: str) -> None:
        open_storage(folder)
        self._world = world
        self._folder = folder
        self._attempt = attempt
        self._shards: dict[str, TensorShard] | None = None
        self._writer: _Writer | None = None
        self._memory: _FileContent | None = None
        self._began: dict[torch.device, torch.Event] = {}
        """For each device, an event after the last kernel before the save."""
        self._under_way: int | None = None
        self._waiting: dict[str, Any] | None = None
        """The writer process's job, which is sent once the copies are complete."""

    def prepare(self, state: Mapping[str, Tensor]) -> str:
        """Assign shards to ranks, allocate memory and start the writer, unless the layout is
        unchanged. All ranks call this method between saves, or the first `save` calls it. Return an
        identifier that distinguishes the next save's notes from earlier notes."""
        shards = local_shards(state)
        mine = torch.tensor([[shards != self._shards, secrets.randbits(32)]])
        rows = self._world.gather_rows(mine, [1] * self._world.size)
        if rows[:, 0].any():
            layout = FileLayout(assign_to_this_rank(shards, self._world))
            self.close()
            devices = {to_local(tensor).device for tensor in state.values()}
            self._memory = _FileContent(layout, self._world.device, devices)
            self._shards = shards
        assert self._memory is not None
        if self._writer is not None and self._writer.has_ended():
            self._close_writer()
        if self._writer is None:
            self._writer = _Writer(self._memory)
        return f"{rows[0, 1]:08x}"

    def begin(self) -> None:
        """Mark the point at which training stops for a save."""
        if accelerator.can_register_memory(self._world.device):
            streams = self._memory.streams if self._memory is not None else ()
            self._began = {
                device: accelerator.recorded_event(device, timed=True)
                for device in {self._world.device, *streams}
            }

    def save(
        self,
        step: int,
        state: Mapping[str, Tensor],
        *,
        values: JsonObject,
        metadata: JsonObject,
        keep: JsonObject | None = None,
    ) -> None:
        """Every rank must call this method, between saves. `values` are merged over ranks.
        `metadata` is used on rank 0 only. `keep` has arguments of `writer.checkpoints_to_delete`.
        `keep=None` keeps all checkpoints."""
        assert self._under_way is None, "one save at a time"
        identifier = self.prepare(state)
        assert self._memory is not None
        assert self._writer is not None
        self._memory.copy(state, self._began)
        self._began = {}
        files = [f"rank-{rank}.safetensors" for rank in range(self._world.size)]
        job = {
            "folder": str(self._folder),
            "step": step,
            "attempt": self._attempt,
            "save": identifier,
            "file": files[self._world.rank],
            "values": values,
        }
        if self._world.rank == 0:
            job |= {"files": files, "metadata": metadata}
            if keep is not None:
                job["keep"] = keep
        self._waiting, self._under_way = job, step
        self._send_if_copied(0.0)

    @property
    def not_registered(self) -> str | None:
        """Reason why memory could not be pinned. The host waits for copies to memory that is not
        pinned."""
        return None if self._memory is None else self._memory.not_registered

    @property
    def is_under_way(self) -> bool:
        """True from `save` until `poll` returns its result."""
        return self._under_way is not None

    def abandon(self) -> None:
        """Call this method after the failure of another rank, which will never write its file."""
        self._close_writer()
        self._under_way = self._waiting = None

    def poll(self, timeout_seconds: float = 0.0) -> SaveResult | None:
        """Return None if no save has ended within `timeout_seconds`."""
        step, writer = self._under_way, self._writer
        if step is None or writer is None or not self._send_if_copied(timeout_seconds):
            return None
        answer = writer.answer(timeout_seconds)
        if answer is None:
            return None
        self._under_way = None
        # close the writer: it may still wait for the storage, and the next save gets a new one
        if answer["error"] is not None:
            self._close_writer()
        device_seconds = 0.0 if self._memory is None else self._memory.device_seconds()
        return SaveResult(step, answer["error"], answer.get("not_deleted"), device_seconds)

    def close(self) -> None:
        """Aborts a save in progress."""
        self.abandon()
        if self._memory is not None:
            self._memory.close()
        self._memory = self._shards = None

    def _send_if_copied(self, timeout_seconds: float) -> bool:
        if self._waiting is not None:
            assert self._memory is not None
            assert self._writer is not None
            if not self._memory.is_copied(timeout_seconds):
                return False
            self._writer.send(self._waiting)
            self._waiting = None
        return True

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None


class MappedShards:
    def __init__(self, layout: FileLayout, file: Tensor) -> None:
        self._file, self._layout = file, layout
        self._targets = {
            shard.name: file[slice(*layout.span(shard))]
            .view(torch_dtype(shard.dtype))
            .view(shard.lengths)
            for shard in layout.starts
        }
        self._groups = _neighbours(layout)

    @torch.no_grad()
    def copy(self, state: Mapping[str, Tensor], *, non_blocking: bool = False) -> None:
        """With `non_blocking`, only queue the copies."""
        for group in self._groups:
            sources = [(shard, to_local(state[shard.name])) for shard in group]
            for device, neighbours in groupby(sources, lambda pair: pair[1].device):
                pairs = list(neighbours)
                if device.type == "cpu" or len(pairs) == 1:
                    for shard, source in pairs:
                        self._targets[shard.name].copy_(source, non_blocking=non_blocking)
                else:  # at once
                    packed = torch.cat([_bytes(source) for _, source in pairs])
                    start, _ = self._layout.span(pairs[0][0])
                    _, stop = self._layout.span(pairs[-1][0])
                    self._file[start:stop].copy_(packed, non_blocking=non_blocking)


def _neighbours(layout: FileLayout) -> list[list[TensorShard]]:
    groups: list[list[TensorShard]] = []
    room = -1
    for shard in sorted(layout.starts, key=layout.span):
        if shard.bytes > min(SMALL_BYTES, room):
            groups.append([])
            room = GROUP_BYTES if shard.bytes <= SMALL_BYTES else -1
        groups[-1].append(shard)
        room -= shard.bytes
    return groups


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)


_never_freed: list[tuple[SharedFile, Tensor]] = []
"""Memory into which a hanging device may still copy."""


class _FileContent:
    """This rank's file, in memory shared with the writer."""

    def __init__(
        self, layout: FileLayout, device: torch.device, devices: Collection[torch.device]
    ) -> None:
        self.layout = {
            "bytes": layout.bytes,
            "shards": [[*shard.to_json(), start] for shard, start in layout.starts.items()],
        }
        self.file = SharedFile(layout.bytes)
        everything = torch.frombuffer(self.file.mapped, dtype=torch.uint8)
        everything.zero_()  # page faults make the first write ten times slower than later ones
        self.file.mapped[: len(layout.header)] = layout.header
        self._device = device
        self._copies: list[tuple[torch.Event, torch.Event]] = []
        """For each device, an event at which training stopped, and an event at the end of the
        copies."""
        self.not_registered: str | None = None
        self._registered: Tensor | None = None
        self.streams: list[torch.device] = []
        """Devices on which copies to this memory are queued."""
        if accelerator.can_register_memory(device):
            self.not_registered = accelerator.register_memory(everything, device)
            if self.not_registered is None:
                self._registered = everything
                self.streams = [each for each in devices if accelerator.has_streams(each)]
        self._shards: MappedShards | None = MappedShards(layout, everything)

    def copy(self, state: Mapping[str, Tensor], began: Mapping[torch.device, torch.Event]) -> None:
        """Later computation does not affect the copies."""
        assert self._shards is not None
        started = [
            began.get(device) or accelerator.recorded_event(device, timed=True)
            for device in self.streams
        ]
        self._shards.copy(state, non_blocking=self._registered is not None)
        ended = [accelerator.recorded_event(device, timed=True) for device in self.streams]
        self._copies = list(zip(started, ended, strict=True))

    def is_copied(self, timeout_seconds: float) -> bool:
        return all(accelerator.is_reached(ended, timeout_seconds) for _, ended in self._copies)

    def device_seconds(self) -> float:
        return max((began.elapsed_time(ended) / 1000 for began, ended in self._copies), default=0.0)

    def close(self) -> None:
        self._shards, registered = None, self._registered
        self._registered = None
        if registered is None or self._is_unregistered(registered):
            del registered
            self.file.close()
        else:
            _never_freed.append((self.file, registered))

    def _is_unregistered(self, memory: Tensor) -> bool:
        """Return False if a device may still copy into the memory."""
        with suppress(RuntimeError):  # a device has failed
            return self.is_copied(END_SECONDS) and accelerator.unregister_memory(
                memory, self._device, END_SECONDS
            )
        return False


class _Writer:
    """The training process's handle of the writer process."""

    def __init__(self, content: _FileContent) -> None:
        command = own_python("-m", "lockstep.checkpoint.writer", content.file.name)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=content.file.inherited
        )
        self._answers: SimpleQueue[bytes] = SimpleQueue()
        self._reader = threading.Thread(
            target=self._read, name="lockstep-checkpoint-answers", daemon=True
        )
        self._reader.start()
        self.send(content.layout)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(b"")

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process has ended; `answer` reports that
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, timeout_seconds: float) -> dict[str, Any] | None:
        try:
            line = self._answers.get(block=timeout_seconds > 0, timeout=timeout_seconds)
        except Empty:
            return None
        if not line:
            return {"error": f"the writer process ended with status {self._process.wait()}"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # the process ends with its input, whatever it is doing
        self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:  # the process may be blocked by a disk
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._process.stdout.close()


def assign_to_this_rank(shards: Mapping[str, TensorShard], world: World) -> list[TensorShard]:
    """Return the shards that this rank writes. One rank writes each shard. Every rank must call
    this function."""
    everyone = world.gather_values([shard.to_json() for shard in shards.values()])
    return assign_writes(
        [[TensorShard.from_json(shard) for shard in theirs] for theirs in everyone]
    )[world.rank]
