"""Loads of experts on the page of a run."""

from __future__ import annotations

import base64
import json
import re
import struct
import zlib
from pathlib import Path
from typing import Any

from report.run_directories import run_json, write

from lockstep.pages.heatmap import SHADES
from lockstep.report.experts import CELLS, expert_heatmaps
from lockstep.report.history import load_history
from lockstep.report.page import report_page
from lockstep.report.reader import read_runs


def row(step: int, **loads: list[Any]) -> dict[str, Any]:
    return {"step": step, "time": 1.0, "loads": loads}


def test_steps_that_a_resumed_run_repeats_count_once() -> None:
    found = load_history(
        [row(10, a=[1.0, 1.0]), row(20, a=[2.0, 0.0]), row(20, a=[0.5, 1.5], b=[1.0])]
    )
    assert found.steps == [10, 20]
    assert [list(each) for each in found.layers["a"]] == [[1.0, 1.0], [0.5, 1.5]]
    assert [list(each) for each in found.layers["b"]] == [[], [1.0]]


def test_a_row_is_an_expert_and_a_column_a_logging_step() -> None:
    loads = load_history([row(step, a=[step / 10, 2 - step / 10, 0.0]) for step in (10, 20)])
    (figure,) = expert_heatmaps(loads, index=3, last_step=20, title="run")
    assert figure.data["mean"] == {"load": [[1.0, 2.0], [1.0, 0.0], [0.0, 0.0]]}
    assert figure.data["ranks"] == ["expert 0", "expert 1", "expert 2"]
    assert 'data-heatmap="3"' in figure.html
    assert "Highest is expert 0, mean 1.5; lowest is expert 2, mean 0" in figure.html
    picture = re.search(r'<img src="data:image/png;base64,([^"]+)"', figure.html)
    assert picture is not None
    pixels = shades(base64.b64decode(picture[1]))
    assert pixels[0][1] == SHADES  # the highest load
    assert pixels[1][1] == pixels[2][0] == pixels[2][1] == 1  # nothing


def shades(file: bytes) -> list[list[int]]:
    """The palette indices of a PNG without filters."""
    width, height = struct.unpack(">II", file[16:24])
    at = file.index(b"IDAT")
    (length,) = struct.unpack(">I", file[at - 4 : at])
    data = zlib.decompress(file[at + 4 : at + 4 + length])
    rows = [data[line * (width + 1) + 1 : (line + 1) * (width + 1)] for line in range(height)]
    return [list(each) for each in rows]


def test_many_layers_share_the_cells_of_the_page() -> None:
    layers = {f"layer{place}": [1.0] * 300 for place in range(50)}
    loads = load_history([row(step, **layers) for step in range(1, 400)])
    figures = expert_heatmaps(loads, index=0, last_step=399, title="run")
    cells = [len(each.data["ranks"]) * each.data["columns"] for each in figures]
    assert sum(cells) <= CELLS
    assert min(cells) > 0
    assert figures[0].data["ranks"][0] == "experts 0–2, the largest load"


def test_the_page_has_a_heatmap_for_each_layer_behind_those_of_ranks(tmp_path: Path) -> None:
    run_json(tmp_path)
    write(tmp_path, "ranks.jsonl", [{"step": 10, "ranks": {"step": [0.1, 0.2]}}])
    rows = [row(10, first=[1.5, 0.5], second=[1.0, None]), {"step": 20, "loads": [1]}]
    write(tmp_path, "experts.jsonl", rows)
    text = report_page(read_runs([str(tmp_path)]), made=0.0)
    assert re.findall(r'data-heatmap="(\d)"', text) == ["0", "1", "2"]
    assert "load by expert: second" in text
    assert "1 lines of experts.jsonl are invalid" in text
    data = json.loads(text[text.index('<script type="application/json"') :].split(">")[1][:-8])
    assert [each["unit"] for each in data["heatmaps"]] == ["seconds", "", ""]


def test_a_run_without_experts_has_no_section(tmp_path: Path) -> None:
    run_json(tmp_path)
    assert ">Experts<" not in report_page(read_runs([str(tmp_path)]), made=0.0)
