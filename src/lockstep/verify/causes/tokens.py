"""Causes of differences when several ranks share the tokens of a sequence.

The positions of the wrong tokens show the fault: at the ends of a rank's chunks, after the first
token of a rank, or in later documents. If no token is wrong, the fault is in the backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.evidence.tensors import EXACT, Vector, exact_ratio
from lockstep.evidence.trace import TokenTrace
from lockstep.verify.causes.evidence import Evidence, Wrong, differ, listed_places

MOSTLY = 0.9
"""Smallest fraction of wrong tokens among the tokens after a fault. The threshold is below 1
because a token may hardly attend to earlier tokens."""


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The tokens of one traced microbatch, in the order of the sequence."""

    index: int
    parts: Sequence[TokenTrace]
    documents: np.ndarray[Any, np.dtype[np.int64]] | None
    expected: dict[str, Vector]
    """The reference's sketches of `output` and `gradient`, of shape (samples, tokens,
    projections)."""
    found: dict[str, Vector]
    wrong: dict[str, Wrong]
    """True for each sketch of `output` or `gradient` that differs from the reference, of shape
    (samples, tokens)."""

    @property
    def count(self) -> int:
        return int(self.wrong["output"].shape[1])

    def places(self, name: str) -> list[int]:
        return [int(place) for place in np.flatnonzero(self.wrong[name].any(0))]

    def ends(self) -> set[int]:
        return {int(run[-1]) for part in self.parts for run in _runs(part)}

    def begins(self) -> dict[int, int]:
        """Return the ranks, by the index at which a rank's contiguous tokens begin."""
        begins = {int(run[0]): part.rank for part in self.parts for run in _runs(part)}
        begins.pop(0, None)
        return begins


def lost_tokens(evidence: Evidence) -> str | None:
    for index in _wrong_microbatches(evidence):
        ours, theirs = evidence.reference.tokens_of(index), evidence.plan.tokens_of(index)
        if not ours or len(theirs) < 2:
            continue
        times = Counter(int(place) for part in theirs for place in part.places)
        every = [int(place) for part in ours for place in part.places]
        for place in sorted({*every, *times}):
            if times[place] != 1 or place not in every:
                many = "no rank" if not times[place] else f"{times[place]} ranks"
                return (
                    f"token {place} of microbatch {index} is computed by {many}: the ranks' parts"
                    " of the sequence do not make the whole"
                )
    return None


def pairs_at_cuts(evidence: Evidence) -> str | None:
    """Find a wrong loss with right outputs at the cuts between the ranks' parts of a sequence."""
    tokens = _first_wrong(evidence, "gradient")
    if tokens is None or tokens.wrong["output"].any():
        return None
    wrong = tokens.places("gradient")
    last = tokens.count - 1
    ends, begins = tokens.ends(), set(tokens.begins())
    if not (set(wrong) <= ends or set(wrong) <= begins):
        return None
    at = [place for place in wrong if place != last] or wrong
    share = "every cut" if len(at) >= len(begins) else f"{len(at)} of {len(begins)} cuts"
    where = f"at {listed_places(at)} ({share})"
    chosen = tokens.wrong["gradient"][:, at]
    expected = tokens.expected["gradient"][:, at][chosen].ravel()
    found = tokens.found["gradient"][:, at][chosen].ravel()
    factor = exact_ratio(expected, found)
    if np.linalg.norm(found) <= EXACT * np.linalg.norm(expected):
        return (
            f"a pair lost at each cut: the loss leaves out the tokens {where} of microbatch"
            f" {tokens.index}, whose next token is in another part of the sequence"
        )
    if factor is not None and abs(factor - 2) <= EXACT:
        return (
            f"a pair counted twice at each cut: the loss has the tokens {where} of microbatch"
            f" {tokens.index} on both sides of the cut"
        )
    return (
        f"labels shifted within a part of the sequence: the loss of the tokens {where} of"
        f" microbatch {tokens.index} is another, and their next token is in another part; shift"
        " labels before the sequence is cut"
    )


def document_leak(evidence: Evidence) -> str | None:
    tokens = _first_wrong(evidence, "output")
    if tokens is None or tokens.documents is None:
        return None
    rows = zip(tokens.wrong["output"], tokens.documents, strict=True)
    leaks = [(int(wrong.argmax()), ids) for wrong, ids in rows if wrong.any()]
    if any(at == 0 or ids[at] == ids[at - 1] for at, ids in leaks):
        return None
    first, _ = leaks[0]
    return (
        f"a document leak: in microbatch {tokens.index} outputs are right up to token {first - 1},"
        f" the last of a document, and wrong from token {first}, the first of the next: its tokens"
        " attend to the documents before; give attention the documents, not a mask of ones"
    )


def places_of_others(evidence: Evidence) -> str | None:
    """Find outputs that are wrong from the first token of a rank on."""
    tokens = _first_wrong(evidence, "output")
    if tokens is None:
        return None
    begins, wrong = tokens.begins(), tokens.wrong["output"]
    first = tokens.places("output")[0]
    if first not in begins or wrong[:, first:].mean() < MOSTLY:
        return None
    return (
        f"places of another chunk: in microbatch {tokens.index} outputs are right up to token"
        f" {first - 1} and wrong from token {first}, where a part of rank {begins[first]} begins:"
        " its tokens were given the positions of others, or did not see the keys of those before"
    )


def attention_backward(evidence: Evidence) -> str | None:
    """Find wrong gradients of parameters when all outputs and losses are right."""
    tokens = _first_wrong(evidence, None)
    if tokens is None or "gradient" not in tokens.wrong:
        return None
    if any(each.any() for each in tokens.wrong.values()):
        return None
    names = evidence.names("microbatch", "gradients")
    order = evidence.reference.backward_order
    known = [name for name in order if name in names]
    right = order.index(known[0]) if known else 0
    if not right:
        return None
    return (
        f"the backward of attention between ranks: in microbatch {tokens.index} the output and the"
        f" loss of every token are right, and so are the gradients of {right} parameters; from"
        f" {known[0]!r} on they are not: the backward took keys and values of another moment than"
        " the forward (stale), or did not add the gradients of keys and values over the ranks"
    )


def _first_wrong(evidence: Evidence, name: str | None) -> _Tokens | None:
    """Return the first microbatch whose tokens have a wrong `output` or `gradient`."""
    for index in _wrong_microbatches(evidence):
        tokens = _compared(evidence, index)
        if tokens is None:
            continue
        if name is None or (name in tokens.wrong and tokens.wrong[name].any()):
            return tokens
    return None


def _wrong_microbatches(evidence: Evidence) -> list[int]:
    if evidence.step:
        return []
    found = evidence.of("microbatch")
    wrong = {index for difference in found for index in difference.microbatches}
    return sorted(wrong or evidence.expected_microbatches)


def _compared(evidence: Evidence, index: int) -> _Tokens | None:
    reference, parts = evidence.reference.tokens_of(index), evidence.plan.tokens_of(index)
    if len(reference) != 1 or len(parts) < 2:
        return None
    expected, actual = _in_order(reference), _in_order(parts)
    names = expected.keys() & actual.keys()
    if any(expected[name].shape != actual[name].shape for name in names):
        return None
    return _Tokens(
        index,
        parts,
        reference[0].documents,
        expected,
        actual,
        {
            name: differ(expected[name], actual[name], evidence.token_tolerance)
            for name in sorted(names)
        },
    )


def _in_order(parts: Sequence[TokenTrace]) -> dict[str, Vector]:
    order = np.argsort(np.concatenate([part.places for part in parts]), kind="stable")
    names = set.intersection(*(set(part.sketches) for part in parts))
    return {
        name: np.concatenate([part.sketches[name] for part in parts], axis=1)[:, order]
        for name in names
    }


def _runs(part: TokenTrace) -> Iterator[np.ndarray[Any, Any]]:
    yield from np.split(part.places, np.flatnonzero(np.diff(part.places) != 1) + 1)
