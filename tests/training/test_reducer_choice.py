"""Which reducer a mesh needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.training.reducers.ddp import DdpReducer
from lockstep.training.reducers.fsdp import FsdpReducer
from lockstep.training.reducers.ordered import OrderedReducer
from lockstep.training.reducers.post_backward import PostBackwardReducer
from lockstep.training.reducers.reducer import choose_reducer
from lockstep.training.reducers.rounds import RoundsReducer


def mesh(*, shard: int = 1, divides_features: bool = False, on_one_host: bool = False) -> Any:
    """Stands in for a mesh: all that the choice depends on."""
    sizes = {"shard": shard, "replicate": 2}
    memory = object() if on_one_host else None
    return SimpleNamespace(
        axis=lambda name: SimpleNamespace(size=sizes[name]),
        larger=[SimpleNamespace(same_state=not divides_features, divides=())],
        summed=lambda: SimpleNamespace(shared_memory=memory, hierarchy=None, size=2 * shard),
    )


@pytest.mark.parametrize("on_one_host", [False, True])
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("bitwise", [False, True])
@pytest.mark.parametrize(("shard", "divides_features"), [(1, False), (1, True), (2, True)])
def test_every_mesh_has_one_reducer(
    shard: int, divides_features: bool, bitwise: bool, compressed: bool, on_one_host: bool
) -> None:
    choice = choose_reducer(
        mesh(shard=shard, divides_features=divides_features, on_one_host=on_one_host),
        bitwise=bitwise,
        compressed=compressed,
    )
    expected: type
    if shard > 1:
        expected, reason = FsdpReducer, "the shard axis has more than one rank"
    elif divides_features and bitwise:
        expected, reason = (
            OrderedReducer,
            "numerics=bitwise: DistributedDataParallel takes no DTensors and no pipeline schedules",
        )
    elif divides_features:
        expected, reason = (
            PostBackwardReducer,
            "DistributedDataParallel takes no DTensors and no pipeline schedules",
        )
    elif bitwise:
        expected, reason = DdpReducer, "numerics=bitwise: buckets are summed in the canonical order"
    elif compressed:
        expected, reason = DdpReducer, "gradient_compression: buckets are sent in fewer bytes"
    elif on_one_host:
        expected, reason = PostBackwardReducer, "all replicas share the memory of one host"
    else:
        expected, reason = DdpReducer, "buckets are summed while the backward computes"
    assert (choice.reducer, choice.reason) == (expected, reason)


def test_chunks_of_sharded_models_are_summed_in_rounds() -> None:
    choice = choose_reducer(mesh(shard=2), bitwise=True, compressed=False, in_chunks=True)
    assert choice == (
        RoundsReducer,
        "numerics=bitwise: chunks of a sequence are computed in turn",
    )
