"""lockstep's own commands on this device."""

from __future__ import annotations

import json
import re

from results import CPU, HERE, PROJECT, events, folder, lockstep, report, run, seconds_left

SHARED = {} if CPU else {"LOCKSTEP_SHARE_DEVICES": "1"}


def example() -> None:
    """examples/gpt.py as it is, twice."""
    where = folder("example")
    prints = []
    for turn in ("first", "second"):
        given = [
            str(PROJECT / "examples" / "gpt.py"),
            "--steps",
            "10",
            "--dropout",
            "0.1",
            "--global-batch",
            "16",
        ]
        plan = ["--plan", "numerics=bitwise", "--run-dir", str(where / turn)]
        _, text, _ = run(1, *plan, *given, "--microbatch", "4", "--sample", "20")
        found = re.search(r"fingerprint\s+(\w+)", text)
        prints.append(found and found[1])
    same = None if None in prints else len(set(prints)) == 1
    short = {None: "not finished", True: "same", False: "DIFFERENT"}[same]
    report("examples/gpt.py twice, bitwise", ok=bool(same), fingerprints=prints, short=short)


def verify() -> None:
    plans = ["replicate=2,numerics=bitwise", "shard=2"]
    given = [
        "--steps",
        "2",
        "--no-float64",
        "--jobs",
        "4",
        "--json",
        str(HERE / "small.py"),
        "--plans",
        *plans,
    ]
    status, text, _ = lockstep("verify", *given, **SHARED)
    try:
        said = json.loads(text[text.index("{") :])
        verdicts = [
            {name: value for name, value in row.items() if not isinstance(value, list | dict)}
            for row in said["plans"]
        ]
        report("lockstep verify", ok=status == 0, status=status, verdicts=verdicts)
    except (ValueError, KeyError):
        report("lockstep verify", ok=False, status=status, error=text[-800:])


def doctor() -> None:
    """Status 1 is information: ranks that share a device talk through sockets, which is slow."""
    status, text, _ = lockstep(
        "doctor", "--nproc", "2", "--run-dir", str(folder("doctor")), **SHARED
    )
    bad = [
        line.strip()[:160] for line in text.splitlines() if re.search(r"\b(failed|wrong)\b", line)
    ]
    report(
        "lockstep doctor",
        ok=None if status == 1 else status == 0,
        status=status,
        bad=bad[:12],
        short=f"status {status}",
    )


def here() -> None:
    """`lockstep plan` for this machine's accelerators; without any it names others."""
    for on, plan in (("1 x this", "replicate=1"), ("this", "replicate=auto")):
        limit = 0.6 * seconds_left()
        if limit < 10:
            return
        given = ["--on", on, str(HERE / "small.py"), "--plans", plan]
        status, text, _ = lockstep("plan", *given, seconds=limit)
        ok = status == 2 and '--on "1 x' in text if CPU else status == 0 and "plans fit" in text
        report(
            f"lockstep plan --on {on!r}",
            ok=ok,
            status=status,
            says=text[-900:],
            short=f"status {status}",
        )


def oom() -> None:
    """Memory is short from step 3 on: the run goes on under another plan."""
    where = folder("oom")
    status, _, _ = run(1, "--max-restarts", "3", str(HERE / "oom.py"), GPU_CHECK_OOM=str(where))
    seen = events(where / "run")
    changed = any(each.startswith("plan-changed") for each in seen)
    short = (
        "not tried without a GPU"
        if CPU
        else "the plan was changed"
        if changed
        else "the plan was NOT changed"
    )
    report(
        "out of memory",
        ok=status == 0 and (CPU or changed),
        status=status,
        events=seen,
        short=short,
    )
