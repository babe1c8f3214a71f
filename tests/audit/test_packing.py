"""Documents in one row that attend to each other are found in models of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from audit.given_records import given, only, step
from audit.watched import problems, watched

from lockstep.audit.checks.packing import check_packing
from lockstep.audit.finding import Cause
from lockstep.evidence.rows import Row


def packed(**changes: object) -> Row:
    row: Row = {
        "kind": "packed",
        "model": "LlamaForCausalLM",
        "line": "train.py:9",
        "documents": 3,
        "apart": False,
        "known": True,
        "has_mask": False,
        "has_cache": False,
    }
    return row | changes


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"has_mask": True, "has_cache": True}, "an attention_mask, with which transformers"),
        ({"has_cache": True}, "made a cache of keys, with which transformers"),
        ({}, "the model does not pass positions to its masks"),
    ],
)
def test_documents_that_meet_are_found_with_the_reason(
    changes: dict[str, object], why: str
) -> None:
    finding = only(check_packing(given([packed(apart=True), packed(**changes), step()])))
    assert (finding.cause, finding.line) == (Cause.DOCUMENTS_LEAK, "train.py:9")
    assert why in finding.evidence


def test_documents_apart_are_right_and_flash_attention_is_not_judged() -> None:
    result = check_packing(given([packed(apart=True)] * 2))
    assert (result.findings, result.unseen) == ([], [])
    assert result.right == "in 2 forwards, documents of a row attended to themselves alone"
    result = check_packing(given([packed(known=False)]))
    assert not result.findings
    assert "flash attention" in result.unseen[0]


@pytest.mark.timeout(180)
@pytest.mark.forks("watched")
def test_the_probe_sees_which_forwards_kept_documents_apart(tmp_path: Path) -> None:
    found = watched("packing.py", tmp_path)
    assert problems(found) == []
    seen = {
        mark: [
            (row["documents"], row["apart"], row["known"], row["has_mask"], row["has_cache"])
            for row in found.rows("packed", mark)
        ]
        for mark in ("apart", "ones", "cache", "no positions", "padded", "plain", "one row for all")
    }
    assert seen == {
        "apart": [(3, True, True, False, False)],
        "ones": [(3, False, True, True, False)],
        "cache": [(3, False, True, False, True)],
        "no positions": [(3, False, True, False, False)],
        "padded": [],
        "plain": [],
        "one row for all": [],
    }
