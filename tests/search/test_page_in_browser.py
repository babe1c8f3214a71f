"""The page of a search in a real Chromium: it fits, says nothing on the console, asks no network,
names the trial beside the pointer, and sorts its table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from report.browser import ABSENT, CHROMIUM, Browser
from search.made_up import random_search, search, trial

from lockstep.search.page import search_page

pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason=ABSENT), pytest.mark.timeout(180)]

NUMBERS = (
    "[...document.querySelectorAll('table.all tbody tr')].map((row) => Number(row.dataset.trial))"
)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    several = search(
        trial(0, value=0.3),
        trial(1, value=0.1),
        trial(2, "failed"),
        trial(3, value=0.2),
        parameters=random_search().parameters,
    )
    found = {"random": random_search(), "several": several, "empty": search()}
    for name, results in found.items():
        (folder / f"{name}.html").write_text(
            search_page(results, {"lr": 1.0}, 1.8e9), encoding="utf-8"
        )
    return {name: folder / f"{name}.html" for name in found}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@pytest.mark.parametrize("width", [1400, 420])
@pytest.mark.parametrize("kind", ["random", "several", "empty"])
def test_it_fits_without_a_word_on_the_console_or_to_a_network(
    browser: Browser, pages: dict[str, Path], kind: str, width: int
) -> None:
    browser.said.clear()
    browser.requested.clear()
    browser.open(pages[kind], width=width)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.said == []
    assert {url.partition(":")[0] for url in browser.requested} <= {"file", "data"}


@pytest.mark.parametrize("width", [1400, 420])
def test_words_do_not_lie_over_one_another(
    browser: Browser, pages: dict[str, Path], width: int
) -> None:
    overlapping = """[...document.querySelectorAll(".plot")].flatMap((plot) => ["x", "y", "name", "tick"].flatMap((kind) => {
      const boxes = [...plot.querySelectorAll("i." + kind)].map((each) => [each.getBoundingClientRect(), each.textContent]);
      const over = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
      return boxes.flatMap(([a, one], at) => boxes.slice(at + 1).filter(([b]) => over(a, b)).map(([, other]) => one + " / " + other));
    }))"""
    browser.open(pages["random"], width=width)
    assert browser.evaluate(overlapping) == []


def test_the_trial_beside_the_pointer_is_named_and_stands_out_in_all_figures(
    browser: Browser, pages: dict[str, Path]
) -> None:
    browser.open(pages["several"], width=1400)
    browser.point(".plot.parallel svg", 1.0, 1 - 0.5)
    assert browser.evaluate("document.getElementById('tip').hidden") is False
    assert browser.evaluate("document.getElementById('tip').textContent").startswith(
        "trial 3, complete\nloss 0.2\nlr 0.004"
    )
    assert browser.evaluate(
        "[...document.querySelectorAll('path.pointed')].map((path) => path.dataset.trial)"
    ) == ["3", "3"]
    browser.point("h2", 0.5, 0.5)
    assert browser.evaluate("document.getElementById('tip').hidden") is True
    assert browser.evaluate("document.querySelectorAll('.pointed').length") == 0


def test_a_click_on_a_head_sorts_and_one_more_turns_the_order(
    browser: Browser, pages: dict[str, Path]
) -> None:
    browser.open(pages["several"], width=1400)
    click = "document.querySelectorAll('table.all th button')[{}].click()"
    assert browser.evaluate(NUMBERS) == [0, 1, 2, 3]
    browser.evaluate(click.format(2))
    assert browser.evaluate(NUMBERS) == [1, 3, 0, 2], "what has no value is last"
    browser.evaluate(click.format(2))
    assert browser.evaluate(NUMBERS) == [0, 3, 1, 2]
    browser.evaluate(click.format(1))
    assert browser.evaluate(NUMBERS) == [0, 3, 1, 2], "complete, complete, complete, failed"
    browser.evaluate(click.format(0))
    assert browser.evaluate(NUMBERS) == [0, 1, 2, 3]
