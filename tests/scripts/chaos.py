"""python chaos.py SEEN: trains a small GPT for 60 steps and writes each microbatch's samples to a
file in SEEN.

A line is [start of the run, step, samples], or [start, "from", step] if a start of the run resumes
from a step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch
from models import MODELS, gpt, of_words
from torch import Tensor
from torch.utils.data import Dataset

import lockstep as ls

STEPS = 60
GPT = MODELS["gpt-dropout"]


class Numbered(Dataset[dict[str, Tensor]]):
    """The texts, each with its index."""

    def __len__(self) -> int:
        return len(GPT["data"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {**GPT["data"][index], "number": torch.tensor(index)}


class Seen(ls.Hook):
    """Writes each microbatch's samples to the file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.step = 0
        self.start = ""
        self.file: TextIO | None = None

    def on_start(self, run: Any) -> None:
        self.start = f"{run.context.recorder.attempt}"
        if self.file is not None:
            self.file.close()
        self.file = (self.folder / f"{self.start}-{os.getpid()}.jsonl").open("w", buffering=1)
        self.step = run.step
        self.write("from", run.step)

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]

    def on_event(self, run: Any, event: Any) -> None:
        if event.name in ("resumed", "recovered"):
            self.step = event.step
            self.write("from", self.step)

    def after_step(self, run: Any) -> None:
        time.sleep(float(os.environ.get("CHAOS_SLEEP", "0")))
        self.step = run.step

    def write(self, what: Any, value: Any) -> None:
        if self.file is not None:
            self.file.write(json.dumps([self.start, what, value]) + "\n")


def main(seen: Seen) -> None:
    def loss(output: Tensor, batch: dict[str, Tensor]) -> ls.Sum:
        if torch.is_grad_enabled():  # else the loss is only tried
            seen.write(seen.step, batch["number"].tolist())
        return of_words(output, batch)

    recipe = ls.Recipe(
        **{**GPT, "data": Numbered(), "loss": loss},
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
        global_batch=28,
        microbatch=4,
        steps=STEPS,
        clip_norm=0.5,
        schedule=ls.warmup_cosine(warmup=5, total=STEPS),
    )
    ls.train(recipe, hooks=[seen])


if __name__ == "__main__":
    assert gpt
    main(Seen(Path(sys.argv[1])))
