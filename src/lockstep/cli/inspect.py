"""`lockstep inspect`: shows the checkpoints of a run, and checks every byte of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

from lockstep.base import foreign_text
from lockstep.base.errors import CheckpointError
from lockstep.base.foreign_text import one_line
from lockstep.base.units import size
from lockstep.base.urls import without_password
from lockstep.base.words import counted
from lockstep.checkpoint.manifest import (
    DamagedError,
    UnknownFormatError,
    UnreachableError,
    UnreadableError,
    check,
)
from lockstep.checkpoint.saved_model import MODEL, StoredCheckpoint, read_final_model
from lockstep.checkpoint.storage import MANIFEST, CheckpointName, Storage
from lockstep.cli.arguments import json_option, print_json
from lockstep.cli.target import Target, best_of, checkpoint_readable, fingerprint_of_saved
from lockstep.logging.run_files import EVENTS, read_rows

_EVENT_WORDS = {
    "run-started": "started", "resumed": "resumed", "weights-loaded": "loaded pretrained weights",
    "rescued": "rescued",
    "preempted": "asked to end", "stopped": "stopped", "run-failed": "failed", "run-ended": "ended",
    "checkpoint-failed": "could not save", "checkpoint-damaged": "found a damaged checkpoint",
}  # fmt: skip
"""Maps kinds of events to the text that the command shows."""
_STATES = {
    DamagedError: "damaged",
    UnknownFormatError: "unreadable",
    UnreachableError: "unreachable",
}
_DIGITS = 12


@dataclass(slots=True)
class InspectedCheckpoint:
    """The contents of a checkpoint or of a final model, as far as they could be read."""

    name: str
    step: int
    state: str = "intact"
    reasons: list[str] = field(default_factory=list)
    saved: str | None = None
    size_bytes: int = 0
    plan: str | None = None
    processes: int | None = None
    score: dict[str, Any] | None = None
    is_best: bool = False
    fingerprints: dict[str, str] = field(default_factory=dict)
    other_state: list[str] = field(default_factory=list)
    """Names of the saved states of hooks, and of objects given to `session.include`."""


@click.command("inspect")
@json_option
@click.argument("target", metavar="RUN_DIR|CHECKPOINT|URL")
def command(as_json: bool, target: str) -> int:
    """Show the checkpoints of a run, and check every byte of them.

    TARGET is a run directory, one checkpoint, or the URL of a folder of checkpoints. For each
    checkpoint, the command shows the time of the save, the plan, any damage, and the fingerprint of
    the model, as in result.json.

    \b
    Examples:
      lockstep inspect runs/a
      lockstep inspect runs/a/checkpoints/step-00000500-1c9e02d4
      lockstep inspect --json s3://bucket/run

    Exit status: 0 if all are intact, 1 if one is damaged or cannot be read, 2 for a mistake (no
    checkpoint, no driver).
    """
    at = Target.find(target)
    with checkpoint_readable(target):
        checkpoints = inspect_all(at.storage, at.names)
    model = _final_model(at)
    elsewhere = None if at.elsewhere is None else without_password(at.elsewhere)
    if elsewhere is not None and model is None and not checkpoints:
        raise CheckpointError(f"{target} has no checkpoint to inspect: {at.none_there}")
    events = [] if at.run is None else list(_events(at.run))
    everything = [*checkpoints, *([model] if model else [])]
    if as_json:
        summary = {
            "target": target,
            "checkpoints": [asdict(each) for each in checkpoints],
            "model": model and asdict(model),
            "events": events,
            "elsewhere": elsewhere,
        }
        print_json(summary)
    else:
        _show(target, everything, events, elsewhere)
    return 0 if all(each.state == "intact" for each in everything) else 1


def inspect_all(storage: Storage, names: list[CheckpointName]) -> list[InspectedCheckpoint]:
    """Inspect checkpoints. Skip checkpoints that a running training deletes."""
    inspected = {name: _inspect(storage, name) for name in names}
    if any(each.state != "intact" for each in inspected.values()):
        left = storage.names()
        inspected = {name: each for name, each in inspected.items() if name in left}
    scores = {name: each.score for name, each in inspected.items() if each.state == "intact"}
    if (best := best_of(scores)) is not None:
        inspected[best].is_best = True
    return list(inspected.values())


def _inspect(storage: Storage, name: CheckpointName) -> InspectedCheckpoint:
    inspected = InspectedCheckpoint(str(name), name.step)
    try:
        stored = StoredCheckpoint(storage, name)
        metadata, files = stored.manifest.metadata, stored.manifest.files.values()
        inspected.saved, inspected.plan = metadata.get("saved"), metadata.get("plan")
        inspected.processes, inspected.score = metadata.get("world_size"), metadata.get("score")
        inspected.other_state = stored.other_state
        inspected.size_bytes = sum(file.hashes.size_bytes for file in files)
        inspected.size_bytes += storage.size(name, MANIFEST)
        if reasons := check(storage, name):
            inspected.state, inspected.reasons = "damaged", reasons
        else:
            models = {index: stored.model(index) for index in stored.modules}
            inspected.fingerprints = {
                str(each): fingerprint_of_saved(model) for each, model in models.items()
            }
    except UnreadableError as error:
        inspected.state, inspected.reasons = _STATES[type(error)], [str(error)]
    except OSError as error:
        inspected.state, inspected.reasons = "unreachable", [error.strerror or str(error)]
    return inspected


def _final_model(at: Target) -> InspectedCheckpoint | None:
    result = at.result()
    if at.run is None or result is None or "fingerprint" not in result:
        return None
    inspected = InspectedCheckpoint(
        MODEL, result.get("steps") or 0, plan=result.get("plan"), processes=result.get("world_size")
    )
    try:
        inspected.size_bytes = (at.run / MODEL).lstat().st_size
        inspected.fingerprints = {"0": fingerprint_of_saved(read_final_model(at.run))}
        if inspected.fingerprints["0"] != result["fingerprint"]:
            inspected.reasons = [
                f"its fingerprint differs from the one in result.json, {result['fingerprint']}"
            ]
    except (DamagedError, OSError) as error:
        inspected.reasons = [str(error)]
    if inspected.reasons:
        inspected.state = "damaged"
    return inspected


def _events(run: Path) -> Iterator[dict[str, Any]]:
    return read_rows(run, EVENTS, lambda row: row["event"] in _EVENT_WORDS, {})


def _show(
    target: str,
    found: list[InspectedCheckpoint],
    events: list[dict[str, Any]],
    elsewhere: str | None,
) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    console = foreign_text.console(140)

    def tell(text: str, style: str = "") -> None:
        console.print(Text(text, style=style))

    if not found:
        tell(f"{target}: no checkpoint yet")
    else:
        table = Table(
            title=f"{target}: every byte read",
            title_justify="left",
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
        )
        rows = list(map(_row, found))
        for column in list(rows[0]):
            if column == "score" and not any(each.score for each in found):
                for row in rows:
                    del row[column]
                continue
            table.add_column(
                column,
                justify="right" if column in ("step", "size") else "left",
                overflow="fold",
                no_wrap=column not in ("saved", "plan"),
            )
        for each, row in zip(found, rows, strict=True):
            table.add_row(*row.values(), style=None if each.state == "intact" else "red")
        console.print(table)
    if elsewhere is not None:
        tell(
            f"not read: the checkpoints in {elsewhere}, by run.json; give that URL to inspect them"
        )
    for each in found:
        for reason in each.reasons:
            tell(one_line(f"{each.name}: {reason}"), "red")
    if others := sorted({name for each in found for name in each.other_state}):
        tell(one_line(f"saved with the models: {', '.join(others)}"))
    for event in events:
        tell(one_line(_event_line(event)))
    if any(each.fingerprints for each in found):
        tell(f"fingerprints are truncated to {_DIGITS} digits; --json has all of them", "dim")


def _row(found: InspectedCheckpoint) -> dict[str, str]:
    plan, score = "", ""
    if found.plan is not None:
        plan = f"{found.plan.replace(',', ', ')}{_on_processes(found.processes)}"
    if found.score is not None:
        best = ", best" if found.is_best else ""
        score = f"{found.score['metric']} {found.score['value']:.5g}{best}"
    return {
        "step": str(found.step),
        "checkpoint": found.name,
        "saved": (found.saved or "").replace("T", " ")[:19],
        "size": size(found.size_bytes),
        "plan": plan,
        "score": score,
        "state": found.state,
        "fingerprint": "\n".join(digits[:_DIGITS] for digits in found.fingerprints.values()),
    }


def _on_processes(count: int | None) -> str:
    return "" if count is None else f" on {counted(count, 'process')}"


def _event_line(row: dict[str, Any]) -> str:
    name, checkpoint = row["event"], row.get("checkpoint")
    failed, reason = f" {checkpoint}: {row.get('reason')}", f": {row.get('reason')}"
    more = {
        "run-started": f" under {row.get('plan')}{_on_processes(row.get('world_size'))}",
        "resumed": f" from {checkpoint}",
        "weights-loaded": f": {row.get('path')}",
        "rescued": f" as {checkpoint}",
        "checkpoint-failed": failed,
        "checkpoint-damaged": failed,
        "preempted": reason,
        "stopped": reason,
        "run-failed": f": {row.get('error', '')}",
    }
    return f"step {row.get('step')}: {_EVENT_WORDS[name]}{more.get(name, '')}"
