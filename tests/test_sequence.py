from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from lockstep.sequence import chunks_of, paired_order, places, spans
from lockstep.tree import cover

sizes = st.integers(1, 64)


@given(st.integers(0, 5000), sizes, st.data())
def test_ranks_have_each_token_once_in_paired_order(
    tokens: int, chunks: int, data: st.DataObject
) -> None:
    ranks = data.draw(st.integers(1, chunks))
    shares = [chunks_of(chunks, ranks, rank) for rank in range(ranks)]
    assert [chunk for share in shares for chunk in share] == paired_order(chunks)
    assert sorted(paired_order(chunks)) == list(range(chunks))
    held = [places(tokens, chunks, ranks, rank) for rank in range(ranks)]
    assert sorted(np.concatenate(held).tolist()) == list(range(tokens))
    for rank, mine in enumerate(held):
        in_spans = spans(tokens, chunks, ranks, rank)
        assert mine.tolist() == [place for span in in_spans for place in span]
        # whoever has the tokens: the same order at any number of ranks
        start = sum(map(len, held[:rank]))
        assert mine.tolist() == places(tokens, chunks, 1, 0)[start : start + len(mine)].tolist()
        assert all(before + 1 == after for span in in_spans for before, after in pairwise(span))


@given(st.integers(1, 500), st.integers(1, 16), st.integers(1, 4))
def test_causal_work_is_equal_where_ranks_have_whole_pairs(
    width: int, ranks: int, pairs: int
) -> None:
    chunks = 2 * ranks * pairs
    work = {int((places(width * chunks, chunks, ranks, rank) + 1).sum()) for rank in range(ranks)}
    assert len(work) == 1


@given(st.integers(0, 6), st.integers(0, 6))
def test_powers_of_two_give_each_rank_one_subtree(log_chunks: int, log_ranks: int) -> None:
    chunks, ranks = 2**log_chunks, 2 ** min(log_ranks, log_chunks)
    share = chunks // ranks
    for rank in range(ranks):
        assert len(chunks_of(chunks, ranks, rank)) == share
        assert cover(rank * share, (rank + 1) * share, chunks) == [
            (rank * share, (rank + 1) * share)
        ]


def test_places_are_cached_and_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        places(8, 4, 2, 0)[0] = 5
    assert places(7, 4, 2, 0).tolist() == [0, 1, 6]
    assert places(7, 4, 2, 1).tolist() == [2, 3, 4, 5]
