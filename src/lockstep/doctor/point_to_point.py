"""Finds slow links, ranks and machines in measurements between pairs of ranks.

Links of one kind should have similar speeds. A node is a rank of a machine, or a machine. A node is
slow if even its best link is several times worse than the best links of other nodes. A link between
two nodes that are not slow is slow if it is several times worse than the median. A slow machine is
named once, not once for each of its links.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median, median_low
from typing import Literal, get_args

from lockstep.doctor.check_result import CheckResult, format_bandwidth, format_seconds

SLOW_FACTOR = 3.0
"""A link is slow if it is this many times worse than the median of its kind."""
LATENCY_NOISE_SECONDS = 2e-4
"""Latency differences below this are ignored."""
MANY_RANKS = 64
"""With more ranks than this, only ranks with equal local ranks are measured between machines."""

Pair = tuple[int, int]
Metric = Literal["bandwidth", "latency"]


@dataclass(frozen=True, slots=True)
class PairMeasurement:
    sender: int
    receiver: int
    latency_seconds: float
    """Half of the shortest round trip of a small message."""
    bytes_per_second: float
    kind: str
    """`machines` for a link between machines. Within a machine, the link's name such as `NV18` or
    `PHB`, or `local`."""


@dataclass(frozen=True, slots=True)
class Outlier:
    metric: Metric
    nodes: tuple[str, ...]
    """One name stands for all links of a node. Two names stand for the link from the first node to
    the second."""
    pairs: tuple[Pair, ...]
    value: float
    normal: float
    direction: Literal["both", "from", "to"] = "both"


def schedule_pairs(machine_of_rank: Sequence[int]) -> list[list[Pair]]:
    """Return rounds of pairs. Each machine is in at most one pair of a round, so the pairs share no
    link."""
    size = len(machine_of_rank)
    local_ranks = [machine_of_rank[:rank].count(machine_of_rank[rank]) for rank in range(size)]
    rounds: list[list[Pair]] = []
    busy: list[set[int]] = []
    for one, other in combinations(range(size), 2):
        machines = {machine_of_rank[one], machine_of_rank[other]}
        if size > MANY_RANKS and len(machines) == 2 and local_ranks[one] != local_ranks[other]:
            continue
        taken = (number for number, each in enumerate(busy) if not each & machines)
        if (free := next(taken, len(rounds))) == len(rounds):
            rounds.append([])
            busy.append(set())
        rounds[free].append((one, other))
        busy[free] |= machines
    return rounds


def find_outliers(
    measurements: Iterable[PairMeasurement], machines: Sequence[str]
) -> list[Outlier]:
    measurements = list(measurements)
    outliers: list[Outlier] = []
    for metric in get_args(Metric):
        for kind in sorted({each.kind for each in measurements}):
            same_kind = [each for each in measurements if each.kind == kind]
            node = machines.__getitem__ if kind == "machines" else "rank {}".format
            outliers += _outliers(same_kind, metric, node)
    return outliers


def _outliers(
    measurements: Sequence[PairMeasurement], metric: Metric, node: Callable[[int], str]
) -> Iterator[Outlier]:
    """Find outliers in measurements of one kind of link. `node` returns the name of a rank's
    node."""
    costs: dict[tuple[str, str], list[float]] = {}
    pairs: dict[tuple[str, str], list[Pair]] = {}
    for each in measurements:
        ends = node(each.sender), node(each.receiver)
        value = 1 / each.bytes_per_second if metric == "bandwidth" else each.latency_seconds
        costs.setdefault(ends, []).append(value)
        pairs.setdefault(ends, []).append((each.sender, each.receiver))
    cost = {ends: median_low(values) for ends, values in costs.items()}
    noise = LATENCY_NOISE_SECONDS if metric == "latency" else 0.0
    sending, receiving = (_slow_nodes(cost, end, noise) for end in (0, 1))
    slow = [ends for ends in cost if ends[0] in sending or ends[1] in receiving]
    others = {ends: value for ends, value in cost.items() if ends not in slow}
    normal = median_low(others.values()) if others else 0.0

    def to_metric(value: float) -> float:
        return 1 / value if metric == "bandwidth" else value

    for name in sorted(sending | receiving):
        direction: Literal["both", "from", "to"] = "both"
        if not (name in sending and name in receiving):
            direction = "from" if name in sending else "to"
        own = [
            ends
            for ends in slow
            if (ends[0] == name and name in sending) or (ends[1] == name and name in receiving)
        ]
        value = to_metric(median(cost[ends] for ends in own))
        own_pairs = tuple(pair for ends in own for pair in pairs[ends])
        yield Outlier(metric, (name,), own_pairs, value, to_metric(normal), direction)
    for ends, value in sorted(others.items()):
        if _is_worse(value, normal, noise):
            values = to_metric(value), to_metric(normal)
            yield Outlier(metric, ends, tuple(pairs[ends]), *values, "from")


def _slow_nodes(cost: Mapping[tuple[str, str], float], end: int, noise: float) -> set[str]:
    """Return the nodes whose best link is much worse than the best links of other nodes."""
    by_node: dict[str, list[float]] = {}
    for ends, value in cost.items():
        by_node.setdefault(ends[end], []).append(value)
    best = {name: min(values) for name, values in by_node.items()}
    normal = median_low(best.values())
    return {
        name
        for name, value in best.items()
        if len(by_node[name]) > 1 and _is_worse(value, normal, noise)
    }


def _is_worse(value: float, normal: float, noise: float) -> bool:
    return value > SLOW_FACTOR * normal and value - normal > noise


def point_to_point_checks(
    measurements: Sequence[PairMeasurement], machines: Sequence[str]
) -> list[CheckResult]:
    results = []
    for kind in sorted({each.kind for each in measurements}):
        same_kind = [each for each in measurements if each.kind == kind]
        rates = [each.bytes_per_second for each in same_kind]
        middle, lowest, highest = (
            format_bandwidth(statistic(rates)) for statistic in (median, min, max)
        )
        latency = format_seconds(median(each.latency_seconds for each in same_kind))
        text = f"{len(same_kind)} links: {middle} ({lowest} to {highest}), {latency} (median)"
        check = _KINDS.get(kind, f"within a machine, {kind}")
        results.append(CheckResult("point-to-point", check, "ok", text))
    return results + [_outlier_check(outlier) for outlier in find_outliers(measurements, machines)]


_KINDS = {"machines": "between machines", "local": "within a machine"}


def _outlier_check(outlier: Outlier) -> CheckResult:
    shown = format_bandwidth if outlier.metric == "bandwidth" else format_seconds
    text = f"{outlier.metric} {shown(outlier.value)}; the median is {shown(outlier.normal)}"
    name, is_rank = outlier.nodes[0], outlier.nodes[0].startswith("rank ")
    if len(outlier.nodes) == 1:
        links = {
            "both": "all its links",
            "from": "everything it sends",
            "to": "everything it receives",
        }
        check, text = name, f"{links[outlier.direction]}: {text}"
        remedy = (
            f"look at {name}: network card, cable, negotiated speed (ethtool), switch port, other"
            " load"
        )
        if is_rank:
            remedy = (
                "look at its GPU's slot and links (nvidia-smi topo -m, nvidia-smi nvlink -s), and"
                " at other load on its processor"
            )
    else:
        check = f"{name} to {outlier.nodes[1]}"
        remedy = (
            "look at the path between the two: cable, switch port, negotiated speed (ethtool),"
            " route (tracepath), other traffic"
        )
        if is_rank:
            remedy = (
                "look at the link between the two (nvidia-smi nvlink -s, nvidia-smi topo -m), and"
                " at other load on it"
            )
    return CheckResult("point-to-point", check, "slow", text, remedy)
