"""The hook that profiles steps with torch's profiler. Writes traces, and tables of times and
memory."""

from __future__ import annotations

import gzip
import json
import operator
import socket
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import profile, record_function

from lockstep.base import accelerator
from lockstep.base.dtypes import dtype_name
from lockstep.base.torch_private import is_compiled_in_place, to_local, tree_leaves
from lockstep.hooks.profiling.trace import (
    MARK,
    KnownTensor,
    MemoryNote,
    MemoryTimeline,
    Span,
    TimeParts,
    heaviest,
    memory_table,
    memory_timeline,
    merged,
    span,
    time_parts,
)
from lockstep.hooks.stragglers import process_peak_bytes
from lockstep.model.chunked_logits import ChunkedLogits
from lockstep.training.hook import ControlHook
from lockstep.training.run import Run
from lockstep.training.train_module import TrainModule

LISTED_OPERATORS = 10
CLOCK_EXCHANGES = 9  # number of exchanges that compare the ranks' clocks; the median is used
_FAILURES = (OSError, ValueError, RuntimeError)
"""Exceptions that count as a failed export. Torch does not always report that a trace is
incomplete."""
# the number of the thread under which a trace shows the phases of the training loop
PHASES_THREAD = 0


class Profiler(ControlHook):
    def __init__(self, steps: range) -> None:
        self._steps = steps
        self._profiler: profile | None = None
        self._notes: MemoryNotes | None = None
        self._began = 0.0
        self._is_done = False
        self._has_failed = False

    def on_start(self, run: Run) -> None:
        self._world, self._phases = run.context.world, run.context.phases
        self._folder = run.context.run_dir / "profile"

    def before_step(self, run: Run) -> None:
        if run.training.current.step == self._steps.start:
            self._begin(run)

    def after_step(self, run: Run) -> None:
        if self._notes is not None:
            self._notes.note_all()

    def _begin(self, run: Run) -> None:
        self._world.gather_values(None)
        accelerator.reset_peak_bytes(self._world.device)
        self._notes = MemoryNotes(run.training.modules, self._world.device)
        self._profiler = profile(
            activities=accelerator.profiled(self._world.device), profile_memory=True
        )
        self._profiler.__enter__()  # type: ignore[no-untyped-call]
        self._phases.log = []
        self._began = time.time()
        self._notes.note_all()

    def between_steps(self, run: Run) -> None:
        is_last = run.training.current.step == self._steps.stop - 1
        if self._profiler is not None and is_last:
            self._finish(run, self._profiler, time.time())

    def on_error(self, run: Run, error: BaseException) -> None:
        self._has_failed = True

    def on_end(self, run: Run) -> None:
        if self._profiler is not None:
            self._stop_profiler(self._profiler)
            self._phases.log = None
        if not self._is_done and not self._has_failed:
            first, last = self._steps.start, self._steps.stop - 1
            run.context.recorder.message(
                f"no profile: the run did not go through all of steps {first} to {last}; give"
                " --profile others, or train longer"
            )

    def _finish(self, run: Run, profiler: profile, ended: float) -> None:
        notes = self._stop_profiler(profiler)
        phases, self._phases.log = self._phases.log or [], None
        if self._world.rank == 0:
            with suppress(OSError):  # writing the first trace will raise the error
                self._folder.mkdir(exist_ok=True)
        ahead = self._clocks()
        thread, failure = threading.get_native_id(), None
        trace: dict[str, Any] = {}
        found: dict[str, Any] | None = None
        memory: MemoryTimeline | None = None
        try:
            trace, base = self._export(profiler, phases)
            window = (self._began - base, ended - base)
            found = asdict(time_parts(trace, window, thread))
            memory = self._memory(trace, notes, window, thread)
        except _FAILURES as error:
            failure = str(error)
        mine = [found, process_peak_bytes(self._world.device), socket.gethostname()]
        everyone = self._world.gather_values([*mine, memory and asdict(memory), failure])
        failures = [
            f"rank {rank}: {failure}"
            for rank, (*_, failure) in enumerate(everyone)
            if failure is not None
        ]
        if self._world.rank == 0 and not failures:
            try:
                operators = heaviest(trace, thread, LISTED_OPERATORS)
                tables = self._write([each[:4] for each in everyone], ahead, operators)
                run.context.recorder.message(tables)
            except _FAILURES as error:
                failures = [f"rank 0: {error}"]
        if failures:
            run.event("profile-failed", reason=failures[0])
            run.context.recorder.message(
                f"no profile: it cannot be written ({failures[0]}); training continues"
            )
        else:
            steps = [self._steps.start, self._steps.stop]
            run.event("profiled", steps=steps, folder=str(self._folder))
        self._is_done = True

    def _stop_profiler(self, profiler: profile) -> list[MemoryNote]:
        profiler.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        assert self._notes is not None, "made with the profiler"
        notes, self._profiler, self._notes = self._notes, None, None
        notes.close()
        return notes.notes

    def _memory(
        self, trace: Mapping[str, Any], notes: Sequence[MemoryNote], window: Span, thread: int
    ) -> MemoryTimeline | None:
        device = self._world.device
        index = device.index if accelerator.is_accelerator(device) else None
        phases = [
            (event["name"], *span(event))
            for event in trace["traceEvents"]
            if event.get("cat") == "phase"
        ]
        return memory_timeline(trace, notes, phases, window, thread=thread, device=index)

    def _export(
        self, profiler: profile, phases: Sequence[tuple[str, float, float]]
    ) -> tuple[dict[str, Any], float]:
        mine = self._folder / f"rank-{self._world.rank}.json"
        profiler.export_chrome_trace(str(mine))
        trace: dict[str, Any] = json.loads(mine.read_text(encoding="utf-8"))
        base = int(trace.get("baseTimeNanoseconds", 0)) / 1e9
        trace["traceEvents"] += _phase_events(phases, time.time() - time.perf_counter() - base)
        mine.write_text(json.dumps(trace), encoding="utf-8")
        return trace, base

    def _clocks(self) -> list[float]:
        """Return, for each rank, the difference between its clock and rank 0's clock, in seconds.
        Every rank must call this method."""
        times = []
        for _ in range(CLOCK_EXCHANGES):
            self._world.gather_values(None)
            times.append(time.time())
        everyone = self._world.gather_values(times)
        return [statistics.median(map(operator.sub, row, everyone[0])) for row in everyone]

    def _write(
        self,
        everyone: Sequence[Sequence[Any]],
        ahead: Sequence[float],
        operators: Sequence[tuple[str, int, float]],
    ) -> str:
        traces = {
            rank: json.loads((self._folder / f"rank-{rank}.json").read_text(encoding="utf-8"))
            for rank in range(self._world.size)
        }
        with gzip.open(self._folder / "trace.json.gz", "wt", encoding="utf-8") as file:
            json.dump(merged(traces, [host for _, _, host, _ in everyone], ahead), file)
        summary: dict[str, Any] = {
            "steps": [self._steps.start, self._steps.stop],
            "ranks": [
                {**found, "peak_bytes": peak, "host": host} for found, peak, host, _ in everyone
            ],
            "operators": [
                {"name": name, "calls": calls, "seconds": seconds}
                for name, calls, seconds in operators
            ],
        }
        text = json.dumps(summary, indent=2) + "\n"
        (self._folder / "summary.json").write_text(text, encoding="utf-8")
        memory = {"steps": summary["steps"], "ranks": [timeline for *_, timeline in everyone]}
        (self._folder / "memory.json").write_text(json.dumps(memory) + "\n", encoding="utf-8")
        return "\n".join([phase_table(summary, self._folder), *memory_table(memory["ranks"])])


def _phase_events(
    phases: Sequence[tuple[str, float, float]], offset_seconds: float
) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "tid": PHASES_THREAD, "args": {"name": "phases"}},
        {"ph": "M", "name": "thread_sort_index", "tid": PHASES_THREAD, "args": {"sort_index": -1}},
    ]
    for name, start, stop in phases:
        times = {"ts": (start + offset_seconds) * 1e6, "dur": (stop - start) * 1e6}
        events.append({"ph": "X", "cat": "phase", "name": name, "tid": PHASES_THREAD, **times})
    return events


def phase_table(summary: Mapping[str, Any], folder: Path) -> str:
    first, stop = summary["steps"]
    lines = [
        f"{f'steps {first} to {stop - 1}, ms':<18}    in all   compute   exposed  overlapped     "
        " idle   peak memory"
    ]
    for rank, row in enumerate(summary["ranks"]):
        ms = TimeParts(*(row[name] * 1e3 for name in ("whole", "compute", "exposed", "overlapped")))
        figures = (
            f"{ms.whole:10.1f}{ms.compute:10.1f}{ms.exposed:10.1f}{ms.overlapped:12.1f}"
            f"{ms.idle:10.1f}"
        )
        lines.append(f"  rank {rank:<11}{figures} {row['peak_bytes'] / 1e6:10.1f} MB")
    lines.append(
        "exposed, overlapped: exchanges without, and behind, a computation; rank 0's heaviest"
        " operators, without what they call:"
    )
    lines += [
        f"  {each['seconds'] * 1e3:9.1f} ms {each['calls']:7} x  {each['name']}"
        for each in summary["operators"]
    ]
    lines.append(
        "all ranks on one clock, for ui.perfetto.dev or chrome://tracing:"
        f" {folder / 'trace.json.gz'}"
    )
    return "\n".join(lines)


class MemoryNotes:
    """Notes the addresses of tensors while the profiler runs. Keeps no tensor alive."""

    def __init__(self, modules: Sequence[TrainModule], device: torch.device) -> None:
        self.notes: list[MemoryNote] = []
        self._modules = modules
        self._device = device.type
        self._hooks = ExitStack()
        for module in modules:
            # a hook would be compiled with the module
            if not any(map(is_compiled_in_place, module.model.modules())):
                for name, part in module.model.named_modules():
                    handle = part.register_forward_hook(partial(self._note_output, name))
                    self._hooks.callback(handle.remove)

    def close(self) -> None:
        self._hooks.close()

    def note_all(self) -> None:
        known_tensors: dict[int, KnownTensor] = {}
        for cause, name, tensor in self._everything():
            if (known := self._known_tensor(cause, name, tensor)) is not None:
                known_tensors.setdefault(known.address, known)
        self._mark(MemoryNote(list(known_tensors.values()), is_complete=True))

    def _everything(self) -> Iterator[tuple[str, str, Tensor]]:
        for module in self._modules:
            names: dict[Tensor, str] = {}
            for name, parameter in module.model.named_parameters():
                names[parameter] = name
                yield "parameters", name, parameter
                if parameter.grad is not None:
                    yield "gradients", f"gradient of {name}", parameter.grad
            for name, buffer in module.model.named_buffers():
                yield "parameters", f"buffer {name}", buffer
            for optimizer in module.optimizers:
                for held, state in optimizer.state.items():
                    of = names.get(held, "a parameter")
                    for kind, value in state.items():
                        for leaf in tree_leaves(value):
                            yield "optimizer state", f"{kind} of {of}", leaf

    def _known_tensor(self, cause: str, name: str, tensor: Any) -> KnownTensor | None:
        if (
            not isinstance(tensor, Tensor)
            or isinstance(tensor, ChunkedLogits)
            or (tensor := to_local(tensor)).device.type != self._device
            or tensor.layout is not torch.strided
        ):
            return None
        storage = tensor.untyped_storage()
        if not (size := storage.nbytes()):
            return None
        return KnownTensor(
            cause, storage.data_ptr(), size, name, tuple(tensor.shape), dtype_name(tensor.dtype)
        )

    def _note_output(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        label = f"output of {name or type(module).__name__}"
        known = (self._known_tensor("", label, leaf) for leaf in tree_leaves(output))
        self._mark(MemoryNote([each for each in known if each is not None], is_complete=False))

    def _mark(self, note: MemoryNote) -> None:
        with record_function(f"{MARK}{len(self.notes)}"):
            self.notes.append(note)
