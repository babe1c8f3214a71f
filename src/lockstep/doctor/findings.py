"""From what the ranks found to lines. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lockstep.doctor import environment, late, links, machine
from lockstep.doctor.definitions import COLLECTIVES, OPERATIONS
from lockstep.doctor.line import Line, Verdict, names_of_machines, on
from lockstep.launch.failures import Ending


def lines_of_results(results: Mapping[str, Any], ending: Ending) -> list[Line]:
    """All lines of an examination. `results`: as `lockstep.doctor.worker` writes them, with `machines` at least."""
    about = results["machines"]
    names = names_of_machines([(found["facts"]["host"], found["facts"]["address"]) for found in about])
    lines = [line for name, found in zip(names, about, strict=True) for line in on(name, [Line(**each) for each in found["lines"]])]
    if len(names) > 1:
        lines += machine.differences(names, [found["facts"]["versions"] for found in about])
        lines += environment.differences(names, [found["facts"]["variables"] for found in about])
        for name, (offset, error) in list(zip(names, results.get("clocks", ()), strict=False))[1:]:
            lines.append(machine.clock_line(name, offset, error, names[0]))
        lines += _shared(results, names)
    lines += _meeting(results, ending)
    lines += _collectives(results)
    if results.get("links"):
        lines += links.lines_of([links.Link(**each) for each in results["links"]], [names[place] for place in results["ranks"]])
    return lines


def _shared(results: Mapping[str, Any], names: Sequence[str]) -> Iterator[Line]:
    if "shared" not in results:
        return
    blind = sorted({results["ranks"][rank] for rank in set(range(results["world_size"])) - set(results["shared"])})
    if blind:
        found = f"what {names[0]} writes is not there on {', '.join(names[place] for place in blind)}"
        remedy = "a run directory on a file system that all machines share, under one path"
        yield Line(section="run directory", check="shared", verdict="wrong", found=found, remedy=remedy)
    else:
        yield Line(section="run directory", check="shared", verdict="ok", found="what one machine writes is there on all")


def _meeting(results: Mapping[str, Any], ending: Ending) -> list[Line]:
    """Whether the examination came to its end."""
    if results.get("notes"):
        line = late.line_of([late.Note.from_json(each) for each in results["notes"]], results["world_size"])
        if ending.first is not None and ending.first.returncode < 0:
            return [replace(line, found=ending.first.line, remedy="dmesg tells whether memory ran out; what it printed stands above")]
        return [line]
    if ending.signal is not None:
        return []
    if ending.first is not None:
        return [_failed(ending.first.line, "what it printed stands above")]
    if ending.elsewhere:
        return [_failed(ending.elsewhere.partition(";")[0], "start the same command on all machines, and look at the way to that port")]
    size = results.get("world_size", 0)
    if size == 1:
        text = "one process exchanges with nobody"
        return [Line(section="collectives", check="all", verdict="absent", found=text, remedy="--nproc 2, to check them all the same")]
    return [Line(section="meeting", check="processes", verdict="ok", found=f"{size}, on {results['backend']}, all to the end")]


def _failed(found: str, remedy: str) -> Line:
    return Line(section="meeting", check="processes", verdict="wrong", found=found, remedy=remedy)


def _collectives(results: Mapping[str, Any]) -> list[Line]:
    checked: list[dict[str, Any]] = results.get("checked", [])
    lines = []
    for collective in COLLECTIVES:
        rows = [row for row in checked if row["collective"] == collective]
        if rows:
            lines += _one(collective, rows, results["world_size"])
    lines += _backend(checked, results.get("backend", ""))
    missing = [collective for collective in COLLECTIVES if not any(row["collective"] == collective for row in checked)]
    if checked and missing:
        text = f"not tried any more: {', '.join(missing)}"
        lines.append(Line(section="collectives", check="the rest", verdict="absent", found=text, remedy="mend what ended the examination"))
    return lines


def _one(collective: str, rows: Sequence[Mapping[str, Any]], size: int) -> list[Line]:
    """What is said of one collective, over all groups, types and operations."""
    wrong: list[tuple[Mapping[str, Any], str, str]] = [
        (row, rank, outcome.get("wrong") or f"raised, and others did not: {outcome['absent']}")
        for row in rows
        for rank, outcome in row["outcomes"].items()
        if "wrong" in outcome or len(row["outcomes"]) < size
    ]
    if wrong:
        row, rank, what = wrong[0]
        where = f"in {row['group']}" if row["group"] != "all ranks" else None
        case = " ".join(filter(None, (row["operation"], row["type"], where)))
        cases = len({(each["operation"], each["type"], each["group"]) for each, _, _ in wrong})
        more = f"; wrong in {cases} of {len(rows)} cases" if cases > 1 else ""
        remedy = (
            "nothing trained here can be trusted: look for code that wraps torch.distributed; else another version of torch or NCCL, "
            "then the link and the memory (ECC) of that rank's device"
        )
        return [_say(collective, "wrong", f"{case}{': ' if case else ''}rank {rank} {what}{more}", remedy)]
    if collective == "barrier":
        return [_say(collective, "ok", "nobody left before all had come")]
    absent = _absent(rows)
    types = list(dict.fromkeys(row["type"] for row in rows if (row["type"], row["operation"]) not in absent))
    operations = [each for each in OPERATIONS if any(row["operation"] == each for row in rows)]
    found = f"right in {len(types)} type{'' if len(types) == 1 else 's'}"
    return [_say(collective, "ok", "; ".join(filter(None, (found, " ".join(operations)))))]


def _absent(rows: Sequence[Mapping[str, Any]]) -> set[tuple[str, str | None]]:
    """What the backend does not have, of a collective: types and operations."""
    return {(row["type"], row["operation"]) for row in rows if any("absent" in each for each in row["outcomes"].values())}


def _backend(checked: Sequence[Mapping[str, Any]], backend: str) -> Iterator[Line]:
    """A line for the types, and one for operations on other types, that the backend does not have."""
    types: dict[str, list[str]] = {}
    operations: dict[str, list[str]] = {}
    for collective in COLLECTIVES:
        rows = [row for row in checked if row["collective"] == collective]
        absent = _absent(rows)
        for kind in dict.fromkeys(row["type"] for row in rows):
            gone = [row["operation"] for row in rows if row["type"] == kind and (kind, row["operation"]) in absent]
            if gone and len(gone) == sum(row["type"] == kind for row in rows):
                types.setdefault(collective, []).append(kind)
            elif gone:
                operations.setdefault(f"{', '.join(dict.fromkeys(gone))} of {kind}", []).append(collective)
    remedy = "convert to another type for the exchange"
    for gone_types, where in _by_value(types).items():
        yield _say("types", "absent", f"{backend} has no {' '.join(gone_types)} in {', '.join(where)}", remedy)
    for what, where in operations.items():
        yield _say("operations", "absent", f"{backend} has no {what} in {', '.join(where)}", remedy)


def _by_value(found: Mapping[str, Sequence[str]]) -> dict[tuple[str, ...], list[str]]:
    turned: dict[tuple[str, ...], list[str]] = {}
    for key, values in found.items():
        turned.setdefault(tuple(values), []).append(key)
    return turned


def _say(check: str, verdict: Verdict, found: str, remedy: str = "") -> Line:
    return Line(section="collectives", check=check, verdict=verdict, found=found, remedy=remedy)
