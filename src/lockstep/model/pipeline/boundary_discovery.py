"""Discovers the shapes of the tensors that a pipeline's stages exchange. One microbatch is computed
for each combination of input shapes. Torch's shape inference repeats every part and the loss for
each schedule, and deadlocks if one rank fails."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.base.errors import LockstepError, RecipeError, UserError, named_error
from lockstep.base.torch_private import tree_leaves
from lockstep.comm.world import World
from lockstep.model.pipeline.boundary import (
    Arguments,
    Boundary,
    Chunks,
    PipelineMicrobatch,
    Run,
    sendable_outputs,
)
from lockstep.model.pipeline.stage import StageForwards
from lockstep.model.trial import unchanged_buffers


class StageFailed(LockstepError): ...


class PipelineFailure:
    """Holds the first error on this rank until every rank raises."""

    def __init__(self, world: World) -> None:
        self.error: Exception | None = None
        self._world = world

    def raise_on_all_ranks(self, compute: Callable[[], Any]) -> Any:
        """Every rank must call this method. All ranks raise if `compute` fails on any rank."""
        self.error, result = None, None
        try:
            result = compute()
        except Exception as error:
            self.error = error
        self.raise_if_any()
        return result

    def raise_if_any(self) -> None:
        """Every rank must call this method. All ranks raise if any rank has an error."""
        # an exchange between hosts, which does not wait for devices
        if self._world.any(self.error is not None):
            self.raise_known()

    def raise_known(self) -> None:
        """Every rank must call this method after all ranks know that a rank has an error."""
        mine, self.error = self.error, None
        error = None if mine is None else [type(mine).__name__, str(mine)]
        everyone = self._world.gather_values(error)
        if mine is not None:
            raise mine
        rank = next(rank for rank, theirs in enumerate(everyone) if theirs is not None)
        name, text = everyone[rank]
        raise named_error(name, text, UserError) or StageFailed(
            f"rank {rank} of the pipeline failed: {name}: {text}"
        )


class SequentialCheck:
    """Checks that a model's forward only calls the given parts, one after another. Create the check
    before the model is parallelized, because the check keeps the original forwards."""

    def __init__(self, model: nn.Module, parts: Sequence[str]) -> None:
        self._forward = model.forward
        self._parts = parts
        self._modules = [model.get_submodule(name) for name in parts]
        self._forwards = {id(module): module.forward for module in model.modules()}

    def check(self, call: Callable[[Callable[..., Any]], Any]) -> None:
        """`call` calls the given function with the model's inputs. The check replaces the parts by
        functions that compute no values."""
        handed: list[_Placeholder] = []
        original: Any = nn.Module.__call__
        known = {id(module) for module in self._modules}

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if id(module) not in known:
                return self._forwards.get(id(module), partial(original, module))(*args, **kwargs)
            place = len(handed)
            if place == len(self._modules) or module is not self._modules[place]:
                raise _NotSequential(self._out_of_turn(place))
            if handed and (kwargs or len(args) != 1 or args[0] is not handed[-1]):
                before = self._parts[place - 1]
                raise _NotSequential(
                    f"must call {self._parts[place]!r} with exactly one argument, the output of "
                    f"{before!r}"
                )
            handed.append(_Placeholder(self._parts[place]))
            return handed[-1]

        nn.Module.__call__ = called  # type: ignore[method-assign]
        try:
            with torch.no_grad():
                returned = call(self._forward)
            if len(handed) < len(self._modules) or returned is not handed[-1]:
                raise _NotSequential(
                    f"returns something other than the output of {self._parts[-1]!r}"
                )
        except Exception as error:
            raise RecipeError(self._text_of(error, len(handed))) from error
        finally:
            nn.Module.__call__ = original  # type: ignore[method-assign]

    def _out_of_turn(self, place: int) -> str:
        if place == len(self._parts):
            return f"calls a part after {self._parts[-1]!r}, the last one"
        after = f"after {self._parts[place - 1]!r}" if place else "first"
        return f"calls another part instead of {self._parts[place]!r}, which comes {after}"

    def _text_of(self, error: Exception, place: int) -> str:
        after = f"after {self._parts[place - 1]!r}" if place else f"before {self._parts[0]!r}"
        own = f"runs other code {after} ({type(error).__name__}: {error})"
        return (
            f"the model's forward {error if isinstance(error, _NotSequential) else own}; a "
            "pipeline calls only the recipe's stages, each with the output of the one before; "
            "move other code into a part, or name parts that hold it"
        )


class _NotSequential(Exception):
    pass


class _Placeholder:
    def __init__(self, part: str) -> None:
        self._part = part

    def __iter__(self) -> Any:
        raise _NotSequential(f"takes the output of {self._part!r} apart")

    def __getitem__(self, _: Any) -> Any:
        self.__iter__()


FAILED = -1


class BoundaryDiscovery:
    """Computes the boundaries between stages. Every rank of the pipeline must make the same
    calls."""

    def __init__(
        self, model: nn.Module, forwards: StageForwards, world: World, failure: PipelineFailure
    ) -> None:
        self._model = model
        self._forwards = forwards
        self._stages = forwards.stages
        self.world = world
        self._group = world.group or dist.group.WORLD
        self._failure = failure
        self._sequential_check = SequentialCheck(model, self._stages.parts)
        self._checked_modes: set[bool] = set()
        self._known: dict[tuple[int, bool], list[Boundary]] = {}

    def routes(
        self, microbatches: Sequence[PipelineMicrobatch], *, backward: bool
    ) -> list[list[Boundary]]:
        """Return a boundary for each microbatch and each stage except the last. Every rank must
        call this method."""
        keys = [(signature, backward) for signature in self._signatures(microbatches)]
        for index in self._undiscovered(keys):
            self._known[keys[index]] = self._discover(microbatches[index], backward)
        return [self._known[key] for key in keys]

    def _undiscovered(self, keys: Sequence[tuple[int, bool]]) -> list[int]:
        new = torch.zeros(len(keys))
        for key in set(keys) - self._known.keys():
            new[keys.index(key)] = 1.0
        for world in self._forwards.lockstep_ranks:
            world.all_reduce(new)
        return [index for index, flag in enumerate(new.tolist()) if flag]

    def _signatures(self, microbatches: Sequence[PipelineMicrobatch]) -> list[int]:
        """Return a hash of the shapes and dtypes of each microbatch's inputs. The host does not
        wait for its device. Every rank raises if the first rank fails."""
        numbers = torch.zeros(len(microbatches), dtype=torch.int64)
        if self.world.rank == 0:
            try:
                signatures = [self._signature(microbatch) for microbatch in microbatches]
                numbers = torch.tensor(signatures, dtype=torch.int64)
            except Exception as error:
                self._failure.error = error
                numbers.fill_(FAILED)
        self.world.broadcast(numbers, 0)
        values: list[int] = numbers.tolist()
        if FAILED in values:
            self._failure.raise_known()
        return values

    def _signature(self, microbatch: PipelineMicrobatch) -> int:
        self._forwards.streams.start(microbatch.position)
        inputs = microbatch.inputs()
        self._check_sequential(inputs)
        described = [
            (list(leaf.shape), str(leaf.dtype)) if isinstance(leaf, Tensor) else type(leaf).__name__
            for leaf in tree_leaves(inputs)
        ]
        text = f"{described} {self._model.training}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())

    def _check_sequential(self, inputs: Arguments | Chunks) -> None:
        if self._model.training not in self._checked_modes:
            one = inputs.each[0] if isinstance(inputs, Chunks) else inputs
            self._sequential_check.check(one.call)
            self._checked_modes.add(self._model.training)

    def _discover(self, microbatch: PipelineMicrobatch, backward: bool) -> list[Boundary]:
        """Every rank must call this method."""

        def compute(stage: int, received: tuple[Tensor, ...], route: Sequence[Boundary]) -> Any:
            with (
                self._forwards.around(self._forwards.own.index(stage)),
                self._forwards.computing(microbatch),
                unchanged_buffers(self._forwards.parts[stage]),
                torch.set_grad_enabled(backward),
            ):
                return self._forwards.output(stage, microbatch, received, route)

        count = len(self._stages.ranges)
        # if forwards have collectives, an error in a schedule would stay on one rank: the last
        # stage computes its first forward here too
        route, _ = self._in_turn(compute, count if self._forwards.lockstep_ranks else count - 1)
        for stage, boundary in enumerate(route):
            # a gradient must reach every stage
            if backward and not any(boundary.gradients):
                raise RecipeError(
                    f"the part {self._stages.last_part(stage)!r} of the model passes on"
                    f" {boundary.describe()}, so no gradient reaches the trainable parameters up"
                    " to it; freeze them (requires_grad_(False)), or pass on a tensor with a"
                    " gradient: no detach(), no whole numbers"
                )
        return route

    def try_forward(self, arguments: Arguments | Chunks, run: Run) -> Any:
        """Return the model's output on the last rank, and None on every other rank. Every rank must
        call this method."""

        def compute(stage: int, received: tuple[Tensor, ...], route: Sequence[Boundary]) -> Any:
            given = arguments
            if stage:
                given = route[-1].arguments(received)
            else:
                self._check_sequential(given)
            with self._forwards.around(self._forwards.own.index(stage)), torch.no_grad():
                return run(stage, partial(self._forwards.called, stage), given)

        with self._forwards.streams.paused():
            return self._in_turn(compute, len(self._stages.ranges))[1]

    def _in_turn(
        self,
        compute: Callable[[int, tuple[Tensor, ...], Sequence[Boundary]], Any],
        count: int,
    ) -> tuple[list[Boundary], Any]:
        """Compute the first `count` stages one after another. Every rank must call this method.
        Returns the boundaries and, on the last stage's rank, the model's output."""
        route: list[Boundary] = []
        value: tuple[Tensor, ...] = ()
        last_output = None
        for stage in range(count):
            is_last = stage == len(self._stages.ranges) - 1
            described: Any = None
            if stage in self._forwards.own:
                try:
                    output = compute(stage, value, route)
                    described = is_last or Boundary.of(output, self._stages.last_part(stage))
                    if is_last:
                        last_output = output
                    else:
                        value = tuple(tensor.detach() for tensor in sendable_outputs(output))
                except Exception as error:
                    self._failure.error = error
            described = self.world.value_of(stage % self._stages.ranks, described)
            if described is None:
                self._failure.raise_known()
            if not is_last:
                route.append(Boundary.from_json(described))
                value = self._sent_to_next_stage(stage, value, route[-1])
        return route, last_output

    def _sent_to_next_stage(
        self, stage: int, value: tuple[Tensor, ...], boundary: Boundary
    ) -> tuple[Tensor, ...]:
        source, target = stage % self._stages.ranks, (stage + 1) % self._stages.ranks
        if source == target or self.world.rank not in (source, target):
            return value
        if self.world.rank == source:
            for tensor in value:
                dist.send(tensor, group=self._group, group_dst=target)
            return ()
        value = boundary.tensors(self.world.device)
        for tensor in value:
            dist.recv(tensor.detach(), group=self._group, group_src=source)
        return value
