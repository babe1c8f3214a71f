"""python scarce.py ENOUGH: the run of tests/training/kept.py, in which the last process runs out of
memory in step 3.

Each time it does, it adds a file `fired-*` to the working directory (see training/scarce.py).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from training.kept import recipe
from training.scarce import Scarce

import lockstep as ls

if __name__ == "__main__":
    ls.train(recipe(), hooks=[Scarce(3, sys.argv[1], Path.cwd())], log_every=1)
