"""The workspace with which cuBLAS computes the same bits each time. Does not import torch, which
reads it once."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping

VARIABLE, WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


def set_workspace(environ: MutableMapping[str, str]) -> None:
    """Set the workspace, unless it is set or the GPU is in use: torch may have read then that it is
    not."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        environ.setdefault(VARIABLE, WORKSPACE)
