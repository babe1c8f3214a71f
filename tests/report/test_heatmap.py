"""Step times by rank and step, as cells and as colours."""

from __future__ import annotations

import math
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from report.run_directories import run_json, write

from lockstep.pages.heatmap import SHADES, color_limits, palette, png, shade
from lockstep.report.history import RankTimes, rank_times
from lockstep.report.page import report_page
from lockstep.report.ranks import CELLS, MOST_ROWS, mean_times, rank_bars, rank_heatmaps
from lockstep.report.reader import read_runs


def times(steps: list[int], took: Any, world: int = 2, hosts: list[str] | None = None) -> RankTimes:
    """`took`: seconds, of a step and a rank."""
    rows = [
        {
            "step": step,
            "ranks": {"step": [took(step, rank) for rank in range(world)]},
            "hosts": hosts or [],
        }
        for step in steps
    ]
    return rank_times(rows)


def heatmap_data(found: RankTimes, last_step: int) -> dict[str, Any]:
    return rank_heatmaps(found, index=0, last_step=last_step, title="run").data


def test_each_logging_step_is_a_column_where_there_is_room() -> None:
    data = heatmap_data(times([10, 20, 30, 40], lambda step, rank: step + rank / 10), 40)
    assert data["mean"] == {"step": [[10, 20, 30, 40], [10.1, 20.1, 30.1, 40.1]]}


def test_a_column_is_the_mean_of_its_lines_and_knows_the_longest() -> None:
    found = times(list(range(1, 3001)), lambda step, rank: 9.0 if step == 1500 else 1.0, world=1)
    data = heatmap_data(found, 3000)
    assert data["columns"] == 300
    (row,), column = data["mean"]["step"], 149  # steps 1491 to 1500
    assert row[column] == pytest.approx(1.8)
    assert data["most"][0][column] == 9
    assert [value for place, value in enumerate(row) if place != column] == [1.0] * 299


def test_steps_that_were_not_measured_are_empty_and_a_gap_belongs_to_the_line_behind_it() -> None:
    data = heatmap_data(times([10, 20, 60], lambda step, rank: float(step)), 100)
    assert data["mean"]["step"][0] == [10, 20, 60, 60, 60, 60, None, None, None, None]


def test_many_ranks_share_rows_in_which_the_slowest_counts() -> None:
    data = heatmap_data(
        times([10, 20], lambda step, rank: 5.0 if rank == 257 else 1.0, world=300), 20
    )
    names = data["ranks"]
    assert len(names) <= MOST_ROWS
    assert (names[0], names[-1]) == ("ranks 0–2, the slowest", "ranks 297–299, the slowest")
    rows = zip(names, data["mean"]["step"], strict=True)
    assert [name for name, row in rows if row[0] == 5] == ["ranks 255–257, the slowest"]
    assert len(names) * data["columns"] <= CELLS


def test_ranks_that_came_later_are_empty_before() -> None:
    found = rank_times(
        [{"step": step, "ranks": {"step": [1.0] * world}} for step, world in ((1, 1), (2, 3))]
    )
    assert heatmap_data(found, 2)["mean"]["step"] == [[1, 1], [None, 1], [None, 1]]
    assert [each["step"] for each in mean_times(found)] == [1.0] * 3


def test_colours_do_not_make_noise_look_like_a_difference() -> None:
    low, high = color_limits([[0.100, 0.101], [0.1005, 0.0995]])
    assert high - low == pytest.approx(0.02, rel=0.05)
    low, high = color_limits([[0.1] * 99 + [9.0]])
    assert high < 0.2
    assert shade(9.0, low, high) == SHADES
    assert shade(math.nan, low, high) == 0
    assert [shade(value, 1.0, 2.0) for value in (0.0, 1.0, 1.5, 2.0, 3.0)] == [
        1,
        1,
        32,
        SHADES,
        SHADES,
    ]
    assert color_limits([[math.nan]]) == (0.0, 1.0)


def test_the_picture_is_a_png_of_the_shades() -> None:
    rows = [[0, 1, 2], [3, 4, 63]]
    data = png(rows, palette(dark=False))
    found, place = {}, 8
    while place < len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        kind, body = data[place + 4 : place + 8], data[place + 8 : place + 8 + length]
        assert struct.unpack(">I", data[place + 8 + length : place + 12 + length]) == (
            zlib.crc32(kind + body),
        )
        found[kind], place = body, place + 12 + length
    assert struct.unpack(">IIBB", found[b"IHDR"][:10]) == (3, 2, 8, 3)
    assert len(found[b"PLTE"]) == 3 * (SHADES + 1)
    assert zlib.decompress(found[b"IDAT"]) == bytes([0, 0, 1, 2, 0, 3, 4, 63])
    light, dark = palette(dark=False)[3:], palette(dark=True)[3:]
    assert [light[at : at + 3] for at in range(0, len(light), 3)] == [
        dark[at : at + 3] for at in range(len(dark) - 3, -1, -3)
    ]
    brightness = [sum(light[at : at + 3]) for at in range(0, len(light), 3)]
    assert brightness == sorted(brightness, reverse=True)


def test_bars_are_of_the_ranks_whose_own_work_takes_longest() -> None:
    rows = [
        {
            "step": 1,
            "ranks": {
                "step": [1.0] * 20,
                "compute": [0.9 if rank >= 10 else 0.5 for rank in range(20)],
            },
            "hosts": ["a", "b"] * 10,
        }
    ]
    text = rank_bars(rank_times(rows))
    assert "16 of 20" in text
    assert text.count("<tr>") == 17
    assert all(f">{rank} · {'ab'[rank % 2]}<" in text for rank in range(10, 20))


@pytest.mark.parametrize(
    "said",
    [{}, {"step": []}, {"step": [None, None]}, {"compute": [0.1]}, {"step": [0.0], "data": [0.0]}],
    ids=str,
)
def test_a_page_can_be_made_of_whatever_was_measured(tmp_path: Path, said: dict[str, Any]) -> None:
    run_json(tmp_path)
    write(tmp_path, "ranks.jsonl", [{"step": 10, "ranks": said}])
    text = report_page(read_runs([str(tmp_path)]), made=0.0)
    assert text.count("data-heatmap=") == sum(map(bool, said.values()))
    assert "nan" not in text[text.index("</style>") : text.index('<script type="application/json"')]
