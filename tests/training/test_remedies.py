"""What errors recommend works: each mistake is refused in these words, and the same script with
what they recommend trains on, in the same run directory, to one model on one and on two
processes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from training.remedies import (
    ELSEWHERE,
    HANDED_ON,
    PLACES,
    RIGHT_VALUES,
    SECTIONS as OTHERS,
    UNTRIED,
    Remedy,
    Training,
)
from training.sequence_remedies import DOCUMENTS, HUGGING_FACE, SEQUENCES

import lockstep
from lockstep.base.errors import UserError
from lockstep.testing.pool import WorkerPool

SECTIONS = {
    **OTHERS,
    "sequences": SEQUENCES,
    "documents": DOCUMENTS,
    "sequences of transformers": HUGGING_FACE,
}
Outcome = tuple[str, str, float]
"""What is said about the mistake; the fingerprint and the loss of the training with the remedy."""
KINDS = {"RecipeError", "PlanError", "LossError", "CheckpointError", "DataError"}
SLOW = ("sequences of transformers",)
"""Sections that import transformers in each worker."""
GROUPS = [
    pytest.param(section, plan, marks=[pytest.mark.slow] if section in SLOW else [])
    for section, plan in sorted(
        {(section, case.plan) for section, cases in SECTIONS.items() for case in cases}
    )
]


def cases_of(section: str, plan: str) -> list[Remedy]:
    return [case for case in SECTIONS[section] if case.plan == plan]


def follow(folder: str, axes: str, section: str, plan_of_two: str) -> list[Outcome]:
    """Mistakes of one remedy are made one after another in its run directory."""
    cases = cases_of(section, plan_of_two)
    said: list[str] = []
    trained: dict[str, tuple[str, float]] = {}
    for place, case in enumerate(cases):
        run, plan = followed(folder, axes, cases, case)
        apart = case.by_one_rank or bool(case.allow)
        run = f"{run}-mistake-{place}" if apart else run
        said.append(refused(case.mistake, run, plan) if asks(case, axes) else "")
        if said[-1] and apart:
            case.remedy(run, plan, case.allow)
    for case in cases:
        run, plan = followed(folder, axes, cases, case)
        if run not in trained:
            trained[run] = case.remedy(run, plan, case.allow)
    runs = (followed(folder, axes, cases, case)[0] for case in cases)
    return [(words, *trained[run]) for words, run in zip(said, runs, strict=True)]


def followed(folder: str, axes: str, cases: list[Remedy], case: Remedy) -> tuple[str, str]:
    """The run directory and the plan of a remedy."""
    plan = f"{axes},numerics=bitwise" if case.bitwise else axes
    return f"{folder}/{[each.remedy for each in cases].index(case.remedy)}-{plan}", plan


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
def test_what_an_error_recommends_trains_one_model(
    pool: WorkerPool, tmp_path: Path, section: str, plan: str
) -> None:
    (alone,) = pool.run(1, follow, str(tmp_path / "alone"), "replicate=1", section, plan)
    found = pool.run(2, follow, str(tmp_path / "run"), plan, section, plan, timeout_seconds=50)
    wrong = [
        line
        for case, one, *ranks in zip(cases_of(section, plan), alone, *found, strict=True)
        for line in complaints(case, one, ranks)
    ]
    assert not wrong, "\n".join(wrong)


def complaints(case: Remedy, alone: Outcome, found: list[Outcome]) -> list[str]:
    wrong = []
    for axes, (said, fingerprint, loss) in [
        ("replicate=1", alone),
        *((case.plan, each) for each in found),
    ]:
        if asks(case, axes) and case.says not in said:
            wrong.append(f"{axes}: {said!r} does not say {case.says!r}")
        if fingerprint != alone[1] if case.bitwise else loss != pytest.approx(alone[2], rel=1e-4):
            wrong.append(f"{case.says!r}, {axes}: {fingerprint}, {loss} for {alone[1]}, {alone[2]}")
    return wrong


def test_each_remedy_of_the_plan_the_recipe_and_the_step_is_followed_somewhere() -> None:
    listed = [*ELSEWHERE, *RIGHT_VALUES, *HANDED_ON, *UNTRIED]
    words = [*(case.says for cases in SECTIONS.values() for case in cases), *listed]
    errors = dict(user_errors())
    assert [
        place for place, text in errors.items() if not any(each in text for each in words)
    ] == []
    assert [each for each in listed if not any(each in text for text in errors.values())] == []
    for test in ELSEWHERE.values():
        path, _, name = test.partition("::")
        assert f"def {name}" in Path(__file__).parents[1].joinpath(path).read_text(), test


def user_errors() -> Iterator[tuple[str, str]]:
    """Yield the place of each error of the user's kind that the files of `PLACES` make, and its
    text as it stands in the source, with the constants that are in it."""
    package = Path(lockstep.__file__).parent
    trees = {
        path.relative_to(package): ast.parse(path.read_text())
        for path in sorted(package.rglob("*.py"))
    }

    def assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
        for node in tree.body:
            for target in node.targets if isinstance(node, ast.Assign) else ():
                if isinstance(target, ast.Name):
                    yield target.id, node.value

    everywhere = dict(chain.from_iterable(map(assigned, trees.values())))
    constants = everywhere

    def text(node: ast.AST) -> str:
        match node:
            case ast.Constant(value=str(value)):
                return value
            case ast.Name(id=name) if name in constants:
                return text(constants[name])
            case ast.JoinedStr(values=parts):
                return "".join(map(text, parts))
            case ast.FormattedValue(value=inner):
                return text(inner)
            case ast.BinOp(left=left, right=right):
                return text(left) + text(right)
        return f"{{{ast.unparse(node)}}}"

    for path, tree in trees.items():
        if any(path.match(place) and len(path.parts) == place.count("/") + 1 for place in PLACES):
            constants = {**everywhere, **dict(assigned(tree))}
            for node in ast.walk(tree):
                match node:
                    case ast.Call(func=ast.Name(id=kind), args=[said, *_]) if kind in KINDS:
                        yield f"{path}:{node.lineno}", text(said)
