"""Tensor parallelism of models with LoRA adapters of peft: the plan names layers, which peft has
wrapped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lockstep.base.errors import RecipeError

_ADAPTER_STYLES = {
    "colwise": ("", "colwise"),
    "colwise_gathered": ("", ""),
    "rowwise": ("rowwise", ""),
    "rowwise_split": ("", ""),
}
"""Style of a layer -> styles of its adapter's matrices: features -> rank, and rank -> features. "":
unsharded."""


def without_adapters(model: Any) -> tuple[str, Any]:
    """Return the name and the module of the model that peft has wrapped; ("", `model`) for any
    other."""
    if not hasattr(model, "peft_config") or not hasattr(model, "get_base_model"):
        return "", model
    inner = model.get_base_model()
    return next(name for name, module in model.named_modules() if module is inner), inner


def styles_with_adapters(model: nn.Module, chosen: Mapping[str, str]) -> dict[str, str]:
    """Return the styles, with each wrapper's replaced by styles of its layer and adapters."""
    found: dict[str, str] = {}
    for name, style in chosen.items():
        module: Any = model.get_submodule(name)
        if not all(hasattr(module, part) for part in ("base_layer", "lora_A", "lora_B")):
            found[name] = style
            continue
        if style not in _ADAPTER_STYLES:
            raise RecipeError(
                f"the style {style!r} for {name!r}, a layer with LoRA adapters; they can be sharded"
                f" with {', '.join(_ADAPTER_STYLES)}; leave the layer out of the plan, by a map in"
                " Recipe.tensor, or out of LoraConfig.target_modules"
            )
        found[f"{name}.base_layer"] = style
        for part, adapter_style in zip(("lora_A", "lora_B"), _ADAPTER_STYLES[style], strict=True):
            if adapter_style:
                found |= {
                    f"{name}.{part}.{adapter}": adapter_style for adapter in getattr(module, part)
                }
    return found
