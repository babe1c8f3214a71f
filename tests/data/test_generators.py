"""The default generators that are seeded from a key."""

import random

import torch

from lockstep.data.generators import seed_generators


def test_seeds_python_as_its_own_seed_does() -> None:
    before = random.getstate()
    try:
        for key in (0, 1, 2**63 + 5, 2**64 - 1):
            random.gauss(0, 1)  # keeps the second of a pair of deviates
            seed_generators(key, torch.device("cpu"))
            state = random.getstate()
            random.seed(key)
            assert state == random.getstate()
    finally:
        random.setstate(before)
