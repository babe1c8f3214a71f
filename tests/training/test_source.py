import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import Dataset

from lockstep.assignment import MicrobatchAssignment
from lockstep.comm.mesh import Mesh
from lockstep.comm.world import World
from lockstep.data.loader import Loader
from lockstep.plan import Plan
from lockstep.training.microbatches import Batching, from_data, from_indices

CPU = torch.device("cpu")


class Noted(Dataset):
    """Ten samples; notes which were asked for."""

    def __init__(self):
        self.asked = []

    def __len__(self):
        return 10

    def __getitem__(self, index):
        self.asked.append(index)
        return torch.tensor([index, torch.randint(2**40, ()).item()])


def laid_out(rank=0, size=1, assignment=None):
    """The mesh of one of `size` replicas, which exchanges nothing, and what each computes."""
    world = World(
        rank=rank, size=size, local_rank=rank, local_size=size, device=CPU, owns_group=False
    )
    mesh = Mesh.of(world, Plan(replicate=size, transport="torch"))
    return {"mesh": mesh, "assignment": assignment or MicrobatchAssignment(size)}


def plain(source):
    """What is in a step."""
    batches = [
        (item.index, item.is_dummy, item.size, repr(item.batch)) for item, _ in source.batches(0)
    ]
    return source.step, source.samples, source.layout.samples_of(0), batches


@pytest.mark.parametrize("length", [{"steps": 7, "epochs": None}, {"steps": None, "epochs": 3}])
@pytest.mark.parametrize("rank", [0, 1])
def test_steps_from_a_later_one_on_are_the_same_and_the_ones_before_are_not_fetched(length, rank):
    def steps(first):
        data = Noted()
        how_long = Batching(samples=10, global_batch=6, microbatch=2, **laid_out(rank, 2), **length)
        return (
            list(
                map(
                    plain,
                    from_data(Loader(data, seed=3, device=CPU), how_long, first=first),
                )
            ),
            data.asked,
        )

    whole, asked = steps(0)
    later, asked_later = steps(4)
    assert len(whole) > 4
    assert later == whole[4:]
    assert asked_later == asked[sum(size for *_, batches in whole[:4] for *_, size, _ in batches) :]


def test_steps_without_data_begin_where_they_are_asked_to():
    length = Batching(samples=8, global_batch=8, microbatch=4, steps=5, epochs=None, **laid_out())
    whole = list(map(plain, from_indices(length)))
    assert [step for step, *_ in whole] == [0, 1, 2, 3, 4]
    assert list(map(plain, from_indices(length, first=3))) == whole[3:]


@given(
    size=st.integers(1, 40),
    microbatch=st.integers(1, 40) | st.none(),
    microbatch_splits=st.integers(0, 6),
    ranks=st.integers(1, 4),
)
def test_halves_lie_in_their_microbatch_and_differ_by_at_most_a_sample(
    size: int, microbatch: int | None, microbatch_splits: int, ranks: int
) -> None:
    def length(microbatch_splits: int) -> Batching:
        about = {"samples": size, "global_batch": size, "steps": 1, "epochs": None}
        return Batching(
            **about,
            microbatch=microbatch,
            **laid_out(0, ranks),
            microbatch_splits=microbatch_splits,
        )

    whole, parts = length(0).spans(size), length(microbatch_splits).spans(size)
    assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])]
    assert parts[-1][1] == size
    for start, stop in whole:
        sizes = [end - begin for begin, end in parts if start <= begin and end <= stop]
        assert sum(sizes) == stop - start
        assert len(sizes) == min(2**microbatch_splits, stop - start)
        assert max(sizes) - min(sizes) <= 1
    assert length(microbatch_splits).largest == max(stop - start for start, stop in parts)
