"""The result of a verification: a verdict for each plan, as text, table rows and JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.base.files import finite
from lockstep.evidence.tolerance import TOLERANCE
from lockstep.verify.compare import DESCRIPTIONS, Comparison, Difference

COLUMNS = ("plan", "processes", "verdict", "tolerance", "largest difference", "where")
ROUNDING = (
    "rounding: the largest distance between runs on one process that differ by noise of one unit in"
    " the last place"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """The first difference beyond the tolerance between a plan's run and the reference, with its
    likely cause."""

    difference: Difference
    float64: bool
    cause: str | None

    def text(self) -> str:
        difference = self.difference
        when = f"step {difference.step}" if difference.step >= 0 else "before the first step"
        what = DESCRIPTIONS[difference.check] + (f" {difference.name!r}" if difference.name else "")
        where = f" on rank {difference.rank}" if difference.rank else ""
        microbatches = (
            f", microbatch {', '.join(map(str, difference.microbatches))}"
            if difference.microbatches
            else ""
        )
        relative = (
            f"{difference.relative:.2g} of its size" if math.isfinite(difference.relative) else ""
        )
        sizes = ", ".join(filter(None, (relative, _times_rounding(difference))))
        different = "" if difference.check == "missing" else ": different"
        size = f": off by {sizes}" if sizes else different
        precision = " (in float64)" if self.float64 else ""
        return f"{when}: {what}{where}{microbatches}{size}{precision}"

    def why(self) -> str:
        unknown = "no known pattern; compare the gradients of the first step (--keep DIR)"
        return f"likely cause: {self.cause or unknown}"

    def as_json(self) -> dict[str, Any]:
        return {
            **_difference_json(self.difference),
            "float64": self.float64,
            "cause": self.cause,
            "text": self.text(),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressionEffect:
    """Relative differences between a run with gradient compression and the same run without it."""

    gradient_compression: str
    steps: int
    gradient: float
    parameters: float
    loss: float

    def text(self) -> str:
        return (
            f"gradient_compression={self.gradient_compression}: after {self.steps} steps the loss"
            f" differs by {self.loss:.2g} of its size from the uncompressed run, the parameters by"
            f" {self.parameters:.2g}; the first gradient by {self.gradient:.2g}"
        )


@dataclass(kw_only=True, slots=True)
class Verdict:
    plan: str
    processes: int
    bitwise: bool
    ran: bool = True
    exit_status: int = 0
    error: str = ""
    seconds: float = 0.0
    mismatch: Mismatch | None = None
    comparisons: list[Comparison] = field(default_factory=list)
    float64: list[Comparison] = field(default_factory=list)
    """Comparisons of the first step in float64, one for each model. Empty if float64 was not
    verified."""
    compression: list[CompressionEffect] = field(default_factory=list)
    """The effect of gradient compression on each model. Empty if the recipe does not compress
    gradients."""
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return self.ran and self.mismatch is None

    @property
    def largest(self) -> Difference | None:
        """The largest difference from the reference, in multiples of rounding. None if the run
        equals the reference in all bits."""
        differences = [each.largest for each in self.comparisons if each.largest is not None]
        return max(differences, key=lambda difference: difference.times_rounding, default=None)

    def row(self) -> tuple[str, ...]:
        verdict = "passes" if self.passed else "fails" if self.ran else "did not run"
        allowed = "same bits" if self.bitwise else f"{TOLERANCE:g} × rounding"
        difference = self.largest if self.mismatch is None else self.mismatch.difference
        cells = (self.plan, str(self.processes), verdict, allowed)
        if difference is None:
            return *cells, "same bits" if self.ran else "", ""
        where = f"{DESCRIPTIONS[difference.check]} {difference.name}".rstrip()
        where += f", step {difference.step}" if difference.step >= 0 else ""
        where += " (float64)" if self.mismatch is not None and self.mismatch.float64 else ""
        return *cells, _times_rounding(difference), where

    def as_json(self) -> dict[str, Any]:
        return {
            "plan": self.plan,
            "processes": self.processes,
            "criterion": "bitwise" if self.bitwise else "tolerance",
            "passed": self.passed,
            "ran": self.ran,
            "exit_status": self.exit_status,
            "error": self.error or None,
            "seconds": self.seconds,
            "mismatch": None if self.mismatch is None else self.mismatch.as_json(),
            "largest": None if self.largest is None else _difference_json(self.largest),
            "float64": bool(self.float64),
            "float64_largest": max(
                (c.largest.times_rounding for c in self.float64 if c.largest is not None),
                default=None,
            ),
            "compression": [asdict(each) for each in self.compression],
            "notes": self.notes,
            "divergence": self.comparisons[0].divergence if self.comparisons else {},
        }


@dataclass(kw_only=True, slots=True)
class Report:
    script: str
    steps: int
    verdicts: list[Verdict] = field(default_factory=list)
    microbatch_size_checked: bool = False
    microbatch_size_mismatch: Mismatch | None = None
    """Difference between two runs of the same batch with different microbatch sizes. A difference
    shows that the recipe's loss depends on the microbatch size."""
    notes: list[str] = field(default_factory=list)
    rounding_spread: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Smallest and largest relative distance at each step between runs that differ only by
    rounding, by kind of tensor."""

    @property
    def passed(self) -> bool:
        return self.microbatch_size_mismatch is None and all(each.passed for each in self.verdicts)

    def summary(self) -> str:
        failed = sum(not verdict.passed for verdict in self.verdicts)
        if failed:
            return (
                f"{failed} of {len(self.verdicts)} plans failed to show that they train the same"
                " model as one process"
            )
        text = "every plan trains the same model as one process"
        if self.microbatch_size_mismatch is not None:
            text += ", but the loss depends on how a batch is split into microbatches"
        return text

    def as_json(self) -> dict[str, Any]:
        mismatch = self.microbatch_size_mismatch
        return {
            "script": self.script,
            "passed": self.passed,
            "steps": self.steps,
            "tolerance": TOLERANCE,
            "microbatch_size": {
                "checked": self.microbatch_size_checked,
                "mismatch": None if mismatch is None else mismatch.as_json(),
            },
            "notes": self.notes,
            "plans": [verdict.as_json() for verdict in self.verdicts],
            "rounding_spread": {
                kind: [list(pair) for pair in spread]
                for kind, spread in self.rounding_spread.items()
            },
        }


def _times_rounding(found: Difference) -> str:
    times = found.times_rounding
    return f"{times:.3g} × rounding" if math.isfinite(times) else ""


def _difference_json(difference: Difference) -> dict[str, Any]:
    row: dict[str, Any] = finite(asdict(difference))
    return row | {"name": difference.name or None}
