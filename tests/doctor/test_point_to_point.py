"""Which links stand out, from planted measurements."""

from __future__ import annotations

import random
from itertools import permutations

import pytest
from hypothesis import given, strategies as st

from lockstep.doctor.point_to_point import (
    MANY_RANKS,
    Outlier,
    PairMeasurement,
    find_outliers,
    point_to_point_checks,
    schedule_pairs,
)

Names = list[str]


def measured(
    machines: Names,
    *,
    noise: float = 0.5,
    seed: int = 0,
    rate: dict[tuple[int, int], float] | None = None,
) -> list[PairMeasurement]:
    """All links, at about 1 GB/s and 50 µs, times metric is planted: the cost of a link, by its
    ranks."""
    draw = random.Random(seed)
    links = []
    for sender, receiver in permutations(range(len(machines)), 2):
        kind = "local" if machines[sender] == machines[receiver] else "machines"
        cost = (rate or {}).get((sender, receiver), 1.0) * draw.uniform(1 - noise, 1 + noise / 2)
        links.append(PairMeasurement(sender, receiver, 5e-5 * cost, 1e9 / cost, kind))
    return links


def named(findings: list[Outlier], metric: str = "bandwidth") -> list[tuple[tuple[str, ...], str]]:
    return [(finding.nodes, finding.direction) for finding in findings if finding.metric == metric]


@given(st.lists(st.sampled_from("abcd"), min_size=2, max_size=9), st.integers(0, 10**6))
def test_noise_is_no_finding(places: Names, seed: int) -> None:
    assert find_outliers(measured(sorted(places), noise=0.4, seed=seed), sorted(places)) == []


@given(st.integers(3, 6), st.integers(1, 2), st.integers(0, 10**6))
def test_a_link_of_a_tenth_of_the_bandwidth_is_named(hosts: int, each: int, seed: int) -> None:
    machines = [f"h{number}" for number in range(hosts) for _ in range(each)]
    one, other = 0, len(machines) - 1
    slow = {(a, b): 10.0 for a in range(each) for b in range(len(machines) - each, len(machines))}
    found = find_outliers(measured(machines, seed=seed, rate=slow), machines)
    assert named(found) == [((machines[one], machines[other]), "from")]
    assert found[0].normal > 4 * found[0].value


@given(st.integers(3, 6), st.integers(1, 2), st.integers(0, 10**6))
def test_a_host_with_added_delay_is_named_once_and_not_its_peers(
    hosts: int, each: int, seed: int
) -> None:
    machines = [f"h{number}" for number in range(hosts) for _ in range(each)]
    ends = {
        pair: {machines[pair[0]], machines[pair[1]]}
        for pair in permutations(range(len(machines)), 2)
    }
    slow = {pair: 100.0 for pair, of in ends.items() if "h1" in of and len(of) == 2}
    found = find_outliers(measured(machines, seed=seed, rate=slow), machines)
    assert named(found, "latency") == [(("h1",), "both")]


def test_a_rank_whose_sends_alone_are_slow_is_named_with_the_direction() -> None:
    found = find_outliers(
        measured(["a"] * 4, rate={(2, other): 10.0 for other in (0, 1, 3)}), ["a"] * 4
    )
    assert named(found) == [(("rank 2",), "from")]


def test_of_two_ranks_the_slower_direction_is_named() -> None:
    found = find_outliers(measured(["a", "a"], noise=0.0, rate={(1, 0): 10.0}), ["a", "a"])
    assert named(found) == [(("rank 1", "rank 0"), "from")]


def test_latencies_below_the_noise_do_not_count() -> None:
    assert (
        named(
            find_outliers(measured(["a"] * 3, noise=0.0, rate={(0, 1): 4.0}), ["a"] * 3), "latency"
        )
        == []
    )


def test_links_of_different_kinds_are_not_compared() -> None:
    links = [
        PairMeasurement(0, 1, 1e-5, 1e11, "NV18"),
        PairMeasurement(1, 0, 1e-5, 1e11, "NV18"),
        PairMeasurement(0, 2, 1e-5, 1e10, "SYS"),
        PairMeasurement(2, 0, 1e-5, 1e10, "SYS"),
    ]
    assert find_outliers(links, ["a"] * 3) == []
    assert [check.check for check in point_to_point_checks(links, ["a"] * 3)] == [
        "within a machine, NV18",
        "within a machine, SYS",
    ]


@given(st.lists(st.integers(0, 4), min_size=2, max_size=12))
def test_rounds_hold_every_pair_once_and_no_machine_twice(places: list[int]) -> None:
    rounds = schedule_pairs(places)
    assert sorted(pair for pairs in rounds for pair in pairs) == [
        (a, b) for a in range(len(places)) for b in range(a + 1, len(places))
    ]
    for pairs in rounds:
        machines = [machine for pair in pairs for machine in {places[pair[0]], places[pair[1]]}]
        assert len(machines) == len(set(machines))


def test_with_many_ranks_machines_meet_by_equal_local_ranks() -> None:
    places = [rank // 8 for rank in range(MANY_RANKS + 8)]
    pairs = [pair for round_ in schedule_pairs(places) for pair in round_]
    between = [(a, b) for a, b in pairs if places[a] != places[b]]
    assert len(pairs) - len(between) == 9 * 28
    assert sorted(between) == [
        (a, b)
        for a in range(72)
        for b in range(a + 1, 72)
        if places[a] != places[b] and a % 8 == b % 8
    ]


@pytest.mark.parametrize("ranks", ["rank", "machine"])
def test_the_line_of_a_finding_has_the_value_the_usual_and_a_remedy(ranks: str) -> None:
    machines = ["a", "a", "a"] if ranks == "rank" else ["a", "b", "c"]
    *_, bandwidth, latency = point_to_point_checks(
        measured(machines, noise=0.0, rate={(0, 2): 10.0}), machines
    )
    for check in (bandwidth, latency):
        assert check.check == ("rank 0 to rank 2" if ranks == "rank" else "a to c")
        assert check.verdict == "slow"
        assert check.remedy
    assert bandwidth.found == "bandwidth 100 MB/s; the median is 1 GB/s"
    assert latency.found == "latency 500 µs; the median is 50 µs"
