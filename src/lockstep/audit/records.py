"""Reads the records that the probes wrote, without torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.evidence.rows import Row, read_row_file

UNKNOWN = -1


@dataclass(slots=True)
class Rank:
    """The record of one rank: rows (JSON objects, one for each event) in order."""

    rank: int
    rows: list[Row] = field(default_factory=list)

    def of(self, *kinds: str) -> list[Row]:
        return [row for row in self.rows if row["kind"] in kinds]

    @property
    def steps(self) -> list[Row]:
        return self.of("step")

    @property
    def has_ended(self) -> bool:
        return bool(self.of("end"))


@dataclass(slots=True)
class Records:
    ranks: list[Rank] = field(default_factory=list)
    fetches: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def steps(self) -> int:
        taken = [max(row["index"] + 1 for row in rank.steps) for rank in self.ranks if rank.steps]
        return min(taken, default=0)

    @property
    def joined_at(self) -> float:
        """The first row that is inside torch's `Join`, in which ranks may take different numbers of
        steps. Infinite without `Join`."""
        return min(
            (row["place"] for rank in self.ranks for row in rank.of("join")), default=math.inf
        )

    def together(self) -> Iterator[list[Row]]:
        by_rank = [
            {(row["optimizer"], row["index"]): row for row in rank.steps} for rank in self.ranks
        ]
        joined = self.joined_at
        for key in by_rank[0] if by_rank else []:
            if all(key in rows and rows[key]["place"] < joined for rows in by_rank):
                yield [rows[key] for rows in by_rank]


def first_line(rows: Iterable[Row], name: str = "line") -> str:
    return next((str(row[name]) for row in rows), "")


def read_records(folder: Path) -> Records:
    """Read the record of each rank. If several processes claim one rank, keep the process that took
    steps."""
    files = [
        rows for path in sorted(folder.glob("process-*.jsonl")) if (rows := read_row_file(path))
    ]
    ranks: dict[int, Rank] = {}
    by_pid: dict[int, int] = {}
    others = []
    for rows in files:
        joined = (row["rank"] for row in rows if row["kind"] == "rank")
        number = next(joined, rows[0].get("rank"))
        if number is not None and any(row["kind"] in ("rank", "step", "backward") for row in rows):
            kept = ranks.setdefault(int(number), Rank(int(number)))
            if len(rows) > len(kept.rows):
                kept.rows = rows
            by_pid[rows[0]["pid"]] = int(number)
        else:
            others.append(rows)
    records = Records([ranks[number] for number in sorted(ranks)])
    for rank in records.ranks:
        for place, row in enumerate(rank.rows):
            row["place"] = place
    number_loaders(records.ranks)
    owned: list[tuple[int | None, list[Row]]] = [(each.rank, each.rows) for each in records.ranks]
    owned += [(by_pid.get(rows[0]["parent"], rows[0].get("rank")), rows) for rows in others]
    records.fetches = [
        row | {"rank": int(owner), "pid": rows[0]["pid"]}
        for owner, rows in owned
        for row in rows
        if owner is not None and row["kind"] == "fetch"
    ]
    records.problems = [
        f"{row['where']}: {row['text']}"
        for rows in files
        for row in rows
        if row["kind"] == "problem"
    ]
    return records


def number_loaders(ranks: Sequence[Rank]) -> None:
    """Renumber the DataLoaders. Loaders that one line of the script made get the same number on all
    ranks."""
    numbers: dict[tuple[str, int], int] = {}
    for rank in ranks:
        made: Counter[str] = Counter()
        own: dict[int, int] = {}
        for row in rank.of("pass"):
            if row["loader"] not in own:
                key = (row["line"], made[row["line"]])
                made[row["line"]] += 1
                own[row["loader"]] = numbers.setdefault(key, len(numbers))
        for row in rank.rows:
            if row.get("loader") is not None:
                row["loader"] = own.get(row["loader"], UNKNOWN)
            if "passes" in row:
                row["passes"] = [(own.get(loader, UNKNOWN), each) for loader, each in row["passes"]]


def training_passes(rows: Sequence[Row]) -> set[tuple[int, int]]:
    """Return the (loader, pass) pairs whose batches were trained on."""
    backwards = [row for row in rows if row["kind"] == "backward"]
    counts = Counter(tuple(place) for row in backwards for place in row["passes"])
    last = {(row["loader"], row["pass_number"]) for row in backwards if row["loader"] is not None}
    return last | {place for place, count in counts.items() if count > 1}
