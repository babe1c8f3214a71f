"""Makes the HTML page of a verification: the verdicts, and charts of the divergence from the
reference."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from lockstep.evidence.tolerance import TOLERANCE
from lockstep.pages.chart import Chart, Curve, Series, render_charts
from lockstep.pages.document import document
from lockstep.pages.markup import (
    Column,
    Content,
    Html,
    element,
    graded,
    joined,
    paragraph,
    remark,
    table,
)
from lockstep.verify.verdict import COLUMNS, Report, Verdict

KINDS = ("gradients", "parameters", "loss")
_MOST_POINTS = 400


def verify_page(report: Report) -> str:
    title = f"lockstep verify {report.script}"
    last = max(1, report.steps - 1)
    charts = [chart for verdict in report.verdicts for chart in divergence_charts(report, verdict)]
    figures = render_charts(charts, last_step=last, columns=_MOST_POINTS)
    drawn = iter([each.html for each in figures])
    return document(
        "lockstep verify",
        title,
        table(
            [Column(name, number=name == "processes") for name in COLUMNS],
            map(_row, report.verdicts),
        ),
        _microbatch_size(report),
        map(remark, report.notes),
        (
            _plan(verdict, [next(drawn) for _ in KINDS] if verdict.comparisons else None)
            for verdict in report.verdicts
        ),
        element("h2", "How to read it"),
        paragraph(
            "A curve is the distance from the run on one process, all tensors pooled, relative to "
            "their size. The lower edge is zero: the same bits. The band is the distance between "
            "runs on one process that differ by noise of one unit in the last place: it is what "
            "rounding alone does to this model. A curve in, near or below the band is right. A "
            f"plan fails if some tensor is more than {TOLERANCE:g} × rounding away; a plan "
            "with numerics=bitwise fails if any bit differs."
        ),
        header=[
            element("h1", report.script),
            paragraph(f"{report.steps} steps: ", graded(f"{report.summary()}", report.passed), "."),
        ],
        data={"last": last, "charts": [each.data for each in figures]},
    )


def _row(verdict: Verdict) -> Sequence[Content]:
    plan, processes, outcome, *rest = verdict.row()
    return [plan, processes, graded(outcome, verdict.passed), *rest]


def _microbatch_size(report: Report) -> Html:
    mismatch = report.microbatch_size_mismatch
    if mismatch is not None:
        text = f"The same batch with another microbatch size: {mismatch.text()}"
        return joined(paragraph(text, kind="bad"), paragraph(mismatch.why()))
    if report.microbatch_size_checked:
        return paragraph("The same batch has the same gradient with another microbatch size.")
    return Html()


def _plan(verdict: Verdict, charts: Sequence[Html] | None) -> Html:
    parts: list[Content] = [element("h2", verdict.plan)]
    if not verdict.ran:
        text = f"The run failed (exit status {verdict.exit_status})."
        parts += [paragraph(text, kind="bad"), element("pre", verdict.error)]
    if verdict.mismatch is not None:
        parts.append(paragraph(verdict.mismatch.text(), kind="bad"))
        parts.append(paragraph(verdict.mismatch.why()))
    parts += [paragraph(each.text()) for each in verdict.compression]
    parts += map(remark, verdict.notes)
    parts.append(element("div", charts, kind="grid small") if charts else None)
    return joined(parts)


def divergence_charts(report: Report, verdict: Verdict) -> list[Chart]:
    charts = []
    for kind in KINDS if verdict.comparisons else ():
        values = verdict.comparisons[0].divergence[kind]
        colour: int | str = 0 if verdict.passed else "bad"
        curves = [Curve("this plan", colour, _series(values))]
        if spread := report.rounding_spread.get(kind):
            low, high = (_series([pair[side] for pair in spread]) for side in (0, 1))
            curves.insert(0, Curve("rounding", "line-5", low, "band", upper=high))
        title = f"{kind}: distance from one process"
        charts.append(Chart(title=title, lines=curves, logarithmic=True))
    return charts


def _series(values: Sequence[float]) -> Series:
    return Series(array("q", range(len(values))), array("d", values))
