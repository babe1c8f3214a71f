"""The result of a verification: a verdict for each plan, in words, as table rows and as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.evidence.tolerance import TOLERANCE
from lockstep.verify.compare import DESCRIPTIONS, Comparison, Difference

COLUMNS = ("plan", "processes", "verdict", "tolerance", "largest difference", "where")
ROUNDING = (
    "rounding: the largest distance between runs on one process that differ by noise of one unit in"
    " the last place"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """The first difference that is beyond the tolerance, with its likely cause."""

    difference: Difference
    float64: bool
    """True if the float64 run showed it."""
    cause: str | None
    """None: no known cause fits."""

    def text(self) -> str:
        """Return the difference, its place and its size as a sentence."""
        found = self.difference
        when = f"step {found.step}" if found.step >= 0 else "before the first step"
        what = DESCRIPTIONS[found.check] + (f" {found.name!r}" if found.name else "")
        where = f" on rank {found.rank}" if found.rank else ""
        microbatches = (
            f", microbatch {', '.join(map(str, found.microbatches))}" if found.microbatches else ""
        )
        sizes = [f"{found.relative:.2g} of its size"] if math.isfinite(found.relative) else []
        sizes += (
            [f"{found.times_rounding:.3g} × rounding"]
            if math.isfinite(found.times_rounding)
            else []
        )
        size = (
            f": off by {', '.join(sizes)}"
            if sizes
            else ""
            if found.check == "missing"
            else ": different"
        )
        return f"{when}: {what}{where}{microbatches}{size}" + (
            " (in float64)" if self.float64 else ""
        )

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
    """Relative differences between a run with gradient compression and the same run without,
    tensors pooled."""

    gradient_compression: str
    steps: int
    gradient: float
    """Difference in the first step's gradient."""
    parameters: float
    """Difference after the last step."""
    loss: float
    """Difference in the last step."""

    def text(self) -> str:
        return (
            f"gradient_compression={self.gradient_compression}: after {self.steps} steps the loss"
            f" differs by {self.loss:.2g} of its size from the uncompressed run, the parameters by"
            f" {self.parameters:.2g}; the first gradient by {self.gradient:.2g}"
        )


@dataclass(kw_only=True, slots=True)
class Verdict:
    """The verdict on one plan."""

    plan: str
    processes: int
    bitwise: bool
    ran: bool = True
    """False: the run under this plan failed."""
    exit_status: int = 0
    error: str = ""
    seconds: float = 0.0
    """Wall time of the run under this plan."""
    mismatch: Mismatch | None = None
    comparisons: list[Comparison] = field(default_factory=list)
    """Comparisons in the recipe's precision, one for each train module."""
    float64: list[Comparison] = field(default_factory=list)
    """Comparisons of the first step in float64, one for each train module. Empty: not done."""
    compression: list[CompressionEffect] = field(default_factory=list)
    """Effect of the recipe's gradient compression, one for each train module. Empty: the recipe
    does not compress."""
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return self.ran and self.mismatch is None

    @property
    def largest(self) -> Difference | None:
        """The largest difference in multiples of rounding. None: all bits are equal."""
        found = [each.largest for each in self.comparisons if each.largest is not None]
        return max(found, key=lambda difference: difference.times_rounding, default=None)

    def row(self, tolerance: float) -> tuple[str, ...]:
        """Return the table cells in the order of `COLUMNS`."""
        verdict = "passes" if self.passed else "fails" if self.ran else "did not run"
        allowed = "same bits" if self.bitwise else f"{tolerance:g} × rounding"
        found = self.largest if self.mismatch is None else self.mismatch.difference
        if found is None:
            return (
                self.plan,
                str(self.processes),
                verdict,
                allowed,
                "same bits" if self.ran else "",
                "",
            )
        size = (
            f"{found.times_rounding:.3g} × rounding" if math.isfinite(found.times_rounding) else ""
        )
        where = f"{DESCRIPTIONS[found.check]} {found.name}".rstrip() + (
            f", step {found.step}" if found.step >= 0 else ""
        )
        where += " (float64)" if self.mismatch is not None and self.mismatch.float64 else ""
        return self.plan, str(self.processes), verdict, allowed, size, where

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
    """The result of `lockstep verify`."""

    script: str
    steps: int
    verdicts: list[Verdict] = field(default_factory=list)
    microbatch_size_checked: bool = False
    microbatch_size_mismatch: Mismatch | None = None
    """Difference between two microbatch sizes, a fault of the recipe: the loss depends on the size
    of microbatches."""
    notes: list[str] = field(default_factory=list)
    rounding_spread: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Smallest and largest relative distance between perturbed runs at each step, by kind of
    tensor, and for `loss`."""
    tolerance: float = TOLERANCE

    @property
    def passed(self) -> bool:
        return self.microbatch_size_mismatch is None and all(
            verdict.passed for verdict in self.verdicts
        )

    def summary(self) -> str:
        failed = sum(not verdict.passed for verdict in self.verdicts)
        if failed:
            return (
                f"{failed} of {len(self.verdicts)} plans failed to show that they train the same"
                " model as one process"
            )
        text = "every plan trains the same model as one process"
        return (
            text
            if self.microbatch_size_mismatch is None
            else f"{text}, but the loss depends on how a batch is split into microbatches"
        )

    def as_json(self) -> dict[str, Any]:
        mismatch = self.microbatch_size_mismatch
        return {
            "script": self.script,
            "passed": self.passed,
            "steps": self.steps,
            "tolerance": self.tolerance,
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


def _difference_json(difference: Difference) -> dict[str, Any]:
    return {
        "step": difference.step,
        "check": difference.check,
        "name": difference.name or None,
        "rank": difference.rank,
        "times_rounding": (
            difference.times_rounding if math.isfinite(difference.times_rounding) else None
        ),
        "relative": difference.relative if math.isfinite(difference.relative) else None,
        "microbatches": list(difference.microbatches),
    }
