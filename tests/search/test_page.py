"""The page of a search as text: what is on it, of which trials, and that nothing breaks it."""

from __future__ import annotations

import math
import re
import time
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from search.made_up import PARAMETERS, random_search, search, trial

from lockstep.recipe.parameters import Parameter
from lockstep.report.page import GENERATOR
from lockstep.search.figures import end_scale, metric_scale, parameter_axes, shades
from lockstep.search.page import search_page
from lockstep.search.results import SearchResults

IMPORTANCE = {"width": 0.1, "lr": 0.7, "dropout": 0.2}


class Words(HTMLParser):
    """Fails where an element is not closed, or another is."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words += f" {data}"


def made(results: SearchResults, importance: dict[str, float] | None = None) -> str:
    return search_page(results, importance or {}, 1.8e9)


def words(results: SearchResults, importance: dict[str, float] | None = None) -> str:
    return re.sub(r"\s+", " ", Words(made(results, importance)).words)


def section(text: str, name: str) -> str:
    return text[text.index(f'<section id="{name}">') :].partition("</section>")[0]


def paths(text: str, kind: str) -> dict[int, tuple[str, str]]:
    """The class and the `d` of each trial's path in a figure."""
    figure = text[text.index(f'class="plot trials {kind}"') :].partition("</svg>")[0]
    found = re.findall(r'<path class="([^"]+)"[^>]*? data-trial="(\d+)" d="([^"]+)"', figure)
    return {int(number): (name, d) for name, number, d in found}


def rows(text: str) -> dict[int, str]:
    table = section(text, "trials")
    return {
        int(number): row
        for number, row in re.findall(r'<tr data-trial="(\d+)"[^>]*>(.*?)</tr>', table)
    }


def test_the_page_has_all_that_is_known_of_a_search() -> None:
    results = random_search()
    text = made(results, IMPORTANCE)
    said = re.sub(r"\s+", " ", Words(text).words)
    best = results.best
    assert best is not None
    for told in (
        "lockstep search made 2027-01-15 08:00 UTC digits examples/digits.py · minimize loss",
        f"best loss 0.{round(1e4 * (best.value or 0.0))} trial {best.number} trials 40 of 40",
        f"complete {results.count('complete')} pruned {results.count('pruned')} failed 3 running 2",
        f"Trial {best.number} · 500 steps",
        f"runs/digits/trial-{best.number:04d}",
        f"--set lr={best.parameters['lr']} --set width={best.parameters['width']} --set dropout=",
        "17.4 GB were asked for",
        "after step 75: below the 75th percentile",
    ):
        assert told in said
    assert text.count('role="img" aria-label="') == 3
    assert set(rows(text)) == set(range(40))
    assert GENERATOR.encode() in text.encode()[:300]


def test_each_figure_has_the_trials_that_it_can_show() -> None:
    results = random_search()
    text = made(results)
    ended = {each.number for each in results.trials if each.state != "running"}
    assert set(paths(text, "best-so-far")) == set(paths(text, "parallel")) == ended
    assert set(paths(text, "curves")) == {each.number for each in results.trials if each.values}
    best = results.best
    assert best is not None
    for kind in ("best-so-far", "parallel", "curves"):
        shown = paths(text, kind)
        assert [number for number, (name, _) in shown.items() if "best" in name.split()] == [
            best.number
        ]
        assert list(shown)[-1] == best.number, "the best is in front"
        assert all(
            results.trials[number].state in name.split() for number, (name, _) in shown.items()
        )


def test_the_best_so_far_is_a_line_of_steps() -> None:
    results = search(
        trial(0, value=3.0),
        trial(1, value=4.0),
        trial(2, "pruned", value=1.0),
        trial(3, value=2.0),
        trial(4, value=math.nan),
    )
    text = made(results)
    (line,) = re.findall(r'<path class="line" d="([^"]+)"', text)
    corners = [tuple(map(int, point.split())) for point in line[1:].split("L")]
    assert [x for x, _ in corners] == [2000, 8000, 8000, 10000]
    assert [y for _, y in corners] == [corners[0][1]] * 2 + [corners[2][1]] * 2
    assert corners[2][1] > corners[0][1], "a smaller loss is lower"
    assert paths(text, "best-so-far")[4] == ("trial mark nan complete", "M10000 0L10000 0")


def test_a_line_goes_through_its_values_on_all_axes() -> None:
    given = {"lr": 1e-3, "width": 64, "dropout": 0.25, "optimizer": "lion"}
    trials = [
        trial(0, parameters=given, value=0.0),
        trial(1, parameters={**given, "lr": 1e-5}, value=1.0),
        trial(2, "failed", parameters=given),
        trial(3, parameters={"lr": 0.1, "dropout": 0.0}, value=0.5),
    ]
    shown = paths(made(search(*trials, parameters=PARAMETERS)), "parallel")
    assert shown[0][1] == "M0 5000L2500 8750L5000 5000L7500 1667L10000 10000"
    assert shown[1][1] == "M0 10000L2500 8750L5000 5000L7500 1667L10000 0"
    assert shown[2][1] == "M0 5000L2500 8750L5000 5000L7500 1667", "a failed one has no value"
    assert shown[3][1] == "M0 0L0 0M5000 10000L5000 10000M10000 5000L10000 5000", (
        "what it was not given is a gap"
    )


def test_axes_are_of_bounds_choices_or_the_values_that_there_are() -> None:
    parameters = (
        Parameter(name="log", default=1e-3, low=1e-4, high=1e-1, log=True),
        Parameter(name="whole", default=2, low=1, high=3),
        Parameter(name="one", default=True, choices=(True,)),
        Parameter(name="fixed", default=3.0),
        Parameter(name="swept", default=1.0),
        Parameter(name="mixed", default="a"),
    )
    given = {"log": 1e-2, "whole": 2, "one": True, "fixed": 3.0, "swept": 1.0, "mixed": "a"}
    trials = [
        trial(0, parameters=given, value=1.0),
        trial(1, parameters={**given, "swept": 5.0, "mixed": None}, value=2.0),
    ]
    axes = {axis.name: axis for axis in parameter_axes(search(*trials, parameters=parameters))}
    assert list(axes) == ["log", "whole", "one", "swept", "mixed"]
    assert [label for _, label in axes["log"].ticks] == ["1e−4", "0.001", "0.01", "0.1"]
    assert [place for place, _ in axes["log"].ticks] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert [label for _, label in axes["whole"].ticks] == ["1", "2", "3"]
    assert axes["one"].ticks == ((0.5, "True"),)
    assert [axes["swept"].position(value) for value in (1.0, 5.0, 9.0)] == [0.0, 1.0, None]
    assert [label for _, label in axes["mixed"].ticks] == ["a", "None"]
    assert axes["one"].position(1) is None


def test_many_choices_have_few_labels_and_long_ones_are_short() -> None:
    choices = tuple(f"{number}-{'long' * 9}" for number in range(50))
    axes = parameter_axes(
        search(
            trial(0, parameters={"kind": choices[0]}),
            parameters=[Parameter(name="kind", default=choices[0], choices=choices)],
        )
    )
    assert len(axes[0].ticks) <= 12
    assert {len(label) for _, label in axes[0].ticks} == {16}


def test_a_few_far_worse_values_are_beyond_the_axis() -> None:
    values = [1.0 + 0.01 * number for number in range(20)]
    assert metric_scale([*values, 500.0], 1.0).high < 2
    assert metric_scale([*values, -500.0], -1.0).low > 0
    assert metric_scale([*values, -500.0], 1.0).low <= -500, "a better one is on it"
    assert metric_scale([1.0, 2.0, 500.0], 1.0).high >= 500
    trials = [
        *(trial(number, value=value) for number, value in enumerate(values)),
        trial(20, "pruned", value=500.0),
    ]
    assert end_scale(search(*trials))[0].high < 2
    assert "1 beyond the axis" in words(search(*trials))
    assert end_scale(search(trial(0, value=1.0), trial(1, "pruned", value=500.0)))[0].high >= 500


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_colours_are_of_the_rank(direction: str) -> None:
    results = search(
        *(trial(number, value=float(number**5)) for number in range(12)),
        trial(12, value=math.inf),
        direction=direction,
    )
    found = [shades(results)[number] for number in range(12)]
    rising = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert found == (rising[::-1] if direction == "minimize" else rising)
    assert 12 not in shades(results)


def test_importance_is_sorted_or_said_to_be_unknown() -> None:
    text = section(made(random_search(), IMPORTANCE), "parameters")
    found = re.findall(
        r'<th scope="row">(\w+)</th>.*?width:([\d.]+)%.*?<td class="number">(.*?)</td>', text
    )
    assert found == [
        ("lr", "100.00", "70 %"),
        ("dropout", "28.57", "20 %"),
        ("width", "14.29", "10 %"),
    ]
    for nothing in ({}, {"lr": math.nan}):
        assert "The importance of parameters cannot be computed" in words(random_search(), nothing)


def test_a_pruned_curve_ends_where_it_was_pruned() -> None:
    whole = {step: 1.0 / step for step in (10, 20, 30, 40)}
    some = {10: 2.0, 20: 1.5}
    text = made(
        search(
            trial(0, value=0.025, values=whole),
            trial(1, "pruned", value=1.5, values=some),
            trial(2, "failed", values={10: 1.0, 20: math.nan, 30: 1.0}),
        )
    )
    shown = {
        number: [int(x) for x in re.findall(r"[ML](\d+)", d)]
        for number, (_, d) in paths(text, "curves").items()
    }
    assert shown == {0: [2500, 5000, 7500, 10000], 1: [2500, 5000], 2: [2500, 2500, 7500, 7500]}
    assert [int(x) for x in re.findall(r'class="end" d="M(\d+)', text)] == [5000]


def test_a_long_curve_is_thinned() -> None:
    text = made(
        search(trial(0, value=1.0, values={step: math.sin(step) for step in range(1, 20_001)}))
    )
    assert 100 < paths(text, "curves")[0][1].count("L") < 1000


def test_the_table_says_why_and_sorts_by_numbers() -> None:
    trials = [
        trial(0, value=0.00012345678, values={10: 0.5}, run_dir="runs/0"),
        trial(1, "pruned", value=0.5, values={1200: 0.5}, reason="worse than the median"),
        trial(2, "failed", reason="exit status 9"),
        trial(3, "running"),
        trial(4, value=math.nan, parent=0),
    ]
    found = rows(made(search(*trials)))
    heads = re.findall(
        r'<th scope="col"( class="number")?><button type="button">(.*?)</button>',
        made(search(*trials)),
    )
    assert [name for kind, name in heads if not kind] == ["state", "reason"]
    assert [name for kind, name in heads if kind] == [
        "trial",
        "loss",
        "steps",
        "time",
        "lr",
        "went on from",
    ]
    assert 'data-value="0.00012345678">1.235e−4<' in found[0]
    assert 'title="runs/0"' in found[0]
    assert "after step 1,200: worse than the median" in found[1]
    assert '<td class="why">exit status 9</td>' in found[2]
    assert 'data-value="">–<' in found[3]
    assert 'data-value="">nan<' in found[4]
    assert 'data-value="0">0<' in found[4]


def test_a_trial_of_a_population_says_that_the_command_is_not_its_whole_training() -> None:
    assert "It went on from a checkpoint of trial 0" in words(
        search(trial(0, value=2.0), trial(1, value=1.0, parent=0))
    )
    assert "went on" not in words(search(trial(0, value=2.0)))


NOTHING = [
    search(),
    search(trial(0, "waiting", parameters={}, started=None, ended=None)),
    search(trial(0, "running")),
    search(trial(0, "failed", reason=None, ended=None)),
    search(
        trial(0, value=math.nan),
        trial(1, value=math.inf),
        trial(2, value=-math.inf),
        trial(3, value=None),
    ),
    search(trial(0, parameters={}, value=1.0), parameters=()),
]


@pytest.mark.parametrize("results", NOTHING)
def test_a_search_without_a_best_trial_or_a_parameter_has_a_page(results: SearchResults) -> None:
    said = words(results)
    assert ("No trial is complete, with a finite value." in said) == (results.best is None)
    assert not re.search(r'd="[^"]*(nan|inf)', made(results))


def test_what_a_user_gives_is_escaped() -> None:
    bad = '</script><b x="&'
    parameter = Parameter(name="kind", default=bad, choices=(bad, "b"))
    trials = [
        trial(0, value=1.0, parameters={"kind": bad, bad: bad}, run_dir=bad, values={1: 1.0}),
        trial(1, "failed", reason=bad, parameters={"kind": "b", bad: "c"}),
    ]
    text = made(
        search(*trials, name=bad, script=bad, metric=bad, parameters=[parameter]), {bad: 1.0}
    )
    assert "<b x" not in text
    assert text.count("</script>") == 2
    assert not re.search(r"https?:", text)
    assert not re.findall(r'(?:src|href|srcset)="', text)
    Words(text)


ANY = st.none() | st.floats() | st.sampled_from([0.0, 1e-320, 1.7e308, -1.7e308, math.nan])
TRIALS = st.lists(
    st.tuples(
        st.sampled_from(["waiting", "running", "complete", "pruned", "failed"]),
        ANY,
        ANY,
        ANY,
        ANY,
        st.lists(st.floats(), max_size=5),
    ),
    max_size=14,
)


@given(TRIALS, st.sampled_from(["minimize", "maximize"]), st.booleans())
@settings(deadline=None)
def test_any_numbers_make_a_page(found: list[Any], direction: str, is_log: bool) -> None:
    parameter = Parameter(name="lr", default=1.0, low=1e-300, high=1e300, log=is_log)
    trials = [
        trial(
            number,
            state,
            value=value,
            parameters={"lr": lr, "swept": lr},
            started=start,
            ended=end,
            values=dict(enumerate(values, 1)),
        )
        for number, (state, value, lr, start, end, values) in enumerate(found)
    ]
    text = made(
        search(*trials, direction=direction, parameters=[parameter]), {"lr": 0.5, "swept": math.inf}
    )
    Words(text)
    assert not re.search(r'd="[^"]*(nan|inf)', text)


def test_five_hundred_trials_are_a_page_within_seconds() -> None:
    results = random_search(500, steps=1000, every=10)
    began = time.process_time()
    text = made(results, IMPORTANCE)
    assert time.process_time() - began < 3
    assert len(text) < 2_000_000
    assert len(rows(text)) == len(paths(text, "parallel")) + 2 == 500


def test_no_text_of_a_search_is_a_tag_or_a_control_code() -> None:
    bad = "\"'><planted>\x1b]0;\x07\u202e"
    values = {f"x{bad}": f"v{bad}", "lr": f"w{bad}", "other": 1.0}
    choices = Parameter(name="lr", default="a", choices=("a", f"b{bad}"))
    trials = [
        trial(
            number,
            state,
            parameters={**values, "other": 1.0 + number},
            value=0.5,
            values={1: 0.5},
            reason=f"why{bad}",
            run_dir=f"r{bad}",
        )
        for number, state in enumerate(("complete", "failed", "pruned", "complete", "running"))
    ]
    results = search(
        *trials, name=f"n{bad}", script=f"s{bad}", metric=f"m{bad}", parameters=(choices,)
    )
    text = made(results, {"lr": 0.5, f"x{bad}": 0.5})
    Words(text)
    assert text.count("&lt;planted") > 20
    assert not any(part in text for part in ("<planted", "\x1b", "\u202e"))
