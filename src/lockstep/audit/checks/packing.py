"""Checks that documents packed into one row do not attend to each other."""

from __future__ import annotations

from lockstep.audit.finding import Area, AreaResult, Cause
from lockstep.audit.records import Records
from lockstep.evidence.rows import Row


def check_packing(records: Records) -> AreaResult:
    result = AreaResult(Area.DOCUMENTS)
    apart = 0
    for rank in records.ranks:
        for row in rank.of("packed"):
            if not row["known"]:
                result.miss(
                    f"{row['model']} got up to {row['documents']} documents in a row, with flash"
                    " attention or a mask of the script's own"
                )
            elif row["apart"]:
                apart += 1
            else:
                result.find(
                    Cause.DOCUMENTS_LEAK,
                    f"{row['model']} got up to {row['documents']} documents in a row (its"
                    f" position_ids restart), and {_why(row)}",
                    line=row["line"],
                    badness=row["documents"],
                )
    if apart:
        result.right = f"in {apart} forwards, documents of a row attended to themselves alone"
    return result


def _why(row: Row) -> str:
    if row["has_mask"]:
        return "an attention_mask, with which transformers does not look for documents"
    if row["has_cache"]:
        return "made a cache of keys, with which transformers does not look for documents"
    return "the model does not pass positions to its masks"
