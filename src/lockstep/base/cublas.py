"""Sets CUBLAS_WORKSPACE_CONFIG, which makes cuBLAS deterministic. Does not import torch, which
reads the variable only once."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping

VARIABLE, WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


def set_workspace(environ: MutableMapping[str, str]) -> None:
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        environ.setdefault(VARIABLE, WORKSPACE)
