"""Imports transformers and peft. In the pool's nursery, it does so once for the ranks of all later
runs: each rank would need a second of CPU time."""

from __future__ import annotations

from importlib.util import find_spec

import transformers
from transformers import LlamaForCausalLM, MixtralForCausalLM  # noqa: F401

if find_spec("peft") is not None:
    import peft  # noqa: F401

transformers.utils.logging.disable_progress_bar()  # it leaves a thread


def imported() -> None:
    """The nursery imports the module of each function that is run."""
