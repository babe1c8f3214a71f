"""Finds the step at which a run's loss or gradient norm jumps, and the cause of the jump."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from lockstep.base.words import listed
from lockstep.replay.not_finite import first_words
from lockstep.replay.step import Replay, ReplayedMicrobatch

WINDOW = 64
LEAST_BEFORE = 7
"""Smallest number of preceding logged steps with which a step is compared."""
SPREAD = 12.0
"""Smallest distance of a spike from the median of the preceding steps, in median absolute
deviations. About 2 of 100 runs whose losses are only noise have a spike of this size."""
LEADS = 6.0
"""Smallest distance from the median of a step that belongs to the spike after it, in median
absolute deviations."""
RATIO = 4.0
"""Ratio of the gradient norm of a microbatch or sample to the median of the others, above which it
is the cause."""
JUMP_LEADS = 8
"""Number of logged steps in which a jump of the learning rate can cause a spike."""

Cause = Literal["sample", "microbatch", "learning rate", "changed", "once", "machine", "all alike"]
"""`changed`: code, recipe or environment differ from the run. `once`: only replays from later
checkpoints reproduce the run. `machine`: no replay reproduces the run. `all alike`: the whole batch
has a large gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spike:
    """A logged step with an unusual loss or gradient norm."""

    step: int
    metric: str
    value: float
    usual: float
    score: float
    """Distance from the median of the preceding logged steps, in median absolute deviations."""


def spike_at(rows: Sequence[Mapping[str, Any]], index: int) -> Spike | None:
    before = rows[max(0, index - WINDOW) : index]
    spikes = []
    for metric in ("loss", "gradient_norm"):
        usual = [row[metric] for row in before if isinstance(row.get(metric), int | float)]
        if len(usual) < LEAST_BEFORE:
            continue
        median = statistics.median(usual)
        value, score = rows[index].get(metric), math.inf
        if value is None:  # not finite
            value = math.nan
        else:
            distance = statistics.median(abs(each - median) for each in usual)
            score = (value - median) / max(distance, 1e-3 * abs(median), 1e-30)
        spikes.append(
            Spike(step=rows[index]["step"], metric=metric, value=value, usual=median, score=score)
        )
    return max(spikes, key=lambda spike: spike.score, default=None)


def largest_spike(rows: Sequence[Mapping[str, Any]]) -> Spike | None:
    """Return the largest spike, or the first of the unusual steps just before the largest spike."""
    spikes, scores = _spikes(rows)
    index = max(range(len(rows)), key=scores.__getitem__, default=0)
    if not rows or scores[index] < SPREAD:
        return None
    return spikes[_first_of(scores, index)]


def spike_before_the_end(rows: Sequence[Mapping[str, Any]]) -> Spike | None:
    """Return the first of the consecutive unusual steps at the end of a run."""
    spikes, scores = _spikes(rows)
    first = _first_of(scores, len(rows))
    return spikes[first] if max(scores[first:], default=0.0) >= SPREAD else None


def _spikes(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Spike | None], list[float]]:
    spikes = [spike_at(rows, index) for index in range(len(rows))]
    return spikes, [-math.inf if spike is None else spike.score for spike in spikes]


def _first_of(scores: Sequence[float], index: int) -> int:
    """Return the first of the consecutive unusual steps just before `index`."""
    while index and scores[index - 1] >= LEADS:
        index -= 1
    return index


@dataclass(frozen=True, kw_only=True, slots=True)
class Blame:
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
    """Return the block, such as a layer, whose gradient has grown most relative to the preceding
    steps."""

    def growth(block: str) -> float:
        before = [squares[block] for squares in replay.before if block in squares]
        usual = statistics.median(before) if before else 1.0
        return replay.squares[block] / max(usual, 1e-300)

    return max(replay.squares, key=growth, default=None)


def outliers(norms: Sequence[float]) -> list[int]:
    """Return the indices of norms that are many times the median of the others, largest first."""
    norms = [math.inf if math.isnan(norm) else norm for norm in norms]
    indices = []
    for index, norm in enumerate(norms):
        others = [*norms[:index], *norms[index + 1 :]]
        usual = (
            min(others, default=math.inf)
            if norm == math.inf
            else RATIO * statistics.median(others or [math.inf])
        )
        if norm > usual:
            indices.append(index)
    return sorted(indices, key=norms.__getitem__, reverse=True)


def suspected(replay: Replay) -> ReplayedMicrobatch | None:
    if bad := replay.first_not_finite:
        return bad[0][0] if len(bad) < max(2, len(replay.microbatches)) else None
    parts = [each for each in replay.microbatches if each.norm is not None]
    if len(parts) == 1:
        return parts[0]
    indices = outliers([each.norm for each in parts if each.norm is not None])
    return parts[indices[0]] if indices else None


def learning_rate_jump(
    rows: Sequence[Mapping[str, Any]], step: int
) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """Return the latest two logged steps between which the learning rate becomes more than twice
    the rate that continues the schedule."""
    near = [row for row in rows if row["step"] <= step and row.get("lr")][-WINDOW:]
    for index in range(len(near) - 1, max(1, len(near) - 1 - JUMP_LEADS), -1):
        if near[index]["lr"] > 2 * _led_to(near[:index], near[index]["step"]):
            return near[index - 1], near[index]
    return None


def _led_to(rows: Sequence[Mapping[str, Any]], step: int) -> float:
    """Return the largest learning rate that would continue the schedule in `rows`."""
    before, rate = (float(row["lr"]) for row in rows[-2:])
    added = max((b["lr"] - a["lr"]) / max(1, b["step"] - a["step"]) for a, b in pairwise(rows))
    by_sum = rate + float(added) * int(step - rows[-1]["step"])
    return max(rate, by_sum, rate * rate / before)


def cause_of(
    replay: Replay,
    rows: Sequence[Mapping[str, Any]],
    *,
    by_sample: Replay | None = None,
    later: Replay | None = None,
) -> Blame:
    if (first := replay.first_unlike) is not None:
        text = f"from step {first.step} on, this machine computes other gradients than the run has"
        return _not_reproduced(replay, first.step, text, later)
    if replay.ended_the_run and replay.is_finite:
        text = "in the run, the loss or the gradient of this step is not finite, and here both are"
        return _not_reproduced(replay, replay.step, text, None)
    find_cause = _unusual if replay.is_finite else _not_finite
    return find_cause(replay, rows, by_sample)


def _unusual(replay: Replay, rows: Sequence[Mapping[str, Any]], by_sample: Replay | None) -> Blame:
    step, block, suspect = replay.step, unusual_block(replay), suspected(replay)
    if suspect is not None:
        names, share = _unusual_samples(suspect, by_sample)
        if names:
            seen = f"{share:.0%} of the squares of its samples' gradients, most of it in {block}"
            return _samples(step, suspect, names, block, seen)
        if len(replay.microbatches) > 1:
            seen = f"its gradient norm is {suspect.norm:.3g}, most of it in {block}"
            return _microbatch(step, suspect, block, seen)
    alike = "no microbatch has an unusual gradient"
    text = (
        f"{alike}: the whole batch is unusual, or the parameters before the step were bad already;"
        f" the gradient has grown most in {block}; look at the steps before"
    )
    return _whole_batch(step, rows, block, alike, text)


def _not_finite(
    replay: Replay, rows: Sequence[Mapping[str, Any]], by_sample: Replay | None
) -> Blame:
    step, bad, suspect = replay.step, replay.first_not_finite, suspected(replay)
    place = bad[0][1] if bad else None
    block = None if place is None else place.layer or None
    seen = first_words(place)
    if names := samples_not_finite(replay):
        return _samples(step, bad[0][0], names, block, seen, of=[each.name for each, _ in bad])
    if suspect is not None:
        names, _ = _unusual_samples(suspect, by_sample)
        if names:
            return _samples(step, suspect, names, block, seen)
        if len(replay.microbatches) > 1:
            return _microbatch(step, suspect, block, seen)
    text = (
        f"no microbatch is finite, {seen}; the whole batch is unusual, or the parameters before the"
        " step were bad already: look at the learning rate and the steps before"
    )
    return _whole_batch(step, rows, block, seen, text)


def samples_not_finite(replay: Replay) -> list[int | str]:
    """Return the samples in which a step's first values that are not finite occur. Return an empty
    list if the samples are finite, so that the computation is the cause."""
    bad = replay.first_not_finite
    samples: list[int | str] = []
    for each, place in bad:
        names = [] if place is None else list(place.samples)
        is_in_data = place is not None and place.stage == "batch"
        is_alike = suspected(replay) is None or len(names) == len(each.samples) > 1
        if not names or (is_alike and not is_in_data):
            return []
        samples += names
    return samples


def _unusual_samples(
    suspect: ReplayedMicrobatch, by_sample: Replay | None
) -> tuple[list[int | str], float]:
    """Return the samples of `suspect` with much larger gradients than the others, and their share
    of the squared gradient norm."""
    if len(suspect.samples) == 1:
        return list(suspect.samples), 1.0
    parts = () if by_sample is None else by_sample.microbatches
    squares = next((each.by_sample for each in parts if each.by_sample is not None), [])
    indices = outliers([math.sqrt(each) for each in squares])
    share = math.fsum(squares[index] for index in indices) / (math.fsum(squares) or 1.0)
    return [suspect.samples[index] for index in indices], share


def _samples(
    step: int,
    suspect: ReplayedMicrobatch,
    names: Sequence[int | str],
    block: str | None,
    seen: str,
    of: Sequence[str] = (),
) -> Blame:
    where = _words(of or [suspect.name])
    text = f"{listed('sample', names)} of {where}: {seen}"
    if isinstance(names[0], int):
        without = f"lockstep replay --step {step} --without-sample {names[0]}"
        text += f"; look at the data, or make the step without: {without}"
    return Blame(
        step=step,
        cause="sample",
        microbatch=suspect.microbatch,
        samples=names,
        block=block,
        text=text,
    )


def _microbatch(step: int, suspect: ReplayedMicrobatch, block: str | None, seen: str) -> Blame:
    return Blame(
        step=step,
        cause="microbatch",
        microbatch=suspect.microbatch,
        samples=suspect.samples,
        block=block,
        text=f"{suspect.name} (samples {_words(suspect.samples)}): {seen}",
    )


def _whole_batch(
    step: int, rows: Sequence[Mapping[str, Any]], block: str | None, seen: str, text: str
) -> Blame:
    if (jump := learning_rate_jump(rows, step)) is None:
        return Blame(step=step, cause="all alike", block=block, text=text)
    before, after = ("{lr:.3g} in step {step}".format(**row) for row in jump)
    text = f"the learning rate: {before}, {after}; {seen}"
    return Blame(step=step, cause="learning rate", block=block, text=text)


def _words(samples: Sequence[int | str]) -> str:
    return ", ".join(map(str, samples))


def _not_reproduced(replay: Replay, first: int, text: str, later: Replay | None) -> Blame:
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
