"""Which links, ranks and machines are slower than the rest. Pure: from measurements between pairs to findings.

[Note: the rest] There is no speed that a link should have; but links of one kind should be alike. A node (a rank within its machine, a
machine among machines) is slow where even its best link is several times worse than other nodes' best ones. Where nodes are well, a link
is slow that is several times worse than the median of its kind. A machine that is slow both ways is named once, not with each of its links.
With two nodes there is nobody to compare with: only the two directions with one another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import Literal

from lockstep.doctor.line import Line, duration

TIMES_WORSE = 3.0
"""From so much on a link is slow."""
LATENCY_NOISE_SECONDS = 2e-4
"""Latencies that differ by less do not count: a processor that does something else for a moment does as much."""
MANY_RANKS = 64
"""With more, only ranks of the same number on their machines are tried between machines."""

Pair = tuple[int, int]
Measure = Literal["bandwidth", "latency"]


@dataclass(frozen=True, slots=True)
class Link:
    """From one rank to another."""

    sender: int
    receiver: int
    seconds: float
    """Latency: half of the best round trip of a few bytes."""
    bytes_per_second: float
    """The best of a few transfers."""
    kind: str
    """Links of one kind should be alike: `machines` between them, `NV18` or `PHB` within one where that is known, else `local`."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is slower than the rest."""

    what: Measure
    nodes: tuple[str, ...]
    """One: all its links, in the `direction`. Two: the link from the first to the second."""
    pairs: tuple[Pair, ...]
    """The ranks whose links show it."""
    value: float
    """Bytes a second, or seconds."""
    usual: float
    """The median of the links that are well."""
    direction: Literal["both", "from", "to"] = "both"


def pairs_in_rounds(places: Sequence[int]) -> list[list[Pair]]:
    """Every pair of ranks once, in rounds in which no machine is in two pairs, so that no link is measured beside another.

    `places[r]`: the machine of rank r. See `MANY_RANKS`.
    """
    size = len(places)
    order = [sum(place == places[rank] for place in places[:rank]) for rank in range(size)]
    rounds: list[list[Pair]] = []
    busy: list[set[int]] = []
    for one in range(size):
        for other in range(one + 1, size):
            machines = {places[one], places[other]}
            if size > MANY_RANKS and len(machines) == 2 and order[one] != order[other]:
                continue
            free = next((number for number, taken in enumerate(busy) if not taken & machines), len(rounds))
            if free == len(rounds):
                rounds.append([])
                busy.append(set())
            rounds[free].append((one, other))
            busy[free] |= machines
    return rounds


def judge(links: Iterable[Link], machines: Sequence[str]) -> list[Finding]:
    """What stands out. `machines[r]`: the name of rank r's machine."""
    links = list(links)
    found: list[Finding] = []
    both: tuple[Measure, ...] = ("bandwidth", "latency")
    for what in both:
        for kind in sorted({link.kind for link in links}):
            alike = [link for link in links if link.kind == kind]
            if kind == "machines":
                found += _outliers(alike, what, lambda rank: machines[rank])
            else:
                found += _outliers(alike, what, lambda rank: f"rank {rank}")
    return found


def _outliers(links: Sequence[Link], what: Measure, node: Callable[[int], str]) -> Iterator[Finding]:
    """Among links of one kind. `node`: what a rank belongs to. Costs are seconds a byte, or seconds: more is worse."""
    costs: dict[tuple[str, str], list[float]] = {}
    pairs: dict[tuple[str, str], list[Pair]] = {}
    for link in links:
        ends = node(link.sender), node(link.receiver)
        costs.setdefault(ends, []).append(1 / link.bytes_per_second if what == "bandwidth" else link.seconds)
        pairs.setdefault(ends, []).append((link.sender, link.receiver))
    cost = {ends: median_low(values) for ends, values in costs.items()}
    noise = LATENCY_NOISE_SECONDS if what == "latency" else 0.0
    sending, receiving = (_slow_nodes(cost, end, noise) for end in (0, 1))
    well = {ends: value for ends, value in cost.items() if ends[0] not in sending and ends[1] not in receiving}
    usual = median_low(well.values()) if well else 0.0

    def shown(value: float) -> float:
        return 1 / value if what == "bandwidth" else value

    for name in sorted(sending | receiving):
        direction: Literal["both", "from", "to"] = "both"
        if not (name in sending and name in receiving):
            direction = "from" if name in sending else "to"
        theirs = [ends for ends in cost if (ends[0] == name and name in sending) or (ends[1] == name and name in receiving)]
        value = median(cost[ends] for ends in theirs)
        yield Finding(what, (name,), tuple(pair for ends in theirs for pair in pairs[ends]), shown(value), shown(usual), direction)
    for ends, value in sorted(well.items()):
        if _is_worse(value, usual, noise):
            yield Finding(what, ends, tuple(pairs[ends]), shown(value), shown(usual), "from")


def _slow_nodes(cost: Mapping[tuple[str, str], float], end: int, noise: float) -> set[str]:
    """Nodes whose best link, as the sender (`end` 0) or the receiver (1), is worse than the others' best ones. With one link, none is."""
    theirs: dict[str, list[float]] = {}
    for ends, value in cost.items():
        theirs.setdefault(ends[end], []).append(value)
    best = {name: min(values) for name, values in theirs.items()}
    usual = median_low(best.values())
    return {name for name, value in best.items() if len(theirs[name]) > 1 and _is_worse(value, usual, noise)}


def _is_worse(value: float, usual: float, noise: float) -> bool:
    return value > TIMES_WORSE * usual and value - usual > noise


def lines_of(links: Sequence[Link], machines: Sequence[str]) -> list[Line]:
    """A line for each kind of link, and one for each finding."""
    findings = judge(links, machines)
    lines = []
    for kind in sorted({link.kind for link in links}):
        alike = [link for link in links if link.kind == kind]
        rates = [link.bytes_per_second for link in alike]
        text = (
            f"{len(alike)} links: {rate(median(rates))} ({rate(min(rates))} to {rate(max(rates))}), "
            f"{duration(median(link.seconds for link in alike))} (median)"
        )
        lines.append(Line(section="links", check=_KINDS.get(kind, f"within a machine, {kind}"), verdict="ok", found=text))
    lines += [_line(finding) for finding in findings]
    return lines


_KINDS = {"machines": "between machines", "local": "within a machine"}


def _line(finding: Finding) -> Line:
    amount = (rate if finding.what == "bandwidth" else duration)(finding.value)
    usual = (rate if finding.what == "bandwidth" else duration)(finding.usual)
    found = f"{finding.what} {amount}; the usual here is {usual}"
    is_rank = finding.nodes[0].startswith("rank ")
    if len(finding.nodes) == 1:
        way = {"both": "all its links", "from": "all that it sends", "to": "all that it receives"}[finding.direction]
        where, found = finding.nodes[0], f"{way}: {found}"
        remedy = (
            "its GPU's slot and links (nvidia-smi topo -m, nvidia-smi nvlink -s), or what else its processor does"
            if is_rank
            else f"look at {finding.nodes[0]}: its network card and cable, the negotiated speed (ethtool), the port, what else it does"
        )
    else:
        where = f"{finding.nodes[0]} to {finding.nodes[1]}"
        remedy = (
            "the link between the two (nvidia-smi nvlink -s, nvidia-smi topo -m), and what else runs there"
            if is_rank
            else "look at the way between the two: cable, switch port, negotiated speed (ethtool), route (tracepath), other traffic"
        )
    return Line(section="links", check=where, verdict="slow", found=found, remedy=remedy)


def rate(bytes_per_second: float) -> str:
    """1.31 GB/s."""
    for factor, unit in ((1e9, "GB/s"), (1e6, "MB/s")):
        if bytes_per_second >= 0.9995 * factor:  # which three digits make a whole one
            return f"{bytes_per_second / factor:.3g} {unit}"
    return f"{bytes_per_second / 1e3:.3g} kB/s"
