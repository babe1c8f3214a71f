"""What `lockstep plan` says of its predictions."""

from __future__ import annotations

import json
from dataclasses import replace

from lockstep.planner.forecast import (
    HEAD,
    SIDE_BY_SIDE,
    Forecast,
    limit_in_words,
    side_by_side,
    struck,
    time_in_words,
)
from lockstep.planner.machines.costs import Interval
from lockstep.planner.machines.hardware import parse_target
from lockstep.planner.page import plan_page
from lockstep.planner.prediction import Outcome, Prediction, Skewed
from lockstep.planner.trace import Peak

MEMORY = Peak(
    rank=3,
    bytes=30_000_000_000,
    by_cause={"activations": 20_000_000_000, "optimizer": 10_000_000_000},
    moment="the <b>",
)
FAST = Prediction(
    plan="shard=8", microbatch=1, microbatches=2, seconds=0.5, by_limit={"matmul": 0.3,
    "shard": 0.2},
    seconds_with_twice={"arithmetic": 0.4, "memory": 0.5, "network": 0.4}, samples=64,
    tokens=1000.0, steps=100,
    memory=[MEMORY], capacity_bytes=80_000_000_000, overhead_bytes=10**9,
)  # fmt: skip
SLOW = replace(FAST, plan="tensor=8", seconds=2.0, by_limit={"tensor": 2.0})
INTERVAL = Interval(0.9, 1.2)


def forecast(
    *outcomes: Outcome, tokens: float | None = None, price: float | None = None
) -> Forecast:
    return forecast_on("8 x H100", *outcomes, tokens=tokens, price=price)


def forecast_on(
    target: str, *outcomes: Outcome, tokens: float | None = None, price: float | None = None
) -> Forecast:
    return Forecast(
        script="train.py",
        cluster=parse_target(target),
        outcomes=outcomes,
        interval=INTERVAL,
        tokens=tokens,
        price_per_hour=price,
    )


BOTH = (
    Outcome(plan="tensor=8", prediction=SLOW),
    Outcome(plan="shard=8", prediction=FAST),
    Outcome(plan="pipeline=8", reason="RecipeError: <no stages>", is_refused=True),
)


def test_the_fastest_is_first_with_its_interval_and_its_limit() -> None:
    first, second = forecast(*BOTH).rows(5)
    assert first == (
        "shard=8",
        "500 ms",
        "450 ms to 600 ms",
        "128",
        "33.7 GB",
        "arithmetic",
        "1.25 times as fast",
    )
    assert (second[0], second[5]) == ("tensor=8", "network (tensor)")
    assert len(HEAD) == len(first)


def test_a_plan_that_cannot_be_run_is_not_counted_with_those_that_do_not_fit() -> None:
    tight = Outcome(
        plan="replicate=8", prediction=replace(FAST, plan="replicate=8"), reason="needs 90 GB"
    )
    assert forecast(*BOTH).title == "train.py on 8 x H100: 2 of 2 plans fit, and 1 cannot be run"
    assert forecast(*BOTH[:2], tight).title == "train.py on 8 x H100: 2 of 3 plans fit"


def test_the_lines_say_what_the_time_and_the_memory_go_to_and_what_is_struck_out() -> None:
    said = "\n".join(forecast(*BOTH).lines(5))
    assert "arithmetic 60%, network (shard) 40%" in said
    assert "memory of rank 3, at its peak in the <b>: activations 20 GB, optimizer 10 GB" in said
    assert "twice the arithmetic: 1.25 times as fast; twice the memory: 1.00 times as fast" in said
    assert "not pipeline=8: RecipeError: <no stages>" in said


def test_days_and_cost_follow_from_tokens_and_price() -> None:
    found = forecast(*BOTH, tokens=1e9, price=2.0).budget(FAST)
    assert found is not None
    hours = 0.5 * 1e6 * 8 / 3600 / found.goodput
    assert abs(found.device_hours - hours) < 1e-6 * hours
    assert found.cost is not None
    assert abs(found.cost - 2 * hours) < 1e-6 * hours


def test_devices_that_fail_before_all_have_started_again_never_end() -> None:
    only = Outcome(plan="replicate=1000000", prediction=replace(FAST, plan="replicate=1000000"))
    found = forecast_on("1000000 x H100", only, tokens=1e9, price=2.0)
    assert "1e+09 tokens: never; of 1,000,000 devices one fails before" in "\n".join(found.lines(5))
    (told,) = json.loads(json.dumps(found.as_json(), allow_nan=False))["plans"]
    assert told["budget"] == {
        **dict.fromkeys(
            ("days", "device_hours", "cost", "days_low", "days_high", "cost_low", "cost_high")
        ),
        "goodput": 0,
    }


def test_tokens_without_a_weight_are_said_to_be_unknown() -> None:
    without = replace(FAST, tokens=None)
    said = list(forecast(Outcome(plan="shard=8", prediction=without), tokens=1e9).lines(5))
    assert any("no Recipe.weight" in line for line in said)


def test_if_nothing_fits_the_closest_is_named() -> None:
    tight = replace(FAST, capacity_bytes=10**9)
    shown = forecast(Outcome(plan="shard=8", prediction=tight, reason="needs 33.7 GB of 1.0 GB"))
    assert shown.fitting == []
    assert next(iter(shown.lines(5))).startswith(
        "no plan fits; shard=8 comes closest: it needs 33.7 GB of 1.0 GB"
    )


def test_the_json_holds_every_plan() -> None:
    told = json.loads(json.dumps(forecast(*BOTH).as_json(), allow_nan=False))
    assert [each["plan"] for each in told["plans"]] == ["shard=8", "tensor=8", "pipeline=8"]
    assert told["plans"][0]["seconds_high"] == 0.6
    assert told["plans"][2] == {
        "plan": "pipeline=8",
        "fits": False,
        "reason": "RecipeError: <no stages>",
    }


def test_the_page_escapes_what_scripts_and_errors_say() -> None:
    html = plan_page([forecast(*BOTH)])
    assert "&lt;no stages&gt;" in html
    assert "<no stages>" not in html
    assert "the <b>" not in html


def test_one_mistake_is_told_once_not_once_a_plan() -> None:
    mistakes = [
        Outcome(plan=f"shard={size}", reason="RecipeError: no such layer", is_refused=True)
        for size in (2, 4, 8)
    ]
    other = Outcome(plan="pipeline=8", reason="RecipeError: <no stages>", is_refused=True)
    assert list(struck([*mistakes, other])) == [
        "shard=2, shard=4 and 1 more: RecipeError: no such layer",
        "pipeline=8: RecipeError: <no stages>",
    ]
    said = [
        line for line in forecast(BOTH[0], *mistakes, other).lines(5) if line.startswith("not ")
    ]
    assert said == [
        "not pipeline=8: RecipeError: <no stages>",
        "not shard=2, shard=4 and 1 more: RecipeError: no such layer",
    ]


def test_days_and_cost_have_the_steps_interval() -> None:
    shown = forecast(*BOTH, tokens=1e9, price=2.0)
    found = shown.budget(FAST)
    assert found is not None
    assert found.cost is not None
    (said,) = [line for line in shown.lines(5) if line.startswith("1e+09 tokens: ")]
    assert (
        f"{found.days:.3g} days ({found.days * 0.9:.3g} days to {found.days * 1.2:.3g} days)"
        in said
    )
    assert f"costs {found.cost:,.0f} ({found.cost * 0.9:,.0f} to {found.cost * 1.2:,.0f})" in said
    told = shown.as_json()["plans"][0]["budget"]
    assert (told["days_low"], told["cost_high"]) == (found.days * 0.9, found.cost * 1.2)


def test_several_targets_are_side_by_side() -> None:
    more = replace(forecast(*BOTH, tokens=1e9, price=1.0), cluster=parse_target("8 x MI300X"))
    none = forecast(
        Outcome(
            plan="shard=8",
            prediction=replace(FAST, capacity_bytes=10**9),
            reason="needs 33.7 GB of 1.0 GB",
        )
    )
    first, second = side_by_side([more, none])
    assert first[:3] == ("8 x MI300X", "shard=8", "500 ms")
    assert second == ("8 x H100", "no plan fits", *[""] * 7)
    assert len(first) == len(second) == len(SIDE_BY_SIDE)
    html = plan_page([more, none])
    assert html.count("8 x MI300X") >= 3
    assert "the best plan of each" in html


def test_remarks_are_on_the_page_and_in_the_json() -> None:
    shown = replace(forecast(*BOTH), remarks=["interrupted <early>"])
    assert "<p>interrupted &lt;early&gt;</p>" in plan_page([shown])
    assert shown.as_json()["remarks"] == ["interrupted <early>"]


def test_quantities_in_words() -> None:
    assert [time_in_words(each) for each in (0.0001234, 0.0812, 1.25, 125.0, 2143.2)] == [
        *("0.123 ms", "81.2 ms", "1.25 s", "125 s", "2,143 s")
    ]
    assert [limit_in_words(each) for each in ("matmul", "bubble", "shard")] == [
        "arithmetic",
        "pipeline bubbles",
        "network (shard)",
    ]


def test_the_rate_that_loaders_must_deliver_counts_samples_as_often_as_they_are_loaded() -> None:
    shown = forecast(*BOTH)
    assert shown.loader_rate(FAST) == 128, "each of 8 data ranks loads its own"
    assert shown.loader_rate(SLOW) == 8 * 32, "each of 8 ranks loads all"
    assert any(
        "the loader must deliver 128 samples/s on each machine (16 in each of its processes)"
        in line
        for line in shown.lines(5)
    )
    assert shown.as_json()["plans"][0]["loader_samples_per_second_per_node"] == 128
    assert "the loader must deliver 128 samples/s" in plan_page([shown])


def test_the_rate_is_that_of_a_machine() -> None:
    wide = replace(FAST, plan="shard=64")
    shown = forecast_on("64 x H100", Outcome(plan="shard=64", prediction=wide))
    assert shown.loader_rate(wide) == 16


def test_a_plan_that_divides_experts_has_a_figure_for_a_skewed_router() -> None:
    skewed = Skewed(seconds=0.7, peak_bytes=80_000_000_000)
    experts = replace(FAST, plan="expert=8", skewed=skewed)
    lines = list(forecast(*BOTH, Outcome(plan="expert=8", prediction=experts)).lines(5))
    assert [line for line in lines if "rows" in line] == [
        "expert=8, if one rank's experts get 2 times the mean number of rows: a step of 700 ms"
        " instead of 500 ms, and 88 GB of memory there, more than a device has:"
        " it fits only with balanced routing"
    ]
