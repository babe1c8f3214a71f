"""The step at which the loss or the gradient of a run jumps, and the cause of it. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from lockstep.replay.step import Replay, ReplayedMicrobatch

WINDOW = 64
"""Number of logged steps before a step with which it is compared."""
LEAST_BEFORE = 7
"""A step with fewer logged steps before it is not compared."""
SPREAD = 12.0
"""A spike is this many times as far from the median as usual values are. With this and
`LEAST_BEFORE`, about 2 of 100 runs whose losses are noise around a level have a spike."""
LEADS = 6.0
"""Steps just before a spike lead to it if they are this far from the median."""
RATIO = 4.0
"""A microbatch or a sample that is blamed has a gradient norm of so many times the median of the
others."""

Cause = Literal["sample", "microbatch", "learning rate", "changed", "once", "machine", "all alike"]
"""`changed`: the run's bits do not come back, and something is not as in the run. `once`: they do
not come back, and from the next checkpoint on they do. `machine`: they never do. `all alike`: the
whole batch has a large gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spike:
    """A logged step with an unusual loss or gradient norm."""

    step: int
    metric: str
    value: float
    usual: float
    """The median of the logged steps before it."""
    score: float
    """Distance from the median, in usual distances; infinite for a value that is not finite."""


def spike_at(rows: Sequence[Mapping[str, Any]], place: int) -> Spike | None:
    """Return the spike of a row of metrics.jsonl; None if its values are not above the rows before,
    or too few are before it."""
    before = rows[max(0, place - WINDOW) : place]
    found = []
    for metric in ("loss", "gradient_norm"):
        usual = [row[metric] for row in before if isinstance(row.get(metric), int | float)]
        if len(usual) < LEAST_BEFORE:
            continue
        median = statistics.median(usual)
        value, score = rows[place].get(metric), math.inf
        if value is None:  # not finite
            value = math.nan
        else:
            distance = statistics.median(abs(each - median) for each in usual)
            score = (value - median) / max(distance, 1e-3 * abs(median), 1e-30)
        found.append(
            Spike(step=rows[place]["step"], metric=metric, value=value, usual=median, score=score)
        )
    return max(found, key=lambda spike: spike.score, default=None)


def largest_spike(rows: Sequence[Mapping[str, Any]]) -> Spike | None:
    """Return the largest spike of a run, or the first of unusual steps that lead to it; None if no
    logged step is unusual. Values that are not finite are the largest."""
    spikes = [spike_at(rows, place) for place in range(len(rows))]
    scores = [-math.inf if spike is None else spike.score for spike in spikes]
    place = max(range(len(rows)), key=scores.__getitem__, default=0)
    if not rows or scores[place] < SPREAD:
        return None
    while place and scores[place - 1] >= LEADS:
        place -= 1
    return spikes[place]


@dataclass(frozen=True, kw_only=True, slots=True)
class Blame:
    """The cause of a spike."""

    step: int
    cause: Cause
    text: str
    microbatch: int | None = None
    samples: Sequence[int | str] = ()
    block: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "cause": self.cause,
            "text": self.text,
            "microbatch": self.microbatch,
            "samples": list(self.samples),
            "block": self.block,
        }


def unusual_block(replay: Replay) -> str | None:
    """Return the block whose gradient has grown most, beside the steps on the way; without such
    steps, the one with the largest gradient."""

    def growth(block: str) -> float:
        before = [squares[block] for squares in replay.before if block in squares]
        usual = statistics.median(before) if before else 1.0
        return replay.squares[block] / max(usual, 1e-300)

    return max(replay.squares, key=growth, default=None)


def outliers(norms: Sequence[float]) -> list[int]:
    """Return the places of norms that are many times the median of the others, the largest
    first."""
    norms = [math.inf if math.isnan(norm) else norm for norm in norms]
    found = []
    for place, norm in enumerate(norms):
        others = [*norms[:place], *norms[place + 1 :]]
        if others and (norm == math.inf or norm > RATIO * statistics.median(others)):
            found.append(place)
    return sorted(found, key=norms.__getitem__, reverse=True)


def suspected(replay: Replay) -> ReplayedMicrobatch | None:
    """Return the microbatch with an unusual gradient, or the only one. None: there is none."""
    parts = [each for each in replay.microbatches if each.norm is not None]
    if len(parts) == 1:
        return parts[0]
    places = outliers([each.norm for each in parts if each.norm is not None])
    return parts[places[0]] if places else None


def learning_rate_jump(
    rows: Sequence[Mapping[str, Any]], step: int
) -> tuple[int, float, float] | None:
    """Return the latest logged step up to `step` whose learning rate is more than twice that of the
    logged step before, with both rates. None: there is none in the window."""
    near = [row for row in rows if row["step"] <= step and row.get("lr")][-WINDOW:]
    jumps = [
        (row["step"], before["lr"], row["lr"])
        for before, row in pairwise(near)
        if row["lr"] > 2 * before["lr"]
    ]
    return jumps[-1] if jumps else None


def cause_of(
    replay: Replay,
    rows: Sequence[Mapping[str, Any]],
    *,
    by_sample: Replay | None = None,
    later: Replay | None = None,
) -> Blame:
    """Return the cause of a spike. `rows`: the run's lines of metrics.jsonl. `by_sample`: the step
    in microbatches of one sample. `later`: steps of the run after those that do not come back, from
    a later checkpoint."""
    block = unusual_block(replay)
    if (first := replay.first_unlike) is not None:
        return _not_reproduced(replay, first.step, later)
    suspect = suspected(replay)
    if suspect is not None and (found := _in_samples(replay.step, suspect, by_sample, block)):
        return found
    if suspect is not None and len(replay.microbatches) > 1:
        return Blame(
            step=replay.step,
            cause="microbatch",
            microbatch=suspect.microbatch,
            samples=suspect.samples,
            block=block,
            text=(
                f"microbatch {suspect.microbatch} (samples {_words(suspect.samples)}): its gradient"
                f" norm is {suspect.norm:.3g}, most of it in {block}"
            ),
        )
    if (jump := learning_rate_jump(rows, replay.step)) is not None:
        at, before, after = jump
        return Blame(
            step=replay.step,
            cause="learning rate",
            block=block,
            text=(
                f"the learning rate: {before:.3g} until step {at - 1}, {after:.3g} in step {at};"
                " no microbatch has an unusual gradient"
            ),
        )
    return Blame(
        step=replay.step,
        cause="all alike",
        block=block,
        text=(
            "no microbatch has an unusual gradient: the whole batch is unusual, or the parameters"
            " before the step were bad already; the gradient has grown most in"
            f" {block}; look at the steps before"
        ),
    )


def _in_samples(
    step: int, suspect: ReplayedMicrobatch, by_sample: Replay | None, block: str | None
) -> Blame | None:
    """Blame samples of a microbatch with unusual gradients; None if there are none."""
    if len(suspect.samples) == 1:
        names, share = list(suspect.samples), 1.0
    else:
        parts = () if by_sample is None else by_sample.microbatches
        squares = next((each.by_sample for each in parts if each.by_sample is not None), None)
        if squares is None or not (places := outliers([math.sqrt(each) for each in squares])):
            return None
        names = [suspect.samples[place] for place in places]
        share = math.fsum(squares[place] for place in places) / math.fsum(squares)
    return Blame(
        step=step,
        cause="sample",
        microbatch=suspect.microbatch,
        samples=names,
        block=block,
        text=(
            f"sample{'s' if len(names) > 1 else ''} {_words(names)} of microbatch"
            f" {suspect.microbatch}: {share:.0%} of the squares of its samples' gradients, most of"
            f" it in {block}; look at the data, or make the step without: lockstep replay --step"
            f" {step} --without-sample {names[0]}"
        ),
    )


def _words(samples: Sequence[int | str]) -> str:
    return ", ".join(map(str, samples))


def _not_reproduced(replay: Replay, first: int, later: Replay | None) -> Blame:
    text = f"from step {first} on, this machine computes other gradients than the run has"
    if replay.environment:
        return Blame(
            step=first,
            cause="changed",
            text=(
                f"{text}; not as in the run: {'; '.join(replay.environment)}; look for the cause"
                " where all is as in the run"
            ),
        )
    machine = "a machine of the run, or this one, computes wrong results"
    if later is None:
        text += (
            "; no later checkpoint tells whether that was once: a flipped bit, a script that is not"
            f" the same each time, or {machine}"
        )
    elif later.first_unlike is None:
        return Blame(
            step=first,
            cause="once",
            text=(
                f"{text}; after the next checkpoint the run's gradients come back, so it was once:"
                " a flipped bit, or a script that is not the same each time"
            ),
        )
    else:
        text += f"; after the next checkpoint they do not come back either: {machine}"
    return Blame(
        step=first, cause="machine", text=f"{text}; lockstep run --recompute-every names a machine"
    )
