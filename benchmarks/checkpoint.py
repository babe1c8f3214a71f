"""Measures the cost of a save during training, beside `torch.save` on rank 0 and DCP, and the speed
of loading.

    python benchmarks/checkpoint.py [--nproc 2] [--layers 14] [--width 768] [--rounds 9] [--steps 4]
                                    [--folder DIR] [--json FILE]

The model is examples/gpt.py's GPT (100 million parameters by default) under DDP with fused AdamW
and one thread per process. The state is its parameters and the optimizer's tensors, in fp32. Every
rank holds all of it. In a round each side saves once and then trains `--steps` steps. One more side
trains the same steps and saves nothing. The order of the sides changes every round.

- stopped: the duration of the save call, on the slowest rank;
- lost: how much longer the save and the steps after it took than the same round's steps without a
  save. A save that is still running then is waited for, and that time counts;
- a plain copy: copying what one rank of lockstep copies, as tensors, into memory that was written
  to before;
- memory: how much higher the peak memory of all processes together was with two saves than without,
  as a multiple of the state. Writing processes count; shared memory counts once (Linux's Pss); the
  page cache does not count. Measured in processes of their own;
- disk: bytes of a checkpoint, as a multiple of the state.

Then loading: every rank fills all of its state and checks every byte. For comparison, every rank
reads the same files with the same number of threads and hashes them: once into memory as large as
the files, which any loader needs, and once through a buffer per thread that stays in the
processor's cache. Both with the files in the page cache and without.

Only lockstep syncs files to the disk before it reports them as saved. Times are medians over the
rounds. Ratios are medians of the rounds' ratios, except for `lost`, where they are ratios of the
medians.

Quote numbers only from a machine that did nothing else. The folder should be on a disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from blake3 import blake3
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import lockstep as ls
from lockstep.checkpoint.load import CheckpointReader
from lockstep.checkpoint.manifest import BLOCK_BYTES
from lockstep.checkpoint.saver import Saver
from lockstep.checkpoint.storage import FolderStorage
from lockstep.checkpoint.tensor_shards import TensorShard, assign_writes, local_shards
from lockstep.comm.world import World, join

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import gpt

CONTEXT, SEQUENCES = 64, 2
SIDES = ("torch.save", "DCP save", "DCP async_save", "lockstep")
NONE = "no save"
COPY = "a plain copy"
INTO_MEMORY, THROUGH_A_BUFFER = "into memory", "through a buffer"
WAIT_SECONDS = 120


class Training:
    """A model, its optimizer, and steps."""

    def __init__(self, layers: int, width: int) -> None:
        torch.manual_seed(0)
        self.model = gpt.GPT(layers=layers, width=width, heads=8, context=CONTEXT, dropout=0.0)
        self._parallel = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._batch = torch.randint(0, 256, (SEQUENCES, CONTEXT + 1))
        self.run(2)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            logits = self._parallel(self._batch[:, :-1])
            gpt.cross_entropy(logits, self._batch).backward()
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        found = {f"model.{name}": parameter.detach() for parameter, name in names.items()}
        for parameter, values in self._optimizer.state.items():
            found |= {f"optimizer.{names[parameter]}.{key}": value for key, value in values.items()}
        return found


class Saves:
    """Each side's save, by name. `finish` waits for a save that is still running."""

    def __init__(self, world: World, training: Training, folder: Path) -> None:
        self.folder = folder
        self._world = world
        self._state = training.state()
        self._saver = Saver(world, folder / "lockstep", "00c0ffee")
        self._future: Any = None
        # DCP's collectives in the background must not mix with those of the steps.
        self._group = dist.new_group(backend="gloo")
        self._saves = 0

    def prepare(self) -> None:
        """Do what lockstep does once, at the start of a run."""
        self._saver.prepare(self._state)

    def save(self, side: str) -> None:
        self._saves += 1
        if side == "torch.save":
            if self._world.rank == 0:
                torch.save(self._state, self.folder / "state.pt")
            dist.barrier()
        elif side == "DCP save":
            dcp.save(self._state, checkpoint_id=self.folder / "dcp")
        elif side == "DCP async_save":
            self._future = dcp.async_save(
                self._state, checkpoint_id=self.folder / "async", process_group=self._group
            )
        elif side == "lockstep":
            self._saver.save(self._saves, self._state, values={}, metadata={})

    def finish(self, side: str) -> None:
        if side == "DCP async_save":
            self._future.result()
        if side == "lockstep":
            ended = self._saver.poll(WAIT_SECONDS)
            if ended is None or ended.error is not None:
                raise SystemExit(f"the save failed: {ended}")

    def clear(self) -> int:
        """Remove the checkpoint and return its bytes. Every rank calls it."""
        dist.barrier()
        size = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        dist.barrier()
        if self._world.rank == 0:
            shutil.rmtree(self.folder)
            self.folder.mkdir()
        dist.barrier()
        return size

    def close(self) -> None:
        self._saver.close()


def here() -> World:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # DCP warns about its own calls
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return join(rank=rank, size=size, local_rank=rank, local_size=size)


def seconds(call: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def plain_copy(world: World, state: Mapping[str, Tensor]) -> Callable[[], None]:
    """Copies what this rank of lockstep copies."""
    everyone = world.gather_values([piece.to_json() for piece in local_shards(state).values()])
    mine = assign_writes([[TensorShard.from_json(said) for said in pieces] for pieces in everyone])[
        world.rank
    ]
    targets = {piece.name: torch.zeros_like(state[piece.name]) for piece in mine}

    def copy() -> None:
        for name, target in targets.items():
            target.copy_(state[name])

    return copy


def measure_saving(folder: str, layers: int, width: int, steps: int, rounds: int) -> dict[str, Any]:
    """Runs on each rank."""
    world = here()
    training = Training(layers, width)
    saves = Saves(world, training, Path(folder))
    state = training.state()
    copy = plain_copy(world, state)
    prepared = seconds(saves.prepare)
    sides = (NONE, *SIDES)
    found: dict[str, dict[str, list[float]]] = {
        side: {"stopped": [], "whole": [], "bytes": []} for side in (*sides, COPY)
    }

    def turn(side: str) -> tuple[float, float]:
        start = time.perf_counter()
        saves.save(side)
        stopped = time.perf_counter() - start
        training.run(steps)
        saves.finish(side)
        return stopped, time.perf_counter() - start

    for number in range(-1, rounds):  # the first round does not count
        for side in sides[number % len(sides) :] + sides[: number % len(sides)]:
            dist.barrier()
            stopped, whole = (
                max(each) for each in zip(*world.gather_values(turn(side)), strict=True)
            )
            size = saves.clear()
            copied = max(world.gather_values(seconds(copy)))
            if number >= 0:
                for key, value in (("stopped", stopped), ("whole", whole), ("bytes", size)):
                    found[side][key].append(value)
                if side == "lockstep":
                    found[COPY]["stopped"].append(copied)
    saves.close()
    dist.barrier()
    return {
        "sides": found,
        "state": sum(value.nbytes for value in state.values()),
        "prepared": max(world.gather_values(prepared)),
    }


def measure_memory(folder: str, layers: int, width: int, steps: int, side: str) -> int:
    """Return the peak memory that saving needs, in bytes over all processes. Runs on each rank."""
    world = here()
    training = Training(layers, width)
    saves = Saves(world, training, Path(folder))
    processes = world.gather_values(os.getpid())
    peaks = []
    for saving in (False, True):
        with Peak(processes if world.rank == 0 else []) as most:
            for _ in range(2):
                if saving:
                    saves.save(side)
                training.run(steps)
                if saving:
                    saves.finish(side)
            dist.barrier()
        peaks.append(most[0])
    saves.close()
    saves.clear()
    return peaks[1] - peaks[0]


class Peak:
    """Samples the memory of these processes and their children inside a `with`, and keeps the
    peak."""

    def __init__(self, processes: Sequence[int]) -> None:
        self._processes = processes
        self._over = threading.Event()
        self._most = [0]
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> list[int]:
        self._thread.start()
        return self._most

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.02) and self._processes:
            everyone = [
                child for process in self._processes for child in (process, *children(process))
            ]
            self._most[0] = max(self._most[0], sum(map(shared_out_bytes, everyone)))


def children(process: int) -> Iterator[int]:
    for task in Path(f"/proc/{process}/task").iterdir():
        try:
            yield from map(int, (task / "children").read_text().split())
        except FileNotFoundError:
            continue  # it has just ended


def shared_out_bytes(process: int) -> int:
    try:
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        pass  # it has just ended
    return 0


def measure_loading(
    folder: str, layers: int, width: int, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each side, with the files in the page cache and without. Runs on each
    rank."""
    world = here()
    training = Training(layers, width)
    state = training.state()
    saver = Saver(world, folder, "00c0ffee")
    saver.save(1, state, values={}, metadata={})
    saver.poll(WAIT_SECONDS)
    saver.close()
    dist.barrier()
    (name,) = FolderStorage(Path(folder)).names()
    files = sorted((Path(folder) / str(name)).glob("*.safetensors"))
    room = memoryview(bytearray(sum(path.stat().st_size for path in files)))
    sides: dict[str, Callable[[], object]] = {
        "lockstep": (
            lambda: CheckpointReader(FolderStorage(Path(folder)), name).load_into(state, world)
        ),
        INTO_MEMORY: lambda: read_and_hash(files, room),
        THROUGH_A_BUFFER: lambda: read_and_hash(files, None),
    }
    found: dict[str, dict[str, list[float]]] = {
        where: {side: [] for side in sides} for where in ("cache", "disk")
    }
    for number in range(-1, rounds):
        for where, times in found.items():
            for side in list(sides)[number % 3 :] + list(sides)[: number % 3]:
                if where == "disk":
                    forget(files)
                took = max(world.gather_values(seconds(sides[side])))
                if number >= 0:
                    times[side].append(took)
    dist.barrier()
    return found


def read_and_hash(files: Sequence[Path], room: memoryview | None) -> None:
    """`room`: memory for all of their bytes."""
    places, at = [], 0
    for path in files:
        size = path.stat().st_size
        places += [
            (path, start, min(BLOCK_BYTES, size - start), at + start)
            for start in range(0, size, BLOCK_BYTES)
        ]
        at += size

    def work(share: int) -> None:
        buffer = memoryview(bytearray(BLOCK_BYTES))
        for path, start, length, place in places[share :: FolderStorage.readers]:
            part = buffer[:length] if room is None else room[place : place + length]
            with open(path, "rb", buffering=0) as opened:
                opened.seek(start)
                opened.readinto(part)
            blake3(part).digest()

    with ThreadPoolExecutor(FolderStorage.readers) as threads:
        list(threads.map(work, range(FolderStorage.readers)))


def forget(files: Sequence[Path]) -> None:
    """Remove files from the page cache."""
    for path in files:
        opened = os.open(path, os.O_RDONLY)
        os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(opened)


def rows_of(saving: Mapping[str, Any], memory: Mapping[str, int]) -> list[dict[str, Any]]:
    sides, state = saving["sides"], saving["state"]
    lost = {
        side: [
            whole - without
            for whole, without in zip(sides[side]["whole"], sides[NONE]["whole"], strict=True)
        ]
        for side in SIDES
    }
    rows = []
    for side in SIDES:
        stopped = sides[side]["stopped"]
        rows.append(
            {
                "side": side,
                "stopped_seconds": statistics.median(stopped),
                "stopped_ratio": ratio(stopped, sides["torch.save"]["stopped"]),
                "stopped_copies": ratio(stopped, sides[COPY]["stopped"]),
                "lost_seconds": statistics.median(lost[side]),
                "lost_ratio": statistics.median(lost[side]) / statistics.median(lost["torch.save"]),
                "memory_states": memory[side] / state,
                "disk_states": statistics.median(sides[side]["bytes"]) / state,
            }
        )
    return rows


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def show(
    rows: Sequence[Mapping[str, Any]],
    saving: Mapping[str, Any],
    loading: Mapping[str, Mapping[str, Sequence[float]]],
) -> None:
    console = Console(width=None if sys.stdout.isatty() else 110)
    sides, state = saving["sides"], saving["state"]
    table = Table(
        title=(
            f"a state of {state / 1e9:.2f} GB; a plain copy takes"
            f" {statistics.median(sides[COPY]['stopped']):.3f} s, the steps"
            f" {statistics.median(sides[NONE]['whole']):.2f} s; prepared in"
            f" {saving['prepared']:.2f} s"
        )
    )
    for column in (
        "",
        "stopped (s)",
        "of torch.save",
        "of a copy",
        "lost (s)",
        "of torch.save",
        "memory",
        "disk",
    ):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in rows:
        numbers = [f"{row[key]:.3f}" for key in row if key != "side"]
        table.add_row(row["side"], *numbers)
    console.print(table)
    table = Table(title="loading, with every byte checked")
    for column in (
        "",
        "lockstep (GB/s)",
        "read and hash (GB/s)",
        "ratio",
        "through a buffer (GB/s)",
        "ratio",
    ):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for where, times in loading.items():
        speed = {side: f"{state / 1e9 / statistics.median(times[side]):.2f}" for side in times}
        shares = {side: f"{ratio(times[side], times['lockstep']):.2f}" for side in times}
        others = [
            text for side in (INTO_MEMORY, THROUGH_A_BUFFER) for text in (speed[side], shares[side])
        ]
        table.add_row(f"from the {where}", speed["lockstep"], *others)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument(
        "--rounds",
        type=int,
        default=9,
        help="rounds; every side saves once in each (default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=int, default=4, help="steps after each save (default: %(default)s)"
    )
    parser.add_argument(
        "--folder",
        metavar="DIR",
        help="directory for checkpoints (default: the one for temporary files)",
    )
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="also write the figures to this file"
    )
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    load = os.getloadavg()[0]
    size = (options.layers, options.width)
    if options.folder:
        Path(options.folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:

        def spawn(function: Callable[..., Any], *args: Any) -> Any:
            place = tempfile.mkdtemp(dir=folder)
            result = ls.spawn(function, nproc=options.nproc, args=(place, *size, *args))
            shutil.rmtree(place)
            return result

        saving = spawn(measure_saving, options.steps, options.rounds)
        memory = {side: spawn(measure_memory, options.steps, side) for side in SIDES}
        loading = spawn(measure_loading, options.rounds)
    rows = rows_of(saving, memory)
    show(rows, saving, loading)
    if options.json:
        report = {"load_before": load, "saving": saving, "rows": rows, "loading": loading}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
