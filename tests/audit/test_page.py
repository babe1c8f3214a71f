"""The HTML page of an audit, and the words that it shares with the terminal."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from lockstep.audit.finding import Area, Audit, Cause, Finding
from lockstep.audit.page import audit_page

SOURCE = {"train.py": [f"line {number} <&>" for number in range(1, 11)]}
VOID = {"meta", "br", "hr"}


def found(**changed: object) -> Audit:
    audit = Audit(script="train.py --lr 1", processes=2, steps=20)
    audit.findings = [
        Finding(
            cause=Cause.SAME_ORDER,
            area=Area.SAMPLES,
            evidence="epochs 0 and 1 <same>",
            line="train.py:4",
            step=3,
            names=["a", "b"],
        ),
        Finding(cause=Cause.LOCAL_CLIPPING, area=Area.GRADIENTS, evidence="norms 1.0 and 2.0"),
    ]
    audit.right = {Area.RANDOM: "40 forwards & 2 ranks"}
    audit.unseen = {Area.RESUME: ["no --resume-args", "nothing saved"]}
    audit.notes = ["a <note>"]
    for name, value in changed.items():
        setattr(audit, name, value)
    return audit


class Page(HTMLParser):
    """The texts of a page's elements, by tag; an element that is not closed is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.here: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.texts.setdefault(tag, []).append("")
        if tag not in VOID:
            self.open.append(tag)
        if ("class", "here") in attrs:
            self.here.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in set(self.open):
            self.texts[tag][-1] += data


def test_a_finding_has_its_law_its_evidence_its_source_and_its_remedy() -> None:
    read = Page(audit_page(found(), SOURCE))
    assert read.texts["h2"] == [
        "1. every epoch has the same order",
        "2. gradients are clipped by the norm of a part of them",
        "Found right",
        "Not seen",
    ]
    assert "Law: each epoch has an order of its own." in read.texts["p"]
    assert "epochs 0 and 1 <same>" in read.texts["p"]
    assert "Concerned: a, b" in read.texts["p"]
    assert "call set_epoch before each epoch:" in read.texts["p"]
    assert read.texts["code"][0].splitlines() == [
        "for epoch in range(epochs):",
        "    loader.sampler.set_epoch(epoch)",
    ]
    assert [text for text in read.texts["tr"] if "line " in text and "<&>" in text] == [
        f"{at}line {at} <&>" for at in range(2, 7)
    ]
    assert audit_page(found(), SOURCE).count('class="here"') == 1
    assert '<tr class="here"><td class="number">4</td>' in audit_page(found(), SOURCE)


@pytest.mark.parametrize(
    ("line", "rows"),
    [
        ("train.py:1", [1, 2, 3]),
        ("train.py:10", [8, 9, 10]),
        ("train.py:11", []),
        ("gone.py:1", []),
    ],
)
def test_the_source_is_shown_as_far_as_it_is_there(line: str, rows: list[int]) -> None:
    finding = Finding(cause=Cause.SAME_ORDER, area=Area.SAMPLES, evidence="", line=line)
    text = audit_page(found(findings=[finding]), SOURCE)
    assert [number for number in range(1, 12) if f"line {number} &lt;" in text] == rows
    assert f"<p>{line}</p>" in text


def test_what_is_right_and_what_was_not_seen_is_listed() -> None:
    rows = Page(audit_page(found(), {})).texts["tr"]
    assert "random numbers40 forwards & 2 ranks" in rows
    assert rows[-2:] == ["resumeno --resume-args", "resumenothing saved"]


def test_a_page_without_findings_says_so_and_has_no_empty_table() -> None:
    text = audit_page(Audit(script="train.py", processes=1, steps=1), {})
    assert '1 process, 1 step: <strong class="good">nothing found</strong>' in text
    assert "<table" not in text


def test_a_failed_script_has_its_error_on_the_page() -> None:
    text = audit_page(found(error="ValueError: <boom>", status=3), {})
    assert (
        '<p class="bad">The script failed (exit status 3).</p><pre>ValueError: &lt;boom&gt;</pre>'
        in text
    )
    assert "2 findings; the script failed" in text


def test_the_page_needs_no_network() -> None:
    text = audit_page(found(), SOURCE)
    assert "http" not in text.replace("http-equiv", "")
    assert "default-src 'none'" in text
    assert 'content="light dark"' in text


def test_the_words_count() -> None:
    assert (found().extent, found().verdict) == ("2 processes, 20 steps", "2 findings")
    assert found(findings=found().findings[:1]).verdict == "1 finding"
