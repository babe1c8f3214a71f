"""Sends the first error of any rank to all ranks. Without this module, the other ranks see only
that a collective failed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass

from lockstep.base.errors import UserError, named_error, with_notes
from lockstep.base.torch_private import Store, default_store
from lockstep.comm.world import World

MOST_CHARACTERS = 4000
MOST_SECONDS = 2.0
_LOOK_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class PeerError:
    rank: int
    kind: str
    text: str

    @property
    def line(self) -> str:
        return f"rank {self.rank} failed first: {self.described}"

    @property
    def described(self) -> str:
        return f"{self.kind}: {self.text}"

    def as_user_error(self) -> UserError | None:
        return named_error(self.kind, self.text, UserError)


class FirstFailure:
    """Reports this rank's error to all ranks of a run, and finds the first reported error."""

    def __init__(self, world: World) -> None:
        self._rank = world.rank
        store: Store = default_store()
        # a store may serve several runs with different ranks
        number = store.add("lockstep/runs", 1) if world.rank == 0 else 0
        self._store, self._key = store, f"lockstep/failure/{sum(world.gather_values(number))}"

    def tell(self, error: BaseException) -> None:
        text = with_notes(error)[:MOST_CHARACTERS]
        cause = PeerError(self._rank, type(error).__name__, text)

        def tell() -> None:
            if self._store.add(f"{self._key}/count", 1) == 1:
                self._store.set(self._key, json.dumps(asdict(cause)))

        _bounded(tell)

    def cause(self, *, wait_seconds: float) -> PeerError | None:
        """Return the error that another rank has reported. Waits up to `wait_seconds` for a
        report."""
        errors: list[PeerError] = []
        end = time.monotonic() + wait_seconds

        def look() -> None:
            while not self._store.check([self._key]):
                if time.monotonic() > end:
                    return
                time.sleep(_LOOK_SECONDS)
            cause = PeerError(**json.loads(self._store.get(self._key)))
            if cause.rank != self._rank:
                errors.append(cause)

        _bounded(look)
        return errors[0] if errors else None


def _bounded(request: Callable[[], None]) -> None:
    def call() -> None:
        with suppress(Exception):
            request()

    thread = threading.Thread(target=call, name="lockstep-first-failure", daemon=True)
    thread.start()
    thread.join(MOST_SECONDS)
