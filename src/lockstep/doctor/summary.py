"""Turns the results of all ranks into the rows of the doctor's table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lockstep.base.words import counted, listed
from lockstep.doctor.check_result import CheckResult, Section, check_result, machine_names
from lockstep.doctor.expected_results import COLLECTIVES, OPERATIONS
from lockstep.doctor.machine_checks import (
    clock_check,
    shared_memory_differences,
    variable_differences,
    version_differences,
)
from lockstep.doctor.point_to_point import PairMeasurement, point_to_point_checks
from lockstep.launch.failures import Ending

_check = partial(check_result, "collectives")
_processes = partial(check_result, "rendezvous", "processes")
RENDEZVOUS_PROBES = 2
"""Probes that connect to the store and create the process group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    rank: int
    index: int
    """Number of the probe. All ranks run the same probes in the same order."""
    probe: str
    location: str | None = None
    """The line of code that the rank executes. None if the rank waits for other ranks."""
    error: str | None = None


def summarize(results: Mapping[str, Any], ending: Ending) -> list[CheckResult]:
    machines = results["machines"]
    names = machine_names(machines)
    checks = [
        CheckResult(**check | {"machine": name})
        for name, machine in zip(names, machines, strict=True)
        for check in machine["checks"]
    ]
    if len(names) > 1:
        info = [machine["info"] for machine in machines]
        checks += version_differences(names, [each["versions"] for each in info])
        checks += shared_memory_differences(names, info)
        checks += variable_differences(names, [each["variables"] for each in info])
        for name, (offset, error) in list(zip(names, results.get("clocks", ()), strict=False))[1:]:
            checks.append(clock_check(name, offset, error, names[0]))
        if "shared" in results:
            checks.append(_shared_directory(results, names))
    checks += _rendezvous(results, ending)
    checks += _collectives(results)
    if results.get("point_to_point"):
        measurements = [PairMeasurement(**each) for each in results["point_to_point"]]
        checks += point_to_point_checks(measurements, [names[each] for each in results["ranks"]])
    return checks


def _shared_directory(results: Mapping[str, Any], names: Sequence[str]) -> CheckResult:
    unseen = set(range(results["world_size"])) - set(results["shared"])
    missing = [names[number] for number in sorted({results["ranks"][rank] for rank in unseen})]
    text = "a file that one machine writes appears on all"
    if missing:
        text = f"a file that {names[0]} writes does not appear on {', '.join(missing)}"
    remedy = (
        "choose a run directory on a file system that all machines share, mounted at the same path"
    )
    return check_result("run directory", "shared", "failed" if missing else "ok", text, remedy)


def _rendezvous(results: Mapping[str, Any], ending: Ending) -> list[CheckResult]:
    size = results.get("world_size", 0)
    if results.get("statuses"):
        check = stalled_check([RankStatus(**each) for each in results["statuses"]], size)
        if ending.first is not None and ending.first.returncode < 0:
            remedy = "look in dmesg for an out-of-memory kill; the process's own output is above"
            check = replace(check, found=ending.first.line, remedy=remedy)
        return [check]
    if ending.signal is not None:
        return []
    if ending.first is not None:
        return [_processes("failed", ending.first.line, "read the process's own output above")]
    if ending.elsewhere:
        remedy = "start the same command on all machines, and check the network to that port"
        return [_processes("failed", ending.elsewhere.partition(";")[0], remedy)]
    if size == 1:
        text, remedy = "not run: a single process has no peers", "--nproc 2 checks them here"
        return [_check("all", "skipped", text, remedy)]
    return [_processes("ok", f"{size} on {results['backend']}, all finished")]


def stalled_check(statuses: Sequence[RankStatus], world_size: int) -> CheckResult:
    last = max(statuses, key=lambda status: status.index)
    failed = [status for status in statuses if status.error is not None]
    silent = sorted(set(range(world_size)) - {status.rank for status in statuses})
    blocking = []
    if silent:
        verb = "does" if len(silent) == 1 else "do"
        blocking.append(f"{listed('rank', silent)} {verb} not answer")
    running = [status for status in statuses if status.error is None]
    blocking += [f"rank {each.rank} is at {each.location}" for each in running if each.location]
    blocking += [
        f"rank {each.rank} is still in {each.probe}"
        for each in running
        if each.index < last.index and each.location is None
    ]
    if failed:
        first = min(failed, key=lambda status: (status.index, status.rank))
        check, text = first.probe, f"rank {first.rank} failed: {first.error}"
        remedy = (
            "fix the error above; if a connection failed, look at the interface check and at"
            " firewalls between the machines"
        )
    elif blocking:
        check, text = last.probe, f"timed out: {'; '.join(blocking)}"
        remedy = (
            "look at that process: it is stopped, swapping, or in a call that hangs; if it is on"
            " another machine, check the network to it"
        )
    else:
        check, text = last.probe, "timed out: all ranks entered it and wait"
        remedy = (
            "the network drops messages: look for firewalls between the machines, the MTU, a link"
            " that is down"
        )
    section: Section = "collectives" if last.index > RENDEZVOUS_PROBES else "rendezvous"
    return CheckResult(section, check, "failed", text, remedy)


def _collectives(results: Mapping[str, Any]) -> Iterator[CheckResult]:
    rows: list[dict[str, Any]] = results.get("checked", [])
    by_collective: dict[str, list[dict[str, Any]]] = {
        name: [row for row in rows if row["collective"] == name] for name in COLLECTIVES
    }
    for collective, own_rows in by_collective.items():
        if own_rows:
            yield _one_collective(collective, own_rows, results["world_size"])
    yield from _unsupported_checks(by_collective, results.get("backend", ""))
    missing = [collective for collective, own_rows in by_collective.items() if not own_rows]
    if rows and missing:
        remedy = "fix the failure that ended the checks"
        yield _check("the rest", "skipped", f"not run: {', '.join(missing)}", remedy)


def _one_collective(
    collective: str, rows: Sequence[Mapping[str, Any]], world_size: int
) -> CheckResult:
    wrong: list[tuple[Mapping[str, Any], str, str]] = [
        (row, rank, outcome.get("wrong") or f"raised, and others did not: {outcome['unsupported']}")
        for row in rows
        for rank, outcome in row["outcomes"].items()
        if "wrong" in outcome or len(row["outcomes"]) < world_size
    ]
    if wrong:
        row, rank, difference = wrong[0]
        group = f"in {row['group']}" if row["group"] != "all ranks" else None
        case = " ".join(filter(None, (row["operation"], row["type"], group)))
        cases = len({(each["operation"], each["type"], each["group"]) for each, _, _ in wrong})
        more = f"; wrong in {cases} of {len(rows)} cases" if cases > 1 else ""
        remedy = (
            "do not train here: results would be wrong. Look for code that wraps torch.distributed;"
            " try another version of torch or NCCL; check that rank's link and its device's memory"
            " (ECC)"
        )
        text = f"{case}{': ' if case else ''}rank {rank} {difference}{more}"
        return _check(collective, "failed", text, remedy)
    if collective == "barrier":
        return _check(collective, "ok", "no rank left before all had entered")
    unsupported = _unsupported_cases(rows)
    types = {row["type"] for row in rows if (row["type"], row["operation"]) not in unsupported}
    operations = [each for each in OPERATIONS if any(row["operation"] == each for row in rows)]
    text = f"correct in {counted(len(types), 'type')}"
    return _check(collective, "ok", "; ".join(filter(None, (text, " ".join(operations)))))


def _unsupported_cases(rows: Sequence[Mapping[str, Any]]) -> set[tuple[str, str | None]]:
    return {
        (row["type"], row["operation"])
        for row in rows
        if any("unsupported" in each for each in row["outcomes"].values())
    }


def _unsupported_checks(
    by_collective: Mapping[str, Sequence[Mapping[str, Any]]], backend: str
) -> Iterator[CheckResult]:
    types: dict[str, list[str]] = {}
    operations: dict[str, list[str]] = {}
    for collective, rows in by_collective.items():
        unsupported = _unsupported_cases(rows)
        for data_type in dict.fromkeys(row["type"] for row in rows):
            tried = [row["operation"] for row in rows if row["type"] == data_type]
            missing = [each for each in tried if (data_type, each) in unsupported]
            if missing and len(missing) == len(tried):
                types.setdefault(collective, []).append(data_type)
            elif missing:
                name = f"{', '.join(dict.fromkeys(missing))} of {data_type}"
                operations.setdefault(name, []).append(collective)
    collectives: dict[str, list[str]] = {}
    for collective, missing_types in types.items():
        collectives.setdefault(" ".join(missing_types), []).append(collective)
    remedy = "convert to another data type before the collective"
    for check, missing_in in (("types", collectives), ("operations", operations)):
        for what, names in missing_in.items():
            text = f"{backend} does not support {what} in {', '.join(names)}"
            yield _check(check, "skipped", text, remedy)
