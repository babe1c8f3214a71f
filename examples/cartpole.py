"""Learn to balance gymnasium's CartPole-v1 by policy gradient (REINFORCE with a learned baseline).

lockstep run --nproc 2 examples/cartpole.py

Reinforcement learning has no dataset: the policy plays the games that it learns from. So this
example is a loop on `ls.Session`, and its samples are environment indices. Each game is seeded by
(seed, step, environment), so it does not depend on the rank that plays it.
"""

from __future__ import annotations

import argparse
from collections import deque
from typing import NamedTuple

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

import lockstep as ls

SOLVED = 475.0
DISCOUNT = 0.99
ENTROPY_BONUS = 0.01
EVALUATION_GAMES = 128


class Policy(nn.Module):
    """(..., 4) observations -> (..., 2) logits of the two actions, and (...) state values."""

    def __init__(self) -> None:
        super().__init__()
        self.action = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.value = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        return self.action(observations), self.value(observations).squeeze(-1)


class Games(NamedTuple):
    """Several games, played side by side until the last one ends."""

    observations: Tensor
    """(time, game, 4)"""
    actions: Tensor
    """(time, game)"""
    playing: Tensor
    """(time, game): True while the game runs."""

    def returns(self) -> Tensor:
        """Return the games' returns, of shape (game,). CartPole gives a reward of 1 for each
        step."""
        return self.playing.float().sum(dim=0)


@torch.no_grad()
def play(policy: Policy, seeds: list[int], device: torch.device, *, greedy: bool = False) -> Games:
    """Play one game for each seed. The policy is called once per time step, for all games."""
    environments = [gymnasium.make("CartPole-v1", disable_env_checker=True) for _ in seeds]
    states = np.stack(
        [
            environment.reset(seed=seed)[0]
            for environment, seed in zip(environments, seeds, strict=True)
        ]
    )
    playing = np.ones(len(environments), dtype=bool)
    history = []
    while playing.any():
        observations = torch.from_numpy(states.copy()).to(device)
        scores = policy.action(observations)
        actions = (
            scores.argmax(dim=1)
            if greedy
            else torch.multinomial(scores.softmax(dim=1), 1).squeeze(1)
        )
        history.append((observations, actions, torch.from_numpy(playing.copy()).to(device)))
        for number, action in enumerate(actions.tolist()):
            if playing[number]:
                states[number], _, terminated, truncated, _ = environments[number].step(action)
                playing[number] = not (terminated or truncated)
    return Games(*(torch.stack(column) for column in zip(*history, strict=True)))


def policy_gradient(policy: Policy, games: Games) -> ls.Loss:
    """Return the loss summed over all time steps of all games, with their number as its weight.

    Games differ in length, so the weight is known only after the forward.
    """
    scores, values = policy(games.observations)
    steps_left = games.playing.flip(0).cumsum(dim=0).flip(0)
    # The discounted return, scaled to 0..1.
    targets = 1 - DISCOUNT**steps_left
    log_probabilities = scores.log_softmax(dim=-1)
    chosen = log_probabilities.gather(-1, games.actions[..., None]).squeeze(-1)
    entropy = -(log_probabilities.exp() * log_probabilities).sum(dim=-1)
    errors = targets - values
    losses = -chosen * errors.detach() + 0.5 * errors.square() - ENTROPY_BONUS * entropy
    return ls.Loss(losses[games.playing].sum(), games.playing.sum())


def seed_of(*parts: int) -> int:
    """Return a seed that differs if any of the parts differs."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


def main(argv: list[str] | None = None) -> float:
    """Return the mean return of 128 new games after the training, the same on every rank."""
    parser = argparse.ArgumentParser(
        description="Learn to balance gymnasium's CartPole-v1 by policy gradient."
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=150,
        help="optimizer steps at most; training ends when the pole balances (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--global-batch",
        type=int,
        default=16,
        help="games per step, over all processes (default: %(default)s)",
    )
    parser.add_argument(
        "--microbatch", type=int, default=4, help="games played side by side (default: %(default)s)"
    )
    parser.add_argument(
        "--lr", type=float, default=1e-2, help="highest learning rate (default: %(default)s)"
    )
    options = parser.parse_args(argv)

    with ls.Session(seed=options.seed) as session:
        policy, optimizer = session.prepare(
            Policy,
            lambda policy: torch.optim.Adam(policy.parameters(), lr=options.lr),
            schedule=ls.warmup_cosine(warmup=0, total=options.steps),
        )
        last_means: deque[float] = deque(maxlen=10)
        steps = session.steps(
            None,
            global_batch=options.global_batch,
            microbatch=options.microbatch,
            steps=options.steps,
        )
        for step in steps:
            returns = [torch.empty(0)]
            for environments in step.microbatches():
                games = play(
                    policy,
                    [seed_of(options.seed, step.index, number) for number in environments],
                    session.device,
                )
                step.backward(policy_gradient(policy, games))
                returns.append(games.returns())
            step.commit(optimizer, clip_norm=1.0)
            last_means.append(session.mean(torch.cat(returns)))
            step.log({"return": last_means[-1]})
            if len(last_means) == 10 and sum(last_means) / 10 >= SOLVED:
                session.stop(f"a mean return of {SOLVED:.0f} over the last 10 steps")

        fresh = [
            seed_of(options.seed, options.steps, number)
            for number in range(session.rank, EVALUATION_GAMES, session.world_size)
        ]
        mean_return = session.mean(play(policy, fresh, session.device, greedy=True).returns())
        if session.rank == 0:
            print(
                f"mean return {mean_return:.1f} over {EVALUATION_GAMES} fresh games, after"
                f" {step.index + 1} steps (500 is the most)"
            )
    return mean_return


if __name__ == "__main__":
    main()
