"""The loop behind `Session.steps`: its setup, and the calls before and after each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, default_collate

from lockstep.assignment import MicrobatchAssignment
from lockstep.base import accelerator
from lockstep.base.errors import DataError, LossError, RecipeError
from lockstep.data.digests import (
    Digests,
    changing,
    check_same_samples,
    check_unchanged,
    counting,
    not_compared,
)
from lockstep.data.loader import Loader, StreamLoader
from lockstep.data.sampled_order import PURE, BatchOrder, SampledOrder, SampleOrder, order_of
from lockstep.model.pipeline.stages import check_microbatches
from lockstep.model.sync_batchnorm import split_microbatches
from lockstep.plan import Plan
from lockstep.recipe.checks import check_batch, check_drop_last, check_length
from lockstep.recipe.data import Stream, check_data, check_dataset, check_samplers
from lockstep.recipe.parameters import declared
from lockstep.recipe.recipe import Evaluation, Recipe
from lockstep.training.microbatches import (
    Batching,
    Microbatches,
    count_steps,
    from_data,
    from_indices,
    from_stream,
    positions_in,
)
from lockstep.training.set_up import (
    Remark,
    batchnorm,
    check_assignment,
    check_microbatch_is_fixed,
    check_no_auto,
    fixed_assignment,
    idle_ranks,
    refuse_single_samples,
)
from lockstep.training.step import Step
from lockstep.training.training import Training

NUMBERS = ("global_batch", "microbatch", "steps", "epochs", "drop_last")
"""Arguments of `Session.steps` that a resumed run must not change."""
SETTINGS = ("seed", "precision", "gradient_compression")
"""Arguments of `Session` that a resumed run must not change."""


@dataclass(slots=True)
class LoopOptions:
    """The arguments of `Session.steps`."""

    data: Any
    global_batch: int | None
    microbatch: int | None
    steps: int | None
    epochs: int | None
    drop_last: bool
    collate: Callable[[list[Any]], Any] | None
    weight: Callable[[Any], Any] | None
    sampler: Callable[[int, int], Any] | None
    batch_sampler: Callable[[int, int], Any] | None

    def __post_init__(self) -> None:
        if isinstance(self.data, DataLoader) and (
            self.sampler is not None or self.batch_sampler is not None
        ):
            if self.collate is None and self.data.collate_fn is not default_collate:
                self.collate = self.data.collate_fn
            self.data = self.data.dataset


def set_up_loop(training: Training, options: LoopOptions) -> Batching:
    """Every rank must call this function."""
    plan, data, mesh = training.context.plan, options.data, training.context.mesh
    _check_options(plan, options)
    if not training.modules:
        raise RecipeError(
            "session.steps before session.prepare; a step needs a model and an optimizer; call"
            " prepare first"
        )
    microbatch, order = _microbatch(training, options), _order(training, options)
    samples = 0 if data is None or isinstance(data, Stream) else _length(order, data)
    if options.global_batch is not None:
        check_drop_last(options.drop_last, options.epochs, samples, options.global_batch)
        check_microbatch_is_fixed(plan, options.global_batch, microbatch)
    largest = (
        max(order.sizes)
        if isinstance(order, BatchOrder)
        else microbatch or options.global_batch or 0
    )
    models = [module.model for module in training.modules]
    equal = MicrobatchAssignment(plan.data_ranks, plan.has_rounds)
    assignment = split_microbatches(models, mesh, plan, equal, microbatch=largest)
    check_assignment(
        plan,
        assignment,
        is_stream=isinstance(data, Stream),
        microbatch_is_fixed=microbatch is not None or isinstance(order, BatchOrder),
    )
    _check_stream_and_slices(training, data, assignment)
    assignment = replace(assignment, speeds=training.speeds)
    training.exchange.world = mesh.data if assignment.slices else None
    training.run.global_batch, training.run.microbatch = options.global_batch or 0, microbatch
    batching = Batching(
        samples=samples or options.global_batch or 0,
        global_batch=options.global_batch,
        microbatch=microbatch,
        steps=options.steps,
        epochs=options.epochs,
        drop_last=options.drop_last,
        mesh=mesh,
        assignment=assignment,
        microbatch_splits=plan.microbatch_splits,
        order=order,
        seed=training.context.seed,
        recompute_every=training.context.recompute_every,
    )
    training.epoch_of = None if data is None or isinstance(data, Stream) else batching.epoch
    training.run.total_steps = batching.steps
    if (pipeline := training.modules[0].parallel.pipeline) is not None:
        pipeline.forwards.exchange = training.exchange if assignment.slices else None
        rounds = [
            len(assignment.with_dummies(batching.max_microbatches, rank))
            for rank in range(assignment.ranks)
        ]
        check_microbatches(min(rounds), pipeline.stages)
    for module in training.modules:
        module.begin_loop(batching.max_microbatches)
    return batching


def _check_options(plan: Plan, options: LoopOptions) -> None:
    data, global_batch, microbatch = options.data, options.global_batch, options.microbatch
    check_no_auto(plan, microbatch)
    check_samplers(options.sampler, options.batch_sampler, data, global_batch, microbatch)
    check_length(options.steps, options.epochs)
    if global_batch is None:
        check_dataset("data", data)
        return
    check_batch(global_batch, microbatch)
    if data is not None:
        check_data(
            "data", data, global_batch=global_batch, microbatch=microbatch, epochs=options.epochs
        )


def _check_stream_and_slices(
    training: Training, data: Any, assignment: MicrobatchAssignment
) -> None:
    is_stream, ranks = isinstance(data, Stream), training.context.mesh.data.size
    if is_stream and (every := training.context.recompute_every):
        raise RecipeError(
            f"--recompute-every {every} with an ls.Stream; a process reads its own shards alone, so"
            " it has no microbatch of another one; use a map-style dataset, or leave"
            " --recompute-every out"
        )
    if is_stream and assignment.slices:
        raise RecipeError(
            f"SyncBatchNorm on {ranks} data ranks with an ls.Stream; it splits each microbatch over"
            " the ranks, and only one of them reads its shard; use plain BatchNorm, with statistics"
            " of one microbatch, or a map-style dataset"
        )
    if assignment.slices and any(each.balance.is_of_microbatches for each in training.balances):
        raise RecipeError(
            f"SyncBatchNorm on {ranks} data ranks with Balance(over='microbatch'); it splits each"
            " microbatch over the ranks, so a rank knows the load of its slice alone; choose"
            " over='step', or plain BatchNorm, with statistics of one microbatch"
        )


def _describe(training: Training, options: LoopOptions) -> None:
    """Record the settings that a resumed run must not change."""
    context = training.context
    settings: dict[str, Any] = {"parameters": dict(declared.values)} if declared.values else {}
    settings |= {
        "seed": context.seed,
        "precision": context.precision,
        "gradient_compression": context.requested_compression,
    }
    context.recorder.describe(
        {**settings, **{name: getattr(options, name) for name in NUMBERS}, **(context.recipe or {})}
    )


def report_layout(training: Training, options: LoopOptions, batching: Batching) -> None:
    if training.run.recipe is None:
        _describe(training, options)
    models = [module.model for module in training.modules]
    refuse_single_samples(models, batching)
    for remark in (
        batchnorm(models, batching),
        idle_ranks(batching),
        fixed_assignment(training.context.plan, batching),
    ):
        if remark is not None:
            training.remark(remark)
    for number, module in enumerate(training.modules):
        training.run.event(
            "gradient-reducer",
            model=number,
            reducer=module.choice.reducer.__name__,
            reason=module.choice.reason,
        )


def report_kernels(training: Training) -> None:
    for number, module in enumerate(training.modules):
        cut = module.parallel.cut
        if cut is not None and cut.hides_tokens and not cut.kernels.is_reported:
            cut.kernels.is_reported = True
            training.run.event("attention-kernel", model=number, kernels=cut.kernels.details())


def _order(training: Training, options: LoopOptions) -> SampleOrder | None:
    """Every rank must call this function."""
    if options.sampler is None and options.batch_sampler is None:
        return None
    order = order_of(
        options.sampler,
        options.batch_sampler,
        seed=training.context.seed,
        samples=len(options.data),
    )
    assert order is not None, "one of the two is given"
    first, *others = training.context.world.gather_values(order.digest)
    for rank, other in enumerate(others, start=1):
        if other != first:
            raise DataError(
                f"the sampler returned other indices for epoch 0 on rank {rank} than on rank 0;"
                f" {PURE}"
            )
    return order


def order_and_samples(recipe: Recipe) -> tuple[SampleOrder | None, int]:
    """Return the sampler's order (None without a sampler) and the number of samples (0 for a
    stream)."""
    if isinstance(recipe.data, Stream):
        return None, 0
    order = order_of(
        recipe.sampler, recipe.batch_sampler, seed=recipe.seed, samples=len(recipe.data)
    )
    return order, _length(order, recipe.data)


def total_steps_of(recipe: Recipe) -> int:
    order, samples = order_and_samples(recipe)
    return count_steps(
        order,
        samples=samples,
        global_batch=recipe.global_batch,
        steps=recipe.steps,
        epochs=recipe.epochs,
        drop_last=recipe.drop_last,
    )


def interval_of(recipe: Recipe, evaluation: Evaluation) -> int | None:
    """Return the number of steps between two evaluations. None if the number varies, or if the
    evaluation runs only at the end."""
    if evaluation.every != "epoch":
        return evaluation.every
    order, samples = order_and_samples(recipe)
    whole = isinstance(order, BatchOrder) or recipe.epochs is not None
    if not whole and samples % (recipe.global_batch or 1):
        return None
    return count_steps(
        order,
        samples=samples,
        global_batch=recipe.global_batch,
        steps=None,
        epochs=1,
        drop_last=recipe.drop_last,
    )


def _length(order: SampleOrder | None, data: Any) -> int:
    return order.stride if isinstance(order, SampledOrder) else len(data)


def _microbatch(training: Training, options: LoopOptions) -> int | None:
    override = training.context.overrides.microbatch
    if override is None or override == options.microbatch:
        return options.microbatch
    if options.batch_sampler is not None:
        raise RecipeError(
            f"microbatch={override} with a batch_sampler, which makes the microbatches; leave them"
            " as they are"
        )
    if isinstance(options.data, Stream):
        raise RecipeError(
            f"microbatch={override} instead of {options.microbatch} with an ls.Stream; other"
            " microbatches read from other shards, and so contain other samples; leave the"
            " microbatch as it is"
        )
    return override


def microbatches_of_steps(
    training: Training,
    options: LoopOptions,
    batching: Batching,
    first: int,
    close: Callable[[Callable[[], object]], object],
) -> Iterator[Microbatches]:
    context, data = training.context, options.data
    if context.overrides.left_out is not None and (data is None or isinstance(data, Stream)):
        raise DataError(
            "a sample to leave out, but the data is not a dataset; only the samples of a dataset"
            " have an index; replay the step with all samples"
        )
    if data is None:
        return from_indices(batching, first=first)
    how: dict[str, Any] = {
        "workers": int(context.plan.workers),
        "prefetch": int(context.plan.prefetch),
        "collate": options.collate,
        "seed": context.seed,
        "device": context.device,
    }
    if isinstance(data, Stream):
        streamed = StreamLoader(data, **how)
        close(streamed.close)
        compare_data(training, "data", streamed.digests(), is_trained_on=True)
        positions = (
            positions_in(training.loop.resumed, data)
            if training.loop.resumed is not None and first
            else {}
        )
        return from_stream(streamed, batching, first=first, positions=positions)
    # limit how far ahead the loader requests, because a new assignment applies only to later steps
    if context.plan.assignment == "measured":
        how["ahead"] = max(1, training.run.global_batch // context.mesh.data.size)
    left_out = context.overrides.left_out
    loader = Loader(data, order=batching.order, left_out=left_out, **how)
    close(loader.close)
    compare_data(training, "data", loader.digests(), is_trained_on=True)
    training.loop.digest = None if how["workers"] else partial(loader.digests, again=False)
    return from_data(loader, batching, first=first, left_out=left_out)


def compare_data(
    training: Training, name: str, digests: Digests, *, is_trained_on: bool = False
) -> None:
    """Compare samples of a dataset between ranks. Training data is also compared with the resumed
    run's. Every rank must call this function."""
    everyone = [
        Digests(**theirs) for theirs in training.context.world.gather_values(asdict(digests))
    ]
    reason = changing(name, everyone)
    check_same_samples(name, everyone, lengths_only=reason is not None)
    if (unread := not_compared(name, everyone)) is not None:
        training.run.event("data-not-compared", parts=unread)
    if reason is None and is_trained_on:
        now = training.loop.data[str(training.loop.loops)] = next(
            (dict(theirs.samples) for theirs in everyone if theirs.samples), {}
        )
        if training.loop.resumed is not None:
            check_unchanged(
                name, training.loop.resumed["data"].get(str(training.loop.loops), {}), now
            )
    for text, remedy in (
        (reason, "; draw from these generators"),
        (counting(name, everyone), ""),
    ):
        if text is not None and training.context.bitwise:
            raise DataError(f"{text}{remedy}, or drop numerics=bitwise")
        if text is not None:
            training.remark(Remark("data-not-reproducible", {"reason": text}, f"warning: {text}"))


def steps(
    training: Training,
    batches: Iterator[Microbatches],
    *,
    total: int,
    weight: Callable[[Any], Any] | None,
) -> Iterator[Step]:
    context, terms = training.context, None
    context.recorder.show(total)
    training.hooks.call("before_steps", training.run)
    for module in training.modules:
        module.snapshot.begin_loop(training.context.world)
        module.gradient_hooks.begin_loop(training.context.world)
    keeps = len(training.modules) > 1 or any(module.needs_closure for module in training.modules)
    training.statistics = [
        statistics for module in training.modules for statistics in module.statistics
    ]
    streams = [(number, module.parallel.streams) for number, module in enumerate(training.modules)]
    training.streams = [
        (number, each) for number, each in streams if each is not None and each.are_several
    ]
    for source in batches:  # `Step.batches` fetches each batch, in the phase "data"
        context.phases.step = source.step
        training.run.is_logging_step = (
            source.step + 1
        ) % context.log_every == 0 or source.step + 1 == total
        # fetch nothing before this: the `before_step` hooks may change the dataset
        training.begin_step(source)
        if weight is not None:
            before = context.phases.enter("exchange", interrupts=True)
            terms = source.weigh(weight, terms)
            context.phases.enter(before)
            for name, divisor in (source.weights or {}).items():
                if not divisor:
                    training.run.event("term-without-weight", source.step, term=name)
        if keeps:
            source.keep()
        step = Step(source, training)
        context.phases.enter("compute")
        yield step
        if not step.is_complete:
            raise LossError(
                f"after step {step.index}: the step ended with {len(step.committed)} of"
                f" {len(training.modules)} prepared models committed; call step.commit(optimizer)"
                " for each on every rank, in every step, or step.skip(optimizer) for one that is"
                " not to change"
            )
        context.phases.enter("hooks")
        report_kernels(training)
        training.hooks.call("after_step", training.run)
        context.phases.enter("between steps")
        training.end_step(source)
        # wait now, because the hooks read the step's results from the device
        if training.run.is_logging_step and accelerator.has_streams(context.device):
            with context.phases.waiting_for_device():
                accelerator.current_stream(context.device).synchronize()
        training.hooks.call("between_steps", training.run)
        training.agree()
        if training.stopping is not None:
            training.run.event("stopped", reason=training.stopping)
            break
    training.hooks.call("after_steps", training.run)
