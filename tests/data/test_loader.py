import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from lockstep.assignment import microbatch_spans
from lockstep.base.errors import DataError, WorkerError
from lockstep.data.fetch import ALIGNMENT_BYTES, Fetcher
from lockstep.data.loader import CHUNK_POSITIONS, Loader, Span
from lockstep.order import Order

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")

CPU = torch.device("cpu")
WORKERS = pytest.mark.parametrize("workers", [0, 1])


class Items(Dataset):
    """A dataset of what `make` says of an index."""

    def __init__(self, make=torch.tensor, length=10):
        self.make = make
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.make(index)


class Many(Items):
    """A dataset whose `make` takes all indices of a microbatch."""

    def __getitems__(self, indices):
        return self.make(indices)


def drawn():
    """One number from each of the default generators."""
    return random.random(), np.random.random(), torch.rand(()).item()


def spans(count, size, steps=3) -> Iterator[Span]:
    """`steps` global batches of `count` samples, in microbatches of `size`."""
    for step in range(steps):
        for index, (start, stop) in enumerate(microbatch_spans(count, size, 1)):
            yield Span(step=step, index=index, start=step * count + start, stop=step * count + stop)


@pytest.fixture
def load():
    """Fetches all microbatches of some spans; closes the loaders at the end."""
    loaders = []

    def fetch(data, among=None, **options):
        loaders.append(Loader(data, **{"seed": 0, "device": CPU, **options}))
        return list(loaders[-1].fetch(spans(8, 3) if among is None else among))

    yield fetch
    for loader in loaders:
        loader.close()


def pairs(length=10):
    return TensorDataset(torch.arange(length) * 1.5, torch.arange(length))


DATASETS = {
    "tensors": lambda: (pairs(), None),
    "samples": lambda: (Items(lambda i: {"x": torch.full((2,), float(i)), "name": str(i)}), None),
    "augmented": lambda: (Items(lambda i: (i, *drawn())), None),
    "augmented at once": lambda: (
        Many(lambda indices: {"x": torch.tensor(indices), "noise": torch.rand(len(indices))}),
        None,
    ),
    "listed at once": lambda: (Many(lambda indices: [(i, *drawn()) for i in indices]), None),
    "randomly collated": lambda: (pairs(), lambda samples: (default_collate(samples), *drawn())),
}


def plain(microbatch):
    return repr(microbatch)


@pytest.mark.parametrize("kind", DATASETS)
def test_any_number_of_workers_gives_the_same_microbatches(load, kind):
    alone, one, three = (
        [plain(microbatch) for microbatch in load(data, collate=collate, workers=workers)]
        for workers in (0, 1, 3)
        for data, collate in [DATASETS[kind]()]
    )
    assert len(alone) == 9
    assert alone == one == three


@pytest.mark.parametrize("kind", DATASETS)
@WORKERS
def test_the_default_generators_are_left_as_they_are(load, kind, workers):
    data, collate = DATASETS[kind]()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = drawn()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    load(data, collate=collate, workers=workers)
    assert drawn() == expected


def test_the_default_generators_are_left_as_they_are_when_a_sample_fails(load):
    before = torch.get_rng_state(), random.getstate(), np.random.get_bit_generator()
    with pytest.raises(ZeroDivisionError):
        load(Items(lambda i: torch.rand(()) / 0 if drawn() and 1 // 0 else None))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_bit_generator() is before[2]


def test_microbatches_hold_the_samples_of_their_spans_in_the_keyed_order(load):
    fetched = load(Items(length=100), spans(32, 5, steps=40), seed=3)
    asked = list(spans(32, 5, steps=40))
    assert [(each.step, each.index, each.size) for each in fetched] == [
        (span.step, span.index, span.stop - span.start) for span in asked
    ]
    _, samples = Order(100, 3).samples(np.arange(32 * 40))
    assert [each.batch.tolist() for each in fetched] == [
        samples[span.start : span.stop].tolist() for span in asked
    ]


def test_a_microbatch_larger_than_a_chunk_of_the_order_is_whole(load):
    (fetched,) = load(
        Items(length=10), [Span(step=0, index=0, start=5, stop=5 + 2 * CHUNK_POSITIONS)]
    )
    assert (
        fetched.batch.tolist()
        == Order(10, 0).samples(np.arange(5, 5 + 2 * CHUNK_POSITIONS))[1].tolist()
    )


def test_unshuffled_data_come_in_their_own_order_and_random_ones_do_not_depend_on_the_microbatch(
    load,
):
    fours = load(Items(lambda i: (i, drawn())), spans(10, 4, steps=1), shuffle=False)
    torch.manual_seed(1)
    threes = load(Items(lambda i: (i, drawn())), spans(10, 3, steps=1), shuffle=False)
    assert [each.batch[0].tolist() for each in fours] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    numbers, again = (
        torch.cat([torch.stack(each.batch[1]) for each in some], dim=1) for some in (fours, threes)
    )
    assert torch.equal(numbers, again)


def augmentation(load, **options):
    """(epoch, sample) -> what the generators gave, over three epochs."""
    among = options.pop("among", spans(10, 4))
    fetched = [
        number
        for each in load(Items(lambda i: (i, drawn())), among, collate=list, **options)
        for number in each.batch
    ]
    epochs, _ = Order(10, 0).samples(np.arange(len(fetched)))
    return {
        (epoch, sample): numbers
        for epoch, (sample, numbers) in zip(epochs.tolist(), fetched, strict=True)
    }


def test_the_augmentation_of_a_sample_depends_on_seed_epoch_and_sample_only(load):
    numbers = augmentation(load)
    assert len(numbers) == 30
    for one_generator in zip(*numbers.values(), strict=True):
        assert len(set(one_generator)) == 30
    assert augmentation(load, among=spans(6, 5, steps=5)) == numbers
    assert not set(augmentation(load, seed=1).values()) & set(numbers.values())


def test_the_augmentation_of_a_microbatch_fetched_at_once_depends_on_seed_epoch_and_first_sample_only(
    load,
):
    def numbers(size, **options):
        fetched = load(
            Many(lambda indices: {"first": indices[0], "drawn": drawn()}),
            spans(10, size),
            **options,
        )
        return {(each.step, each.batch["first"]): each.batch["drawn"] for each in fetched}

    assert len(set(numbers(2).values())) == 15
    assert numbers(4).items() < numbers(2).items()
    assert not set(numbers(2, seed=1).values()) & set(numbers(2).values())


def test_tensors_that_are_only_indexed_need_no_generators():
    assert not Fetcher(pairs(), None, seed=0).seeds
    assert Fetcher(pairs(), list, seed=0).seeds


def test_a_subset_of_an_augmented_dataset_is_augmented_sample_by_sample(load):
    def numbers(size):
        fetched = load(
            Subset(Items(lambda i: (i, drawn()), length=20), range(10, 20)),
            spans(10, size),
            collate=list,
        )
        return [each for microbatch in fetched for each in microbatch.batch]

    assert numbers(4) == numbers(5)


def test_random_collation_depends_on_seed_step_and_microbatch_only(load):
    def numbers(**options):
        return {
            (each.step, each.index): each.batch
            for each in load(pairs(), collate=lambda samples: drawn(), **options)
        }

    assert len(set(numbers().values())) == 9
    later = itertools.dropwhile(lambda span: span.step < 1, spans(8, 3))
    assert numbers(among=later).items() < numbers().items()
    assert not set(numbers(seed=1).values()) & set(numbers().values())


def test_tensors_give_the_batches_of_the_default_collate(load):
    data = pairs()
    for fetched, one_by_one in zip(load(data), load(Items(lambda i: data[i])), strict=True):
        assert isinstance(fetched.batch, list)
        assert plain(fetched) == plain(one_by_one)


def test_one_microbatch_of_tensors_may_be_changed_while_another_waits_for_its_backward(load):
    first, second = (microbatch.batch[0] for microbatch in load(pairs(), spans(8, 4, steps=1)))
    weight = torch.ones_like(first, requires_grad=True)
    loss = (first * weight).sum()
    second.zero_()
    loss.backward()
    assert torch.equal(weight.grad, first)


@pytest.mark.parametrize("features", [1, 3, 6, 8, 16])
@pytest.mark.parametrize("size", [1, 3, 4, 5, 8, 16])
def test_a_microbatch_of_tensors_starts_where_a_tensor_of_its_own_would(load, features, size):
    data = TensorDataset(torch.randn(64, features), torch.arange(64), torch.randn(64).double())
    fetched = load(data, spans(64, size, steps=1))
    assert all(
        tensor.data_ptr() % ALIGNMENT_BYTES == 0
        for microbatch in fetched
        for tensor in microbatch.batch
    )


def test_a_tensor_dataset_with_an_item_of_its_own_is_asked_for_it(load):
    class Doubled(TensorDataset):
        def __getitem__(self, index):
            return [2 * part for part in super().__getitem__(index)]

    data = pairs()
    for fetched, doubled in zip(load(data), load(Doubled(*data.tensors)), strict=True):
        assert [part.tolist() for part in doubled.batch] == [
            (2 * part).tolist() for part in fetched.batch
        ]


def test_a_list_from_getitems_is_collated_and_anything_else_is_the_batch(load):
    lists = load(Many(lambda indices: [{"x": i} for i in indices]))
    assert [each.batch["x"].tolist() for each in lists] == [
        each.batch["x"] for each in load(Many(lambda indices: {"x": indices}))
    ]
    assert all(
        type(each.batch) is tuple for each in load(Many(lambda indices: (torch.tensor(indices),)))
    )


def test_a_list_from_getitems_that_is_not_one_item_a_sample_is_refused(load):
    with pytest.raises(DataError) as caught:
        load(Many(lambda indices: [torch.tensor(indices), torch.tensor(indices)]))
    assert (
        str(caught.value)
        == "__getitems__ of Many returned a list of 2 for 3 indices after step 0, microbatch 0; a list"
        " must have one item per sample, to be collated; return a tuple, a dict or a tensor for a"
        " batch made already"
    )


@WORKERS
def test_spans_are_taken_only_a_chunk_of_positions_ahead(workers):
    taken = 0

    def endless():
        nonlocal taken
        for span in spans(8, 4, steps=10**9):
            taken += 1
            yield span

    loader = Loader(pairs(), seed=0, workers=workers, device=CPU)
    fetched = loader.fetch(endless())
    assert taken == 0
    next(fetched)
    assert taken * 4 <= 2 * CHUNK_POSITIONS
    loader.close()


def test_no_spans_give_no_microbatches(load):
    assert load(pairs(), []) == []


@WORKERS
def test_a_failing_sample_keeps_its_exception_and_is_named(load, workers):
    def seventh_fails(index):
        if index == 7:
            raise KeyError("no such image", index)
        return index

    with pytest.raises(KeyError) as caught:
        load(Items(seventh_fails), spans(10, 10), workers=workers)
    assert caught.value.args == ("no such image", 7)
    assert caught.value.__notes__ == ["raised by sample 7 of Items after step 0, microbatch 0"]
    if workers:
        assert "in seventh_fails" in str(caught.value.__cause__)


@WORKERS
def test_failing_getitems_and_collate_keep_their_exceptions_and_are_named(load, workers):
    def fails(indices):
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone") as caught:
        load(Many(fails), workers=workers, seed=1)
    indices = Order(10, 1).samples(np.arange(3))[1].tolist()
    assert caught.value.__notes__ == [
        f"raised by __getitems__({indices}) of Many after step 0, microbatch 0"
    ]
    with pytest.raises(OSError, match="disk gone") as caught:
        load(pairs(), workers=workers, seed=1, collate=fails)
    assert caught.value.__notes__ == [
        f"raised by collate after step 0, microbatch 0: samples {indices}"
    ]


def test_an_exception_that_cannot_leave_its_worker_comes_as_its_traceback(load):
    def fails(index):
        class Local(Exception):
            pass

        raise Local("only here")

    with pytest.raises(
        WorkerError,
        match=(
            r"(?s)a loader process failed:\nTraceback.*in fails.*Local: only here.*raised by sample"
        ),
    ):
        load(Items(fails), workers=1)


@WORKERS
def test_ragged_samples_without_a_collate_are_refused(load, workers):
    with pytest.raises(DataError) as caught:
        load(Items(lambda i: torch.zeros(1 + i)), spans(10, 2), workers=workers)
    samples = Order(10, 0).samples(np.arange(2))[1]
    assert (
        str(caught.value)
        == f"after step 0, microbatch 0: samples {samples.tolist()} do not make a batch: stack"
        f" expects each tensor to be equal size, but got [{samples[0] + 1}] at entry 0 and"
        f" [{samples[1] + 1}] at entry 1; torch's default collate needs samples of one structure"
        " and shape; give Recipe.collate or Evaluation.collate, a function from a list of"
        " samples to a batch"
    )


@WORKERS
def test_a_dataset_that_changes_its_length_is_refused(workers):
    data = Items()
    loader = Loader(data, seed=0, workers=workers, device=CPU)
    fetched = loader.fetch(spans(8, 3))
    next(fetched)
    data.length = 12
    with pytest.raises(DataError) as caught:
        next(fetched)
    loader.close()
    assert (
        str(caught.value)
        == "the dataset has 12 samples after step 0, microbatch 1, and had 10 before; the order of"
        " a run follows from the length; give data whose len() stays the same"
    )


@WORKERS
def test_a_batch_made_otherwise_than_the_first_is_refused(load, workers):
    eighth = Order(10, 0).samples(np.array([7]))[1].item()

    with pytest.raises(DataError) as caught:
        load(
            Items(lambda i: {"x": torch.tensor(i), "y": torch.tensor(i if i == eighth else 1.0)}),
            spans(4, 1),
            workers=workers,
        )
    assert (
        str(caught.value)
        == "after step 1, microbatch 3: batch['y'] is torch.int64 and was torch.float32 in the"
        " first microbatch; every microbatch has the same containers, keys and dtypes (shapes"
        " may differ); make them so in the dataset or in the collate function"
    )
