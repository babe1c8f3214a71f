"""Runs the workers of this machine, one process for each rank, to their end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from torch.distributed.elastic.agent.server.api import WorkerSpec

from lockstep.base.errors import LaunchError
from lockstep.base.temporary_folder import locked_folder
from lockstep.launch.agent import Agent
from lockstep.launch.environment import Launcher, threads_per_process
from lockstep.launch.failures import Ending
from lockstep.launch.machines import Machines
from lockstep.launch.recovery.in_place import InPlace
from lockstep.launch.rendezvous import ElasticRendezvous, LoopbackRendezvous, quiet_torch
from lockstep.launch.seeding import HASH_SEED
from lockstep.launch.worker_processes import POLL_SECONDS, Start
from lockstep.options import RunOptions

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def run_workers(
    start: Start,
    *,
    count: int,
    launcher: Launcher,
    options: RunOptions,
    max_restarts: int = 0,
    machines: Machines | None = None,
    command: str = "",
    recovery: str = "restart",
    spare_imports: Sequence[str] = (),
) -> Ending:
    """Start `count` workers, wait for all of them, and return how they ended. If a worker fails,
    all workers are stopped. After a failure other than a `UserError` all workers are started again,
    up to `max_restarts` times. Every one of several `machines` must give the same `command`. A
    spare process, for a `recovery` in place, imports the modules `spare_imports`."""
    with locked_folder() as folder, quiet_torch():
        rendezvous = LoopbackRendezvous() if machines is None else ElasticRendezvous.at(machines)
        if isinstance(rendezvous, ElasticRendezvous):
            _check_command(rendezvous, command)
            if options.default_run_dir is not None:
                options = replace(
                    options,
                    default_run_dir=rendezvous.agree("default_run_dir", options.default_run_dir),
                )
        # The entry point is only a name for torch's logs; `start` starts a worker.
        spec = WorkerSpec(
            role="default",
            local_world_size=count,
            rdzv_handler=rendezvous,
            entrypoint="worker",
            max_restarts=max_restarts,
            monitor_interval=POLL_SECONDS,
        )
        chosen = {"OMP_NUM_THREADS": str(threads_per_process(count)), **HASH_SEED}
        if rendezvous.interface is not None:
            chosen |= dict.fromkeys(_INTERFACES, rendezvous.interface)
        asked = _INTERFACES if machines is not None and machines.interface is not None else ()
        environment = {"LOCKSTEP_LAUNCHER": launcher, **options.to_environment()}
        environment |= {
            name: value for name, value in chosen.items() if name not in os.environ or name in asked
        }
        why_not = "" if recovery == "restart" else None
        in_place = InPlace(start, shrinks=recovery == "shrink", spare_imports=spare_imports)
        agent = Agent(spec, start, environment, folder, in_place=in_place, never_in_place=why_not)
        ending = None
        try:
            ending = agent.run_to_the_end(machines)
            return ending
        finally:
            agent.close()
            # As under torchrun, other machines may continue after one machine was asked to end.
            if not agent.is_joining and (
                machines is None or ending is None or ending.signal is None
            ):
                rendezvous.shutdown()


def _check_command(rendezvous: ElasticRendezvous, command: str) -> None:
    first = rendezvous.agree("command", command)
    if first != command:
        raise LaunchError(
            f"this machine runs {command!r}; the first machine at"
            f" {rendezvous.machines.endpoint} runs {first!r}; all machines of a run have one"
            " command; give the first machine's, or another port for another run"
        )
