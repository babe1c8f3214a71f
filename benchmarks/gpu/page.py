"""Puts the figures of a GPU into a page, between its markers: `python page.py FIGURES.jsonl
docs/performance.md`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- benchmarks/gpu begins -->", "<!-- benchmarks/gpu ends -->"
SIDES = {"hand": "the loop by hand", "lockstep": "`ls.train`"}
PLANS = {
    "eager": "replicate=1",
    "compile": "replicate=1,compile=yes",
    "bitwise": "replicate=1,numerics=bitwise",
}

Row = dict[str, Any]


def table(found: dict[str, Row]) -> list[str]:
    """Return the lines of a table: speed, memory, and what `lockstep plan` predicted, if it knows
    this device."""
    plan = found.get("lockstep plan", {})
    of_this = plan.get("device", "").partition("-")[0] in found["gpu"]["name"].split()
    plans = {each["plan"]: each for each in plan["plans"]} if of_this else {}
    heads = [
        "",
        "ms a step",
        "tokens/s",
        "MFU",
        "GB allocated",
        "GB reserved",
        *(["predicted: ms", "GB"] if plans else []),
    ]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for mode, setting in PLANS.items():
        for side, name in SIDES.items():
            if (row := found.get(f"{side} {mode}")) is None:
                continue
            cells = [
                f"{name}, {mode}",
                f"{row['step_seconds'] * 1e3:.1f}",
                f"{row['tokens_per_second']:,}",
                f"{row['mfu']:.1%}",
            ]
            cells += [f"{row['peak_gb']:.1f}", f"{row['reserved_gb']:.1f}"]
            if side == "lockstep" and (predicted := plans.get(setting)):
                gb = (predicted["needed_bytes"] - predicted["overhead_bytes"]) / 1e9
                cells += [f"{predicted['seconds'] * 1e3:.0f}", f"{gb:.1f}"]
            cells += [""] * (len(heads) - len(cells))
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def section(rows: list[Row]) -> str:
    """Return the text between the markers, from the lines of a file of figures."""
    # the first of each name
    found = {each["what"]: each for row in reversed(rows) for each in row.get("found", [])}
    began = next(row for row in rows if "started" in row)
    parameters = found["lockstep eager"]["parameters"] / 1e6
    place = f"one {found['gpu']['name']}, torch {began['torch']}, {began['started'][:10]}"
    intro = f"A GPT of {parameters:.0f} million parameters in bf16, on {place}:"
    parts = [intro, "", *table(found)]
    if waits := {name: row["short"] for name, row in found.items() if "waits" in row}:
        parts += ["", "| waits of the host in a step | |", "|---|---|"]
        parts += [f"| {name.partition(': ')[2]} | {short} |" for name, short in waits.items()]
    if stall := found.get("checkpoint stall"):
        size, stopped = stall["bytes"] / 1e9, stall["stopped_seconds"][-1]
        parts += ["", f"A checkpoint of {size:.1f} GB stops training for {stopped:.2f} s:"]
        parts += [f"{stall['ratio']} times as long as a copy of these bytes over PCIe takes."]
    return "\n".join([BEGIN, *parts, END])


def main() -> None:
    figures, page = map(Path, sys.argv[1:])
    rows = [json.loads(line) for line in figures.read_text(encoding="utf-8").splitlines()]
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{page} has no lines {BEGIN} and {END}")
    page.write_text(before + section(rows) + after, encoding="utf-8")


if __name__ == "__main__":
    main()
