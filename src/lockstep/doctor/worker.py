"""What each rank of an examination does: meet the others, check collectives, time them and the links. Started by `lockstep.doctor.examine`.

`python -P -m lockstep.doctor FOLDER DEADLINE_SECONDS`. FOLDER has `machine.json`, what the launcher found of its machine; here go
`results-RANK.json`: all ranks agree on the results, so any one of them will do.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.world import World, join
from lockstep.doctor import collectives, timing
from lockstep.doctor.board import Board
from lockstep.doctor.definitions import subgroups
from lockstep.doctor.late import Note
from lockstep.doctor.line import names_of_machines
from lockstep.launch import worker
from lockstep.launch.environment import Environment

MEETING_SECONDS = 120.0
"""For all ranks to have imported torch and found the store."""


class Results:
    """What is known so far, as JSON; written at the end, however it comes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.values: dict[str, Any] = {}

    def write(self) -> None:
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self.values), encoding="utf-8")
        partial.replace(self._path)

    def give_up(self, notes: list[Note]) -> None:
        """Write what is known and who is where, and end the process: its main thread may never do so."""
        self.values["notes"] = [note.as_json() for note in notes]
        self.write()
        os._exit(1)


def main(folder: Path, deadline_seconds: float) -> None:
    """The whole of it. The environment says who this rank is."""
    me = Environment.read(os.environ)
    torch.set_num_threads(me.threads)
    results = Results(folder / f"results-{me.rank}.json")
    results.values |= {"world_size": me.world_size, "machine": int(os.environ["GROUP_RANK"])}
    if me.world_size > 1:
        board = Board(me.rank, me.world_size, deadline_seconds, results.give_up)
        _examine(board, me, results, json.loads((folder / "machine.json").read_text(encoding="utf-8")))
    results.write()


def _examine(board: Board, me: Environment, results: Results, machine: dict[str, Any]) -> None:
    values = results.values
    with board.probe("all processes at the store", MEETING_SECONDS):
        everyone = board.everyone([int(os.environ["GROUP_RANK"]), machine if me.local_rank == 0 else None])
    places = [int(place) for place, _ in everyone]
    values["ranks"] = places
    values["machines"] = [found for _, found in sorted((each for each in everyone if each[1] is not None), key=lambda each: int(each[0]))]
    names = names_of_machines([(found["facts"]["host"], found["facts"]["address"]) for found in values["machines"]])
    with board.probe("the process group"):
        timeout = timedelta(seconds=MEETING_SECONDS)  # the board's deadline comes first
        world = join(rank=me.rank, size=me.world_size, local_rank=me.local_rank, local_size=me.local_world_size, timeout=timeout)
    values["backend"] = "nccl" if world.device.type == "cuda" else "gloo"
    if len(names) > 1 and machine["path"] is not None:
        with board.probe("the run directory on all machines"):
            values["shared"] = _is_shared(board, Path(machine["path"]))
    groups = _groups(board, world)
    if len(names) > 1:
        values["clocks"] = timing.clocks(board, groups[0], [places.index(place) for place in range(len(names))])
    values["checked"] = []
    for group in groups:
        for row in collectives.check(board, group):
            values["checked"].append(row)  # one by one: what is known is told, however it ends
    values["timed"] = timing.collectives(board, groups[0])
    topology = values["machines"][places[me.rank]]["facts"]["topology"]
    local = [places[:rank].count(places[rank]) for rank in range(me.world_size)]

    def kind(pair: tuple[int, int]) -> str:
        one, other = pair
        if places[one] != places[other]:
            return "machines"
        return str(topology.get(f"{local[one]}-{local[other]}", "local"))

    found = timing.links(board, groups[0], places, [names[place] for place in places], kind)
    values["links"] = [asdict(link) for link in found]
    with board.probe("the end"):
        board.together()


def _groups(board: Board, world: World) -> list[collectives.Group]:
    """All ranks, then each of `subgroups` that this rank is in. Every rank makes every group."""
    groups = [collectives.Group("all ranks", list(range(world.size)), world.rank, None, world.device)]
    for name, parts in subgroups(world.size).items():
        for members in parts:
            with board.probe(f"the group of {name}"):
                made = dist.new_group(members)
            if world.rank in members:
                groups.append(collectives.Group(name, members, members.index(world.rank), made, world.device))
    return groups


def _is_shared(board: Board, path: Path) -> list[int]:
    """The ranks that see in that folder what rank 0 puts there."""
    name = None
    if board.rank == 0:
        with tempfile.NamedTemporaryFile(prefix=".lockstep-doctor-", dir=path) as file:
            name = board.everyone(Path(file.name).name)[0]
            seen = board.everyone(True)
    else:
        name = board.everyone(None)[0]
        seen = board.everyone((path / str(name)).exists())
    return [rank for rank, found in enumerate(seen) if found]


def run(arguments: Sequence[str]) -> None:
    """The process's whole life."""
    record = worker.begin()
    folder, deadline_seconds = arguments
    worker.run(lambda: main(Path(folder), float(deadline_seconds)), record)
