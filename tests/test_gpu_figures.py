"""The figures of a GPU on the page are those of the file that the benchmark wrote."""

from __future__ import annotations

import json
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest

PROJECT = Path(__file__).parents[1]
PAGE = run_path(str(PROJECT / "benchmarks" / "gpu" / "page.py"))
FIGURES = PROJECT / "benchmarks" / "gpu_figures" / "2026-11-27-h200-2.jsonl"


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in FIGURES.read_text(encoding="utf-8").splitlines()]


def test_the_page_has_the_figures_of_the_file(rows: list[dict[str, Any]]) -> None:
    assert PAGE["section"](rows) in (PROJECT / "docs" / "performance.md").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize(("device", "is_shown"), [("H200", True), ("H100", False)])
def test_a_forecast_is_beside_what_was_measured_only_if_it_is_of_that_device(
    rows: list[dict[str, Any]], device: str, is_shown: bool
) -> None:
    for row in rows:
        for found in row.get("found", []):
            if found["what"] == "lockstep plan" and "plans" in found:
                found["device"] = device
    assert ("predicted: ms" in PAGE["section"](rows)) is is_shown
