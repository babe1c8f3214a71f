"""The examples, as a newcomer runs them; and the same fingerprint however they are started."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
import run_files
import torch
from processes import ran

import lockstep as ls

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = ("regression", "digits", "gpt", "cartpole")
SMALL_GPT = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "128", "--sample", "12"]
BITWISE_GPT = [
    "--steps",
    "20",
    "--dropout",
    "0.1",
    "--global-batch",
    "32",
    "--microbatch",
    "4",
    "--sample",
    "1",
]
BITWISE_DIGITS = ["--steps", "40"]
Load = Callable[[str], ModuleType]
Start = Callable[..., str]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Load:
    """Imports an example; what it trains stays below `tmp_path`, and computes with one thread."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def load(name: str) -> ModuleType:
        with patch.dict(os.environ):  # scikit-learn and gymnasium set variables of other libraries
            return importlib.import_module(name)

    return load


@pytest.mark.parametrize("name", NAMES)
def test_an_example_says_which_options_it_takes(
    name: str, example: Load, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        example(name).main(["--help"])
    assert ending.value.code == 0
    shown = capsys.readouterr().out
    assert [
        option
        for option in ("--steps", "--seed", "--global-batch", "--microbatch")
        if option not in shown
    ] == []


@pytest.mark.parametrize("name", NAMES)
def test_an_example_imports_nothing_of_lockstep_but_its_public_face(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    assert [line for line in text.splitlines() if "lockstep" in line and "import" in line] == [
        "import lockstep as ls"
    ]


def test_regression_finds_the_line(example: Load) -> None:
    result = example("regression").main([])
    assert result.steps == 200
    assert 0.005 < result.loss < 0.03  # the noise in the data is 0.01


def test_digits_tells_97_of_100_digits(example: Load, capsys: pytest.CaptureFixture[str]) -> None:
    result = example("digits").main(["--microbatch", "64"])
    assert result.metrics["accuracy"] >= 0.97
    assert result.fingerprint in capsys.readouterr().out


def test_digits_holds_out_what_it_measures_on(example: Load) -> None:
    training, held_out = example("digits").read_digits()
    assert (len(training), len(held_out)) == (1437, 360)


def test_gpt_learns_and_shows_a_sample_and_where_the_run_is(
    example: Load, capsys: pytest.CaptureFixture[str]
) -> None:
    result = example("gpt").main(
        [*SMALL_GPT, "--steps", "20", "--global-batch", "8", "--microbatch", "4"]
    )
    assert result.steps == 20
    assert result.metrics["loss"] < 5.0
    shown = capsys.readouterr().out
    assert shown.startswith("def ")
    assert f"{result.metrics['loss']:.3f} nats per byte" in shown
    assert result.fingerprint in shown
    assert result.run_dir in shown


def test_gpt_trains_for_a_single_step(example: Load) -> None:
    assert example("gpt").main([*SMALL_GPT, "--steps", "1"]).steps == 1


def test_gpt_refuses_heads_that_do_not_divide_the_width(
    example: Load, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        example("gpt").main(["--width", "130", "--heads", "4"])
    assert ending.value.code == 2
    assert "--width 130 --heads 4: the heads divide the width" in capsys.readouterr().err


def test_gpt_does_not_see_the_bytes_that_it_predicts(example: Load) -> None:
    model = example("gpt").GPT(layers=2, width=32, heads=2, context=16, dropout=0.0)
    text = torch.randint(0, 256, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = text.clone()
    changed[0, 9] += 1 if changed[0, 9] == 0 else -1
    before, after = model(text), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9], after[:, 9])


def test_gpt_holds_out_whole_files_and_reads_a_bounded_text(example: Load) -> None:
    gpt = example("gpt")
    training, held_out = gpt.read_text()
    assert len(training) <= gpt.TRAINING_BYTES
    assert held_out[:2000] not in training
    assert gpt.read_text() == (training, held_out)


def test_gpt_reads_windows_that_overlap_by_the_byte_to_predict_from(example: Load) -> None:
    windows = example("gpt").Windows(bytes(range(10)), context=3)
    assert len(windows) == 3
    assert windows.__getitems__([2, 0]).tolist() == [[6, 7, 8, 9], [0, 1, 2, 3]]


def test_cartpole_plays_and_learns_for_a_few_steps(example: Load) -> None:
    assert (
        8
        <= example("cartpole").main(["--steps", "2", "--global-batch", "4", "--microbatch", "2"])
        <= 500
    )


def test_cartpole_counts_a_game_until_it_ends(example: Load) -> None:
    cartpole = example("cartpole")
    torch.manual_seed(0)
    games = cartpole.play(cartpole.Policy(), [1, 2, 3], torch.device("cpu"))
    assert games.observations.shape == (*games.playing.shape, 4)
    assert games.playing.int().diff(dim=0).max() <= 0  # a game that has ended stays so
    assert games.returns().max() == len(games.playing)
    assert games.returns().tolist() == games.playing.sum(dim=0).tolist()


@pytest.fixture
def start(example: Load, tmp_path: Path) -> Start:
    """Starts an example in one of the four ways, in bitwise numerics, and returns the fingerprint
    that its run wrote."""

    def run(
        launcher: str, name: str, arguments: list[str], *, nproc: int = 1, workers: int = 0
    ) -> str:
        folder = tmp_path / f"{name}-{launcher}-{nproc}-{workers}"
        plan = f"replicate={nproc},numerics=bitwise,workers={workers}"
        script = str(EXAMPLES / f"{name}.py")
        if launcher == "spawn":
            result = ls.spawn(
                example(name).main, nproc=nproc, args=(arguments,), plan=plan, run_dir=str(folder)
            )
            assert result.fingerprint == run_files.fingerprint(folder)
            return result.fingerprint
        command = {
            "python": [],
            "torchrun": [
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(nproc),
            ],
            "lockstep": [
                "-m",
                "lockstep",
                "run",
                "--nproc",
                str(nproc),
                "--plan",
                plan,
                "--run-dir",
                str(folder),
            ],
        }[launcher]
        environment = {**os.environ, "TMPDIR": str(tmp_path)}  # torchrun leaves a folder there
        if launcher != "lockstep":
            environment |= {"LOCKSTEP_PLAN": plan, "LOCKSTEP_RUN_DIR": str(folder)}
        ending = ran([sys.executable, *command, script, *arguments], env=environment)
        assert ending.returncode == 0, ending.stderr
        return run_files.fingerprint(folder)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments"), [("gpt", BITWISE_GPT), ("digits", BITWISE_DIGITS)])
def test_one_fingerprint_at_1_2_3_4_and_8_processes(
    name: str, arguments: list[str], start: Start
) -> None:
    found = {nproc: start("lockstep", name, arguments, nproc=nproc) for nproc in (1, 2, 3, 4, 8)}
    assert set(found.values()) == {found[1]}, found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments"), [("gpt", BITWISE_GPT), ("digits", BITWISE_DIGITS)])
def test_one_fingerprint_under_every_launcher(
    name: str, arguments: list[str], start: Start
) -> None:
    found = {"python": start("python", name, arguments)}
    found |= {
        launcher: start(launcher, name, arguments, nproc=2)
        for launcher in ("torchrun", "lockstep", "spawn")
    }
    assert set(found.values()) == {found["python"]}, found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments"), [("gpt", BITWISE_GPT), ("digits", BITWISE_DIGITS)])
def test_one_fingerprint_with_0_1_and_3_loader_workers(
    name: str, arguments: list[str], start: Start
) -> None:
    found = {
        workers: start("lockstep", name, arguments, nproc=2, workers=workers)
        for workers in (0, 1, 3)
    }
    assert set(found.values()) == {found[0]}, found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_cartpole_balances_for_400_steps_and_more(seed: int, example: Load) -> None:
    assert ls.spawn(example("cartpole").main, nproc=2, args=(["--seed", str(seed)],)) >= 400
