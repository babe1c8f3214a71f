"""What every test gets: a pool of workers, a temporary folder of this session's own, and a look at
what it left behind."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import before_torch  # noqa: F401
import forked
import hypothesis
import psutil
import pytest
import torch
from processes import (
    command_line,
    keep_stacks_in,
    let_signals_end_what_tests_start,
    reserved_port,
    stacks,
)
from tiers import LONGEST

from lockstep.base import garbage
from lockstep.base.temporary_folder import locked_folder
from lockstep.testing import leaks
from lockstep.testing.pool import NURSERY, WorkerPool
from lockstep.testing.worker import loopback_store

PASSED = pytest.StashKey[bool]()
FOLDER = pytest.StashKey[ExitStack]()
WARM = pytest.StashKey[bool]()
BEFORE = pytest.StashKey[leaks.Snapshot]()
pools: list[WorkerPool] = []
END_SECONDS = 30.0
"""What a test started has this long to end, on a busy machine."""
PRELOADED = (
    "lockstep.run",
    "lockstep.autotune.autotune",
    "lockstep.model.pipeline.stage",
    "torch.distributed.checkpoint",
    "warm_caches",
    "forked_writers",
)
"""What most tests train with, which each of their ranks would import for itself."""


def pytest_configure(config: pytest.Config) -> None:
    """Give the session a temporary folder in which nobody else writes; `tmp_path` stays where
    pytest keeps it."""
    gc.disable()  # until all is collected: a tenth of that time
    let_signals_end_what_tests_start()
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    # of a session that is killed, the next one removes it
    folder = config.stash[FOLDER] = ExitStack()
    own = str(folder.enter_context(locked_folder("lockstep-tests-")))
    os.environ["TMPDIR"] = own
    tempfile.tempdir = None
    keep_stacks_in(Path(own, "stacks"))
    # Importing torch._dynamo, which the first optimizer does, makes this folder.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(own, "torchinductor")
    os.mkdir(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    os.environ["XDG_CACHE_HOME"] = os.path.join(own, "cache")
    # Threads that spin while they wait for each other take the cores from the other processes: on
    # two busy cores, 4 times as long.
    torch.set_num_threads(1)
    # how long an example takes says how busy the machine is
    hypothesis.settings.register_profile("lockstep", deadline=None)
    hypothesis.settings.load_profile("lockstep")


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[FOLDER].close()


def pytest_collection_finish() -> None:
    """Exempt what is imported and collected from garbage collection, of which each look for leaks
    that finds something begins with one."""
    garbage.freeze_for_good()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Exempt from garbage collection what outlives a file's tests, such as imported modules."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        garbage.freeze_for_good()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Let the Python processes that a test marked `forks`, or its fixtures, start be forks."""
    mark = item.get_closest_marker("forks")
    if mark is None:
        return (yield)
    with forked.use(watched="watched" in mark.args):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if call.when == "call":
        item.stash[PASSED] = report.passed
    return report


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, then those with the most whole commands, then those with the
    most tests: pytest's workers then end at about the same time."""
    counts, commands = Counter[Path](), Counter[Path]()
    for item in items:
        is_command = (
            item.path.parent.name == "cli" or item.get_closest_marker("command") is not None
        )
        (commands if is_command else counts)[item.path] += 1
    longest = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(
        key=lambda item: (
            longest.get(item.path, len(longest)),
            -commands[item.path],
            -counts[item.path],
        )
    )


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(max_workers=4, preload=PRELOADED, check_leaks=True) as pool:
        pools.append(pool)
        yield pool
        pools.remove(pool)


@pytest.fixture(scope="session")
def transformers_in_pool(pool: WorkerPool) -> None:
    import warm_transformers

    pool.run(1, warm_transformers.imported)


@pytest.fixture(scope="module")
def nothing_is_frozen() -> Iterator[None]:
    """As in a user's process: the collector sees all objects."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(garbage, "_is_frozen", False)
        gc.unfreeze()
        yield
    gc.freeze()


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as number:
        yield number


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that passed and left a process, thread, port, descriptor, variable or file
    behind."""
    if not request.session.stash.get(WARM, False):
        loopback_store()  # libuv keeps the pipe that it opens here for the life of the process
        request.session.stash[WARM] = True
    before = request.node.stash[BEFORE] = leaks.take(exempt=_exempt())
    yield
    if request.node.stash.get(PASSED, False) and (
        found := leaks.remaining(before, exempt=_exempt(), timeout_seconds=END_SECONDS)
    ):
        pytest.fail("the test left behind:\n  " + "\n  ".join(found), pytrace=False)


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Iterator[Any]:
    """Let a test that times out say what it started is doing, and kill that, so that nothing, such
    as `Popen.__exit__`, waits for it without end."""
    result = yield
    fail = signal.getsignal(signal.SIGALRM)

    def kill_and_fail(number: int, frame: FrameType | None) -> None:
        started = _started(item.stash.get(BEFORE, None))
        print(stacks(started), file=sys.stderr)
        for process in started:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if callable(fail):
            fail(number, frame)

    if settings.method == "signal":
        signal.signal(signal.SIGALRM, kill_and_fail)
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Kill what a worker of pytest-xdist leaves behind when it crashes, or is ended by
    `faulthandler_timeout`."""
    if error is None:
        return
    mine = {
        "PYTEST_XDIST_WORKER": node.gateway.id,
        "PYTEST_XDIST_TESTRUNUID": node.workerinput["testrunuid"],
    }
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().items() >= mine.items():
                process.kill()


def _started(before: leaks.Snapshot | None) -> list[psutil.Process]:
    """The descendants of this process, without those of `before` and of pools, which end with their
    fixtures."""
    earlier = set() if before is None else {number for number, _ in before.found["process"]}
    children = [
        child
        for child in psutil.Process().children()
        if child.pid not in earlier and NURSERY not in command_line(child)
    ]
    return [process for child in children for process in (*child.children(recursive=True), child)]


def _exempt() -> leaks.Exempt:
    owned = [pool.exempt for pool in pools]
    return leaks.Exempt(
        processes=[number for exempt in owned for number in exempt.processes],
        descriptors=[number for exempt in owned for number in exempt.descriptors],
    )
