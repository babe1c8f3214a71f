"""Microbatches that threads of one process compute at the same time, each on a replica of the model: `data_parallel` on a CPU.

One thread of Python leads a step through thousands of small operations, between which most processors of a team wait. Threads that each
compute a microbatch of their own wait for each other once a step.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from lockstep.base.errors import RecipeError
from lockstep.base.torch_private import is_compiled_in_place, post_accumulate_hooks, wraps_compiled
from lockstep.model.copies import Copy
from lockstep.model.data_parallel import check_copyable

T = TypeVar("T")
_NAME = "lockstep-data-parallel"


class Threads:
    """So many threads, of one session and one model."""

    def __init__(self, model: nn.Module, count: int) -> None:
        """Raises `RecipeError` where the model has BatchNorm, compiled modules, or hooks on what has become of its gradients."""
        check_copyable(model, count)
        _check_leaves(model, count)
        self.count = count
        self._copies: list[Copy] = []
        """Of the step before, which left nothing behind on them: to make them anew takes 1 % of a step of a small model."""
        self._model = model
        self._pool = ThreadPoolExecutor(count, _NAME, torch.set_num_threads, (torch.get_num_threads(),))

    def close(self) -> None:
        self._pool.shutdown()

    def numbers(self) -> set[int]:
        """The operating system's, of those that have computed."""
        return {each.native_id for each in threading.enumerate() if each.name.startswith(_NAME) and each.native_id is not None}

    def groups(self, items: Iterable[T]) -> Iterator[list[T]]:
        """As many at a time as there are threads."""
        rest = iter(items)
        while group := list(islice(rest, self.count)):
            yield group

    def replicate(self) -> Replicas:
        """Of the model as it is now: for one step, or one evaluation."""
        kept, self._copies = self._copies, []
        if not kept or not kept[0].is_current():
            kept = [Copy.of(self._model) for _ in range(self.count)]
        return Replicas(self._model, self._pool, kept, self._copies)


@dataclass(frozen=True, slots=True)
class Replicas:
    """One for each thread."""

    model: nn.Module
    """What they are of."""
    pool: ThreadPoolExecutor
    each: Sequence[Copy]
    unchanged: list[Copy]
    """Where they are put when they have been checked."""

    def run(self, compute: Callable[..., T], group: Sequence[tuple[Any, ...]]) -> list[T]:
        """`compute(replica's model, *arguments)` for all of the group at the same time. `group`: arguments, for so many at most as there
        are threads. Raises what the first of them raises, when all have ended, and `RecipeError` where one drew random numbers."""
        before, count = _generators(), len(self.each)
        futures = [
            self.pool.submit(copy_context().run, compute, replica.model, *given) for replica, given in zip(self.each, group, strict=False)
        ]
        wait(futures)
        try:
            results = [future.result() for future in futures]
        except Exception as error:
            error.add_note(
                f"raised in a thread, on a replica of the model (data_parallel={count}); replicate={count} has processes instead"
            )
            raise
        if not _same(before, _generators()):
            raise RecipeError(
                f"data_parallel={count}, and the model's forward or the loss draws random numbers, or another thread of the process does; "
                f"threads share its generators, so that what each draws would depend on who comes first; use replicate={count}, or draw "
                "none (dropout=0)"
            )
        return results

    def check(self) -> None:
        """Raises `RecipeError` where a forward did more than return."""
        for replica in self.each:
            if (left := replica.left_behind()) is not None:
                raise RecipeError(
                    f"data_parallel={len(self.each)}, and the model's forward sets {left}; each thread sets it on a replica of its own, "
                    f"which is thrown away; return it from the forward, or use replicate={len(self.each)}"
                )
        self.unchanged[:] = self.each

    def collect(self) -> None:
        """Sum the gradients, in the replicas' order, into the model's, which has none yet. Raises as `check` does."""
        self.check()
        trained = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        reached = next((name for name, parameter in trained.items() if parameter.grad is not None), None)
        if reached is not None:
            raise RecipeError(
                f"data_parallel={len(self.each)}, and {reached!r} of the model itself was reached, by the forward of a replica or by the "
                "loss; a forward must find parameters and modules as attributes of modules, not in a list or a closure, and a loss that "
                f"takes the model must be given it (inputs=None, loss(model, batch)); or use replicate={len(self.each)}"
            )
        for parameter in trained.values():
            copies = [replica.parameters[id(parameter)] for replica in self.each]
            found = [copy.grad for copy in copies if copy.grad is not None]
            for other in found[1:]:
                found[0].add_(other)
            parameter.grad = found[0] if found else None
            for copy in copies:
                copy.grad = None


def _check_leaves(model: nn.Module, count: int) -> None:
    """Raises `RecipeError` where gradients would not be left on the copies' parameters, or something would look for them elsewhere."""
    for name, module in model.named_modules():
        if is_compiled_in_place(module) or wraps_compiled(module):
            raise RecipeError(
                f"data_parallel={count} and a compiled module ({name or 'the model'!r}); compiled code computes with the model itself, not "
                f"with copies of it; leave torch.compile out, or use replicate={count}"
            )
    hooked = next((name for name, parameter in model.named_parameters() if post_accumulate_hooks(parameter)), None)
    if hooked is not None:
        raise RecipeError(
            f"data_parallel={count} and a hook of register_post_accumulate_grad_hook on {hooked!r}; gradients add up on copies of the "
            f"model, a part on each; use register_hook, or a hook's on_step, or replicate={count}"
        )


def _generators() -> tuple[Any, ...]:
    """How python's, numpy's and torch's default generators stand."""
    numpys = np.random.get_state(legacy=False)["state"]
    return random.getstate(), numpys["key"].tobytes(), numpys["pos"], torch.default_generator.get_state()


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return one[:-1] == other[:-1] and torch.equal(one[-1], other[-1])
