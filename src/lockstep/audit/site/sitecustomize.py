"""Python imports this file at the start of every process of an audited script. The file installs
the probes, and runs the user's `sitecustomize`, which it hides."""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path


def _run_hidden() -> None:
    here = Path(__file__).resolve().parent
    path = [each for each in sys.path if not each or Path(each).resolve() != here]
    spec = PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


_run_hidden()
from lockstep.audit.probes.begin import begin_watching  # noqa: E402  # the user's own first

begin_watching()
