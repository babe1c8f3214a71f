"""Threads that compute the chunks of a sequence for bitwise numerics. Only one thread runs at a
time. A thread runs until its chunk needs values from the other chunks. Each forward has the shapes
of one chunk, on any number of processes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch

from lockstep.base import accelerator
from lockstep.base.errors import RecipeError
from lockstep.base.torch_private import current_modes

T = TypeVar("T")
SIGNALS_SECONDS = 0.5
"""The longest time until a signal is handled while the threads run."""


class ChunkEnded(BaseException):
    """Ends a chunk's thread after another chunk's thread has failed. The class is not an
    `Exception`, because models must not catch it."""


class ChunkThreads:
    """Runs each function in a separate thread. One thread runs at a time. The functions exchange
    values by `meet`."""

    def __init__(self, device: torch.device) -> None:
        self.around_others: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._device = device
        self._turns: _Turns | None = None

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Run each function in a thread with the calling thread's settings (autocast, grad mode)
        and random generators. The first error is raised after all threads have ended."""
        assert self._turns is None, "the threads of a forward have ended before its backward"
        self._turns = _Turns(functions, self._device, self.around_others)
        try:
            with _Generators(self._device).preserved():
                return self._turns.results()
        finally:
            self._turns = None

    @property
    def turn(self) -> int:
        assert self._turns is not None, "inside of run"
        return self._turns.turn

    def meet(
        self,
        what: str,
        value: Any,
        answer: Callable[[Any], Sequence[Any]],
        collect: Callable[[], Any] = list,
    ) -> Any:
        """Wait until every function has called `meet`. `answer` is called once with all values, and
        each function gets one item of the result."""
        assert self._turns is not None, "inside of run"
        return self._turns.meet(what, value, answer, collect)


class _Turns:
    def __init__(
        self,
        functions: Sequence[Callable[[], Any]],
        device: torch.device,
        around_others: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.turn = 0
        self._functions = functions
        self._around_others = around_others
        self._locks = [threading.Lock() for _ in functions]
        """One lock for each thread. A thread may run after it has acquired its lock."""
        for lock in self._locks:
            lock.acquire()
        self._generators = [_Generators(device) for _ in functions]
        self._settings = _thread_settings(device)
        self._error: BaseException | None = None
        self._ended = [False] * len(functions)
        self._all_ended = threading.Event()
        self._results: list[Any] = [None] * len(functions)
        self._what = ""
        self._values: Any = None
        self._answers: list[Any] = []

    def results(self) -> list[Any]:
        threads = [
            threading.Thread(target=self._run, args=(place,), name=f"chunk-{place}", daemon=True)
            for place in range(len(self._functions))
        ]
        has_begun = False
        try:
            for thread in threads:
                thread.start()
            has_begun = True
            self._locks[0].release()
            self._wait_for_all()
        except BaseException as error:  # KeyboardInterrupt, or a thread that could not start
            self._fail(error)
            if has_begun:
                self._wait_for_all()
            else:
                self._locks[0].release()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        if self._error is not None:
            raise self._error
        return self._results

    def _wait_for_all(self) -> None:
        """Python handles signals between two waits. A signal that another thread receives does not
        interrupt a wait. An interrupted `Thread.join` would report that the thread has ended
        (bpo-45274)."""
        while not self._all_ended.wait(SIGNALS_SECONDS):
            pass

    def meet(
        self,
        what: str,
        value: Any,
        answer: Callable[[Any], Sequence[Any]],
        collect: Callable[[], Any],
    ) -> Any:
        self._end_after_error()
        place, count = self.turn, len(self._functions)
        if any(self._ended) or (place and what != self._what):
            raise _differ(what)
        if place == 0:
            self._what, self._values = what, collect()
        self._values.append(value)
        if place == count - 1:
            values, self._values = self._values, None
            self._answers = list(answer(values))
        if count > 1:
            self._generators[place].save()
            with self._around_others():
                self._locks[(place + 1) % count].release()
                self._await(place)
            self._end_after_error()
        given, self._answers[place] = self._answers[place], None
        return given

    def _run(self, place: int) -> None:
        try:
            self._await(place)
            if self._error is None:
                with self._settings():
                    self._results[place] = self._functions[place]()
        except BaseException as error:
            self._fail(error)
        self._ended[place] = True
        if all(self._ended):
            self._all_ended.set()
        else:
            following = [*range(place + 1, len(self._ended)), *range(place)]
            if place + 1 == len(self._ended):
                self._fail(_differ(self._what))
            self._locks[next(each for each in following if not self._ended[each])].release()

    def _fail(self, error: BaseException) -> None:
        if self._error is None and not isinstance(error, ChunkEnded):
            self._error = error

    def _end_after_error(self) -> None:
        if self._error is not None:
            raise ChunkEnded

    def _await(self, place: int) -> None:
        self._locks[place].acquire()
        self.turn = place
        self._generators[place].restore()


class _Generators:
    """The states of the default generators of Python, numpy and torch. Saving the state of numpy's
    generator is slow, so the generator object is replaced."""

    def __init__(self, device: torch.device) -> None:
        self._torch = accelerator.generators_of([device])
        self._numpy: Any = np.random.MT19937(0)
        current: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
        self._numpy.state = current.state
        self.save_others()

    def save(self) -> None:
        self._numpy = np.random.get_bit_generator()  # type: ignore[attr-defined]
        self.save_others()

    def save_others(self) -> None:
        self._python = random.getstate()
        self._states = [each.get_state() for each in self._torch]

    def restore(self) -> None:
        np.random.set_bit_generator(self._numpy)  # type: ignore[attr-defined]
        random.setstate(self._python)
        for generator, state in zip(self._torch, self._states, strict=True):
            generator.set_state(state)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        self.save()
        try:
            yield
        finally:
            self.restore()


def _thread_settings(device: torch.device) -> Callable[[], Any]:
    """Return a context that gives another thread this thread's settings, such as autocast and grad
    mode. In the context, a backward runs in the thread that starts it. A backward of one thread can
    wait for a backward of another thread."""
    threads, has_gradients = torch.get_num_threads(), torch.is_grad_enabled()
    kinds = [kind for kind in {"cpu", device.type} if torch.is_autocast_enabled(kind)]
    dtypes = [torch.get_autocast_dtype(kind) for kind in kinds]
    keeps_casts = torch.is_autocast_cache_enabled()
    modes = current_modes()

    @contextmanager
    def settings() -> Iterator[None]:
        with ExitStack() as stack:
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            if accelerator.is_accelerator(device):
                stack.enter_context(accelerator.current(device))
            stack.enter_context(torch.set_grad_enabled(has_gradients))
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            for kind, dtype in zip(kinds, dtypes, strict=True):
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=keeps_casts))
            stack.enter_context(modes())
            yield

    return settings


def _differ(what: str) -> RecipeError:
    return RecipeError(
        "numerics=bitwise computes each chunk of a sequence by itself, and the chunks of one"
        f" forward do not make the same calls ({what}); attention must be called for every token,"
        " in the same order: leave out branches that depend on the tokens, or leave"
        " numerics=bitwise out"
    )
