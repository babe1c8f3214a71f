"""Runs the audited script on several processes, as torchrun would, and detects a hang."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal

from lockstep.audit.request import AuditRequest
from lockstep.audit.source import ScriptSource
from lockstep.base.processes import own_python, parents
from lockstep.base.system import signals
from lockstep.options import LAUNCHER_VARIABLES
from lockstep.scripts.line import ScriptLine
from lockstep.scripts.process import OUTPUT, TAIL_LINES, ScriptEnd, run_script

STACKS_SECONDS = 2.0
SITE = Path(__file__).parent / "site"
LauncherChoice = Literal["auto", "torchrun", "python"]
_FAILED = re.compile(r"^[EW]\d{4} .*torch/distributed/elastic/multiprocessing/", re.MULTILINE)
_AGENT_TRACEBACK = re.compile(
    r"^Traceback \(most recent call last\):\n(?:  .*\n)*?.*torch/distributed/(?:run|launcher)",
    re.MULTILINE,
)
_THREADS_BANNER = re.compile(r"^\*+\nSetting OMP_NUM_THREADS.*\n\*+\n", re.MULTILINE)
_LOGGING_ERROR = re.compile(r"^--- Logging error ---\n(?:.*\n)*?Arguments: .*\n?", re.MULTILINE)
"""Python's report of a line that could not be logged, as torchrun may print when it ends."""
_RANK_LINE = re.compile(r'"kind":\s*"rank"')
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditOptions:
    line: ScriptLine
    processes: int = 2
    steps: int = 20
    hang_after_seconds: float = 60.0
    """Seconds without a new record after which the script counts as hanging."""
    timeout_seconds: float = 600.0
    launcher: LauncherChoice = "auto"
    """`python` for a script that starts its own processes. `auto` decides by the source of the
    script."""
    perturb: int = 0
    """Seed of noise of one unit in the last place on the initial parameters; 0 for no noise."""
    resume_arguments: Sequence[str] | None = None
    """Arguments with which the script resumes; None to skip the check of resuming."""

    @property
    def root(self) -> str:
        script = self.line.script
        return os.getcwd() if self.line.is_module else os.path.dirname(os.path.abspath(script))

    def with_arguments(self, *arguments: str) -> AuditOptions:
        added = (*self.line.arguments, *arguments)
        return replace(self, line=replace(self.line, arguments=added))


@dataclass(frozen=True, kw_only=True, slots=True)
class HangStacks:
    seconds: float
    stacks: Mapping[int, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditedEnd(ScriptEnd):
    """The end of an audited script, which may have been killed because it hung or took too long."""

    hang: HangStacks | None = None

    @property
    def did_not_end(self) -> str:
        return self.error or ("it made no progress" if self.hang or self.timed_out else "")


class RecordGrowth:
    """Measures the growth of all record files, to detect a hang."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._bytes = 0
        self._at = clock()
        self._has_rank = False

    def stalled_seconds(self) -> float:
        """Return the seconds since a record file last grew; 0 before the first line of a rank."""
        paths = list(recorded(self._folder).values())
        size = sum(path.stat().st_size for path in paths)
        if size != self._bytes:
            self._bytes, self._at = size, self._clock()
            self._has_rank = self._has_rank or any(
                _RANK_LINE.search(path.read_text(errors="replace")) for path in paths
            )
        return self._clock() - self._at if self._has_rank else 0.0


def launcher_of(options: AuditOptions) -> tuple[bool, str]:
    if options.launcher != "auto":
        return options.launcher == "torchrun", ""
    call = ScriptSource.find(options.line).start_call()
    if call is None:
        return True, ""
    script = options.line.script
    return False, (
        f"{script}:{call.line} starts the processes itself ({call.name}), so it was run as python"
        f" {script}, and --nproc does not count; --launcher torchrun runs it otherwise"
    )


def command_line(options: AuditOptions, folder: Path, *, torchrun: bool) -> list[str]:
    if not torchrun:
        return [sys.executable, *options.line.words]
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(options.processes)]
    # otherwise torchrun leaves a folder in /tmp
    logs = ["--log-dir", str(folder / "torchrun")]
    return own_python("-m", *launcher, *logs, *options.line.words)


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    kept = {
        name: value
        for name, value in environ.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
    path = os.pathsep.join([str(SITE), *filter(None, [environ.get("PYTHONPATH")])])
    # Unbuffered, as torchrun runs its workers: nothing is lost when a process ends itself.
    return {**kept, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def run_audited(
    options: AuditOptions, folder: Path, *, torchrun: bool, echo: BinaryIO | None = None
) -> AuditedEnd:
    """Run the script until it ends, hangs or takes too long. End all processes that the script
    started."""
    growth, hangs = RecordGrowth(folder), list[HangStacks]()

    def look() -> bool:
        stalled = growth.stalled_seconds()
        # only while a process of the script runs, not only its launcher
        if stalled > options.hang_after_seconds and _running_records(folder):
            hangs.append(HangStacks(seconds=stalled, stacks=_dump_stacks(folder)))
        return bool(hangs)

    end = run_script(
        command_line(options, folder, torchrun=torchrun),
        AuditRequest(
            folder=folder,
            steps=options.steps,
            roots=(options.root,),
            runner=os.getpid(),
            perturb=options.perturb,
        ),
        folder,
        environ=environment(os.environ),
        timeout_seconds=options.timeout_seconds,
        look=look,
        echo=echo,
    )
    output = (folder / OUTPUT).read_text(encoding="utf-8", errors="replace")
    error = "" if hangs or end.timed_out or not end.status else failure_in(output)
    status = 0 if aborted_at_exit(error) else end.status
    fields = {**asdict(end), "status": status, "error": error if status else ""}
    return AuditedEnd(**fields, hang=hangs[0] if hangs else None)


def aborted_at_exit(error: str) -> bool:
    """Return True if a process aborted after its script had ended, while Python destroyed a process
    group."""
    aborted = "terminate called without an active exception" in error
    return aborted and "Traceback (most recent call last)" not in error


def failure_in(output: str) -> str:
    output = _LOGGING_ERROR.sub("", _THREADS_BANNER.sub("", output))
    found = [pattern.search(output) for pattern in (_FAILED, _AGENT_TRACEBACK)]
    heads = [each.start() for each in found if each is not None]
    text = output[: min(heads)].rstrip() if heads else ""
    return "\n".join((text or output.rstrip()).splitlines()[-TAIL_LINES:])


def recorded(folder: Path) -> dict[int, Path]:
    files = {}
    for path in folder.glob("process-*.jsonl"):
        with suppress(ValueError):
            files[int(path.stem.removeprefix("process-"))] = path
    return files


def _running_records(folder: Path) -> list[int]:
    return sorted(recorded(folder).keys() & parents().keys())


def _dump_stacks(folder: Path) -> dict[int, str]:
    running = _running_records(folder)
    for pid in running:
        for number in signals("SIGUSR2"):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
    time.sleep(STACKS_SECONDS)
    files = {pid: folder / f"stacks-{pid}.txt" for pid in running}
    return {
        pid: path.read_text(encoding="utf-8", errors="replace")
        for pid, path in files.items()
        if path.exists()
    }


def waiting_lines(stacks: Mapping[int, str], root: str) -> dict[int, str]:
    """Return the line of the script at which each process waits."""
    lines = {}
    for pid, text in stacks.items():
        main_thread = _THREAD.split(text)[-1]  # threads are listed from the youngest to the oldest
        for path, line, function in _FRAME.findall(main_thread):
            name = os.path.relpath(path, root)
            if os.path.isabs(path) and not name.startswith("..") and "site-packages" not in name:
                lines[pid] = f"{name}:{line}, in {function}"
                break
    return lines
