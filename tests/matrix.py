"""python tests/matrix.py [MODEL ...]: `lockstep verify` of every model of tests/scripts/models.py under every plan, in fp32 and in bf16.

A model and a precision are one call, whose plans share its reference and twins. Exit status: 0 where all cells are as they should be.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LOCKSTEP = str(Path(sys.executable).parent / "lockstep")
SCRIPT = str(Path(__file__).parent / "scripts" / "models.py")

WHOLE = [
    *("replicate=2", "replicate=3", "replicate=4", "shard=2", "shard=3", "shard=4", "replicate=2,shard=2"),
    *("tensor=2", "shard=2,tensor=2", "split=2"),
]
"""Plans under which the model's own forward is called."""
STAGED = [
    *("pipeline=2,schedule=gpipe", "pipeline=2", "pipeline=2,schedule=interleaved", "pipeline=2,schedule=zero-bubble", "pipeline=4"),
    *("replicate=2,pipeline=2", "shard=2,pipeline=2", "tensor=2,pipeline=2", "replicate=2,tensor=2,pipeline=2"),
]
"""Plans under which its stages are."""
MODELS = {
    "gpt": WHOLE + STAGED,
    "gpt-dropout": WHOLE + STAGED,
    "perceptron-batchnorm": WHOLE + STAGED,
    "convolutions": WHOLE + STAGED,
    # A pipeline cannot cut these as they come (tests/cli/test_matrix.py sees it refused), and their parts are a model of their own.
    "gpt2": WHOLE,
    "gpt2-in-stages": STAGED,
    "llama": WHOLE,
    "llama-in-stages": STAGED,
}
"""By name, the plans of each."""
# The first step in float64, and the same batch cut otherwise, are the same in every precision: fp32's call sees to them.
OPTIONS = {"fp32": [], "bf16": ["--no-float64", "--whole-microbatch-loss"]}
STEPS = 3
ROW = "{:22} {:5} {:34} {:>8}  {:12} {:>5}"


def verify(model: str, precision: str, plans: Sequence[str], *options: str) -> dict[str, Any]:
    """The report of one call of `lockstep verify`. Raises `RuntimeError` where it ends without one."""
    line = [SCRIPT, model, precision, "--plans", *plans, "--steps", str(STEPS), "--json", *options]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run([LOCKSTEP, "verify", *line], env=hidden, capture_output=True, text=True, check=False)
    if not ended.stdout:
        raise RuntimeError(f"{model} in {precision}: {ended.stderr}")
    report: dict[str, Any] = json.loads(ended.stdout)
    return report


def faults(report: dict[str, Any]) -> list[str]:
    """What is wrong in it, a text each."""
    found = [f"{plan['plan']}: {_fault(plan)}" for plan in report["plans"] if not plan["passed"]]
    recipe = report["recipe"]["failure"]
    return found + ([f"another cut of the batch: {recipe['text']}"] if recipe else [])


def _fault(plan: dict[str, Any]) -> str:
    failure = plan["failure"]
    return f"{failure['text']}; likely cause: {failure['cause']}" if failure else str(plan["error"])


def rows(model: str, precision: str, plans: Sequence[str], report: dict[str, Any]) -> list[str]:
    """A line of the table for each plan."""
    lines = []
    for text, plan in zip(plans, report["plans"], strict=True):
        worst = max((ratio for ratio in ((plan["worst"] or {}).get("ratio"), plan["float64_worst"]) if ratio is not None), default=0.0)
        verdict = "passes" if plan["passed"] else "FAILS" if plan["ran"] else "DID NOT RUN"
        lines.append(ROW.format(model, precision, text, f"{worst:.3g}", verdict, f"{plan['seconds']:.0f}"))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description="Verify every model under every plan, in fp32 and in bf16.")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"only these: {', '.join(MODELS)}")
    chosen = parser.parse_args().models or list(MODELS)
    began, wrong, cells = time.monotonic(), [], 0
    print(ROW.format("model", "type", "plan", "× noise", "verdict", "s"), flush=True)
    for model in chosen:
        for precision, options in OPTIONS.items():
            report = verify(model, precision, MODELS[model], *options)
            print(*rows(model, precision, MODELS[model], report), sep="\n", flush=True)
            cells += len(report["plans"])
            wrong += [f"{model} in {precision}, {fault}" for fault in faults(report)]
    print(*wrong, sep="\n")
    print(f"{cells} cells, {len(wrong)} wrong, {(time.monotonic() - began) / 60:.0f} minutes. × noise: of what rounding alone does; 10 fails")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
