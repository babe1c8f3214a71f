"""Samples that are repeated, missing or in one order are found; what samplers do on purpose is
not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from audit.given_records import (
    DATASET,
    DISTRIBUTED,
    SAMPLER,
    backward,
    causes,
    given,
    only,
    passes,
    step,
)
from hypothesis import given as drawn, settings, strategies as st

from lockstep.audit.checks.samples import check_samples, loader_passes
from lockstep.audit.finding import AreaResult, Cause
from lockstep.audit.records import number_loaders
from lockstep.evidence.rows import Row

EVEN, ODD = [0, 2, 4, 6, 8, 10, 12, 14], [1, 3, 5, 7, 9, 11, 13, 15]
ALL = list(range(16))


def check(*ranks: Sequence[Row]) -> AreaResult:
    return check_samples(given(*ranks))


def dataset(**changes: Any) -> Row:
    return {**DATASET, **changes}


def test_samples_that_are_dealt_to_ranks_are_right() -> None:
    result = check(passes(EVEN), passes(ODD))
    assert not result.findings
    assert result.right.startswith("16 samples, in passes over the data: 1;")
    assert result.unseen == [
        "one epoch at most was begun: its order cannot be compared with the next one's (more"
        " --steps)"
    ]
    assert not check(passes(EVEN, EVEN[::-1]), passes(ODD, ODD[::-1])).unseen


@settings(max_examples=40)
@drawn(st.integers(1, 40), st.integers(2, 4), st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_whatever_a_distributed_sampler_deals_is_right(
    length: int, ranks: int, seed: int, batch: int
) -> None:
    """Padding to a multiple of the ranks too."""
    order = np.random.default_rng(seed).permutation(length).tolist()
    padded = (order * ranks)[: -(-length // ranks) * ranks]
    sampler = {**DISTRIBUTED, "num_replicas": ranks, "total_size": len(padded)}
    rows = [
        passes(padded[rank::ranks], batch=batch, dataset=dataset(length=length), sampler=sampler)
        for rank in range(ranks)
    ]
    assert not check(*rows).findings


def test_the_same_samples_on_two_ranks_are_found() -> None:
    finding = only(check(passes(ALL, sampler=SAMPLER), passes(ALL[::-1], sampler=SAMPLER)))
    assert (finding.cause, finding.line) == (Cause.SAME_SAMPLES, "train.py:10")
    assert (
        finding.evidence
        == "pass 0 over the training data: 16 of the 16 samples of rank 0 are also rank 1's"
        " (sampler: RandomSampler)"
    )


def test_the_same_samples_are_found_before_the_end_of_the_pass() -> None:
    rows = [
        passes(ALL[:8], sampler=SAMPLER, complete=False),
        passes(ALL[4:12], sampler=SAMPLER, complete=False),
    ]
    assert causes(check(*rows)) == {Cause.SAME_SAMPLES}


def test_the_same_contents_are_found_where_places_do_not_tell() -> None:
    """An IterableDataset that yields all of it on every rank."""
    stream = dataset(iterable=True, length=None)
    texts = [f"row {number}" for number in ALL]
    other = [f"row {number + 16}" for number in ALL]
    finding = only(check(*[passes(ALL, contents=[texts], dataset=stream)] * 2))
    assert finding.cause is Cause.SAME_SAMPLES
    assert not check(
        passes(ALL, contents=[texts], dataset=stream), passes(ALL, contents=[other], dataset=stream)
    ).findings


def test_datasets_of_each_rank_may_have_the_same_places() -> None:
    rows = [
        passes(
            ALL,
            contents=[[f"{rank}/{number}" for number in ALL]],
            dataset=dataset(digest=f"part {rank}"),
            sampler=SAMPLER,
        )
        for rank in range(2)
    ]
    for each in rows[0] + rows[1]:
        if each["kind"] == "batch":
            each["indices"] = [int(text.rpartition("/")[2]) for text in each["samples"]]
    assert not check(*rows).findings


def test_subsets_of_one_dataset_are_compared_by_the_places_in_it() -> None:
    def part(rank: int, places: Sequence[int]) -> list[Row]:
        return passes(
            list(range(len(places))),
            dataset=dataset(
                length=len(places),
                digest=f"data/{rank}",
                whole="data",
                whole_length=16,
                subset=list(places),
            ),
            sampler={**SAMPLER, "num_samples": len(places)},
        )

    assert not check(part(0, EVEN), part(1, ODD)).findings
    assert causes(check(part(0, EVEN), part(1, EVEN))) == {Cause.SAME_SAMPLES}
    assert not check(part(0, EVEN), part(1, ODD[:4])).findings, (
        "scattered samples are left out on purpose"
    )
    finding = only(check(part(0, range(6)), part(1, range(6, 12))))
    assert (finding.cause, finding.line) == (Cause.SAMPLES_MISSING, "train.py:10")
    assert "4 of 16 samples were given to no rank" in finding.evidence


def test_one_part_of_a_dataset_on_all_ranks_has_no_missing_samples() -> None:
    """A split with a seed that the ranks share; what is not in the part is held out."""
    part = dataset(
        length=8,
        digest="data/part",
        whole="data",
        whole_length=16,
        subset=[15, 3, 9, 1, 7, 5, 11, 13],
    )
    sampler = {**DISTRIBUTED, "total_size": 8}
    ranks = [passes(range(rank, 8, 2), dataset=part, sampler=sampler) for rank in range(2)]
    assert not check(*ranks).findings
    ranks = [passes(range(rank, 6, 2), dataset=part, sampler=sampler) for rank in range(2)]
    assert "2 of 8 samples were given to no rank" in only(check(*ranks)).evidence


def test_samples_that_come_twice_on_a_rank_are_found() -> None:
    """An IterableDataset that each of two loader workers yields whole."""
    stream = dataset(iterable=True, length=None)
    twice = [text for number in ALL for text in [f"row {number}"] * 2]
    finding = only(check(passes(range(32), contents=[twice], dataset=stream, workers=2)))
    assert (finding.cause, finding.line) == (Cause.SAMPLES_REPEATED, "train.py:10")
    assert finding.evidence.endswith(
        "rank 0 was given 16 of 32 samples that it had already (2 loader workers)"
    )


@pytest.mark.parametrize(
    ("ranks", "step", "held", "found"),
    [(2, 4, 64, True), (2, 2, 64, False), (4, 16, 64, True), (2, 4, 0, False)],
)
def test_a_stream_that_is_split_over_the_ranks_twice_is_found(
    ranks: int, step: int, held: int, found: bool
) -> None:
    """By a library, and by the dataset itself. `step`: the distance of a rank's samples; `held`:
    the items in it."""
    stream = dataset(iterable=True, length=None, held=held)
    parts = [range(rank * step // ranks, 64, step) for rank in range(ranks)]
    rows = [
        passes(part, contents=[[f"row {each}" for each in part]], dataset=stream, batch=2)
        for part in parts
    ]
    result = check(*rows)
    assert causes(result) == ({Cause.SAMPLES_MISSING} if found else set())
    if found:
        assert (
            f"holds 64 samples, and the ranks were given {64 // ranks} of them together, one in"
            f" {ranks}" in only(result).evidence
        )


@pytest.mark.parametrize("is_split", [False, True])
def test_a_stream_that_one_rank_reads_for_all_is_checked_too(is_split: bool) -> None:
    """Accelerate reads it on rank 0, and sends each rank its batches: the dataset must not split
    itself too."""
    given_samples = range(0, 64, 2 if is_split else 1)
    stream = dataset(iterable=True, length=None, held=64)
    first = passes(
        given_samples, contents=[[f"row {each}" for each in given_samples]], dataset=stream, batch=2
    )
    for second in ([], passes([], dataset=stream, complete=False)):
        assert causes(check(first, second)) == ({Cause.SAMPLES_MISSING} if is_split else set())


def test_loaders_of_one_line_have_the_same_number_on_all_ranks() -> None:
    """Rank 0 begins with a loader of its own, so that the numbers of its loaders are others than
    rank 1's."""
    first = [
        *passes(EVEN[:2], loader=0, training=False, line="train.py:5"),
        *passes(EVEN, loader=1),
    ]
    records = given(first, passes(ODD, loader=0))
    number_loaders(records.ranks)
    (loader,) = loader_passes(records)
    assert [each.indices for each in loader.passes[0]] == [EVEN, ODD]


def test_a_few_samples_that_look_alike_are_no_finding() -> None:
    stream = dataset(iterable=True, length=None)
    texts = [["a", *map(str, range(100))], ["a", *map(str, range(100, 200))]]
    assert not check(
        *[passes(range(101), contents=[each], dataset=stream) for each in texts]
    ).findings


def test_a_sampler_with_replacement_may_repeat_and_leave_out() -> None:
    drawn = {
        "type": "WeightedRandomSampler",
        "batch_type": "BatchSampler",
        "replacement": True,
        "num_samples": 8,
    }
    assert not check(passes([1, 1, 2, 2, 3, 3, 4, 5], sampler=drawn)).findings


def test_the_same_draws_with_replacement_on_two_ranks_are_found() -> None:
    drawn = {
        "type": "WeightedRandomSampler",
        "batch_type": "BatchSampler",
        "replacement": True,
        "num_samples": 8,
    }
    assert Cause.SAME_SAMPLES in causes(
        check(*[passes([1, 1, 2, 2, 3, 3, 4, 5], sampler=drawn)] * 2)
    )


def test_missing_samples_are_found_on_one_process_too() -> None:
    assert (
        "8 of 16 samples were given to no rank"
        in only(check(passes(EVEN, sampler=SAMPLER))).evidence
    )
    assert not check(passes(ALL, sampler=SAMPLER)).findings
    assert not check(passes(EVEN, sampler=SAMPLER, complete=False)).findings


# Samplers of the script's own

OWN = {"type": "OwnSampler", "batch_type": "BatchSampler"}


def test_a_sampler_of_the_scripts_own_may_leave_out_samples_and_repeat_them() -> None:
    assert not check(passes(EVEN, sampler=OWN)).findings
    assert causes(check(passes(ALL[:8], sampler=OWN))) == {Cause.SAMPLES_MISSING}, (
        "a run at the end: a remainder"
    )
    assert not check(passes(ALL[:8], sampler={**OWN, "type": "list"})).findings, "a fold"
    repeats = check(passes(EVEN[:4] * 2, sampler=OWN), passes(EVEN[2:6] * 2, sampler=OWN))
    assert (repeats.findings, repeats.right) == ([], "")
    assert "OwnSampler repeats samples" in repeats.unseen[0]
    uneven = [passes(ALL[:9], sampler=OWN), passes(ALL[9:], sampler=OWN)]
    assert not check(*uneven).findings


def test_a_sampler_without_an_end_is_looked_at_for_one_epoch() -> None:
    endless = [
        passes([*EVEN, *ODD], sampler=OWN, complete=False),
        passes([*ODD, *EVEN], sampler=OWN, complete=False),
    ]
    assert not check(*endless).findings
    assert causes(check(*[passes([*ALL, *ALL], sampler=OWN, complete=False)] * 2)) == {
        Cause.SAME_SAMPLES
    }


def test_a_batch_sampler_of_the_scripts_own_is_one_too() -> None:
    endless = {**DISTRIBUTED, "batch_type": "_RepeatSampler"}
    rows = [
        passes([*EVEN, *ODD], sampler=endless, complete=False),
        passes([*ODD, *EVEN], sampler=endless, complete=False),
    ]
    assert not check(*rows).findings


# What datasets hold


def test_samples_of_datasets_that_cannot_be_read_are_told_by_their_contents() -> None:
    unread = dataset(digest="")
    texts = [[f"rank {rank} row {number}" for number in range(8)] for rank in range(2)]
    rows = [passes(range(8), dataset=unread, sampler=SAMPLER) for _ in texts]
    for own, contents in zip(rows, texts, strict=True):
        for number, each in enumerate([row for row in own if row["kind"] == "batch"]):
            each["samples"] = contents[4 * number : 4 * number + 4]
    assert not check(*rows).findings
    assert causes(check(rows[0], rows[0])) == {Cause.SAME_SAMPLES}


def test_samples_that_look_alike_are_not_told_apart() -> None:
    stream = dataset(iterable=True, length=None)
    contents = [[f"row {number % 5}" for number in range(40)]]
    result = check(*[passes(range(40), contents=contents, dataset=stream)] * 2)
    assert not result.findings
    assert "samples of the training data look alike: they cannot be told apart" in result.unseen


def test_two_loaders_of_one_step_are_both_training() -> None:
    """Two loaders in turn, and one backward of both: neither is an evaluation."""
    first, second = (
        passes(ALL, loader=number, line=f"train.py:1{number}", training=False)
        for number in range(2)
    )
    rows = [
        *first,
        *second,
        *[backward(number, loader=1, passes=[(0, 0), (1, 0)]) for number in range(2)],
    ]
    loaders = loader_passes(given(rows, rows))
    assert [each.is_training for each in loaders] == [True, True]
    assert causes(check(rows, rows)) == {Cause.SAME_SAMPLES}
    rows = [*first, *second, backward(loader=1, passes=[(0, 0), (1, 0)])]
    assert [each.is_training for each in loader_passes(given(rows, rows))] == [
        False,
        True,
    ], "a look at other data"


def test_what_drop_last_drops_is_not_missing() -> None:
    assert not check(
        passes(ALL[:15], batch=3, drop_last=True, sampler=SAMPLER, dataset=dataset(length=17))
    ).findings
    dropped = {**DISTRIBUTED, "drop_last": True, "total_size": 16}
    assert not check(
        *[passes(each, sampler=dropped, dataset=dataset(length=17)) for each in (EVEN, ODD)]
    ).findings


def test_what_the_scripts_own_batch_sampler_drops_is_not_missing() -> None:
    """`DataLoader(dataset, batch_sampler=BatchSampler(sampler, 3, drop_last=True))`: the loader has
    neither."""
    assert not check(
        passes(ALL[:15], batch=3, batch_size=None, sampler=SAMPLER, dataset=dataset(length=17))
    ).findings


def test_the_rest_of_a_split_by_subset_sampler_is_not_missing() -> None:
    """One dataset, and two loaders with a sampler of some of its indices each."""
    sampler = {"type": "SubsetRandomSampler", "batch_type": "BatchSampler"}
    training = passes(ALL[:12], sampler=sampler)
    assert not check(
        [*training, *passes(ALL[12:], sampler=sampler, loader=1, training=False)]
    ).findings


def test_an_epoch_that_is_meant_to_be_short_has_no_missing_samples() -> None:
    assert not check(passes(EVEN, sampler={**SAMPLER, "num_samples": 8})).findings


# Datasets of each rank's own


def own(rank: int, **changes: Any) -> Row:
    """A dataset that a rank made with random numbers of its own."""
    return dataset(digest=f"data {rank}", data={"images": f"data {rank}", "seed": "0"}, **changes)


def named(rank: int, *orders: Sequence[int], shared: bool, **options: Any) -> list[Row]:
    """Passes whose contents are the rank's own, or `shared`."""
    contents = [[f"{'all' if shared else rank}/{place}" for place in order] for order in orders]
    rows = passes(*orders, **options)
    for each in rows:
        if each["kind"] == "batch":
            place = orders[each["number"]].index(each["indices"][0])
            each["samples"] = contents[each["number"]][place : place + len(each["samples"])]
    return rows


def test_a_dataset_of_each_rank_that_a_sampler_splits_is_found() -> None:
    finding = only(
        check(
            *[
                named(rank, order, shared=False, dataset=own(rank))
                for rank, order in enumerate((EVEN, ODD))
            ]
        )
    )
    assert (finding.cause, finding.line) == (Cause.DATASETS_DIFFER, "train.py:10")
    assert (
        finding.evidence
        == "DistributedSampler splits one dataset over the ranks, and each rank has a dataset of"
        " its own: images of rank 0's TensorDataset differs from another rank's"
    )
    lengths = [
        named(
            rank,
            EVEN[: 8 - rank],
            shared=False,
            dataset=dataset(digest="", data={}, length=16 - rank),
        )
        for rank in range(2)
    ]
    assert "the ranks' have 16, 15 samples" in only(check(*lengths)).evidence


def test_what_a_dataset_holds_beside_its_samples_may_be_the_ranks_own() -> None:
    """Both ranks read one place, in two epochs, and the same was there."""
    rows = [
        named(rank, *orders, shared=True, dataset=own(rank))
        for rank, orders in enumerate([(EVEN, ODD), (ODD, EVEN)])
    ]
    assert Cause.DATASETS_DIFFER not in causes(check(*rows))
    assert not check(
        *[
            passes(ALL, sampler=SAMPLER, dataset=own(rank), contents=[[f"{rank}/{n}" for n in ALL]])
            for rank in range(2)
        ]
    ).findings


def test_two_splits_agree_in_some_places_by_chance() -> None:
    rows = [
        named(rank, *orders, shared=False, dataset=own(rank))
        for rank, orders in enumerate([(EVEN, ODD), (ODD, EVEN)])
    ]
    for each in rows[0] + rows[1]:
        if each["kind"] == "batch":
            each["samples"] = [
                "all/3" if place == 3 else sample
                for place, sample in zip(each["indices"], each["samples"], strict=True)
            ]
    assert only(check(*rows)).cause is Cause.DATASETS_DIFFER


def test_datasets_that_cannot_be_read_differ_if_their_samples_do() -> None:
    unread = dataset(digest="", data={})
    orders = [(EVEN, ODD, EVEN[::-1]), (ODD, EVEN, ODD[::-1])]
    rows = [named(rank, *each, shared=False, dataset=unread) for rank, each in enumerate(orders)]
    assert "held other samples on each" in only(check(*rows)).evidence


def test_an_evaluation_of_samples_on_which_another_rank_trains_is_found() -> None:
    """Each rank has drawn a split of its own."""

    def split(rank: int) -> list[Row]:
        parts = [ALL[:12], ALL[12:]] if rank == 0 else [ALL[4:], ALL[:4]]
        both = [
            dataset(
                length=len(part),
                digest=f"data/{part}",
                whole="data",
                whole_length=16,
                subset=part,
                data={"indices": str(part)},
            )
            for part in parts
        ]
        training = passes(range(12), dataset=both[0], sampler={**SAMPLER, "num_samples": 12})
        return [
            *training,
            *passes(
                range(4),
                dataset=both[1],
                loader=1,
                line="train.py:11",
                training=False,
                sampler=SAMPLER,
            ),
        ]

    found = [
        each for each in check(split(0), split(1)).findings if each.cause is Cause.DATASETS_DIFFER
    ]
    assert [(each.evidence, each.line) for each in found] == [
        (
            (
                "rank 0 trains on 4 of the 4 samples with which rank 1 evaluates: each rank has"
                " split the data by itself"
            ),
            "train.py:10",
        )
    ]
    assert Cause.DATASETS_DIFFER not in causes(check(split(0), split(0)))


def test_a_loader_that_is_made_anew_for_each_epoch_is_one_loader() -> None:
    first, second = [[*passes(each), *passes(each, loader=1)] for each in (EVEN, ODD)]
    assert causes(check(first, second)) == {Cause.SAME_ORDER}
    other = [[*passes(each), *passes(each[::-1], loader=1)] for each in (EVEN, ODD)]
    result = check(*other)
    assert (result.findings, result.unseen) == ([], [])
    assert result.right.startswith("32 samples, in passes over the data: 2;")


# Evaluations


def evaluated(*ranks: Sequence[int], **options: Any) -> list[list[Row]]:
    return [passes(each, loader=1, training=False, **options) for each in ranks]


def test_an_evaluation_that_counts_padding_is_found() -> None:
    finding = only(check(*evaluated([0, 2, 4], [1, 3, 0], dataset=dataset(length=5))))
    assert (finding.cause, finding.line) == (Cause.EVALUATION_REPEATS, "train.py:10")
    assert (
        finding.evidence
        == "an evaluation over 5 samples counted 6: 1 of them twice, to give all ranks the same"
        " number"
    )


def test_an_evaluation_of_each_sample_once_is_right() -> None:
    assert not check(*evaluated([0, 2, 4], [1, 3], dataset=dataset(length=5))).findings
    assert not check(
        *evaluated([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], dataset=dataset(length=5))
    ).findings, "each rank all of it"
    assert not check(
        *evaluated([0, 2, 4], [1, 3, 0], dataset=dataset(length=5), complete=False)
    ).findings


def test_padding_that_accelerate_takes_away_is_right() -> None:
    ranks = evaluated([0, 2, 4], [1, 3, 0], dataset=dataset(length=5))
    for each in ranks:
        each.append({"kind": "gather_for_metrics"})
    assert not check(*ranks).findings


# Orders


def test_one_order_in_two_epochs_is_found() -> None:
    finding = only(check(passes(EVEN, EVEN), passes(ODD, ODD)))
    assert (finding.cause, finding.line) == (Cause.SAME_ORDER, "train.py:12")
    assert finding.evidence.endswith("in the same order; the sampler's epoch was 0 in both")
    assert not check(
        passes(EVEN, EVEN[::-1], epochs=[0, 1]), passes(ODD, ODD[::-1], epochs=[0, 1])
    ).findings


def test_data_that_are_not_shuffled_have_one_order() -> None:
    plain = {"type": "SequentialSampler", "batch_type": "BatchSampler"}
    assert not check(passes(ALL, ALL, sampler=plain)).findings
    unshuffled = {**DISTRIBUTED, "shuffle": False}
    assert not check(
        passes(EVEN, EVEN, sampler=unshuffled), passes(ODD, ODD, sampler=unshuffled)
    ).findings


def test_the_beginning_of_an_epoch_is_enough_for_its_order() -> None:
    assert causes(check(passes(ALL, ALL[:4], sampler=SAMPLER, complete=False))) == {
        Cause.SAME_ORDER
    }
    assert not check(passes(ALL, ALL[:2], sampler=SAMPLER, complete=False)).findings, (
        "too few to be no accident"
    )


# Loaders


def test_without_a_loader_nothing_is_said() -> None:
    result = check([step()], [step()])
    assert (result.findings, result.right) == ([], "")
    assert "samples that a script takes by itself are not seen" in result.unseen[0]


def test_passes_without_a_batch_and_evaluations_on_one_rank_are_left_out() -> None:
    assert loader_passes(given(passes([]), passes([]))) == []
    assert loader_passes(given(passes(EVEN, training=False), [])) == []
    (loader,) = loader_passes(given(passes(EVEN, EVEN), passes(ODD)))
    assert len(loader.passes) == 1
    assert loader.is_training
