"""The page in a real Chromium: it says nothing on the console, asks no network, fits, shows values,
and is light or dark as wished."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest
from report.browser import ABSENT, CHROMIUM, Browser
from report.run_directories import metrics, run_json, whole, write

from lockstep.report.page import report_page
from lockstep.report.reader import read_runs

pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason=ABSENT), pytest.mark.timeout(180)]

KINDS = ("one", "several", "empty", "long", "folds")
FOLDS = 20


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    whole(folder / "a", world=16)
    whole(folder / "b", world=64, seed=1, steps=1500, global_batch=128)
    run_json(folder / "empty")
    run_json(folder / "long")
    write(folder / "long", "metrics.jsonl", metrics(range(1, 20_001), more=30))
    runs = {"one": ["a"], "several": ["a", "b", "empty"], "empty": ["empty"], "long": ["long"]}
    runs["folds"] = [f"fold{number:02}-of-a-search-with-a-long-name" for number in range(FOLDS)]
    for number, name in enumerate(runs["folds"]):
        run_json(
            folder / name,
            recipe={"seed": number, "model": f"package.module.{number}" + ".a_long_name" * 40},
        )
        write(folder / name, "metrics.jsonl", metrics(range(10, 101, 10), seed=number))
    for kind, names in runs.items():
        (folder / f"{kind}.html").write_text(
            report_page(read_runs([str(folder / name) for name in names]), made=1.8e9),
            encoding="utf-8",
        )
    return {kind: folder / f"{kind}.html" for kind in runs}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


def seen(browser: Browser) -> tuple[int, int]:
    """Of a picture of the window: brightness of the pixel in its corner, from 0 to 765, and how
    many colours it has."""
    picture = base64.b64encode(browser.picture(whole=False)).decode()
    corner, colours = browser.evaluate(f"""(async () => {{
          const image = new Image();
          image.src = "data:image/png;base64,{picture}";
          await image.decode();
          const canvas = new OffscreenCanvas(image.width, image.height).getContext("2d");
          canvas.drawImage(image, 0, 0);
          const pixels = new Uint32Array(canvas.getImageData(0, 0, image.width, image.height).data.buffer);
          return [pixels[0] & 0xffffff, new Set(pixels).size];
        }})()""")
    return sum(corner.to_bytes(3, "little")), colours


DRAWN = [
    pytest.param(
        *(kind, width, dark),
        marks=pytest.mark.command if (row + place + dark) % 2 == 0 else pytest.mark.slow,
    )
    for row, kind in enumerate(KINDS)
    for place, width in enumerate((1400, 600))
    for dark in (False, True)
]
"""Not slow: each kind at each width, light and dark in turn."""


@pytest.mark.parametrize(("kind", "width", "dark"), DRAWN)
def test_it_is_drawn_without_a_word_on_the_console_or_to_a_network(
    browser: Browser, pages: dict[str, Path], kind: str, width: int, dark: bool
) -> None:
    browser.said.clear()
    browser.requested.clear()
    browser.open(pages[kind], width=width, dark=dark)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    ground, colours = seen(browser)
    assert (ground < 200) == dark
    assert ground > 600 or dark
    assert colours > 60
    assert browser.said == []
    assert {url.partition(":")[0] for url in browser.requested} <= {"file", "data"}


def test_differences_of_many_runs_with_long_values_are_cut_and_have_tooltips(
    browser: Browser, pages: dict[str, Path]
) -> None:
    for width in (1400, 600):
        browser.open(pages["folds"], width=width)
        cells = browser.evaluate(
            """[...document.querySelectorAll(".differences td code")].map((each) =>
          [each.getBoundingClientRect().width, each.getBoundingClientRect().height, each.title === each.textContent])"""
        )
        assert len(cells) == 2 * FOLDS
        assert all(wide < 400 and high < 80 and told for wide, high, told in cells), cells
        assert (
            browser.evaluate(
                "document.querySelector('#differences .wide').getBoundingClientRect().right"
            )
            <= width
        )


def test_words_do_not_lie_over_one_another(browser: Browser, pages: dict[str, Path]) -> None:
    overlapping = """[...document.querySelectorAll(".plot")].flatMap((plot) => ["x", "y"].flatMap((kind) => {
      const boxes = [...plot.querySelectorAll("i." + kind)].map((each) => [each.getBoundingClientRect(), each.textContent]);
      return boxes.flatMap(([a, one], i) => boxes.slice(i + 1).filter(([b]) =>
        a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1)
          .map(([, other]) => one + " over " + other));
    }))"""
    for kind in ("one", "several", "long"):
        for width in (1400, 600, 380):
            browser.open(pages[kind], width=width)
            assert browser.evaluate(overlapping) == [], (kind, width)


def shown(browser: Browser) -> str:
    text: str = browser.evaluate(
        "document.getElementById('tip').hidden ? '' : document.getElementById('tip').innerText"
    )
    return " ".join(text.split())


def test_values_are_shown_beside_the_pointer(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["one"], width=1400)
    assert shown(browser) == ""
    browser.point('[data-chart="0"]', 0.5, 0.5)
    training, evaluation = (row for row in metrics(range(10, 1001, 10)) if row["step"] == 500)
    assert (
        shown(browser) == f"step 500 training {training['loss']:.5g} evaluation"
        f" {evaluation['evaluation/loss']:.5g}"
    )
    crosses = (
        "document.querySelectorAll('.cross').length - document.querySelectorAll('[data-chart],"
        " [data-heatmap]').length"
    )
    assert browser.evaluate(crosses) == 0
    browser.point('[data-heatmap="0"]', 0.0051, 0.99)
    assert shown(browser).startswith("rank 15 · node1, steps 1–10 step 7")
    browser.point('[data-chart="0"]', 0.6, 0.5)
    assert "step 600: run-failed: PeerDied: an exchange failed" in shown(browser)
    browser.point(".lane .event.error", 0.5, 0.5)
    assert shown(browser).startswith("run-failed at step 600, after 1:00: PeerDied")
    browser.point("h1", 0.5, 0.5)
    assert shown(browser) == ""
    assert browser.evaluate("document.querySelectorAll('.cross, .dot').length") == 0
    assert browser.said == []


def test_a_point_of_a_long_run_says_from_what_to_what_it_goes(
    browser: Browser, pages: dict[str, Path]
) -> None:
    browser.open(pages["long"], width=1400)
    browser.point('[data-chart="0"]', 0.5, 0.5)
    text = shown(browser)
    assert text.startswith("steps ")
    assert " to " in text


def test_the_run_that_is_pointed_at_stands_out(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["several"], width=1400)
    dimmed = (
        "[...new Set([...document.querySelectorAll('path.dimmed')].map((path) =>"
        " path.dataset.run))]"
    )
    assert browser.evaluate(dimmed) == []
    browser.point('.key[data-run="1"]', 0.5, 0.5)
    assert browser.evaluate(dimmed) == ["0"]
    browser.point("h1", 0.5, 0.5)
    assert browser.evaluate(dimmed) == []
