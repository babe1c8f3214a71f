"""Checks before the first step that a forward whose tokens are divided among ranks computes the
same as a forward of all tokens on one rank. The error names the first call of torch whose result
differs."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, dataclass
from functools import partial
from types import FrameType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lockstep.base import accelerator
from lockstep.base.errors import RecipeError
from lockstep.base.nested import tensors_in
from lockstep.base.torch_private import BatchNormBase
from lockstep.comm.first_failure import PeerError
from lockstep.comm.world import World
from lockstep.model.chunked_logits import hidden_states
from lockstep.model.context.active import handled
from lockstep.model.context.calls import is_call_of_model, line_of
from lockstep.model.context.count_reads import PartCounts
from lockstep.model.context.exchange import TokenLayout
from lockstep.model.context.label_shift import has_tokens
from lockstep.model.pipeline.boundary import Around
from lockstep.model.running_statistics import ATTRIBUTE
from lockstep.model.shard import SHARDED
from lockstep.model.trial import tolerance

T = TypeVar("T")
HIDDEN_ATTENTION = (
    nn.MultiheadAttention,
    nn.Transformer,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
"""Modules of torch whose attention a `TorchFunctionMode` cannot intercept."""
ATTENTION = (
    "attention of its own; each rank has some of the tokens: call"
    " torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True), which"
    " exchanges them, instead of products of all tokens with all, masks and biases"
)
STATISTIC = (
    "a value of several tokens; each rank has some of them: normalise each token over its features"
    " (dim=-1), or {otherwise}"
)
CONVOLUTION = (
    "a convolution over tokens; the neighbours of some tokens are on other ranks: use attention,"
    " or {otherwise}"
)
ROWS = (
    "other rows for a part of the tokens; if a forward makes a table of positions and keeps it, the"
    " table is that of its own tokens: make it in __init__, for the longest sequence, and slice it"
    " in the forward (table[:tokens]), or {otherwise}"
)
REASONS = {
    **dict.fromkeys(
        ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "unfold", "unfold_copy"), CONVOLUTION
    ),
    **dict.fromkeys(
        (
            *("mean", "sum", "std", "var", "var_mean", "norm", "max", "amax", "min", "amin"),
            *("prod", "softmax", "log_softmax", "logsumexp", "instance_norm", "group_norm"),
        ),
        STATISTIC,
    ),
    **dict.fromkeys(
        ("cumsum", "cumprod", "cummax", "logcumsumexp"),
        "a running sum over tokens, which begins anew on each rank; for positions write"
        " torch.arange(tokens) or table[:tokens], or {otherwise}",
    ),
    "__getitem__": ROWS,
    **dict.fromkeys(
        ("cross_entropy", "nll_loss"),
        "a loss over all tokens: return the logits, and compute the loss in Recipe.loss",
    ),
}
"""Maps each torch function that combines tokens to an explanation and a remedy."""
OTHER_REASON = (
    "something else for a part of the tokens; compute each token by itself, or {otherwise}"
)


def check_modules(model: nn.Module, layout: TokenLayout) -> None:
    """Raise `RecipeError` for modules that do not work if a rank has only some of the tokens."""
    for name, module in model.named_modules():
        if isinstance(module, HIDDEN_ATTENTION):
            raise RecipeError(
                f"{name or 'the model'} is a torch.nn.{_torch_name(module)}, and {layout.cut_by}"
                " cuts sequences; its attention cannot be exchanged with other ranks; write it with"
                " linear layers and torch.nn.functional.scaled_dot_product_attention"
            )
        if isinstance(module, BatchNormBase) and module.training:
            raise RecipeError(
                f"{name or 'the model'} is a BatchNorm, and {layout.cut_by} cuts sequences; its"
                " statistics would cover only the tokens of one rank; use nn.LayerNorm or"
                f" nn.RMSNorm, or {layout.otherwise}"
            )
        if names := getattr(module, ATTRIBUTE, ()):
            raise RecipeError(
                f"{name or 'the model'} has {ATTRIBUTE} = {tuple(names)}, and {layout.cut_by} cuts"
                " sequences; its forward would update them from the tokens of one rank; update"
                " them between steps, in a hook's after_step for instance, or"
                f" {layout.otherwise}"
            )


def _torch_name(module: nn.Module) -> str:
    return next(kind.__name__ for kind in HIDDEN_ATTENTION if isinstance(module, kind))


@dataclass(frozen=True, slots=True)
class Provers:
    """The ranks that check a model together before the first step. The ranks exchange tensors in
    the model's forward."""

    worlds: Sequence[World]

    def any(self, flag: bool) -> bool:
        for world in self.worlds:
            flag = world.any(flag)
        return flag

    def gather(self, value: Any) -> list[Any]:
        return gather_over(value, self.worlds)

    def raise_on_all_ranks(self, compute: Callable[[], T]) -> T:
        """Return `compute()`. If `compute` fails on any rank, all ranks raise an error. Every rank
        must call this method."""
        result: Any = None
        failure: Exception | None = None
        try:
            result = compute()
        except Exception as error:
            failure = error
        if not self.any(failure is not None):
            return cast(T, result)
        known = self.gather(failure and (type(failure).__name__, str(failure)))
        if failure is not None:
            raise failure
        cause = PeerError(0, *next(filter(None, known)))
        raise cause.as_user_error() or RecipeError(f"another rank failed: {cause.described}")


def gather_over(value: Any, worlds: Iterable[World]) -> list[Any]:
    values = [value]
    for world in worlds:
        values = [each for theirs in world.gather_values(values) for each in theirs]
    return values


@dataclass(frozen=True, slots=True)
class Trial:
    """A forward whose output is compared with the output of another forward."""

    layouts: Sequence[TokenLayout]
    compute: Callable[[Sequence[Around]], Sequence[Any]]
    """Runs the forwards. Every rank must call this function. Ranks without the model's output
    return an empty list."""
    counts: Sequence[PartCounts]


def prove(cut: Trial, whole: Trial, dim: int, ranks: Provers) -> Any:
    """Compare the outputs of `cut`, for this rank's tokens or chunks, with the output of `whole`,
    for all tokens. Every rank must call this function. Returns the output of the first chunk, or
    None on ranks without the output."""
    layout = cut.layouts[0]
    found, states = _run(cut, [partial(_with_reason, each) for each in cut.layouts])
    expected, (expected_states,) = _run(whole)
    if ranks.any(any(not _are_equal(each, expected_states) for each in states)):
        raise RecipeError(
            f"the model draws other random numbers for a part of the tokens ({layout.cut_by}),"
            " by functions that are not drawn by chunk, as torch.randperm or torch.multinomial;"
            " draw by dropout, torch.rand, torch.randn, rand_like, randn_like or bernoulli, for"
            " tensors of (samples, tokens, ...)"
        )
    differences = ranks.raise_on_all_ranks(lambda: _differences(found, expected, cut.layouts, dim))
    if ranks.any(any(not error <= allowed for error, allowed in differences)):
        raise RecipeError(_explanation(cut, whole, differences, ranks))
    return found[0] if found else None


def relative_differences(cut: Trial, whole: Trial, dim: int) -> list[tuple[float, float]]:
    """Return, for each output of `cut`, the relative difference from the output of `whole`, and the
    relative difference that rounding explains."""
    found, _ = _run(cut, [partial(_with_reason, each) for each in cut.layouts])
    expected, _ = _run(whole)
    return _differences(found, expected, cut.layouts, dim)


def _differences(
    found: Sequence[Any], expected: Sequence[Any], layouts: Sequence[TokenLayout], dim: int
) -> list[tuple[float, float]]:
    pairs = zip(found, layouts, strict=False)
    return [_difference(part, expected[0], layout, dim) for part, layout in pairs]


@contextmanager
def _with_reason(layout: TokenLayout, _: int) -> Iterator[None]:
    """Raise `RecipeError` if a forward with some of the tokens fails in torch."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        if SHARDED.search(str(error)):
            raise  # the error does not come from the cut
        raise RecipeError(
            f"the model cannot compute {layout.local} of {layout.tokens} tokens"
            f" ({layout.cut_by}): {error}; each rank calls it with its own tokens; compute"
            f" each token by itself but for attention, or {layout.otherwise}"
        ) from error


class _States:
    """Starts the forward of every stage with the random generators in the same state, and records
    the state of torch's default generator at the end of each stage."""

    def __init__(self, device: torch.device, observer: Around) -> None:
        self._device = device
        self._observer = observer
        self.ended: dict[int, Tensor] = {}

    @contextmanager
    def of_stage(self, stage: int) -> Iterator[None]:
        with accelerator.preserved_generators(self._device), self._observer(stage):
            yield
            self.ended[stage] = torch.default_generator.get_state()


def _are_equal(one: Mapping[int, Tensor], other: Mapping[int, Tensor]) -> bool:
    return all(torch.equal(state, other[stage]) for stage, state in one.items())


def _run(
    trial: Trial, observers: Sequence[Around] = (lambda _: nullcontext(),)
) -> tuple[Sequence[Any], list[dict[int, Tensor]]]:
    device = trial.layouts[0].world.device
    states = [_States(device, observer) for observer in observers]
    outputs = trial.compute([each.of_stage for each in states])
    return outputs, [each.ended for each in states]


def _difference(found: Any, expected: Any, layout: TokenLayout, dim: int) -> tuple[float, float]:
    pairs = list(zip(tensors_in(found), tensors_in(expected), strict=True))
    if not any(has_tokens(whole, dim, layout.tokens) for _, whole in pairs):
        shapes = ", ".join(str(tuple(whole.shape)) for _, whole in pairs)
        raise RecipeError(
            f"the model's output for {layout.tokens} tokens has the shape {shapes}, without a dim"
            f" {dim} of {layout.tokens} tokens; under {layout.cut_by} each rank has"
            " some tokens, and no class token or mean of all; return an output for each token,"
            f" or {layout.otherwise}"
        )
    worst, allowed = 0.0, 0.0
    for part, whole in pairs:
        if not whole.is_floating_point():
            continue
        allowed = max(allowed, tolerance(whole))
        is_cut = has_tokens(whole, dim, layout.tokens)
        part, whole = hidden_states(part), hidden_states(whole)
        if is_cut:
            whole = whole.index_select(dim, layout.places)
        if part.shape != whole.shape:
            return math.inf, allowed
        difference = (part.double() - whole.double()).norm() / whole.double().norm()
        worst = max(worst, float(difference) if not torch.equal(part, whole) else 0.0)
        if math.isnan(worst):
            return math.nan, allowed
    return worst, allowed


def _explanation(
    cut: Trial, whole: Trial, differences: Sequence[tuple[float, float]], ranks: Provers
) -> str:
    """Run both forwards again to find the first call of torch whose result differs. Every rank must
    call this function."""
    layout = cut.layouts[0]
    known = [pair for theirs in ranks.gather(differences) for pair in theirs]
    errors, allowances = zip(*known, strict=True)
    allowed = max(allowances)
    expected = _Results(whole.layouts[0], None, allowed)
    _run(whole, [expected.of_stage])
    results = [_Results(each, expected.results, allowed) for each in cut.layouts]
    _run(cut, [each.of_stage for each in results])
    first_results = ranks.gather(
        [astuple(each.first) for each in results if each.first is not None]
    )
    text = (
        f"under {layout.cut_by} the model computes something else: its output for"
        f" {layout.tokens} tokens differs by {max(errors):.1g} of its size from that of one"
        f" process, where rounding explains {allowed:.1g}"
    )
    if not (calls := [each for theirs in first_results for each in theirs]):
        return f"{text}; it computes {OTHER_REASON.format(otherwise=layout.otherwise)}"
    _, _, name, line, is_attention = min(calls)
    reason = ATTENTION if is_attention else REASONS.get(name, OTHER_REASON)
    return f"{text}; {line} ({name}) computes {reason.format(otherwise=layout.otherwise)}"


@dataclass(frozen=True, slots=True)
class _Result:
    stage: int
    number: int
    name: str
    line: str
    is_attention: bool


@dataclass(frozen=True, slots=True)
class _Tensor:
    shape: torch.Size
    squares: dict[int | None, Tensor]


class _Results(TorchFunctionMode):
    """Records the results of the model's calls of torch in a forward. If `expected` is given, the
    results are compared with the results of a forward of all tokens."""

    def __init__(
        self, layout: TokenLayout, expected: list[tuple[str, _Tensor]] | None, allowed: float
    ) -> None:
        super().__init__()
        self._layout, self._expected, self._allowed = layout, expected, allowed
        self._stage = 0
        self.results: list[tuple[str, _Tensor]] = []
        self.first: _Result | None = None

    def of_stage(self, stage: int) -> _Results:
        self._stage = stage
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        caller = sys._getframe(1)
        if is_call_of_model(caller) and self.first is None and isinstance(result, Tensor):
            with handled():
                name = getattr(func, "__name__", str(func))
                self._note(name, hidden_states(result), caller)
        return result

    def _note(self, name: str, result: Tensor, caller: FrameType) -> None:
        number = len(self.results)
        self.results.append((name, _Tensor(result.shape, _squares(result, self._layout.tokens))))
        if self._expected is not None and number < len(self._expected):
            known, whole = self._expected[number]
            if known == name and (is_attention := self._differs(result, whole)) is not None:
                line = line_of(caller)
                self.first = _Result(self._stage, number, name, line, is_attention)

    def _differs(self, part: Tensor, whole: _Tensor) -> bool | None:
        layout = self._layout
        if part.dim() != len(whole.shape):
            return False
        sizes = list(zip(part.shape, whole.shape, strict=True))
        dims = [dim for dim, (size, other) in enumerate(sizes) if size != other]
        if any(sizes[dim] != (layout.local, layout.tokens) for dim in dims):
            return False
        if len(dims) > 1:
            return True
        dim = dims[0] if dims else None
        found, expected = _sum_of_squares(part, dim), whole.squares[dim]
        if dim is not None:
            expected = expected[layout.places]
        close = torch.isclose(found, expected, rtol=self._allowed, equal_nan=True)
        return None if bool(close.all()) else False


def _squares(tensor: Tensor, tokens: int) -> dict[int | None, Tensor]:
    dims = [dim for dim, size in enumerate(tensor.shape) if size == tokens]
    return {dim: _sum_of_squares(tensor, dim) for dim in (None, *dims)}


def _sum_of_squares(tensor: Tensor, dim: int | None) -> Tensor:
    squares = tensor.detach().double().square()
    return (
        squares.sum()
        if dim is None
        else squares.movedim(dim, 0).reshape(tensor.shape[dim], -1).sum(1)
    )
