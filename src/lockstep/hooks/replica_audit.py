"""The hook that compares parameters and optimizer states of replicas, and states of users' hooks,
by checksums. The comparison finds flipped bits, and models that a script has changed on some ranks
only."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.base.contents import attributes, variables_of
from lockstep.base.errors import CheckpointError, DivergenceError, first_few
from lockstep.base.torch_private import MODULE_ATTRIBUTES, RECURRENT_CACHES, tree_leaves, version
from lockstep.checkpoint.json_state import encode
from lockstep.comm.mesh import to_local
from lockstep.comm.world import World
from lockstep.hooks.loop_variables import LoopVariables
from lockstep.training.checksum import checksum, checksums, mixed
from lockstep.training.hook import ControlHook, Hook
from lockstep.training.optim.optimizer_state import overrides_state_dict
from lockstep.training.run import Run
from lockstep.training.set_up import Remark
from lockstep.training.state import Stateful, extra_state, state_of


class ReplicaAudit(ControlHook):
    """Compares the ranks that hold copies of the same part of a parameter or optimizer state."""

    def __init__(self, *, every: int, hooks: Sequence[Hook]) -> None:
        """`every` is the number of steps between comparisons. 0 disables the comparisons."""
        self._every = every
        self._unsaved = UnsavedState(hooks)
        self._agreed = 0  # steps done at the last comparison

    def on_start(self, run: Run) -> None:
        self._unsaved.begin(run)

    def between_steps(self, run: Run) -> None:
        if self._every and run.step % self._every == 0:
            self.compare(run)

    def compare(self, run: Run) -> None:
        """Raise `DivergenceError` on every rank if replicas differ. Every rank must call this
        method."""
        self._unsaved.tell(run)
        mesh = run.context.mesh
        for module in run.training.modules:
            if module.left_out is not None:
                module.left_out.agree(mesh.world)
        if not self._every or self._agreed == run.step:
            return
        _compare_hooks(run)
        if mesh.world.size > 1:
            state = state_of(run.training.modules, {}).tensors
            copies: dict[World, dict[str, Tensor]] = {}
            for name, tensor in state.items():
                copies.setdefault(mesh.copies(tensor), {})[name] = to_local(tensor)
            for replicas, tensors in copies.items():
                if replicas.size > 1:
                    self._compare(run.step, mesh.world, replicas, tensors)
        self._agreed = run.step

    def _compare(
        self, step: int, world: World, replicas: World, tensors: Mapping[str, Tensor]
    ) -> None:
        sums = checksums(list(tensors.values()))
        everyone = replicas.gather_rows(mixed(sums).reshape(1), [1] * replicas.size)
        differs = bool((everyone != everyone[0]).any())
        if world.any(differs):
            raise DivergenceError(
                self._message(step, world, replicas, list(tensors), sums, differs)
            )

    def _message(
        self,
        step: int,
        world: World,
        replicas: World,
        names: Sequence[str],
        sums: Tensor,
        differs: bool,
    ) -> str:
        everyone = replicas.gather_rows(sums.reshape(1, -1), [1] * replicas.size)
        ranks = replicas.gather_values(world.rank)
        by_rank = dict(zip(ranks, everyone.tolist(), strict=True))
        mine = replica_difference(names, by_rank) if differs else ""
        difference = next(filter(None, world.gather_values(mine)))
        return (
            f"replicas differ after step {step}, and were the same after step {self._agreed}:"
            f" {difference}; a bit of memory has flipped, or a machine computes wrong results, or a"
            " script changed the model on some ranks only; replicas are compared before each save:"
            " the same command resumes from the last one; leave out a machine that is named again"
        )


def _compare_hooks(run: Run) -> None:
    """Compare the states of hooks, of objects given to `session.include`, and extra states of
    modules."""
    others: dict[str, Callable[[], Any]] = {
        name: other.state_dict
        for name, other in run.training.stateful.items()
        if other is not run.training
    }
    for number, module in enumerate(run.training.modules):
        others[f"get_extra_state of model {number}"] = partial(extra_state, module.model)
    if run.context.world.size == 1:
        return
    # in a pipeline, a stage has the state of its own part of the model
    stage = run.context.mesh.stages.rank
    everyone = run.context.world.gather_values(
        [stage, {name: _digest(name, other) for name, other in others.items()}]
    )
    firsts: dict[int, int] = {}
    for rank, (stage, digests) in enumerate(everyone):
        first = firsts.setdefault(stage, rank)
        if name := next(
            (name for name in others if digests[name] != everyone[first][1][name]), None
        ):
            raise CheckpointError(
                f"after step {run.step}: the state of {name!r} differs between rank {first} and"
                f" rank {rank}; a checkpoint has one state for all ranks; change it only by values"
                " that are the same on all ranks (run.loss, metrics, the model's parameters,"
                " session.gather(rows)), not by a rank's own microbatches"
            )


def _digest(name: str, read: Callable[[], Any]) -> str:
    """Hash a state without its sharded tensors. Returns "" for a state that cannot be saved, which
    the next save reports."""
    tensors: dict[str, Tensor] = {}
    try:
        encoded = encode(read(), name, tensors)
    except CheckpointError:
        return ""
    whole = {path: tensor for path, tensor in tensors.items() if to_local(tensor) is tensor}
    sums = [int(checksum(tensor).item()) for tensor in whole.values()]
    return hashlib.sha256(json.dumps([encoded, sums], sort_keys=True).encode()).hexdigest()


def replica_difference(names: Sequence[str], sums: Mapping[int, Sequence[int]]) -> str:
    """Name the ranks that differ from the majority, and the first differing tensor. Returns "" if
    all ranks agree. `sums` has the checksum of each tensor, by rank."""
    columns = zip(names, zip(*sums.values(), strict=True), strict=True)
    different = [(name, column) for name, column in columns if len(set(column)) > 1]
    if not different:
        return ""
    name, column = different[0]
    usual, most = Counter(column).most_common(1)[0]
    others = [str(rank) for rank, value in zip(sums, column, strict=True) if value != usual]
    if 2 * most <= len(sums):
        who = f"ranks {', '.join(map(str, sums))} have {len(set(column))} different values of"
    elif len(others) == 1:
        who = f"rank {others[0]} differs from the others in"
    else:
        who = f"ranks {', '.join(others)} differ from the others in"
    several = len(different)
    return f"{who} {name}" + (f", the first of {several} tensors" if several > 1 else "")


# name of an attribute -> for each number, text or tensor in it: its value, or a tensor's id and
# version counter
Versions = dict[str, list[Any]]

_SAVED = MODULE_ATTRIBUTES | RECURRENT_CACHES | {"state", "param_groups"}


class UnsavedState:
    """Warns, once in a run, of attributes of modules, optimizers and hooks that have changed but
    that checkpoints do not save."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self._hooks = [hook for hook in hooks if not isinstance(hook, Stateful)]
        self._saved_hooks = [hook for hook in hooks if isinstance(hook, Stateful)]
        self._at_start: dict[int, Versions] = {}
        # variables of the script's own loop; None with a recipe
        self._variables: LoopVariables | None = None

    def begin(self, run: Run) -> None:
        models = _ids_of(run)
        if run.recipe is None:
            self._variables = LoopVariables(models | self._saved(run))
        self._at_start = {id(hook): _tensor_versions(hook, models) for hook in self._hooks}
        self._at_start |= {id(owner): _versions(owner, models) for _, owner in _owners(run)}

    def _saved(self, run: Run) -> set[int]:
        groups = [
            each.param_groups for module in run.training.modules for each in module.optimizers
        ]
        values = (*run.training.stateful.values(), *map(attributes, run.training.stateful.values()))
        tensors = [
            tensor for leaf in tree_leaves([*values, *groups]) for tensor in _tensors_of(leaf)
        ]
        for hook in self._saved_hooks:
            tensors += chain(*_tensors_by_name(hook).values())
        return set(map(id, tensors))

    def tell(self, run: Run) -> None:
        if not self._at_start:
            return
        models = _ids_of(run)
        for hook in self._hooks:
            if changed := self._changed(hook, _tensor_versions(hook, models)):
                kind = type(hook).__name__
                line = (
                    f"warning: hook {kind} changes its tensors ({', '.join(changed)}), and has no"
                    " state_dict: they are not saved, and a resumed run would begin with others;"
                    " give it state_dict and load_state_dict"
                )
                details = {"hook": kind, "attributes": changed}
                run.training.remark(Remark("hook-state-not-saved", details, line))
        found = [
            f"{name}.{each}"
            for name, owner in _owners(run)
            for each in self._changed(owner, _versions(owner, models))
        ]
        if found:
            line = (
                "warning: attributes of the model or an optimizer change, and no checkpoint holds"
                f" them: {first_few(found)}; unless each step sets them anew, a resumed run goes on"
                " with other values; keep them in buffers, in get_extra_state and set_extra_state,"
                " or in the optimizer's state"
            )
            run.training.remark(Remark("attributes-not-saved", {"attributes": found}, line))
        if self._variables is not None and (names := self._variables.changed()):
            line = (
                f"warning: the script changes {first_few(names)} in its loop, and no checkpoint"
                " holds them: unless each step sets them anew, a resumed run goes on with other"
                " values; before session.steps, include each:"
                f" session.include({names[0]!r}, {names[0]}); a tensor has to be in an object with"
                " state_dict and load_state_dict, such as a buffer of a module; what an optimizer"
                " trains belongs into session.prepare"
            )
            run.training.remark(Remark("variables-not-saved", {"variables": names}, line))
        self._at_start, self._variables = {}, None

    def _changed(self, owner: object, now: Versions) -> list[str]:
        before = self._at_start.get(id(owner), {})
        defaults = [name for name in now if name not in before and hasattr(type(owner), name)]
        marks: Versions = {**before, **{name: [] for name in defaults}}
        return [name for name, each in marks.items() if now.get(name) != each]


def _owners(run: Run) -> Iterator[tuple[str, nn.Module | Optimizer]]:
    for module in run.training.modules:
        for name, part in module.model.named_modules():
            if type(part).get_extra_state is nn.Module.get_extra_state:
                yield name or type(part).__name__, part
        yield from (
            (type(each).__name__, each)
            for each in module.optimizers
            if not overrides_state_dict(each)
            and not type(each).__module__.startswith("torch.optim.")
        )


def _versions(owner: nn.Module | Optimizer, models: set[int]) -> Versions:
    return {
        name: _marks(value, models) for name, value in vars(owner).items() if name not in _SAVED
    }


def _marks(value: Any, models: set[int]) -> list[Any]:
    leaves = tree_leaves(value)
    plain = [leaf for leaf in leaves if isinstance(leaf, int | float | str)]
    tensors = [
        leaf
        for leaf in leaves
        if isinstance(leaf, Tensor) and leaf.grad_fn is None and id(leaf) not in models
    ]
    return [*plain, *((id(tensor), version(tensor)) for tensor in tensors)]


def _tensor_versions(hook: Hook, models: set[int]) -> Versions:
    versions: Versions = {}
    for name, tensors in _tensors_by_name(hook).items():
        if own := [tensor for tensor in tensors if id(tensor) not in models]:
            versions[name] = [(id(tensor), version(tensor)) for tensor in own]
    return versions


def _tensors_by_name(hook: Hook) -> dict[str, list[Tensor]]:
    methods = [
        inspect.unwrap(method)  # without decorators such as `torch.no_grad()`
        for kind in type(hook).__mro__
        if issubclass(kind, Hook) and not kind.__module__.startswith("lockstep.")
        for method in vars(kind).values()
        if isinstance(method, FunctionType)
    ]
    around = [item for method in methods for item in variables_of(method).items()]
    return {
        name: [tensor for leaf in tree_leaves(value) for tensor in _tensors_of(leaf)]
        for name, value in (*around, *vars(hook).items())
    }


def _ids_of(run: Run) -> set[int]:
    return {id(tensor) for module in run.training.modules for tensor in _tensors_of(module.model)}


def _tensors_of(value: object) -> list[Tensor]:
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    return [value] if isinstance(value, Tensor) else []
