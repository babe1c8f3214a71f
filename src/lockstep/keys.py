"""The 64-bit keys from which every random stream starts: the same on every machine, rank and
process."""

from __future__ import annotations

from enum import IntEnum

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX_FIRST = 0xBF58476D1CE4E5B9
MIX_SECOND = 0x94D049BB133111EB


class RandomStream(IntEnum):
    """The use of a random stream. It is the second part of a key, after the seed, so no two uses
    share a stream."""

    MODEL = 1
    ORDER = 2
    """The permutation of samples: (seed, ORDER), then the epoch."""
    SAMPLE = 3
    """One sample's augmentation: (seed, SAMPLE, epoch, sample); of a stream: (seed, SAMPLE, epoch,
    shard, sample)."""
    COLLATE = 4
    """Collating a microbatch: (seed, COLLATE, step, microbatch)."""
    FORWARD = 5
    """Dropout and similar in one microbatch's forward: (seed, FORWARD, step, microbatch)."""
    EVALUATION = 6
    """One microbatch's forward in an evaluation: (seed, EVALUATION, steps done, microbatch)."""
    WINDOW = 7
    """The permutation of the samples in one window of a stream: (seed, WINDOW, shard, epoch,
    window)."""
    SAMPLER = 8
    """A call of a sampler: (seed, SAMPLER, epoch); in `ls.samplers`: (seed, SAMPLER, epoch or
    number of a part)."""
    HOOK = 9
    """A call of a user's hook: (seed, HOOK, index of the hook, number of the method, steps
    done)."""
    GRADIENT_HOOK = 10
    """The calls of the hooks on a model's gradients in one step: (seed, GRADIENT_HOOK, steps done,
    number of the model)."""
    MIXTURE = 11
    """The stream of a mixture from which a sample comes: (seed, MIXTURE, shard, block of
    positions); and the seed of one of its streams: (seed, MIXTURE, hash of its name)."""
    RECOMPUTATION = 12
    """The choice of the microbatches that another rank recomputes: (seed, RECOMPUTATION, step,
    number of the choice)."""
    OPTIMIZER = 13
    """A step of an optimizer that is not torch's, for its own random numbers: (seed, OPTIMIZER,
    steps done, number of the model), and then the number of a call of its closure."""
    LOOP = 14
    """Random numbers that a script's own loop draws outside of its microbatches: (seed, LOOP, steps
    done, number of passes over the step's microbatches)."""


def key(*parts: int) -> int:
    """Return an integer in 0..2**64-1 that depends on every one of `parts` and on their order.
    Parts are taken modulo 2**64."""
    state = 0
    for part in parts:
        state = longer(state, part)
    return state


def longer(key: int, part: int) -> int:
    """Return the key with one more part, mixed by splitmix64's finalizer (Steele, Lea and Flood,
    2014)."""
    state = ((key + GOLDEN) ^ part) & MASK
    state = (state ^ (state >> 30)) * MIX_FIRST & MASK
    state = (state ^ (state >> 27)) * MIX_SECOND & MASK
    return state ^ (state >> 31)
