"""The progress display: what a person reads on a terminal, and in a file."""

from __future__ import annotations

import io
import math
import os
import random
import re
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest

from lockstep.base.notebook import WholeLines
from lockstep.logging.progress import Progress, _duration


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 500.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """A stream that says it is a terminal, and what would stand on its screen."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        lines, row, column = [""], 0, 0
        for control, character in re.findall(r"\x1b\[([0-9;?]*[A-Za-z])|(.|\n)", self.getvalue()):
            if control == "2K":
                lines[row] = ""
            elif control == "1A":
                row -= 1
            elif character == "\r":
                column = 0
            elif character == "\n":
                row, column = row + 1, 0
                lines += [""] * (row + 1 - len(lines))
            elif character:
                lines[row] = (
                    lines[row][:column].ljust(column) + character + lines[row][column + 1 :]
                )
                column += 1
        return lines


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    out, err = sys.stdout, sys.stderr
    yield Terminal()
    assert (sys.stdout, sys.stderr) == (out, err)


def run(progress: Progress, clock: Clock, steps: range, *, seconds: float = 0.5) -> None:
    for step in steps:
        clock.now += seconds
        progress.update(step, loss=2.4012, lr=3e-4, samples_per_second=1250.4)


def test_without_a_terminal_lines_are_plain_and_can_be_searched(clock: Clock) -> None:
    stream = io.StringIO()
    with Progress(500, stream=stream, clock=clock) as progress:
        run(progress, clock, range(1, 11))
        progress.evaluation(10, {"loss": 2.10341, "accuracy": 0.5})
        progress.message("step 11 was skipped")
        clock.now += 0.5
        progress.update(
            11, loss=2.4, lr=1e-3, samples_per_second=87.25, extra={"gradient_norm": 0.5}
        )
    assert stream.getvalue().splitlines() == [
        "step 1/500  loss 2.4012  lr 3.0e-04  1,250 samples/s",
        "step 5/500  loss 2.4012  lr 3.0e-04  1,250 samples/s  4:08 left",
        "step 9/500  loss 2.4012  lr 3.0e-04  1,250 samples/s  4:06 left",
        "evaluation at step 10/500  loss 2.1034  accuracy 0.5000",
        "step 11 was skipped",
        "step 11/500  loss 2.4000  lr 1.0e-03  87.2 samples/s  after 0:06  gradient_norm 0.5000",
    ]


def test_the_first_and_the_last_step_have_a_line_however_fast_they_come(clock: Clock) -> None:
    stream = io.StringIO()
    with Progress(1000, stream=stream, clock=clock) as progress:
        run(progress, clock, range(1, 1001), seconds=0.0001)
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/1000", "1000/1000"]
    assert lines[-1].endswith("after 0:00")


def test_lines_get_rarer_as_a_run_gets_longer_but_never_rarer_than_one_a_minute(
    clock: Clock,
) -> None:
    stream = io.StringIO()
    with Progress(10**6, stream=stream, clock=clock) as progress:
        for step in range(1, 86_400):
            clock.now += 1
            before = stream.tell()
            progress.update(step, loss=1.0)
            if step > 2 and stream.tell() > before:
                shown = clock.now
            if step > 10:
                assert clock.now - shown <= 60
    # A line every 2 s up to 100 s, then 50 for each doubling or so, then one a minute.
    assert 1_200 < len(stream.getvalue().splitlines()) < 1_900


def test_what_is_not_known_is_left_out(clock: Clock) -> None:
    stream = io.StringIO()
    with Progress(10, stream=stream, clock=clock) as progress:
        progress.update(0)
        progress.update(10, samples_per_second=math.nan, extra={"return": 21.5})
    assert stream.getvalue().splitlines() == ["step 0/10", "step 10/10  after 0:00  return 21.5000"]


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (math.nan, "nan"),
        (math.inf, "inf"),
        (0.0, "0.0000"),
        (-1.5, "-1.5000"),
        (1e-7, "1.000e-07"),
        (123456.0, "1.235e+05"),
    ],
)
def test_a_loss_of_any_size_can_be_read(clock: Clock, loss: float, text: str) -> None:
    stream = io.StringIO()
    with Progress(1, stream=stream, clock=clock) as progress:
        progress.update(1, loss=loss)
    assert stream.getvalue().startswith(f"step 1/1  loss {text}  ")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0:00"),
        (59.6, "1:00"),
        (3599.4, "59:59"),
        (3599.6, "1h 00m"),
        (86_399, "1d 00h"),
        (7_000, "1h 57m"),
        (200_000, "2d 07h"),
    ],
)
def test_durations_are_short_and_rounded(seconds: float, text: str) -> None:
    assert _duration(seconds) == text


def seconds_left(line: str) -> float:
    (found,) = re.findall(r"~?(\S+(?: \d\dm)?) left", line)
    parts = [int(part) for part in re.findall(r"\d+", found)]
    return parts[0] * 60 + parts[1] if ":" in found else parts[0] * 3600 + parts[1] * 60


def test_time_left_is_right_and_steady_with_noise_a_slow_start_and_evaluations(
    clock: Clock,
) -> None:
    random.seed(3)
    stream = io.StringIO()
    ended: list[tuple[float, int]] = []
    with Progress(2000, stream=stream, clock=clock) as progress:
        for step in range(1, 2001):
            clock.now += 60 if step == 1 else random.lognormvariate(-1.0, 0.5)
            if step % 10 == 0 or step == 1:
                before = stream.tell()
                progress.update(step, loss=1.0)
                if stream.tell() > before:
                    ended.append((clock.now, step))
            if step % 100 == 0:
                clock.now += 8
                progress.evaluation(step, {"loss": 1.0})
    lines = [line for line in stream.getvalue().splitlines() if line.startswith("step")]
    assert "left" not in lines[0]
    estimates = [seconds_left(line) for line in lines[1:-1]]
    for (now, step), estimate in zip(ended[1:], estimates, strict=False):
        truth = clock.now - now  # the last evaluation is part of it
        # Before the first evaluation has been seen, its time cannot be known; it is a sixth of the
        # whole.
        assert (
            abs(estimate - truth)
            < (0.25 if step <= 100 else 0.1 if step < 500 else 0.05) * truth + 5
        )
    rises = [later - earlier for earlier, later in pairwise(estimates[20:])]
    assert max(rises) < 10


def test_time_left_follows_when_steps_become_slower(clock: Clock) -> None:
    stream = io.StringIO()
    with Progress(4000, stream=stream, clock=clock) as progress:
        run(progress, clock, range(1, 2001), seconds=0.1)
        run(progress, clock, range(2001, 3001), seconds=0.4)
        assert seconds_left(stream.getvalue().splitlines()[-1]) > 0.65 * 400


def test_a_first_interval_of_several_steps_gives_a_guess_that_is_marked(clock: Clock) -> None:
    stream = io.StringIO()
    with Progress(100, stream=stream, clock=clock) as progress:
        for step in (10, 20):
            clock.now += 30 if step == 10 else 20
            progress.update(step)
    assert stream.getvalue().splitlines() == ["step 10/100  ~4:30 left", "step 20/100  2:40 left"]


def test_a_resumed_run_counts_only_its_own_steps(clock: Clock) -> None:
    stream = io.StringIO()
    with Progress(1000, stream=stream, clock=clock, start=900) as progress:
        for step in (910, 920):
            clock.now += 20
            progress.update(step)
    assert stream.getvalue().splitlines() == [
        "step 910/1000  ~3:00 left",
        "step 920/1000  2:40 left",
    ]


def test_on_a_terminal_one_line_is_kept_up_to_date_and_results_stay_above_it(
    clock: Clock, terminal: Terminal
) -> None:
    threads = threading.active_count()
    with Progress(500, stream=terminal, clock=clock) as progress:
        assert terminal.screen() == ["  0/500 " + "─" * 40]
        run(progress, clock, range(1, 251))
        progress.evaluation(250, {"loss": 2.1})
        progress.message("[bold]a message[/bold]")
        assert threading.active_count() == threads
        assert terminal.screen() == [
            "evaluation at step 250/500  loss 2.1000",
            "[bold]a message[/bold]",
            f"250/500 {'━' * 20}{'─' * 19}  loss 2.4012  lr 3.0e-04  1,250 samples/s  2:05 left",
        ]
        run(progress, clock, range(251, 501))
    assert terminal.screen()[2:] == [
        f"500/500 {'━' * 38}  loss 2.4012  lr 3.0e-04  1,250 samples/s  after 4:10",
        "",
    ]


def test_the_cursor_is_never_left_hidden_because_a_killed_process_could_not_show_it(
    clock: Clock, terminal: Terminal
) -> None:
    with Progress(500, stream=terminal, clock=clock) as progress:
        for step in range(1, 4):
            assert "\x1b[?25h" in terminal.getvalue().rpartition("\x1b[?25l")[2]
            run(progress, clock, range(step, step + 1))
            progress.message("text")
    assert "\x1b[?25h" in terminal.getvalue().rpartition("\x1b[?25l")[2]


def test_a_run_that_ends_early_says_how_long_it_took(clock: Clock, terminal: Terminal) -> None:
    with Progress(500, stream=terminal, clock=clock) as progress:
        run(progress, clock, range(1, 101), seconds=1)
        assert terminal.screen()[0].endswith("6:40 left")
    assert terminal.screen()[0].startswith("100/500 ")
    assert terminal.screen()[0].endswith("after 1:40")


def test_the_line_follows_the_width_of_the_terminal(
    clock: Clock, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS")
    lines = {}
    with Progress(500, stream=terminal, clock=clock) as progress:
        for step, columns in ((1, 120), (2, 45), (3, 120)):
            monkeypatch.setattr(
                "os.get_terminal_size", lambda *_, columns=columns: os.terminal_size((columns, 24))
            )
            run(progress, clock, range(step, step + 1))
            lines[step] = terminal.screen()[0]
    assert len(lines[2]) <= 45
    assert "samples/s" not in lines[2]
    assert len(re.findall("[━─]", lines[1])) == len(re.findall("[━─]", lines[3])) == 40


def test_a_terminal_is_drawn_at_most_ten_times_a_second_and_at_the_end(
    clock: Clock, terminal: Terminal
) -> None:
    with Progress(10_000, stream=terminal, clock=clock) as progress:
        before = terminal.getvalue().count("\r")
        run(progress, clock, range(1, 1001), seconds=0.001)
        assert 9 <= terminal.getvalue().count("\r") - before <= 11
    assert " 1000/10000 " in terminal.screen()[0]


@pytest.mark.parametrize("columns", [10, 20, 40, 60, 80, 120])
@pytest.mark.parametrize("total", [7, 10**6])
def test_the_line_fits_any_width_and_keeps_what_matters_most(
    clock: Clock, terminal: Terminal, monkeypatch: pytest.MonkeyPatch, columns: int, total: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with Progress(total, stream=terminal, clock=clock) as progress:
        for step in (3, 5):
            clock.now += 1
            progress.update(
                step, loss=2.4012, lr=3e-4, samples_per_second=1250.4, extra={"gradient_norm": 0.9}
            )
        (line,) = terminal.screen()
    assert len(line) <= columns
    assert line.startswith(f"5/{total}".rjust(2 * len(str(total)) + 1)[:columns])
    for text, enough in (
        ("loss 2.4012", 40),
        ("left", 60),
        ("samples/s", 80),
        ("lr 3.0e-04", 120),
        ("gradient_norm 0.9000", 120),
    ):
        assert text in line or columns < enough
    assert "─" in line or columns < 60


def test_the_bar_does_not_flicker_when_a_number_gets_longer_and_shorter(
    clock: Clock, terminal: Terminal
) -> None:
    lengths = []
    with Progress(100, stream=terminal, clock=clock) as progress:
        for step in range(1, 21):
            clock.now += 1
            progress.update(
                step,
                loss=10.0 if step % 2 else 9.0,
                lr=1e-3,
                samples_per_second=999.0 if step % 3 else 1000.0,
                extra={"norm": 1.0},
            )
            lengths.append(len(re.findall("[━─]", terminal.screen()[0])))
    assert lengths == sorted(lengths, reverse=True)
    assert len(set(lengths[-10:])) == 1


def test_what_is_printed_meanwhile_appears_above_the_line_and_the_streams_are_given_back(
    clock: Clock, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", terminal)
    with Progress(10, stream=terminal, clock=clock) as progress:
        print("from the script")
        run(progress, clock, range(1, 3))
        print("unfinished", end="")
    assert sys.stdout is terminal
    screen = terminal.screen()
    assert screen[:2] == ["from the script", "unfinished"]
    assert screen[2].startswith(" 2/10 ")
    monkeypatch.undo()


def test_what_is_printed_to_a_file_stays_in_the_file(
    clock: Clock, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        with Progress(10, stream=terminal, clock=clock):
            print("a result")
    assert file.getvalue() == "a result\n"
    assert "a result" not in terminal.getvalue()


def test_an_exception_leaves_the_last_state_on_the_screen_and_the_terminal_clean(
    clock: Clock, terminal: Terminal
) -> None:
    def train() -> None:
        with Progress(100, stream=terminal, clock=clock) as progress:
            run(progress, clock, range(1, 8), seconds=0.03)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    screen = terminal.screen()
    assert screen[0].startswith("  7/100 ")
    assert screen[0].endswith("after 0:00")
    assert screen[-1] == ""


def test_closing_twice_writes_nothing_more(clock: Clock, terminal: Terminal) -> None:
    for stream in (terminal, io.StringIO()):
        progress = Progress(10, stream=stream, clock=clock)
        run(progress, clock, range(1, 4))
        progress.close()
        written = stream.getvalue()
        progress.close()
        assert stream.getvalue() == written


@pytest.mark.parametrize("dumb", ["dumb", "unknown"])
def test_a_terminal_that_cannot_redraw_gets_plain_lines(
    clock: Clock, terminal: Terminal, monkeypatch: pytest.MonkeyPatch, dumb: str
) -> None:
    monkeypatch.setenv("TERM", dumb)
    with Progress(3, stream=terminal, clock=clock) as progress:
        run(progress, clock, range(1, 4), seconds=5)
    assert [line.partition("  ")[0] for line in terminal.getvalue().splitlines()] == [
        "step 1/3",
        "step 2/3",
        "step 3/3",
    ]
    assert "\x1b" not in terminal.getvalue()


def test_a_stream_that_cannot_encode_a_text_gets_what_it_can(
    clock: Clock, terminal: Terminal
) -> None:
    terminal.encoding = "ascii"
    with Progress(4, stream=terminal, clock=clock) as progress:
        run(progress, clock, range(1, 3))
        progress.message("größer")
        assert terminal.screen() == [
            "gr??er",
            f"2/4 {'=' * 20}{'-' * 20}  loss 2.4012  lr 3.0e-04  1,250 samples/s  0:01 left",
        ]
    assert terminal.getvalue().isascii()
    raw = io.BytesIO()
    plain = io.TextIOWrapper(raw, encoding="ascii")
    with Progress(4, stream=plain, clock=clock) as progress:
        progress.message("größer")
    assert raw.getvalue() == b"gr??er\n"


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("first", ["update", "message"])
def test_a_stream_that_breaks_ends_the_display_and_not_the_run(
    clock: Clock, terminal: Terminal, live: bool, first: str
) -> None:
    stream = terminal if live else io.StringIO()
    tried = []

    def breaks(text: str) -> int:
        tried.append(text)
        raise OSError(5, "Input/output error")

    with Progress(10, stream=stream, clock=clock) as progress:
        run(progress, clock, range(1, 3))
        stream.write = breaks  # type: ignore[method-assign]
        if first == "update":
            run(progress, clock, range(3, 4), seconds=3)
        else:
            progress.message("nobody reads this")
        ended_after = len(tried)
        assert ended_after > 0
        run(progress, clock, range(4, 11), seconds=3)
        progress.message("nor this")
        progress.evaluation(5, {"loss": 1.0})
    assert len(tried) == ended_after


class OutStream(io.StringIO):
    """A stream that passes for a notebook's, and what stands below the cell."""

    __module__ = "ipykernel.iostream"
    encoding = "utf-8"

    def shown(self) -> list[str]:
        lines = []
        for line in self.getvalue().split("\n"):
            shown = ""
            for part in line.split("\r"):
                shown = part + shown[len(part) :]
            lines.append(shown.rstrip())
        return lines


def test_in_a_notebook_one_line_is_kept_up_to_date_and_results_stay_above_it(clock: Clock) -> None:
    cell = OutStream()
    with Progress(500, stream=WholeLines(cell), clock=clock) as progress:  # type: ignore[arg-type]
        assert cell.shown() == ["  0/500 " + "─" * 40]
        run(progress, clock, range(1, 251))
        progress.evaluation(250, {"loss": 2.1})
        assert cell.shown() == [
            "evaluation at step 250/500  loss 2.1000",
            f"250/500 {'━' * 20}{'─' * 19}  loss 2.4012  lr 3.0e-04  1,250 samples/s  2:05 left",
        ]
        run(progress, clock, range(251, 501))
    assert cell.shown()[1:] == [
        f"500/500 {'━' * 38}  loss 2.4012  lr 3.0e-04  1,250 samples/s  after 4:10",
        "",
    ]


def test_lines_that_processes_write_in_pieces_to_a_notebook_arrive_whole() -> None:
    cell = OutStream()
    stream = WholeLines(cell)  # type: ignore[arg-type]
    pieces: list[str] = []
    cell.write = pieces.append  # type: ignore[assignment,method-assign]
    print("rank", 0, file=stream)
    print("loss", 1.5, end="", file=stream)
    assert pieces == ["rank 0\n"]
    stream.flush()
    assert pieces == ["rank 0\n", "loss 1.5"]
