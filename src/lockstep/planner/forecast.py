"""Formats the predictions of `lockstep plan` as text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.base.files import finite
from lockstep.base.units import size
from lockstep.plan import Plan
from lockstep.planner.machines.costs import Interval
from lockstep.planner.machines.hardware import Cluster
from lockstep.planner.prediction import SKEW, Outcome, Prediction
from lockstep.planner.search import closest

HOURS_BETWEEN_FAILURES = 50_000.0
"""Mean time between failures of one device. A training on 16,384 GPUs had 419 failures in 54 days
(arXiv 2407.21783, "The Llama 3 Herd of Models")."""
SAVE_SECONDS = 10.0
"""Time for which training stops while a checkpoint is copied."""
RESTART_SECONDS = 300.0
LIMITS = {
    "matmul": "arithmetic",
    "attention": "arithmetic (attention)",
    "convolution": "arithmetic",
    "memory": "memory bandwidth",
    "launches": "launches (the host)",
    "bubble": "pipeline bubbles",
    "offload": "copies to the host",
    "communication": "network",
    "contention": "network (beside computation)",
    "loader": "loader",
}
"""Maps the keys of `Prediction.by_limit` to text. All other keys of `Prediction.by_limit` are names
of mesh axes."""
HEAD = (
    *("plan", "step", "80% of such plans", "samples/s", "memory", "limited by"),
    "twice the network",
)
SIDE_BY_SIDE = ("devices", *HEAD[:6], "days", "cost")
LEFT = ("devices", "plan", "limited by")


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    days: float
    device_hours: float
    cost: float | None
    goodput: float
    """Fraction of the wall-clock time that is not lost to failures and checkpoints."""


def budget(
    seconds: float,
    *,
    steps: float,
    devices: int,
    price_per_hour: float | None,
    hours_between_failures: float = HOURS_BETWEEN_FAILURES,
    save_seconds: float = SAVE_SECONDS,
    restart_seconds: float = RESTART_SECONDS,
) -> Budget:
    """Assume that checkpoints are saved at the optimal interval (Young, "A first order
    approximation to the optimum checkpoint interval", 1974)."""
    rate = devices / (hours_between_failures * 3600)
    # At the interval √(2 × save_seconds / rate), saving takes as much time as the steps that a
    # failure loses.
    goodput = max(0.0, 1 - math.sqrt(2 * save_seconds * rate) - rate * restart_seconds)
    total = math.inf if goodput == 0 else seconds * steps / goodput
    hours = total * devices / 3600
    return Budget(
        days=total / 86400,
        device_hours=hours,
        cost=None if price_per_hour is None else hours * price_per_hour,
        goodput=goodput,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The predicted speed and memory of all plans for one script and cluster."""

    script: str
    cluster: Cluster
    outcomes: Sequence[Outcome]
    interval: Interval
    """The ratio of measured to predicted step time is in this range for 80% of published
    trainings."""
    tokens: float | None
    price_per_hour: float | None
    remarks: Sequence[str] = ()

    def __post_init__(self) -> None:
        fastest_first = sorted(self.outcomes, key=lambda each: (each.seconds, each.plan))
        object.__setattr__(self, "outcomes", fastest_first)

    @property
    def target(self) -> str:
        return f"{self.cluster.count} x {self.cluster.device.name}"

    @property
    def fitting(self) -> list[Prediction]:
        return [each.prediction for each in self.outcomes if each.prediction and not each.reason]

    @property
    def title(self) -> str:
        refused = sum(each.is_refused for each in self.outcomes)
        others = f", and {refused} cannot be run" if refused else ""
        return (
            f"{self.script} on {self.target}: {len(self.fitting)} of {len(self.outcomes) - refused}"
            f" plans fit{others}"
        )

    def bounds(self, prediction: Prediction) -> tuple[float, float]:
        return prediction.seconds * self.interval.low, prediction.seconds * self.interval.high

    def rows(self, most: int) -> Iterator[tuple[str, ...]]:
        for each in self.fitting[:most]:
            low, high = self.bounds(each)
            faster = each.seconds / each.seconds_with_twice["network"]
            yield (
                each.plan,
                time_in_words(each.seconds),
                f"{time_in_words(low)} to {time_in_words(high)}",
                f"{each.samples / each.seconds:.3g}",
                size(each.needed_bytes),
                limit_in_words(each.limit),
                f"{faster:.2f} times as fast",
            )

    def lines(self, most: int) -> Iterator[str]:
        if not self.fitting:
            yield from self._nothing_fits()
            return
        best = self.fitting[0]
        total = sum(best.by_limit.values())
        shares = [
            f"{limit_in_words(name)} {100 * seconds / total:.0f}%"
            for name, seconds in best.by_limit.items()
            if seconds >= 0.02 * total
        ]
        yield f"{best.plan}: {', '.join(shares)}"
        yield (
            f"memory of rank {best.peak.rank}, at its peak in {best.peak.moment}:"
            f" {_largest(best.peak.by_cause, 5)}; with what libraries take and a margin:"
            f" {size(best.needed_bytes)}"
        )
        gains = {what: best.seconds / seconds for what, seconds in best.seconds_with_twice.items()}
        yield "; ".join(
            f"twice the {what}: {gain:.2f} times as fast" for what, gain in gains.items()
        )
        rate = self.loader_rate(best)
        yield (
            f"the loader must deliver {_rate(rate)} samples/s on each machine"
            f" ({_rate(rate / self.cluster.devices_per_node)} in each of its processes)"
        )
        yield from self._budget(best)
        yield from self._skewed(most)
        if best.note is not None:
            yield f"note: {best.note}"
        reasons = list(struck([each for each in self.outcomes if each.reason is not None]))
        yield from (f"not {each}" for each in reasons[:most])

    def _skewed(self, most: int) -> Iterator[str]:
        for each in self.fitting[: most or None]:
            if each.skewed is not None:
                needed = each.needed_for(each.skewed.peak_bytes)
                is_too_large = each.capacity_bytes is not None and needed > each.capacity_bytes
                mark = ", more than a device has: it fits only with balanced routing"
                yield (
                    f"{each.plan}, if one rank's experts get {SKEW:g} times the mean number of"
                    f" rows: a step of {time_in_words(each.skewed.seconds)} instead of"
                    f" {time_in_words(each.seconds)}, and {size(needed)} of memory there"
                    f"{mark if is_too_large else ''}"
                )

    def _nothing_fits(self) -> Iterator[str]:
        nearest = closest(self.outcomes)
        if nearest is not None and nearest.prediction is not None:
            causes = _largest(nearest.prediction.peak.by_cause, 4)
            yield f"no plan fits; {nearest.plan} comes closest: it {nearest.reason} ({causes})"
            yield "more devices, a smaller microbatch, or devices with more memory would do"
        others = [each for each in self.outcomes if each is not nearest]
        yield from (f"not {each}" for each in struck(others))

    def loader_rate(self, prediction: Prediction) -> float:
        """Return the samples per second that the data loaders of one machine must deliver together.
        Each rank of a tensor-parallel group loads the same samples."""
        data = Plan.parse(prediction.plan).resolve(self.cluster.count).data_ranks
        return prediction.samples / prediction.seconds / data * self.cluster.devices_per_node

    def budget(self, prediction: Prediction) -> Budget | None:
        steps: float | None = prediction.steps
        if self.tokens is not None:
            steps = None if prediction.tokens is None else self.tokens / prediction.tokens
        if steps is None:
            return None
        return budget(
            prediction.seconds,
            steps=steps,
            devices=self.cluster.count,
            price_per_hour=self.price_per_hour,
        )

    def _budget_json(self, found: Budget) -> dict[str, float | None]:
        fields: dict[str, float | None] = asdict(found)
        for name in ("days", "cost"):
            for end, ratio in asdict(self.interval).items():
                value = fields[name]
                fields[f"{name}_{end}"] = None if value is None else value * ratio
        budget: dict[str, float | None] = finite(fields)
        return budget

    def _budget(self, best: Prediction) -> Iterator[str]:
        found = self.budget(best)
        if found is None:
            if self.tokens is not None:
                yield (
                    "days for a number of tokens: the recipe has no Recipe.weight, which counts"
                    " them"
                )
            return
        what = f"{self.tokens:.3g} tokens" if self.tokens is not None else f"{best.steps} steps"
        if not found.goodput:
            yield (
                f"{what}: never; of {self.cluster.count:,} devices one fails before the others have"
                " started again (goodput 0)"
            )
            return
        days, costs = self._days_and_cost(found)
        cost = "" if found.cost is None else f", costs {found.cost:,.0f} ({costs})"
        yield (
            f"{what}: {_days(found.days)} ({days}), {found.device_hours:,.1f} device-hours{cost};"
            f" goodput {found.goodput:.3f}"
        )

    def _days_and_cost(self, found: Budget) -> tuple[str, str]:
        low, high = self.interval.low, self.interval.high
        days = f"{_days(found.days * low)} to {_days(found.days * high)}"
        if found.cost is None:
            return days, ""
        return days, f"{found.cost * low:,.0f} to {found.cost * high:,.0f}"

    def as_json(self) -> dict[str, Any]:
        return {
            "script": self.script,
            "on": self.target,
            "interval": asdict(self.interval),
            "remarks": list(self.remarks),
            "plans": [self._json(each) for each in self.outcomes],
        }

    def _json(self, outcome: Outcome) -> dict[str, Any]:
        if outcome.prediction is None:
            return {"plan": outcome.plan, "fits": False, "reason": outcome.reason}
        found = self.budget(outcome.prediction)
        low, high = self.bounds(outcome.prediction)
        return {
            **outcome.prediction.as_json(),
            "reason": outcome.reason,
            "seconds_low": low,
            "seconds_high": high,
            "budget": found and self._budget_json(found),
            "loader_samples_per_second_per_node": self.loader_rate(outcome.prediction),
        }


def side_by_side(forecasts: Sequence[Forecast]) -> Iterator[tuple[str, ...]]:
    for each in forecasts:
        if not each.fitting:
            yield each.target, "no plan fits", *[""] * (len(SIDE_BY_SIDE) - 2)
            continue
        best, (row, *_) = each.fitting[0], each.rows(1)
        cost = each.budget(best)
        days_and_cost = each._days_and_cost(cost) if cost and cost.goodput else ("", "")
        yield each.target, *row[:6], *days_and_cost


def struck(outcomes: Sequence[Outcome]) -> Iterator[str]:
    plans: dict[str | None, list[str]] = {}
    for outcome in outcomes:
        plans.setdefault(outcome.reason, []).append(outcome.plan)
    for reason, names in plans.items():
        others = f" and {len(names) - 2} more" if len(names) > 2 else ""
        yield f"{', '.join(names[:2])}{others}: {reason}"


def _largest(by_cause: Mapping[str, int], most: int) -> str:
    return ", ".join(f"{cause} {size(each)}" for cause, each in list(by_cause.items())[:most])


def time_in_words(seconds: float) -> str:
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


def limit_in_words(name: str) -> str:
    return LIMITS.get(name, f"network ({name})")


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _days(days: float) -> str:
    seconds = days * 86400
    if seconds < 3600:
        return time_in_words(seconds)
    return f"{days:.3g} days" if days >= 1 else f"{days * 24:.3g} hours"
