"""Trains the small GPT: a script for `lockstep verify` and `lockstep plan`."""

from models import SMALL, recipe

import lockstep as ls

if __name__ == "__main__":
    ls.train(recipe(size={**SMALL, "layers": 2}))
