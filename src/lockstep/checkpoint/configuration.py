"""The configuration of a transformers model, kept for `lockstep export --format huggingface`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CONFIGURATION = "huggingface"
"""A folder in the run directory."""


def save_configuration(model: Any, folder: Path) -> None:
    """Write a model's configuration, if it has one."""
    for name in ("config", "generation_config"):
        save = getattr(getattr(model, name, None), "save_pretrained", None)
        if callable(save):
            save(str(folder))
