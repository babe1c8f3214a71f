"""`python -m lockstep.verify.entry [-m] SCRIPT ARGS...`: a script under the trace that the environment asks for.

What `lockstep verify` gives `lockstep run` as its module; see `lockstep.verify.wiring`.
"""

from __future__ import annotations

import os
import sys

from lockstep.launch import worker
from lockstep.verify.wiring import install

if __name__ == "__main__":
    install()
    arguments = sys.argv[1:]
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.pop(0)  # the working directory, which stands there because this is a module
    if arguments[0] == "-m":
        worker._run_module(arguments[1], arguments[2:])
    else:
        worker._run_script(arguments[0], arguments[1:])
