"""The state of a run under any plan, in the memory of processes that are gone, is restored bit for
bit under others."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from training.kept import of_all, recipe

import lockstep as ls
from lockstep.checkpoint.image_writer import ImageWriter
from lockstep.checkpoint.images import open_images
from lockstep.checkpoint.storage import CheckpointName
from lockstep.testing.pool import WorkerPool
from lockstep.training.state import restore, state_of

ATTEMPT = "00c0ffee"
STEPS = 2
WRITTEN = {2: ["tensor=2", "pipeline=2"], 3: ["shard=3"], 4: ["replicate=2,shard=2"]}
RESTORED = {1: ["replicate=1"], 2: ["tensor=2", "pipeline=2"], 3: ["shard=3"]}
"""Number of processes -> plans."""


class Noted:
    """State of another object: a tensor and a number."""

    def __init__(self, number: int) -> None:
        self.state: dict[str, Any] = {"history": torch.arange(number), "number": number}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class KeepsImages(ls.Hook):
    """Writes an image after every step, and gives its descriptor to the process that listens at
    `address`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.writer: ImageWriter | None = None
        self.state = ""

    def after_step(self, run: Any) -> None:
        state, world = state_of(run.training.modules, {"noted": Noted(run.step)}), run.context.world
        if self.writer is None:
            self.writer = ImageWriter(world, ATTEMPT, {"rank": world.rank})
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as toward:
                toward.connect(self.address)
                socket.send_fds(toward, [str(world.rank).encode()], self.writer.descriptors)
        self.writer.write(
            run.step,
            state.tensors,
            {**state.values, **run.training.loop.values(), "step": run.step},
        )
        if run.step == STEPS:
            self.state = of_all(run)

    def on_end(self, run: Any) -> None:
        assert self.writer is not None
        self.writer.close()


def train(plans: Mapping[str, str], folder: str) -> list[str]:
    """The fingerprint of the last state under each plan; `plans` gives each one's address."""
    found = []
    for plan, address in plans.items():
        hook = KeepsImages(address)
        ls.train(
            recipe(steps=STEPS, global_batch=16, schedule=None, evaluation=None),
            plan=plan,
            run_dir=f"{folder}/{plan}",
            hooks=[hook],
        )
        found.append(hook.state)
    return found


def restored(
    plans: Sequence[str], folder: str, images: Mapping[str, Sequence[str]]
) -> list[dict[str, str]]:
    """Fingerprints of the states, as a session under each plan takes them up."""
    given, found = recipe(), []
    for plan in plans:
        with ls.Session(plan=plan, run_dir=f"{folder}/{plan}") as session:
            session.prepare(given.model, given.optimizer, stages=given.stages, tensor=given.tensor)
            found.append({name: _restored(session.run, paths) for name, paths in images.items()})
    return found


def _restored(run: Any, paths: Sequence[str]) -> str:
    images, noted = open_images(paths, run.context.world), Noted(0)
    assert images.newest == CheckpointName(STEPS, ATTEMPT)
    for name in images.names:
        reader = images.reader(name)
        restore(reader, run.training.modules, {"noted": noted}, run.context.mesh)
        assert (
            reader.manifest.step
            == reader.manifest.values["step"]
            == noted.state["number"]
            == name.step
        )
        assert reader.manifest.metadata == {"rank": 0}
        assert torch.equal(noted.state["history"], torch.arange(name.step))
    assert [name.step for name in images.names] == [STEPS - 1, STEPS]
    return of_all(run)


@pytest.fixture(scope="module")
def written(
    pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, tuple[str, list[str]]]]:
    """Plan -> the fingerprint of the last state, and the paths of the images, which only this
    process holds."""
    found = {}
    with ExitStack() as stack:
        for processes, plans in WRITTEN.items():
            listeners = {
                plan: stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
                for plan in plans
            }
            for plan, listener in listeners.items():
                listener.bind(f"\0lockstep-{os.getpid()}-{plan}")
            addresses = {
                plan: str(listener.getsockname(), "ascii") for plan, listener in listeners.items()
            }
            ended = pool.run(processes, train, addresses, str(tmp_path_factory.mktemp("written")))
            assert ended == [ended[0]] * processes
            for (plan, listener), state in zip(listeners.items(), ended[0], strict=True):
                held = dict(_received(listener) for _ in range(processes))
                for descriptor in held.values():
                    stack.callback(os.close, descriptor)
                found[plan] = (
                    state,
                    [f"/proc/{os.getpid()}/fd/{held[rank]}" for rank in range(processes)],
                )
        yield found


def _received(listener: socket.socket) -> tuple[int, int]:
    text, (descriptor,), _, _ = socket.recv_fds(listener, 64, 1)
    return int(text), descriptor


@pytest.mark.parametrize("processes", RESTORED)
def test_images_of_processes_that_are_gone_are_restored_under_any_plan(
    pool: WorkerPool, tmp_path: Path, written: dict[str, tuple[str, list[str]]], processes: int
) -> None:
    images = {plan: paths for plan, (_, paths) in written.items()}
    truth = {plan: state for plan, (state, _) in written.items()}
    plans = RESTORED[processes]
    assert (
        pool.run(processes, restored, plans, str(tmp_path), images)
        == [[truth] * len(plans)] * processes
    )
