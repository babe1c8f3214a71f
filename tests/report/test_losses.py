"""Losses of workers: which there were, how long each took, and how the page shows them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from report.run_directories import event, ranks, run_json, write
from report.test_page import made, words

from lockstep.report.losses import MAX_LOSSES, WorkerLoss, loss_summary, losses_of
from lockstep.report.reader import read_runs
from lockstep.report.tables import key_figures, report_json, report_lines

KILLED = "rank 1 was killed by SIGKILL"


def recovered(
    seen: float, step: int, *, repeated: Any = 0, state: str = "replica"
) -> list[dict[str, Any]]:
    """The events of a recovery in place that took 0.1 s of waiting and 0.4 s until the run was
    open."""
    figures = {"wait_seconds": 0.1, "open_seconds": 0.4, "repeated_steps": repeated}
    return [
        event(seen + 0.2, "run-started", 0),
        event(seen + 0.5, "recovered", step, reason=KILLED, state=state, **figures),
    ]


def restarted(at: float, step: int, **more: Any) -> list[dict[str, Any]]:
    events = [
        event(at, "run-started", 0),
        event(at, "restarted", 0, reason=KILLED, restarts=1, **more),
    ]
    return [*events, *([event(at + 1, "resumed", step, checkpoint=f"step-{step}")] if step else [])]


def failed(at: float, step: int) -> dict[str, Any]:
    return event(at, "run-failed", step, error="a peer was lost")


def found(
    folder: Path, *events: dict[str, Any], rows: dict[float, int] | None = None
) -> list[WorkerLoss]:
    """The losses of a run; `rows`: seconds since it began, and the steps of the line of
    metrics.jsonl written then."""
    run_json(folder)
    write(folder, "events.jsonl", [event(0, "run-started", 0), *events])
    write(
        folder,
        "metrics.jsonl",
        [event(at, "", step, loss=1.0) | {"event": None} for at, step in (rows or {}).items()],
    )
    (run,) = read_runs([str(folder)])
    return losses_of(run)


def took(loss: WorkerLoss) -> list[float | None]:
    return [
        None if each is None else round(each, 3)
        for each in (loss.wait_seconds, loss.open_seconds, loss.repeated_seconds)
    ]


def test_a_replica_needs_no_step_again(tmp_path: Path) -> None:
    (loss,) = found(tmp_path / "a", *recovered(10, 20))
    assert (loss.in_place, loss.state, loss.step, loss.repeated_steps, took(loss)) == (
        True,
        "replica",
        20,
        0,
        [0.1, 0.4, 0.0],
    )
    assert loss.time == pytest.approx(1_790_000_010.0)


def test_steps_after_an_image_take_their_share_of_the_time_until_the_next_record(
    tmp_path: Path,
) -> None:
    (loss,) = found(
        tmp_path / "a", *recovered(10, 20, repeated=5, state="image"), rows={9: 20, 12.5: 40}
    )
    assert (loss.repeated_steps, took(loss)) == (5, [0.1, 0.4, 0.5])


def test_steps_that_were_cut_short_by_the_next_loss_took_until_then(tmp_path: Path) -> None:
    events = [
        *recovered(10, 20, repeated=5),
        event(11, "checkpoint-saved", 22),
        *recovered(12, 20, repeated=2),
    ]
    first, second = found(tmp_path / "a", *events, rows={13.5: 24})
    assert (took(first), took(second)) == ([0.1, 0.4, 0.5], [0.1, 0.4, 0.5])


def test_what_the_run_has_not_done_again_so_far_is_not_known(tmp_path: Path) -> None:
    (loss,) = found(tmp_path / "a", *recovered(10, 20, repeated=5), rows={11: 22})
    assert (took(loss), loss.is_known) == ([0.1, 0.4, None], False)


def test_a_restart_is_counted_from_the_failure_of_those_that_were_left(tmp_path: Path) -> None:
    events = [failed(10, 30), *restarted(15, 20, not_in_place="there is one process")]
    (loss,) = found(tmp_path / "a", *events, rows={9: 20, 20: 40})
    assert (loss.in_place, loss.not_in_place, loss.state, loss.repeated_steps) == (
        False,
        "there is one process",
        "step-20",
        10,
    )
    assert took(loss) == [5.0, 1.0, 2.0]
    (loss,) = found(tmp_path / "a", failed(10, 30), *restarted(15, 0), rows={21: 60})
    assert (loss.state, loss.repeated_steps, took(loss)) == ("", 30, [5.0, 0.0, 3.0])


def test_the_loss_of_rank_0_which_writes_the_events_is_dated_by_the_steps(tmp_path: Path) -> None:
    (loss,) = found(tmp_path / "a", *restarted(15, 30), rows={5: 10, 8: 20})
    assert (loss.repeated_steps, took(loss)) == (0, [4.0, 1.0, 0.0])
    (loss,) = found(
        tmp_path / "a",
        event(9, "checkpoint-saved", 20, checkpoint="step-20"),
        *restarted(15, 20),
        rows={8: 20},
    )
    assert (loss.repeated_steps, took(loss)) == (None, [None, 1.0, None])


def test_a_machine_that_joins_and_a_plan_that_is_changed_are_no_losses(tmp_path: Path) -> None:
    joins = [event(5, "preempted", 20), *restarted(10, 20)]
    assert not found(
        tmp_path / "a",
        *joins,
        event(12, "out-of-memory", 30),
        failed(12, 30),
        *restarted(15, 30),
        event(20, "run-started", 0),
    )


@pytest.mark.parametrize("strange", [None, "a", -1, True, 1e300, float("nan"), [], {}])
def test_values_that_no_run_writes_make_a_page(tmp_path: Path, strange: Any) -> None:
    rows = recovered(10, 20)
    rows[-1] |= {
        "reason": strange,
        "state": strange,
        "wait_seconds": strange,
        "open_seconds": strange,
        "repeated_steps": strange,
    }
    (loss,) = found(tmp_path / "a", *rows)
    assert 0 <= loss.seconds <= 2
    words(made(tmp_path / "a"))


def three(folder: Path) -> None:
    first = [*recovered(10, 20), *recovered(20, 40, repeated=2, state="image")]
    found(
        folder,
        *first,
        failed(30, 60),
        *restarted(35, 50, not_in_place="a hook <has> changed"),
        rows={21.5: 44, 41: 100},
    )


def test_one_line_says_what_they_cost(tmp_path: Path) -> None:
    three(tmp_path / "a")
    (run,) = read_runs([str(tmp_path / "a")])
    said = (
        "3 losses: 2 recovered in place in 0.5 s and 1 s, 1 restart (7 s), 12 steps computed again"
    )
    assert loss_summary(run) == said
    (line,) = report_lines([run])
    assert line.endswith(f"; {said}")
    (reported,) = report_json([run])["runs"]
    assert [each["repeated_steps"] for each in reported["losses"]] == [0, 2, 10]
    assert round(reported["losses"][2]["seconds"], 3) == 7.0
    found(
        tmp_path / "b",
        *(each for at in range(10, 50, 10) for each in recovered(at, at, repeated=None)),
    )
    (run,) = read_runs([str(tmp_path / "b")])
    assert (
        loss_summary(run)
        == "4 losses: 4 recovered in place in 0.5 s to 0.5 s, 0 steps or more computed again"
    )


def test_a_recovery_in_place_is_no_new_attempt(tmp_path: Path) -> None:
    three(tmp_path / "a")
    (run,) = read_runs([str(tmp_path / "a")])
    assert [round(each.ended - each.began) for each in run.attempts] == [30, 6]
    assert dict(key_figures(run))["attempts"] == "2"
    # rank 0 was lost, and wrote no event of it
    found(tmp_path / "b", *restarted(15, 30), rows={8: 20, 20: 40})
    (run,) = read_runs([str(tmp_path / "b")])
    assert [(round(each.ended - each.began), each.end) for each in run.attempts] == [
        (8, None),
        (5, None),
    ]


def test_the_page_tells_of_each_loss_at_once(tmp_path: Path) -> None:
    three(tmp_path / "a")
    write(tmp_path / "a", "ranks.jsonl", [row | {"hosts": ["x", "y"]} for row in ranks([10], 2)])
    text = made(tmp_path / "a")
    said = words(text)
    assert said.count("3 losses: 2 recovered in place") == 2
    assert (
        "2after 20 s, step 42rank 1 on y was killed by SIGKILLrecovered in place, from the image in"
        " memory after step 40" in said
    )
    assert "1 s: wait 0.1 s, open 0.4 s, 2 steps again 0.5 s" in said
    assert (
        "restarted, from step-50; not in place: a hook <has> changed7 s: wait 5 s, open 1 s, 10"
        " steps again 1 s" in said
    )
    bands = re.findall(r'<b class="loss (in-place|restart)" data-tip="loss (\d):', text)
    assert bands == [("in-place", "1"), ("in-place", "2"), ("restart", "3")]
    assert "loss, recovered in place" in said
    assert "3 losses" in re.findall(r'aria-label="Timeline of events(.*?)"', text)[0]


def test_without_a_loss_nothing_of_it_is_on_the_page(tmp_path: Path) -> None:
    found(tmp_path / "a", rows={1: 10})
    text = made(tmp_path / "a")
    assert 'id="losses"' not in text
    assert "loss, recovered in place" not in text
    assert 'class="reason lost"' not in text


def test_of_many_losses_those_in_the_middle_are_counted(tmp_path: Path) -> None:
    found(tmp_path / "a", *(each for number in range(1, 251) for each in recovered(number, number)))
    text = made(tmp_path / "a")
    assert text.count("<li>") == MAX_LOSSES
    assert "150 more, in events.jsonl" in words(text)
