"""What a run saves, what it refuses to resume from, and what it does where nothing can be saved."""

from __future__ import annotations

import errno
import math
import os
import re
import resource
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import run_files
import torch
from torch import nn
from training.subjects import (
    Scores,
    adamw,
    momentum,
    network,
    recipe,
    rows,
    same,
    sgd,
    squared_error,
    state_of,
)

import lockstep as ls
from lockstep.base.errors import CheckpointError, RecipeError
from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.storage import MANIFEST, FolderStorage
from lockstep.hooks.checkpointing import Checkpointing
from lockstep.launch.termination import Preempted
from lockstep.saving import Best
from lockstep.testing.pool import WorkerPool


class At(ls.Hook):
    """Does something after steps."""

    def __init__(self, what: Mapping[int, Callable[[Any], object]]) -> None:
        self.what = what

    def after_step(self, run: Any) -> None:
        self.what.get(run.step, lambda run: None)(run)


def ask(run: Any) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def saved(run_dir: Path) -> list[int]:
    return [name.step for name in FolderStorage(run_dir / "checkpoints").names()]


def train(run_dir: Path, given: ls.Recipe | None = None, **options: Any) -> ls.Result:
    return ls.train(given or recipe(steps=6), run_dir=str(run_dir), **options)


def stopped(run_dir: Path, **changes: Any) -> None:
    """A run that was asked to end in its third step, with checkpoints of steps 2 and 3."""
    with pytest.raises(Preempted):
        train(run_dir, recipe(steps=6, **changes), hooks=[At({2: ask})], saving=ls.Saving(every=2))
    assert saved(run_dir) == [2, 3]


def checkpointer(run: Any) -> Any:
    return next(
        hook for hook in run.training.hooks.all if isinstance(hook, Checkpointing)
    )._checkpointer


def settled(run: Any) -> None:
    """Wait for the save under way."""
    checkpointer(run).wait()


def test_it_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    stopped(tmp_path / "run")
    whole = train(tmp_path / "whole")
    result = train(tmp_path / "run")
    assert (result.steps, result.loss, result.fingerprint) == (6, whole.loss, whole.fingerprint)
    (resumed,) = run_files.events(tmp_path / "run", "resumed")
    assert resumed["step"] == 3
    assert resumed["saved_under"] == "replicate=1,numerics=fast"


def test_a_run_that_has_ended_is_not_gone_on_with(tmp_path: Path) -> None:
    train(tmp_path / "run", recipe())
    with pytest.raises(ls.errors.RunDirectoryError, match="already holds a run that has ended"):
        train(tmp_path / "run", recipe())


def test_never_refuses_an_unfinished_run_and_must_one_without_a_checkpoint(tmp_path: Path) -> None:
    stopped(tmp_path / "run")
    with pytest.raises(ls.errors.RunDirectoryError, match="already holds a run"):
        train(tmp_path / "run", resume="never")
    with pytest.raises(
        CheckpointError,
        match=r"^resume=must, and .*checkpoints has no checkpoint to resume from: there is none",
    ):
        train(tmp_path / "new", resume="must")
    with pytest.raises(
        CheckpointError, match=r"^resume='maybe'; it must be one of auto, never, must"
    ):
        train(tmp_path / "new", resume="maybe")


def test_never_refuses_a_folder_with_another_runs_checkpoints(tmp_path: Path) -> None:
    stopped(tmp_path / "run")
    folder = ls.Saving(folder=str(tmp_path / "run" / "checkpoints"))
    with pytest.raises(
        CheckpointError,
        match=(
            r"^resume=never, and .*run/checkpoints holds checkpoints of an earlier run, the newest"
            r" step-00000003-\w+; "
        ),
    ):
        train(tmp_path / "new", resume="never", saving=folder)
    assert saved(tmp_path / "run") == [2, 3]


def test_a_damaged_checkpoint_ahead_of_the_run_pushes_no_new_one_out(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints" / "step-00000005-00000000").mkdir(parents=True)
    with pytest.raises(Preempted):
        train(tmp_path / "run", hooks=[At({2: ask})], saving=ls.Saving(every=2, last=1))
    assert saved(tmp_path / "run") == [3, 5]


def test_another_recipe_is_refused_with_what_differs_unless_it_may(tmp_path: Path) -> None:
    stopped(tmp_path / "run", clip_norm=1.0)
    words = (
        r"^the recipe differs from the one in checkpoint step-00000003-\w+: clip_norm: 1.0, now 2.0;"
        " steps:"
        r" 6, now 8; resume with"
    )
    with pytest.raises(CheckpointError, match=words):
        train(tmp_path / "run", recipe(steps=8, clip_norm=2.0))
    with pytest.raises(CheckpointError, match=r": clip_norm: 1.0, now 2.0; resume with"):
        train(tmp_path / "run", recipe(steps=8, clip_norm=2.0), allow_change=["steps"])
    assert (
        train(
            tmp_path / "run", recipe(steps=8, clip_norm=2.0), allow_change=["steps", "clip_norm"]
        ).steps
        == 8
    )


def wider() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 3, bias=False)
    )


def test_a_checkpoint_of_another_model_is_refused_with_what_differs(
    pool: WorkerPool, tmp_path: Path
) -> None:
    stopped(tmp_path / "run")
    with pytest.raises(CheckpointError) as caught:
        train(tmp_path / "run", recipe(steps=6, model=wider), allow_change=["model"])
    words = str(caught.value)
    assert words.startswith("the checkpoint is of another model: not in the checkpoint: ")
    assert "model/4.weight float32(3, 3)" in words.replace("0/", "").replace(" 4.", " model/4.")
    assert "different: " in words
    assert "0.bias float32(8,), saved as float32(16,)" in words


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    stopped(tmp_path / "run")
    with pytest.raises(
        CheckpointError,
        match=r"^the checkpoint's optimizers are \['AdamW'\] and this run's are \['SGD'\]",
    ):
        train(tmp_path / "run", recipe(steps=6, optimizer=sgd), allow_change=["optimizer"])


def test_state_that_an_optimizer_makes_in_its_first_step_is_taken_up(tmp_path: Path) -> None:
    stopped(tmp_path / "run", optimizer=momentum)
    whole = train(tmp_path / "whole", recipe(steps=6, optimizer=momentum))
    assert (
        train(tmp_path / "run", recipe(steps=6, optimizer=momentum)).fingerprint
        == whole.fingerprint
    )


def cosine(optimizer: Any) -> Any:
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2)
    rest = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 4])
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, rest], milestones=[2])


def test_a_torch_scheduler_is_taken_up(tmp_path: Path) -> None:
    stopped(tmp_path / "run", schedule=cosine)
    whole = train(tmp_path / "whole", recipe(steps=6, schedule=cosine))
    assert (
        train(tmp_path / "run", recipe(steps=6, schedule=cosine)).fingerprint == whole.fingerprint
    )


def damage(run_dir: Path, step: int) -> None:
    """Flip a bit of a tensor's bytes."""
    (folder,) = (run_dir / "checkpoints").glob(f"step-{step:08d}-*")
    content = bytearray((folder / "rank-0.safetensors").read_bytes())
    content[-5] ^= 1
    (folder / "rank-0.safetensors").write_bytes(content)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped(tmp_path / "run")
    damage(tmp_path / "run", 3)
    whole = train(tmp_path / "whole")
    assert train(tmp_path / "run").fingerprint == whole.fingerprint
    happened = {event["event"]: event for event in run_files.events(tmp_path / "run")}
    assert happened["checkpoint-damaged"]["checkpoint"].startswith("step-00000003-")
    assert (
        "rank-0.safetensors has other bytes than were written"
        in happened["checkpoint-damaged"]["reason"]
    )
    assert happened["resumed"]["step"] == 2
    assert "is damaged: rank-0.safetensors" in capsys.readouterr().err


def stop_two(run_dir: str) -> None:
    with pytest.raises(Preempted):
        ls.train(recipe(steps=6), run_dir=run_dir, hooks=[At({1: ask})], plan="numerics=bitwise")


def test_where_all_are_damaged_a_run_begins_anew_or_must_not(
    pool: WorkerPool, tmp_path: Path
) -> None:
    """Of the file that is read first, nothing is damaged."""
    pool.run(2, stop_two, str(tmp_path / "run"))
    (folder,) = (tmp_path / "run" / "checkpoints").iterdir()
    content = bytearray((folder / "rank-1.safetensors").read_bytes())
    content[-5] ^= 1
    (folder / "rank-1.safetensors").write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"has no checkpoint to resume from: all 1 are damaged"
    ):
        train(tmp_path / "run", resume="must", plan="numerics=bitwise")
    whole = train(tmp_path / "whole", plan="numerics=bitwise")
    assert train(tmp_path / "run", plan="numerics=bitwise").fingerprint == whole.fingerprint


def test_a_run_that_begins_anew_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its checkpoints are elsewhere than before, say."""
    stopped(tmp_path / "run")
    assert "starts again" not in capsys.readouterr().err
    elsewhere = str(tmp_path / "elsewhere")
    train(tmp_path / "run", saving=ls.Saving(folder=elsewhere))
    words = (
        f"warning: {elsewhere} has no checkpoint to resume from; the run starts again from step 0\n"
    )
    assert words in capsys.readouterr().err
    (anew,) = run_files.events(tmp_path / "run", "no-checkpoint")
    assert anew["checkpoints"] == elsewhere


def test_a_checkpoint_of_a_newer_format_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(tmp_path / "run")
    folder = FolderStorage(tmp_path / "run" / "checkpoints")
    manifest = Manifest.decode(folder.read(folder.names()[-1], MANIFEST))
    monkeypatch.setattr("lockstep.checkpoint.manifest.FORMAT", 2)
    (folder.path / str(folder.names()[-1]) / MANIFEST).write_bytes(manifest.encode())
    monkeypatch.undo()
    with pytest.raises(
        CheckpointError,
        match=(
            r"step-00000003-\w+: the checkpoint has format 2, and this version of lockstep reads 1;"
            r" load it with a newer"
        ),
    ):
        train(tmp_path / "run")


def test_a_checkpoint_of_a_plan_with_an_unknown_axis_is_resumed(tmp_path: Path) -> None:
    """One of another version: its plan is only told."""
    stopped(tmp_path / "run")
    folder = FolderStorage(tmp_path / "run" / "checkpoints")
    name = folder.names()[-1]
    manifest = Manifest.decode(folder.read(name, MANIFEST))
    other = replace(manifest, metadata={**manifest.metadata, "plan": "replicate=1,context=2"})
    (folder.path / str(name) / MANIFEST).write_bytes(other.encode())
    assert train(tmp_path / "run").steps == 6
    (resumed,) = run_files.events(tmp_path / "run", "resumed")
    assert resumed["saved_under"] == "replicate=1,context=2"


class Holds(ls.Hook):
    """Has a state of its own."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["inner"]


def test_what_a_hook_holds_is_saved_and_taken_up(tmp_path: Path) -> None:
    import numpy as np

    held = {
        3: (1.5, None),
        "a": [torch.arange(3), np.float32(0.1), float("inf")],
        "b": {"lockstep": True},
    }
    held |= {"a/0": torch.zeros(2), "3": {"x": torch.ones(1), 1: torch.ones(2), "1": torch.ones(3)}}
    with pytest.raises(Preempted):
        train(tmp_path / "run", hooks=[Holds(held), At({2: ask})])
    hook = Holds({"a": [torch.zeros(3)]})
    train(tmp_path / "run", hooks=[hook, At({})])
    assert same(hook.state, held)
    assert isinstance(hook.state["a"][1], np.float32)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (
            {"a": [object()]},
            r"^the state 'state/0-Holds/inner/a/0' is a object; a checkpoint holds dense tensors",
        ),
        (
            {"a": torch.ones(2).to_sparse()},
            r"^the state 'state/0-Holds/inner/a' is a tensor of layout torch.sparse_coo",
        ),
        (
            {(1, 2): 0},
            r"^the state 'state/0-Holds/inner' is a dict with a key \(1, 2\) \(a tuple\)",
        ),
        (len, r"^the state 'state/0-Holds/inner' is a builtin_function_or_method"),
    ],
)
def test_a_state_that_cannot_be_saved_is_named_before_the_first_step(
    tmp_path: Path, state: Any, words: str
) -> None:
    steps: list[int] = []
    with pytest.raises(CheckpointError, match=words):
        train(
            tmp_path / "run", recipe(), hooks=[Holds(state), At({1: lambda run: steps.append(1)})]
        )
    assert steps == []


def test_a_folder_that_cannot_be_written_to_is_refused_before_the_first_step(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        CheckpointError,
        match=r"^the checkpoints in .*file/checkpoints cannot be \w+( to)? \(Not a directory\)",
    ):
        train(
            tmp_path / "run",
            recipe(),
            saving=ls.Saving(folder=str(tmp_path / "file" / "checkpoints")),
        )


def block(run: Any) -> None:
    """A file stands where checkpoints go."""
    settled(run)
    folder = run.context.recorder.path / "checkpoints"
    folder.rename(folder.with_name("aside"))
    folder.touch()


def unblock(run: Any) -> None:
    try:
        settled(run)
    finally:
        folder = run.context.recorder.path / "checkpoints"
        folder.unlink()
        folder.with_name("aside").rename(folder)


def test_a_save_that_fails_is_told_and_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twice in a row, and again after one that did not."""
    hooks = [At({2: block, 3: settled, 5: unblock, 7: settled, 8: block, 9: settled, 11: unblock})]
    result = train(tmp_path / "run", recipe(steps=12), hooks=hooks, saving=ls.Saving(every=2))
    assert result.steps == 12
    assert [
        (event["event"], event["checkpoint"][:13])
        for event in run_files.events(tmp_path / "run")
        if "checkpoint" in event
    ][:5] == [
        ("checkpoint-failed", "step-00000002"),
        ("checkpoint-failed", "step-00000004"),
        ("checkpoint-saved", "step-00000006"),
        ("checkpoint-failed", "step-00000008"),
        ("checkpoint-failed", "step-00000010"),
    ]
    assert (
        "warning: the checkpoint after step 2 was not saved: Not a directory"
        in capsys.readouterr().err
    )


def test_the_third_failure_in_a_row_ends_the_run_on_every_rank(
    pool: WorkerPool, tmp_path: Path
) -> None:
    words = pool.run(2, fail_to_save, str(tmp_path / "run"))
    assert words == [words[0]] * 2
    assert words[0].startswith(
        "3 checkpoints in a row could not be saved, the last one: Not a directory: "
    )


def fail_to_save(run_dir: str) -> str:
    def block_all(run: Any) -> None:
        torch.distributed.barrier()
        if run.context.world.rank == 0:
            block(run)
        torch.distributed.barrier()

    hooks = [At({1: block_all, **dict.fromkeys(range(2, 20), settled)})]
    with pytest.raises(CheckpointError) as caught:
        ls.train(recipe(steps=20), run_dir=run_dir, hooks=hooks, saving=ls.Saving(every=2))
    return str(caught.value)


def test_a_slow_disk_has_one_save_under_way_and_the_next_one_waits(tmp_path: Path) -> None:
    def writer() -> psutil.Process:
        return next(
            child
            for child in psutil.Process().children()
            if "lockstep.checkpoint.writer" in child.cmdline()
        )

    hooks = [At({1: lambda run: writer().suspend(), 6: lambda run: writer().resume(), 7: settled})]
    train(tmp_path / "run", recipe(steps=8), hooks=hooks, saving=ls.Saving(every=2, last=10))
    assert saved(tmp_path / "run")[:1] == [2]
    assert not {4, 5, 6} & set(saved(tmp_path / "run"))
    assert saved(tmp_path / "run")[1:] in ([7], [7, 8])


def test_a_disk_without_room_for_one_checkpoint_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1900))
    words = (
        r"^a checkpoint has at least 1,9\d\d bytes, and .*/run/checkpoints has 1,9\d\d free; make"
        r" room, or give another folder"
    )
    with pytest.raises(CheckpointError, match=words):
        train(tmp_path / "run", recipe())


def refused_for_room(run_dir: str) -> str:
    usage = shutil.disk_usage("/")
    with (
        mock.patch.object(shutil, "disk_usage", return_value=usage._replace(free=1900)),
        pytest.raises(CheckpointError) as caught,
    ):
        ls.train(recipe(), plan="shard=2", run_dir=run_dir)
    return str(caught.value)


def test_there_must_be_room_for_what_all_ranks_write(pool: WorkerPool, tmp_path: Path) -> None:
    words = pool.run(2, refused_for_room, str(tmp_path / "run"))
    assert words == [words[0]] * 2
    assert re.match(r"a checkpoint has at least 1,9\d\d bytes, and ", words[0])


def run_out_of_room(run_dir: str) -> list[list[str]]:
    """The file that the last rank writes first may not be long."""
    seen: list[list[str]] = []

    def limit(run: Any) -> None:
        if run.context.world.rank == 1:
            resource.prlimit(
                checkpointer(run)._saver._writer._process.pid, resource.RLIMIT_FSIZE, (100, 100)
            )

    def look(run: Any) -> None:
        seen.append(sorted(os.listdir(run.context.recorder.path / "checkpoints")))
        torch.distributed.barrier()  # before the next save begins

    hooks = [At({1: limit, 3: settled, 4: look, 5: settled, 6: look})]
    ls.train(
        recipe(steps=7), plan="shard=2", run_dir=run_dir, hooks=hooks, saving=ls.Saving(every=2)
    )
    return seen


def test_what_a_save_has_left_on_a_full_disk_is_removed(pool: WorkerPool, tmp_path: Path) -> None:
    for first, second in pool.run(2, run_out_of_room, str(tmp_path / "run")):
        assert first == []
        assert [name[:13] for name in second] == ["step-00000004"]
    failed = next(
        event
        for event in run_files.events(tmp_path / "run")
        if event["event"] == "checkpoint-failed"
    )
    assert failed["reason"].startswith("File too large")


def test_by_the_clock(tmp_path: Path) -> None:
    def wind(run: Any) -> None:
        checkpointer(run)._since -= 600

    hooks = [At({2: wind, 4: settled, 5: wind})]
    train(tmp_path / "run", recipe(steps=8), hooks=hooks, saving=ls.Saving(every="10m"))
    assert saved(tmp_path / "run") == [3, 6]


def fail_on(rank: int, run_dir: str) -> list[int]:
    """The last rank's forward fails in its fourth step."""
    count = 0

    def loss(model: nn.Module, batch: Any) -> Any:
        nonlocal count
        count += torch.is_grad_enabled()
        if count == 7 and torch.distributed.get_rank() == rank:
            raise ValueError("boom")
        return squared_error(model, batch)

    try:
        ls.train(recipe(steps=6, loss=loss), run_dir=run_dir)
    except Exception as error:
        return [count, isinstance(error, ValueError)]
    raise AssertionError("no fault")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_on_one_rank_saves_the_last_step_of_all(
    pool: WorkerPool, tmp_path: Path, rank: int
) -> None:
    pool.run(2, fail_and_close, rank, str(tmp_path / "run"))
    assert saved(tmp_path / "run") == [3]
    whole = train(tmp_path / "whole")
    with pytest.raises(CheckpointError, match="loss: "):
        train(tmp_path / "run")
    result = train(tmp_path / "run", allow_change=["loss"])
    assert result.steps == whole.steps == 6


def fail_and_close(rank: int, run_dir: str) -> None:
    _, is_cause = fail_on(rank, run_dir)
    assert bool(is_cause) == (torch.distributed.get_rank() == rank)


class Buffer:
    """What a loop of its own keeps."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def two_loops(run_dir: Path, ask_at: int | None) -> tuple[list[int], Any]:
    """Two pairs, trained in two loops of three steps; a signal in step `ask_at` of the second."""
    kept = Buffer()
    with ls.Session(run_dir=str(run_dir)) as session:
        pairs = [session.prepare(network, adamw) for _ in range(2)]
        session.include("buffer", kept)
        for loop in range(2):
            for step in session.steps(rows(24), global_batch=8, microbatch=4, steps=3):
                for model, optimizer in pairs:
                    for batch in step.microbatches():
                        step.backward(squared_error(model, batch), optimizer)
                    step.commit(optimizer)
                if loop == 1 and step.index == ask_at:
                    ask(None)
                kept.seen.append(10 * loop + step.index)
        return kept.seen, [state_of(model) for model, _ in pairs]


def test_a_session_of_several_pairs_and_loops_goes_on(tmp_path: Path) -> None:
    seen, models = two_loops(tmp_path / "whole", None)
    with pytest.raises(Preempted):
        two_loops(tmp_path / "run", 0)
    assert saved(tmp_path / "run") == [5]
    found, others = two_loops(tmp_path / "run", None)
    assert found == seen == [0, 1, 2, 10, 11, 12]
    assert same(others, models)


class Seen(ls.Hook):
    """The steps that were done, as `run.step` counted them."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def after_step(self, run: Any) -> None:
        self.steps.append(run.step)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def interrupted(run_dir: Path, *ask_at: int) -> tuple[list[int], list[int], Any]:
    """Ten steps in a session: what its hook has counted, the steps that it knows of, and the
    model."""
    hook = Seen()
    with ls.Session(run_dir=str(run_dir), hooks=[hook]) as session:
        model, optimizer = session.prepare(network, adamw)
        for step in session.steps(rows(48), global_batch=8, microbatch=4, steps=10):
            for batch in step.microbatches():
                step.backward(squared_error(model, batch))
            step.commit(optimizer)
            if step.index in ask_at:
                ask(None)
        return hook.steps, [session.steps_done], state_of(model)


def test_a_session_that_is_interrupted_again_and_again_counts_on_and_ends_with_the_same_model(
    tmp_path: Path,
) -> None:
    seen, done, model = interrupted(tmp_path / "whole")
    assert (seen, done) == (list(range(1, 11)), [10])
    for at in (2, 5, 7):
        with pytest.raises(Preempted):
            interrupted(tmp_path / "run", at)
        assert saved(tmp_path / "run")[-1] == at + 2
    found = interrupted(tmp_path / "run")
    assert found[:2] == (seen, done)
    assert same(found[2], model)
    assert run_files.result(tmp_path / "run")["steps"] == 10
    assert [event["event"] for event in run_files.events(tmp_path / "run")].count("run-ended") == 1


def test_a_session_that_has_ended_has_saved_its_end_and_is_not_gone_on_with(tmp_path: Path) -> None:
    two_loops(tmp_path / "run", None)
    assert run_files.result(tmp_path / "run")["steps"] == 6
    assert saved(tmp_path / "run") == [6]
    with pytest.raises(ls.errors.RunDirectoryError, match="has ended"):
        two_loops(tmp_path / "run", None)


def test_what_is_included_has_a_state_and_a_name_of_its_own(tmp_path: Path) -> None:
    with ls.Session(run_dir=str(tmp_path / "run")) as session:
        with pytest.raises(
            CheckpointError,
            match=r"^include\('x', a list\); it has no state_dict and load_state_dict",
        ):
            session.include("x", [])  # type: ignore[arg-type]
        session.include("x", Buffer())
        with pytest.raises(CheckpointError, match=r"^include\('x'\) a second time"):
            session.include("x", Buffer())
        session.prepare(network, adamw)
        steps = session.steps(None, global_batch=4, microbatch=2, steps=1)
        next(iter(steps))
        with pytest.raises(
            CheckpointError,
            match=(
                r"^include\('late'\) after steps have begun; a checkpoint is loaded then;"
                r" include it"
            ),
        ):
            session.include("late", Buffer())


def test_what_a_crash_left_is_cleared_away(tmp_path: Path) -> None:
    stopped(tmp_path / "run")
    hidden = tmp_path / "run" / "checkpoints" / ".step-00000004-00c0ffee"
    hidden.mkdir()
    (hidden / "rank-0.safetensors").touch()
    (notes := hidden.with_name(".step-notes")).touch()
    shutil.copy(tmp_path / "run" / "metrics.jsonl", tmp_path / "metrics")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as rows_:
        rows_.write('{"step": 5, "time": 0}\n{"step": 6, "ti')
    train(tmp_path / "run", log_every=1)
    assert (hidden.exists(), notes.exists()) == (False, True)
    found = [row["step"] for row in run_files.metrics(tmp_path / "run")]
    assert found == [4, 5, 6]


KEEPS = ls.Saving(every=1, last=2, keep_every=4, best="place")
EVALUATED: dict[str, Any] = {"steps": 9, "evaluation": ls.Evaluation(data=rows(8), every=1)}


def test_the_last_every_nth_and_the_best_are_kept_across_starts(tmp_path: Path) -> None:
    hooks = [Scores({2: 5.0, 3: 1.0, 7: 2.0}), At(dict.fromkeys(range(2, 10), settled))]
    with pytest.raises(Preempted):
        train(tmp_path / "run", recipe(**EVALUATED), hooks=[*hooks, At({5: ask})], saving=KEEPS)
    assert saved(tmp_path / "run") == [3, 4, 5, 6]
    train(tmp_path / "run", recipe(**EVALUATED), hooks=hooks, saving=KEEPS)
    assert saved(tmp_path / "run") == [3, 4, 8, 9]


def named(run: Path, step: int) -> str:
    (found,) = (
        path.name
        for path in (run / "checkpoints").iterdir()
        if path.name.startswith(f"step-{step:08d}-")
    )
    return found


def test_the_best_is_saved_when_it_is_measured_and_named_by_the_result(tmp_path: Path) -> None:
    run = tmp_path / "run"
    saving = ls.Saving(best="place", last=1)  # and every ten minutes
    result = train(
        run, recipe(**EVALUATED), hooks=[Scores({2: 5.0, 3: 1.0, 7: 2.0})], saving=saving
    )
    assert saved(run) == [3]
    assert result.best == Best(
        metric="place",
        value=1.0,
        step=3,
        checkpoint=named(run, 3),
        weights=f"{run}/checkpoints/{named(run, 3)}",
    )
    told = [
        (event.step, event.details["value"])
        for event in result.events
        if event.name == "best-evaluation"
    ]
    assert told == [(1, 9.0), (2, 5.0), (3, 1.0)]
    assert run_files.result(run)["best"] == asdict(result.best)


def test_the_best_of_a_run_that_was_resumed_may_be_of_an_earlier_start(tmp_path: Path) -> None:
    run, hooks, saving = (
        tmp_path / "run",
        [Scores({3: 1.0, 7: 2.0})],
        ls.Saving(best="place", last=1),
    )
    with pytest.raises(Preempted):
        train(run, recipe(**EVALUATED), hooks=[*hooks, At({5: ask})], saving=saving)
    result = train(run, recipe(**EVALUATED), hooks=hooks, saving=saving)
    assert saved(run) == [3, 6]
    assert result.best == Best(
        metric="place",
        value=1.0,
        step=3,
        checkpoint=named(run, 3),
        weights=f"{run}/checkpoints/{named(run, 3)}",
    )


def test_the_best_may_be_the_final_model(tmp_path: Path) -> None:
    given = recipe(steps=3, evaluation=ls.Evaluation(data=rows(8), every=2))
    run = tmp_path / "run"
    result = train(run, given, hooks=[Scores({2: 5.0, 3: 1.0})], saving=ls.Saving(best="place"))
    assert result.best == Best(
        metric="place", value=1.0, step=3, checkpoint=None, weights=f"{run}/model.safetensors"
    )


@pytest.mark.parametrize(
    ("mode", "value", "before", "better"),
    [
        ("min", 1.0, 2.0, True),
        ("min", 2.0, 2.0, False),
        ("max", 3.0, 2.0, True),
        ("max", 2.0, 2.0, False),
        ("min", 1.0, None, True),
    ],
)
def test_a_value_is_better_only_if_it_is_strictly_so(
    mode: Any, value: float, before: float | None, better: bool
) -> None:
    assert ls.Saving(best="place", mode=mode).improves(value, before) is better
    assert not ls.Saving(best="place", mode=mode).improves(math.nan, before)


def test_the_best_needs_evaluations(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"^Saving\(best='place'\) without Recipe.evaluation, or with every=None",
    ):
        train(tmp_path / "run", recipe(), saving=KEEPS)
    with pytest.raises(
        RecipeError,
        match=(
            r"^Saving\(best='place'\), which is not measured; measured are loss; choose one of"
            r" these$"
        ),
    ):
        train(tmp_path / "other", recipe(**EVALUATED), saving=KEEPS)


def test_an_error_after_the_commit_of_a_step_saves_nothing(tmp_path: Path) -> None:
    """What hooks hold may be of the step before."""

    def fail(run: Any) -> None:
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        train(tmp_path / "run", recipe(), hooks=[At({1: fail})])
    assert saved(tmp_path / "run") == []
    assert run_files.events(tmp_path / "run")[-1]["event"] == "run-failed"


def heavy(model: nn.Module, batch: Any) -> ls.Loss:
    """A weight of 4096 a sample, which only the forward knows."""
    return ls.Loss(4096.0 * ((model(batch[1]) - batch[2]) ** 2).sum(), 4096.0 * len(batch[1]))


def test_what_divides_a_loss_before_its_backward_is_taken_up(tmp_path: Path) -> None:
    stopped(tmp_path / "run", loss=heavy, precision="fp16")
    whole = train(tmp_path / "whole", recipe(steps=6, loss=heavy, precision="fp16"))
    result = train(tmp_path / "run", recipe(steps=6, loss=heavy, precision="fp16"))
    assert result.fingerprint == whole.fingerprint


def steep(model: nn.Module, batch: Any) -> Any:
    return 100.0 * squared_error(model, batch)


def test_a_loss_scale_that_was_halved_is_taken_up(tmp_path: Path) -> None:
    stopped(tmp_path / "run", loss=steep, precision="fp16")
    assert "step-skipped" in [event["event"] for event in run_files.events(tmp_path / "run")]
    whole = train(tmp_path / "whole", recipe(steps=6, loss=steep, precision="fp16"))
    result = train(tmp_path / "run", recipe(steps=6, loss=steep, precision="fp16"))
    assert result.fingerprint == whole.fingerprint


def test_a_field_that_no_recipe_has_cannot_differ(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError,
        match=(
            r"^allow_change='stepps'; it names fields of the recipe, which are balance,"
            r" batch_loss, batch_sampler, blocks, clip_norm, "
        ),
    ):
        train(tmp_path / "run", recipe(), allow_change=["stepps"])
    with pytest.raises(
        CheckpointError,
        match=(
            r"^allow_change='steps,seed'; it must be a list of fields of the recipe:"
            r" allow_change=\['steps', 'seed'\]"
        ),
    ):
        train(tmp_path / "run", recipe(), allow_change="steps,seed")


def test_files_that_may_not_be_read_end_the_run_with_the_reason_and_are_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(tmp_path / "run")

    def refused(*given: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(FolderStorage, "read_into", refused)
    with pytest.raises(
        CheckpointError,
        match=(
            r"checkpoints, step-00000003-\w+: rank-0.safetensors cannot be read: Permission denied"
        ),
    ):
        train(tmp_path / "run")
