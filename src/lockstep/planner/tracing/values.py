"""Values of tensors without any: lockstep's checks get a finite number, the script an error."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from lockstep.base.errors import RecipeError
from lockstep.planner.tracing.torch_fakes import (
    IS_PINNED,
    PIN_MEMORY,
    DataDependentOutputException,
    DynamicOutputShapeException,
    TorchDispatchMode,
)

TORCH = str(Path(torch.__file__).parent)
TRACING = str(Path(__file__).parent)
LOCKSTEP = str(Path(__file__).parents[2])


PRODUCTS = frozenset({"mm", "addmm", "mv", "addmv", "bmm", "baddbmm", "addbmm", "dot"})
"""Operations whose last two tensors have one dtype, which torch's shapes often ignore."""


TORCHS_NAMES = {torch.float32: "float", torch.bfloat16: "c10::BFloat16", torch.float16: "c10::Half"}
"""Dtypes in torch's errors."""


class ValueNeeded(RecipeError):
    """The script asks for a tensor's value, or a shape that follows from values."""


class Values(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers questions for values in a `FakeTensorMode`."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in (PIN_MEMORY, IS_PINNED):  # of a fake tensor, neither is known
            return args[0] if function is PIN_MEMORY else True
        if function.overloadpacket.__name__ in PRODUCTS:
            # the last argument may be a dtype
            dtypes = [each.dtype for each in args if isinstance(each, torch.Tensor)][-2:]
            if len(set(dtypes)) > 1:
                names = " != ".join(TORCHS_NAMES.get(dtype, str(dtype)) for dtype in dtypes)
                raise RuntimeError(
                    f"expected both factors to have the same dtype, but got: {names}"
                )
        try:
            return function(*args, **(kwargs or {}))
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            return _value_instead(function, args, error)


def listed(tensor: torch.Tensor) -> Any:
    """Return what `tolist` does, from one value."""
    if 0 in tensor.shape:
        return []
    value: Any = tensor.reshape(-1)[0].item()
    for size in reversed(tensor.shape):
        value = [value] * size
    return value


def _value_instead(function: Any, args: Any, error: Exception) -> Any:
    """Return a finite value for lockstep or torch. Raises `ValueNeeded` for the script."""
    frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(2))]
    asking = next(
        (
            frame
            for frame in frames
            if not frame.f_code.co_filename.startswith((TORCH, TRACING, "<"))
        ),
        None,
    )
    is_own = asking is None or asking.f_code.co_filename.startswith(LOCKSTEP)
    if is_own and isinstance(error, DataDependentOutputException):
        return 1.0 if args[0].is_floating_point() else int(args[0].dtype is not torch.bool)
    where = "" if asking is None else f"{asking.f_code.co_filename}:{asking.f_lineno}: "
    raise ValueNeeded(
        f"{where}{function.overloadpacket.__name__} asks for values of a tensor; a plan is made"
        " from shapes alone; write this line so that it needs no values"
    ) from error
