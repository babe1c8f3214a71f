"""The 64-bit keys of random streams. A key is the same on every machine, rank and process."""

from __future__ import annotations

from enum import IntEnum

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX_FIRST = 0xBF58476D1CE4E5B9
MIX_SECOND = 0x94D049BB133111EB


class RandomStream(IntEnum):
    """The use of a random stream. The use is the second part of a key, after the seed, so no two
    uses share a stream."""

    MODEL = 1
    ORDER = 2
    """The permutation of samples: (seed, ORDER), then the epoch."""
    SAMPLE = 3
    """Augmentation of one sample: (seed, SAMPLE, epoch, sample). In a `Stream`: (seed, SAMPLE,
    epoch, shard, sample)."""
    COLLATE = 4
    """Collation of a microbatch: (seed, COLLATE, step, microbatch)."""
    FORWARD = 5
    """The forward of one microbatch, such as dropout: (seed, FORWARD, step, microbatch)."""
    EVALUATION = 6
    """The forward of one microbatch in an evaluation: (seed, EVALUATION, steps done,
    microbatch)."""
    WINDOW = 7
    """The permutation of the samples in one window of a stream: (seed, WINDOW, shard, epoch,
    window)."""
    SAMPLER = 8
    """A call of a sampler: (seed, SAMPLER, epoch). In `ls.samplers`: (seed, SAMPLER, epoch or
    number of a part)."""
    HOOK = 9
    """A call of a user's hook: (seed, HOOK, index of the hook, number of the method, steps
    done)."""
    GRADIENT_HOOK = 10
    """The calls of the hooks on a model's gradients in one step: (seed, GRADIENT_HOOK, steps done,
    number of the model)."""
    MIXTURE = 11
    """The choice of the stream in a mixture that gives a sample: (seed, MIXTURE, shard, block of
    positions). The seed of a stream in a mixture: (seed, MIXTURE, hash of its name)."""
    RECOMPUTATION = 12
    """The choice of the microbatches that another rank recomputes: (seed, RECOMPUTATION, step,
    number of the choice)."""
    OPTIMIZER = 13
    """A step of an optimizer that draws random numbers and is not torch's: (seed, OPTIMIZER, steps
    done, number of the model). A call of the optimizer's closure adds its number to the key."""
    LOOP = 14
    """Random numbers that a script's loop draws outside of its microbatches: (seed, LOOP, steps
    done, number of passes over the step's microbatches)."""


def key(*parts: int) -> int:
    """Return an integer in 0..2**64-1 that depends on all `parts` and on their order. Parts are
    taken modulo 2**64."""
    state = 0
    for part in parts:
        state = longer(state, part)
    return state


def longer(key: int, part: int) -> int:
    """Return the key with one more part, mixed by the finalizer of splitmix64 (Steele, Lea and
    Flood, 2014)."""
    state = ((key + GOLDEN) ^ part) & MASK
    state = (state ^ (state >> 30)) * MIX_FIRST & MASK
    state = (state ^ (state >> 27)) * MIX_SECOND & MASK
    return state ^ (state >> 31)
