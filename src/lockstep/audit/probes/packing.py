"""Records if the attention masks of transformers' models keep packed documents apart.

transformers finds documents in the position ids, which restart at each document. transformers looks
for documents only if a mask function gets position ids, but no attention mask and no cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lockstep.audit.probes.recorder import RecordWriter

FINDER = "find_packed_sequence_indices"


class Packing:
    def __init__(self, recorder: RecordWriter) -> None:
        self._recorder = recorder
        self._within = False
        self._apart = False
        self._knows = False

    def install(self, module: ModuleType) -> None:
        if hasattr(module, FINDER):
            self._knows = True
            self._recorder.wrap(module, FINDER, after=self._after_search)
        else:
            self._recorder.watch(module.PreTrainedModel, "__call__", self._call, traced=True)

    def _after_search(self, found: Any, *_: Any, **__: Any) -> None:
        self._apart |= found is not None

    def _call(self, original: Callable[..., Any], model: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self._within or not (torch.is_grad_enabled() and model.training):
            return original(model, *args, **kwargs)
        self._within, self._apart = True, False
        try:
            result = original(model, *args, **kwargs)
        finally:
            self._within = False
        self._recorder.safely(self._note, model, args, kwargs)
        return result

    def _note(self, model: Any, args: Any, kwargs: Any) -> None:
        bound = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
        call = {**bound, **bound.get("kwargs", {})}
        positions, mask = call.get("position_ids"), call.get("attention_mask")
        if not isinstance(positions, Tensor) or positions.dim() != 2:
            return
        masks_rows = isinstance(mask, Tensor) and mask.dim() == 2
        most = _documents(positions, mask if masks_rows else None)
        if most < 2:
            return
        self._recorder.write(
            "packed",
            model=type(model).__name__,
            line=self._recorder.line(caller_of_forward=True),
            documents=most,
            apart=self._apart,
            known=self._knows and _is_judged(model, mask, masks_rows),
            has_mask=masks_rows,
            has_cache=_has_cache(model, call),
        )


def _documents(positions: Tensor, mask: Tensor | None) -> int:
    numbers = torch.nn.functional.pad(positions.diff(dim=1) != 1, (1, 0)).cumsum(1)
    if mask is not None:  # one row of positions may be for all rows
        numbers = torch.where(mask[:, -positions.shape[1] :] != 0, numbers, -1)
    return max(len(row[row >= 0].unique()) for row in numbers)


def _is_judged(model: Any, mask: Any, masks_rows: bool) -> bool:
    """Return True if transformers makes the attention mask. Flash attention reads the position ids
    itself."""
    is_flash = "flash" in str(getattr(model.config, "_attn_implementation", ""))
    return not is_flash and (mask is None or masks_rows)


def _has_cache(model: Any, call: dict[str, Any]) -> bool:
    if call.get("past_key_values") is not None:
        return True
    use = call.get("use_cache")
    return bool(getattr(model.config, "use_cache", False) if use is None else use)
