"""Streams: which rank reads what, exactly once over any world sizes and resumes, and the same model
at each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tiers import tiered
from torch import Tensor, nn
from training.kept import MODELS, PLANS, STOPPED_AT, run
from training.subjects import FEATURES, OUTPUTS, adamw, each_of, recipe, rows
from training.test_source import CPU, laid_out

import lockstep as ls
from lockstep.assignment import MicrobatchAssignment
from lockstep.base.errors import CheckpointError, DataError, LossError, RecipeError
from lockstep.data.loader import StreamLoader
from lockstep.data.positions import MixturePosition, Position
from lockstep.evidence.trace import read_traces
from lockstep.recipe.data import Mixture
from lockstep.testing.pool import WorkerPool
from lockstep.training.microbatches import Batching, from_stream, positions_in
from lockstep.verify.jobs import TraceRequest


def length_of(shard: int, epoch: int) -> int:
    return 3 + (5 * shard + 7 * epoch) % 11


def numbered(shard: int, epoch: int, start: int) -> Iterator[tuple[int, int, int]]:
    """Each sample says who it is."""
    for number in range(start, length_of(shard, epoch)):
        yield shard, epoch, number


def named_by(sample: Any) -> str:
    """Its name, which it says itself: in a tensor, where it can be trained on."""
    shard, epoch, number, *names = sample if isinstance(sample[0], int) else sample[0].tolist()
    of = f" of {names[0]!r}" if names else ""
    return f"{number} of shard {shard}{of} in epoch {epoch}"


@dataclass(frozen=True)
class Called:
    """`numbered`, whose samples say the name of their stream, too."""

    name: str

    def __call__(self, shard: int, epoch: int, start: int) -> Iterator[tuple[int, int, int, str]]:
        return ((*sample, self.name) for sample in numbered(shard, epoch, start))


class Segment:
    """Some steps of a run, on all of `assigned.ranks`, one after another."""

    def __init__(
        self,
        assigned: MicrobatchAssignment,
        batches: tuple[int, int],
        stream: ls.Stream,
        first: int,
        stop: int,
        positions: dict[int, Position],
    ) -> None:
        self.batches: dict[tuple[int, int], list[Any]] = {}
        """(step, microbatch) -> its samples."""
        self.readers: dict[int, set[int]] = {}
        """Shard -> the ranks that say where it goes on."""
        self.positions: dict[int, Position] = {}
        """After the last step, of all ranks."""
        self.computed: list[list[tuple[int, int, bool]]] = []
        """Of each rank, what it computes."""
        global_batch, microbatch = batches
        for rank in range(assigned.ranks):
            length = Batching(
                samples=global_batch,
                global_batch=global_batch,
                microbatch=microbatch,
                steps=stop,
                epochs=None,
                **laid_out(rank, assigned.ranks, assigned),
            )
            loader = StreamLoader(stream, collate=list, seed=3, device=CPU)
            self.computed.append([])
            for source in from_stream(loader, length, first=first, positions=positions):
                before = source.positions.copy()
                for item, batch in source.batches(0):
                    self.computed[rank].append((source.step, item.index, item.is_dummy))
                    assert source.layout.full_microbatch(item.index) == (
                        item.index,
                        [named_by(sample) for sample in batch],
                    )
                    if not item.is_dummy:
                        assert (source.step, item.index) not in self.batches
                        self.batches[source.step, item.index] = batch
                assert source.own_count == 0 or before != source.positions
            for shard in source.positions:
                self.readers.setdefault(shard, set()).add(rank)
            self.positions |= source.positions
            loader.close()


@st.composite
def runs(
    draw: st.DrawFn,
) -> tuple[tuple[int, int], ls.Stream, list[tuple[MicrobatchAssignment, int]]]:
    """Batches, a stream that fits them, and segments of a run: (the assignment, the step that ends
    it)."""
    global_batch = draw(st.integers(1, 12))
    microbatch = draw(st.integers(1, global_batch))
    shards, windows = -(-global_batch // microbatch) * draw(st.integers(1, 3)), st.integers(1, 9)
    stream = ls.Stream(numbered, shards=shards, window=draw(windows))
    if weights := draw(st.dictionaries(st.sampled_from("abc"), st.floats(0.1, 9))):
        stream = ls.Stream.mix(
            {
                name: ls.Stream(Called(name), shards=shards, window=draw(windows))
                for name in weights
            },
            weights=weights,
        )
    assignments = st.builds(MicrobatchAssignment, st.integers(1, 5), round_robin=st.booleans())
    stops = sorted(draw(st.sets(st.integers(1, 25), min_size=1, max_size=4)))
    return (global_batch, microbatch), stream, [(draw(assignments), stop) for stop in stops]


@given(runs())
@settings(max_examples=25)
def test_each_sample_is_seen_exactly_once_an_epoch_over_any_world_sizes_and_resumes(
    run: Any,
) -> None:
    batches, stream, segments = run
    found: dict[tuple[int, int], list[Any]] = {}
    first, positions = 0, dict[int, Position]()
    for assigned, stop in segments:
        segment = Segment(assigned, batches, stream, first, stop, positions)
        assert all(len(ranks) == 1 for ranks in segment.readers.values())
        assert sorted(segment.positions) == list(range(stream.shards))
        if assigned.round_robin:
            assert len({tuple(step for step, _, _ in mine) for mine in segment.computed}) == 1
        found |= segment.batches
        first, positions = (
            stop,
            positions_in(json.loads(json.dumps({"shards": segment.positions})), stream),
        )
    alone = Segment(MicrobatchAssignment(1), batches, stream, 0, first, {})
    assert found == alone.batches
    assert positions == alone.positions
    assert len(found) == first * -(-batches[0] // batches[1])
    assert sum(map(len, found.values())) == first * batches[0]
    for (shard, position), *name in (
        (at, *name) for at in positions.items() for name in names_in(stream)
    ):
        if isinstance(position, MixturePosition):
            position = position.streams[name[0]]
        seen = [
            sample[:3]
            for at in sorted(found)
            for sample in found[at]
            if (sample[0], *sample[3:]) == (shard, *name)
        ]
        epoch = 0
        while seen:
            length = length_of(shard, epoch)
            some, seen = seen[:length], seen[length:]
            if seen:
                assert sorted(some) == [(shard, epoch, number) for number in range(length)]
            else:
                assert len(set(some)) == len(some)
                assert {(shard, epoch)} == {(each[0], each[1]) for each in some}
                assert position == (epoch, len(some))
            epoch += 1


def names_in(stream: ls.Stream) -> list[tuple[str, ...]]:
    """The name of each stream of a mixture; none for the only one."""
    return [(name,) for name in stream.open.streams] if isinstance(stream.open, Mixture) else [()]


@pytest.mark.parametrize("round_robin", [False, True])
def test_a_rank_without_microbatches_says_nothing_of_positions(round_robin: bool) -> None:
    segment = Segment(
        MicrobatchAssignment(3, round_robin=round_robin),
        (4, 2),
        ls.Stream(numbered, shards=4),
        0,
        3,
        {},
    )
    assert segment.readers == {0: {0}, 2: {0}, 1: {1}, 3: {1}}
    assert segment.computed[2] == ([(step, 0, True) for step in range(3)] if round_robin else [])


# Whole runs


def rows_of(shard: int, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """As `training.subjects.rows`, without an end to the epochs, and with noise from the default
    generators."""
    for number in range(start, length_of(shard, epoch)):
        generator = torch.Generator().manual_seed(100 * shard + number)
        features = torch.randn(FEATURES, generator=generator) + 0.1 * torch.randn(FEATURES)
        yield (
            torch.tensor([shard, epoch, number]),
            features,
            torch.randn(OUTPUTS, generator=generator),
        )


def dropping() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 16),
        nn.BatchNorm1d(16),
        nn.Tanh(),
        nn.Dropout(0.2),
        nn.Linear(16, OUTPUTS),
    )


def streamed(**changes: Any) -> ls.Recipe:
    """Five steps of three microbatches of four samples, from six shards."""
    given: dict[str, Any] = {
        "data": ls.Stream(rows_of, shards=6, window=5),
        "model": dropping,
        "global_batch": 12,
        "steps": 5,
        **changes,
    }
    return recipe(**given)


def fingerprint(run_dir: str, plan: str) -> str:
    return ls.train(streamed(), run_dir=run_dir, plan=f"{plan},numerics=bitwise").fingerprint


def fingerprint_each(run_dir: str, plans: Sequence[str]) -> list[str]:
    return each_of(fingerprint, run_dir, [(plan,) for plan in plans])


STREAM_PLANS = {
    1: ["replicate=1", "replicate=1,workers=4"],
    2: ["replicate=2", "replicate=2,workers=1", "shard=2,workers=1"],
    3: ["replicate=3", "shard=3"],
    4: ["replicate=4", "shard=4", "replicate=2,shard=2"],
}


@pytest.mark.parametrize("processes", tiered({size: size for size in STREAM_PLANS}))
def test_a_stream_trains_the_same_model_under_every_plan(
    pool: WorkerPool, tmp_path: Path, processes: int
) -> None:
    alone = fingerprint(str(tmp_path / "alone"), "replicate=1")
    plans = STREAM_PLANS[processes]
    for found in pool.run(processes, fingerprint_each, str(tmp_path), plans):
        assert dict(zip(plans, found, strict=True)) == dict.fromkeys(plans, alone)


def deep() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, OUTPUTS)
    )


def loss_under(run_dir: str, plan: str) -> float:
    changes = {
        "global_batch": 24,
        "inputs": lambda batch: batch[1],
        "loss": lambda output, batch: ((output - batch[2]) ** 2).mean(),
    }
    return ls.train(
        streamed(model=deep, tensor={"0": "colwise", "2": "rowwise"}, **changes),
        run_dir=run_dir,
        plan=plan,
    ).loss


def losses_under(run_dir: str, plans: Sequence[str]) -> list[float]:
    return each_of(loss_under, run_dir, [(plan,) for plan in plans])


@pytest.mark.parametrize(
    "plans",
    [
        ["tensor=2", "pipeline=2"],
        pytest.param(["replicate=2,pipeline=2"], marks=pytest.mark.slow),
    ],
)
def test_processes_that_share_microbatches_each_read_them(
    pool: WorkerPool, tmp_path: Path, plans: list[str]
) -> None:
    alone = loss_under(str(tmp_path / "alone"), "replicate=1")
    for found in pool.run(2 if len(plans) == 2 else 4, losses_under, str(tmp_path), plans):
        assert found == pytest.approx([alone] * len(plans), rel=1e-4)


def train_with_nan(run_dir: str) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return ((model(batch[1]) - batch[2]) ** 2).mean() * (
            torch.nan if batch[0][0, 0] == 5 else 1.0
        )

    ls.train(streamed(loss=loss, seed=3), run_dir=run_dir)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_loss_that_is_not_finite_names_shard_epoch_and_samples(
    pool: WorkerPool, tmp_path: Path, processes: int
) -> None:
    with pytest.raises(LossError) as caught:
        pool.run(processes, train_with_nan, str(tmp_path / "run"))
    segment = Segment(MicrobatchAssignment(1), (12, 4), streamed().data, 0, 2, {})
    numbers = [int(sample[0][2]) for sample in segment.batches[1, 2]]
    assert str(caught.value).startswith(
        f"after step 1: the loss is nan in microbatch 2, computed by rank {processes - 1} from"
        f" samples {numbers} of shard 5 in epoch 0; "
    )


def weights(run_dir: str) -> float:
    given = {
        "loss": lambda model, batch: ls.Sum(((model(batch[1]) - batch[2]) ** 2).sum()),
        "weight": lambda batch: batch[2].numel(),
    }
    return ls.train(streamed(**given), run_dir=run_dir).loss


def test_weights_that_are_known_before_the_forward_come_with_streams_too(
    pool: WorkerPool, tmp_path: Path
) -> None:
    alone = weights(str(tmp_path / "alone"))
    assert pool.run(2, weights, str(tmp_path / "run")) == pytest.approx([alone] * 2, rel=1e-5)


# Runs that go on

TEXTS = MODELS["gpt-dropout"]["data"]


def texts(shard: int, epoch: int, start: int) -> Iterator[dict[str, Tensor]]:
    """Nine or ten a shard, some of their words hidden."""
    for sample in range(shard + 14 * start, len(TEXTS), 14):
        text = TEXTS[sample]
        yield {**text, "input_ids": text["input_ids"] * (torch.rand(len(text["input_ids"])) < 0.9)}


STREAMED = {
    "data": ls.Stream.mix(
        {"all": ls.Stream(texts, shards=14, window=3), "more": ls.Stream(texts, shards=14)},
        weights={"all": 2, "more": 1},
    ),
    "steps": STOPPED_AT + 2,
    "evaluation": None,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """How the run ends on one process without a stop."""
    return run("numerics=bitwise", str(tmp_path_factory.mktemp("whole")), None, STREAMED)


@pytest.mark.parametrize(
    "plans",
    [
        pytest.param(["replicate=2", "replicate=1"], marks=pytest.mark.slow),
        ["replicate=3,workers=1", "shard=2"],
        ["replicate=1", "replicate=2,workers=1"],
    ],
)
def test_a_run_goes_on_in_the_midst_of_its_windows_under_another_plan(
    pool: WorkerPool, tmp_path: Path, whole: tuple[str, str], plans: list[str]
) -> None:
    (stopped, ended) = (
        pool.run(
            PLANS[plan.partition(",")[0]],
            run,
            f"{plan},numerics=bitwise",
            str(tmp_path / "run"),
            at,
            STREAMED,
        )
        for plan, at in zip(plans, (STOPPED_AT, None), strict=True)
    )
    assert [how for how, _ in stopped] == ["preempted"] * len(stopped)
    assert set(ended) == {whole}


def run_three(plan: str, run_dir: str) -> list[tuple[str, str]]:
    """The whole run, one that is asked to end, and the same one the second time."""
    return [
        run(plan, f"{run_dir}/{name}", at, STREAMED)
        for name, at in (("whole", None), ("run", STOPPED_AT), ("run", None))
    ]


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param("tensor=2", marks=pytest.mark.slow),
        "pipeline=2",
        pytest.param("shard=2,pipeline=2", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_bit_for_bit_where_several_processes_read_a_shard(
    pool: WorkerPool, tmp_path: Path, plan: str
) -> None:
    for whole, stopped, ended in pool.run(PLANS[plan], run_three, plan, str(tmp_path)):
        assert stopped[0] == "preempted"
        assert ended == whole


def train_some(run_dir: str, shards: int | None, *names: str, fails: bool) -> None:
    """A loop of the user's own, of which no recipe says what it trains on. What was done is saved
    where it fails. `names`: of the streams of a mixture."""
    data = rows(40) if shards is None else ls.Stream(rows_of, shards=shards)
    if isinstance(data, ls.Stream) and names:
        data = ls.Stream.mix(dict.fromkeys(names, data), weights=dict.fromkeys(names, 1))
    with suppress(ZeroDivisionError), ls.Session(run_dir=run_dir) as session:
        model, optimizer = session.prepare(dropping, adamw)
        for step in session.steps(data, global_batch=8, microbatch=4, steps=5):
            if fails and step.index == 2:
                raise ZeroDivisionError
            for batch in step.microbatches():
                step.backward(((model(batch[1]) - batch[2]) ** 2).mean())
            step.commit(optimizer)


def test_a_run_that_goes_on_with_other_data_is_refused(tmp_path: Path) -> None:
    for shards in (None, 14):
        train_some(str(tmp_path / str(shards)), shards, fails=True)
        with pytest.raises(CheckpointError) as caught:
            train_some(str(tmp_path / str(shards)), 6, fails=False)
        assert (
            str(caught.value)
            == f"the checkpoint has positions for {shards or 0} shards of a stream, and this run's"
            " ls.Stream has shards=6; resume with the data that it was saved with"
        )
    kinds = ((), ("a",)), (("a",), ()), (("a", "b"), ("a", "c"))
    for number, (saved, changed) in enumerate(kinds):
        folder = str(tmp_path / f"mixture-{number}")
        train_some(folder, 6, *saved, fails=True)
        with pytest.raises(CheckpointError, match="has positions in the shards of another kind"):
            train_some(folder, 6, *changed, fails=False)
        train_some(folder, 6, *saved, fails=False)


def train_till_it_fails(run_dir: str, at: int) -> str:
    """Fails, on every rank, at the first microbatch of a shard from `at` on."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if batch[0][0, 0] >= at:
            raise ZeroDivisionError
        return ((model(batch[1]) - batch[2]) ** 2).mean()

    with suppress(ZeroDivisionError):
        return ls.train(streamed(loss=loss), run_dir=run_dir, allow_change=["loss"]).fingerprint
    return "failed"


def test_where_a_stream_stands_is_saved_when_a_run_fails(tmp_path: Path) -> None:
    whole = train_till_it_fails(str(tmp_path / "whole"), 6)
    assert train_till_it_fails(str(tmp_path / "run"), 5) == "failed"
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1
    assert train_till_it_fails(str(tmp_path / "run"), 6) == whole


def test_a_replica_that_fails_saves_nothing_where_others_alone_know_how_their_shards_stand(
    pool: WorkerPool, tmp_path: Path
) -> None:
    assert pool.run(2, train_till_it_fails, str(tmp_path / "run"), 3) == ["failed"] * 2
    assert list((tmp_path / "run" / "checkpoints").glob("*")) == []


def traced(folder: str, microbatch: int | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            TraceRequest(folder=Path(folder), steps=2, microbatch=microbatch)
            .write(Path(folder))
            .items()
        ):
            patch.setenv(name, value)
        with pytest.raises(SystemExit, check=lambda ended: ended.code == 0):
            ls.train(streamed(seed=3), run_dir=f"{folder}/run")


def test_a_trace_names_the_samples_of_a_stream_alike_at_any_world_size(
    pool: WorkerPool, tmp_path: Path
) -> None:
    written = []
    for processes in (1, 2):
        (tmp_path / str(processes)).mkdir()
        pool.run(processes, traced, str(tmp_path / str(processes)), None)
        (trace,) = read_traces(tmp_path / str(processes))
        written.append({(each.step, each.index): each.samples for each in trace.microbatches})
    batches = Segment(MicrobatchAssignment(1), (12, 4), streamed().data, 0, 2, {}).batches
    named = {at: tuple(named_by(sample) for sample in batch) for at, batch in batches.items()}
    assert written == [named, named]


def test_a_trace_with_other_microbatches_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        pool.run(1, traced, str(tmp_path), 2)
    assert str(caught.value).startswith("microbatch=2 instead of 4 with an ls.Stream; ")
    assert "; leave the microbatch as it is" in str(caught.value)


# What is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data": ls.Stream(numbered, shards=4)},
            "an ls.Stream of shards=4 with 3 microbatches in a global batch (global_batch=12,"
            " microbatch=4); each microbatch reads from equally many shards, so shards must be"
            " a multiple of 3; write shards=6",
        ),
        (
            {"steps": None, "epochs": 2},
            "epochs=2 with an ls.Stream; a stream has no length, so epochs cannot be counted;"
            " give steps=",
        ),
        (
            {"microbatch": None},
            "microbatch=None with an ls.Stream; each microbatch reads from its own shards",
        ),
    ],
)
def test_a_recipe_that_a_stream_does_not_fit_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError) as caught:
        streamed(**changes)
    assert str(caught.value).startswith(message)
    given = {
        "data": ls.Stream(numbered, shards=6),
        "global_batch": 12,
        "microbatch": 4,
        "steps": 5,
        **changes,
    }
    with ls.Session(run_dir=str(tmp_path / "run")) as session, pytest.raises(RecipeError) as caught:
        session.steps(given.pop("data"), **given)
    assert str(caught.value).startswith(message)


def test_a_stream_that_is_none_is_refused_when_it_is_made() -> None:
    with pytest.raises(RecipeError, match=r"^Stream\.shards=0; it counts shards"):
        ls.Stream(numbered, shards=0)
    with pytest.raises(RecipeError, match=r"^Stream\.window=0; it counts samples"):
        ls.Stream(numbered, shards=1, window=0)
    with pytest.raises(RecipeError, match=r"^Stream\.open is 3 \(a int\); it must be a function"):
        ls.Stream(3, shards=1)  # type: ignore[arg-type]


def test_an_evaluation_on_a_stream_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"^Evaluation\.data is an ls\.Stream; .*; read the samples into a list"
    ):
        ls.Evaluation(data=ls.Stream(numbered, shards=1))


def train_with_sync_batchnorm(run_dir: str) -> None:
    ls.train(
        streamed(model=lambda: nn.SyncBatchNorm.convert_sync_batchnorm(dropping())), run_dir=run_dir
    )


def test_sync_batchnorm_on_several_ranks_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError,
        match=r"^SyncBatchNorm on 2 data ranks with an ls\.Stream; .*; use plain BatchNorm",
    ):
        pool.run(2, train_with_sync_batchnorm, str(tmp_path / "run"))
    pool.run(1, train_with_sync_batchnorm, str(tmp_path / "alone"))


def test_a_recipe_says_of_its_stream_where_it_is_from_and_how_it_is_cut() -> None:
    described = streamed().describe()["data"]
    assert described == {"open": f"{rows_of.__module__}.rows_of", "shards": 6, "window": 5}
