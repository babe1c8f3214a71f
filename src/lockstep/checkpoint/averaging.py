"""The weighted mean of several saved models, tensor by tensor (Wortsman et al., "Model soups",
2022, arXiv:2203.05482).

Floating-point and complex tensors are summed in float64 and rounded once. An element that is the
same in all models keeps its bits. All other tensors are taken from the first model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lockstep.base.dtypes import torch_dtype
from lockstep.base.errors import CheckpointError, first_few
from lockstep.checkpoint.saved_model import StateDictReader

if TYPE_CHECKING:
    from torch import Tensor

COUNTER = "num_batches_tracked"
"""BatchNorm's number of batches, which is not averaged."""
_STATISTICS = ("running_mean", "running_var")
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class AverageMember:
    name: str
    model: StateDictReader
    weight: float = 1.0


class WeightAverage:
    def __init__(self, members: Sequence[AverageMember]) -> None:
        shares = normalised([member.weight for member in members])
        for other in members[1:]:
            check_alike(members[0], other)
        self._members = [
            (member, share) for member, share in zip(members, shares, strict=True) if share > 0
        ]
        self.differing: dict[str, str] = {}
        """Maps a tensor that is not averaged to the first model in which it differs."""

    @property
    def model(self) -> StateDictReader:
        """Reading a tensor raises `CheckpointError` for NaN, and for an infinity that some model
        lacks."""
        return StateDictReader(self._members[0][0].model.specs, self.read)

    @property
    def statistics(self) -> list[str]:
        """Names of averaged running statistics of BatchNorm, which are wrong for the mean model."""
        names = self._members[0][0].model.specs if len(self._members) > 1 else ()
        return [name for name in names if name.rpartition(".")[2] in _STATISTICS]

    def read(self, name: str) -> memoryview:
        (first, _), *others = self._members
        if not others:
            return first.model.read(name)
        dtype = torch_dtype(first.model.specs[name][0])
        if dtype.is_floating_point or dtype.is_complex:
            return self._mean(name)
        data = first.model.read(name)
        for other, _ in others:
            if other.model.read(name) != data:
                self.differing.setdefault(name, other.name)
        return data

    def _mean(self, name: str) -> memoryview:
        import torch

        (first, share), *others = self._members
        mean = _TensorMean(_tensor(first, name), share)
        for other, other_share in others:
            if not mean.add(_tensor(other, name), other_share):
                raise CheckpointError(
                    f"{name!r} has infinities in only one of {first.name} and {other.name}; their"
                    " mean is not a weight; leave one of the two out"
                )
        return mean.result().view(torch.uint8).numpy().data


def normalised(weights: Sequence[float]) -> list[float]:
    for weight in weights:
        if not 0 <= weight < math.inf:
            raise CheckpointError(
                f"the weight {weight:g} in an average; each is a number of at least 0; correct it"
            )
    largest = max(weights)
    if largest == 0:
        raise CheckpointError(
            "all weights of an average are 0; they are divided by their sum; give at least one"
            " weight above 0"
        )
    scaled = [weight / largest for weight in weights]
    total = math.fsum(scaled)
    return [weight / total for weight in scaled]


def check_alike(first: AverageMember, other: AverageMember) -> None:
    for one, two in ((first, other), (other, first)):
        if missing := [name for name in one.model.specs if name not in two.model.specs]:
            raise CheckpointError(
                f"{one.name} has {first_few(missing)}, and {two.name} has no tensor of that name;"
                " an average is of models of one architecture; leave one of the two out"
            )
    for name, (dtype, shape) in first.model.specs.items():
        other_dtype, other_shape = other.model.specs[name]
        if (dtype, shape) != (other_dtype, other_shape):
            raise CheckpointError(
                f"{name!r} is {dtype} {list(shape)} in {first.name}, and {other_dtype}"
                f" {list(other_shape)} in {other.name}; an average is of tensors of one shape and"
                " type; leave one of the two out"
            )


class _TensorMean:
    """The weighted sum of one tensor in float64. The weights add up to 1."""

    def __init__(self, first: Tensor, share: float) -> None:
        import torch

        self._wide = torch.complex128 if first.is_complex() else torch.float64
        self._first = first
        self._sum = torch.empty(len(first), dtype=self._wide)
        self._same = torch.ones(len(first), dtype=torch.bool)
        for piece in _pieces(first):
            torch.mul(first[piece].to(self._wide), share, out=self._sum[piece])

    def add(self, tensor: Tensor, share: float) -> bool:
        """Return False if an element is infinite only in this tensor, or only in the sum so far."""
        for piece in _pieces(self._first):
            first, other = self._first[piece].to(self._wide), tensor[piece].to(self._wide)
            differs = first != other
            if not (first.isfinite() & other.isfinite() | ~differs).all():
                return False
            self._sum[piece].add_(other, alpha=share)
            self._same[piece].logical_and_(differs.logical_not_())
        return True

    def result(self) -> Tensor:
        """Overwrites the first added tensor."""
        for piece in _pieces(self._first):
            own = self._first[piece]
            own.copy_(own.to(self._wide).where(self._same[piece], self._sum[piece]))
        return self._first


def _pieces(tensor: Tensor) -> list[slice]:
    return [slice(start, start + _PIECE) for start in range(0, len(tensor), _PIECE)]


def _tensor(member: AverageMember, name: str) -> Tensor:
    """Return a flattened tensor. Raises `CheckpointError` for NaN."""
    import torch

    data, dtype = member.model.read(name), torch_dtype(member.model.specs[name][0])
    if not len(data):
        return torch.empty(0, dtype=dtype)
    tensor = torch.frombuffer(bytearray(data) if data.readonly else data, dtype=dtype)
    if any(tensor[piece].to(torch.complex128).isnan().any() for piece in _pieces(tensor)):
        raise CheckpointError(
            f"{member.name} has NaN in {name!r}; its training has failed; leave it out, or give a"
            " checkpoint before it"
        )
    return tensor


def greedy_soup(
    scores: Sequence[float], measure: Callable[[list[int]], float], mode: Literal["min", "max"]
) -> list[int] | None:
    """Return the models to average, best first. A model is kept if the average with the model
    scores better. Return None if every score is NaN. `measure` scores the average of some
    models."""
    sign = 1 if mode == "min" else -1
    ordered = sorted(
        (index for index, score in enumerate(scores) if not math.isnan(score)),
        key=lambda index: sign * scores[index],
    )
    if not ordered:
        return None
    chosen, best = ordered[:1], scores[ordered[0]]
    for index in ordered[1:]:
        score = measure([*chosen, index])
        if sign * score < sign * best:
            chosen, best = [*chosen, index], score
    return chosen
