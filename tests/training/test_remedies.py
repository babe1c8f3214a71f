"""What errors recommend works: each mistake is refused in these words, and the same script with what they recommend
trains on, in the same run directory, to one model on one and on two processes."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from training.remedies import REMEDIES, SECTIONS, Remedy, Training

from lockstep.base.errors import UserError
from lockstep.testing.pool import WorkerPool

Outcome = tuple[str, str, float]
"""What is said about the mistake; the fingerprint and the loss of the training with the remedy."""
GROUPS = sorted({(section, case.plan) for section, cases in SECTIONS.items() for case in cases.values()})


def follow(folder: str, axes: str, names: list[str]) -> dict[str, Outcome]:
    found = {}
    for place, name in enumerate(names):
        case, run = REMEDIES[name], f"{folder}/{place}"
        plan = f"{axes},numerics=bitwise" if case.bitwise else axes
        said = refused(case.mistake, run, plan) if asks(case, axes) else ""
        if said and (case.by_one_rank or case.allow):
            case.remedy(run, plan, case.allow)
            run += "-anew"
        found[name] = (said, *case.remedy(run, plan, case.allow))
        gc.collect()  # nothing is left of a session that an error has ended
    return found


def asks(case: Remedy, axes: str) -> bool:
    """False where the mistake is none, or where one rank finds it while others wait."""
    return case.alone if axes == "replicate=1" else not case.by_one_rank


def refused(train: Training, folder: str, plan: str) -> str:
    try:
        train(folder, plan)
    except UserError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize(("section", "plan"), GROUPS)
def test_what_an_error_recommends_trains_one_model(pool: WorkerPool, tmp_path: Path, section: str, plan: str) -> None:
    names = [name for name, case in SECTIONS[section].items() if case.plan == plan]
    (alone,) = pool.run(1, follow, str(tmp_path / "alone"), "replicate=1", names)
    found = pool.run(2, follow, str(tmp_path / "run"), plan, names, timeout_seconds=50)
    wrong = [line for name in names for line in complaints(name, plan, alone[name], [each[name] for each in found])]
    assert not wrong, "\n".join(wrong)


def complaints(name: str, plan: str, alone: Outcome, found: list[Outcome]) -> list[str]:
    case, wrong = REMEDIES[name], []
    for axes, (said, fingerprint, loss) in [("replicate=1", alone), *((plan, each) for each in found)]:
        if asks(case, axes) and case.says not in said:
            wrong.append(f"{name}, {axes}: {said!r} does not say {case.says!r}")
        if fingerprint != alone[1] if case.bitwise else loss != pytest.approx(alone[2], rel=1e-4):
            wrong.append(f"{name}, {axes}: {fingerprint}, {loss} for {alone[1]}, {alone[2]}")
    return wrong
