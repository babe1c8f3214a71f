"""Asynchronous saves: training waits for a copy into shared memory; another process hashes, writes
and commits it.

On a device whose runtime can register that memory, the copies are queued between the kernels of two
steps. The host goes on, and tells the writer process once they are there."""

from __future__ import annotations

import json
import secrets
import subprocess
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from lockstep.base import accelerator
from lockstep.base.python_process import own_python
from lockstep.checkpoint.manifest import JsonObject
from lockstep.checkpoint.object_store import open_storage
from lockstep.checkpoint.shared_file import SharedFile
from lockstep.checkpoint.tensor_shards import (
    FileLayout,
    TensorShard,
    assign_writes,
    local_shards,
    torch_dtype,
)
from lockstep.comm.mesh import to_local
from lockstep.comm.world import World

END_SECONDS = 5.0
"""Seconds that the writer process is given to end, before it is killed."""


@dataclass(frozen=True, slots=True)
class SaveResult:
    """The result of a save on this rank."""

    step: int
    error: str | None
    """Why it failed; None if it succeeded."""
    not_deleted: str | None = None
    """Why an old checkpoint could not be deleted; None if nothing failed."""
    device_seconds: float = 0.0
    """Seconds in which a device did not train: from the end of the last kernel queued before
    `Saver.begin` to the end of the copies. 0 if the host waited for them."""


class Saver:
    """Saves the state of a run, one save at a time. Every rank makes one, and calls `prepare` and
    `save` alike."""

    def __init__(self, world: World, folder: Path | str, attempt: str) -> None:
        """`folder`: see `open_storage`. `attempt`: see `CheckpointName`; the same on every rank.
        Raises `RunDirectoryError`."""
        open_storage(folder)
        self._world = world
        self._folder = folder
        self._attempt = attempt
        self._shards: dict[str, TensorShard] | None = None
        self._writer: _Writer | None = None
        self._memory: _FileContent | None = None
        self._began: dict[torch.device, torch.Event] = {}
        """For each device, the end of the last kernel queued before training stopped for the next
        save."""
        self._under_way: int | None = None
        self._waiting: dict[str, Any] | None = None
        """The job that the writer process gets once the copies are there."""

    def prepare(self, state: Mapping[str, Tensor]) -> str:
        """Plan which rank writes what, allocate memory and start the writer process, unless this
        was done for the same layout.

        Every rank calls it, not during a save. If it was not called, the first `save` calls it, and
        takes longer than later ones. Returns an identifier of the next save, the same on every
        rank, which distinguishes its notes from those of an earlier save.
        """
        found = local_shards(state)
        rows = self._world.gather_rows(
            torch.tensor([[found != self._shards, secrets.randbits(32)]]), [1] * self._world.size
        )
        if rows[:, 0].any():
            mine = assign_to_this_rank(found, self._world)
            self.close()
            devices = {to_local(tensor).device for tensor in state.values()}
            self._memory = _FileContent(FileLayout(mine), self._world.device, devices)
            self._shards = found
        assert self._memory is not None
        if self._writer is not None and self._writer.has_ended:
            self._close_writer()
        if self._writer is None:
            self._writer = _Writer(self._memory)
        return f"{rows[0, 1]:08x}"

    def begin(self) -> None:
        """Note that training stops for a save, before what `save` takes is gathered."""
        if accelerator.can_register_memory(self._world.device):
            devices = {
                self._world.device,
                *(self._memory.streams if self._memory is not None else ()),
            }
            self._began = {
                device: accelerator.recorded_event(device, timed=True) for device in devices
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
        """Copy the state and start writing it in the background. Every rank calls it, not during a
        save.

        `state`: this rank's tensors; a name may exist on some ranks only. `values`: JSON; all
        ranks' objects are merged. `metadata`: JSON of rank 0. `keep`: other arguments of
        `writer.checkpoints_to_delete`, with `scores` by `str(name)`; None keeps all checkpoints.
        """
        assert self._under_way is None, "one save at a time"
        identifier = self.prepare(state)
        assert self._memory is not None
        assert self._writer is not None
        self._memory.copy(state, self._began)
        self._began = {}
        job: dict[str, Any] = {
            "folder": str(self._folder),
            "step": step,
            "attempt": self._attempt,
            "save": identifier,
        }
        job |= {"file": _file(self._world.rank), "values": values}
        if self._world.rank == 0:
            job |= {
                "files": [_file(rank) for rank in range(self._world.size)],
                "metadata": metadata,
            }
            if keep is not None:
                job["keep"] = keep
        self._waiting, self._under_way = job, step
        self._send_if_copied(0.0)

    @property
    def not_registered(self) -> str | None:
        """Why copies from the device are slow, and the host waits for them; None if they are
        not."""
        return None if self._memory is None else self._memory.not_registered

    @property
    def is_under_way(self) -> bool:
        """True from `save` until `poll` returns its result."""
        return self._under_way is not None

    def abandon(self) -> None:
        """Abort the save in progress, because another rank's part of it will never be written."""
        self._close_writer()
        self._under_way = self._waiting = None

    def poll(self, timeout_seconds: float = 0.0) -> SaveResult | None:
        """Wait up to `timeout_seconds` for the save. Returns its result; None if none has ended."""
        if (
            self._under_way is None
            or self._writer is None
            or not self._send_if_copied(timeout_seconds)
        ):
            return None
        answer = self._writer.answer(timeout_seconds)
        if answer is None:
            return None
        step, self._under_way = self._under_way, None
        # the failed process may still wait for the storage; the next save gets another one
        if answer["error"] is not None:
            self._close_writer()
        device_seconds = 0.0 if self._memory is None else self._memory.device_seconds()
        return SaveResult(step, answer["error"], answer.get("not_deleted"), device_seconds)

    def close(self) -> None:
        """Release everything. Aborts a save in progress."""
        self.abandon()
        if self._memory is not None:
            self._memory.close()
        self._memory = self._shards = None

    def _send_if_copied(self, timeout_seconds: float) -> bool:
        """Give the writer process its job once all bytes are there. Returns True if it has it
        within the timeout."""
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
    """The shards of a file in mapped memory, into which a state is copied."""

    def __init__(self, layout: FileLayout, file: Tensor) -> None:
        """`file`: the file's bytes."""
        self._targets = {}
        for shard in layout.starts:
            start, stop = layout.span(shard)
            self._targets[shard.name] = (
                file[start:stop].view(torch_dtype(shard.dtype)).view(shard.lengths)
            )

    @torch.no_grad()
    def copy(self, state: Mapping[str, Tensor], *, non_blocking: bool = False) -> None:
        """Copy this rank's tensors from any device. Returns when all bytes are there; if
        `non_blocking`, when the copies are queued in the devices' streams."""
        for name, target in self._targets.items():
            target.copy_(to_local(state[name]), non_blocking=non_blocking)


_left: list[tuple[SharedFile, Tensor]] = []
"""Memory to which a device that hangs may still copy. It goes with the process."""


class _FileContent:
    """The content of this rank's file, in memory shared with the writer process."""

    def __init__(
        self, layout: FileLayout, device: torch.device, devices: Collection[torch.device]
    ) -> None:
        """`device`: this rank's. `devices`: those of the state."""
        self.layout = {
            "bytes": layout.bytes,
            "shards": [[*shard.to_json(), start] for shard, start in layout.starts.items()],
        }
        """Size of the file and positions of its shards, for the writer process."""
        self.file = SharedFile(layout.bytes)
        everything = torch.frombuffer(self.file.mapped, dtype=torch.uint8)
        everything.zero_()  # page faults make the first write ten times slower than later ones
        self.file.mapped[: len(layout.header)] = layout.header
        self._device = device
        self._copies: list[tuple[torch.Event, torch.Event]] = []
        """When training stopped for the save, and the end of the copies, in the stream of each
        device."""
        self.not_registered: str | None = None
        self._registered: Tensor | None = None
        if accelerator.can_register_memory(device):
            self.not_registered = accelerator.register_memory(everything, device)
            self._registered = everything if self.not_registered is None else None
        self.streams = (
            [each for each in devices if accelerator.has_streams(each)]
            if self._registered is not None
            else []
        )
        """Devices whose copies are queued."""
        self._shards: MappedShards | None = MappedShards(layout, everything)

    def copy(self, state: Mapping[str, Tensor], began: Mapping[torch.device, torch.Event]) -> None:
        """Copy this rank's tensors, if the memory is registered in the order of the devices'
        kernels: with the values that they have now, whatever is computed next. `began`: when
        training stopped; now on devices that it lacks."""
        assert self._shards is not None
        started = [
            began.get(device) or accelerator.recorded_event(device, timed=True)
            for device in self.streams
        ]
        self._shards.copy(state, non_blocking=self._registered is not None)
        ended = [accelerator.recorded_event(device, timed=True) for device in self.streams]
        self._copies = list(zip(started, ended, strict=True))

    def is_copied(self, timeout_seconds: float) -> bool:
        """True if all bytes are there, within `timeout_seconds`."""
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
            _left.append((self.file, registered))

    def _is_unregistered(self, memory: Tensor) -> bool:
        """Undo the registration. Returns False if a device may still copy to the memory."""
        with suppress(RuntimeError):  # a device has failed
            return self.is_copied(END_SECONDS) and accelerator.unregister_memory(
                memory, self._device, END_SECONDS
            )
        return False


class _Writer:
    """The writer process (`lockstep.checkpoint.writer`), seen from the training process."""

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
        """Receive answers; at last an empty one, when the process ends."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(b"")

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended; `answer` reports that
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, timeout_seconds: float) -> dict[str, Any] | None:
        try:
            line = self._answers.get(block=timeout_seconds > 0, timeout=timeout_seconds)
        except Empty:
            return None
        found: dict[str, Any] = (
            json.loads(line)
            if line
            else {"error": f"the writer process ended with status {self._process.wait()}"}
        )
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()  # at the end of its input it ends, whatever it is doing
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:  # it may be blocked by a disk
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._process.stdout.close()


def assign_to_this_rank(found: Mapping[str, TensorShard], world: World) -> list[TensorShard]:
    """The shards, of those `found` on each rank, that this rank writes. Every rank calls it."""
    everyone = world.gather_values([shard.to_json() for shard in found.values()])
    return assign_writes(
        [[TensorShard.from_json(shard) for shard in shards] for shards in everyone]
    )[world.rank]


def _file(rank: int) -> str:
    return f"rank-{rank}.safetensors"
