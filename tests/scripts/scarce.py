"""python scarce.py ENOUGH: the run of tests/training/kept.py, where the last process runs out of memory in step 3 (training/scarce.py).

Each time it does, a file `fired-*` more is in the working directory.
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
