"""Plans: the axes, the mini-language, and what is refused."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given, strategies as st

from lockstep.base.errors import PlanError
from lockstep.plan import Plan


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("", Plan()),
        ("replicate=auto", Plan()),
        ("replicate=3", Plan(replicate=3)),
        ("numerics=bitwise", Plan(numerics="bitwise")),
        (" replicate = 2 , numerics = bitwise ,", Plan(replicate=2, numerics="bitwise")),
        ("split=2", Plan(replicate=1, split=2)),
        ("split=3+0+5,shard=1", Plan(split=(3, 0, 5))),
        ("data_parallel=2", Plan(replicate=1, data_parallel=2)),
        ("shard=2,offload=yes", Plan(shard=2, offload=True)),
        ("microbatch_splits=2", Plan(microbatch_splits=2)),
        ("replicate=2,assignment=measured", Plan(replicate=2, assignment="measured")),
        ("workers=auto,threads=auto,prefetch=3", Plan(workers="auto", threads="auto", prefetch=3)),
        ("context=4,exchange=keys", Plan(context=4, exchange="keys")),
        ("replicate=2,expert=auto", Plan(replicate=2, expert="auto")),
        ("workers=2,shard=1,tensor=1,pipeline=1", Plan(replicate=1, workers=2)),
    ],
)
def test_the_mini_language_says_what_the_keywords_say(text: str, plan: Plan) -> None:
    assert Plan.parse(text) == plan


@given(
    replicate=st.integers(1, 64) | st.just("auto"),
    numerics=st.sampled_from(["fast", "bitwise"]),
    workers=st.integers(0, 9) | st.just("auto"),
    threads=st.integers(1, 9) | st.sampled_from(["auto", None]),
    prefetch=st.integers(1, 9) | st.just("auto"),
    shard=st.integers(1, 8),
    sharding=st.sampled_from(["full", "gradients"]),
    offload=st.booleans(),
    checkpointing=st.sampled_from(["none", "selective", "full"]),
    microbatch_splits=st.integers(0, 5),
    compile=st.booleans(),
    transport=st.sampled_from(["auto", "torch"]),
    assignment=st.sampled_from(["equal", "measured"]),
    context=st.integers(1, 4),
    expert=st.integers(1, 4),
    exchange=st.sampled_from(["auto", "keys", "heads"]),
)
def test_a_plan_reads_back_what_it_writes(**settings: Any) -> None:
    is_sharded = settings["shard"] > 1
    is_cut, is_mixed = settings["context"] > 1, settings["expert"] > 1
    fitting = {
        "offload": settings["offload"] and is_sharded and not is_mixed,
        "assignment": "equal" if is_sharded or is_cut or is_mixed else settings["assignment"],
    }
    if is_cut or is_mixed:
        fitting |= {"numerics": "fast", "compile": False}
    if fitting["offload"] and {**settings, **fitting}["numerics"] == "bitwise":
        fitting["threads"] = None
    plan = Plan(**{**settings, **fitting})
    assert Plan.parse(str(plan)) == plan


@given(
    split=st.integers(1, 9) | st.lists(st.integers(1, 9), min_size=2).map(tuple),
    data_parallel=st.integers(1, 9),
)
def test_so_does_a_plan_for_one_process(split: Any, data_parallel: int) -> None:
    for plan in (Plan(split=split, numerics="bitwise"), Plan(data_parallel=data_parallel)):
        assert Plan.parse(str(plan)) == plan


@given(world_size=st.integers(1, 1000), numerics=st.sampled_from(["fast", "bitwise"]))
def test_auto_fills_what_is_left(world_size: int, numerics: Any) -> None:
    plan = Plan(numerics=numerics).resolve(world_size)
    assert plan == Plan(replicate=world_size, numerics=numerics)
    assert plan.resolve(world_size) == plan


@given(
    world_size=st.integers(1, 60),
    shard=st.integers(1, 8),
    replicate=st.integers(1, 8) | st.just("auto"),
)
def test_the_sizes_that_a_plan_fits_are_those_that_it_resolves_for(
    world_size: int, shard: int, replicate: Any
) -> None:
    def fits(size: int) -> bool:
        try:
            plan.resolve(size)
        except PlanError:
            return False
        return True

    plan = Plan(replicate=replicate, shard=shard)
    assert plan.sizes(world_size) == [size for size in range(1, world_size + 1) if fits(size)]
    assert plan.fits_several_sizes == (replicate == "auto")


def test_an_axis_that_is_not_given_is_1_where_another_is() -> None:
    plan = Plan(shard=1)
    assert (plan.replicate, plan.shard, plan.tensor, plan.pipeline) == (1, 1, 1, 1)
    assert Plan().replicate == "auto"


def test_the_axes_of_the_mesh_are_in_the_order_of_how_often_they_communicate() -> None:
    plan = Plan(replicate=2, shard=2, context=2, tensor=2)
    assert [axis.name for axis in plan.larger] == ["replicate", "shard", "context", "tensor"]
    assert (plan.data_ranks, plan.state_divided) == (4, ["shard=2", "context=2", "tensor=2"])
    assert Plan(replicate=2, context=2).state_divided == [], "without shard, nothing is sharded"
    plan = Plan(replicate=2, shard=2, expert=3, context=2)
    assert [axis.name for axis in plan.larger] == ["replicate", "shard", "expert", "context"]
    assert (plan.data_ranks, plan.state_divided) == (12, ["shard=2", "expert=3", "context=2"])


def test_ranks_of_expert_compute_in_rounds() -> None:
    assert Plan(expert=2).has_rounds
    assert not Plan(context=2).has_rounds


def test_a_plan_is_frozen_and_takes_keywords_only() -> None:
    with pytest.raises(FrozenInstanceError):
        Plan().replicate = 2  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional"):
        Plan(2)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("world_size", "text", "message"),
    [
        (
            3,
            "replicate=2",
            (
                "plan 'replicate=2,numerics=fast' with 3 processes; the axes multiply to 2, and"
                " must multiply to the number of processes; change the plan, or the number of"
                " processes to 2"
            ),
        ),
        (
            1,
            "replicate=4,numerics=bitwise",
            "plan 'replicate=4,numerics=bitwise' with 1 processes; the axes multiply to 4",
        ),
        (
            2,
            "split=2",
            "plan 'replicate=1,numerics=fast,split=2' with 2 processes; the axes multiply to 1",
        ),
        (2, "shard=1", "plan 'replicate=1,numerics=fast' with 2 processes; the axes multiply to 1"),
    ],
)
def test_axes_that_do_not_multiply_to_the_world_size_are_refused(
    world_size: int, text: str, message: str
) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.parse(text).resolve(world_size)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "replica=2",
            (
                "'replica' in plan 'replica=2' is unknown; the known keys are replicate, shard, expert,"
                " context, tensor, pipeline, numerics, sharding, offload, checkpointing,"
                " microbatch_splits, slices, logits, schedule, exchange, compile, split, data_parallel,"
                " transport, assignment, threads, workers, prefetch; did you mean replicate?"
            ),
        ),
        ("x=2", "'x' in plan 'x=2' is unknown; the known keys are replicate, shard"),
        (
            "numerics=bitwize",
            "numerics=bitwize; the known values are fast, bitwise; did you mean bitwise?",
        ),
        (
            "replicate=2,replicate=2",
            "'replicate' is given twice in plan 'replicate=2,replicate=2'; give it once",
        ),
        (
            "replicate=0",
            "replicate=0; the size of a mesh axis is a whole number of at least 1, or auto",
        ),
        (
            "replicate=-2",
            "replicate=-2; the size of a mesh axis is a whole number of at least 1, or auto",
        ),
        (
            "replicate=two",
            "replicate='two' in plan 'replicate=two'; the value is a whole number or auto",
        ),
        (
            "replicate=2.0",
            "replicate='2.0' in plan 'replicate=2.0'; the value is a whole number or auto",
        ),
        (
            "replicate",
            (
                "'replicate' in plan 'replicate'; a plan is made of name=value pairs with commas"
                " between them, such as replicate=2,numerics=bitwise"
            ),
        ),
        ("replicate=2;shard=2", "'replicate=2;shard=2' in plan 'replicate=2;shard=2'; a plan is"),
        (
            "schedule=1F1B",
            "schedule=1F1B; the known values are gpipe, 1f1b, interleaved, zero-bubble; did you"
            " mean 1f1b?",
        ),
        ("replicate=", "'replicate=' in plan 'replicate='; a plan is made of name=value pairs"),
        ("2", "'2' in plan '2'; a plan is made of name=value pairs"),
        (
            "tensor=2,numerics=bitwise",
            "tensor=2 with numerics=bitwise and no slices; it needs slices, a power of two and a"
            " multiple of tensor: then the sums inside a layer add the same parts on any number of"
            " ranks; write tensor=2,slices=2,numerics=bitwise, with",
        ),
        *(
            (
                given,
                f"{said}; it needs slices, a power of two and a multiple of tensor: then the sums"
                f" inside a layer add the same parts on any number of ranks; write {instead},"
                "numerics=bitwise, with",
            )
            for given, said, instead in (
                (
                    "tensor=4,numerics=bitwise,slices=2",
                    "tensor=4 with numerics=bitwise and slices=2",
                    "tensor=4,slices=4",
                ),
                (
                    "tensor=6,numerics=bitwise,slices=8",
                    "tensor=6 with numerics=bitwise and slices=8",
                    "tensor=4,slices=8",
                ),
            )
        ),
        ("slices=6,numerics=bitwise", "slices=6; it counts the slices of each sharded layer"),
        ("slices=0", "slices=0; it counts the slices of each sharded layer"),
        ("slices=2", "slices=2 with numerics=fast; slices give the bits that numerics=bitwise"),
        (
            "slices=2,numerics=bitwise,compile=yes",
            (
                "slices=2 with compile=yes; its layers inspect their tensors while they run, which a"
                " compiled forward cannot do; leave compile=yes out, or leave slices out"
            ),
        ),
        (
            "slices=2,numerics=bitwise,context=2",
            "slices=2 with context=2; chunks of a sequence are computed in threads",
        ),
        ("tensor=2,logits=chunked", "tensor=2 with logits=chunked; its style 'loss' shards"),
        (
            "pipeline=2,schedule=gpipe,logits=chunked",
            "schedule=gpipe with logits=chunked; the forward of a loss computes the gradients",
        ),
        ("split=3+5,logits=chunked", "split=3+5 with logits=chunked; a loss of chunks uses"),
        ("data_parallel=2,logits=chunked", "data_parallel=2 with logits=chunked; it computes each"),
        ("logits=half", "logits=half; the known values are whole, chunked"),
        ("tensor=2,compile=yes", "tensor=2 with compile=yes; its layers inspect their tensors"),
        ("shard=2,sharding=half", "sharding=half; the known values are full, gradients"),
        (
            "pipeline=2,schedule=2f2b",
            "schedule=2f2b; the known values are gpipe, 1f1b, interleaved, zero-bubble",
        ),
        (
            "context=2,compile=yes",
            "context=2 with compile=yes; attention is replaced while the forward runs",
        ),
        (
            "expert=2,tensor=2,slices=2,numerics=bitwise",
            "slices=2 with expert=2; layers are not computed in slices beside experts yet",
        ),
        (
            "expert=2,shard=2,pipeline=2,checkpointing=selective",
            "checkpointing=selective with expert=2, shard=2 and pipeline=2; FSDP2 gathers experts",
        ),
        (
            "pipeline=2,schedule=zero-bubble,checkpointing=selective",
            "schedule=zero-bubble with checkpointing=selective; it computes the gradients of",
        ),
        (
            "expert=2,split=2",
            "split=2 with expert=2; split is for one process with several devices",
        ),
        (
            "expert=2,data_parallel=2",
            "data_parallel=2 with expert=2; data_parallel is for one process",
        ),
        (
            "assignment=measured,expert=2",
            (
                "assignment=measured with expert=2; its ranks compute in rounds of one microbatch"
                " each, since each forward sends tokens to the experts of other ranks"
            ),
        ),
        ("context=2,exchange=ring", "exchange=ring; the known values are auto, keys, heads"),
        (
            "assignment=measured,context=2",
            "assignment=measured with context=2; its ranks compute each microbatch together",
        ),
        ("offload=cpu,shard=2", "offload=cpu; it must be yes or no (in Python True or False)"),
        ("offload=yes", "offload=yes with shard=1; CPU offload applies to sharded parameters"),
        (
            "offload=yes,shard=2,numerics=bitwise,threads=2",
            "threads=2 with offload=yes and numerics=bitwise; the optimizer then computes",
        ),
        (
            "offload=yes,shard=1,replicate=2",
            "offload=yes with shard=1; CPU offload applies to sharded parameters",
        ),
        ("compile=1", "compile=1; it must be yes or no (in Python True or False)"),
        ("checkpointing=all", "checkpointing=all; the known values are none, selective, full"),
        ("transport=tcp", "transport=tcp; the known values are auto, torch"),
        ("assignment=fair", "assignment=fair; the known values are equal, measured"),
        (
            "assignment=measured,shard=2",
            "assignment=measured with shard=2; its ranks compute in rounds of one microbatch each",
        ),
        (
            "assignment=measured,tensor=2,replicate=2",
            "assignment=measured with tensor=2; its ranks wait for each other inside each layer",
        ),
        (
            "assignment=measured,pipeline=2",
            "assignment=measured with pipeline=2; each microbatch passes through all of its ranks",
        ),
        (
            "assignment=measured,split=3+5",
            "assignment=measured with split=3+5; one process computes all microbatches",
        ),
        (
            "assignment=measured,data_parallel=2",
            "assignment=measured with data_parallel=2; one process computes all microbatches",
        ),
        ("numerics=exact", "numerics=exact; the known values are fast, bitwise"),
        ("numerics=auto", "numerics=auto; the known values are fast, bitwise"),
        (
            "split=0",
            (
                "split=0; it must be a number of devices, at least 1, or the layers on each device, such"
                " as 3+5"
            ),
        ),
        ("split=0+0", "split=(0, 0); it must be a number of devices"),
        ("split=3+", "split='' in plan 'split=3+'; the value is a whole number"),
        ("split=auto", "split='auto' in plan 'split=auto'; the value is a whole number"),
        (
            "split=2,replicate=2",
            "split=2 with replicate=2; split is for one process with several devices",
        ),
        (
            "split=1+2,shard=auto",
            "split=1+2 with shard=auto; split is for one process with several devices",
        ),
        (
            "data_parallel=2,replicate=2",
            (
                "data_parallel=2 with replicate=2; data_parallel is for one process with several"
                " devices"
            ),
        ),
        ("data_parallel=0", "data_parallel=0; it counts GPUs of one process and is at least 1"),
        (
            "data_parallel=2,split=2",
            "data_parallel=2 with split=2; it computes each microbatch in parts",
        ),
        (
            "data_parallel=2,numerics=bitwise",
            "data_parallel=2 with numerics=bitwise; it computes each microbatch in parts",
        ),
        (
            "data_parallel=2,compile=yes",
            "data_parallel=2 with compile=yes; it computes each microbatch in parts",
        ),
        (
            "data_parallel=2,checkpointing=full",
            "data_parallel=2 with checkpointing=full; it computes each microbatch in parts",
        ),
        (
            "microbatch_splits=-1",
            "microbatch_splits=-1; it counts how often each microbatch is halved and is 0 to 32",
        ),
        (
            "microbatch_splits=99999999999999999999",
            (
                "microbatch_splits=99999999999999999999; it counts how often each microbatch is"
                " halved and is 0 to 32"
            ),
        ),
        ("workers=-1", "workers=-1; it counts loader processes a rank and is 0 to 1024, or auto"),
        (
            "workers=1025",
            "workers=1025; it counts loader processes a rank and is 0 to 1024, or auto",
        ),
        (
            "workers=some",
            "workers='some' in plan 'workers=some'; the value is a whole number or auto",
        ),
        (
            "microbatch_splits=auto",
            (
                "microbatch_splits='auto' in plan 'microbatch_splits=auto'; the value is a whole"
                " number"
            ),
        ),
        ("threads=0", "threads=0; it counts intra-op threads a process and is 1 to 1024, or auto"),
        (
            "threads=100000",
            "threads=100000; it counts intra-op threads a process and is 1 to 1024, or auto",
        ),
        (
            "prefetch=0",
            (
                "prefetch=0; it counts microbatches that a loader process makes ahead, 1 to 1024,"
                " or auto"
            ),
        ),
        (
            "prefetch=10000000000",
            (
                "prefetch=10000000000; it counts microbatches that a loader process makes ahead, 1"
                " to 1024, or auto"
            ),
        ),
    ],
)
def test_what_makes_no_plan_is_refused_when_it_is_read(text: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.parse(text)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"replicate": True}, "replicate=True; the size of a mesh axis is a whole number"),
        ({"replicate": 2.0}, "replicate=2.0; the size of a mesh axis is a whole number"),
        ({"split": True}, "split=True; it must be a number of devices"),
        ({"split": (4,)}, "split=(4,); it must be a number of devices"),
        ({"split": (2, -1)}, "split=(2, -1); it must be a number of devices"),
        ({"workers": False}, "workers=False; it counts loader processes"),
        ({"numerics": None}, "numerics=None; the known values are fast, bitwise"),
    ],
)
def test_what_makes_no_plan_is_refused_when_it_is_made(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(**changes)
    assert str(caught.value).startswith(message)
