"""The `expert` axis. Each rank holds some of the experts of each layer, and sends tokens to the
experts of other ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from lockstep.base.errors import PlanError
from lockstep.comm.world import World
from lockstep.model.blocks import is_within
from lockstep.model.expert.dispatch import Dispatch
from lockstep.model.expert.find import Experts
from lockstep.model.expert.layer_calls import LayerCalls
from lockstep.model.expert.leaves import Leaves
from lockstep.model.placement import place_parameters
from lockstep.model.sync_batchnorm import SyncBatchNormExchange


def check_divisible(model: nn.Module, experts: Mapping[str, Experts], ranks: int) -> None:
    if not experts:
        raise PlanError(
            f"expert={ranks}, but the model has no modules of experts; in such a module, dim 0 of"
            " all parameters is the experts, and forward takes tokens (S, D), the chosen experts"
            " (S, k) and their weights (S, k); leave expert out, or name them in Recipe.experts"
        )
    for name, each in experts.items():
        if (said := _other_number(each)) is not None:
            raise PlanError(
                f"expert={ranks}, and {name} has {said} and parameters whose dim 0 is {each.count};"
                " each rank holds a part of dim 0: the experts must be that dim of every parameter;"
                " store them so, as (experts, features, features), or leave expert out"
            )
        if each.count % ranks:
            sizes = [size for size in range(2, each.count + 1) if not each.count % size]
            raise PlanError(
                f"expert={ranks}, and {name} has {each.count} experts; each rank must hold equally"
                f" many; choose expert={' or '.join(map(str, sizes))}"
            )
    owners = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )
    shared = [
        name
        for name, each in experts.items()
        if any(owners[id(parameter)] > 1 for parameter in each.module.parameters())
    ]
    if shared:
        raise PlanError(
            f"expert={ranks}, and {shared[0]} shares a parameter with another module, which would"
            " need all experts; give it parameters of its own, or leave expert out"
        )


def check_parts(shared: Iterable[str], experts: Mapping[str, Experts]) -> None:
    for name, each in experts.items():
        if any(is_within(parameter, name) for parameter in shared):
            raise PlanError(
                f"numerics=bitwise with expert, and several parts of the model have {name}, which"
                f" has {each.count} experts; a parameter that parts share has one gradient in each"
                " part, and divided experts have one for the rows of each rank; give each part"
                " experts of its own, leave Recipe.stages out, or use replicate instead of expert"
            )


def _other_number(experts: Experts) -> str | None:
    numbers = {
        value: f"{name}={value}"
        for module in experts.module.modules()
        for name, value in vars(module).items()
        if type(value) is int and name.endswith("num_experts")
    }
    return None if experts.count in numbers else next(iter(numbers.values()), None)


def divide_experts(
    model: nn.Module,
    experts: Mapping[str, Experts],
    mesh: DeviceMesh,
    world: World,
    exchange: SyncBatchNormExchange,
    *,
    roots: Sequence[str],
    materialize: Callable[[nn.Module], None],
    bitwise: bool,
) -> list[Leaves]:
    """Reduce the modules to this rank's experts, in place. Every rank must call this function
    before FSDP2 shards the model. `materialize` gives values to a module's parameters on the meta
    device. With bitwise numerics, returns each module's `Leaves`."""
    proved: set[tuple[object, ...]] = set()
    leaves: list[Leaves] = []
    layers = []
    names, most = list(experts), max((each.count for each in experts.values()), default=0)
    for place, each in enumerate(experts.values()):
        materialize(each.module)
        for module in each.module.modules():
            place_parameters(module, mesh, lambda _: Shard(0))
        own = Leaves(each.module, world.size) if bitwise else None
        layers.append(Dispatch(names, place, most, each, world, exchange, proved, own))
        layers[-1].install()
        leaves += [] if own is None else [own]
    for root in roots:
        LayerCalls(
            model.get_submodule(root), [each for each in layers if is_within(each.name, root)]
        )
    return leaves


def compute_by_rows(
    experts: Mapping[str, Experts], world: World, exchange: SyncBatchNormExchange
) -> None:
    """Make modules of experts that every rank holds whole compute the same bits as modules that are
    divided over ranks."""
    proved: set[tuple[object, ...]] = set()
    for place, each in enumerate(experts.values()):
        Dispatch(list(experts), place, each.count, each, world, exchange, proved, None).install()


def use_eager(experts: Mapping[str, Experts]) -> list[str]:
    """Make modules of experts of transformers compute one expert after another (the "eager"
    implementation). Return the names of the changed modules. In transformers' faster
    implementations, the bits of a row depend on the other rows."""
    changed = []
    for name, each in experts.items():
        config = getattr(each.module, "config", None)
        if getattr(config, "_experts_implementation", "eager") not in ("eager", None):
            changed.append(name)
    for name in changed:
        experts[name].module.config._experts_implementation = "eager"  # type: ignore[union-attr]
    return changed
