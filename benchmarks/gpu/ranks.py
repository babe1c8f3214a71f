"""One fingerprint on every number of ranks, and after faults."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from results import CPU, HERE, Row, command, events, folder, report, rows_of, run, seconds_left

BITS = str(HERE / "bits.py")
ONE = [
    *["numerics=bitwise", "numerics=bitwise", "numerics=bitwise@bf16", "numerics=bitwise@bf16"],
    *["replicate=1", "replicate=1", "replicate=1@bf16", "replicate=1@bf16"],
    *[
        "numerics=bitwise@microbatch=8",
        "numerics=bitwise@microbatch=2",
        "numerics=bitwise,checkpointing=full@bf16",
    ],
]


def expected_file() -> Path:
    return Path(os.environ["GPU_CHECK_FOLDER"]) / "expected.json"


def expected() -> dict[str, str]:
    """Return the fingerprints of one process, which the check `bits` may still be computing."""
    deadline = time.monotonic() + max(0.0, min(40.0, seconds_left() - 5))
    while not expected_file().exists() and time.monotonic() < deadline:
        time.sleep(1)
    return json.loads(expected_file().read_text()) if expected_file().exists() else {}


def fingerprints(found: list[Row], *names: str) -> list[str]:
    return [
        row["fingerprint"]
        for name in names
        for row in found
        if row["what"] == name and "fingerprint" in row
    ]


def same(what: str, found: list[Row], *names: str, least: int = 2) -> None:
    prints = fingerprints(found, *names)
    ok = len(prints) >= least and len(set(prints)) == 1
    report(what, ok=ok, fingerprints=prints, short="same" if ok else "DIFFERENT")


def bits() -> None:
    """One process: twice the same; in a new process the same; other microbatches round
    otherwise."""
    status, _, found = command(sys.executable, BITS, *ONE, "--folder", str(folder("bits")))
    report("runs of one process", ok=status == 0, status=status)
    for name in ("numerics=bitwise", "numerics=bitwise@bf16"):
        same(f"twice {name}", found, name)
    same("with and without checkpointing=full", found, "numerics=bitwise@bf16", ONE[-1], least=3)
    for name in ("replicate=1", "replicate=1@bf16"):
        prints = set(fingerprints(found, name))
        report(
            f"twice {name}: may differ",
            same=len(prints) == 1,
            short="same bits" if len(prints) == 1 else "other bits",
        )
    losses = {row["what"]: row["loss"] for row in found if "loss" in row}
    one = losses.get("numerics=bitwise")
    off = {
        name: abs(loss - one) / abs(one)
        for name, loss in losses.items()
        if one and "bf16" not in name
    }
    report("losses of other microbatches", ok=max(off.values(), default=1.0) < 1e-3, relative=off)
    expected_file().write_text(
        json.dumps({row["what"]: row["fingerprint"] for row in found if "fingerprint" in row})
    )
    again = ["numerics=bitwise@bf16", "numerics=bitwise"]
    _, _, more = command(sys.executable, BITS, *again, "--folder", str(folder("bits-again")))
    for name in again:
        same(f"a new process, other order: {name}", [*found, *more], name, least=3)


def ranks(label: str, nproc: int, plans: list[str], **environment: str) -> None:
    """Train under each plan on `nproc` ranks. The bitwise ones must have the bits of one
    process."""
    status, _, found = run(nproc, BITS, *plans, "--folder", str(folder(label)), **environment)
    done = sum("fingerprint" in row for row in found)
    report(
        f"{label}: {nproc} ranks",
        ok=status == 0 and done == len(plans),
        status=status,
        done=done,
        of=len(plans),
    )
    one = expected()
    for row in found:
        if "fingerprint" in row and "bitwise" in row["what"]:
            name = "@".join(["numerics=bitwise", *row["what"].split("@")[1:]])
            ok = None if name not in one else one[name] == row["fingerprint"]
            short = {None: "nothing to compare with", True: "same", False: "DIFFERENT"}[ok]
            report(
                f"{label}: {row['what']} as one process",
                ok=ok,
                one=one.get(name),
                found=row["fingerprint"],
                short=short,
            )


def nccl2() -> None:
    bitwise = ["replicate=2,numerics=bitwise", "shard=2,numerics=bitwise"]
    fast = [
        "replicate=2@bf16",
        "shard=2@bf16",
        "tensor=2",
        *([] if CPU else ["shard=2,offload=yes"]),
    ]
    ranks("nccl2", 2, [*bitwise, *fast, *(f"{plan}@bf16" for plan in bitwise)])


def nccl4() -> None:
    plans = ["replicate=2,shard=2,numerics=bitwise", "replicate=2,shard=2@bf16", "shard=2,tensor=2"]
    ranks("nccl4", 4, plans)


def pipelines() -> None:
    ranks("pipelines", 2, ["pipeline=2", "pipeline=2,schedule=zero-bubble", "pipeline=2@bf16"])


def gloo2() -> None:
    """Gloo carries a GPU's tensors for replicate alone: other plans are refused. On a CPU they
    train."""
    gloo = {"LOCKSTEP_BACKEND": "gloo"}
    ranks("gloo2", 2, ["replicate=2,numerics=bitwise", "replicate=2", "replicate=2@bf16"], **gloo)
    expects_an_error = ["--raise", "99,0"]
    status, _, found = run(
        2, BITS, "shard=2", "--folder", str(folder("gloo2-shard")), *expects_an_error, **gloo
    )
    done = sum("fingerprint" in row for row in found)
    report(
        "gloo2: shard=2", ok=(status, done) == ((0, 1) if CPU else (2, 0)), status=status, done=done
    )


def kill() -> None:
    """Killed after step 5, resumed from the checkpoint after step 4: the bits of a run that is not
    killed."""
    where = folder("kill")
    given = [
        sys.executable,
        BITS,
        "numerics=bitwise",
        "--folder",
        str(where),
        "--kill",
        "5,0",
        "--save-every",
        "2",
    ]
    first, _, _ = command(*given)
    report("killed", ok=first == -9, status=first)
    second, _, found = command(*given, "numerics=bitwise@steps=8")
    report("resumed", ok=second == 0, status=second)
    same(
        "killed and resumed, and not killed", found, "numerics=bitwise", "numerics=bitwise@steps=8"
    )
    saves = [
        row["stopped_seconds"]
        for row in rows_of(where / "run-0" / "events.jsonl")
        if row["event"] == "checkpoint-saved"
    ]
    report("events", events=events(where / "run-0"), stopped_seconds=saves)


def peer() -> None:
    """Rank 1 of two is killed after step 5: from which step does the run go on, and with which
    bits?"""
    for numerics in ("bitwise", "fast"):
        plan = f"replicate=2,numerics={numerics}"
        where = folder(f"peer-{numerics}")
        given = [BITS, plan, "--folder", str(where)]
        status, _, found = run(2, "--max-restarts", "1", *given, "--kill", "5,1")
        mark = where / "killed"
        after = round(time.time() - float(mark.read_text()), 1) if mark.exists() else None
        seen = events(where / "run-0")
        resumed = next((each.partition("@")[2] for each in seen if each.startswith("resumed")), "0")
        short = f"resumed after step {resumed}, ended {after} s after the kill"
        report(
            f"a peer is killed, {numerics}",
            ok=status == 0,
            status=status,
            seconds=after,
            events=seen,
            short=short,
        )
        row = next((each for each in found if "fingerprint" in each), None)
        if numerics == "bitwise":
            one = expected().get("numerics=bitwise")
            ok = None if row is None or one is None else row["fingerprint"] == one
            report(
                "a peer is killed, bitwise: the bits",
                ok=ok,
                one=one,
                found=row and row["fingerprint"],
            )
        elif row is not None:
            _, _, whole = run(2, BITS, plan, "--folder", str(folder("peer-whole")))
            losses = [each["loss"] for each in [row, *whole] if "loss" in each]
            ok = len(losses) == 2 and abs(losses[0] - losses[1]) <= 1e-3 * abs(losses[0])
            report("a peer is killed, fast: the loss", ok=ok, losses=losses)
        if seconds_left() < 50:
            return


def raises() -> None:
    """Rank 1 of two raises before step 5: how soon has the run ended, and with which error?"""
    where = folder("raises")
    began = time.monotonic()
    given = [BITS, "replicate=2,numerics=bitwise", "--folder", str(where), "--raise", "5,1"]
    status, text, _ = run(2, "--hang-after", "40s", *given)
    seconds = round(time.monotonic() - began, 1)
    named = "raised on purpose" in text
    report(
        "an error on one rank ends the run",
        ok=status not in (0, "time limit") and named and seconds < 40,
        status=status,
        named=named,
        events=events(where / "run-0"),
        short=f"ended after {seconds} s with status {status}",
    )


def hang() -> None:
    """Rank 1 of two sleeps before step 5: is it named, and rank 0 seen to wait for it?"""
    where = folder("hang")
    given = [BITS, "replicate=2,numerics=bitwise", "--folder", str(where), "--sleep", "5,1"]
    status, _, _ = run(2, "--hang-after", "6s", *given)
    hangs = [row for row in rows_of(where / "run-0" / "events.jsonl") if row["event"] == "hang"]
    found = hangs[0] if hangs else {}
    report(
        "a hang is reported, and its rank named",
        ok=status == 76 and found.get("ranks") == [1],
        status=status,
        ranks=found.get("ranks"),
        summary=found.get("summary"),
        seconds=found.get("seconds"),
        short=str(found.get("summary")),
    )
