"""What a GPU's time goes to."""

from __future__ import annotations

from typing import Any

from lockstep.logging.phases import Phases, StreamTimes


class Gpu:
    """Reaches each mark when the work before it is done."""

    def __init__(self) -> None:
        self.done_at = 0.0
        self.reached: list[Mark] = []

    def mark(self) -> Any:
        return Mark(self)


class Mark:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._at: float | None = None

    def record(self) -> None:
        self._at = self._gpu.done_at

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._gpu.reached.append(self)

    def elapsed_time(self, end: Mark, /) -> float:
        assert self._at is not None
        assert end._at is not None
        return (end._at - self._at) * 1e3


def test_a_phase_takes_what_its_work_takes_on_the_gpu() -> None:
    gpu = Gpu()
    phases = Phases(clock=lambda: 0.0)
    phases.stream = times = StreamTimes(gpu.mark)
    for name, seconds in (("compute", 2.0), ("exchange", 0.5), ("compute", 1.0), ("update", 0.25)):
        phases.enter(name)
        gpu.done_at += seconds
    assert dict(times.totals()) == {"compute": 3.0, "exchange": 0.5}
    assert len(gpu.reached) == 1
    phases.enter("data")
    assert dict(times.totals()) == {"compute": 3.0, "exchange": 0.5, "update": 0.25}


def test_nothing_was_entered() -> None:
    assert dict(StreamTimes(Gpu().mark).totals()) == {}


def test_events_do_not_pile_up_between_two_readings() -> None:
    gpu, made = Gpu(), []

    def mark() -> Any:
        made.append(None)
        return gpu.mark()

    times = StreamTimes(mark)
    for _ in range(1000):
        for name in ("compute", "exchange"):
            times.enter(name)
            gpu.done_at += 1.0
    assert dict(times.totals()) == {"compute": 1000.0, "exchange": 999.0}
    assert len(made) < 300
