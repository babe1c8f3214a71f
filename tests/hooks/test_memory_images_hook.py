"""Images are offered after the first, and older ones given up at the second; a recovery waits for
none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint.states import alone
from training.subjects import recipe

from lockstep.hooks.loss_check import LossCheck
from lockstep.hooks.memory_images import MemoryImages
from lockstep.plan import Plan
from lockstep.training import recovery as recoveries
from lockstep.training.consensus import NOTHING
from lockstep.training.recovery import Recovery


def a_run(step: int, recovered_from: str | None) -> Any:
    """A stand-in for a `Run` without a model."""
    recorder, phases = (
        SimpleNamespace(attempt="00c0ffee", summary={}),
        SimpleNamespace(enter=lambda _: None),
    )
    context = SimpleNamespace(
        world=alone(), recorder=recorder, phases=phases, recovered_from=recovered_from
    )
    run = SimpleNamespace(step=step, context=context)
    loop = SimpleNamespace(values=dict)
    run.training = SimpleNamespace(
        run=run, context=context, modules=[], stateful={}, code=None, loop=loop
    )
    return run


@pytest.mark.parametrize("recovered_from", [None, "rank 1 was killed"])
def test_images_are_offered_after_the_first_and_older_ones_given_up_at_the_second(
    recovered_from: str | None,
) -> None:
    said: list[Any] = []
    rejoin = SimpleNamespace(
        offer_images=lambda descriptors: said.append(len(descriptors)),
        note_all_offered=lambda: said.append("all offered"),
        raise_if_lost=lambda: None,
    )
    recovery: Any = SimpleNamespace(rejoin=rejoin, is_replica=False, can_replace=True)
    hook, run = MemoryImages(recovery), a_run(7, recovered_from)
    hook.before_steps(run)
    images = [said.copy()]
    for _ in range(3):
        run.step += 1
        hook.on_agreement(run, NOTHING)
        images.append(said.copy())
    hook.on_end(run)
    first, both = [1], [1, "all offered"]
    assert images == ([[], first, both, both] if recovered_from else [first, both, both, both])


CANNOT_RECOVER = SimpleNamespace(
    rejoin=SimpleNamespace(raise_if_lost=lambda: None), can_replace=False
)


@pytest.mark.parametrize("recovery", [None, CANNOT_RECOVER])
def test_a_run_that_cannot_recover_has_no_images(recovery: Any) -> None:
    hook, run = MemoryImages(recovery), a_run(0, None)
    hook.before_steps(run)
    hook.on_agreement(run, NOTHING)
    hook.on_end(run)
    assert hook._writer is None


def test_the_loss_is_not_tried_again_in_a_recovery() -> None:
    """A trial would need the run's data, which this one does not have."""
    run = a_run(7, "rank 1 was killed")
    run.recipe = SimpleNamespace(loss=len)
    LossCheck().before_step(run)
    for given in ({"step": 0}, {"context": a_run(7, None).context}):
        with pytest.raises(AttributeError):
            LossCheck().before_step(SimpleNamespace(**{**vars(run), **given}))  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("other", [None, "a hook of the other rank has changed"])
def test_a_run_recovers_in_place_only_if_all_of_its_ranks_can(
    monkeypatch: pytest.MonkeyPatch, device: str, other: str | None
) -> None:
    # another test may have opened one
    monkeypatch.setattr(recoveries, "session_was_opened", lambda: False)
    said: list[Any] = []
    rejoin: Any = SimpleNamespace(trainings=0, announce=lambda why_not, sizes: said.append(why_not))
    world = SimpleNamespace(size=2, owns_group=True, gather_values=lambda mine: [mine, other])
    context = SimpleNamespace(plan=Plan(), world=world, device=torch.device(device))
    recovery = Recovery(rejoin, recipe())
    training = SimpleNamespace(hooks=SimpleNamespace(all=[]), modules=[])
    run: Any = SimpleNamespace(context=context, training=training)
    recovery.announce(run, None)
    mine = None if device == "cpu" else "on the device cuda it has never been tried"
    assert said == [mine or other]
    assert recovery.can_replace == (mine is None and other is None)
