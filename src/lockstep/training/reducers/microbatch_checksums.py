"""Checksums of the gradients that a rank computes for one microbatch, and of the tensors that it
sends and receives meanwhile. Two ranks that compute the same microbatch compare them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter

from torch import Tensor

from lockstep.recomputed import Computed, Position
from lockstep.training.checksum import checksum, on_cpu


class MicrobatchChecksums:
    """Collects the checksums of one microbatch: of its gradients, and of the tensors that this rank
    exchanges for it with other ranks of its model replica."""

    def __init__(self) -> None:
        self._gradient: dict[int, Tensor] = {}
        self._exchanged: list[tuple[Position, Tensor]] = []

    def add(self, place: int, gradient: Tensor) -> None:
        """Add a gradient of the parameter at index `place` in the reducer. Called several times for
        a parameter whose gradient is computed in several parts; their checksums are added."""
        added = checksum(gradient)
        self._gradient[place] = self._gradient[place] + added if place in self._gradient else added

    def exchange(self, position: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """Add tensors that are sent or received. `position`: when, in the order of the replica's
        exchanges (see `lockstep.recomputed.Position`)."""
        self._exchanged += [
            ([*position, place], checksum(tensor)) for place, tensor in enumerate(tensors)
        ]

    def computed(self, parameters: int) -> Computed:
        """Return all checksums. Those of gradients are in the order of the reducer's parameters,
        `parameters` in number, with 0 for a parameter without a gradient. Waits for the device."""
        ordered = sorted(self._exchanged, key=itemgetter(0))
        sums = [each for _, each in ordered], list(self._gradient.values())
        numbers = iter(on_cpu([*sums[0], *sums[1]]).tolist())
        exchanged = [(position, next(numbers)) for position, _ in ordered]
        gradient = [0] * parameters
        for place in self._gradient:
            gradient[place] = next(numbers)
        return Computed(exchanged, gradient)


class Recording:
    """The microbatch of this rank whose checksums are being collected, if there is one."""

    def __init__(self) -> None:
        self.checksums: MicrobatchChecksums | None = None
        """The collector of the microbatch's checksums; None while no microbatch is recorded."""
        self._microbatch: int | None = None

    @contextmanager
    def of(self, checksums: MicrobatchChecksums, microbatch: int | None = None) -> Iterator[None]:
        """A context in which `checksums` collects the checksums of one microbatch. `microbatch`:
        its index among this rank's; None if no other microbatch is computed in the context."""
        self.checksums, self._microbatch = checksums, microbatch
        try:
            yield
        finally:
            self.checksums = None

    def at(self, microbatch: int | None = None) -> MicrobatchChecksums | None:
        """Return the collector of checksums if it records this microbatch, else None.
        `microbatch`: index among this rank's; None for the only one that is computed."""
        return self.checksums if self._microbatch in (None, microbatch) else None

    def exchange(self, microbatch: int, position: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """Add the checksums of tensors that are sent or received for a microbatch, if it is the
        recorded one."""
        if (checksums := self.at(microbatch)) is not None:
            checksums.exchange(position, tensors)
