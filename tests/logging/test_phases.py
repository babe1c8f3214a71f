"""What a rank is at."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.logging.phases import FADES, Phases


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_phases_take_the_time_until_the_next() -> None:
    phases = Phases(clock := Clock())
    clock.now = 2.0
    assert phases.enter("compute") == "set-up"
    clock.now = 5.0
    assert (phases.name, phases.seconds) == ("compute", 3.0)
    assert phases.enter("set-up") == "compute"
    clock.now = 6.0
    phases.enter("compute")
    assert phases.totals == {"set-up": 3.0, "compute": 3.0}


def test_the_longest_of_late_is_remembered_and_fades() -> None:
    phases = Phases(clock := Clock())
    for took in (10.0, 1.0, 1.0):
        clock.now += took
        phases.enter("set-up")
    assert phases.usual("set-up") == 10.0 * FADES**2
    clock.now += 20.0
    phases.enter("set-up")
    assert phases.usual("set-up") == 20.0
    assert phases.usual("compute") is None


def test_a_phase_that_waits_for_its_items_has_not_ended() -> None:
    """The first step waits for a batch before its first forward, which may compile the model for
    minutes."""
    phases = Phases(clock := Clock())
    phases.enter("compute")
    for took in (100.0, 1.0):
        for _ in phases.during("data", ["batch"]):
            assert (phases.name, phases.usual("data")) == ("compute", 0.0)
            assert phases.usual("compute") is None or took == 1.0
            clock.now += took
        phases.enter("exchange")
        assert phases.usual("compute") is not None
        assert phases.usual("compute") > 50.0, "the forward of the first step counts"  # type: ignore[operator]
        phases.enter("compute")


def test_waiting_for_items_is_a_phase_and_what_is_done_with_them_is_not() -> None:
    phases = Phases(clock := Clock())

    def slowly() -> Iterator[int]:
        for item in range(3):
            clock.now += 1.0
            yield item
        clock.now += 1.0

    for _ in phases.during("data", slowly()):
        assert phases.name == "set-up"
        clock.now += 10.0
    assert (phases.name, phases.totals) == ("set-up", {"set-up": 30.0, "data": 4.0})


def test_a_wait_that_fails_is_over() -> None:
    phases = Phases(Clock())

    def broken() -> Iterator[int]:
        yield 1
        raise ValueError

    try:
        for _ in phases.during("data", broken()):
            pass
    except ValueError:
        assert phases.name == "set-up"
