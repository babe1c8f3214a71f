"""The configuration of a model of transformers, which a run keeps for `lockstep export --format
huggingface`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CONFIGURATION = "huggingface"
"""The folder in a run directory."""


def save_configuration(model: Any, folder: Path) -> None:
    """Write the configuration of a model that has one; of any other model nothing."""
    for name in ("config", "generation_config"):
        save = getattr(getattr(model, name, None), "save_pretrained", None)
        if callable(save):
            save(str(folder))
