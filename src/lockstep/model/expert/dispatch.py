"""The forward of a module of experts that is divided over ranks. A rank sends the row of each pair
(token, chosen expert) to the rank that holds the expert. The rank with the expert computes the row
with the module's forward. The rank of the token weights and sums the outputs, and computes the
router's gradient. No row is dropped or padded. The host waits once, for the numbers of rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from itertools import accumulate, pairwise
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from lockstep.base.errors import RecipeError
from lockstep.base.torch_private import own_parameters
from lockstep.base.uncompiled import Uncompiled
from lockstep.comm.mesh import full_tensor
from lockstep.comm.world import World
from lockstep.model.context.active import active, handled
from lockstep.model.expert.find import ARGUMENTS, Experts
from lockstep.model.expert.leaves import Key, Leaves, Parameters, divided_parameters
from lockstep.model.expert.proof import on_all_ranks, prove_experts
from lockstep.model.expert.routing import Routing, local_experts
from lockstep.model.sync_batchnorm import SyncBatchNormExchange
from lockstep.model.trial import SMALL

_PLAIN = (int, float, str, FunctionType, BuiltinFunctionType)
ComputeRows = Callable[[Tensor, Tensor, Tensor, list[int]], Tensor]
"""Computes the experts' output for rows of tokens. The arguments are the rows, the index of each
row's expert among this rank's experts, weights of 1, and the number of rows from each rank."""


@dataclass(slots=True, eq=False)
class Dispatch:
    """The forward of one module of experts that is divided over the ranks of the axis `expert`. All
    ranks hold equally many experts."""

    names: Sequence[str]
    place: int
    most: int
    experts: Experts
    world: World
    exchange: SyncBatchNormExchange
    proved: set[tuple[Any, ...]]
    leaves: Leaves | None
    """With bitwise numerics, the parameter tensors that keep the gradients of different ranks' rows
    apart."""
    _own: Callable[..., Any] = field(init=False)
    _signature: inspect.Signature = field(init=False)
    _attributes: tuple[Any, ...] = field(init=False)
    _is_checked: bool = False
    _is_left: bool = False
    """True for a module whose forward cannot be divided. The original forward of such a module is
    called."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Dispatch:
        made = copy(self)
        memo[id(self)] = made
        made.experts = deepcopy(self.experts, memo)
        made._own = deepcopy(self._own, memo)
        if self.leaves is not None:
            made.leaves = Leaves(made.experts.module, self.world.size)
        return made

    @property
    def name(self) -> str:
        return self.names[self.place]

    def install(self) -> None:
        module: Any = self.experts.module
        self._own = module.forward
        self._signature = inspect.signature(self._own)
        self._attributes = _plain_attributes(module)
        # a graph break: compiled code knows neither the numbers of rows nor collectives
        module.forward = wraps(self._own)(Uncompiled(partial(self.forward)))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Every rank of the axis must call this method. All ranks raise the same error."""
        given = [*self._signature.bind(*args, **kwargs).arguments.values()]
        with handled():
            self._check(given)
            if self._is_left:
                return self._own(*args, **kwargs)  # type: ignore[no-any-return]
            tokens, index, weights = given
            if self.leaves is None:
                local = {key: parameter.to_local() for key, parameter in self._parameters()}
                compute: ComputeRows = partial(self._computed, local)
            else:
                compute = partial(self._computed_by_rank, self.leaves.parameters_of)
            is_dummy = self.exchange.is_dummy is True
            return self._dispatched(self.world, compute, tokens, index, weights, is_dummy=is_dummy)

    def leave_out(self) -> None:
        """Tell the other ranks that the forward on this rank skips this module. All ranks raise if
        another rank calls the module."""
        self._exchange_counts(self.world, self._nothing(), None)

    def end_forward(self) -> None:
        """Tell the other ranks that the forward on this rank has ended. Raises `RecipeError` if the
        forward of another rank has not ended. On an accelerator, this rank does not wait for the
        answer, and only the other rank raises."""
        call = self._call(len(self.names))
        with handled():
            _, theirs = self._exchange(self.world, self._nothing(), call)
        if theirs.is_cpu and (theirs[:, -1] != call).any():
            raise RecipeError(self._differing(theirs[:, -1].tolist()))

    def _nothing(self) -> Routing:
        return Routing.empty(self.experts.count, self.world.device)

    def _dispatched(
        self,
        world: World,
        compute: ComputeRows,
        tokens: Tensor,
        index: Tensor,
        weights: Tensor,
        *,
        is_dummy: bool = False,
    ) -> Tensor:
        samples, choices = index.shape
        routing = self._nothing() if is_dummy else Routing.of(index, self.experts.count)
        sent, received, counts = self._exchange_counts(world, routing, index)
        came = _send(_Rows.apply(tokens, routing.order, choices), received, sent, world)  # type: ignore[no-untyped-call]
        local = local_experts(counts, len(came))[:, None].to(index.dtype)
        went = compute(came, local, weights.new_ones(len(came), 1), received)
        back = _send(went, sent, received, world)
        pairs = _unsorted(back, routing.order, samples * choices)
        pairs = pairs.view(samples, choices, *back.shape[1:])
        return (pairs * weights[..., None]).sum(1).to(back.dtype)

    def _prove(self, tokens: Tensor, index: Tensor, weights: Tensor) -> None:
        """Compare the divided forward with the module's original forward of all experts. Both
        forwards get random tensors. Every rank must call this method."""
        world, each = self.world, self.experts.count // self.world.size
        whole = {key: _in_use(full_tensor(part.detach())) for key, part in self._parameters()}
        local = {key: tensor[world.rank * each :][:each] for key, tensor in whole.items()}

        def divided(*given: Any) -> Tensor:
            compute = (
                partial(self._computed, local)
                if self.leaves is None
                else partial(self._computed_by_rank, lambda _: local)
            )
            return on_all_ranks(world, self.name, partial(compute, *given))

        def undivided(*given: Tensor) -> Tensor:
            with _with_parameters(whole):
                return self._own(*given)  # type: ignore[no-any-return]

        alone = replace(world, rank=0, size=1, group=None)
        prove_experts(
            self.name,
            partial(self._dispatched, world, divided),
            undivided,
            None
            if self.leaves is None
            else partial(self._dispatched, alone, partial(self._computed, whole)),
            experts=self.experts.count,
            tokens=tokens,
            index=index,
            weights=weights,
            world=world,
        )

    def _exchange_counts(
        self, world: World, routing: Routing, index: Tensor | None
    ) -> tuple[list[int], list[int], Tensor]:
        """Return the numbers of rows to send and to receive. All ranks raise the same error."""
        count, each = self.experts.count, self.experts.count // world.size
        mine, theirs = self._exchange(world, routing, self._call(self.place, index is None))
        # the host waits here
        sent, received, outside, calls = torch.stack(
            [mine[:, :each].sum(1), theirs[:, :each].sum(1), theirs[:, -2], theirs[:, -1]]
        ).tolist()
        if len(set(calls)) > 1:
            raise RecipeError(self._differing(calls))
        if any(outside):
            assert index is not None, "a module that is left out has no choice"
            own = [int(index.min()), int(index.max())] if int(routing.outside) else None
            rank, (least, most) = next(
                (rank, others)
                for rank, others in enumerate(world.gather_values(own))
                if others is not None
            )
            raise RecipeError(
                f"{self.name} was called with experts from {least} to {most} on rank {rank} of the"
                f" axis expert; it has the experts 0 to {count - 1}; let the router choose among"
                " these, as scores.topk(k) does"
            )
        return sent, received, theirs[:, :each]

    def _call(self, place: int, is_left_out: bool = False) -> int:
        """Return a number that ranks compare to check that they call the same module."""
        sequence = None if self.leaves is None else active()
        chunks = 0 if sequence is None else sequence.layout.chunks
        return 2 * (place + (len(self.names) + 1) * chunks) + is_left_out

    def _exchange(self, world: World, routing: Routing, call: int) -> tuple[Tensor, Tensor]:
        """Exchange the counts of rows between the ranks. The tensors have the same shape for all
        modules, because ranks may call different modules."""
        ranks = world.size
        counts = routing.counts.view(ranks, -1)
        padded = F.pad(counts, (0, self.most // ranks - counts.shape[1]))
        extra = [routing.outside.expand(ranks, 1), counts.new_full((ranks, 1), call)]
        mine = torch.cat([padded, *extra], 1)
        return mine, world.all_to_all(mine)

    def _differing(self, calls: Sequence[int]) -> str:
        other = next(rank for rank, call in enumerate(calls) if call != calls[0])
        chunks, places = zip(
            *(divmod(call // 2, len(self.names) + 1) for call in calls), strict=True
        )
        if chunks[other] != chunks[0]:
            return (
                f"rank 0 computes its microbatch in {chunks[0]} chunks, and rank {other} in"
                f" {chunks[other]}; with numerics=bitwise each chunk sends its tokens to the"
                f" experts of all ranks (expert={self.world.size}), and a sequence of fewer tokens"
                f" than chunks has fewer; give sequences of at least {max(chunks)} tokens,"
                f" ls.Sequence(chunks={min(chunks)}), or use replicate or shard instead of expert"
            )
        actions = [
            f"rank {rank} ends after {self.names[-1]}"
            if place == len(self.names)
            else f"rank {rank} {'leaves out' if call % 2 else 'calls'} {self.names[place]}"
            for rank, (call, place) in enumerate(zip(calls, places, strict=True))
        ]
        return (
            f"in a forward, {actions[0]} and {actions[other]}, as with stochastic depth; each layer"
            f" sends tokens to the experts of all ranks (expert={self.world.size}), so every"
            " microbatch must call all layers of experts, equally often; multiply the output of a"
            " block by 0 instead of leaving it out, or use replicate or shard instead of expert"
        )

    def _computed(
        self, parameters: Parameters, rows: Tensor, local: Tensor, ones: Tensor, _: list[int]
    ) -> Tensor:
        is_empty = not len(rows)
        if is_empty:
            # one row of zeros, so that parameters have gradients (of zeros), as on a rank with rows
            rows, local, ones = (
                torch.cat([each, each.new_zeros(1, *each.shape[1:])])
                for each in (rows, local, ones)
            )
        counts = {len(tensor) for tensor in parameters.values()} or {self.experts.count}
        with _with_parameters(parameters), self._with_count(*counts):
            output: Tensor = self._own(rows, local, ones)
        return output[:0] if is_empty else output

    def _computed_by_rank(
        self,
        parameters_of: Callable[[int], Parameters],
        rows: Tensor,
        local: Tensor,
        ones: Tensor,
        received: list[int],
    ) -> Tensor:
        ends = list(accumulate(received, initial=0))
        parts = [
            self._computed(parameters_of(rank), rows[a:b], local[a:b], ones[a:b], [])
            for rank, (a, b) in enumerate(pairwise(ends))
            if a < b
        ]
        return (
            torch.cat(parts) if parts else self._computed(parameters_of(0), rows, local, ones, [])
        )

    def _parameters(self) -> Iterator[tuple[Key, DTensor]]:
        return divided_parameters(self.experts.module)

    @contextmanager
    def _with_count(self, held: int) -> Iterator[None]:
        count = self.experts.count
        named = [
            (each, name)
            for each in self.experts.module.modules()
            for name, value in vars(each).items()
            if type(value) is int and value == count and "expert" in name
        ]
        try:
            for each, name in named:
                setattr(each, name, held)
            yield
        finally:
            for each, name in named:
                setattr(each, name, count)

    def _kind(self) -> tuple[Any, ...]:
        module = self.experts.module
        shapes = tuple(parameter.shape for parameter in module.parameters())
        return type(module), module.training, shapes, self._attributes

    def _check(self, given: list[Any]) -> None:
        """Check the divided forward of the module. A wrong result makes all ranks raise
        `RecipeError`. If each rank holds the whole module, the module's original forward is called
        instead."""
        if not self._is_checked or (not self._is_left and self._kind() not in self.proved):
            # all ranks must call this module before they prove it
            self._exchange_counts(self.world, self._nothing(), self._nothing().order)
            try:
                self._check_arguments(given)
                self._is_checked = True
                if self._kind() not in self.proved:
                    self._prove(*given)
                    self.proved.add(self._kind())
            except RecipeError:
                if self.world.size > 1:
                    raise
                self._is_checked = self._is_left = True

    def _check_arguments(self, given: list[Any]) -> None:
        problems = self.world.gather_values(_problem(given))
        problem = next((each for each in problems if each is not None), None)
        if problem is not None:
            raise RecipeError(
                f"{self.name} is taken for the experts of a layer, and {problem}; experts are"
                " called with tokens (S, D), the chosen experts of each (S, k), and their weights"
                " (S, k); name the modules of experts in Recipe.experts, or leave expert out of the"
                " plan"
            )


def _plain_attributes(module: nn.Module) -> tuple[Any, ...]:
    return tuple(
        (type(each), name, value)
        for each in module.modules()
        for name, value in [("", None), *sorted(vars(each).items(), key=lambda pair: pair[0])]
        if name[:1] != "_" and (value is None or isinstance(value, _PLAIN))
    )


def _problem(given: list[Any]) -> str | None:
    said = ", ".join(
        f"{tuple(each.shape)} {each.dtype}".replace("torch.", "")
        if isinstance(each, Tensor)
        else type(each).__name__
        for each in given
    )
    if len(given) == ARGUMENTS and all(isinstance(each, Tensor) for each in given):
        tokens, index, weights = given
        are_right = (
            tokens.dim() == index.dim() == 2
            and weights.shape == index.shape
            and len(tokens) == len(index)
            and tokens.is_floating_point()
            and weights.is_floating_point()
            and index.dtype in (torch.int64, torch.int32)
        )
        if are_right:
            return None
    return f"was called with {said or 'nothing'}"


@torch.no_grad()
def _in_use(parameter: Tensor) -> Tensor:
    """Return random values for a parameter that is (nearly) all zeros. A zero parameter would hide
    an error in the check."""
    if parameter.abs().max() >= SMALL:
        return parameter
    generator = torch.Generator().manual_seed(parameter.numel())
    return (0.1 * torch.randn(parameter.shape, generator=generator)).to(parameter)


@contextmanager
def _with_parameters(parameters: Parameters) -> Iterator[None]:
    before = {(each, name): own_parameters(each)[name] for each, name in parameters}
    try:
        for (each, name), tensor in parameters.items():
            own_parameters(each)[name] = tensor  # type: ignore[assignment]
        yield
    finally:
        for (each, name), parameter in before.items():
            own_parameters(each)[name] = parameter


class _Rows(torch.autograd.Function):
    """Returns, for each pair (token, chosen expert) in `order`, the row of its token. The backward
    sums a token's gradients in the order of its choices, so the bits do not depend on `order`."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, choices: int) -> Tensor:
        ctx.order, ctx.choices, ctx.shape = order, choices, tokens.shape
        return tokens.index_select(0, order // choices)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        samples, *features = ctx.shape
        pairs = _unsorted(gradient, ctx.order, samples * ctx.choices)
        return pairs.view(samples, ctx.choices, *features).sum(1), None, None


def _unsorted(rows: Tensor, order: Tensor, pairs: int) -> Tensor:
    """Return the rows of all pairs (token, chosen expert), sorted by token and choice. The row of a
    pair that was not sent is zero."""
    made = rows.new_empty if len(order) == pairs else rows.new_zeros
    return made(pairs, *rows.shape[1:]).index_copy(0, order, rows)


def _send(rows: Tensor, received: list[int], sent: list[int], world: World) -> Tensor:
    if world.size == 1:
        return rows
    return _Exchange.apply(rows, received, sent, world)  # type: ignore[no-untyped-call,no-any-return]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, received: list[int], sent: list[int], world: World
    ) -> Tensor:
        ctx.received, ctx.sent, ctx.world = received, sent, world
        return world.all_to_all(rows.contiguous(), received, sent)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return _send(gradient, ctx.sent, ctx.received, ctx.world), None, None, None
