"""Holds the planner's cost model against published training steps: time, memory, sweeps of layouts,
all-reduces.

    python benchmarks/planner.py [--json FILE] [--plot FILE.svg] [--rows SOURCE]
        [--data FILE] [--fit]

Rows are those of `planner_data/published.csv`: dense models in bf16 or fp16 whose fields are
complete. Each source's steps are predicted with numbers fitted to the other sources
(`planner_data/held_out.toml`); sources are repositories. `--fit` fits all of them again, and
`planner/machines/fitted.toml` to all sources: about half a minute, with scipy.

Held out is what was fitted. The rules of the model, its estimates (`published/software.py`,
`published/memory.py`) and the priors (`published/fit.py`) were written by someone who saw all of
these rows.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from published import chart
from published.evaluation import (
    Pair,
    all_reduces,
    bias,
    by_source,
    collectives,
    constant_efficiency,
    coverage,
    interval,
    mean_error,
    memories,
    out_of_memory,
    summary,
    sweeps,
    times,
)
from published.reading import load
from published.rows import DATA, Row
from published.software import is_known
from published.step import predict
from published.unstated import with_schedule
from rich.console import Console
from rich.table import Table

import lockstep.planner
from lockstep.planner.machines.costs import FITTED, Fitted

HELD_OUT = DATA / "held_out.toml"
FITTED_FILE = Path(lockstep.planner.__file__).parent / "machines" / "fitted.toml"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="a chart of predicted against measured, as SVG"
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        default=DATA / "published.csv",
        help="other rows with the same columns",
    )
    parser.add_argument(
        "--rows",
        metavar="SOURCE",
        help="also print each row of the sources whose name contains this",
    )
    parser.add_argument(
        "--fit", action="store_true", help="fit again, and write the fitted numbers"
    )
    options = parser.parse_args()
    given, others = load(options.data)
    rows = [with_schedule(row) for row in given]
    console = Console()
    if options.fit:
        refit(rows)
        console.print(
            "Done: a run without --fit uses the new numbers. NVLink3, for its file:", link()
        )
        return
    inside, outside = times(rows, lambda _: FITTED), times(rows, held_out())
    print_assumed(console, given)
    report = print_all(console, rows, others, inside, outside)
    if options.rows:
        print_rows(
            console, [pair for pair in outside if options.rows in pair.row.source], held_out()
        )
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        options.plot.write_text(chart.svg(outside), encoding="utf-8")


def held_out() -> Callable[[str], Fitted]:
    """Return the numbers for a source, fitted to the others; for a source that no fit saw, those
    fitted to all."""
    from published.fit import from_table

    tables = tomllib.loads(HELD_OUT.read_text(encoding="utf-8"))
    fits = {source: from_table(table) for source, table in tables.items()}
    return lambda source: fits.get(source, FITTED)


def refit(rows: Sequence[Row]) -> None:
    """Fit without each source and with all of them, and write both files. The next run uses
    them."""
    from published.fit import fit, toml_of

    sources = sorted({row.repository for row in rows if row.seconds})
    best = fit(rows)
    fits = {
        source: fit([row for row in rows if row.repository != source], best) for source in sources
    }
    head = (
        "# Numbers fitted to the sources without the one in the name, by benchmarks/planner.py"
        f" --fit, {date.today()}.\n\n"
    )
    HELD_OUT.write_text(
        head + "\n".join(toml_of(each, f'"{source}"') for source, each in fits.items()),
        encoding="utf-8",
    )
    inside, outside = times(rows, lambda _: best), times(rows, fits.__getitem__)
    FITTED_FILE.write_text(
        provenance(inside, outside, sources) + toml_of(best, "fitted") + intervals(rows, outside),
        encoding="utf-8",
    )


def link() -> dict[str, float]:
    """Return NVLink3's numbers, from the all-reduces inside a node of A100."""
    from published.fit import fit_link

    times_inside = [
        (each.ranks, each.size, each.seconds)
        for each in all_reduces()
        if each.gpu == "A100" and each.nodes == 1
    ]
    return fit_link(times_inside, 300e9)


def provenance(inside: Sequence[Pair], outside: Sequence[Pair], sources: Sequence[str]) -> str:
    """Return the comment at the head of the fitted numbers."""
    return (
        f"# Fitted to {len(inside)} published steps by benchmarks/planner.py --fit, {date.today()}:"
        " the most likely values, given the\n# priors in benchmarks/published/fit.py. Mean"
        f" absolute error of the step time {100 * mean_error(inside):.1f}%; of a source\n# that the"
        f" fit did not see {100 * mean_error(outside):.1f}% over all rows. Sources, at the commits"
        " in\n# benchmarks/planner_data/published.csv:\n"
        + "".join(f"#   {each}\n" for each in sources)
        + "\n"
    )


def intervals(rows: Sequence[Row], outside: Sequence[Pair]) -> str:
    """Return the tables of the intervals."""
    text = (
        "\n"
        "# Measured over predicted: so wide that 80% of a source's rows are inside of one made"
        " without this source.\n"
    )
    text += (
        "# Nothing of the memory model was fitted by a program, and its rules were written in sight"
        " of the rows.\n"
    )
    for kind, pairs in (("seconds", outside), ("memory", memories(rows))):
        low, high = interval(pairs)
        text += f"[interval.{kind}]\nlow = {low:.3f}\nhigh = {high:.3f}\n\n"
    return text.rstrip("\n") + "\n"


def print_assumed(console: Console, rows: Sequence[Row]) -> None:
    """Print of which rows something was assumed that they do not state."""
    for text, found in (
        (
            "state no microbatch: the fastest that fits is taken, with the fastest interleaving",
            [row for row in rows if not row.microbatch],
        ),
        (
            "name no software that is known here: it is taken by the layout",
            [row for row in rows if not is_known(row)],
        ),
    ):
        if found:
            console.print(
                f"{len(found)} rows {text}"
                f" ({', '.join(sorted({row.repository for row in found}))}).",
                highlight=False,
            )


def print_all(
    console: Console,
    rows: Sequence[Row],
    others: dict[str, int],
    inside: Sequence[Pair],
    outside: Sequence[Pair],
) -> dict[str, Any]:
    """Print every table, and return their figures."""
    base, memory = constant_efficiency(rows, outside), memories(rows)
    own = constant_efficiency(rows, outside, held_out=False)
    console.print(
        f"{len(rows)} rows used; not used: "
        + "; ".join(f"{count} {reason}" for reason, count in others.items())
        + "."
    )
    console.print(time_table(inside, outside, base))
    console.print(f"One MFU a device that saw all rows: {percent(mean_error(own))}.")
    console.print(memory_table(memory))
    failed = out_of_memory(rows)
    console.print(
        f"Out of memory: {sum(said for *_, said in failed)} of {len(failed)} rows that ran out are"
        " said to."
    )
    low, high = interval(outside)
    held = coverage(outside, 1.0)
    console.print(
        f"80% of the steps of a source took {low:.2f} to {high:.2f} times as long as predicted"
        f" without it; the quantiles of the other sources, not widened, hold {percent(held[0])} of"
        f" its rows ({percent(held[1])} as the mean of the sources)."
    )
    found = sweeps(outside)
    console.print(sweep_table(found))
    reduced = collectives()
    table = Table("all-reduces", "sizes", "error", title="Collectives")
    for where, (count, error) in reduced.items():
        table.add_row(where, str(count), percent(error))
    console.print(table)
    return {
        "fitted": summary(inside),
        "held_out": summary(outside),
        "constant_efficiency": summary(base),
        "memory": summary(memory),
        "constant_efficiency_fitted": summary(own),
        "sources": {each: summary(pairs) for each, pairs in by_source(outside).items()},
        "memory_sources": {each: summary(pairs) for each, pairs in by_source(memory).items()},
        "out_of_memory": {"rows": len(failed), "said": sum(said for *_, said in failed)},
        "sweeps": [
            {"name": each.name, "layouts": each.layouts, "loss": each.loss, "order": each.order}
            for each in found
        ],
        "collectives": {
            where: {"sizes": count, "error": error} for where, (count, error) in reduced.items()
        },
        "excluded": others,
        "interval": dict(zip(("low", "high"), interval(outside), strict=True)),
    }


def time_table(inside: Sequence[Pair], outside: Sequence[Pair], base: Sequence[Pair]) -> Table:
    """Return the errors of step times by source."""
    table = Table(
        "source",
        "rows",
        "fitted",
        "held out",
        "bias",
        "one MFU a device",
        title="Step time: mean absolute error",
    )
    fitted, constant = by_source(inside), by_source(base)
    for source, pairs in sorted(by_source(outside).items(), key=lambda item: -len(item[1])):
        errors = (
            mean_error(fitted[source]),
            mean_error(pairs),
            bias(pairs),
            mean_error(constant[source]),
        )
        table.add_row(source, str(len(pairs)), *map(percent, errors))
    table.add_section()
    table.add_row(
        "all rows",
        str(len(outside)),
        *map(percent, (mean_error(inside), mean_error(outside), bias(outside), mean_error(base))),
    )
    middle = [summary(each)["median_source"] for each in (inside, outside, base)]
    table.add_row(
        "median source", "", percent(middle[0]), percent(middle[1]), "", percent(middle[2])
    )
    return table


def memory_table(pairs: Sequence[Pair]) -> Table:
    """Return the errors of peak memory by source."""
    table = Table("source", "rows", "error", "bias", title="Peak memory: mean absolute error")
    for source, each in by_source(pairs).items():
        table.add_row(source, str(len(each)), percent(mean_error(each)), percent(bias(each)))
    table.add_row("all rows", str(len(pairs)), percent(mean_error(pairs)), percent(bias(pairs)))
    return table


def sweep_table(found: Sequence[Any]) -> Table:
    """Return how much slower each sweep's predicted best layout is than its real one."""
    table = Table(
        "sweep", "layouts", "chosen is slower by", "pairs in order", title="Sweeps, held out"
    )
    for each in sorted(found, key=lambda sweep: -sweep.loss):
        table.add_row(each.name, str(each.layouts), percent(each.loss), percent(each.order))
    return table


def print_rows(console: Console, pairs: Sequence[Pair], fitted: Callable[[str], Fitted]) -> None:
    """Print rows with the parts of their predicted time, as fractions of the measured one."""
    for pair in pairs:
        row, parts = pair.row, predict(pair.row, fitted(pair.row.repository))
        shares = " ".join(
            f"{name} {getattr(parts, name) / pair.measured:.2f}" for name in parts.__slots__
        )
        layout = (
            f"tp{row.tp} pp{row.pp} cp{row.cp} dp{row.replicas} fsdp{row.shards} micro"
            f" {row.microbatch}"
        )
        console.print(
            f"{percent(pair.error)} {row.model} {row.gpu} {row.world} {layout} {row.checkpointing}:"
            f" {shares}",
            highlight=False,
        )


def percent(fraction: float) -> str:
    """Return a fraction as text."""
    return f"{100 * fraction:.1f}%"


if __name__ == "__main__":
    main()
