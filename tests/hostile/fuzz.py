"""Commands on changed run directories. `python tests/hostile/fuzz.py COUNT [FIRST]` tries so
many."""

from __future__ import annotations

import io
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import click
import numpy as np

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1])]

from hostile.folders import Mutator, write_run

from lockstep.base.errors import UserError
from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.saved_model import StateDictReader, read_final_model
from lockstep.checkpoint.storage import CheckpointName, FolderStorage
from lockstep.cli.export import final_model
from lockstep.cli.inspect import inspect_all
from lockstep.cli.target import Target
from lockstep.report.reader import read_runs
from lockstep.report.tables import report_json

MOST_SECONDS = 2.0
"""Largest time of a command, of the processor."""
_WAIT_SECONDS = 60
"""Time after which a command hangs, on a busy machine too."""


class Fuzz:
    """Runs commands on changed copies of one run directory. `found` counts what became of them."""

    def __init__(self, folder: Path) -> None:
        self.outside, self.out, self.run = folder / "outside", folder / "out", folder / "run"
        self.outside.mkdir()
        self.out.mkdir()
        (self.outside / "secret").write_text('{"secret": 1}')
        write_run(self.run)
        write_run(folder / "other")
        import_module("lockstep.logging.run_directory")  # and with it torch
        self.mutator = Mutator(self.run, self.outside)
        self.other, self.found = folder / "other", Counter[str]()
        unread = ("lock", "config.json")
        self._alone = [path for path in self.mutator.files if path.name not in unread]
        self._alone += [path for path in self._alone if "checkpoints" in path.parts] * 3
        self._tensors = _tensors(read_final_model(self.run))
        self._before = self._contents()
        self._right = {each["name"]: each["fingerprints"] for each in self._inspected()}
        assert len(self._right) == 3, self._right

    def try_one(self, seed: int) -> None:
        """Change the directory, run commands on it, and put it back. Raises `AssertionError`."""
        chance = random.Random(seed)
        what = f"seed {seed}: {self.mutator.change(chance)}"
        try:
            command = chance.choice(self._commands())
            self._call(f"{what}: {command.__name__}", command)
            assert self._contents() == self._before, what
        finally:
            self.mutator.restore()

    def try_file(self, seed: int) -> None:
        """Change the bytes of one file, and read it alone, which takes a tenth of the time. Raises
        `AssertionError`."""
        chance = random.Random(seed)
        path = chance.choice(self._alone)
        self.mutator.is_forged = False
        what = f"seed {seed}: {self.mutator.change_file(path, chance)}"
        try:
            self._call(what, partial(self._read_file, path))
        finally:
            for each in {path, path.parent / "manifest.json"} & self.mutator.files.keys():
                each.write_bytes(self.mutator.files[each])

    def _read_file(self, path: Path) -> None:
        if path.parent.parent.name == "checkpoints":
            found = inspect_all(
                FolderStorage(path.parent.parent), [CheckpointName.parse(path.parent.name)]
            )  # type: ignore[list-item]
            self._check_intact([asdict(each) for each in found])
        elif path.suffix == ".safetensors":
            at = Target(FolderStorage(self.run), [], self.run)
            found_model = final_model(at, None)
            assert found_model is not None
            assert _tensors(found_model[0]) == self._tensors, "its bytes differ"
        else:
            json.dumps(report_json(read_runs([str(self.run)])), allow_nan=False)

    def _commands(self) -> list[Callable[[], Any]]:
        often = [self.inspect] * 4 + [self.export, self.average, self.read] * 2 + [self.resume] * 3
        return [*often, self.table, self.best, self.folder, self.report, self.reports]

    def inspect(self) -> None:
        self._check_intact(self._inspected())

    def _check_intact(self, inspected: list[dict[str, Any]]) -> None:
        for found in inspected:
            if found["state"] != "intact":
                continue
            if not self.mutator.is_forged or found["name"] == "model.safetensors":
                assert found["fingerprints"] == self._right[found["name"]], "its bytes differ"
                continue
            self.found["intact, with other hashes"] += found["fingerprints"] != self._right.get(
                found["name"]
            )
            check_by_counting(self.run / "checkpoints" / found["name"])

    def table(self) -> None:
        assert "\x1b" not in self._said("inspect", self.run)

    def export(self) -> None:
        self._said("export", self.run, self.out / "model.safetensors")

    def best(self) -> None:
        self._said("export", "--best", self.run, self.out / "model.safetensors")

    def folder(self) -> None:
        self._said("export", "--format", "huggingface", self.run, self.out / "folder")
        for path in (self.out / "folder").iterdir():
            assert b"secret" not in path.read_bytes()

    def read(self) -> None:
        """Read the run as a report does, without its page, which takes much longer."""
        json.dumps(report_json(read_runs([str(self.run), str(self.other)])), allow_nan=False)

    def report(self) -> None:
        self._said("report", self.run)
        self._check_page(self.run / "report.html")

    def reports(self) -> None:
        json.loads(
            self._said("report", "--json", "-o", self.out / "page.html", self.run, self.other)
        )
        self._check_page(self.out / "page.html")

    def average(self) -> None:
        self._said("average", self.run, self.other, "-o", self.out / "soup.safetensors")

    def resume(self) -> None:
        """What a run reads and writes in its directory before its first step."""
        from lockstep.base.events import Event, EventLog
        from lockstep.checkpoint.manifest import (
            DamagedError,
            UnknownFormatError,
            UnreachableError,
            read_manifest,
        )
        from lockstep.checkpoint.storage import FolderStorage
        from lockstep.logging.metrics import MetricsLog
        from lockstep.logging.run_directory import RunDirectory
        from lockstep.recipe.parameters import saved_values

        saved_values(self.run)
        with RunDirectory.create(self.run, resume=True, reopen=True) as directory:
            events = EventLog(self.run / "events.jsonl")
            events.record(Event("run-started", 0))
            events.close()
            with MetricsLog(self.run) as log:
                log.resume(3)
                log.write(4, {"loss": 1.0})
            storage = FolderStorage(self.run / "checkpoints")
            storage.remove_uncommitted()
            for name in storage.names():
                with suppress(DamagedError, UnknownFormatError, UnreachableError):
                    read_manifest(storage, name)
            directory.keep_result()

    def _check_page(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        assert "<planted" not in text
        assert "\x1b" not in text

    def _inspected(self) -> list[dict[str, Any]]:
        said = json.loads(self._said("inspect", "--json", self.run))
        return [*said["checkpoints"], *([said["model"]] if said["model"] else [])]

    def _said(self, name: str, *words: object) -> str:
        with redirect_stdout(io.StringIO()) as said, redirect_stderr(io.StringIO()) as complained:
            import_module(f"lockstep.cli.{name}").command.main(
                list(map(str, words)), standalone_mode=False
            )
        assert "\x1b" not in complained.getvalue()
        return said.getvalue()

    def _call(self, what: str, command: Callable[[], Any]) -> None:
        began = time.process_time()
        try:
            with _limited():
                command()
            self.found["done"] += 1
        except (UserError, click.ClickException, click.exceptions.Exit):
            self.found["refused"] += 1
        except BaseException as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error!s:.300}") from error
        seconds = time.process_time() - began
        self.found["slowest, ms"] = max(self.found["slowest, ms"], round(1000 * seconds))
        assert seconds < MOST_SECONDS, f"{what}: {seconds:.1f} s"
        for path in self.out.iterdir():
            self.mutator._remove(path)

    def _contents(self) -> list[tuple[str, bytes]]:
        paths = [*sorted(self.outside.rglob("*")), *sorted(self.out.parent.iterdir())]
        return [(str(path), path.read_bytes() if path.is_file() else b"") for path in paths]


def _tensors(model: StateDictReader) -> dict[str, Any]:
    return {name: (spec, bytes(model.read(name))) for name, spec in model.specs.items()}


def check_by_counting(checkpoint: Path) -> None:
    """Raise `AssertionError` unless each element of each tensor is in one shard, and each shard in
    its file."""
    content = json.loads((checkpoint / "manifest.json").read_bytes())["content"]
    Manifest.decode((checkpoint / "manifest.json").read_bytes())
    counts: dict[str, Any] = {}
    seen = set()
    for name, entry in content["files"].items():
        assert (checkpoint / name).parent == checkpoint
        used = np.zeros((checkpoint / name).stat().st_size, int)
        for tensor, dtype, shape, offsets, lengths, start in entry["shards"]:
            size = (
                int(np.prod(lengths, dtype=int))
                * int("".join(filter(str.isdecimal, dtype)) or 8)
                // 8
            )
            assert start + size <= len(used)
            used[start : start + size] += 1
            count = counts.setdefault(tensor, np.zeros(shape, int))
            box = (tensor, tuple(offsets), tuple(lengths))
            if box not in seen:
                count[
                    tuple(
                        slice(at, at + length) for at, length in zip(offsets, lengths, strict=True)
                    )
                ] += 1
            seen.add(box)
        assert used.max(initial=0) <= 1
    assert all((count == 1).all() for count in counts.values())


@contextmanager
def _limited() -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(_WAIT_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def main(count: int, first: int = 0, files: int = 0) -> None:
    """`files`: 1 to change bytes of one file at a time, and call its reader alone."""
    failures = Counter[str]()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        fuzz = Fuzz(Path(folder))
        began = time.monotonic()
        for seed in range(first, first + count):
            try:
                (fuzz.try_file if files else fuzz.try_one)(seed)
            except AssertionError as error:
                failures[str(error).partition(": ")[2].rpartition(": ")[0][-60:]] += 1
                if failures.total() <= 40:
                    print(error, flush=True)
        print(
            f"{count} folders in {time.monotonic() - began:.0f} s: {dict(fuzz.found)};"
            f" {failures.total()} failures"
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
