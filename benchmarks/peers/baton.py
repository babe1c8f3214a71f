"""A contender's side of taking turns: it runs until its turn ends, reports the time, and waits for
its next turn."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Baton:
    """A process's baton. The process calls `saw` for each microbatch and `step` after each
    optimizer step."""

    def __init__(self, address: str, accumulated: int) -> None:
        """`address`: the conductor's Unix socket. `accumulated`: microbatches per step in this
        process."""
        self._address = address
        self._accumulated = accumulated
        self._channel: Any = None
        self._losses: list[Tensor] = []
        self._steps = 0
        self._until = 1

    def saw(self, loss: Tensor) -> Tensor:
        """Note a microbatch's loss and return it. Its value is read only after the last turn."""
        self._losses.append(loss.detach())
        return loss

    def step(self) -> None:
        """Note the end of an optimizer step. At the end of a turn it returns when the next turn
        begins."""
        self._steps += 1
        if self._steps == self._until:
            self._hand_over()

    def _hand_over(self) -> None:
        if self._channel is None:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(self._address)
            self._channel = connection.makefile("rw")
            self._say(
                rank=dist.get_rank() if dist.is_initialized() else 0,
                threads=torch.get_num_threads(),
            )
        else:
            self._say(processor=time.process_time() - self._processor)
        self._until = self._steps + int(self._channel.readline())
        if self._until == self._steps:
            self._say(
                losses=torch.stack(self._losses)
                .double()
                .view(self._steps, self._accumulated)
                .mean(1)
                .tolist()
            )
        self._processor = time.process_time()

    def _say(self, **what: Any) -> None:
        self._channel.write(json.dumps(what) + "\n")
        self._channel.flush()
