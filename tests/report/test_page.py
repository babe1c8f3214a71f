"""The page as text: what is on it, of which runs, and that it asks for nothing else."""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Mapping
from html.parser import HTMLParser
from importlib.resources import files
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import run_files
from hypothesis import given, strategies as st
from report.run_directories import event, metrics, run_json, whole, write

from lockstep.pages.chart import COLOURS
from lockstep.report.events import MAX_ROWS, event_details, group_consecutive
from lockstep.report.page import report_page, run_charts
from lockstep.report.reader import read_runs
from lockstep.report.repetitions import repeated_runs
from lockstep.report.tables import report_json, report_lines, run_differences


def made(*folders: Path) -> str:
    return report_page(read_runs([str(folder) for folder in folders]), made=0.0)


def data_of(text: str) -> dict[str, Any]:
    (found,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.DOTALL
    )
    data: dict[str, Any] = json.loads(found)
    return data


class Balanced(HTMLParser):
    """Fails where an element is not closed, or another is."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "img", "source", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words += data


def words(text: str) -> str:
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    return parser.words


def test_the_page_of_a_run_has_all_that_is_known_of_it(tmp_path: Path) -> None:
    whole(tmp_path / "a", world=16)
    text = made(tmp_path / "a")
    said = words(text)
    titles = re.findall(r'<span class="title">(.*?)</span>', text)
    assert titles[:10] == [
        *(
            "loss",
            "loss/ce",
            "loss/balance",
            "learning rate",
            "gradient norm",
            "accuracy, evaluation",
        ),
        *("samples/s", "weight/s", "MFU", "memory, peak so far"),
    ]
    assert titles[10:] == [
        *(
            "step time, mean of ranks",
            "step time by rank",
            *(f"step time by rank: {phase}" for phase in ("data", "compute", "communication")),
        ),
        "time since the start",
    ]
    for told in (
        "attempts2",
        "something-new",
        "of a later version",
        "NVIDIA H100",
        "train.py --lr 3e-4",
        "rank 11 was killed",
        "3 not finite",
    ):
        assert told in said
    assert "Differences" not in said
    assert "epochs" not in said
    assert text.count('role="img" aria-label="') == 11 + 4 + 1
    assert "loss over steps. training: 100 values, first " in text


def test_it_asks_for_no_other_file_and_runs_only_its_own_script(tmp_path: Path) -> None:
    name = "</script><script>alert(1)</script>"
    run_json(tmp_path / "a", recipe={"model": name})
    write(tmp_path / "a", "metrics.jsonl", [{"step": 1, "time": 0.0, name: 1.0, 'loss/"><i': 2.0}])
    write(
        tmp_path / "a",
        "events.jsonl",
        [event(0, name, 1, reason=name), event(1, "run-failed", 1, error=name)],
    )
    text = made(tmp_path / "a")
    assert not re.findall(r'(?:src|href|srcset)="(?!data:)', text)
    assert not re.search("https?:", text)
    assert text.count("<script") == 2
    assert "default-src 'none'" in text
    words(text)
    assert data_of(text)["charts"][0]["lines"][0]["steps"] == [1]


def test_a_run_without_a_single_number_has_a_page(tmp_path: Path) -> None:
    run_json(tmp_path / "a")
    write(tmp_path / "a", "metrics.jsonl", [])
    said = words(made(tmp_path / "a"))
    assert "The run has not reached a logging step." in said
    assert "No events were recorded." in said
    assert "interrupted" in said
    write(
        tmp_path / "a",
        "events.jsonl",
        [
            event(0, "run-started", 0),
            event(0.5, "run-failed", 1, error="LossError: the loss is nan"),
        ],
    )
    said = words(made(tmp_path / "a"))
    assert "LossError: the loss is nan" in said
    assert "1 of 1,000" in said


def test_values_that_are_all_nan_are_a_chart_that_says_so(tmp_path: Path) -> None:
    run_json(tmp_path / "a")
    rows = [
        {"step": step, "time": float(step), "loss": None, "not_finite": {"loss": "nan"}}
        for step in range(1, 2001)
    ]
    write(tmp_path / "a", "metrics.jsonl", rows)
    text = made(tmp_path / "a")
    assert "2,000 not finite" in words(text)
    assert "training: 2000 values, none of them finite." in text
    assert not re.search(r'd="[^"]*nan', text)
    assert set(data_of(text)["charts"][0]["lines"][0]["mean"]) == {"nan"}


ANYTHING = st.lists(
    st.floats() | st.sampled_from([0.0, 1e-320, 1.7e308, -1.7e308, 3.4e38, 1e-45]), max_size=8
)


@given(ANYTHING, ANYTHING)
def test_any_numbers_make_a_page(loss: list[float], memory: list[float]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_json(Path(folder))
        rows = [{"step": step, "time": 0.0, "loss": value} for step, value in enumerate(loss, 1)]
        write(
            Path(folder),
            "metrics.jsonl",
            [
                *rows,
                *(
                    {"step": 9 + step, "time": 1.0, "memory_bytes": each}
                    for step, each in enumerate(memory)
                ),
            ],
        )
        text = made(Path(folder))
    words(text)
    assert not re.search(r'd="[^"]*(nan|inf)', text)


def test_several_runs_share_axes_and_what_differs_is_told(tmp_path: Path) -> None:
    whole(tmp_path / "a", steps=1000)
    whole(tmp_path / "b", steps=2000, seed=1, global_batch=128)
    later = json.loads((tmp_path / "b" / "run.json").read_text()) | {
        "started": "2026-09-22T14:13:20+00:00"
    }
    (tmp_path / "b" / "run.json").write_text(json.dumps(later))
    runs = read_runs([str(tmp_path / "a"), str(tmp_path / "b")])
    assert run_differences(runs) == [
        ("Recipe", "global_batch", [64, 128]),
        ("Recipe", "steps", [1000, 2000]),
    ]
    assert report_json(runs)["differences"][0]["values"] == [64, 128]
    text = report_page(runs, made=0.0)
    data = data_of(text)
    assert data["last"] == 2000
    assert [line["name"] for line in data["charts"][0]["lines"]] == [
        "a",
        "a, evaluation",
        "b",
        "b, evaluation",
    ]
    assert "The Plan is the same." not in text
    assert "The plan is the same." in words(text)
    assert "bit for bit" not in text
    again = run_files.result(tmp_path / "b") | {"fingerprint": "0" * 64}
    (tmp_path / "b" / "result.json").write_text(json.dumps(again))
    assert "The same model, bit for bit: a, b." in words(made(tmp_path / "a", tmp_path / "b"))


def ended(
    folder: Path,
    loss: float,
    *,
    plan: Mapping[str, Any] | None = None,
    fingerprint: str = "",
    rate: float = 1e-3,
    **recipe: Any,
) -> None:
    run_json(folder, plan=plan, recipe=recipe)
    rows = [
        {"step": 10, "time": 1.0, "loss": loss, "lr": rate, "samples_per_second": 1.0},
        {"step": 10, "time": 1.0, "evaluation/f1": loss / 2},
    ]
    write(folder, "metrics.jsonl", rows)
    (folder / "result.json").write_text(
        json.dumps({"steps": 10, "fingerprint": fingerprint or folder.name})
    )


def test_runs_that_repeat_a_recipe_have_a_mean_and_a_deviation(tmp_path: Path) -> None:
    for fold, loss in enumerate((1.0, 2.0, 6.0)):
        ended(
            tmp_path / f"fold{fold}",
            loss,
            data=f"Subset[{80 + fold}]",
            parameters={"fold": fold, "width": 8},
        )
    ended(
        tmp_path / "again",
        1.0,
        data="Subset[80]",
        parameters={"fold": 0, "width": 8},
        fingerprint="fold0",
    )
    ended(tmp_path / "wider", 9.0, parameters={"fold": 0, "width": 9})
    ended(tmp_path / "faster", 9.0, rate=1e-2, parameters={"fold": 0, "width": 8})
    ended(
        tmp_path / "sharded",
        9.0,
        plan={"replicate": 1, "shard": 2},
        parameters={"fold": 0, "width": 8},
    )
    run_json(tmp_path / "unfinished", recipe={"parameters": {"fold": 3, "width": 8}})
    runs = read_runs(
        [
            str(path)
            for path in sorted(
                tmp_path.iterdir(), key=lambda path: (not path.name.startswith("fold"), path.name)
            )
        ]
    )
    (group,) = repeated_runs(runs)
    assert [run.name for run in group.runs] == ["fold0", "fold1", "fold2"]
    assert group.statistics() == {
        "loss": (3.0, pytest.approx(7**0.5)),
        "evaluation/f1": (1.5, pytest.approx(7**0.5 / 2)),
    }
    assert report_json(runs)["groups"] == [
        {
            "runs": ["fold0", "fold1", "fold2"],
            "metrics": {
                "loss": {"mean": 3.0, "sample_std": pytest.approx(7**0.5)},
                "evaluation/f1": {"mean": 1.5, "sample_std": pytest.approx(7**0.5 / 2)},
            },
        }
    ]
    assert (
        report_lines(runs)[-1]
        == "3 runs (fold0, fold1, fold2), mean ± sample std: loss 3 ± 2.646, evaluation f1 1.5 ±"
        " 1.323"
    )
    said = words(report_page(runs, made=0.0))
    assert "3 ± 2.646" in said
    assert "divided by n − 1" in said
    assert "Mean of repeated runs" not in words(report_page(runs[:1], made=0.0))


def test_one_term_that_is_the_loss_is_not_shown_twice(tmp_path: Path) -> None:
    run_json(tmp_path / "a")
    write(
        tmp_path / "a",
        "metrics.jsonl",
        [{"step": step, "time": 0.0, "loss": 1.0, "loss/ce": 1.0} for step in (1, 2)],
    )
    learning, _ = run_charts(read_runs([str(tmp_path / "a")]))
    assert [(chart.title, chart.note) for chart in learning] == [("loss", "one term, ce")]
    write(
        tmp_path / "a",
        "metrics.jsonl",
        [{"step": step, "time": 0.0, "loss": 1.0, "loss/ce": 2.0} for step in (1, 2)],
    )
    learning, _ = run_charts(read_runs([str(tmp_path / "a")]))
    assert [chart.title for chart in learning] == ["loss", "loss/ce"]


def test_a_long_run_is_a_page_of_bounded_size(tmp_path: Path) -> None:
    sizes = []
    for steps, more in ((300, 0), (5_000, 0), (500, 300)):
        run_json(tmp_path / f"{steps}-{more}")
        write(
            tmp_path / f"{steps}-{more}", "metrics.jsonl", metrics(range(1, steps + 1), more=more)
        )
        sizes.append(len(made(tmp_path / f"{steps}-{more}")))
    assert sizes[1] < 5 * sizes[0]
    assert sizes[2] < 5_000_000


def test_a_table_of_many_events_leaves_out_the_middle_and_says_so(tmp_path: Path) -> None:
    run_json(tmp_path / "a")
    kinds = ("checkpoint-saved", "step-skipped")
    write(
        tmp_path / "a", "events.jsonl", [event(step, kinds[step % 2], step) for step in range(1000)]
    )
    text = made(tmp_path / "a")
    assert f"{1000 - MAX_ROWS:,} more, in events.jsonl" in words(text)
    assert text.count('<td class="kind">') == MAX_ROWS
    assert len(re.findall(r'data-tip="', text)) < 600


def test_events_of_one_kind_are_told_together_unless_they_are_grave(tmp_path: Path) -> None:
    run_json(tmp_path / "a")
    kinds = ["checkpoint-saved", "checkpoint-saved", "hang", "hang", "checkpoint-saved"]
    write(
        tmp_path / "a",
        "events.jsonl",
        [event(place, kind, place, reason="r", it_was=place) for place, kind in enumerate(kinds)],
    )
    (run,) = read_runs([str(tmp_path / "a")])
    assert [len(group.events) for group in group_consecutive(run.events)] == [2, 1, 1, 1]
    assert event_details(run.events[1]) == "r, it was 1"


def test_json_says_the_same_for_programs(tmp_path: Path) -> None:
    whole(tmp_path / "a", world=4)
    (said,) = json.loads(
        json.dumps(report_json(read_runs([str(tmp_path / "a")])), allow_nan=False)
    )["runs"]
    assert (said["state"], said["steps"], said["attempts"], said["world_size"]) == (
        "ended",
        1000,
        2,
        4,
    )
    assert (said["series"]["gradient_norm"]["not_finite"], said["series"]["loss"]["last_step"]) == (
        3,
        1000,
    )
    assert [each["host"] for each in said["ranks"]] == ["node0"] * 4
    assert said["events"][0] == {
        "time": 1_790_000_000.0,
        "event": "run-started",
        "step": 0,
        "plan": "replicate=1,shard=4,numerics=fast",
        "world_size": 4,
    }


CVD = {
    "protan": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deutan": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritan": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
    "none": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
}
"""How colours are seen, on linear red, green and blue (Machado, Oliveira and Fernandes, 2009)."""


def themes() -> list[dict[str, str]]:
    """The colours of page.css, light and dark."""
    blocks = re.findall(
        r":root \{(.*?)\}",
        files("lockstep.pages").joinpath("page.css").read_text(),
        flags=re.DOTALL,
    )
    return [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in blocks]


def linear(colour: str) -> list[float]:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def luminance(colour: str) -> float:
    return sum(
        severity * part
        for severity, part in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True)
    )


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def seen(colour: str, matrix: tuple[tuple[float, ...], ...]) -> list[float]:
    """Lightness and two opponents, as in CIELAB."""
    red, green, blue = (
        min(1.0, max(0.0, sum(m * part for m, part in zip(row, linear(colour), strict=True))))
        for row in matrix
    )
    x, y, z = (
        0.4124 * red + 0.3576 * green + 0.1805 * blue,
        0.2126 * red + 0.7152 * green + 0.0722 * blue,
        0.0193 * red + 0.1192 * green + 0.9505 * blue,
    )
    x, y, z = (
        part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116
        for part in (x / 0.9505, y, z / 1.089)
    )
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)]


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_words_and_lines_stand_out_from_their_ground(theme: int) -> None:
    colours = themes()[0] | themes()[theme]
    for name in ("text", "faint", "good", "bad", "warn", "live"):
        assert contrast(colours[name], colours["card"]) >= 4.5, name
        assert contrast(colours[name], colours["ground"]) >= 4.5, name
    for number in range(COLOURS):
        assert contrast(colours[f"line-{number}"], colours["card"]) >= 3, number


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("kind", CVD)
def test_colours_of_lines_are_told_apart_by_everybody(theme: int, kind: str) -> None:
    colours = themes()[theme]
    for one, other in combinations(range(COLOURS), 2):
        apart = (
            sum(
                (a - b) ** 2
                for a, b in zip(
                    *(seen(colours[f"line-{each}"], CVD[kind]) for each in (one, other)),
                    strict=True,
                )
            )
            ** 0.5
        )
        assert apart >= (20 if max(one, other) < 4 else 12), (one, other, apart)


def memory_json(folder: Path, *peaks: int | None) -> None:
    """Ranks with these peaks; None: torch did not count."""
    causes = ("parameters", "gradients", "optimizer state", "activations", "rest")
    ranks = [
        None if peak is None else {
            "seconds": [0.0, 0.01, 0.02],
            "bytes_by_cause": {cause: [1000, peak - 4000 if cause == "activations" else 1000,
            1000] for cause in causes},
            "peak_bytes": peak, "peak_seconds": 0.01, "peak_phase": "backward",
            "at_peak": {cause: peak - 4000 if cause == "activations" else 1000 for cause in causes},
            "largest": [[peak - 4000, "activations", f"output of <layer> of {rank} 4x4 float32"]],
        }
        for rank, peak in enumerate(peaks)
    ]  # fmt: skip
    write(folder / "profile", "memory.json", [{"steps": [10, 13], "ranks": ranks}])


def test_the_memory_of_the_profiled_steps_is_drawn_by_rank_and_cause(tmp_path: Path) -> None:
    whole(tmp_path / "a", world=2)
    memory_json(tmp_path / "a", 2_000_000, None, 3_000_000)
    text = made(tmp_path / "a")
    assert re.findall(r'<span class="title">(memory of .*?)</span>', text) == [
        "memory of rank 0",
        "memory of rank 2",
    ]
    said = words(text)
    assert "Memory at the peak of steps 10 to 12" in said
    assert "The largest at the peak of rank 2" in said
    assert "3 MBactivationsoutput of <layer> of 2 4x4 float32" in said
    assert "10 ms, backward" in said
    assert "peak 3 MB" in said
    chart = next(each for each in data_of(text)["charts"] if "microseconds" in each)
    assert chart["microseconds"] == 20_000
    assert [line["name"] for line in chart["lines"]] == [
        "all",
        "parameters",
        "gradients",
        "optimizer state",
        "activations",
        "rest",
    ]
    assert chart["lines"][0]["mean"] == [5000, 2e6, 5000]
    assert chart["lines"][0]["steps"] == [0, 10_000, 20_000]
    assert "minimum 5,000 at 0, maximum 2,000,000 at 10 ms." in text


def test_of_many_ranks_those_with_the_highest_peaks_are_drawn(tmp_path: Path) -> None:
    whole(tmp_path / "a", world=2)
    memory_json(tmp_path / "a", *(10_000 + 1000 * (rank % 10) for rank in range(20)))
    text = made(tmp_path / "a")
    drawn = re.findall(r'<span class="title">memory of rank (.*?)</span>', text)
    assert drawn == ["6", "7", "8", "9", "16", "17", "18", "19"]
    assert text.count("10 ms, backward") == 20


def test_a_memory_profile_of_another_form_is_left_out_and_told(tmp_path: Path) -> None:
    whole(tmp_path / "a", world=2)
    for content in (
        "{",
        "[]",
        '{"steps": [1, 2], "ranks": [{"seconds": [0]}]}',
        '{"steps": [1], "ranks": []}',
    ):
        (tmp_path / "a" / "profile").mkdir(exist_ok=True)
        (tmp_path / "a" / "profile" / "memory.json").write_text(content)
        text = made(tmp_path / "a")
        assert "1 lines of profile/memory.json are invalid" in words(text)
        assert 'id="memory"' not in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seconds", [0.0, 0.01, 1e14]),
        ("seconds", [0.0, 0.02, 0.01]),
        ("seconds", [-1.0, 0.01, 0.02]),
        ("bytes_by_cause", {}),
        ("bytes_by_cause", {"rest": [1, 10**400, 1]}),
        ("bytes_by_cause", {"rest": [1, -5, 1]}),
        pytest.param("peak_bytes", 10**400, id="peak_bytes"),
        ("peak_seconds", math.nan),
        ("at_peak", {"rest": 10**400}),
        ("largest", [[10**400, "rest", "a"]]),
    ],
)
def test_a_memory_profile_with_numbers_that_no_run_writes_is_left_out_and_told(
    name: str, value: Any, tmp_path: Path
) -> None:
    whole(tmp_path / "a", world=2)
    memory_json(tmp_path / "a", 20_000)
    file = tmp_path / "a" / "profile" / "memory.json"
    profile = json.loads(file.read_text())
    rank = profile["ranks"][0] | {name: value}
    if name == "at_peak":
        rank["bytes_by_cause"] = {"rest": [1, 1, 1]}
    file.write_text(json.dumps(profile | {"ranks": [rank]}))
    text = made(tmp_path / "a")
    assert "1 lines of profile/memory.json are invalid" in words(text)
    assert 'id="memory"' not in text


def planted(value: Any, number: list[int]) -> Any:
    """A value of JSON with a tag and control codes in each text and name, if a run may write
    another there."""
    if isinstance(value, dict):
        return {
            f"{name}" if name in KEPT else f"{name}{tag(number)}": planted(each, number)
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [planted(each, number) for each in value]
    return f"{value}{tag(number)}" if isinstance(value, str) and value not in KEPT else value


def tag(number: list[int]) -> str:
    number[0] += 1
    return f"\"'><planted-{number[0]}>\x1b]0;\x07\u202e"


KEPT = {
    *(
        "recipe",
        "plan",
        "environment",
        "text",
        "device",
        "name",
        "host",
        "command_line",
        "working_directory",
        "world_size",
        "steps",
    ),
    *(
        "fingerprint",
        "best",
        "metric",
        "value",
        "step",
        "checkpoint",
        "metrics",
        "time",
        "ranks",
        "hosts",
        "event",
        "not_finite",
    ),
    *(
        "reason",
        "error",
        "seconds",
        "bytes_by_cause",
        "at_peak",
        "largest",
        "peak_bytes",
        "peak_seconds",
        "peak_phase",
        "pid",
    ),
    *(
        "inf",
        "run-started",
        "run-failed",
        "rescued",
        "restarted",
        "resumed",
        "run-ended",
        "compute",
        "data",
        "communication",
    ),
}
"""Names and texts that mean something to the report."""


def test_no_text_of_a_run_is_a_tag_or_a_control_code(tmp_path: Path) -> None:
    number = [0]
    for name in ("a", "b"):
        folder = tmp_path / f"{name}<planted-0>"
        whole(folder, steps=60, every=10, world=9)
        result = run_files.result(folder)
        result |= {
            "best": {"metric": "loss", "value": 1.0, "step": 3, "checkpoint": "x"},
            "fingerprint": "f" * 8,
        }
        (folder / "result.json").write_text(json.dumps(planted(result, number)))
        (folder / "run.json").write_text(
            json.dumps(planted(json.loads((folder / "run.json").read_text()), number))
        )
        for file in ("metrics.jsonl", "ranks.jsonl", "events.jsonl"):
            rows = run_files.rows(folder / file)
            write(folder, file, (planted(row, number) for row in rows))
        (folder / "profile").mkdir()
        memory = {
            "seconds": [0.0, 1.0],
            "bytes_by_cause": {"weights": [1, 2]},
            "at_peak": {"weights": 2},
            "peak_bytes": 2,
        }
        memory |= {"peak_seconds": 1.0, "peak_phase": "forward", "largest": [[2, "weights", "w"]]}
        said = planted({"ranks": [memory], "steps": [1, 2]}, number)
        said["ranks"][0]["at_peak"] = dict(
            zip(said["ranks"][0]["bytes_by_cause"], [2], strict=True)
        )
        (folder / "profile" / "memory.json").write_text(json.dumps(said))
    folders = sorted(tmp_path.iterdir())
    runs = read_runs([str(folder) for folder in folders])
    assert all(run.memory is not None and run.events and not run.unreadable for run in runs)
    for text in (made(*folders), made(folders[0])):
        assert text.count("&lt;planted-") > 100
        assert "<planted" not in text
        assert "\x1b" not in text
        assert "\u202e" not in text
        words(text)
