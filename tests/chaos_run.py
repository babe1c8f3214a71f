"""One run of tests/chaos.py: its processes, how they are hit, and what must be true of it at the
end."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import run_files

SCRIPT = Path(__file__).parent / "scripts" / "chaos.py"
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
    killed_launchers: int = 0
    """Each leaves its temporary folder."""
    hit_at: int = -1
    """Steps done when it was hit, as far as it had told."""

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def start(
        self,
        plan: str,
        save_every: int,
        *options: str,
        before: Sequence[str] = (),
        sleep: float = 0.0,
    ) -> subprocess.Popen[bytes]:
        """`before`: put before the command. `sleep`: seconds that each step takes longer."""
        self.plans.append(plan)
        line = [
            *before,
            sys.executable,
            "-m",
            "lockstep",
            "run",
            "--plan",
            f"{plan},numerics=bitwise",
            "--run-dir",
            str(self.run_dir),
        ]
        line += ["--save-every", str(save_every), *options, str(SCRIPT), str(self.folder / "seen")]
        environment = {**os.environ, "TMPDIR": str(self.folder / "tmp"), "OMP_NUM_THREADS": "1"}
        environment["CHAOS_SLEEP"] = str(sleep)
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder / "cache")  # which torch keeps
        with (self.folder / "output.txt").open("ab") as output:
            return subprocess.Popen(
                line, env=environment, stdout=output, stderr=output, start_new_session=True
            )

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
        # metrics tell every ten steps
        moment = -1 if drawn.random() < 0.1 else drawn.choice([*range(0, STEPS - 10, 10)])
        deadline = time.monotonic() + START_SECONDS
        while (
            launcher.poll() is None and time.monotonic() < deadline and self.steps_done() < moment
        ):
            time.sleep(0.005)
        time.sleep(drawn.random() * (0.05 if moment >= 0 else 6.0))
        stopped: list[psutil.Process] = []
        if amid_a_save:
            while launcher.poll() is None and not list(
                (self.run_dir / "checkpoints").glob(".step-*")
            ):
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

    def first_processes(
        self, count: int, launchers: Sequence[subprocess.Popen[bytes]]
    ) -> list[int]:
        """Wait until so many processes train, and return them."""
        first = list[int]()
        deadline = time.monotonic() + START_SECONDS
        while (
            len(first) < count
            and all(each.poll() is None for each in launchers)
            and time.monotonic() < deadline
        ):
            time.sleep(0.005)
            first = [
                int(path.stem.partition("-")[2])
                for path in (self.folder / "seen").iterdir()
                if path.stat().st_size
            ]
        return first

    def last_processes(self) -> set[int]:
        """Those that trained at the end of the run."""
        last = max(
            (self.folder / "seen").iterdir(), key=lambda path: path.stat().st_mtime
        ).name.partition("-")[0]
        return {
            int(path.stem.partition("-")[2]) for path in (self.folder / "seen").glob(f"{last}-*")
        }

    def wait_for(
        self, launchers: Sequence[subprocess.Popen[bytes]], *, may_fail: bool = False
    ) -> None:
        """Wait until these have ended, as they should. `may_fail`: or with an error."""
        deadline = time.monotonic() + END_SECONDS
        for launcher in launchers:
            try:
                if (
                    status := launcher.wait(max(1.0, deadline - time.monotonic()))
                ) and not may_fail:
                    self.wrong.append(f"a launcher ended with status {status}")
            except subprocess.TimeoutExpired:
                os.killpg(launcher.pid, signal.SIGKILL)
                self.wrong.append(f"a launcher did not end within {END_SECONDS:.0f} s")

    def why_not_in_place(self) -> list[str]:
        """The reasons for which all processes were started again."""
        events = run_files.events(self.run_dir)
        return [event.get("not_in_place", "") for event in events if event["event"] == "restarted"]

    def check(self, right: str) -> None:
        """Whether the run that has ended came to what the undisturbed one did, with nothing left
        behind."""
        result = run_files.result(self.run_dir)
        if result["fingerprint"] != right:
            self.wrong.append(
                f"fingerprint {result['fingerprint'][:16]}, and {right[:16]} undisturbed"
            )
        self.wrong += wrongly_seen(self.folder / "seen", self.resumed)
        deadline = time.monotonic() + 10
        while (left := running(self.folder)) and time.monotonic() < deadline:
            time.sleep(0.1)
        self.wrong += [f"process left: {process}" for process in left]
        files = [path.name for path in self.run_dir.rglob("*")]
        self.wrong += [
            f"left in the run directory: {name}"
            for name in files
            if name.startswith(".") or "partial" in name
        ]
        # a file alone, where the run was killed after its end
        if (lock := self.run_dir / "lock").exists() and is_held(lock):
            self.wrong.append("the lock is held")
        files = sorted(path.name for path in (self.folder / "tmp").iterdir())
        if len(files) > self.killed_launchers or not all(
            name.startswith("lockstep-") for name in files
        ):
            self.wrong.append(f"temporary files left: {files}")


def wrongly_seen(folder: Path, resumed: list[int]) -> list[str]:
    """What the files of samples say that should not be. `resumed` gets the steps that starts of the
    run went on from."""
    lines = [
        json.loads(line)
        for path in folder.iterdir()
        for line in path.read_text().splitlines()
        if line.endswith("]")
    ]
    begun: dict[str, int] = {}
    order: dict[str, float] = {}
    for path in folder.iterdir():
        start = path.name.partition("-")[0]
        order[start] = min(order.get(start, float("inf")), float(path.stat().st_ctime))
    for start, what, value in lines:
        if what == "from":
            begun[start] = max(begun.get(start, 0), value)
    # One that was lost before it learned from anything says nothing of where it began.
    starts = sorted(
        {start for start, what, _ in lines if what != "from"}, key=lambda start: order[start]
    )
    resumed += [begun[start] for start in starts[1:]]
    wrong = []
    seen: Counter[int] = Counter()
    for start, following in zip(starts, [*starts[1:], None], strict=True):
        end = STEPS if following is None else begun[following]
        learned = [
            (step, tuple(samples))
            for name, step, samples in lines
            if name == start and step != "from"
        ]
        mine = {(step, samples) for step, samples in learned if begun[start] <= step < end}
        if (steps := sorted({step for step, _ in mine})) != list(range(begun[start], end)):
            wrong.append(f"steps {steps} were learned in a start from {begun[start]} to {end}")
        seen.update(sample for _, samples in mine for sample in samples)
    total = sum(seen.values())
    epochs, rest = divmod(STEPS * 28, 128)
    if (
        total != STEPS * 28
        or set(seen.values()) - {epochs, epochs + 1}
        or sum(count == epochs + 1 for count in seen.values()) != rest
    ):
        wrong.append(
            f"{total} samples were learned from, and {STEPS * 28} should be; by how often:"
            f" {Counter(seen.values())}"
        )
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


def wait_for_the_end_of(folder: Path) -> None:
    """Workers of a launcher that was killed die with it, a moment later."""
    deadline = time.monotonic() + 10
    while running(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
