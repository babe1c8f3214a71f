"""The trace of a run: what each step came to, tensor by tensor, so that two runs can be compared step by step and name by name.

A trace is a folder. Each rank that writes has a file `rank-<rank>.jsonl`, one JSON object a line, told apart by its `kind`:

=========== ==========================================================================================================================
start       rank, world_size, plan, whole; once
facts       JSON values about the model and the recipe, for whoever looks for causes
initial     pair; the parameters and buffers before the first step
microbatch  pair, step, index, samples, generator, left; with the gradients of this microbatch alone where a rank has whole parameters
step        pair, step, loss, weight, norm, lr, gain, order; gradients as summed, before clipping; parameters, buffers and optimizer
            states after the update
=========== ==========================================================================================================================

Of each tensor a line has its `mark`: SHA-256 of its bytes, norm, number of elements, dtype and a fixed random projection, in which the
distance between two tensors can be seen without either: the mean square of the differences is an unbiased estimate of the squared distance,
and sums stay sums. In the first step and the last that was asked for, the tensors are written too, to
`step-<step>-<kind>-<pair>-<rank>.safetensors`: by rank 0 where every rank has them all.

Tensors are taken one at a time from an iterator, so nobody holds a model that does not fit.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from lockstep.keys import GOLDEN, MIX_FIRST, MIX_SECOND
from lockstep.verify.trace_request import Tracing

PROJECTIONS = 8
_PIECE = 1 << 18
_SIGN = np.uint64(1 << 63)
_SAFETENSORS = {
    "float64": "F64",
    "float32": "F32",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}

Named = Iterable[tuple[str, Tensor | None]]
"""Names and whole tensors. None: there is no such tensor, as for the gradient of a parameter that nobody used."""


class Tracer:
    """Writes one rank's part of a trace. `Session` makes one where `Tracing.read` finds that it is asked for, `Step` calls it.

    Calls come in this order: `start` for each pair; then in each step `generator` and `microbatch` for each of this rank's microbatches,
    `gradients`, `applied`; `close`.

    Every rank makes the same calls but for the microbatches; an iterator is run through on ranks that do not write too,
    since gathering a tensor may take all ranks.
    """

    def __init__(self, tracing: Tracing, *, rank: int, world_size: int, plan: str, whole: bool, writes: bool | None = None) -> None:
        """`whole`: every rank holds the whole model (`replicate`), and writes it, so that ranks are compared. Else the ranks that write
        have the model between them: `writes`, one of each pipeline stage, or None, rank 0 alone."""
        self._tracing = tracing
        self._rank = rank
        self._keeps = rank == 0 if whole else writes if writes is not None else rank == 0
        self._lines = (tracing.folder / f"rank-{rank}.jsonl").open("w", encoding="utf-8")
        self._gathered = not (whole or self._keeps)
        self._generator: str | None = None
        self._drawn_from: list[Callable[[], Tensor]] = [torch.default_generator.get_state]
        self._orders: dict[int, list[str]] = {}
        self._hooks: list[Any] = []
        self._half: dict[int, dict[str, Any]] = {}
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._drawn_from.append(torch.cuda.get_rng_state)
        self._write("start", {"rank": rank, "world_size": world_size, "plan": plan, "whole": whole})

    def facts(self, **facts: Any) -> None:
        """JSON values about the model and the recipe, by name; may be called at any time, and again."""
        self._write("facts", {"facts": facts})

    def start(self, pair: int, parameters: Named, buffers: Named) -> None:
        """A pair as it is before its first step."""
        marks = {"parameters": self._marks(parameters), "buffers": self._marks(buffers)}
        if not self._gathered:
            self._write("initial", {"pair": pair} | marks)

    def watch(self, pair: int, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Note in which order the first backward completes the gradients of these parameters."""
        order = self._orders.setdefault(pair, [])
        for name, parameter in parameters:
            self._hooks.append(parameter.register_hook(_noted(name, order)))  # type: ignore[no-untyped-call]

    def generator(self) -> None:
        """Right before the forward of a microbatch: note the state of the default generators."""
        self._generator = self._state()

    def microbatch(self, pair: int, step: int, index: int, samples: Sequence[int | str], gradients: Named | None) -> None:
        """After a microbatch's forward. `gradients`: its own, as they enter the sum. None: no rank has them whole."""
        row: dict[str, Any] = {"pair": pair, "step": step, "index": index, "samples": list(samples)}
        row |= {"generator": self._generator, "left": self._state()}
        self._write("microbatch", row | ({} if gradients is None else {"gradients": self._marks(gradients)}))

    def gradients(self, pair: int, step: int, gradients: Named, *, gain: float = 1.0) -> None:
        """After the reduction, before clipping. `gain`: what the sum over the microbatches has been multiplied by."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._half[pair] = {"gain": gain, "gradients": self._taken(pair, step, "gradients", gradients)}

    def applied(
        self,
        pair: int,
        step: int,
        *,
        loss: float,
        weight: float | None,
        norm: float | None,
        lr: float | None,
        parameters: Named,
        buffers: Named,
        states: Named,
    ) -> bool:
        """After the update. `norm`: as it was clipped by; None: nobody clips. `states`: of the optimizers, named parameter/state.

        Returns whether this was the last step that was asked for.
        """
        row: dict[str, Any] = {
            "pair": pair,
            "step": step,
            "loss": _number(loss),
            "weight": _optional(weight),
            "norm": _optional(norm),
            "lr": _optional(lr),
        }
        if step == 0:
            row["order"] = self._orders.get(pair, [])
        row |= self._half.pop(pair)
        row["parameters"] = self._taken(pair, step, "parameters", parameters)
        row["buffers"] = self._marks(buffers)
        row["states"] = self._marks(states)
        if not self._gathered:
            self._write("step", row)
        self._lines.flush()
        return self._is_last(step)

    def close(self) -> None:
        """May be called again."""
        self._lines.close()

    def _state(self) -> str:
        digest = hashlib.sha256()
        for state in self._drawn_from:
            digest.update(state().numpy().data)
        return digest.hexdigest()[:16]

    def _is_last(self, step: int) -> bool:
        return self._tracing.steps is not None and step + 1 >= self._tracing.steps

    def _taken(self, pair: int, step: int, kind: str, tensors: Named) -> dict[str, Any]:
        if not self._keeps or not (step == 0 or self._is_last(step)):
            return self._marks(tensors)
        with TensorFile(self._tracing.folder / f"step-{step:05d}-{kind}-{pair}-{self._rank}.safetensors") as file:
            return self._marks(_copied(tensors, file))

    def _marks(self, tensors: Named) -> dict[str, Any]:
        if self._gathered:
            for _ in tensors:
                pass
            return {}
        return {name: None if tensor is None else mark(name, tensor) for name, tensor in tensors}

    def _write(self, kind: str, row: Mapping[str, Any]) -> None:
        self._lines.write(json.dumps({"kind": kind, **row}, allow_nan=False) + "\n")


def mark(name: str, tensor: Tensor) -> dict[str, Any]:
    """Return the summary of a tensor for the trace. The projection is keyed by `name`: compare summaries of one name only."""
    flat = _flat(tensor)
    digest = hashlib.sha256()
    total = 0.0
    projection = np.zeros(PROJECTIONS)
    start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    for first in range(0, len(flat), _PIECE):
        piece = flat[first : first + _PIECE]
        digest.update(piece.view(torch.uint8).numpy().data)
        values = piece.to(torch.float64).numpy()
        with np.errstate(invalid="ignore"):  # a gradient that overflowed
            projection += project(values, start, first)
        total += float(np.dot(values, values))
    norm = math.sqrt(total) if total >= 0 else math.nan
    return {
        "sha": digest.hexdigest(),
        "norm": _number(norm),
        "count": len(flat),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "projection": [_number(float(value)) for value in projection],
    }


def project(values: np.ndarray[Any, Any], start: int, first: int) -> np.ndarray[Any, Any]:
    """Sums of `values` (float64) under `PROJECTIONS` rows of random signs, a pure function of `start` and of an element's number.

    Element i of `values` is number `first` + i. Its signs are the top bits, highest first, of splitmix64 at that number from `start`.
    """
    state = np.arange(first + 1, first + 1 + len(values), dtype=np.uint64)
    state *= np.uint64(GOLDEN)
    state += np.uint64(start)
    state ^= state >> np.uint64(30)
    state *= np.uint64(MIX_FIRST)
    state ^= state >> np.uint64(27)
    state *= np.uint64(MIX_SECOND)
    state ^= state >> np.uint64(31)
    raw = values.view(np.uint64)
    # Summed row by row, where numpy adds in a tree: a product with a matrix of signs rounds by a hundred times as much, which is more than
    # a float64 run does.
    return np.array([(raw ^ (state << np.uint64(row) & _SIGN)).view(np.float64).sum() for row in range(PROJECTIONS)])


class TensorFile:
    """A safetensors file written a tensor at a time: its header stands first and needs all of them, so the data wait beside it.

    Types that numpy does not have (bfloat16, float8) are written as float32, which holds them exactly. Use it in a `with`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting = path.with_suffix(".data")
        self._header: dict[str, Any] = {}
        self._length = 0

    def __enter__(self) -> TensorFile:
        self._data: IO[bytes] = self._waiting.open("w+b")
        return self

    def add(self, name: str, tensor: Tensor) -> None:
        flat = _flat(tensor)
        kind = str(flat.dtype).removeprefix("torch.")
        if kind not in _SAFETENSORS:
            flat, kind = flat.to(torch.float32), "float32"
        data = flat.numpy().data
        self._header[name] = {
            "dtype": _SAFETENSORS[kind],
            "shape": [*tensor.shape, *([2] if tensor.is_complex() else [])],
            "data_offsets": [self._length, self._length + data.nbytes],
        }
        self._data.write(data)
        self._length += data.nbytes

    def __exit__(self, *_: object) -> None:
        header = json.dumps(self._header).encode()
        header += b" " * (-len(header) % 8)
        self._data.seek(0)
        with self._path.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            shutil.copyfileobj(self._data, file)
        self._data.close()
        self._waiting.unlink()


def _copied(tensors: Named, file: TensorFile) -> Iterator[tuple[str, Tensor | None]]:
    for name, tensor in tensors:
        if tensor is not None:
            file.add(name, tensor)
        yield name, tensor


def _flat(tensor: Tensor) -> Tensor:
    """The elements in row-major order on the CPU, complex ones as pairs; 1-d and contiguous."""
    whole = tensor.detach().resolve_conj().resolve_neg()
    if whole.is_complex():
        whole = torch.view_as_real(whole)
    # A single element may have any stride and be contiguous, and could then not be viewed as bytes.
    return whole.contiguous().cpu().as_strided((whole.numel(),), (1,))


def _noted(name: str, order: list[str]) -> Any:
    def hook(_: Tensor) -> None:
        if name not in order:
            order.append(name)

    return hook


def _number(value: float) -> float | None:
    """JSON has no NaN and no infinity: null stands for them."""
    return value if math.isfinite(value) else None


def _optional(value: float | None) -> float | None:
    return None if value is None else _number(value)
