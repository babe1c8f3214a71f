"""`lockstep plan`, whole: a script, devices that are not here, and what is said of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import click
import psutil
import pytest
from cli.agents import wait_for
from processes import LOCKSTEP, ran

from lockstep.base.errors import PlanError, UserError
from lockstep.cli.plan import _Found, command, memory_bytes
from lockstep.planner.machines.costs import Machine
from lockstep.planner.machines.hardware import parse_target
from lockstep.planner.prediction import Ended, Outcome, Prediction
from lockstep.planner.trace import Peak

SCRIPT = str(Path(__file__).parent.parent / "scripts" / "planned.py")

pytestmark = [pytest.mark.forks, pytest.mark.timeout(180)]


def plan(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return ran([LOCKSTEP, "plan", *arguments], cwd=folder, env=dict(os.environ))


def found(*arguments: str, folder: Path) -> tuple[int, dict[str, Any]]:
    ended = plan("--json", *arguments, folder=folder)
    assert ended.stderr == ""
    return ended.returncode, json.loads(ended.stdout)


@pytest.mark.command
def test_plans_are_predicted_without_the_devices_and_nothing_is_left(tmp_path: Path) -> None:
    plans = ["replicate=8", "shard=8", "shard=4,tensor=2", "shard=4,pipeline=2"]
    options = ["--on", "8 x H100", "--html", "page.html", "--tokens", "1e9", "--price", "2"]
    status, told = found(*options, SCRIPT, "--plans", *plans, folder=tmp_path)
    assert status == 0
    assert sorted(each["plan"] for each in told["plans"]) == sorted(plans)
    by_plan = {each["plan"]: each for each in told["plans"]}
    parameters = {
        name: each["memory"][0]["by_cause"]["parameters"] for name, each in by_plan.items()
    }
    assert parameters["shard=8"] == pytest.approx(parameters["replicate=8"] / 8, rel=0.01)
    assert by_plan["replicate=8"]["tokens"] == 16 * 32
    assert by_plan["replicate=8"]["budget"]["cost"] > 0
    assert (
        by_plan["shard=8"]["seconds_low"]
        < by_plan["shard=8"]["seconds"]
        < by_plan["shard=8"]["seconds_high"]
    )
    assert "shard=4,tensor=2" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"], "no run directory"


@pytest.mark.parametrize(
    ("devices", "some"),
    [
        pytest.param(
            "1 x A100-80GB", {"replicate=1", "replicate=1,compile=yes"}, marks=pytest.mark.command
        ),
        pytest.param(
            "2 x A100-80GB",
            {"replicate=2", "shard=2", "tensor=2", "pipeline=2,schedule=zero-bubble"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_without_plans_the_legal_ones_are_searched(
    devices: str, some: set[str], tmp_path: Path
) -> None:
    status, told = found("--on", devices, SCRIPT, folder=tmp_path)
    assert status == 0
    assert some <= {each["plan"] for each in told["plans"]}
    seconds = [each["seconds"] for each in told["plans"] if each["reason"] is None]
    assert seconds == sorted(seconds)


@pytest.mark.command
def test_a_limit_that_nothing_meets_names_what_comes_closest(tmp_path: Path) -> None:
    ended = plan(
        "--on",
        "2 x H100",
        "--memory",
        "1GB",
        SCRIPT,
        "--plans",
        "replicate=2",
        "shard=2",
        folder=tmp_path,
    )
    assert ended.returncode == 1
    assert "0 of 2 plans fit" in ended.stdout
    assert "no plan fits; shard=2 comes closest: it needs" in ended.stdout


@pytest.mark.command
def test_a_model_that_needs_values_is_computed_with_values_and_its_line_is_named(
    tmp_path: Path,
) -> None:
    status, told = found(
        "--on", "2 x H100", SCRIPT, "values", "--plans", "replicate=2", folder=tmp_path
    )
    assert status == 0
    (only,) = told["plans"]
    line = next(
        number
        for number, text in enumerate(Path(SCRIPT).read_text().splitlines(), 1)
        if "hidden.sum()" in text
    )
    assert f"{SCRIPT}:{line}: " in only["note"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--on", "2 x H1000", SCRIPT], "device 'H1000' is not known; known: A100-40GB"),
        (
            ["--on", "8 GPUs", SCRIPT],
            ("'GPUs' is not a known device; write a count, an x and a device, such as `8 x H100`"),
        ),
        (["--on", "2 x H100", "--on", "2 x H1000", SCRIPT], "device 'H1000' is not known"),
        (["--on", "2 x H100", SCRIPT, "--plans", "shard=3"], "the axes multiply to 3"),
        (
            ["--on", "2 x H100", SCRIPT, "--plans", "tensr=2"],
            "'tensr' in plan 'tensr=2' is unknown",
        ),
        (
            ["--on", "2 x H100", "--memory", "80", SCRIPT],
            "--memory '80'; it takes a positive size with its unit",
        ),
        (
            ["--on", "2 x H100", "--html", "no/such/page.html", SCRIPT],
            "its directory does not exist",
        ),
        (["--on", "2 x H100", "none.py"], "'none.py' is not there"),
        (["--on", "this", SCRIPT], 'name the devices to plan for: --on "1 x H100"'),
        (
            ["--on", "2 x H100", "--memory", "10TB", SCRIPT],
            "--memory 10TB; a device (H100) has 85 GB; give at most that",
        ),
        (["--on", "2 x H100", "--tokens", "nan", SCRIPT], "'nan' is not a finite number"),
        (["--on", "2 x H100", "--tokens", "many", SCRIPT], "'many' is not a valid number"),
        (
            ["--on", "2 x H100", SCRIPT, "--plans"],
            "--plans is followed by nothing, which is not a plan; a plan is KEY=VALUE",
        ),
    ],
)
def test_a_mistake_in_the_command_is_said_at_once(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for slow in ("machines.measuring_gpu.write_gpu_sheets", "prediction.PlanRequest.write"):
        monkeypatch.setattr(
            f"lockstep.planner.{slow}",
            lambda *_: pytest.fail("it measures this machine, or runs the script"),
        )
    with pytest.raises((UserError, click.ClickException)) as raised:
        command.main(arguments, standalone_mode=False)
    assert said in getattr(raised.value, "message", str(raised.value))


@pytest.mark.command
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("fails", "OSError: no such data"),
        ("loop", "a script with its own loop"),
        ("missing", "loading a microbatch of Recipe.data failed with OSError: no such sample"),
    ],
)
def test_a_script_that_no_plan_can_be_made_from_is_a_mistake(
    how: str, said: str, tmp_path: Path
) -> None:
    ended = plan("--on", "2 x H100", SCRIPT, how, folder=tmp_path)
    assert ended.returncode == 2
    assert said in ended.stderr


@pytest.mark.command
def test_if_no_plan_can_be_run_that_is_a_mistake(tmp_path: Path) -> None:
    ended = plan("--on", "32 x H100", SCRIPT, "--plans", "pipeline=32", folder=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert (
        "no plan can be run; pipeline=32: RecipeError: pipeline=32 makes 32 stages" in ended.stderr
    )


def outcome(fits: bool) -> Outcome:
    peak = Peak(
        rank=0, bytes=10**9, by_cause={"activations": 10**9}, moment="the forward of microbatch 1"
    )
    prediction = Prediction(
        plan="replicate=2", microbatch=1, microbatches=1, seconds=0.5, by_limit={"matmul": 0.5},
        samples=2, tokens=None, steps=10,
        seconds_with_twice={"arithmetic": 0.3, "memory": 0.5, "network": 0.5}, memory=[peak],
        capacity_bytes=80 * 10**9,
    )  # fmt: skip
    if fits:
        return Outcome(plan="replicate=2", prediction=prediction)
    return Outcome(plan="replicate=2", reason="RecipeError: no", is_refused=True)


@pytest.mark.parametrize("last", ["refused", "interrupted"])
def test_what_goes_wrong_on_one_target_loses_no_other(
    last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine.of(parse_target("2 x H100"), None)
    found = [
        _Found(machine, [outcome(fits=True)], Ended(), False),
        _Found(machine, [outcome(fits=False)], Ended(), False),
    ]

    def predicted(*_: Any, **__: Any) -> _Found:
        if last == "interrupted" and len(found) == 1:
            raise KeyboardInterrupt
        return found.pop(0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lockstep.cli.plan._predicted", predicted)
    arguments = ["--json", "--on", "2 x H100", "--on", "2 x T4", SCRIPT]
    status = command.main(arguments, standalone_mode=False)
    printed = capsys.readouterr()
    assert [each["on"] for each in json.loads(printed.out)] == ["2 x H100"]
    assert status == (130 if last == "interrupted" else 0)
    assert ("2 x T4: no plan can be run; replicate=2: RecipeError: no" in printed.err) == (
        last == "refused"
    )


PLAIN = """
import torch, lockstep as ls
recipe = ls.Recipe(
    model=lambda: torch.nn.Linear(8, 4), data=[torch.zeros(8)] * 64, loss=lambda model, batch: model(batch).square().mean(),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3), global_batch={batch}, microbatch={size}, steps=10,
)
if __name__ == "__main__":
    ls.train(recipe)
"""


@pytest.mark.command
def test_if_no_plan_uses_all_devices_those_that_can_be_used_are_planned_for_side_by_side_with_others(
    tmp_path: Path,
) -> None:
    """The second time with the remedy that the first names."""
    script = tmp_path / "plain.py"
    script.write_text(PLAIN.format(batch=4, size=2), encoding="utf-8")
    ended = plan("--json", "--on", "4 x H100", "--on", "1 x MI300X", str(script), folder=tmp_path)
    assert ended.returncode == 0
    few, alone = json.loads(ended.stdout)
    assert (few["on"], alone["on"]) == ("2 x H100", "1 x MI300X")
    (remark,) = few["remarks"]
    assert (
        "no plan can use 4 devices: a step has 2 microbatches (global_batch=4, microbatch=2)"
        in remark
    )
    assert "planned for 2; to use all, give global_batch=8, or microbatch=1" in remark
    assert any(each["plan"] == "replicate=2" and each["fits"] for each in few["plans"])
    script.write_text(PLAIN.format(batch=8, size=2), encoding="utf-8")
    shown = plan("--on", "4 x H100", "--price", "2", "--price", "1", str(script), folder=tmp_path)
    assert (shown.returncode, "2 prices for 1 --on" in shown.stderr) == (2, True)
    status, told = found("--on", "4 x H100", str(script), "--plans", "replicate=4", folder=tmp_path)
    assert (status, told["on"], told["remarks"]) == (0, "4 x H100", [])


@pytest.mark.command
def test_an_interrupted_search_prints_the_plans_that_it_has(tmp_path: Path) -> None:
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    line = [LOCKSTEP, "plan", "--json", "--on", "8 x H100", SCRIPT]
    with subprocess.Popen(
        line,
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        wait_for(lambda: any(tmp_path.glob("lockstep-plan-*/outcomes.jsonl")))
        process.send_signal(signal.SIGINT)
        told = json.loads(process.communicate()[0])
    assert process.returncode == 130
    assert any(each["fits"] for each in told["plans"])
    assert "interrupted: these are the plans predicted" in told["remarks"][0]
    assert not list(tmp_path.glob("lockstep-plan-*"))


@pytest.mark.command
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ended_by_a_signal_it_leaves_no_process_and_asked_to_end_no_file(
    number: signal.Signals, tmp_path: Path
) -> None:
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    line = [LOCKSTEP, "plan", "--on", "8 x H100", SCRIPT]
    with subprocess.Popen(
        line, cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        # a plan is being traced
        wait_for(lambda: any(tmp_path.glob("lockstep-plan-*/lockstep-plan-*")))
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
    assert len(started) >= 2
    wait_for(
        lambda: (
            not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in started)
        )
    )
    assert number == signal.SIGKILL or not list(tmp_path.iterdir())


def test_killed_it_leaves_no_script_that_has_not_come_to_its_training(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time; time.sleep(600)")
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [LOCKSTEP, "plan", "--on", "8 x H100", "train.py"], cwd=tmp_path, env=environ
    ) as process:
        wait_for(lambda: any(psutil.Process(process.pid).children()))
        started = psutil.Process(process.pid).children()
        process.kill()
    wait_for(lambda: not any(each.is_running() for each in started))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GB", 80 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        ("500MB", 5 * 10**8),
        ("2KiB", 2048),
        ("3KB", 3000),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert memory_bytes(text) == size


@pytest.mark.parametrize("text", ["80", "GB", "0GB", "-1GB", "80XB", "80 gb"])
def test_a_size_without_a_unit_or_of_nothing_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="it takes a positive size with its unit"):
        memory_bytes(text)


def test_a_file_that_describes_no_machine_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[operations]\nx = 1\n", encoding="utf-8")
    ended = plan("--on", "bad.toml", SCRIPT, folder=tmp_path)
    assert ended.returncode == 2
    assert "the sheet of 'bad.toml' lacks name" in ended.stderr
