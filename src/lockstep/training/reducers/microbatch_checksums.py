"""Checksums of a microbatch's gradients, and of the tensors that a rank sends and receives while it
computes the gradients. The ranks that compute the same microbatch compare their checksums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter

from torch import Tensor

from lockstep.recomputed import Computed, Position
from lockstep.training.checksum import checksum, on_cpu


class MicrobatchChecksums:
    def __init__(self) -> None:
        self._gradient: dict[int, Tensor] = {}
        self._exchanged: list[tuple[Position, Tensor]] = []

    def add(self, place: int, gradient: Tensor) -> None:
        """Checksums of parts of one gradient are added."""
        added = checksum(gradient)
        self._gradient[place] = self._gradient[place] + added if place in self._gradient else added

    def exchange(self, position: Sequence[int], tensors: Sequence[Tensor]) -> None:
        self._exchanged += [
            ([*position, place], checksum(tensor)) for place, tensor in enumerate(tensors)
        ]

    def computed(self, parameters: int) -> Computed:
        """Waits for the device."""
        ordered = sorted(self._exchanged, key=itemgetter(0))
        sums = [each for _, each in ordered], list(self._gradient.values())
        numbers = iter(on_cpu([*sums[0], *sums[1]]).tolist())
        exchanged = [(position, next(numbers)) for position, _ in ordered]
        gradient = [0] * parameters
        for place in self._gradient:
            gradient[place] = next(numbers)
        return Computed(exchanged, gradient)


class Recording:
    """The microbatch of this rank whose checksums are being collected."""

    def __init__(self) -> None:
        self.checksums: MicrobatchChecksums | None = None
        self._microbatch: int | None = None

    @contextmanager
    def of(self, checksums: MicrobatchChecksums, microbatch: int | None = None) -> Iterator[None]:
        self.checksums, self._microbatch = checksums, microbatch
        try:
            yield
        finally:
            self.checksums = None

    def at(self, microbatch: int | None = None) -> MicrobatchChecksums | None:
        return self.checksums if self._microbatch in (None, microbatch) else None

    def exchange(self, microbatch: int, position: Sequence[int], tensors: Sequence[Tensor]) -> None:
        if (checksums := self.at(microbatch)) is not None:
            checksums.exchange(position, tensors)
