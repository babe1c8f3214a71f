"""Runs one rank of the doctor: `python -P -m lockstep.doctor FOLDER DEADLINE_SECONDS`.

The launcher has written FOLDER/machine.json. Each rank writes FOLDER/results-RANK.json.
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

from lockstep.base import accelerator
from lockstep.base.files import write_atomically
from lockstep.comm.world import World, join
from lockstep.doctor import benchmark, collective_checks
from lockstep.doctor.check_result import machine_names
from lockstep.doctor.collective_checks import RankGroup
from lockstep.doctor.coordination import ProbeCoordinator
from lockstep.doctor.expected_results import subgroups
from lockstep.doctor.summary import RankStatus
from lockstep.launch import worker
from lockstep.launch.environment import Environment

RENDEZVOUS_SECONDS = 120.0
"""Timeout for importing torch and connecting all ranks."""


def main(folder: Path, deadline_seconds: float) -> None:
    environment = Environment.read(os.environ)
    torch.set_num_threads(environment.threads)
    values: dict[str, Any] = {
        "world_size": environment.world_size,
        "machine": int(os.environ["GROUP_RANK"]),
    }

    def write() -> None:
        write_atomically(folder / f"results-{environment.rank}.json", json.dumps(values))

    def abort(statuses: list[RankStatus]) -> None:
        values["statuses"] = [asdict(status) for status in statuses]
        write()
        os._exit(1)

    if environment.world_size > 1:
        coordinator = ProbeCoordinator(
            environment.rank, environment.world_size, deadline_seconds, abort
        )
        machine = json.loads((folder / "machine.json").read_text(encoding="utf-8"))
        _run_probes(coordinator, environment, values, machine)
    write()


def _run_probes(
    coordinator: ProbeCoordinator,
    environment: Environment,
    values: dict[str, Any],
    machine: dict[str, Any],
) -> None:
    with coordinator.probe("connecting to the store", RENDEZVOUS_SECONDS):
        gathered = coordinator.all_gather(
            [int(os.environ["GROUP_RANK"]), machine if environment.local_rank == 0 else None]
        )
    machine_of_rank = [int(number) for number, _ in gathered]
    values["ranks"] = machine_of_rank
    by_number = {int(number): each for number, each in gathered if each is not None}
    values["machines"] = [by_number[number] for number in sorted(by_number)]
    names = machine_names(values["machines"])
    with coordinator.probe("the process group"):
        world = join(
            **environment.place,
            timeout=timedelta(seconds=RENDEZVOUS_SECONDS),  # the coordinator's deadline is earlier
        )
    values["backend"] = environment.backend or accelerator.process_group_backend(world.device)
    if len(names) > 1 and machine["path"] is not None:
        with coordinator.probe("the run directory on all machines"):
            values["shared"] = _ranks_that_share(coordinator, Path(machine["path"]))
    groups = _groups(coordinator, world, values["backend"])
    if len(names) > 1:
        first_ranks = [machine_of_rank.index(number) for number in range(len(names))]
        values["clocks"] = benchmark.measure_clocks(coordinator, groups[0], first_ranks)
    values["checked"] = []
    for group in groups:
        for row in collective_checks.collective_rows(coordinator, group):
            # appended one by one, so that an abort writes the rows so far
            values["checked"].append(row)
    values["timed"] = benchmark.time_collectives(coordinator, groups[0])
    topology = values["machines"][machine_of_rank[environment.rank]]["info"]["topology"]

    def kind(pair: tuple[int, int]) -> str:
        machine, other = (machine_of_rank[rank] for rank in pair)
        if machine != other:
            return "machines"
        one, two = (machine_of_rank[:rank].count(machine) for rank in pair)
        return str(topology.get(f"{one}-{two}", "local"))

    machines = [names[number] for number in machine_of_rank]
    measured = benchmark.measure_pairs(coordinator, groups[0], machine_of_rank, machines, kind)
    values["point_to_point"] = [asdict(each) for each in measured]
    with coordinator.probe("the end"):
        coordinator.barrier()


def _groups(coordinator: ProbeCoordinator, world: World, backend: str) -> list[RankGroup]:
    everyone = list(range(world.size))
    groups = [RankGroup("all ranks", everyone, world.rank, None, world.device, backend)]
    for name, parts in subgroups(world.size).items():
        for ranks in parts:
            with coordinator.probe(f"the group of {name}"):
                process_group = dist.new_group(ranks)
            if world.rank in ranks:
                own = ranks.index(world.rank)
                groups.append(RankGroup(name, ranks, own, process_group, world.device, backend))
    return groups


def _ranks_that_share(coordinator: ProbeCoordinator, path: Path) -> list[int]:
    """Return the ranks that see a file that rank 0 creates in `path`. All ranks must call this
    function."""
    if coordinator.rank == 0:
        with tempfile.NamedTemporaryFile(prefix=".lockstep-doctor-", dir=path) as file:
            coordinator.all_gather(Path(file.name).name)
            seen = coordinator.all_gather(True)
    else:
        name = coordinator.all_gather(None)[0]
        seen = coordinator.all_gather((path / str(name)).exists())
    return [rank for rank, is_seen in enumerate(seen) if is_seen]


def run(arguments: Sequence[str]) -> None:
    record = worker.begin()
    folder, deadline_seconds = arguments
    worker.run(lambda: main(Path(folder), float(deadline_seconds)), record)
