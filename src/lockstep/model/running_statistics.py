"""Makes a model's buffers, such as BatchNorm's running statistics, independent of the assignment of
microbatches to ranks.

A microbatch changes a running statistic r to keep * r + gain. Every rank gathers (keep, gain) of
all microbatches and applies them in the order of microbatches. The vectors of `spectral_norm` and
the codes of a vector quantizer are self-updating buffers. Self-updating buffers are updated once a
step, from the first microbatch.

Changes of buffers that are neither running statistics nor self-updating are refused. A change that
increases the tensor's version is refused at once. A change through `.data` is refused only in steps
that compare the bits of buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm

from lockstep.assignment import MicrobatchAssignment
from lockstep.base.errors import RecipeError
from lockstep.base.torch_private import BatchNormBase, forward_pre_hooks, own_buffers, versions
from lockstep.comm.gather import in_order
from lockstep.comm.mesh import Mesh, to_local
from lockstep.comm.world import World

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(slots=True)
class _ScratchBuffers:
    """The buffers of one BatchNorm module, and their replacements during a microbatch."""

    module: BatchNormBase
    kept: dict[str, Tensor]
    taken: dict[str, Tensor]

    @classmethod
    def of(cls, module: BatchNormBase) -> _ScratchBuffers:
        kept = {
            name: buffer for name in BUFFERS if (buffer := own_buffers(module)[name]) is not None
        }
        scratch = cls(module, kept, {})
        scratch.renew()
        return scratch

    def renew(self) -> None:
        """Autograd has saved the old scratch buffers, so they cannot be zeroed in place."""
        self.taken = {name: torch.zeros_like(buffer) for name, buffer in self.kept.items()}

    def swap_in(self, module: nn.Module, _: Any) -> None:
        if module.training:
            own_buffers(module).update(self.taken)

    def swap_out(self, module: nn.Module, _: Any, __: Any) -> None:
        own_buffers(module).update(self.kept)

    def row(self) -> Tensor:
        """Return the microbatch's update as a float64 tensor: keep, number of forwards of the
        layer, gain of each mean, gain of each variance."""
        calls = self.taken["num_batches_tracked"].double()
        momentum = self.module.momentum
        gains = torch.cat([self.taken["running_mean"], self.taken["running_var"]]).double()
        if momentum is None:
            gains = gains * calls
        keep = torch.ones_like(calls) if momentum is None else (1.0 - momentum) ** calls
        self.renew()
        return torch.cat([torch.stack([keep, calls]), gains])

    def apply(self, rows: Tensor, gate: Tensor | None) -> None:
        """Apply the rows of a layer's updates in order, one for each microbatch. A `gate` of False
        changes nothing."""
        mean, variance = self.kept["running_mean"], self.kept["running_var"]
        rows, gate = rows.to(mean.device), gate if gate is None else gate.to(mean.device)
        running = torch.cat([mean, variance]).double()
        tracked, before = self.kept["num_batches_tracked"], running
        for row in rows:
            keep, calls, gain = row[0], row[1], row[2:]
            if self.module.momentum is None:
                seen = tracked.double()
                running = torch.where(
                    calls > 0, (running * seen + gain) / (seen + calls).clamp(min=1), running
                )
            else:
                running = keep * running + gain
            tracked += (calls if gate is None else calls * gate).to(tracked.dtype)
        if gate is not None:
            running = torch.where(gate, running, before)
        mean.copy_(running[: len(mean)])
        variance.copy_(running[len(mean) :])


class RunningStatistics:
    """Updates one model's buffers once a step, with equal values on all ranks. Every rank must call
    `begin` before a step, `note_microbatch` after each forward, and `commit` at the end."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._data = mesh.data
        self._scratches = [
            _ScratchBuffers.of(module)
            for module in model.modules()
            if isinstance(module, BatchNormBase) and module.running_mean is not None
        ]
        self._hooks = []
        for scratch in self._scratches:
            self._hooks += [
                scratch.module.register_forward_pre_hook(scratch.swap_in),
                scratch.module.register_forward_hook(scratch.swap_out, always_call=True),
            ]
        self._rows: list[Tensor] = []
        self._updating = [
            SelfUpdatingBuffers(prefix, module, names)
            for prefix, module in model.named_modules()
            if (names := self_updating(module))
        ]
        self._hooks += [hook for updating in self._updating for hook in updating.hooks]
        handled = [each.kept for each in self._scratches] + [each.kept for each in self._updating]
        ours = {id(buffer) for kept in handled for buffer in kept.values()}
        self._others = {
            name: buffer for name, buffer in model.named_buffers() if id(buffer) not in ours
        }
        self._places = {
            name: (own, key)
            for prefix, module in model.named_modules()
            for own in (own_buffers(module),)
            for key in own
            if (name := f"{prefix}.{key}" if prefix else key) in self._others
        }
        named = dict(model.named_parameters())
        self._watched = [*self._others.values(), *named.values()]
        self._names = [
            *(f"buffer {name!r}" for name in self._others),
            *(f"parameter {name!r}" for name in named),
        ]
        self._world = mesh.world
        self._compares = self._world.any(bool(self._others or self._updating))
        self.begin(compare=False)

    @property
    def updates(self) -> bool:
        return bool(self._scratches or self._updating)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def begin(self, *, compare: bool) -> None:
        """With `compare`, `check` also finds changes that leave a tensor's version counter
        unchanged."""
        if self._others:  # a buffer may have been replaced since the last step
            self._others |= {
                name: buffer
                for name, (own, key) in self._places.items()
                if (buffer := own.get(key)) is not None
            }
            self._watched[: len(self._others)] = self._others.values()
        self._versions = versions(self._watched)
        self._bits = (
            {name: _bits(buffer) for name, buffer in self._others.items()} if compare else {}
        )
        for updating in self._updating:
            updating.begin()
        self.discard()

    def note_microbatch(self) -> None:
        """Record the buffer updates of the forward that has just ended."""
        if self._scratches:
            rows = [scratch.row().to(self._world.device) for scratch in self._scratches]
            self._rows.append(torch.cat(rows))
        for updating in self._updating:
            updating.note_microbatch()

    def discard(self) -> None:
        """Discard the buffer updates of recomputations in the backward, and of forwards for another
        model."""
        for scratch in self._scratches:
            scratch.renew()
        for updating in self._updating:
            updating.discard()

    def check(self, *, compare: bool) -> None:
        """Raise if a forward has changed a tensor that it must not change. If `compare` is True,
        every rank must call this method, and all ranks raise."""
        changed = self._changed()
        if compare and self._compares:
            flag = torch.tensor([changed is not None])
            if self._world.gather_rows(flag, [1] * self._world.size).any():
                everyone = self._world.gather_values(changed)
                changed = next(each for each in everyone if each is not None)
        if changed is not None and changed.startswith("shape"):
            raise RecipeError(
                f"the model's forward changed the {changed}; a buffer in self_updating_buffers "
                "keeps its shape, which all ranks know; if the first forward sets it, run the "
                "model once on an example in its factory; if it grows, register its largest size, "
                "and count the rows in use in another buffer"
            )
        if changed is not None:
            is_buffer = changed.startswith("buffer")
            where = "forward" if is_buffer else "forward, or a hook of its backward,"
            raise RecipeError(
                f"the model's {where} changed its {changed}; microbatches are computed on different"
                " ranks, so it would depend on the number of processes; update it outside the"
                " forward, between steps, in a hook's after_step for instance; or name a buffer in"
                " self_updating_buffers of its module, which updates it once a step, from the"
                " first microbatch"
            )

    def _changed(self) -> str | None:
        if (found := versions(self._watched)) != self._versions:
            pairs = zip(self._names, found, self._versions, strict=True)
            return next(name for name, now, then in pairs if now != then)
        for name, (own, key) in self._places.items():
            if own.get(key) is not self._others[name]:
                return f"buffer {name!r}"
        for name, bits in self._bits.items():
            if not torch.equal(bits, _bits(self._others[name])):
                return f"buffer {name!r}"
        return next(filter(None, (updating.reshaped() for updating in self._updating)), None)

    def commit(self, assignment: MicrobatchAssignment, count: int, *, apply: bool | Tensor) -> None:
        """Every rank must call this method. `apply` is False if the optimizer's step was skipped.
        `apply` is a scalar bool tensor if only the GPU knows the answer."""
        for updating in self._updating:
            updating.commit(assignment, self._data, count, apply=apply)
        if not self._scratches:
            return
        widths = [2 + 2 * len(scratch.kept["running_mean"]) for scratch in self._scratches]
        if self._rows:
            mine = torch.stack(self._rows)
        else:
            mine = torch.zeros((0, sum(widths)), dtype=torch.float64, device=self._world.device)
        self._rows = []
        # all slices of a microbatch (SyncBatchNorm) have the same update: take that of the first
        everyone = in_order(mine, count, assignment, self._data)[:: assignment.slices or 1]
        if apply is not False:
            parts = torch.split(everyone, widths, dim=1)
            for scratch, rows in zip(self._scratches, parts, strict=True):
                scratch.apply(rows, None if apply is True else apply)


def _bits(tensor: Tensor) -> Tensor:
    part = to_local(tensor)
    if part.layout != torch.strided or part.is_quantized:
        return torch.empty(0, dtype=torch.uint8)
    dense = part.detach().resolve_conj().resolve_neg()
    return dense.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


ATTRIBUTE = "self_updating_buffers"
"""The name of an attribute of a module or its class. The attribute lists the buffers that the
forward updates."""


def self_updating(module: nn.Module) -> Sequence[str]:
    names = list(getattr(module, ATTRIBUTE, ()))
    # the module that torch.nn.utils.parametrizations.spectral_norm makes
    if type(module).__name__ == "_SpectralNorm":
        # for a weight with one dim, the module has no such buffers
        names += [name for name in ("_u", "_v") if own_buffers(module).get(name) is not None]
    for hook in forward_pre_hooks(module):
        if isinstance(hook, SpectralNorm):  # the hook that torch.nn.utils.spectral_norm makes
            names += [f"{hook.name}_u", f"{hook.name}_v"]
    for name in names:
        if own_buffers(module).get(name) is None:
            raise RecipeError(
                f"{type(module).__name__}.{ATTRIBUTE} names {name!r}, which is not one of its"
                " buffers; name buffers that it registers"
            )
    return names


class SelfUpdatingBuffers:
    """The buffers that the forward of one module updates. Each microbatch's forward changes copies
    of the values from before the step. The first microbatch's copies become the new values."""

    def __init__(self, prefix: str, module: nn.Module, names: Sequence[str]) -> None:
        self._prefix = f"{prefix}." if prefix else ""
        self.kept: dict[str, Tensor] = {
            name: buffer for name in names if (buffer := own_buffers(module)[name]) is not None
        }
        self._first: dict[str, Tensor] | None = None
        self.discard()
        # Runs before spectral_norm's hook, which updates its buffers.
        self.hooks = [
            module.register_forward_pre_hook(self._swap_in, prepend=True),
            module.register_forward_hook(self._swap_out, always_call=True),
        ]

    def discard(self) -> None:
        self._taken: dict[str, Tensor] | None = None

    def begin(self) -> None:
        self._first = None
        self.discard()

    def note_microbatch(self) -> None:
        """Note the updates of this rank's first microbatch in the step, and ignore later
        microbatches."""
        if self._first is None and self._taken is not None:
            self._first = self._taken
        self.discard()

    def reshaped(self) -> str | None:
        for name, updated in (self._first or {}).items():
            if updated.shape != self.kept[name].shape:
                return (
                    f"shape of its buffer {self._prefix + name!r} from"
                    f" {tuple(self.kept[name].shape)} to {tuple(updated.shape)}"
                )
        return None

    def commit(
        self, assignment: MicrobatchAssignment, data: World, count: int, *, apply: bool | Tensor
    ) -> None:
        """Every rank must call this method. `apply` is False if the optimizer's step was skipped.
        `apply` is a bool tensor if the GPU decides whether the step is skipped."""
        by_rank = assignment.indices_by_rank(count)
        owner = next(rank for rank, indices in enumerate(by_rank) if 0 in indices)
        for name, buffer in self.kept.items():
            if self._first is None:
                updated = buffer.clone()
            else:
                updated = self._first[name].to(buffer.dtype).contiguous()
            data.broadcast(updated, owner)
            if isinstance(apply, Tensor):
                updated = torch.where(apply.to(buffer.device), updated, buffer)
            if apply is not False:
                buffer.copy_(updated)
        self._first = None

    def _swap_in(self, module: nn.Module, _: Any) -> None:
        if module.training:
            if self._taken is None:
                self._taken = {name: buffer.clone() for name, buffer in self.kept.items()}
            own_buffers(module).update(self._taken)

    def _swap_out(self, module: nn.Module, _: Any, __: Any) -> None:
        if self._taken is not None and module.training:
            self._taken = {name: own_buffers(module)[name] for name in self.kept}  # type: ignore[misc]  # the forward may replace them
        own_buffers(module).update(self.kept)
