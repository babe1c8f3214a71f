"""What benchmarks/peers makes of times and losses. The comparison itself needs an environment of
its own: `make peers`."""

import importlib.util
import sys
from pathlib import Path

import pytest
from processes import ran

PEERS = Path(__file__).resolve().parent.parent / "benchmarks" / "peers"


@pytest.fixture(scope="module")
def figures():
    spec = importlib.util.spec_from_file_location("peers_figures", PEERS / "figures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_ratio_is_taken_round_by_round(figures):
    """The machine is ten times slower in the middle round, for both; and one round of the
    baseline's is disturbed."""
    ratio = figures.Ratio.of([20.0, 2.0, 20.0, 20.0, 20.0], [10.0, 1.0, 10.0, 2.0, 10.0])
    assert ratio.median == 2.0
    assert (ratio.low, ratio.high) == (2.0, 6.0)


def test_the_ratio_of_one_round_is_its_own_spread(figures):
    assert figures.Ratio.of([3.0], [2.0]) == (1.5, 1.5, 1.5)


@pytest.mark.parametrize(
    ("losses", "distance"),
    [
        ([4.0, 2.0, 1.0], 0.0),
        ([4.0, 2.5, 0.9], 0.25),
        ([4.0, 2.0, float("nan")], float("inf")),
    ],
)
def test_curves_are_as_far_apart_as_their_furthest_step(figures, losses, distance):
    assert figures.furthest(losses, [4.0, 2.0, 1.0]) == pytest.approx(distance)


def test_curves_of_other_lengths_are_not_compared(figures):
    with pytest.raises(ValueError, match="longer"):
        figures.furthest([1.0], [1.0, 1.0])


def test_help_needs_no_other_framework():
    shown = ran([sys.executable, PEERS, "--help"], check=True).stdout
    assert "make peers" in shown
