"""Writes the trace of a run: summaries of all tensors at each step.

A trace is a folder. A rank writes a file `rank-<rank>.jsonl` with one JSON object per line. The
tensors of the first and the last requested step are saved in
`step-<step>-<kind>-<module>-<rank>.safetensors`. Sketches of the tokens of the first step are saved
in `tokens-<module>-<microbatch>-<rank>.safetensors`, and sketches of layers of experts in
`experts-<module>-<microbatch>-<rank>.safetensors`.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.base import accelerator
from lockstep.base.dtypes import dtype_name
from lockstep.checkpoint.tensor_shards import DTYPES
from lockstep.evidence.rows import RowFile
from lockstep.evidence.sketch import flattened, sketch, token_sketches

NamedTensors = Iterable[tuple[str, Tensor | None]]
"""Yields the names and the full values of tensors, one at a time, because a full model may not fit
into memory. None stands for a missing tensor, such as the gradient of an unused parameter."""


class Tracer:
    """Writes one rank's part of a trace.

    All ranks make the same calls, except for the microbatches. The order is `start` for each model;
    in each step `before_forward` and `microbatch` for each microbatch of the rank, then `gradients`
    and `step`; finally `close`. Ranks that write nothing also iterate over all tensors, because a
    full tensor may need a collective.
    """

    def __init__(
        self,
        folder: Path,
        steps: int | None,
        *,
        rank: int,
        world_size: int,
        plan: str,
        replicated: bool,
        writes: bool,
    ) -> None:
        self._folder = folder
        self._steps = steps
        self._rank = rank
        self._writes_tensors = writes
        self._writes_summaries = replicated or writes
        self._rows = RowFile(folder / f"rank-{rank}.jsonl")
        self._rng_before: str | None = None
        self._generators: list[Callable[[], Tensor]] = [torch.default_generator.get_state]
        self._orders: dict[int, dict[str, None]] = {}
        self._hooks: list[Any] = []
        self._reduced: dict[int, dict[str, Any]] = {}
        if accelerator.is_initialized():
            self._generators.append(
                lambda: accelerator.generator(accelerator.current_device()).get_state()
            )
        self._rows.write(
            "start", rank=rank, world_size=world_size, plan=plan, replicated=replicated
        )

    def metadata(self, **metadata: Any) -> None:
        self._rows.write("metadata", metadata=metadata)

    def start(self, module: int, parameters: NamedTensors, buffers: NamedTensors) -> None:
        row = {"parameters": self._summaries(parameters), "buffers": self._summaries(buffers)}
        if self._writes_summaries:
            self._rows.write("initial", module=module, **row)

    def watch(self, module: int, parameters: Iterable[tuple[str, Tensor]]) -> None:
        order = self._orders.setdefault(module, {})
        for name, parameter in parameters:
            self._hooks.append(parameter.register_hook(lambda _, name=name: order.setdefault(name)))  # type: ignore[no-untyped-call]

    def before_forward(self) -> None:
        self._rng_before = self._rng_state()

    def microbatch(
        self,
        module: int,
        step: int,
        index: int,
        samples: Sequence[int | str],
        batch: Mapping[str, str],
        gradients: NamedTensors | None,
        *,
        together: Sequence[int] = (),
        loads: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Write a microbatch after its forward. `gradients` is the term of the microbatch in the
        step's gradients."""
        row: dict[str, Any] = {} if gradients is None else {"gradients": self._summaries(gradients)}
        row |= {"together": list(together)} if together else {}
        row |= {"loads": dict(loads)} if loads else {}
        rng = {"rng_before": self._rng_before, "rng_after": self._rng_state()}
        self._rows.write(
            "microbatch",
            module=module,
            step=step,
            index=index,
            samples=list(samples),
            batch=batch,
            **rng,
            **row,
        )

    def tokens(
        self,
        module: int,
        index: int,
        *,
        places: Tensor,
        documents: Tensor | None,
        **tensors: Tensor,
    ) -> None:
        """Write sketches of `tensors` of shape (samples, tokens, ...). `places` has the index of
        each token in the sequence."""
        path = self._folder / f"tokens-{module}-{index}-{self._rank}.safetensors"
        with tensor_file(path) as add:
            add("places", places)
            if documents is not None:
                add("documents", documents)
            for name, tensor in tensors.items():
                add(name, token_sketches(tensor))

    def experts(self, module: int, index: int, layers: Mapping[str, tuple[Tensor, ...]]) -> None:
        """Write each layer's tokens (tokens, features), chosen experts (tokens, k) and output
        (tokens, features)."""
        path = self._folder / f"experts-{module}-{index}-{self._rank}.safetensors"
        with tensor_file(path) as add:
            for name, (tokens, choices, output) in layers.items():
                add(f"{name}/choices", choices)
                add(f"{name}/tokens", token_sketches(tokens[None])[0])
                add(f"{name}/output", token_sketches(output[None])[0])

    def gradients(
        self, module: int, step: int, gradients: NamedTensors, *, gain: float = 1.0
    ) -> None:
        """Write the reduced gradients. `gain` is the factor of the gradients relative to the sum
        over the microbatches."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        saved = self._saved(module, step, "gradients", gradients)
        self._reduced[module] = {"gain": gain, "gradients": saved}

    def step(
        self,
        module: int,
        step: int,
        *,
        parameters: NamedTensors,
        buffers: NamedTensors,
        states: NamedTensors,
        terms: Mapping[str, float] | None = None,
        **scalars: float | None,
    ) -> bool:
        """Write a step after its update. Return True after the last requested step."""
        row: dict[str, Any] = {
            name: value if name == "loss" or value is None or math.isfinite(value) else None
            for name, value in scalars.items()
        }
        row |= {"terms": dict(terms)} if terms else {}
        row |= self._reduced.pop(module) | {"gradient_order": list(self._orders.pop(module, {}))}
        row["parameters"] = self._saved(module, step, "parameters", parameters)
        row |= {"buffers": self._summaries(buffers), "states": self._summaries(states)}
        if self._writes_summaries:
            self._rows.write("step", module=module, step=step, **row)
        return self._is_last(step)

    def logged(self, step: int, values: Mapping[str, float]) -> None:
        if self._rank == 0:
            self._rows.write("logged", module=0, step=step, values=dict(values))

    def close(self) -> None:
        self._rows.close()

    def _rng_state(self) -> str:
        states = b"".join(state().numpy().tobytes() for state in self._generators)
        return hashlib.sha256(states).hexdigest()[:16]

    def _is_last(self, step: int) -> bool:
        return self._steps is not None and step + 1 >= self._steps

    def _saved(self, module: int, step: int, kind: str, tensors: NamedTensors) -> dict[str, Any]:
        if not (self._writes_tensors and (step == 0 or self._is_last(step))):
            return self._summaries(tensors)
        name = f"step-{step:05d}-{kind}-{module}-{self._rank}.safetensors"
        with tensor_file(self._folder / name) as add:
            return self._summaries(tensors, add)

    def _summaries(
        self, tensors: NamedTensors, save: Callable[[str, Tensor], None] = lambda name, tensor: None
    ) -> dict[str, Any]:
        summaries: dict[str, Any] = {}
        for name, tensor in tensors:
            if self._writes_summaries:
                summaries[name] = None if tensor is None else summarize_tensor(name, tensor)
                if tensor is not None:
                    save(name, tensor)
        return summaries


def summarize_tensor(name: str, tensor: Tensor) -> dict[str, Any]:
    """Return the summary of a tensor for JSON. Only summaries with the same `name` can be
    compared."""
    flat = flattened(tensor)
    return {
        "sha256": hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest(),
        "elements": len(flat),
        "dtype": dtype_name(tensor.dtype),
        "sketch": sketch(tensor, name=name),
    }


@contextmanager
def tensor_file(path: Path) -> Iterator[Callable[[str, Tensor], None]]:
    """Yield a function that adds a tensor to a new safetensors file. Dtypes that numpy lacks become
    float32."""
    header: dict[str, Any] = {}
    # the file begins with a header that lists all tensors
    with TemporaryFile(dir=path.parent) as data:

        def add(name: str, tensor: Tensor) -> None:
            flat = flattened(tensor)
            if not hasattr(np, dtype_name(flat.dtype)):
                flat = flat.to(torch.float32)
            start, shape = data.tell(), [*tensor.shape, *([2] if tensor.is_complex() else [])]
            data.write(flat.numpy().data)
            header[name] = {
                "dtype": DTYPES[dtype_name(flat.dtype)],
                "shape": shape,
                "data_offsets": [start, data.tell()],
            }

        yield add
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        data.seek(0)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            shutil.copyfileobj(data, file)
