"""What the tests of costs train, and what each rank of it sends and holds. At module level, for
workers."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.comm.mesh import to_local
from lockstep.recipe.checks import Precision

WIDTH, HIDDEN, WORDS, BLOCKS = 48, 192, 480, 4
"""Multiples of 12, so that 2, 3 and 4 ranks cut them evenly."""
EXPERTS, CHOSEN = 4, 2
SAMPLES, LENGTH, MICROBATCHES = 4, 128, 6
STYLES = {"blocks.*.up": "colwise", "blocks.*.gate": "colwise", "blocks.*.down": "rowwise"}
STAGES = ["words", "blocks.*", "head"]
SENT, SENT_AGAIN = 200, 208
"""Where `tcpi_bytes_sent` and `tcpi_bytes_retrans`, both u64, are in Linux's `struct tcp_info`."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = (
            nn.Linear(WIDTH, HIDDEN),
            nn.Linear(WIDTH, HIDDEN),
            nn.Linear(HIDDEN, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)) * self.gate(x))  # type: ignore[no-any-return]


class Model(nn.Module):
    """`words` and `head` are in no block."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class TiedModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.words.weight


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros_like(tokens)
        for expert in range(len(self.up)):
            row, choice = (index == expert).nonzero(as_tuple=True)
            rows = torch.tanh(tokens[row] @ self.up[expert]) @ self.down[expert]
            output = output.index_add(0, row, weights[row, choice, None] * rows)
        return output


class Mixture(nn.Module):
    """Chooses experts evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, CHOSEN)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        index = torch.arange(len(tokens) * CHOSEN).view(-1, CHOSEN) % EXPERTS
        weights = self.router(tokens).softmax(-1)
        return x + self.experts(tokens, index, weights).view_as(x)  # type: ignore[no-any-return]


class MixedModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixture() for _ in range(BLOCKS))


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one rank, in one step."""

    sent: int
    """Bytes."""
    parameters: int
    gradients: int
    optimizer: int
    """Bytes that the rank holds after the step."""
    activations: int
    """The most blocks whose activations it kept at one time, each counted once for each
    microbatch."""
    weights: int
    """The most bytes of blocks' weights that it kept for a backward when it computed a loss."""


class Kept:
    """A tensor that a backward needs. Counts how many of a block's largest ones there are."""

    now = most = 0
    weights: ClassVar[WeakSet[Kept]] = WeakSet()

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # with its graph it would hold itself
        if sorted(tensor.shape) == [WIDTH, HIDDEN]:
            Kept.weights.add(self)
        self.counts = tensor.dim() == 3 and tensor.shape[-1] == HIDDEN
        if self.counts:
            Kept.now += 1
            Kept.most = max(Kept.most, Kept.now)

    def __del__(self) -> None:
        Kept.now -= self.counts


def kept_weights() -> int:
    storages = [to_local(each.tensor).untyped_storage() for each in Kept.weights]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


KEPT_PER_BLOCK = 3
"""The result of tanh, and both factors of the product."""


def bytes_sent() -> int:
    """What this process has sent over the TCP connections that it has open, as the kernel counts
    it."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            descriptor = os.dup(int(name))
        except OSError:
            continue  # the folder's own, which is closed by now
        try:
            connection = socket.socket(fileno=descriptor)
        except OSError:
            os.close(descriptor)
            continue
        with connection:
            if connection.type == socket.SOCK_STREAM and connection.family in (
                socket.AF_INET,
                socket.AF_INET6,
            ):
                said = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                (sent,), (again,) = (
                    struct.unpack_from("Q", said, SENT),
                    struct.unpack_from("Q", said, SENT_AGAIN),
                )
                total += sent - again
    return total


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def cross_entropy(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), batch[0].flatten())


def first(batch: Sequence[Tensor]) -> Tensor:
    return batch[0]


def costs(
    plan: str,
    run_dir: str,
    model: type[Model],
    styles: Mapping[str, str],
    precision: Precision = "fp32",
) -> Costs:
    """Those of a step of `MICROBATCHES` on all ranks together. Not of the first one, in which a
    plan learns shapes."""
    words = torch.randint(
        WORDS, (2 * MICROBATCHES * SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1)
    )
    batches = {"global_batch": MICROBATCHES * SAMPLES, "microbatch": SAMPLES, "steps": 2}
    sent = weights = 0

    def loss(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
        nonlocal weights
        weights = max(weights, kept_weights())
        return cross_entropy(output, batch)

    with ls.Session(run_dir=run_dir, plan=plan, precision=precision) as session:
        made, optimizer = session.prepare(model, adamw, tensor=styles, stages=STAGES)
        for step in session.steps(TensorDataset(words), **batches):
            dist.barrier()
            before = bytes_sent()
            Kept.most = 0
            with saved_tensors_hooks(Kept, lambda kept: kept.tensor):  # type: ignore[no-untyped-call]
                step.compute(first, loss)
            step.commit()
            dist.barrier()
            sent = bytes_sent() - before
        parameters = list(made.parameters())
        state = [
            value for kept in optimizer.state.values() for value in kept.values() if value.dim()
        ]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return Costs(
            sent,
            _bytes(parameters),
            _bytes(gradients),
            _bytes(state),
            -(-Kept.most // KEPT_PER_BLOCK),
            weights,
        )


def _bytes(tensors: Sequence[Any]) -> int:
    return sum(to_local(tensor).nbytes for tensor in tensors)
