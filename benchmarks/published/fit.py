"""Fits the few numbers of `fitted.toml` to published steps: the most likely ones, given a prior for
each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields

import numpy as np
from scipy.optimize import minimize

from lockstep.planner.machines.costs import Fitted
from published.rows import Row
from published.step import predict

PRIOR: Mapping[str, tuple[float, float]] = {
    "matmul.Ampere": (0.95, 0.05),
    "matmul.Hopper": (0.88, 0.05),
    "matmul.Blackwell": (0.80, 0.05),
    "attention": (1.0, 0.1),
    "backward_attention": (0.75, 0.1),
    "memory": (0.88, 0.1),
    "inner": (150.0, 0.3),
    "waves": (0.4, 0.3),
    "misaligned": (0.35, 0.2),
    "misaligned_batch": (0.15, 0.3),
    "short_lines": (0.05, 0.4),
    "eager": (1.5, 0.3),
    "contention": (0.15, 0.3),
    "tensor_overlap": (0.6, 0.15),
    "jitter": (0.003, 0.4),
}
"""The median of each number before the fit, and the standard deviation of its logarithm.

`misaligned` is from a published comparison: a vocabulary of 50,304 instead of 50,257 makes
nanoGPT's step about 25% faster on an A100 (Karpathy, 3 February 2023); of the rows, nanoGPT's alone
have such products. `misaligned_batch` is for heads of 108 and 150, as 25 rows of BLOOM have.
"""
NOISE = 0.08
"""Standard deviation of the logarithm of a published step over a predicted one, and where outliers
begin."""
MOST_STEPS, SMALL, MOST_SHIFT, LEAST_GAIN = 12, 1e-3, 2.5, 1e-3
"""Steps of Gauss and Newton; the difference for slopes and the bounds, in deviations of the prior;
and when to end."""
OTHER = 0.9
"""`matmul` of generations without rows to fit."""


def fitted_of(values: Sequence[float]) -> Fitted:
    """Return the numbers as the cost model takes them, from those in PRIOR's order."""
    named = dict(zip(PRIOR, values, strict=True))
    matmul = {key.partition(".")[2]: value for key, value in named.items() if "." in key}
    return Fitted(
        matmul={**matmul, "other": OTHER},
        **{key: value for key, value in named.items() if "." not in key},
    )


def prior() -> Fitted:
    """Return the numbers before any fit."""
    return fitted_of([median for median, _ in PRIOR.values()])


def fit(rows: Sequence[Row], start: Fitted | None = None) -> Fitted:
    """Return the numbers that fit the rows, sought from `start`. A source of n rows counts as
    sqrt(n) independent ones.

    The rows of a source share its machines and its software, so that most of their errors are
    shared as well.
    """
    timed = [row for row in rows if row.seconds]
    counts = {
        row.repository: sum(other.repository == row.repository for other in timed) for row in timed
    }
    weights = np.array([1 / math.sqrt(counts[row.repository]) for row in timed])
    measured = np.log([row.seconds for row in timed])
    medians = np.log([median for median, _ in PRIOR.values()])
    widths = np.array([width for _, width in PRIOR.values()])

    def errors(shift: np.ndarray) -> np.ndarray:
        fitted = fitted_of(np.exp(medians + shift * widths))
        return (np.log([predict(row, fitted).seconds for row in timed]) - measured) / NOISE

    def loss(error: np.ndarray, shift: np.ndarray) -> float:
        return float(np.sum(weights * (np.sqrt(1 + error**2) - 1)) + 0.5 * np.sum(shift**2))

    shift = np.zeros(len(PRIOR)) if start is None else (np.log(_values(start)) - medians) / widths
    error = errors(shift)
    for _ in range(MOST_STEPS):
        slopes = np.stack(
            [(errors(shift + each) - error) / SMALL for each in SMALL * np.eye(len(PRIOR))], axis=1
        )
        trust = weights / np.sqrt(1 + error**2)
        step = np.linalg.solve(
            slopes.T @ (trust[:, None] * slopes) + np.eye(len(PRIOR)),
            -slopes.T @ (trust * error) - shift,
        )
        for part in (1.0, 0.5, 0.2):
            tried = np.clip(shift + part * step, -MOST_SHIFT, MOST_SHIFT)
            found = errors(tried)
            if loss(found, tried) < loss(error, shift) - LEAST_GAIN:
                shift, error = tried, found
                break
        else:
            break
    return fitted_of(np.exp(medians + shift * widths))


def _values(fitted: Fitted) -> list[float]:
    return [
        fitted.matmul[key.partition(".")[2]] if "." in key else getattr(fitted, key)
        for key in PRIOR
    ]


def fit_link(times: Sequence[tuple[int, int, float]], bytes_per_second: float) -> dict[str, float]:
    """Return a link's numbers from times of all-reduces inside a node: (ranks, bytes, seconds)
    each."""
    ranks, sizes, seconds = (np.array(column, dtype=float) for column in zip(*times, strict=True))

    def loss(logs: np.ndarray) -> float:
        latency, hop, fraction, few = np.exp(logs)
        moving = 2 * sizes * (ranks - 1) / ranks / (bytes_per_second * fraction) * (1 + few / ranks)
        return float(np.mean(np.abs(np.log((latency + hop * (ranks - 2) + moving) / seconds))))

    found = minimize(
        loss,
        np.log([40e-6, 7e-6, 0.8, 0.5]),
        method="Nelder-Mead",
        options={"maxiter": 4000, "maxfev": 4000},
    )
    names = ("latency_seconds", "hop_seconds", "fraction", "few_ranks")
    return dict(zip(names, np.exp(found.x).tolist(), strict=True)) | {"error": float(found.fun)}


def toml_of(fitted: Fitted, table: str) -> str:
    """Return the numbers as a table of TOML."""
    plain = {key: value for key, value in asdict(fitted).items() if key != "matmul"}
    lines = [
        f"[{table}]",
        *(f"{key} = {value:.4g}" for key, value in plain.items()),
        "",
        f"[{table}.matmul]",
    ]
    return (
        "\n".join([*lines, *(f"{key} = {value:.4g}" for key, value in fitted.matmul.items())])
        + "\n"
    )


def from_table(table: Mapping[str, object]) -> Fitted:
    """Return the numbers of a table that `toml_of` wrote."""
    return Fitted(**{each.name: table[each.name] for each in fields(Fitted)})  # type: ignore[arg-type]
