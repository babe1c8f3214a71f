"""`lockstep inspect` and `lockstep export`: what a run has saved, whether it is right, and the
model in it for anyone's code."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import run_files
import torch
from cli.saved import ended, scored, two
from forked import lockstep
from processes import ran
from safetensors.torch import load_file
from tiers import tiered
from training.kept import PLANS, STEPS, run
from training.started import started

import lockstep as ls
from lockstep.base.errors import CheckpointError
from lockstep.checkpoint.manifest import Manifest, _hash
from lockstep.checkpoint.storage import MANIFEST, CheckpointName, FolderStorage
from lockstep.cli.inspect import inspect_all
from lockstep.cli.target import Target
from lockstep.testing.pool import WorkerPool


def inspected(target: Any, status: int = 0) -> dict[str, Any]:
    found = lockstep("inspect", "--json", target)
    assert found.returncode == status, found.stderr
    said: dict[str, Any] = json.loads(found.stdout)
    return said


@pytest.fixture(scope="module")
def whole(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "run"
    pool.run(2, ended, "shard=2", str(path))
    return path


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    """A run that one may damage: its one checkpoint is of its last step."""
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


def checkpoint_in(path: Path) -> Path:
    (found,) = (path / "checkpoints").iterdir()
    return found


@pytest.mark.parametrize("plan", tiered(PLANS, always=["shard=2"], most=0))
def test_the_fingerprint_of_a_checkpoint_is_the_one_of_the_model_under_every_plan(
    pool: WorkerPool, tmp_path: Path, plan: str
) -> None:
    pool.run(PLANS[plan], ended, plan, str(tmp_path / "run"))
    result = run_files.result(tmp_path / "run")
    said = inspected(tmp_path / "run")
    (found,) = said["checkpoints"]
    assert found["fingerprints"] == {"0": result["fingerprint"]} == said["model"]["fingerprints"]
    assert (found["step"], found["plan"], found["processes"], found["state"]) == (
        STEPS,
        result["plan"],
        PLANS[plan],
        "intact",
    )
    assert found["size_bytes"] == sum(
        file.stat().st_size for file in checkpoint_in(tmp_path / "run").iterdir()
    )
    exported = lockstep("export", checkpoint_in(tmp_path / "run"), tmp_path / "model.safetensors")
    assert exported.returncode == 0, exported.stderr
    assert ls.fingerprint(load_file(tmp_path / "model.safetensors")) == result["fingerprint"]


def test_the_life_of_a_run_is_told(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "run"
    pool.run(1, run, "replicate=1", str(path), 3, {})
    pool.run(2, run, "replicate=2", str(path), None, {})
    said = inspected(path)
    told = [(row["event"], row["step"]) for row in said["events"]]
    assert told == [
        ("run-started", 0),
        ("preempted", 4),
        ("run-started", 0),
        ("resumed", 4),
        ("run-ended", STEPS),
    ]
    assert said["checkpoints"][0]["other_state"] == ["1-ExponentialMovingAverage", "run"]
    text = lockstep("inspect", path).stdout
    name = said["checkpoints"][0]["name"]
    for line in (
        f"{path}: every byte read",
        f"step 4: resumed from {name}",
        "step 0: started under replicate=2,numerics=fast on 2 processes",
        "saved with the models: 1-ExponentialMovingAverage, run",
    ):
        assert f"{line}\n" in re.sub(" +\n", "\n", text)
    assert said["checkpoints"][0]["fingerprints"]["0"][:12] in text


@pytest.mark.parametrize(
    ("values", "best"),
    [({2: 3.0, 4: 1.0}, 4), ({2: 3.0, 4: 1.0, 5: 0.5}, 5)],
    ids=["a checkpoint", "the final model"],
)
def test_the_best_model_is_marked_and_exported(
    tmp_path: Path, values: dict[int, float], best: int
) -> None:
    result = scored(str(tmp_path / "run"), values)
    shown = inspected(tmp_path / "run")["checkpoints"]
    assert [(each["step"], each["score"]["value"], each["is_best"]) for each in shown] == [
        (2, 3.0, False),
        (4, 1.0, True),
    ]
    assert "place 1, best" in lockstep("inspect", tmp_path / "run").stdout
    exported = lockstep("export", "--best", tmp_path / "run", tmp_path / "best.safetensors")
    assert f"of step {best}, " in exported.stdout
    expected = {each["step"]: each["fingerprints"]["0"] for each in shown} | {5: result.fingerprint}
    assert ls.fingerprint(load_file(tmp_path / "best.safetensors")) == expected[best]
    (tmp_path / "run" / "result.json").unlink()  # as of a run that has not ended
    again = lockstep("export", "--best", tmp_path / "run", tmp_path / "again.safetensors")
    assert "of step 4, checkpoint" in again.stdout


def test_without_a_score_there_is_no_best_to_export(whole: Path, tmp_path: Path) -> None:
    refused = lockstep("export", "--best", checkpoint_in(whole), tmp_path / "best.safetensors")
    assert refused.returncode == 2
    assert (
        "has a score; a run with ls.Saving(best=...) saves scores; leave --best out for the last "
        "model" in refused.stderr
    )


def test_checkpoints_elsewhere_are_found_and_a_run_without_any_says_so(
    pool: WorkerPool, tmp_path: Path
) -> None:
    pool.run(1, ended, "replicate=1", str(tmp_path / "run"), str(tmp_path / "elsewhere"))
    assert (
        len(inspected(tmp_path / "run")["checkpoints"])
        == len(inspected(tmp_path / "elsewhere")["checkpoints"])
        == 1
    )
    shutil.rmtree(tmp_path / "elsewhere")
    (tmp_path / "run" / "result.json").unlink()
    found = lockstep("inspect", tmp_path / "run")
    assert (found.returncode, found.stdout.splitlines()[0]) == (
        0,
        f"{tmp_path / 'run'}: no checkpoint yet",
    )


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def newer(checkpoint: Path) -> None:
    data = (checkpoint / MANIFEST).read_bytes()
    start = data.index(b'"content":') + len(b'"content":')
    content = data[start:-2]
    (checkpoint / MANIFEST).write_bytes(
        b'{"format":99,"blake3":"%s","content":%s}\n' % (_hash(99, content).encode(), content)
    )


def step_two(path: Path) -> None:
    path.write_bytes(replace(Manifest.decode(path.read_bytes()), step=2).encode())


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


DAMAGES: dict[str, tuple[Any, str, str]] = {
    "a bit": (
        lambda at: flip(next(at.glob("*.safetensors")), 2000),
        "damaged",
        "has other bytes than were written between 0 and",
    ),
    "a byte more": (
        lambda at: lengthen(next(at.glob("*.safetensors"))),
        "damaged",
        "goes on behind its end",
    ),
    "a file": (lambda at: next(at.glob("*.safetensors")).unlink(), "damaged", "is missing"),
    "manifest": (lambda at: flip(at / MANIFEST, 200), "damaged", "manifest"),
    "another one's manifest": (
        lambda at: step_two(at / MANIFEST),
        "damaged",
        "the manifest belongs to step 2",
    ),
    "newer": (newer, "unreadable", "has format 99, and this version of lockstep reads 1"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_the_status_is_1(copied: Path, tmp_path: Path, damage: str) -> None:
    do, state, reason = DAMAGES[damage]
    checkpoint = checkpoint_in(copied)
    do(checkpoint)
    (found,) = inspected(copied, 1)["checkpoints"]
    assert found["state"] == state
    assert found["fingerprints"] == {}
    assert reason in found["reasons"][0]
    text = lockstep("inspect", checkpoint)
    assert text.returncode == 1
    assert reason in text.stdout.replace("\n", " ")
    exported = lockstep("export", checkpoint, tmp_path / "model.safetensors")
    assert exported.returncode == 2
    assert reason in exported.stderr
    assert "Traceback" not in exported.stderr + text.stderr
    assert not list(tmp_path.glob("*model*"))


def test_a_checkpoint_that_a_live_run_has_deleted_is_not_a_damaged_one(copied: Path) -> None:
    storage = FolderStorage(copied / "checkpoints")
    (there,) = storage.names()
    assert [
        found.name for found in inspect_all(storage, [CheckpointName(1, "00000000"), there])
    ] == [str(there)]


def test_the_newest_whole_checkpoint_of_a_run_that_has_not_ended_is_exported(
    pool: WorkerPool, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    for at in (2, 4):
        pool.run(1, run, "replicate=1", str(path), at, {})
    older, newest = inspected(path)["checkpoints"]
    assert (older["step"], newest["step"]) == (3, 5)
    assert (
        f"of step 5, checkpoint {newest['name']}"
        in lockstep("export", path, tmp_path / "newest.safetensors").stdout
    )
    flip(next((path / "checkpoints" / newest["name"]).glob("*.safetensors")), 2000)
    found = lockstep("export", path, tmp_path / "older.safetensors")
    assert f"of step 3, checkpoint {older['name']}" in found.stdout
    assert found.stderr.startswith(f"warning: checkpoint {newest['name']} is damaged: ")
    for name, said in (("newest", newest), ("older", older)):
        assert (
            ls.fingerprint(load_file(tmp_path / f"{name}.safetensors")) == said["fingerprints"]["0"]
        )


def test_the_final_model_of_a_run_is_exported_and_checked(copied: Path, tmp_path: Path) -> None:
    shutil.rmtree(copied / "checkpoints")
    assert "the end of the run" in lockstep("export", copied, tmp_path / "model.safetensors").stdout
    result = run_files.result(copied)
    assert ls.fingerprint(load_file(tmp_path / "model.safetensors")) == result["fingerprint"]
    flip(copied / "model.safetensors", -1)
    assert inspected(copied, 1)["model"]["state"] == "damaged"
    found = lockstep("export", copied, tmp_path / "again.safetensors")
    assert (found.returncode, found.stdout) == (2, "")
    assert "is damaged: its fingerprint differs from the one in result.json" in found.stderr


def test_each_of_several_models_has_its_fingerprint_and_is_exported_by_its_number(
    tmp_path: Path,
) -> None:
    expected = two(str(tmp_path / "run"))
    (found,) = inspected(tmp_path / "run")["checkpoints"]
    assert list(found["fingerprints"].values()) == expected
    assert found["other_state"] == ["notes", "run"]
    refused = lockstep("export", tmp_path / "run", tmp_path / "model.safetensors")
    assert (
        refused.stderr
        == "lockstep: CheckpointError: no --model; the models are 0, 1, and one of them is "
        "exported; give its number\n"
    )
    assert (
        lockstep("export", "--model", 1, tmp_path / "run", tmp_path / "one.safetensors").returncode
        == 0
    )
    state = load_file(tmp_path / "one.safetensors")
    assert ls.fingerprint(state) == expected[1]
    assert state["short"].dtype == torch.bfloat16
    assert torch.equal(state["one"], state["other"])
    assert state["1.num_batches_tracked"] == 2


def test_what_is_exported_is_what_a_run_may_start_from(copied: Path, tmp_path: Path) -> None:
    lockstep("export", checkpoint_in(copied), tmp_path / "model.safetensors")
    found, said = started(
        "replicate=1", str(tmp_path / "again"), str(tmp_path / "model.safetensors")
    )
    assert found == run_files.fingerprint(copied)
    assert said["kept"] == []


def test_the_folder_of_a_search_says_where_its_runs_are(tmp_path: Path) -> None:
    (tmp_path / "search.json").touch()
    with pytest.raises(
        CheckpointError, match="is the folder of a search; its runs are the folders `trial-"
    ):
        Target.find(str(tmp_path))


MISTAKES: list[tuple[list[str], str]] = [
    (
        ["inspect", "missing"],
        "missing does not exist; give a run directory, or a checkpoint in its folder `checkpoints`",
    ),
    (["inspect", "file"], "file is a file; a run and a checkpoint are folders; give its folder"),
    (
        ["inspect", "."],
        (
            ". is neither a run directory (it has no run.json) nor a checkpoint, and holds no "
            "checkpoint; give one"
        ),
    ),
    (
        ["inspect", "step-00000001-00000000"],
        "step-00000001-00000000 does not exist; give a run directory",
    ),
    (
        ["inspect", "nix://a/b"],
        "nix://a/b: no driver is known for nix://; give a path, or a URL like s3://bucket/run",
    ),
    (
        ["export", "run", "model.pt"],
        ("OUT is 'model.pt'; models are exported as safetensors; name it"),
    ),
    (
        ["export", "run", "."],
        ("OUT is '.'; models are exported as safetensors; name it model.safetensors"),
    ),
    (
        ["export", "run", "there.safetensors"],
        "there.safetensors is there already; nothing is overwritten; name another, or remove it",
    ),
    (
        ["export", "run", "no/model.safetensors"],
        "no/model.safetensors: its folder does not exist; name a file in an existing one",
    ),
    (
        ["export", "run", "model.safetensors"],
        "run has no checkpoint to export: it has none; lockstep inspect shows its contents",
    ),
]


@pytest.mark.parametrize(
    ("arguments", "text"),
    MISTAKES,
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_users_mistake_is_one_message_and_status_2(
    tmp_path: Path, arguments: list[str], text: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "there.safetensors").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    found = lockstep(*arguments, folder=tmp_path)
    assert (found.returncode, found.stdout) == (2, "")
    assert text in found.stderr
    assert found.stderr.count("\n") == 1


def test_neither_command_imports_torch(copied: Path, tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from lockstep.cli.main import main\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules)"
    )
    for arguments in (
        ["inspect", checkpoint_in(copied)],
        ["export", checkpoint_in(copied), tmp_path / "model.safetensors"],
    ):
        ended = ran([sys.executable, "-c", program, *map(str, arguments)])
        assert ended.stdout.splitlines()[-1] == "False", ended
