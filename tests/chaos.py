"""python tests/chaos.py [--runs 100] [--seed 0] [--folder DIR] [--recovery in-place]: runs that are killed at a random
moment, and go on.

Each run is 60 steps of a small GPT in bitwise numerics on 2 to 4 processes. SIGKILL hits a worker, all workers or the
launcher, at a random moment, for some amid a save that was made slow; then the same command is given with another plan,
until the run ends. Every run must end with the fingerprint of the undisturbed one, every sample learned from exactly as
often as there, and nothing left behind.

With --recovery in-place, one to three workers of a run are killed, also within 50 ms of one another, and the run goes
on by itself: the other workers keep their processes.

What is done is written to DIR/done.jsonl, a line a run: the same command goes on after it. Exit status: 0 where all
runs are right.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from lockstep.base.errors import USER_ERROR_STATUS
from lockstep.testing import leaks

SCRIPT = Path(__file__).parent / "scripts" / "chaos.py"
PLANS = {"replicate=2": 2, "replicate=3": 3, "replicate=4": 4, "shard=2": 2, "shard=3": 3, "shard=4": 4, "replicate=2,shard=2": 4}
"""And the processes that they need."""
ALONE = {"replicate=1": 1}
"""What a run may also go on with."""
VICTIMS = ("a worker", "all workers", "the launcher", "a worker amid a save", "the launcher amid a save")
STEPS = 60
START_SECONDS = 120.0
END_SECONDS = 300.0


@dataclass(slots=True)
class Chaos:
    """One run, and what was found of it."""

    seed: int
    folder: Path
    victim: str = ""
    plans: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    hit_at: int = -1
    """Steps done when it was hit, as far as it had told."""

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def start(self, plan: str, save_every: int, *options: str) -> subprocess.Popen[bytes]:
        self.plans.append(plan)
        line = [sys.executable, "-m", "lockstep", "run", "--plan", f"{plan},numerics=bitwise", "--run-dir", str(self.run_dir)]
        line += ["--save-every", str(save_every), *options, str(SCRIPT), str(self.folder / "seen")]
        environment = {**os.environ, "TMPDIR": str(self.folder / "tmp"), "OMP_NUM_THREADS": "1"}
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder / "cache")  # which torch keeps
        with (self.folder / "output.txt").open("ab") as output:
            return subprocess.Popen(line, env=environment, stdout=output, stderr=output, start_new_session=True)

    def steps_done(self) -> int:
        """As metrics.jsonl tells; -1 where it tells nothing yet."""
        try:
            rows = (self.run_dir / "metrics.jsonl").read_text().splitlines()
            return max((json.loads(row)["step"] for row in rows), default=-1)
        except (FileNotFoundError, ValueError):
            return -1

    def hit(self, launcher: subprocess.Popen[bytes], drawn: random.Random) -> bool:
        """Wait for a moment, and kill. Returns whether there was somebody to kill."""
        amid_a_save = "amid a save" in self.victim
        moment = -1 if drawn.random() < 0.1 else drawn.choice([*range(0, STEPS - 10, 10)])  # metrics tell every ten steps
        deadline = time.monotonic() + START_SECONDS
        while launcher.poll() is None and time.monotonic() < deadline and self.steps_done() < moment:
            time.sleep(0.005)
        time.sleep(drawn.random() * (0.05 if moment >= 0 else 6.0))
        stopped: list[psutil.Process] = []
        if amid_a_save:
            while launcher.poll() is None and not list((self.run_dir / "checkpoints").glob(".step-*")):
                time.sleep(0.001)
            stopped = [process for process in children(launcher.pid) if is_writer(process)]
            for process in stopped:
                send(process, signal.SIGSTOP)
            time.sleep(drawn.random() * 0.5)
        self.hit_at = self.steps_done()
        workers = [process for process in children(launcher.pid) if is_worker(process)]
        hits = launcher.poll() is None and bool(workers)
        if hits and "launcher" in self.victim:
            launcher.kill()
        elif hits:
            for process in workers if self.victim == "all workers" else [drawn.choice(workers)]:
                send(process, signal.SIGKILL)
        for process in stopped:
            send(process, signal.SIGCONT)
        if not hits:
            launcher.wait(END_SECONDS)
        return hits

    def check(self, right: str) -> None:
        """Whether the run that has ended came to what the undisturbed one did, with nothing left behind."""
        result = json.loads((self.run_dir / "result.json").read_text())
        if result["fingerprint"] != right:
            self.wrong.append(f"fingerprint {result['fingerprint'][:16]}, and {right[:16]} undisturbed")
        self.wrong += wrongly_seen(self.folder / "seen", self.resumed)
        deadline = time.monotonic() + 10
        while (left := running(self.folder)) and time.monotonic() < deadline:
            time.sleep(0.1)
        self.wrong += [f"process left: {process}" for process in left]
        files = [path.name for path in self.run_dir.rglob("*")]
        self.wrong += [f"left in the run directory: {name}" for name in files if name.startswith(".") or "partial" in name]
        if (lock := self.run_dir / "lock").exists() and is_held(lock):  # a file alone, where the run was killed after its end
            self.wrong.append("the lock is held")
        self.wrong += [f"temporary file left: {path.name}" for path in (self.folder / "tmp").iterdir()]


def wrongly_seen(folder: Path, resumed: list[int]) -> list[str]:
    """What the files of samples say that should not be. `resumed` gets the steps that starts of the run went on
    from."""
    lines = [json.loads(line) for path in folder.iterdir() for line in path.read_text().splitlines() if line.endswith("]")]
    begun: dict[str, int] = {}
    order: dict[str, float] = {}
    for path in folder.iterdir():
        start = path.name.partition("-")[0]
        order[start] = min(order.get(start, float("inf")), float(path.stat().st_ctime))
    for start, what, value in lines:
        if what == "from":
            begun[start] = max(begun.get(start, 0), value)
    starts = sorted(begun, key=lambda start: order[start])
    resumed += [begun[start] for start in starts[1:]]
    wrong = []
    seen: Counter[int] = Counter()
    for start, following in zip(starts, [*starts[1:], None], strict=True):
        end = STEPS if following is None else begun[following]
        learned = [(step, tuple(samples)) for name, step, samples in lines if name == start and step != "from"]
        mine = {(step, samples) for step, samples in learned if begun[start] <= step < end}
        if (steps := sorted({step for step, _ in mine})) != list(range(begun[start], end)):
            wrong.append(f"steps {steps} were learned in a start from {begun[start]} to {end}")
        seen.update(sample for _, samples in mine for sample in samples)
    total = sum(seen.values())
    epochs, rest = divmod(STEPS * 28, 128)
    if total != STEPS * 28 or set(seen.values()) - {epochs, epochs + 1} or sum(count == epochs + 1 for count in seen.values()) != rest:
        wrong.append(f"{total} samples were learned from, and {STEPS * 28} should be; by how often: {Counter(seen.values())}")
    return wrong


def is_held(lock: Path) -> bool:
    with lock.open() as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def is_worker(process: psutil.Process) -> bool:
    return "lockstep.launch.worker" in command(process)


def is_writer(process: psutil.Process) -> bool:
    return "lockstep.checkpoint.writer" in command(process)


def send(process: psutil.Process, number: signal.Signals) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def running(folder: Path) -> list[str]:
    """Commands of the processes that a start in this folder has begun, known by their variables."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TMPDIR") == str(folder / "tmp"):
                found.append(f"{process.pid} {command(process)}")
    return found


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
            chaos.wrong.append(f"the start under {chaos.plans[-1]} did not end within {END_SECONDS:.0f} s")
            break
        wait_for_the_end_of(folder)
        if (chaos.run_dir / "result.json").exists():
            if status == -signal.SIGKILL:  # the launcher was killed after the end of the run: the next one removes what it left
                again = chaos.start(chaos.plans[-1], 1000).wait(END_SECONDS)
                chaos.wrong += [f"status {again} of a start after the end"] if again != USER_ERROR_STATUS else []
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
    chaos = Chaos(seed, folder, victim="workers, in place")
    for name in ("seen", "tmp"):
        (folder / name).mkdir(parents=True)
    before = leaks.take(["shared-memory"])
    plan = drawn.choice(list(PLANS))
    launcher = chaos.start(plan, 1000, "--recovery", "in-place", "--max-restarts", "9")
    first, killed = list[int](), set[int]()
    deadline = time.monotonic() + START_SECONDS
    while len(first) < PLANS[plan] and launcher.poll() is None and time.monotonic() < deadline:  # until all train
        time.sleep(0.005)
        first = [int(path.stem.partition("-")[2]) for path in (folder / "seen").iterdir() if path.stat().st_size]
    time.sleep(drawn.random() * 1.0)
    for _ in range(drawn.randint(1, 3)):
        workers = [process for process in children(launcher.pid) if is_worker(process)]
        if not workers or launcher.poll() is not None:
            break
        victim = drawn.choice(workers)
        killed.add(victim.pid)
        send(victim, signal.SIGKILL)
        time.sleep(drawn.choice([0.0, drawn.random() * 0.05, drawn.random() * 3.0]))
    try:
        status = launcher.wait(END_SECONDS)
        if status:
            chaos.wrong.append(f"it ended with status {status}")
    except subprocess.TimeoutExpired:
        os.killpg(launcher.pid, signal.SIGKILL)
        chaos.wrong.append(f"it did not end within {END_SECONDS:.0f} s")
    if (chaos.run_dir / "result.json").exists():
        chaos.check(right)
        last = max((folder / "seen").iterdir(), key=lambda path: path.stat().st_mtime).name.partition("-")[0]
        at_the_end = {int(path.stem.partition("-")[2]) for path in (folder / "seen").glob(f"{last}-*")}
        chaos.wrong += [f"process {pid} was not killed, and is not there at the end" for pid in set(first) - killed - at_the_end]
    chaos.wrong += [f"left behind: {found}" for found in leaks.remaining(before)]
    return chaos


def wait_for_the_end_of(folder: Path) -> None:
    """Workers of a launcher that was killed die with it, a moment later."""
    deadline = time.monotonic() + 10
    while running(folder) and time.monotonic() < deadline:
        time.sleep(0.05)


def undisturbed(folder: Path) -> str:
    """The fingerprint of a run that nobody hits."""
    for name in ("seen", "tmp"):
        (folder / name).mkdir(parents=True)
    chaos = Chaos(-1, folder)
    if chaos.start("replicate=1", 1000).wait(END_SECONDS):
        raise SystemExit(f"the undisturbed run failed: {(folder / 'output.txt').read_text()}")
    result: dict[str, Any] = json.loads((chaos.run_dir / "result.json").read_text())
    return str(result["fingerprint"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Runs that are killed at a random moment, and go on.")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the others follow")
    parser.add_argument("--recovery", choices=["restart", "in-place"], default="restart")
    parser.add_argument("--folder", type=Path, help="what was done before and is to go on; default: a temporary one")
    given = parser.parse_args(arguments)
    folder = given.folder if given.folder is not None else Path(tempfile.mkdtemp(prefix="lockstep-chaos-"))
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
        chaos = (in_place if given.recovery == "in-place" else one)(seed, right, folder / str(seed))
        row = {"seed": seed, "victim": chaos.victim, "plans": chaos.plans, "hit_at": chaos.hit_at, "resumed": chaos.resumed}
        row |= {"seconds": round(time.monotonic() - began, 1), "wrong": chaos.wrong}
        print(json.dumps(row), flush=True)
        with log.open("a") as opened:
            opened.write(json.dumps(row) + "\n")
        done.append(row)
        if not chaos.wrong:
            shutil.rmtree(folder / str(seed))
    wrong = [row for row in done if row["wrong"]]
    print(f"{len(done)} runs, {len(wrong)} wrong, {sum(bool(row['resumed']) for row in done)} went on from a checkpoint")
    if not wrong and given.folder is None:
        shutil.rmtree(folder)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
