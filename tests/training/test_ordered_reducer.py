"""The reducer of stages and of sharded layers, where it is used in a way that few runs use it."""

from __future__ import annotations

import torch
from torch import nn
from worlds import ALONE

from lockstep.assignment import MicrobatchAssignment
from lockstep.comm.mesh import Mesh
from lockstep.plan import Plan
from lockstep.recomputed import Computed
from lockstep.training.reducers.agreement import StepAgreement
from lockstep.training.reducers.microbatch_checksums import MicrobatchChecksums
from lockstep.training.reducers.ordered import OrderedReducer


def test_a_microbatch_recomputed_after_the_sum_has_its_own_gradient() -> None:
    """The third rank decides when gradients have been summed."""
    world = ALONE
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    mesh = Mesh.of(world, Plan(replicate=1))
    reducer = OrderedReducer(
        [weight], mesh, max_microbatches=2, agreement=StepAgreement(mesh.summed())
    )
    reducer.begin_step(2, MicrobatchAssignment(1))
    rows = torch.tensor([[0.3, 0.7], [1.1, 1.3]])
    one = torch.ones(())
    own = MicrobatchChecksums()
    for place, row in enumerate(rows):
        loss = (weight * row).sin().sum()
        with reducer.recording.of(own if place == 0 else MicrobatchChecksums()):
            reducer.backward(loss, one, own_parameters_only=False, is_dummy=False)
    reducer.reduce([0.0, 0.0], None, flag=False)
    summed = weight.grad
    assert summed is not None
    again = MicrobatchChecksums()
    with reducer.recording.of(again), reducer.discarding():
        reducer.recompute((weight * rows[0]).sin().sum(), one)
    assert again.computed(1) == own.computed(1) != Computed([], [0])
