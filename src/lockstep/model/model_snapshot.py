"""A snapshot of the structure of a model and its optimizers, to detect changes between two
steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lockstep.base.errors import RecipeError, first_few
from lockstep.base.torch_private import is_distributed, own_modules, own_parameters, storage_address
from lockstep.comm.world import World
from lockstep.model.shard import reshard


class ModelSnapshot:
    """The modules, modes, parameters, trainable flags and parameter groups at one step. A change
    between steps on one rank only would silently change that rank's gradients."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._optimizers = optimizers
        named = dict(model.named_modules())
        self._names = list(named)
        self._modules = list(named.values())
        self._modes = [module.training for module in self._modules]
        # the modules' own dicts, which are cheap to read and always current
        self._owned: list[dict[str, Any]] = [
            dictionary
            for module in self._modules
            for dictionary in (own_modules(module), own_parameters(module))
        ]
        self._members = self._members_now()
        parameters = dict(model.named_parameters())
        self._parameter_names = list(parameters)
        self._parameters = list(parameters.values())
        self._trainable = [parameter.requires_grad for parameter in self._parameters]
        self._grouped = self._grouped_now()
        self._sharded = {
            name: parameter for name, parameter in parameters.items() if is_distributed(parameter)
        }
        self._storages = self._storages_now()

    def begin_loop(self, world: World) -> None:
        """Every rank must call this method. All ranks raise if a module has different modes on two
        ranks."""
        self._modes = [module.training for module in self._modules]
        evaluating = [
            name for name, training in zip(self._names, self._modes, strict=True) if not training
        ]
        first, *others = world.gather_values(evaluating)
        for rank, other in enumerate(others, start=1):
            if other != first:
                name = min(set(first) ^ set(other))
                raise RecipeError(
                    f"module {name!r} is in {_mode(name not in first)} mode on rank 0 and in "
                    f"{_mode(name not in other)} mode on rank {rank}; all ranks compute parts of "
                    "one batch in one mode; call train() or eval() on every rank"
                )

    def check(self) -> list[str]:
        """Restore the modes, and return the names of modules whose mode had changed."""
        self.check_parts()
        trainable = [parameter.requires_grad for parameter in self._parameters]
        if trainable != self._trainable:
            before = zip(self._parameter_names, trainable, self._trainable, strict=True)
            name, now, then = next(each for each in before if each[1] is not each[2])
            raise RecipeError(
                f"parameter {name!r} has requires_grad={now} and had {then} when the model was "
                "prepared, or after run.freeze; ranks sum the gradients of the parameters that "
                "were trainable then; "
                "call run.freeze(name) or run.unfreeze(name) in a hook, on every rank"
            )
        if [module.training for module in self._modules] == self._modes:
            return []
        return self._restore_modes()

    def check_parts(self) -> None:
        if self._members_now() != self._members:
            # a forward of the script may have left parameters gathered
            reshard(self._model)
            if self._members_now() != self._members:
                raise RecipeError(
                    f"{self._replaced()} was replaced after the model was prepared; ranks sum the "
                    "gradients of the parameters that the model had then; make the final model in "
                    "its factory, and change values in place: with torch.no_grad(): "
                    "parameter.copy_(value)"
                )
        if (storages := self._storages_now()) != self._storages:
            pairs = zip(self._sharded, storages, self._storages, strict=True)
            name = next(name for name, now, then in pairs if now != then)
            raise RecipeError(
                f"parameter {name!r} was given other values by parameter.data = value, which has "
                "no effect: the plan splits the parameter over ranks, and each rank trains its "
                "old part; change values in place: with torch.no_grad(): parameter.copy_(other), "
                "where other is a parameter too, or "
                "parameter.copy_(torch.distributed.tensor.distribute_tensor(value, "
                "parameter.device_mesh, parameter.placements)), where value is a whole tensor"
            )
        if (grouped := self._grouped_now()) != self._grouped:
            raise RecipeError(
                f"the optimizer has {sum(map(len, grouped))} parameters in {len(grouped)} groups, "
                f"and had {sum(map(len, self._grouped))} in {len(self._grouped)} when it was "
                "built; ranks sum only the gradients of those; give it all parameters "
                "where it is built; to train some later, call run.freeze and run.unfreeze in a "
                "hook"
            )

    def note_trainable(self) -> None:
        """Accept the present set of trainable parameters, for example after `run.freeze`."""
        self._trainable = [parameter.requires_grad for parameter in self._parameters]

    def _restore_modes(self) -> list[str]:
        changed = []
        for name, module, training in zip(self._names, self._modules, self._modes, strict=True):
            if module.training is not training:
                module.training = training
                changed.append(name)
        return changed

    def _members_now(self) -> list[int]:
        return list(map(id, chain.from_iterable(map(dict.values, self._owned))))

    def _storages_now(self) -> list[int]:
        return [storage_address(each.untyped_storage()) for each in self._sharded.values()]

    def _grouped_now(self) -> list[list[int]]:
        return [
            list(map(id, group["params"]))
            for optimizer in self._optimizers
            for group in optimizer.param_groups
        ]

    def _replaced(self) -> str:
        then = iter(self._members)
        for name, module in zip(self._names, self._modules, strict=True):
            owned: dict[str, dict[str, Any]] = {
                "module": own_modules(module),
                "parameter": own_parameters(module),
            }
            for kind, own in owned.items():
                for key, member in own.items():
                    if next(then, None) != id(member):
                        return f"{kind} {f'{name}.{key}'.lstrip('.')!r}"
        return "a module or a parameter"


def remark_on_modes(changed: Sequence[str], step: int) -> str:
    what = "the model" if "" in changed else first_few([repr(name) for name in changed])
    return (
        f"after step {step}, set back the mode (training or evaluation) of {what}, which changed "
        "after the step before; a hook that calls eval() must call train() at its end; to train "
        "in another mode, set it before the first step"
    )


def _mode(training: bool) -> str:
    return "training" if training else "evaluation"
