"""`lockstep replay`: a step of a run is made again by the run's own script, and the sample that
spoilt it is seen."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import run_files
from processes import LOCKSTEP, ran

pytestmark = [pytest.mark.command, pytest.mark.forks]
SCRIPT = """
import sys, torch, lockstep as ls
from torch.utils.data import TensorDataset
samples = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
samples[int(sys.argv[1])] *= 1000
recipe = ls.Recipe(
    model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1)),
    data=TensorDataset(samples),
    loss=lambda model, batch: model(batch[0]).abs().mean(),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
    global_batch=8,
    microbatch=4,
    steps=12,
    clip_norm=1.0,
)
ls.train(recipe, saving=ls.Saving(every=1, keep="log"), log_every=1)
print("trained")
"""


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return ran([LOCKSTEP, *map(str, arguments)])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    (folder / "train.py").write_text(SCRIPT)
    plan = ("--nproc", "2", "--plan", "shard=2,numerics=bitwise")
    ended = command("run", *plan, "--run-dir", folder / "run", folder / "train.py", "17")
    assert ended.returncode == 0, ended.stderr
    return folder / "run"


def test_the_sample_that_spoils_a_step_is_seen(run: Path) -> None:
    rows = run_files.metrics(run)
    spike = max(rows[4:], key=lambda row: row["gradient_norm"])
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    ended = command("replay", "--step", str(spike["step"]), "--json", run)
    assert ended.returncode == 0, ended.stderr
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == files
    found = json.loads(ended.stdout)
    assert found["same_bits"] is True
    assert found["loss"] == spike["loss"]
    assert found["begin"] > 0
    worst = max(found["microbatches"], key=lambda each: each["gradient_norm"])
    assert 17 in worst["samples"]
    plain = ("--without-sample", "17", "--plan", "replicate=2", "--nproc", "2")
    ended = command("replay", "--step", str(spike["step"]), *plain, run)
    assert ended.returncode == 0, ended.stderr
    assert "without sample 17\n" in ended.stdout
    assert f"{spike['loss']:.6g}" not in ended.stdout


def test_the_sample_is_blamed(run: Path) -> None:
    ended = command("blame", "--json", run)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["cause"] == "sample"
    assert found["samples"] == [17]
    assert f"--step {found['step']} --without-sample 17" in found["text"]
    ended = command("blame", "--step", str(found["step"]), run)
    assert f"cause: {found['text']}\n" in ended.stdout


def test_the_step_that_ended_a_run_with_nan_is_made_again_and_blamed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("*= 1000", "= float('nan')"))
    run = tmp_path / "run"
    ended = command(
        "run", "--plan", "numerics=bitwise", "--run-dir", run, tmp_path / "train.py", "17"
    )
    assert ended.returncode == 2
    assert f"lockstep blame {run} looks for the samples and the layer" in ended.stderr
    step = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] + 1
    ended = command("blame", run)
    assert ended.returncode == 0, ended.stderr
    assert f"step {step}: the run ended here" in ended.stdout
    assert "sample 17 of microbatch" in ended.stdout
    assert f"lockstep replay --step {step} --without-sample 17" in ended.stdout
    ended = command("replay", "--step", str(step), "--without-sample", "17", run)
    assert ended.returncode == 0, ended.stderr
    assert "nan" not in ended.stdout
    ended = command("replay", "--step", str(step + 1), run)
    assert f"--step {step + 1}; the run's last step is {step}" in ended.stderr


def test_the_step_that_led_to_the_end_is_blamed(tmp_path: Path) -> None:
    script = SCRIPT.replace("(32, 4", "(128, 4").replace("clip_norm=1.0,", "")
    (tmp_path / "train.py").write_text(script.replace("abs()", "square()").replace("=12", "=16"))
    run = tmp_path / "run"
    train = ("--plan", "numerics=bitwise", "--run-dir", run, tmp_path / "train.py", "17")
    assert command("run", *train).returncode == 2
    ended = command("blame", run)
    assert ended.returncode == 0, ended.stderr
    end, spike, cause = ended.stdout.splitlines()
    assert end.endswith("the run ended here, because the loss or the gradient is not finite")
    assert spike.startswith("step 8: gradient_norm ")
    assert cause.startswith("cause: sample 17 of microbatch 0: ")
    ended = command("blame", "--json", run)
    found = json.loads(ended.stdout)["spike"]
    assert (found["metric"], f"{found['value']:.6g}") == ("gradient_norm", spike.split()[3][:-1])
    ended = command("blame", "--step", end.split(":")[0].removeprefix("step "), run)
    assert ended.stdout.splitlines()[0] == end
    assert "cause: no microbatch is finite" in ended.stdout


def test_a_step_without_a_line_or_steps_before_has_no_cause(run: Path) -> None:
    ended = command("blame", "--step", "999", run)
    assert ended.returncode == 2
    assert "--step 999 has no line in" in ended.stderr
    ended = command("blame", "--step", "3", run)
    assert ended.returncode == 2
    assert "--step 3 has fewer than 7 logged steps before it" in ended.stderr


def test_other_bits_are_named_and_fail(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    rows = run_files.metrics(run)
    rows[1]["gradient_checksum"] = "0" * 16
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (tmp_path / "run" / "metrics.jsonl").write_text(lines)
    ended = command("replay", "--step", "3", tmp_path / "run")
    assert ended.returncode == 1, ended.stderr
    assert "at step 0, because no checkpoint is earlier" in ended.stderr
    assert "from step 2 on, the gradients have other bits than in the run" in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "13"], "--step 13; the run's last step is 12; give a step up to it"),
        ([], "no step to replay; give one of metrics.jsonl"),
        (["--step", "3", "--without-sample", "-1"], "-1 is not in the range"),
        (["--step", "3", "--checkpoints", "nowhere"], "nowhere does not exist"),
    ],
)
def test_what_cannot_be_made_again_is_refused(
    run: Path, arguments: list[str], message: str
) -> None:
    ended = command("replay", *arguments, run)
    assert ended.returncode == 2
    assert message in ended.stderr


def test_a_checkpoint_is_no_run(run: Path) -> None:
    ended = command("replay", "--step", "3", run / "checkpoints")
    assert ended.returncode == 2
    assert "is no run directory" in ended.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan": None}, "run.json has no plan, so it is not known what the run computes"),
        ({"launcher": "spawn"}, "was made by ls.spawn"),
        ({"place_in_script": 2}, "is training 2 of its script, and only steps of the first"),
        ({"recipe": {"data": {"shards": 4}}}, "--without-sample 1; the run trains on an ls.S"),
    ],
)
def test_runs_whose_steps_cannot_be_made_again_are_refused_before_the_script_starts(
    run: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    metadata = json.loads((run / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps({**metadata, **change}))
    ended = command("replay", "--step", "3", "--without-sample", "1", tmp_path / "run")
    assert ended.returncode == 2
    assert message in ended.stderr
    assert "lockstep replay: begins" not in ended.stderr
