"""Installs the probes when a process imports torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from lockstep.audit.request import AuditRequest
from lockstep.base.errors import USER_ERROR_STATUS, LaunchError, say

AFTER = (
    "torch",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group",
    "accelerate.accelerator",
    "transformers.masking_utils",
    "transformers.modeling_utils",
)


def begin_watching() -> None:
    try:
        request = AuditRequest.read(os.environ)
    except LaunchError as error:  # Python would continue without `sitecustomize`
        say(f"lockstep: LaunchError: {error}")
        os._exit(USER_ERROR_STATUS)
    if request is not None:
        request.die_with_launcher()
        sys.meta_path.insert(0, _Finder(request))


class _Finder(MetaPathFinder):
    """Finds the modules of `AFTER`, and installs probes after their import."""

    def __init__(self, request: AuditRequest) -> None:
        self._request = request

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in AFTER:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._request)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Loader, request: AuditRequest) -> None:
        self._loader, self._request = loader, request

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        from lockstep.audit.probes.install import after_import  # it imports torch

        after_import(module, self._request)
