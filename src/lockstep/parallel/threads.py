"""Microbatches that threads of one process compute at the same time, each on a replica of the model: `data_parallel` on a CPU.

One thread of Python leads a step through thousands of small operations, between which most processors of a team wait. Threads that each
compute a microbatch of their own wait for each other once a step. What a replica's forward reads is the model's own, what it leaves behind
is its own: as in `torch.nn.DataParallel`, whose replicas these are, but for parameters that are leaves, so that each has a gradient.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.errors import RecipeError
from lockstep.parallel.data_parallel import check_copyable

T = TypeVar("T")
_NAME = "lockstep-data-parallel"


@dataclass(slots=True)
class Replica:
    """One thread's own copy of a model, whose parameters are the model's in memory."""

    model: nn.Module
    parameters: dict[int, nn.Parameter] = field(default_factory=dict)
    """By the id of the model's own."""
    _made: list[tuple[str, nn.Module, dict[str, Any], dict[str, Tensor | None]]] = field(default_factory=list)
    """Name, module, attributes and buffers, as they were before the first forward. Not of torch's own modules, which keep at most what they
    find again."""

    @classmethod
    def of(cls, model: nn.Module) -> Replica:
        replica = cls(model)
        replica.model = replica._copy(model)
        replica._made = [
            (name, module, dict(vars(module)), dict(module._buffers))
            for name, module in replica.model.named_modules()
            if not type(module).__module__.startswith("torch.nn.modules.")
        ]
        return replica

    def _copy(self, module: nn.Module) -> nn.Module:
        copy: nn.Module = module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in self.parameters:
                self.parameters[id(parameter)] = _alias(parameter)
            copy._parameters[key] = None if parameter is None else self.parameters[id(parameter)]
        for key, child in module._modules.items():
            copy._modules[key] = None if child is None else self._copy(child)
        return copy

    def left_behind(self) -> str | None:
        """What forwards have set on a module, in words."""
        for name, module, attributes, buffers in self._made:
            now: dict[str, Any] = {**vars(module), **module._buffers}
            then: dict[str, Any] = {**attributes, **buffers}
            for key in now.keys() | then.keys():
                if now.get(key) is not then.get(key):
                    return f"{key!r} of {name or 'the model'}"
        return None


class Threads:
    """So many threads, of one session and one model."""

    def __init__(self, model: nn.Module, count: int) -> None:
        """Raises `RecipeError` where the model has BatchNorm, or hooks on what has become of its gradients."""
        check_copyable(model, count)
        hooked = next((name for name, parameter in model.named_parameters() if parameter._post_accumulate_grad_hooks), None)
        if hooked is not None:
            raise RecipeError(
                f"data_parallel={count} and a hook of register_post_accumulate_grad_hook on {hooked!r}; gradients add up on copies of "
                f"the model, a part on each; use register_hook, or a hook's on_step, or replicate={count}"
            )
        self.count = count
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
        return Replicas(self._model, self._pool, [Replica.of(self._model) for _ in range(self.count)])


@dataclass(frozen=True, slots=True)
class Replicas:
    """One for each thread."""

    model: nn.Module
    """What they are of."""
    pool: ThreadPoolExecutor
    each: Sequence[Replica]

    def run(self, compute: Callable[..., T], group: Sequence[tuple[Any, ...]]) -> list[T]:
        """`compute(replica's model, *arguments)` for all of the group at the same time. `group`: arguments, for so many at most as there
        are threads. Raises what the first of them raises, when all have ended, and `RecipeError` where one drew random numbers."""
        before = _generators()
        futures = [self.pool.submit(compute, replica.model, *given) for replica, given in zip(self.each, group, strict=False)]
        wait(futures)
        results = [future.result() for future in futures]
        if not _same(before, _generators()):
            raise RecipeError(
                f"data_parallel={len(self.each)}, and the model's forward or the loss draws random numbers; threads of one process share "
                f"its generators, so that what each draws would depend on who comes first; use replicate={len(self.each)}, or draw none "
                "(dropout=0)"
            )
        return results

    def collect(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum the gradients, in the replicas' order, into the model's. Raises `RecipeError` where a forward did more than return.

        `parameters`: the model's own, those that are trained, which have no gradient yet.
        """
        count = len(self.each)
        for replica in self.each:
            if (left := replica.left_behind()) is not None:
                raise RecipeError(
                    f"data_parallel={count}, and the model's forward sets {left}; each thread sets it on a replica of its own, which is "
                    f"thrown away; return it from the forward, or use replicate={count}"
                )
        reached = next((name for name, parameter in self.model.named_parameters() if parameter.grad is not None), None)
        if reached is not None:
            raise RecipeError(
                f"data_parallel={count}, and the forward of a replica reached {reached!r} of the model itself; it must find parameters and "
                f"modules as attributes of modules, not in a list, a closure or a compiled forward; use replicate={count}"
            )
        for parameter in parameters:
            found = [copy.grad for replica in self.each if (copy := replica.parameters[id(parameter)]).grad is not None]
            for other in found[1:]:
                found[0].add_(other)
            parameter.grad = found[0] if found else None


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    """The same values, and the same hooks on its gradient."""
    alias = nn.Parameter(parameter.detach(), parameter.requires_grad)
    for hook in (parameter._backward_hooks or {}).values():
        alias.register_hook(hook)  # type: ignore[no-untyped-call]
    return alias


def _generators() -> tuple[Any, ...]:
    """How python's, numpy's and torch's default generators stand."""
    numpys = np.random.get_state(legacy=False)["state"]
    return random.getstate(), numpys["key"].tobytes(), numpys["pos"], torch.default_generator.get_state()


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return one[:-1] == other[:-1] and torch.equal(one[-1], other[-1])
