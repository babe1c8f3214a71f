"""`lockstep inspect`: what a run has saved, and whether every byte of it is right."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

from lockstep.base.units import size
from lockstep.checkpoint.folder import MANIFEST, Name, Storage
from lockstep.checkpoint.manifest import Damaged, Unreachable, Unreadable
from lockstep.checkpoint.reading import check
from lockstep.checkpoint.whole_tensors import SavedModel, Stored
from lockstep.cli.target import MODEL, Target, fingerprint, reachable

_TOLD = {
    "run-started": "started", "resumed": "resumed", "weights-loaded": "took others' weights", "rescued": "rescued",
    "preempted": "asked to end", "stopped": "stopped", "run-failed": "failed", "run-ended": "ended",
    "checkpoint-failed": "could not save", "checkpoint-damaged": "found a damaged checkpoint",
}  # fmt: skip
"""Events of a run's life, and the words for them."""
_DIGITS = 12
"""Of a fingerprint, in the table."""


@dataclass(slots=True)
class Found:
    """A checkpoint, as far as it can be read; or the model that a run ended with."""

    name: str
    step: int
    state: str = "whole"
    """Or damaged, unreadable, unreachable."""
    reasons: list[str] = field(default_factory=list)
    """Why it is not whole."""
    saved: str | None = None
    """When, with its time zone."""
    size_bytes: int = 0
    plan: str | None = None
    """That it was saved under."""
    processes: int | None = None
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Of the model of each (model, optimizer) pair, by its number."""
    remembers: list[str] = field(default_factory=list)
    """What else is in it: hooks, and what `session.include` was given."""


@click.command("inspect")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs instead of a table.")
@click.argument("target", metavar="RUN_DIR|CHECKPOINT|URL")
def command(as_json: bool, target: str) -> int:
    """Show the checkpoints of a run, and check every byte of them.

    Of a run directory, of one checkpoint, or of the URL of a folder of them. Says of each when and under which plan it was saved, what is
    damaged and where, and the fingerprint of the model in it: the one that result.json would have.

    \b
    Examples:
      lockstep inspect runs/a
      lockstep inspect runs/a/checkpoints/step-00000500-1c9e02d4
      lockstep inspect --json s3://bucket/run

    Exit status: 0 where all is whole, 1 where something is damaged or cannot be read, 2 for a mistake (nothing there, no driver).
    """
    at = Target.find(target)
    with reachable(target):
        found = looked_at(at.storage, at.names)
    model = _final_model(at)
    life = [] if at.run is None else list(_life(at.run / "events.jsonl"))
    if as_json:
        checkpoints = [asdict(each) for each in found]
        print(json.dumps({"target": target, "checkpoints": checkpoints, "model": model and asdict(model), "events": life}, indent=2))
    else:
        _show(target, [*found, *([model] if model else [])], life)
    return 0 if all(each.state == "whole" for each in (*found, *([model] if model else []))) else 1


def looked_at(storage: Storage, names: list[Name]) -> list[Found]:
    """All of them, but for those that a live run has deleted meanwhile. Raises `OSError`."""
    found = {name: _look_at(storage, name) for name in names}
    there = storage.names() if any(each.state != "whole" for each in found.values()) else names
    return [each for name, each in found.items() if name in there]


def _look_at(storage: Storage, name: Name) -> Found:
    found = Found(str(name), name.step)
    try:
        stored = Stored(storage, name)
        facts = stored.manifest.facts
        found.saved, found.plan, found.processes = facts.get("saved"), facts.get("plan"), facts.get("world_size")
        found.remembers = sorted(stored.manifest.values["state"])
        found.size_bytes = sum(file.seal.size_bytes for file in stored.manifest.files.values()) + storage.size(name, MANIFEST)
        found.reasons = check(storage, name)
        if not found.reasons:
            found.fingerprints = {str(pair): fingerprint(stored.model(pair)) for pair in stored.pairs}
    except (Damaged, Unreadable, Unreachable) as error:
        found.state, found.reasons = type(error).__name__.lower(), [str(error)]
    except OSError as error:
        found.state, found.reasons = "unreachable", [error.strerror or str(error)]
    if found.reasons and found.state == "whole":
        found.state = "damaged"
    return found


def _final_model(at: Target) -> Found | None:
    """What the run ended with. Its bytes are right where they have the fingerprint that result.json says."""
    result = at.result()
    if at.run is None or result is None or "fingerprint" not in result:
        return None
    found = Found(MODEL, result["steps"], plan=result["plan"], processes=result["world_size"])
    path = at.run / MODEL
    try:
        found.size_bytes = path.stat().st_size
        found.fingerprints = {"0": fingerprint(SavedModel(path))}
        if found.fingerprints["0"] != result["fingerprint"]:
            found.reasons = [f"its fingerprint is not that of result.json, {result['fingerprint']}"]
    except (Damaged, OSError) as error:
        found.reasons = [str(error)]
    if found.reasons:
        found.state = "damaged"
    return found


def _life(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a run that say how it went. A last line that was being written is left out."""
    if not path.is_file():
        return
    with reachable(str(path)):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row.get("event") in _TOLD:
            yield row


def _show(target: str, found: list[Found], life: list[dict[str, Any]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    if found:
        table = Table(title=f"{target}: every byte read", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for column in ("step", "checkpoint", "saved", "size", "plan", "state", "fingerprint"):
            right = column in ("step", "size")
            table.add_column(column, justify="right" if right else "left", overflow="fold", no_wrap=column not in ("saved", "plan"))
        for each in found:
            table.add_row(*_row(each), style=None if each.state == "whole" else "red")
        console.print(table)
    else:
        console.print(Text(f"{target}: no checkpoint yet"))
    for each in found:
        for reason in each.reasons:
            console.print(Text(f"{each.name}: {reason}", style="red"))
    remembered = sorted({name for each in found for name in each.remembers})
    if remembered:
        console.print(Text(f"saved with the models: {', '.join(remembered)}"))
    for row in life:
        console.print(Text(_told(row)))
    if any(each.fingerprints for each in found):
        console.print(Text(f"fingerprints are cut to {_DIGITS} digits; --json has them whole", style="dim"))


def _row(found: Found) -> list[str]:
    saved = (found.saved or "").replace("T", " ")[:19]
    plan = "" if found.plan is None else f"{found.plan.replace(',', ', ')} on {_processes(found.processes)}"
    prints = "\n".join(digits[:_DIGITS] for digits in found.fingerprints.values())
    return [str(found.step), found.name, saved, size(found.size_bytes), plan, found.state, prints]


def _told(row: dict[str, Any]) -> str:
    name = row["event"]
    more = {
        "run-started": f" under {row.get('plan')} on {_processes(row.get('world_size'))}",
        "resumed": f" from {row.get('checkpoint')}",
        "weights-loaded": f": {row.get('path')}",
        "rescued": f" as {row.get('checkpoint')}",
        "checkpoint-failed": f" {row.get('checkpoint')}: {row.get('reason')}",
        "checkpoint-damaged": f" {row.get('checkpoint')}: {row.get('reason')}",
        "preempted": f": {row.get('reason')}",
        "stopped": f": {row.get('reason')}",
        "run-failed": f": {row.get('error', '')}",
    }
    return f"step {row.get('step')}: {_TOLD[name]}{more.get(name, '')}"


def _processes(count: int | None) -> str:
    return f"{count} process{'' if count == 1 else 'es'}"
