"""python tests/matrix.py [MODEL ...]: verifies every model of tests/scripts/models.py under every
plan, in fp32 and bf16.

Each model and precision is one verification: its plans share the reference and the perturbed runs.
Exit status: 0 if all pass.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np
from verify.pooled import pools, verified

from lockstep.verify.compare import Comparison
from lockstep.verify.verdict import Report

SCRIPT = str(Path(__file__).parent / "scripts" / "models.py")

PLANS = [
    *(
        "replicate=2",
        "replicate=3",
        "replicate=4",
        "shard=2",
        "shard=3",
        "shard=4",
        "replicate=2,shard=2",
    ),
    *("tensor=2", "shard=2,tensor=2", "split=2"),
    *("context=2", "context=2,exchange=heads", "replicate=2,context=2", "shard=2,context=2"),
    *(
        "pipeline=2,schedule=gpipe",
        "pipeline=2",
        "pipeline=2,schedule=interleaved",
        "pipeline=2,schedule=zero-bubble",
        "pipeline=4",
    ),
    *(
        "replicate=2,pipeline=2",
        "shard=2,pipeline=2",
        "shard=2,pipeline=2,schedule=zero-bubble",
        "tensor=2,pipeline=2",
        "replicate=2,tensor=2,pipeline=2",
    ),
]
EXPERT_PLANS = [
    *("expert=2", "expert=4", "replicate=2,expert=2", "shard=2,expert=2", "expert=2,context=2"),
]
EXPERTS = (
    "mixture",
    *("mixtral", "qwen3-moe", "gpt-oss", "deepseek-v3"),
    *("mixtral-eager", "qwen3-moe-eager", "gpt-oss-eager", "deepseek-v3-eager"),
)
"""Mixtures of experts. The default experts of transformers do not run in float64; eager ones do."""
MODELS = (
    *("gpt", "gpt-dropout", "perceptron-batchnorm", "perceptron-syncbatchnorm", "convolutions"),
    *("gpt2", "gpt2-in-stages", "llama", "llama-in-stages"),
    *EXPERTS,
)
_PIPELINES = [plan for plan in PLANS if "pipeline" in plan]
_CONTEXT = [plan for plan in PLANS if "context" in plan]
REFUSED = [
    # Dropout is refused without Recipe.sequence; images are no sequences.
    *((model, _CONTEXT, "dropout") for model in ("gpt-dropout", "gpt2", "gpt2-in-stages")),
    *(
        (model, _CONTEXT, "a sequence of 1 token")
        for model in ("perceptron-batchnorm", "perceptron-syncbatchnorm", "convolutions")
    ),
    # Their forwards do more than call one part after another. The models in stages are the same,
    # written for a pipeline.
    *((model, _PIPELINES, "that is not an nn.Sequential") for model in ("gpt2", "llama")),
]
"""Models, plans that lockstep refuses for them, and words of the error
(tests/verify/test_matrix.py). All others must pass."""
PRECISIONS = ("fp32", "bf16")
SHORT = "the float64 run is only as exact as"
STEPS = 3
ROW = "{:24} {:5} {:34} {:>10} {:>8} {:>8}  {:12} {:>5}"


def faults(report: Report) -> list[str]:
    """Return a text for each mismatch."""
    found = [
        f"{verdict.plan}:"
        f" {f'{verdict.mismatch.text()}; {verdict.mismatch.why()}' if verdict.mismatch else verdict.error}"
        for verdict in report.verdicts
        if not verdict.passed
    ]
    return found + (
        [f"another microbatch size: {report.microbatch_size_mismatch.text()}"]
        if report.microbatch_size_mismatch
        else []
    )


def rows(model: str, precision: str, plans: Sequence[str], report: Report) -> Iterator[str]:
    """Return a table line for each plan."""
    for plan, verdict in zip(plans, report.verdicts, strict=True):
        compared = (*verdict.comparisons, *verdict.float64)
        largest = max(
            (each.largest.times_rounding for each in compared if each.largest is not None),
            default=0.0,
        )
        outcome = "passes" if verdict.passed else "FAILS" if verdict.ran else "DID NOT RUN"
        yield ROW.format(
            model,
            precision,
            plan,
            f"{largest:.3g}",
            f"{largest_off(verdict.comparisons):.1e}",
            f"{largest_off(verdict.float64):.1e}" if verdict.float64 else "",
            outcome,
            f"{verdict.seconds:.0f}",
        )


def largest_off(comparisons: Sequence[Comparison]) -> float:
    """Return the largest relative distance of the first step's gradient, or of the loss of any
    step, from one process; NaN if there is one. (Adam makes whole updates of the rounding of
    gradients near zero, so parameters, and later gradients, differ by more.)"""
    found = [
        off
        for each in comparisons
        for off in (each.divergence["gradients"][0], *each.divergence["loss"])
    ]
    return float(np.max(found, initial=0.0))


def too_far(report: Report) -> list[str]:
    """Return a text for each plan of a mixture of experts that is off by more than rounding. (In a
    float64 run, norms and routers of transformers compute in float32 all the same.)"""
    is_short = any(SHORT in note for note in report.notes)
    return [
        f"{verdict.plan}: off by {off:.1e} in {dtype}, more than {limit}"
        for verdict in report.verdicts
        for dtype, limit, off in (
            ("fp32", 1e-6, largest_off(verdict.comparisons)),
            ("float64", 1e-6 if is_short else 1e-14, largest_off(verdict.float64)),
        )
        if not off <= limit
    ]


def plans_of(model: str) -> list[str]:
    if model in EXPERTS:
        return EXPERT_PLANS
    refused = [plan for name, plans, _ in REFUSED if name == model for plan in plans]
    return [plan for plan in PLANS if plan not in refused]


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Verify every model under every plan, in fp32 and in bf16."
    )
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help=f"only these: {', '.join(MODELS)}"
    )
    chosen = parser.parse_args().models or MODELS
    began, cells = time.monotonic(), 0
    wrong: list[str] = []
    heads = ("model", "type", "plan", "× rounding", "off", "float64", "verdict", "s")
    print(ROW.format(*heads), flush=True)
    with pools(
        preload=[
            "transformers.models.gpt2.modeling_gpt2",
            "transformers.models.llama.modeling_llama",
        ]
    ) as workers:
        for model, precision in product(chosen, PRECISIONS):
            if model in EXPERTS and precision == "bf16":
                continue  # rounding to bf16 sends tokens to other experts
            # The float64 step and the microbatch size check are the same in every precision.
            once = precision == "fp32"
            plans = plans_of(model)
            report = verified(
                [SCRIPT, model, precision],
                plans,
                workers,
                steps=STEPS,
                float64=once,
                check_microbatch_size=once,
            )
            print(*rows(model, precision, plans, report), sep="\n", flush=True)
            cells += len(report.verdicts)
            far = too_far(report) if model in EXPERTS else []
            wrong += [f"{model} in {precision}, {fault}" for fault in faults(report) + far]
            for note in report.notes + [
                f"{verdict.plan}: {note}" for verdict in report.verdicts for note in verdict.notes
            ]:
                print(f"  note: {note}")
    print(*wrong, sep="\n")
    minutes = (time.monotonic() - began) / 60
    print(
        f"{cells} cells, {len(wrong)} wrong, {minutes:.0f} minutes. × rounding: multiple of what"
        " rounding alone does; above 10 fails. off: largest relative distance of the first"
        " gradient or of a loss from one process"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
