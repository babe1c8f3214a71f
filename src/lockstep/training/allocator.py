"""Allocators, as training uses memory: what one step frees, the next one takes again."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from lockstep.base.torch_private import set_allocator_settings

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Of mallopt(3)."""
_KEPT_BYTES = 2**31 - 1
_MOST_FROM_HEAP_BYTES = 2**25
"""The most that glibc takes for each."""
OWN_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
OWN_GPU_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Have this process keep up to 2 GiB that it has freed, and take tensors of up to 32 MiB from that; whether it does.

    As glibc is set up, it gives a step's gradients back to the system, and faults them in again page by page in the next step: which
    takes up to a fifth of a step, in some processes and not in others. For the life of the process. Not where the user has settings of
    their own in the environment, or the C library is another.
    """
    if any(name in environ for name in OWN_SETTINGS):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)) and bool(mallopt(_MMAP_THRESHOLD, _MOST_FROM_HEAP_BYTES))


def expand_segments(environ: Mapping[str, str]) -> bool:
    """Have torch grow the pieces of a GPU's memory that it holds, so that no gaps are left between them; whether it does.

    For the life of the process. Not where the user has settings of their own in the environment.
    """
    if any(name in environ for name in OWN_GPU_SETTINGS):
        return False
    return set_allocator_settings("expandable_segments:True")
