"""Seeds the default generators of a worker before the user's code, so that all ranks make the same
data and models. Does not import torch or numpy. The generators of torch and numpy are seeded when
the user's code imports these packages."""

from __future__ import annotations

import importlib.util
import operator
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

SEED = 0
HASH_SEED = {"PYTHONHASHSEED": "0"}
"""The PYTHONHASHSEED of all workers. The fixed value makes the iteration order of a set of strings
the same in every worker."""
SAFE_PATH = {"PYTHONSAFEPATH": "lockstep"}
"""The environment variable PYTHONSAFEPATH, which keeps a spawned Python process from importing
modules from the working directory. Multiprocessing starts processes with `-c`, which would import
from the working directory."""
_RUN_NAME = "lockstep-seeding"
# module -> the name of its function that seeds its default generator
_SEEDED = {"random": "seed", "numpy.random": "seed", "torch": "manual_seed"}


def seed_workers_generators() -> None:
    for name in _SEEDED.keys() & sys.modules.keys():
        _seed(sys.modules[name])
    sys.meta_path.insert(0, _SeedAfterImport(_SEEDED.keys() - sys.modules.keys()))


class SeedingName(str):
    """The name of a process that multiprocessing spawns. Unpickling the name seeds the generators
    before the script is imported. Unpickling runs this file by its path, because the process may
    not be able to import lockstep."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return operator.getitem, ([str(self), _RunThisFile()], 0)


class _RunThisFile:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return runpy.run_path, (__file__, None, _RUN_NAME)


class _SeedAfterImport(MetaPathFinder):
    def __init__(self, names: set[str]) -> None:
        self._names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._names:
            return None
        self._names.remove(name)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_seed(module: ModuleType) -> None:
                execute(module)
                if module.__name__ == name:
                    _seed(module)

            spec.loader.exec_module = execute_and_seed  # type: ignore[method-assign]
        return spec


def _seed(module: ModuleType) -> None:
    getattr(module, _SEEDED[module.__name__])(SEED)


if __name__ == _RUN_NAME:
    # child processes of the user's code get the search path that they have without lockstep
    if os.environ.items() >= SAFE_PATH.items():
        del os.environ[next(iter(SAFE_PATH))]
    seed_workers_generators()
