"""PPO: two epochs of minibatches over one set of rollouts, which is saved with the run.

lockstep run --nproc 2 examples/cookbook/ppo.py
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli

import lockstep as ls

GROUPS, POLES, TIME, BATCH = 4, 8, 32, 256  # the poles of a group are played side by side
ROWS = GROUPS * POLES * TIME
STEPS = 2 * ROWS // BATCH  # two epochs of each set of rollouts


def build() -> nn.Module:
    """(poles, 2) angles and their speeds -> the logit of a push to the right, and the value."""
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 2))


def play(policy: nn.Module, seed: int, device: torch.device) -> Tensor:
    """Rows of state, action, its log-probability, return and advantage: the same on whichever rank
    plays."""
    draw = partial(torch.rand, generator=torch.Generator(device).manual_seed(seed), device=device)
    states, played = draw(POLES, 2) * 0.2 - 0.1, []
    for _ in range(TIME + 1):
        logits, values = policy(states).T
        actions = (draw(POLES) < logits.sigmoid()).float()
        angle, turn = states.T
        moved = torch.stack(
            [angle + 0.05 * turn, turn + 0.05 * (10 * angle.sin() + 12 * actions - 6)], dim=1
        )
        stands = moved[:, 0].abs() < 0.5
        played.append((states, actions, Bernoulli(logits=logits).log_prob(actions), values, stands))
        states = torch.where(stands[:, None], moved, draw(POLES, 2) * 0.2 - 0.1)
    rows, returns = [], played.pop()[3]
    for before, actions, chosen, values, stands in reversed(played):
        returns = stands * (0.03 + 0.97 * returns)
        rows.append(torch.column_stack([before, actions, chosen, returns, returns - values]))
    return torch.cat(rows)


@torch.no_grad()
def collect(session: ls.Session, policy: nn.Module, iteration: int) -> Tensor:
    """The rows of all groups, on every rank. Each plays equally many groups: under shard, forwards
    have collectives."""
    ranks = session.context.mesh.data
    share = -(-GROUPS // ranks.size)
    mine = range(ranks.rank * share, (ranks.rank + 1) * share)
    rows = torch.cat([play(policy, 1000 * iteration + group, session.device) for group in mine])
    return session.gather(rows[: max(0, GROUPS - mine.start) * POLES * TIME])


def train(**options: Any) -> str:
    with ls.Session(seed=0, **options) as session:
        policy, optimizer = session.prepare(
            build, lambda policy: torch.optim.Adam(policy.parameters(), lr=3e-3)
        )
        rollouts = nn.Module()
        rollouts.register_buffer("rows", torch.zeros(ROWS, 6, device=session.device))
        session.include("rollouts", rollouts)  # a resumed run goes on with the same ones
        for step in session.steps(range(ROWS), global_batch=BATCH, microbatch=64, steps=4 * STEPS):
            if step.index % STEPS == 0:
                rollouts.rows.copy_(collect(session, policy, step.index // STEPS))
            for chosen in step.microbatches():
                states, (actions, before, returns, advantages) = (
                    rollouts.rows[chosen, :2],
                    rollouts.rows[chosen, 2:].T,
                )
                logits, values = policy(states).T
                ratio = (Bernoulli(logits=logits).log_prob(actions) - before).exp()
                gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
                step.backward(((values - returns).square() - gain).mean())
            step.commit(optimizer, clip_norm=0.5)
            step.log({"return": rollouts.rows[:, 4].mean().item()})
        return ls.fingerprint(policy)


if __name__ == "__main__":
    train()
