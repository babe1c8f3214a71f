"""python tests/matrix.py [MODEL ...]: every model of tests/scripts/models.py verified under every plan, in fp32 and in bf16.

A model and a precision are one verification, whose plans share its reference and twins. Exit status: 0 where all pass.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from verify.pooled import pools, verified

from lockstep.verify.verdict import Report

SCRIPT = str(Path(__file__).parent / "scripts" / "models.py")

PLANS = [
    *("replicate=2", "replicate=3", "replicate=4", "shard=2", "shard=3", "shard=4", "replicate=2,shard=2"),
    *("tensor=2", "shard=2,tensor=2", "split=2"),
    *("pipeline=2,schedule=gpipe", "pipeline=2", "pipeline=2,schedule=interleaved", "pipeline=2,schedule=zero-bubble", "pipeline=4"),
    *("replicate=2,pipeline=2", "shard=2,pipeline=2", "tensor=2,pipeline=2", "replicate=2,tensor=2,pipeline=2"),
]
MODELS = (
    *("gpt", "gpt-dropout", "perceptron-batchnorm", "perceptron-syncbatchnorm", "convolutions"),
    *("gpt2", "gpt2-in-stages", "llama", "llama-in-stages"),
)
_PIPELINES = [plan for plan in PLANS if "pipeline" in plan]
REFUSED = [
    # Their forward does more than to call one part after another; those in stages are the same models as a pipeline takes them.
    *((model, _PIPELINES, "that is no nn.Sequential") for model in ("gpt2", "llama")),
]
"""Models, with plans that lockstep refuses with an error in these words (tests/verify/test_matrix.py sees it). All others must pass."""
PRECISIONS = ("fp32", "bf16")
STEPS = 3
ROW = "{:24} {:5} {:34} {:>8}  {:12} {:>5}"


def faults(report: Report) -> list[str]:
    """What is wrong in it, a text each."""
    found = [
        f"{verdict.plan}: {f'{verdict.failure.text()}; {verdict.failure.why()}' if verdict.failure else verdict.error}"
        for verdict in report.verdicts
        if not verdict.passed
    ]
    return found + ([f"another cut of the batch: {report.recipe.text()}"] if report.recipe else [])


def rows(model: str, precision: str, plans: Sequence[str], report: Report) -> Iterator[str]:
    """A line of the table for each plan."""
    for plan, verdict in zip(plans, report.verdicts, strict=True):
        compared = (*verdict.comparisons, *verdict.float64)
        worst = max((each.worst.ratio for each in compared if each.worst is not None), default=0.0)
        said = "passes" if verdict.passed else "FAILS" if verdict.ran else "DID NOT RUN"
        yield ROW.format(model, precision, plan, f"{worst:.3g}", said, f"{verdict.seconds:.0f}")


def plans_of(model: str) -> list[str]:
    refused = [plan for name, plans, _ in REFUSED if name == model for plan in plans]
    return [plan for plan in PLANS if plan not in refused]


def main() -> int:
    parser = argparse.ArgumentParser(description="Verify every model under every plan, in fp32 and in bf16.")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"only these: {', '.join(MODELS)}")
    chosen = parser.parse_args().models or MODELS
    began, cells = time.monotonic(), 0
    wrong: list[str] = []
    print(ROW.format("model", "type", "plan", "× noise", "verdict", "s"), flush=True)
    with pools(preload=["transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama"]) as workers:
        for model, precision in product(chosen, PRECISIONS):
            # The first step in float64, and the same batch cut otherwise, are the same in every precision.
            once = precision == "fp32"
            plans = plans_of(model)
            report = verified([SCRIPT, model, precision], plans, workers, steps=STEPS, float64=once, other_microbatch=once)
            print(*rows(model, precision, plans, report), sep="\n", flush=True)
            cells += len(report.verdicts)
            wrong += [f"{model} in {precision}, {fault}" for fault in faults(report)]
            for remark in report.remarks + [f"{verdict.plan}: {remark}" for verdict in report.verdicts for remark in verdict.remarks]:
                print(f"  note: {remark}")
    print(*wrong, sep="\n")
    print(
        f"{cells} cells, {len(wrong)} wrong, {(time.monotonic() - began) / 60:.0f} minutes. × noise: of what rounding alone does; 10 fails"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
