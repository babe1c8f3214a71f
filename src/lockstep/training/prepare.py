"""Builds a model and its optimizers from their factories, as a `TrainModule` on this rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from lockstep.base.errors import RecipeError
from lockstep.data.generators import seed_generators
from lockstep.keys import RandomStream, key
from lockstep.model.consistency import check_checksums
from lockstep.model.expert.routers import RoutedLayer
from lockstep.model.initialization.initial_model import InitialModel
from lockstep.model.parallelize import Parallelized, parallelize
from lockstep.model.sync_batchnorm import SyncBatchNormExchange, use_exchange
from lockstep.recipe.balance import Balance
from lockstep.recipe.checks import check_factory
from lockstep.recipe.recipe import Weights
from lockstep.recipe.sequence import Sequence as RecipeSequence
from lockstep.training import precision
from lockstep.training.balance import balance_experts, check_balance, routed_layers
from lockstep.training.context import Context
from lockstep.training.optim import optimizers as optim
from lockstep.training.optim.element_wise import needing_whole_tensors
from lockstep.training.optim.modes import has_modes
from lockstep.training.optim.optimizers import check_closures
from lockstep.training.optim.whole_tensors import WholeTensorOptimizer
from lockstep.training.pretrained import PretrainedWeights
from lockstep.training.reducers.gradient_hooks import carried_over
from lockstep.training.set_up import check_sequence
from lockstep.training.train_module import TrainModule
from lockstep.training.training import Training


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """Arguments of `Recipe` for parallelizing the model."""

    blocks: Sequence[str] | None = None
    tensor: Mapping[str, str] | None = None
    stages: Sequence[str] | None = None
    sequence: RecipeSequence | None = None
    head: str | None = None
    experts: Sequence[str] | None = None
    balance: Balance | None = None


class ParallelModel(NamedTuple):
    built: InitialModel
    parallel: Parallelized
    pretrained: PretrainedWeights | None
    routed: Sequence[RoutedLayer]


def build_model(
    context: Context,
    factory: Callable[[], Any],
    options: ModelOptions,
    *,
    number: int,
    exchange: SyncBatchNormExchange,
    weights: Weights | None,
) -> ParallelModel:
    """Build the model. The names of pretrained `weights` are matched, but the weights are not
    loaded. Every rank must call this function."""
    mesh = context.mesh
    check_sequence(context.plan, options.sequence)

    def changed_factory() -> Any:
        model = factory()
        if context.overrides.change_model is not None:
            context.overrides.change_model(model)
        return model

    model_key = key(context.seed, RandomStream.MODEL, number)
    built = InitialModel.build(
        changed_factory, model_key, mesh, without_values=context.overrides.without_values
    )
    model = built.module
    optim.check_reducible(model, optim.trainable(model), bitwise=context.bitwise)
    pretrained = None if weights is None else PretrainedWeights.of(weights, model, context.world)
    if pretrained is not None:
        built.given = frozenset(pretrained.theirs)
    if built.deferred is None and context.plan.split == 1:
        model.to(context.device)
    model.train()
    use_exchange(model, exchange)
    balance = options.balance
    routed = [] if balance is None else routed_layers(model, balance, options.experts)
    with carried_over(model, context.plan):
        parallel = parallelize(
            built,
            mesh,
            context.plan,
            autocast_dtype=precision.AUTOCAST.get(context.precision),
            begin=partial(seed_generators, device=context.device),
            blocks=options.blocks,
            tensor=options.tensor,
            stages=options.stages,
            sequence=options.sequence,
            head=options.head,
            experts=options.experts,
            exchange=exchange,
        )
    check_checksums(built.checksums, context.world)
    return ParallelModel(built, parallel, pretrained, routed)


def prepare(
    training: Training,
    factory: Callable[[], Any],
    build_optimizer: Callable[[Any], Any],
    options: ModelOptions,
    *,
    schedule: Callable[[Any], Any] | None,
    weights: Weights | None,
) -> TrainModule:
    """Every rank must call this function."""
    check_factory(
        "session.prepare(build_model)",
        factory,
        remedy="session.prepare(lambda: Net(), build_optimizer)",
    )
    remedy = "session.prepare(..., lambda model: torch.optim.AdamW(model.parameters()))"
    check_factory("session.prepare(build_optimizer)", build_optimizer, remedy=remedy)
    context = training.context
    if training.modules and context.plan.divides("layers"):
        raise RecipeError(
            f"a second session.prepare with pipeline={context.plan.pipeline}; a pipeline computes"
            " one model's stages; use another plan, or make the two one model"
        )
    inputs = None if training.run.recipe is None else training.run.recipe.inputs
    if options.balance is not None:
        check_balance(options.balance, context.plan, inputs, others=training.balances)
    made = build_model(
        context,
        factory,
        options,
        number=len(training.modules),
        exchange=training.exchange,
        weights=weights,
    )
    model, parallel = made.built.module, made.parallel
    if made.built.reason is not None:
        training.run.event("model-built-whole", reason=made.built.reason)
    if parallel.whole_experts:
        training.run.event(
            "experts-whole",
            modules=list(parallel.whole_experts),
            reason="the axis expert divides experts, not tensor",
        )
    if parallel.eager_experts:
        training.run.event(
            "experts-eager",
            modules=list(parallel.eager_experts),
            reason="in a faster implementation, the bits of a row depend on the other rows",
        )
    if made.pretrained is not None:
        training.run.event("weights-loaded", **made.pretrained.fill(model, context.world))
        if context.overrides.change_loaded is not None:
            context.overrides.change_loaded(model)

    optimizers, steppers = _build_optimizers(training, build_optimizer, model, parallel)
    module = TrainModule(
        model,
        optim.trainable(model),
        optimizers,
        parallel=parallel,
        context=context,
        schedule=schedule,
        steppers=steppers,
    )
    if options.balance is not None:
        stages = None if parallel.pipeline is None else parallel.pipeline.stages
        module.balance = balance_experts(
            model, options.balance, made.routed, context.mesh, inputs, stages
        )
        module.balance.check_recomputation(context.recompute_every)
        module.executor.recorder = module.balance.recorder
        training.run.include("balance", module.balance)
    training.modules.append(module)
    return module


def _build_optimizers(
    training: Training,
    build_optimizer: Callable[[Any], Any],
    model: nn.Module,
    parallel: Parallelized,
) -> tuple[list[Optimizer], dict[int, Callable[[], None]]]:
    context = training.context

    def build() -> tuple[list[Optimizer], list[Optimizer]]:
        built = optim.build_optimizers(
            build_optimizer, model, in_part=parallel.pipeline is not None
        )
        for optimizer in filter(has_modes, built):
            optimizer.train()  # type: ignore[attr-defined]  # `has_modes`
        check_closures(
            built,
            context.plan,
            precision=context.precision,
            gradient_compression=context.gradient_compression,
        )
        return built, needing_whole_tensors(built, context.plan)

    optimizers, whole = (
        build() if parallel.pipeline is None else parallel.pipeline.raise_on_all_ranks(build)
    )
    for optimizer in whole:
        training.run.event(
            "optimizer-on-whole-tensors",
            optimizer=type(optimizer).__name__,
            reason="it is not element-wise, and tensors are sharded",
        )
    if context.bitwise and optim.unfuse(optimizers):
        training.run.event(
            "optimizer-not-fused",
            reason="a fused kernel rounds differently on a shard than on the full tensor",
        )
    for optimizer in optimizers:
        optim.separate_meshes(optimizer)
        optim.allocate_state(optimizer)
    return optimizers, {
        id(optimizer): WholeTensorOptimizer(optimizer, context.mesh.parts).step
        for optimizer in whole
    }
