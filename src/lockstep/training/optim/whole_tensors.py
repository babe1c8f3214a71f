"""Steps an optimizer that needs full tensors, such as Muon, on sharded parameters. Every rank
all-gathers each parameter, its gradient and its optimizer state. One rank, the owner, updates the
tensor and broadcasts the result."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.base.dtypes import tensor_spec, torch_dtype
from lockstep.base.errors import CheckpointError
from lockstep.checkpoint.json_state import decode, encode
from lockstep.comm.mesh import full_tensor, shard_as, to_local
from lockstep.comm.world import World
from lockstep.training.optim.gradient_norm import balanced_assignment
from lockstep.training.optim.operands import with_alignment

_STATE = "state"
_REMEDY = (
    "under shard and expert one rank updates each tensor and sends its state to the other ranks;"
    " use replicate"
)


class WholeTensorOptimizer:
    """Replaces `optimizer.step()` if parameters are sharded over the ranks of `world`."""

    def __init__(self, optimizer: Optimizer, world: World) -> None:
        self._optimizer = optimizer
        self._world = world
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        owners = balanced_assignment(tuple(map(Tensor.numel, parameters)), world.size)
        self._owners = dict(zip(map(id, parameters), owners, strict=True))

    def step(self) -> None:
        """Every rank must call this method."""
        optimizer = self._optimizer
        updated = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        copied: Optimizer = object.__new__(type(optimizer))
        vars(copied).update(vars(optimizer))
        copied.state = defaultdict(dict)
        whole = {
            id(parameter): mine
            for parameter in updated
            if (mine := self._gathered(parameter, copied)) is not None
        }
        copied.param_groups = [
            {
                **group,
                "params": [
                    whole[id(parameter)] for parameter in group["params"] if id(parameter) in whole
                ],
            }
            for group in optimizer.param_groups
        ]
        copied.step()
        for group, changed in zip(optimizer.param_groups, copied.param_groups, strict=True):
            group.update({name: value for name, value in changed.items() if name != "params"})
        own = ("state", "param_groups")
        vars(optimizer).update(
            {name: value for name, value in vars(copied).items() if name not in own}
        )
        for parameter in updated:
            self._distribute(parameter, whole.get(id(parameter)), copied)

    def _gathered(self, parameter: nn.Parameter, copied: Optimizer) -> nn.Parameter | None:
        """Return the full parameter on its owner, with its state in `copied`. Return None if this
        rank is not the owner."""
        assert parameter.grad is not None
        gradient, value = full_tensor(parameter.grad), full_tensor(parameter.detach())
        state = self._optimizer.state.get(parameter, {})
        gathered = {
            name: full_tensor(state[name]) if isinstance(state[name], Tensor) else state[name]
            for name in sorted(state)
        }
        if self._owners[id(parameter)] != self._world.rank:
            return None
        mine = nn.Parameter(value.clone())
        mine.grad = with_alignment(gradient)
        copied.state[mine] = {
            name: each.clone() if isinstance(each, Tensor) else each
            for name, each in gathered.items()
        }
        return mine

    def _distribute(
        self, parameter: nn.Parameter, mine: nn.Parameter | None, copied: Optimizer
    ) -> None:
        """Broadcast an updated parameter and its state from the owner."""
        owner = self._owners[id(parameter)]
        to_local(parameter.detach()).copy_(
            self._shard(parameter, None if mine is None else mine.detach(), owner)
        )
        tensors: dict[str, Tensor] = {}
        encoded, failure = None, None
        if mine is not None:
            try:
                encoded = encode(copied.state[mine], _STATE, tensors, _REMEDY)
            except CheckpointError as error:
                failure = str(error)
        kinds = {name: tensor_spec(tensor) for name, tensor in tensors.items()}
        encoded, kinds, failure = self._world.value_of(owner, [encoded, kinds, failure])
        if failure is not None:
            raise CheckpointError(
                f"{type(self._optimizer).__name__} with tensors divided over"
                f" {self._world.size} ranks: {failure}"
            )
        state = self._optimizer.state[parameter]
        received: dict[str, Tensor] = {}
        for name, (dtype, shape) in kinds.items():
            now, value = state.get(name.removeprefix(f"{_STATE}/")), tensors.get(name)
            if shape != list(parameter.shape) or name.count("/") > 1:
                received[name] = self._received(value, shape, torch_dtype(dtype), owner)
                continue
            received[name] = (
                now
                if isinstance(now, Tensor)
                else torch.zeros_like(parameter.detach(), dtype=torch_dtype(dtype))
            )
            to_local(received[name]).copy_(self._shard(received[name], value, owner))
        state.update(decode(encoded, received.__getitem__))

    def _shard(self, like: Tensor, value: Tensor | None, owner: int) -> Tensor:
        return shard_as(like, self._received(value, list(like.shape), like.dtype, owner))

    def _received(
        self, value: Tensor | None, shape: list[int], dtype: torch.dtype, owner: int
    ) -> Tensor:
        received = (
            torch.empty(shape, dtype=dtype, device=self._world.device)
            if value is None
            else value.to(self._world.device).contiguous()
        )
        self._world.broadcast(received, owner)
        return received
