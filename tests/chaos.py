"""python tests/chaos.py [--runs 100] [--seed 0] [--folder DIR] [--recovery in-place] [--machines]:
runs that are killed at a random moment, and go on.

Each run is 60 steps of a small GPT in bitwise numerics on 2 to 4 processes. SIGKILL hits a worker,
all workers or the launcher, at a random moment, for some amid a save that was made slow; then the
same command is given with another plan, until the run ends. Every run must end with the fingerprint
of the undisturbed one, every sample learned from exactly as often as there, and nothing left
behind.

With --recovery in-place, one to three workers of a run are killed, also within 50 ms of one
another, and the run goes on by itself: the other workers keep their processes. The lost ones are
replaced, or, in half of the runs, not. With --machines too, whole machines are killed or cut off,
and may come back: three network namespaces.

What is done is written to DIR/done.jsonl, a line a run: the same command continues after it. Exit
status: 0 where all runs are right.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import run_files
from chaos_run import END_SECONDS, Chaos, children, is_worker, send, wait_for_the_end_of
from doctor.network import network

from lockstep.base.errors import USER_ERROR_STATUS
from lockstep.testing import leaks

PLANS = {
    "replicate=2": 2,
    "replicate=3": 3,
    "replicate=4": 4,
    "shard=2": 2,
    "shard=3": 3,
    "shard=4": 4,
    "replicate=2,shard=2": 4,
}
"""And the processes that they need."""
FEWER = {"replicate=auto": (2, 4), "shard=auto": (2, 4), "replicate=auto,shard=2": (4, 4)}
"""Plans that also fit fewer processes, and how many are started."""
ALONE = {"replicate=1": 1}
"""What a run may also go on with."""
VICTIMS = (
    "a worker",
    "all workers",
    "the launcher",
    "a worker amid a save",
    "the launcher amid a save",
)


def one(seed: int, right: str, folder: Path) -> Chaos:
    """A run, hit once, and what came of it."""
    drawn = random.Random(seed)
    chaos = Chaos(seed, folder, victim=drawn.choice(VICTIMS))
    for name in ("seen", "tmp"):
        (folder / name).mkdir(parents=True)
    before = leaks.take(["shared-memory"])
    launcher = chaos.start(drawn.choice(list(PLANS)), drawn.randint(5, 20))
    while not chaos.hit(launcher, drawn):  # it has ended before the moment came
        shutil.rmtree(chaos.run_dir)
        shutil.rmtree(folder / "seen")
        (folder / "seen").mkdir()
        launcher = chaos.start(chaos.plans.pop(), drawn.randint(5, 20))
    for _ in range(3):
        try:
            status = launcher.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(launcher.pid, signal.SIGKILL)
            chaos.wrong.append(
                f"the start under {chaos.plans[-1]} did not end within {END_SECONDS:.0f} s"
            )
            break
        wait_for_the_end_of(folder)
        if (chaos.run_dir / "result.json").exists():
            # the launcher was killed after the end of the run: the next one removes what it left
            if status == -signal.SIGKILL:
                again = chaos.start(chaos.plans[-1], 1000).wait(END_SECONDS)
                chaos.wrong += (
                    [f"status {again} of a start after the end"]
                    if again != USER_ERROR_STATUS
                    else []
                )
            chaos.check(right)
            break
        if len(chaos.plans) > 1:
            chaos.wrong.append(f"the start under {chaos.plans[-1]} ended with status {status}")
            break
        launcher = chaos.start(drawn.choice([*PLANS, *ALONE]), drawn.randint(5, 20))
    chaos.wrong += [f"left behind: {found}" for found in leaks.remaining(before)]
    return chaos


def in_place(seed: int, right: str, folder: Path) -> Chaos:
    """A run of which one to three workers are killed, and which recovers in place."""
    drawn = random.Random(seed)
    recovery = drawn.choice(["in-place", "shrink"])
    chaos = Chaos(seed, folder, victim=f"workers, {recovery}")
    for name in ("seen", "tmp"):
        (folder / name).mkdir(parents=True)
    before = leaks.take(["shared-memory"])
    plan = drawn.choice(list(PLANS if recovery == "in-place" else FEWER))
    count = PLANS[plan] if recovery == "in-place" else drawn.randint(*FEWER[plan])
    launcher = chaos.start(
        plan, 1000, "--recovery", recovery, "--max-restarts", "9", "--nproc", str(count)
    )
    first, killed = chaos.first_processes(count, [launcher]), set[int]()
    time.sleep(drawn.random() * 1.0)
    for _ in range(drawn.randint(1, 3)):
        workers = [process for process in children(launcher.pid) if is_worker(process)]
        if not workers or launcher.poll() is not None or (chaos.run_dir / "result.json").exists():
            break
        victim = drawn.choice(workers)
        killed.add(victim.pid)
        send(victim, signal.SIGKILL)
        time.sleep(drawn.choice([0.0, drawn.random() * 0.05, drawn.random() * 3.0]))
    chaos.wait_for([launcher])
    if (chaos.run_dir / "result.json").exists():
        chaos.check(right)
        ended = set(first) - killed - chaos.last_processes()
        # of three that are left, it has a place for two
        if len(ended) > (plan == "replicate=auto,shard=2"):
            chaos.wrong.append(
                f"processes {sorted(ended)} were not killed, and are not there at the end;"
                f" {chaos.why_not_in_place()}"
            )
    chaos.wrong += [f"left behind: {found}" for found in leaks.remaining(before)]
    return chaos


def machines_in_place(seed: int, right: str, folder: Path) -> Chaos:
    """A run on three machines of which one or two are killed or cut off, and which recovers in
    place."""
    drawn = random.Random(seed)
    chaos = Chaos(seed, folder, victim="")
    for name in ("seen", "tmp"):
        (folder / name).mkdir(parents=True)
    before = leaks.take(["shared-memory"])
    plan, count = drawn.choice(list(FEWER)), drawn.randint(1, 2)
    if "shard=2" in plan:
        count = 2
    with network(3) as hosts:
        options = [
            "--recovery",
            "in-place",
            "--max-restarts",
            "9",
            "--nproc",
            str(count),
            "--nnodes",
            "1:3",
        ]
        options += ["--rdzv", f"{hosts.address(3)}:29400"]

        def start(host: int) -> subprocess.Popen[bytes]:
            return chaos.start(plan, 1000, *options, before=hosts.inside(host), sleep=0.2)

        launchers = {host: start(host) for host in (3, 1, 2)}
        # a machine that is cut off ends its run, and one that comes back may come too late
        late = list[subprocess.Popen[bytes]]()
        first = chaos.first_processes(3 * count, list(launchers.values()))
        kept = {child.pid for child in children(launchers[3].pid)} & set(first)
        time.sleep(drawn.random() * 1.0)
        for host in drawn.sample([1, 2], drawn.randint(1, 2)):
            how = drawn.choice(["killed", "cut off", "killed, and comes back"])
            chaos.victim += f"{host} {how}; "
            if how == "cut off":
                hosts.cut(host)
            else:
                launchers.pop(host).kill()
                chaos.killed_launchers += 1
            if how == "killed, and comes back":
                time.sleep(drawn.random() * 3.0)
                late.append(start(host))
            elif how == "cut off":
                late.append(launchers.pop(host))
            time.sleep(drawn.choice([0.0, drawn.random() * 0.05, drawn.random() * 6.0]))
        chaos.wait_for(list(launchers.values()))
        chaos.wait_for(late, may_fail=True)
    if (chaos.run_dir / "result.json").exists():
        chaos.check(right)
        if ended := kept - chaos.last_processes():
            chaos.wrong.append(
                f"processes {sorted(ended)} of the machine that nothing happened to are not there"
                " at the end"
            )
    chaos.wrong += [f"left behind: {found}" for found in leaks.remaining(before)]
    return chaos


def undisturbed(folder: Path) -> str:
    """The fingerprint of a run that nobody hits."""
    for name in ("seen", "tmp"):
        (folder / name).mkdir(parents=True)
    chaos = Chaos(-1, folder)
    if chaos.start("replicate=1", 1000).wait(END_SECONDS):
        raise SystemExit(f"the undisturbed run failed: {(folder / 'output.txt').read_text()}")
    result: dict[str, Any] = run_files.result(chaos.run_dir)
    return str(result["fingerprint"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Runs that are killed at a random moment, and go on."
    )
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the others follow")
    parser.add_argument("--recovery", choices=["restart", "in-place"], default="restart")
    parser.add_argument(
        "--machines",
        action="store_true",
        help="with --recovery in-place: of three machines; needs root",
    )
    parser.add_argument(
        "--folder", type=Path, help="what was done before and is to go on; default: a temporary one"
    )
    given = parser.parse_args(arguments)
    folder = (
        given.folder
        if given.folder is not None
        else Path(tempfile.mkdtemp(prefix="lockstep-chaos-"))
    )
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "done.jsonl"
    done = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    shutil.rmtree(folder / "undisturbed", ignore_errors=True)
    right = undisturbed(folder / "undisturbed")
    for seed in range(given.seed, given.seed + given.runs):
        if any(row["seed"] == seed for row in done):
            continue
        shutil.rmtree(folder / str(seed), ignore_errors=True)
        began = time.monotonic()
        kind = (
            one
            if given.recovery == "restart"
            else machines_in_place
            if given.machines
            else in_place
        )
        chaos = kind(seed, right, folder / str(seed))
        row = {
            "seed": seed,
            "victim": chaos.victim,
            "plans": chaos.plans,
            "hit_at": chaos.hit_at,
            "resumed": chaos.resumed,
        }
        row |= {"seconds": round(time.monotonic() - began, 1), "wrong": chaos.wrong}
        print(json.dumps(row), flush=True)
        with log.open("a") as opened:
            opened.write(json.dumps(row) + "\n")
        done.append(row)
        if not chaos.wrong:
            shutil.rmtree(folder / str(seed))
    wrong = [row for row in done if row["wrong"]]
    print(
        f"{len(done)} runs, {len(wrong)} wrong, {sum(bool(row['resumed']) for row in done)} went on"
        " from a checkpoint"
    )
    if not wrong and given.folder is None:
        shutil.rmtree(folder)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
