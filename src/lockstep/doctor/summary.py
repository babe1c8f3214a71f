"""Turn the results of all ranks into check results. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lockstep.doctor.check_result import CheckResult, Verdict, machine_names, with_machine
from lockstep.doctor.environment_variables import variable_differences
from lockstep.doctor.expected_results import COLLECTIVES, OPERATIONS
from lockstep.doctor.machine_checks import clock_check, version_differences
from lockstep.doctor.point_to_point import PairMeasurement, point_to_point_checks
from lockstep.doctor.stalled_probe import RankStatus, stalled_check
from lockstep.launch.failures import Ending


def summarize(results: Mapping[str, Any], ending: Ending) -> list[CheckResult]:
    """Return all check results. `results`: those that `lockstep.doctor.worker` writes, with `machines` at least."""
    machines = results["machines"]
    names = machine_names([(machine["info"]["host"], machine["info"]["address"]) for machine in machines])
    checks: list[CheckResult] = []
    for name, machine in zip(names, machines, strict=True):
        checks += with_machine(name, [CheckResult(**check) for check in machine["checks"]])
    if len(names) > 1:
        checks += version_differences(names, [machine["info"]["versions"] for machine in machines])
        checks += variable_differences(names, [machine["info"]["variables"] for machine in machines])
        for name, (offset, error) in list(zip(names, results.get("clocks", ()), strict=False))[1:]:
            checks.append(clock_check(name, offset, error, names[0]))
        checks += _shared_directory(results, names)
    checks += _rendezvous(results, ending)
    checks += _collectives(results)
    if results.get("point_to_point"):
        measurements = [PairMeasurement(**each) for each in results["point_to_point"]]
        checks += point_to_point_checks(measurements, [names[number] for number in results["ranks"]])
    return checks


def _shared_directory(results: Mapping[str, Any], names: Sequence[str]) -> Iterator[CheckResult]:
    if "shared" not in results:
        return
    missing = sorted({results["ranks"][rank] for rank in set(range(results["world_size"])) - set(results["shared"])})
    if missing:
        found = f"a file that {names[0]} writes does not appear on {', '.join(names[number] for number in missing)}"
        remedy = "choose a run directory on a file system that all machines share, mounted at the same path"
        yield CheckResult(section="run directory", check="shared", verdict="failed", found=found, remedy=remedy)
    else:
        yield CheckResult(section="run directory", check="shared", verdict="ok", found="a file that one machine writes appears on all")


def _rendezvous(results: Mapping[str, Any], ending: Ending) -> list[CheckResult]:
    """Return how the processes ended: the reason if they ended early."""
    if results.get("statuses"):
        check = stalled_check([RankStatus(**each) for each in results["statuses"]], results["world_size"])
        if ending.first is not None and ending.first.returncode < 0:
            remedy = "look in dmesg for an out-of-memory kill; the process's own output is above"
            return [replace(check, found=ending.first.line, remedy=remedy)]
        return [check]
    if ending.signal is not None:
        return []
    if ending.first is not None:
        return [_failed(ending.first.line, "read the process's own output above")]
    if ending.elsewhere:
        return [_failed(ending.elsewhere.partition(";")[0], "start the same command on all machines, and check the network to that port")]
    size = results.get("world_size", 0)
    if size == 1:
        found = "not run: a single process has no peers"
        return [
            CheckResult(section="collectives", check="all", verdict="skipped", found=found, remedy="--nproc 2 checks them on this machine")
        ]
    found = f"{size} on {results['backend']}, all finished"
    return [CheckResult(section="rendezvous", check="processes", verdict="ok", found=found)]


def _failed(found: str, remedy: str) -> CheckResult:
    return CheckResult(section="rendezvous", check="processes", verdict="failed", found=found, remedy=remedy)


def _collectives(results: Mapping[str, Any]) -> list[CheckResult]:
    rows: list[dict[str, Any]] = results.get("checked", [])
    by_collective: dict[str, list[dict[str, Any]]] = {name: [row for row in rows if row["collective"] == name] for name in COLLECTIVES}
    checks: list[CheckResult] = []
    for collective, own_rows in by_collective.items():
        if own_rows:
            checks += _one_collective(collective, own_rows, results["world_size"])
    checks += _unsupported_checks(by_collective, results.get("backend", ""))
    missing = [collective for collective, own_rows in by_collective.items() if not own_rows]
    if rows and missing:
        checks.append(_check("the rest", "skipped", f"not run: {', '.join(missing)}", "fix the failure that ended the checks"))
    return checks


def _one_collective(collective: str, rows: Sequence[Mapping[str, Any]], world_size: int) -> list[CheckResult]:
    """Return the result of one collective over all its cases. Empty if no case is supported."""
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
            "do not train here: results would be wrong. Look for code that wraps torch.distributed; try another version of torch or NCCL; "
            "check that rank's link and its device's memory (ECC)"
        )
        return [_check(collective, "failed", f"{case}{': ' if case else ''}rank {rank} {difference}{more}", remedy)]
    if collective == "barrier":
        return [_check(collective, "ok", "no rank left before all had entered")]
    unsupported = _unsupported_cases(rows)
    types = list(dict.fromkeys(row["type"] for row in rows if (row["type"], row["operation"]) not in unsupported))
    operations = [each for each in OPERATIONS if any(row["operation"] == each for row in rows)]
    found = f"correct in {len(types)} type{'' if len(types) == 1 else 's'}"
    return [_check(collective, "ok", "; ".join(filter(None, (found, " ".join(operations)))))]


def _unsupported_cases(rows: Sequence[Mapping[str, Any]]) -> set[tuple[str, str | None]]:
    """Return the (data type, operation) pairs of one collective that the backend does not support."""
    return {(row["type"], row["operation"]) for row in rows if any("unsupported" in each for each in row["outcomes"].values())}


def _unsupported_checks(by_collective: Mapping[str, Sequence[Mapping[str, Any]]], backend: str) -> Iterator[CheckResult]:
    """Yield a result for unsupported data types, and one for unsupported operations on supported types."""
    types: dict[str, list[str]] = {}
    operations: dict[str, list[str]] = {}
    for collective, rows in by_collective.items():
        unsupported = _unsupported_cases(rows)
        for data_type in dict.fromkeys(row["type"] for row in rows):
            missing = [row["operation"] for row in rows if row["type"] == data_type and (data_type, row["operation"]) in unsupported]
            if missing and len(missing) == sum(row["type"] == data_type for row in rows):
                types.setdefault(collective, []).append(data_type)
            elif missing:
                operations.setdefault(f"{', '.join(dict.fromkeys(missing))} of {data_type}", []).append(collective)
    remedy = "convert to another data type before the collective"
    for missing_types, collectives in _group_by_value(types).items():
        yield _check("types", "skipped", f"{backend} does not support {' '.join(missing_types)} in {', '.join(collectives)}", remedy)
    for operation, collectives in operations.items():
        yield _check("operations", "skipped", f"{backend} does not support {operation} in {', '.join(collectives)}", remedy)


def _group_by_value(lists: Mapping[str, Sequence[str]]) -> dict[tuple[str, ...], list[str]]:
    keys: dict[tuple[str, ...], list[str]] = {}
    for key, values in lists.items():
        keys.setdefault(tuple(values), []).append(key)
    return keys


def _check(check: str, verdict: Verdict, found: str, remedy: str = "") -> CheckResult:
    return CheckResult(section="collectives", check=check, verdict=verdict, found=found, remedy=remedy)
