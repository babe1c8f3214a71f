"""The probes see each loss, backward, gradient and step, and a script with them gives the numbers
of one without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from audit.watched import SCRIPTS, Watched, added, applied, problems, run, watched

from lockstep.audit.probes.gradients import divisors

pytestmark = [pytest.mark.timeout(180), pytest.mark.forks("watched")]


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    return watched("training.py", tmp_path_factory.mktemp("records"))


def test_no_probe_fails(training: Watched) -> None:
    assert problems(training) == []


def test_training_gives_the_same_numbers_as_without_probes(
    training: Watched, tmp_path: Path
) -> None:
    plain_run = run(SCRIPTS / "training.py", tmp_path, {})
    assert plain_run.returncode == 0, plain_run.stderr
    assert training.output == plain_run.stdout


# Losses and backwards


def test_accumulated_losses_have_their_counts_weights_and_backwards(training: Watched) -> None:
    row = training.step("accumulation")
    assert [
        (each["backward"], each["count"], each["weight"], each["reduction"])
        for each in row["losses"]
    ] == [
        (0, 5.0, 0.5, "mean"),
        (1, 5.0, 0.5, "mean"),
    ]
    assert {each["line"] for each in row["losses"]} == {training.line("accumulated")}
    assert list(row["added"]) == ["0", "1"]
    assert added(row) == pytest.approx(applied(row), rel=1e-5)
    assert (row["stale"], row["sharded"], row["unused"], row["clip"], row["index"]) == (
        [],
        [],
        [],
        None,
        0,
    )
    assert [each["divisors"] for each in training.rows("backward", "divided")] == [[2.0], [2.0]]
    assert row["backward_line"] == training.line("divided")


def test_a_mask_is_in_the_weights(training: Watched) -> None:
    (loss,) = training.step("masked")["losses"]
    assert (loss["reduction"], loss["count"]) == ("none", 3)
    assert loss["weights"] == pytest.approx([1 / 3, 1 / 3])


def test_each_kind_of_loss_is_counted_as_its_mean_is(training: Watched) -> None:
    by_function = {each["function"]: each for each in training.step("several losses")["losses"]}
    assert by_function.keys() == {"cross_entropy", "mse_loss", "l1_loss"}
    assert by_function["mse_loss"]["count"] == by_function["l1_loss"]["count"] == 24
    assert by_function["l1_loss"]["reduction"] == "sum"
    torch.manual_seed(0)
    torch.randn(8, 4)
    target = torch.randint(0, 3, (8,))
    assert by_function["cross_entropy"]["count"] == torch.tensor([0.0, 2.0, 4.0])[target].sum()


def test_backwards_are_numbered_once_each(training: Watched) -> None:
    numbers = [row["number"] for row in training.rows("backward")]
    assert numbers == list(range(len(numbers)))
    assert len(training.rows("backward", "reentrant")) == 1
    row = training.step("checkpointed")
    assert added(row) == pytest.approx(applied(row), rel=1e-5)


def test_the_divisors_of_a_loss_are_found_on_its_way() -> None:
    x = torch.ones(3, requires_grad=True)
    assert divisors((x.sum() / 4 * 2.0) / 2) == [2.0, 4.0]
    assert divisors(x.mean()) == []
    assert divisors(x.sum() / torch.tensor(3.0)) == [3.0]
    assert divisors(torch.ones(())) == []


# Steps


def test_closures_are_told_from_several_closures(training: Watched) -> None:
    several = training.step("LBFGS")
    assert several["several_closures"]
    assert several["type"] == "LBFGS"
    row = training.step("a closure")
    assert (row["several_closures"], len(row["added"]), len(row["losses"])) == (False, 1, 1)
    assert added(row) == pytest.approx(applied(row), rel=1e-5)


def test_a_skipped_step_is_no_step(training: Watched) -> None:
    (skipped,) = training.rows("skipped_step", "scaler")
    first, second = training.rows("step", "scaler")
    assert skipped["optimizer"] == first["optimizer"]
    assert [first["index"], second["index"]] == [0, 1]
    assert [first["scale"], second["scale"]] == [512.0, 512.0]


def test_a_norm_of_scaled_gradients_is_told_from_one_of_unscaled_ones(training: Watched) -> None:
    first, second = (row["clip"] for row in training.rows("step", "scaler"))
    assert (first["scaled"], second["scaled"]) == (True, False)
    assert first["line"] == second["line"] == training.line("clip of the scaler")
    assert 100 < first["norm"] / second["norm"] < 2000


def test_gradients_are_seen_before_and_after_clipping(training: Watched) -> None:
    row = training.step("clipped")
    clip = row["clip"]
    assert clip["line"] == training.line("clip")
    assert np.sqrt(sum(each[-1] for each in clip["reduced"].values())) == pytest.approx(
        clip["norm"], rel=1e-5
    )
    assert np.sqrt(sum(each[-1] for each in row["applied"].values())) == pytest.approx(
        1e-3, rel=1e-2
    )
    assert added(row) == pytest.approx(next(iter(clip["reduced"].values()))[:-1], rel=1e-5)


@pytest.mark.parametrize("mark", ["cleared", "zeroed", "None by hand", "zero by hand"])
def test_gradients_that_are_cleared_in_any_way_are_not_stale(training: Watched, mark: str) -> None:
    rows = training.rows("step", mark)
    assert [row["stale"] for row in rows] == [[], [], []]
    assert [row["index"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert added(row) == pytest.approx(applied(row), rel=1e-4)


def test_gradients_that_are_never_cleared_are_stale(training: Watched) -> None:
    assert [len(row["stale"]) for row in training.rows("step", "never cleared")] == [0, 2, 2]


def test_a_critic_whose_gradients_are_set_to_none_later_has_no_stale_ones(
    training: Watched,
) -> None:
    """Between its steps the maker's backward adds to them."""
    assert [row["stale"] for row in training.rows("step", "the critic")[:2]] == [[], []]
    assert [row["stale"] for row in training.rows("step", "the maker")] == [[]] * 4


def test_a_critic_whose_gradients_are_set_to_zero_later_has_no_stale_ones(
    training: Watched,
) -> None:
    assert [row["stale"] for row in training.rows("step", "the critic")[2:]] == [[], []]


def test_what_was_cleared_is_not_added(training: Watched) -> None:
    for row in training.rows("step", "the critic"):
        assert added(row) == pytest.approx(applied(row), rel=1e-4)


def test_autograd_grad_adds_nothing(training: Watched) -> None:
    row = training.step("after autograd.grad")
    assert added(row) == pytest.approx(applied(row), rel=1e-4)


def test_steps_after_a_failed_one_are_seen(training: Watched) -> None:
    assert training.rows("step", "after a failure")


def test_optimizers_have_numbers_of_their_own(training: Watched) -> None:
    rows = training.rows("step", "one after the other")
    assert [row["index"] for row in rows] == [0, 0, 0]
    assert len({row["optimizer"] for row in rows}) == 3


def test_parameters_in_no_optimizer_are_named(training: Watched) -> None:
    row = training.step("one is left out")
    assert "1.bias" in row["untrained"]
    assert list(row["applied"]) == ["0.weight", "0.bias", "1.weight"]
    assert row["lr"] == [0.1, 0.01]
