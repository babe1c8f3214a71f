"""Holds a run directory until its input ends; with "forks", a child of it holds it too."""

import os
import sys
from pathlib import Path

from lockstep.logging.run_directory import RunDirectory

directory = RunDirectory.create(Path(sys.argv[1]))
if sys.argv[2] == "forks" and os.fork() == 0:
    os.write(1, b"child\n")
else:
    os.write(1, b"held\n")
sys.stdin.read()
