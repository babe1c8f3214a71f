"""The setting CUBLAS_WORKSPACE_CONFIG, with which cuBLAS is deterministic. This module does not
import torch, which reads the setting only once."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping

VARIABLE, WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


def set_workspace(environ: MutableMapping[str, str]) -> None:
    """Make cuBLAS deterministic, unless CUBLAS_WORKSPACE_CONFIG is set, or torch may have read
    it."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        environ.setdefault(VARIABLE, WORKSPACE)
