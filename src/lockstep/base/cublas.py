"""The workspace with which cuBLAS gives the same bits each time. This module does not import torch,
which reads the setting only once."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping

VARIABLE, WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


def set_workspace(environ: MutableMapping[str, str]) -> None:
    """Set the workspace, unless it is already set, or torch may have read the setting."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        environ.setdefault(VARIABLE, WORKSPACE)
