"""An optimizer step: accumulates gradients over microbatches, reduces them over ranks, clips them,
and calls the optimizer. The model changes only if the reduced gradient is finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.base.errors import LossError, RecipeError
from lockstep.base.torch_private import version
from lockstep.data.generators import seed_generators
from lockstep.data.loader import Microbatch
from lockstep.keys import RandomStream, key
from lockstep.model.model_snapshot import remark_on_modes
from lockstep.model.shard import reshard
from lockstep.recipe.checks import check_clip_norm
from lockstep.recipe.recipe import Gathered
from lockstep.training.balance import ExpertBalance, Routed, balance_weights, own_weights
from lockstep.training.batch_loss import BatchLoss
from lockstep.training.executor import call_model
from lockstep.training.loss import (
    SINGLE,
    Contribution,
    LossKind,
    Weights,
    contribution,
    counted_labels,
    weighted_unequally,
)
from lockstep.training.microbatches import Microbatches
from lockstep.training.recomputation import Recomputation
from lockstep.training.reducers.ddp import DdpReducer
from lockstep.training.reducers.fsdp import FsdpReducer
from lockstep.training.reducers.microbatch_checksums import MicrobatchChecksums
from lockstep.training.reducers.ordered import OrderedReducer
from lockstep.training.reducers.reducer import RecomputingReducer
from lockstep.training.reducers.rounds import RoundsReducer
from lockstep.training.reducers.step_stats import Number, gradient_versions
from lockstep.training.set_up import Remark
from lockstep.training.step_result import StepResult, as_floats
from lockstep.training.train_module import TrainModule
from lockstep.training.training import Training

NOTHING = nullcontext()


class Step:
    """One optimizer step in progress, the same on all ranks. `Session.steps` yields it. With
    several prepared models, a step accumulates the gradient of one model at a time, from the
    model's first `backward` to its `commit`."""

    def __init__(self, source: Microbatches, training: Training) -> None:
        self.index = source.step
        """Index of the step in its loop, from 0."""
        self.samples = source.samples
        """Number of samples in the global batch."""
        self.count = source.count
        """Number of microbatches in the global batch, over all ranks. The parts of microbatches
        that SyncBatchNorm splits over ranks count separately."""
        self.source = source
        self.weights = source.weights
        self.committed: dict[int, StepResult] = {}
        self.skipped: set[int] = set()
        self._training, self._run = training, training.run
        self._modules = training.modules
        self._statistics = training.statistics
        self._polls = training.context.device.type == "cpu"
        self._compares = self._run.is_logging_step or self.index == 0
        self._phases = training.context.phases
        self._probe = training.context.overrides.probe
        self._computed: tuple[Any, Any] | None = None
        self._is_repeated = False
        """True while an optimizer's closure computes the gradient of the same step again."""
        # with several models, the backward of one may rightly change the gradients of another
        alone = self._compares and len(training.modules) == 1
        self._gradients = training.modules[0].reducer.gradient_versions() if alone else None
        """Version counters of the `.grad` tensors, which detect a `loss.backward()` in the
        script."""
        self._current: Microbatch | None = None
        self._recomputation: Recomputation | None = None
        self._passes = 0
        self._seed_loop()
        self._recomputing: tuple[Microbatch, MicrobatchChecksums] | None = None
        self._waiting: list[tuple[Microbatch, Any, Routed]] | None = None
        """Microbatches whose backward waits until all forwards are computed. None if backwards do
        not wait."""
        self._number = 0
        self._has_begun = False

    def compute(
        self, inputs: Callable[[Any], Any] | None, loss: Callable[[Any, Any], Any] | Gathered
    ) -> None:
        """Compute forward and backward of all microbatches of this rank, in a session with one
        model. Works under every plan. Every rank must call this method.

        `inputs` and `loss` are as in `Recipe`. `loss` may be an `ls.Gathered`, as in
        `Recipe.batch_loss`. Raises `LossError`, `RecipeError`.
        """
        number = self._number_of(None)
        if self._computed is not None:
            raise LossError(
                f"after step {self.index}: a second step.compute; the first computed all"
                " microbatches; let its loss return the sum of both losses, or a dict of terms"
            )
        self._computed = inputs, loss
        self._train(number, inputs, loss)
        self._seed_loop()

    def _train(
        self,
        number: int,
        inputs: Callable[[Any], Any] | None,
        loss: Callable[[Any, Any], Any] | Gathered,
    ) -> None:
        executor = self._modules[number].executor
        if isinstance(loss, Gathered):
            self._refuse_recomputation("a batch_loss", "a loss of each microbatch")
            loss = self._over_batch(self._modules[number], inputs, loss)
        compute = partial(executor.train, self, inputs, loss)
        self._begin(number)
        balance = self._modules[number].balance
        # if ranks recompute each other's microbatches, backwards do not wait for all forwards
        if (
            balance is not None
            and balance.counts_first
            and (self.source.recomputed or not self._hold_backwards())
        ):
            self._count_first(balance, inputs, loss)
        if self.source.recomputed and not self._is_repeated:
            self._recomputation = self._recompute_for_others(compute)
        compute()
        if balance is not None and self._waiting is not None:
            self._release(balance)

    def _recompute_for_others(self, compute: Callable[[], None]) -> Recomputation:
        before = self._phases.enter("data", interrupts=True)
        others = self.source.others()
        self._phases.enter(before)
        again, *third = [partial(self._recompute, item, compute) for item in others]
        return Recomputation(
            self.source.recomputed,
            rank=self._training.context.mesh.data.rank,
            own=MicrobatchChecksums(),
            again=again(),
            decide=third[0] if third else MicrobatchChecksums,
            names=self._module.names_of_leaves,
        )

    def _recompute(
        self, item: Microbatch | None, compute: Callable[[], None]
    ) -> MicrobatchChecksums:
        checksums = MicrobatchChecksums()
        if item is not None:
            self._recomputing = item, checksums
            self._note_gradients()
            compute()
            self._recomputing = None
        return checksums

    def _hold_backwards(self) -> bool:
        """Return True if all forwards run before the first backward. Held backwards keep the
        activations of all microbatches in memory. Hold backwards only if each rank has at most one
        microbatch, or if activation checkpointing keeps only the blocks' inputs. Returns the same
        on every rank."""
        assigned, plan = self.source.layout.assignment, self._training.context.plan
        if plan.divides("layers"):
            return False
        most = max(len(assigned.with_dummies(self.count, rank)) for rank in range(assigned.ranks))
        keeps_inputs = (
            plan.checkpointing == "full"
            and not plan.divides("parameters")
            and not any(statistics.updates for statistics in self._statistics)
        )
        if most > 1 and not keeps_inputs:
            return False
        self._waiting = []
        return True

    def _count_first(
        self,
        balance: ExpertBalance,
        inputs: Callable[[Any], Any] | None,
        loss: Callable[[Any, Any], Any],
    ) -> None:
        """Takes an additional forward of each microbatch."""
        self.source.keep()
        self._module.executor.forwards(self, inputs, loss)
        reshard(self._module.model)
        balance.know_loads()

    def count_choices(self, microbatch: Microbatch, batch: Any) -> None:
        balance = self._module.balance
        assert balance is not None, "forwards are counted for it"
        routed = balance.routed(microbatch.index, batch)
        if not microbatch.is_dummy:
            balance.count(routed)

    @property
    def balance_terms(self) -> Sequence[str]:
        balance = self._module.balance
        return () if balance is None else balance.term_names

    def balance_part(self, microbatch: Microbatch, batch: Any) -> Contribution | None:
        balance = self._module.balance
        if balance is None:
            return None
        routed = balance.routed(microbatch.index, batch)
        if not microbatch.is_dummy:
            balance.count(routed)
        elif not self.is_recomputing:
            return None
        if not balance.term_names or not any(layer.logits for layer in routed.choices):
            return None
        terms = balance.terms_of(routed)
        return self._contribution(terms, microbatch, balance_weights(self.weights))

    def _release(self, balance: ExpertBalance) -> None:
        waiting, self._waiting = self._waiting or [], None
        balance.know_loads()
        for current, loss, routed in waiting:
            self._current = current
            self._training.exchange.is_dummy = current.is_dummy
            self._accumulate(balance.terms(loss, routed))

    @contextmanager
    def without_backward(self) -> Iterator[None]:
        self._note_gradients()
        yield
        self._check_gradients()

    def microbatches(self, *, dummies: bool = False) -> Iterator[Any]:
        """Yield the batch of each microbatch of this rank. Each batch has its own random
        generators. A rank may have no microbatches.

        After a `commit`, another call yields the same batches for another model, with other random
        numbers. `dummies`: True if the loop checks `is_dummy`. With `dummies=False`, raises
        `RecipeError` under a plan in which a rank must compute dummies.
        """
        self._refuse_recomputation("a loop over step.microbatches()", "step.compute(inputs, loss)")
        for module in self._modules:
            _check_loop(module)
        if any(balance.counts_first for balance in self._training.balances):
            raise RecipeError(
                "step.microbatches with Balance(over='step'); the loads of the global batch must be"
                " known before the first backward; call step.compute(inputs, loss), with inputs and"
                " loss as in a Recipe, or choose another over, such as 'previous'"
            )
        if not dummies:
            self._refuse_dummies()
        return self._loop()

    def _loop(self) -> Iterator[Any]:
        for _, batch in self.batches():
            for balance in self._training.balances:
                balance.recorder.start()
            yield batch
        if self.is_dummy:
            self._current = None
        self._seed_loop()

    def _seed_loop(self) -> None:
        """Seed the generators after the script's loop. Unseeded generators would continue the
        random stream of this rank's last microbatch, which differs between ranks."""
        if self._run.recipe is None:
            context = self._training.context
            at = (context.seed, RandomStream.LOOP, self._run.step, self._passes)
            seed_generators(key(*at), context.device)
            self._passes += 1

    @property
    def is_dummy(self) -> bool:
        """True while this rank's microbatch is a dummy. A dummy belongs to another rank and is
        computed only because forwards have collectives. The gradient of a dummy is discarded.
        Ignore all other results of a dummy."""
        return self._current is not None and self._current.is_dummy

    def backward(self, loss: Any, optimizer: Any = None) -> None:
        """Accumulate the gradient of this microbatch's loss. Call `backward` once for each
        microbatch, on the rank that computes the microbatch.

        `loss`: a scalar (the mean over this microbatch's samples) or an `ls.Loss`. With the
        `weight` of `steps`: an `ls.Sum` or a dict. `optimizer`: the model's optimizer, if several
        models are prepared. Other models that the loss reaches get no gradient. Raises `LossError`.
        """
        number = self._number_of(optimizer)
        _check_loop(self._modules[number])
        self._begin(number)
        self.accumulate(loss)

    def accumulate(self, loss: Any) -> None:
        if not self._has_begun:
            raise LossError(
                f"after step {self.index}: step.accumulate without step.backward, which names the"
                " model; call step.backward(loss)"
            )
        balance = self._module.balance
        if balance is not None:
            routed = balance.routed(self.current.index, self.current.batch)
            if not self.current.is_dummy:
                balance.count(routed)
            if self._waiting is not None:
                self._waiting.append((self.current, loss, routed))
                return
            loss = balance.terms(loss, routed)
        self._accumulate(loss)

    def _accumulate(self, loss: Any) -> None:
        current, module = self.current, self._module
        if not current.is_dummy and self._seen and self._seen[-1] >= current.index:
            raise LossError(
                f"after step {self.index}, microbatch {current.index}: a second backward; each"
                " microbatch has one: add the losses and call it on their sum"
            )
        weights = own_weights(self.weights) if module.balance is None else self.weights
        part = self._contribution(loss, current, weights)
        grad_output = module.grad_output(part)
        if not current.is_dummy:
            if not self._is_repeated:
                for statistics in self._statistics:  # one model's forward may call other models
                    statistics.note_microbatch()
            self._note(current, part.value, part.weight, part)
            if self._probe is not None and not self._is_repeated:
                self._probe.before_backward(self._number, current.index, part.total, grad_output)
        self._check_gradients()
        with module.gradient_hooks, self.comparing([current]):
            if self._recomputing is not None:
                self._recomputing_reducer.recompute(part.total, grad_output)
            else:
                module.reducer.backward(
                    part.total,
                    grad_output,
                    own_parameters_only=len(self._modules) > 1,
                    is_dummy=current.is_dummy,
                )
        self._note_gradients()

    @property
    def is_recomputing(self) -> bool:
        return self._recomputing is not None

    def comparing(self, microbatches: Sequence[Microbatch]) -> AbstractContextManager[None]:
        if self._recomputing is not None:
            return self._discarding(self._recomputing[1])
        if self._recomputation is None or (place := self._compared_among(microbatches)) is None:
            return NOTHING
        number = place if len(microbatches) > 1 else None
        return self._recomputing_reducer.recording.of(self._recomputation.own, number)

    @contextmanager
    def _discarding(self, found: MicrobatchChecksums) -> Iterator[None]:
        reducer = self._recomputing_reducer
        with reducer.discarding(), reducer.recording.of(found):
            yield

    def _compared_among(self, microbatches: Sequence[Microbatch]) -> int | None:
        if self._recomputation is None or self._is_repeated:
            return None
        mine = self._recomputation.mine
        places = (
            place
            for place, each in enumerate(microbatches)
            if each.index == mine and not each.is_dummy
        )
        return next(places, None)

    @property
    def _recomputing_reducer(self) -> RecomputingReducer:
        reducer = self._module.reducer
        if not isinstance(reducer, DdpReducer | FsdpReducer | OrderedReducer | RoundsReducer):
            raise AssertionError("plans with other reducers are refused")
        return reducer

    def contribution(self, loss: Any, microbatch: Microbatch) -> Contribution:
        if self._module.balance is not None:
            self._module.balance.check_own(loss)
        return self._contribution(loss, microbatch, own_weights(self.weights))

    def _contribution(
        self, loss: Any, microbatch: Microbatch, weights: Weights | None
    ) -> Contribution:
        assert self._module.prescale is not None, "begin_step comes first"
        part = contribution(
            loss,
            samples=microbatch.size,
            step_samples=self.samples,
            batch=microbatch.batch,
            weights=weights,
            prescale=self._module.prescale,
        )
        if self._polls or self._compares:
            part = part._replace(counted=counted_labels(loss, microbatch.size))
        return part

    def grad_output(self, part: Contribution) -> Tensor:
        return self._module.grad_output(part)

    def record(
        self,
        microbatch: Microbatch,
        value: Number,
        weight: Tensor | None,
        part: Contribution | None,
    ) -> None:
        self._note(microbatch, value, weight, part)
        if self._probe is not None and not self._is_repeated:
            self._probe.without_backward(self._number, microbatch.index)

    def _note(
        self,
        microbatch: Microbatch,
        value: Number,
        weight: Tensor | None,
        part: Contribution | None,
    ) -> None:
        self._seen.append(microbatch.index)
        self._values.append(value)
        if weight is not None:
            self._forward_weights.append(weight)
        if part is not None:
            self._terms.append(part.terms)
            self._kinds.append(part.kind())

    def commit(
        self,
        optimizer: Any = None,
        *,
        clip_norm: float | None = None,
        closure: Callable[[], object] | None = None,
    ) -> None:
        """Reduce, scale and clip the gradient and update the model, on all ranks or on none. Every
        rank must call this method once a step, for each prepared model.

        `clip_norm`: the largest global norm of the gradient. `closure`: for optimizers that compute
        the gradient more than once a step (LBFGS, SAM). The closure loops over `microbatches` and
        calls `backward` for each, as the script does before `commit`. After `compute`, no closure
        is needed. Raises `LossError` if the loss or the gradient is not finite. On a GPU, the error
        is raised at the next logging step. With a `fused` optimizer, a step with a loss or gradient
        that is not finite does not update the model.
        """
        check_clip_norm(clip_norm)
        number = self._number_of(optimizer)
        self._check_open(number)
        self._begin(number)
        module = self._module
        if module.needs_closure and closure is None and self._computed is None:
            raise LossError(
                f"after step {self.index}: a commit without a closure;"
                f" {type(module.optimizers[0]).__name__} computes the gradient more than once per"
                " step; give commit(closure=...) a function that loops over step.microbatches()"
                " and calls step.backward for each"
            )
        self._check_complete()
        self._phases.enter("exchange")
        flag = self._training.consensus.flag(may_stop=self._run.is_logging_step)
        with module.gradient_hooks:
            stats = module.reduce(self._values, self._weights_of_forward, flag=flag)
        module.gradient_hooks.check()
        if self._recomputation is not None:
            self._training.hooks.call("on_recomputation", self._run, self._recomputation)
        if module.balance is not None:
            module.balance.reduce()
            if self._polls or self._run.is_logging_step:
                module.balance.check(self.index)
        self._phases.enter("update")
        for statistics in self._statistics:
            statistics.check(compare=self._compares)
        result = StepResult(
            self.source.layout, module, stats.values, stats.weights, stats.flags, clip_norm
        )
        # The gradient may be finite although the loss is not, because torch.where can mask the
        # loss.
        if self._polls and not all(map(math.isfinite, as_floats(stats.values))):
            result.check()
        self._training.begin_change()
        module.divide_by_weight(stats.weights, stats.values)
        self._call_gradient_hooks(number)
        self._training.hooks.call("after_backward", self._run, module.model)
        result.applied, result.terms = None, self._terms
        again = partial(self._again, number, result, closure) if module.needs_closure else None
        self._seed_optimizer(number)
        result.norm, result.applied = module.apply(
            self.index, clip_norm, measure=self._run.is_logging_step, closure=again
        )
        applied = (
            torch.isfinite(torch.as_tensor(result.norm))
            if result.applied is None
            else result.applied
        )
        for statistics in self._statistics:
            statistics.commit(self.source.layout.assignment, self.count, apply=applied)
        if module.balance is not None:
            module.balance.commit(applied=applied)
        self._end_commit(number, result)

    def _again(
        self, number: int, first: StepResult, closure: Callable[[], object] | None
    ) -> Callable[[], Tensor]:
        """Return a closure to pass to the optimizer's `step`. The first call uses the step's
        gradient, unless the optimizer has changed it. Later calls compute the gradient again with
        the same random numbers."""
        module, calls = self._modules[number], count()
        marks = _marks(module.parameters)
        repeat = closure or partial(self._train, number, *(self._computed or ()))

        def again() -> Tensor:
            call = next(calls)
            if call == 0 and _marks(module.parameters) == marks:
                return torch.tensor(first.loss())
            self._is_repeated, self._has_begun = True, False
            with torch.enable_grad():
                repeat()
                self._seed_loop()
                self._begin(number)
                self._check_complete()
                with module.gradient_hooks:
                    stats = module.reduce(self._values, self._weights_of_forward, flag=False)
            module.divide_by_weight(stats.weights, stats.values)
            self._call_gradient_hooks(number)
            module.clip(first.clip_norm)
            self._seed_optimizer(number, call)
            return torch.tensor(replace(first, values=stats.values, weights=stats.weights).loss())

        return again

    def _seed_optimizer(self, number: int, *call: int) -> None:
        """The generators are seeded again after each call of the optimizer's closure, because the
        closure seeds the generators."""
        if self._modules[number].may_draw:
            context = self._training.context
            at = (context.seed, RandomStream.OPTIMIZER, self._run.step, number, *call)
            seed_generators(key(*at), context.device)

    def _call_gradient_hooks(self, number: int) -> None:
        module, context = self._modules[number], self._training.context
        if module.gradient_hooks:
            seed = key(context.seed, RandomStream.GRADIENT_HOOK, self._run.step, number)
            seed_generators(seed, context.device)
            module.call_gradient_hooks()

    def skip(self, optimizer: Any = None) -> None:
        """Leave a model, its optimizer's state and its schedule unchanged in this step. Every rank
        must call `skip` instead of `commit`. `optimizer`: as in `commit`. Raises `LossError` if
        `backward` was called for the model in this step."""
        number = self._number_of(optimizer)
        self._check_open(number)
        if self._has_begun:
            raise LossError(
                f"after step {self.index}: a skip after a backward; the gradient would be lost;"
                " commit it, or call skip before"
            )
        self.skipped.add(number)
        self._end()

    def log(self, values: dict[str, float]) -> None:
        """Add numbers to this step's line in metrics.jsonl; see `Run.log`."""
        self._run.log(values)

    def batches(self) -> Iterator[tuple[Microbatch, Any]]:
        self._begin_statistics()
        passes = len(self.committed)
        only = None if self._recomputing is None else self._recomputing[0]
        for current, batch in self._phases.during("data", self.source.batches(passes, only)):
            self._current = current
            self._training.microbatches += 1
            self._training.exchange.is_dummy = current.is_dummy and only is None
            for statistics in self._statistics:
                # undo updates by recomputation and by forwards without a backward
                statistics.discard()
            for number, streams in self._training.streams:
                position = self.source.position(current, passes)
                streams.set_position((*position, number) if number else position)
            if self._probe is None or self._is_repeated:
                yield current, self._changed(current, batch)
            else:
                with self._probe.forward():
                    yield current, self._changed(current, batch)
        for _, streams in self._training.streams:
            streams.stop()

    def fetched(self) -> list[tuple[Microbatch, Any]]:
        self._begin_statistics()
        only = None if self._recomputing is None else self._recomputing[0]
        fetched = self._phases.during("data", self.source.batches(0, only))
        return [(current, self._changed(current, batch)) for current, batch in fetched]

    def random_position(self, microbatch: Microbatch) -> tuple[int, ...]:
        return self.source.position(microbatch, 0)

    def _over_batch(
        self, module: TrainModule, inputs: Callable[[Any], Any] | None, loss: Gathered
    ) -> BatchLoss:
        _check_loop(module, "a batch loss", "choose replicate or shard, without Recipe.sequence")
        if self.source.weights is not None:
            raise RecipeError(
                "a batch loss with a weight; it is one number for all samples of the global batch;"
                " leave out the weight"
            )
        self.weights = {SINGLE: 1.0}
        self.source.keep()
        layout = self.source.layout
        batch_loss = BatchLoss(loss, layout.spans, lambda: self.current, watched=self.index == 0)
        batch_loss.collect(
            self._training.context.mesh.data,
            layout.assignment,
            self.batches(),
            partial(call_model, inputs, module.model),
            module.autocast,
        )
        reshard(module.model)
        return batch_loss

    @property
    def current(self) -> Microbatch:
        if self._current is None:
            raise LossError(
                f"after step {self.index}: backward outside of a loop over step.microbatches();"
                " call it inside the loop"
            )
        return self._current

    def _changed(self, current: Microbatch, batch: Any) -> Any:
        change = self._training.context.overrides.change_batch
        return batch if change is None else change(current, batch)

    def _refuse_dummies(self) -> None:
        assigned = self.source.layout.assignment
        counts = self.count, *sorted(self.source.batching.counts)
        count = next((count for count in counts if assigned.has_dummies(count)), None)
        if count is None:
            return
        parts = "slices of microbatches" if assigned.slices else "microbatches"
        ranks = str(assigned.ranks)
        if assigned.per_round < assigned.ranks:
            ranks = f"{assigned.per_round} of {ranks}"
        raise RecipeError(
            f"step.microbatches() under {self._training.context.plan} in a loop with steps of"
            f" {count} {parts}, computed in rounds by {ranks} ranks; forwards have collectives"
            " there, so a rank that has no microbatch left computes a dummy, and the loop would"
            " count its samples twice; write step.microbatches(dummies=True), and `if not"
            " step.is_dummy:` around all but the forwards and step.backward; or call step.compute;"
            " or choose another plan, or sizes whose microbatches are a multiple of the ranks in"
            " every step"
        )

    def _refuse_recomputation(self, what: str, instead: str) -> None:
        if every := self._training.context.recompute_every:
            raise RecipeError(
                f"--recompute-every {every} with {what}; lockstep recomputes one microbatch alone,"
                f" and calls the model itself; use {instead}, or leave --recompute-every out"
            )

    def _begin_statistics(self) -> None:
        if self._is_repeated:
            return
        for module in self._modules:
            if changed := module.snapshot.check():
                line = remark_on_modes(changed, self.index)
                self._training.remark(
                    Remark("modes-restored", {"modules": changed}, f"warning: {line}")
                )
        for statistics in self._statistics:
            statistics.begin(compare=self._compares)

    def _end_commit(self, number: int, result: StepResult) -> None:
        self.committed[number] = result
        self._current = self._computed = self._training.exchange.is_dummy = None
        self._is_repeated = self._has_begun = False
        self._end()
        if self._polls:
            result.check()
        self._phases.enter("script" if self.is_complete else "compute")

    def _end(self) -> None:
        if self.is_complete:
            self._training.end_updates(self.committed)

    @property
    def is_complete(self) -> bool:
        return len(self.committed) + len(self.skipped) == len(self._modules)

    def _check_open(self, number: int) -> None:
        if number in self.committed or number in self.skipped:
            before = "commit" if number in self.committed else "skip"
            raise LossError(
                f"after step {self.index}: a commit or skip after a {before} of the same model;"
                " each model has one per step"
            )

    def _begin(self, number: int) -> None:
        if not self._has_begun:
            self._check_gradients()
            self._has_begun, self._number, self._module = True, number, self._modules[number]
            self._module.begin_step(self.count, self.samples, self.source.layout.assignment)
            if self._module.balance is not None:
                self._module.balance.begin()
            self._note_gradients()
            self._seen: list[int] = []
            self._values: list[Number] = []
            self._forward_weights: list[Tensor] = []
            self._terms: list[dict[str, Tensor]] = []
            self._kinds: list[LossKind] = []
        if self._number != number:
            raise LossError(
                f"after step {self.index}: backward for a second model before the first one's"
                " commit; loop over step.microbatches() and commit for one model, then for the"
                " next"
            )

    @property
    def _weights_of_forward(self) -> Sequence[Number] | None:
        return self._forward_weights if self._module.forward_knows_weight else None

    def _check_gradients(self) -> None:
        """Raise `LossError` if the script has called `Tensor.backward`."""
        if self._gradients is None or self._is_repeated:
            return
        if self._gradients != self._modules[0].reducer.gradient_versions():
            raise LossError(
                f"after step {self.index}: the forward or the loss has called backward, and so"
                " changed the model's gradients; they are sums over microbatches, scaled and"
                " reduced with the loss; add to the loss what it was called on"
            )

    def _note_gradients(self) -> None:
        if self._gradients is not None:
            self._gradients = self._modules[0].reducer.gradient_versions()

    def _check_complete(self) -> None:
        module = self._module
        if len(self._seen) < self.source.own_count:
            missing = [place for place in self.source.layout.mine() if place not in self._seen]
            raise LossError(
                f"after step {self.index}: commit without a backward for microbatches {missing} of"
                " this rank; call step.backward once for each microbatch; to leave the microbatch"
                " out of the gradient, multiply its loss by 0"
            )
        if module.forward_knows_weight is None:
            module.agree_on_loss(self._kinds)
        if {kind.has_weight for kind in self._kinds} - {module.forward_knows_weight}:
            raise LossError(
                f"after step {self.index}: the loss is an ls.Loss for some microbatches and not for"
                " others; it must be the same kind for all: return ls.Loss(total, weight) always,"
                " or never"
            )
        for place, kind in zip(
            self._seen, self._kinds, strict=False
        ):  # in a pipeline, only the last stage has the losses
            if kind.repeats != module.repeats:
                raise LossError(
                    f"after step {self.index}, microbatch {place}: the batch has {kind.repeats}"
                    f" rows for each sample and had {module.repeats} before; a mean over them would"
                    " be weighted as one over samples; return ls.Sum(loss * n) with Recipe.weight"
                    " = batch -> n, its rows, or ls.Loss(loss * n, n)"
                )
            for term, counted in kind.counted.items():
                before = module.counted.setdefault(term, counted)
                if weighted_unequally(counted, before):
                    raise LossError(
                        f"after step {self.index}, microbatch {place}: term {term!r} of the loss is"
                        " a mean over the labels that are not ignored, "
                        f"{_percent(counted)} of all, and {_percent(before)} in another"
                        " microbatch; it would be weighted as a mean over samples; return"
                        " ls.Sum(total) with Recipe.weight = batch -> the number of these labels,"
                        " or ls.Loss(total, weight)"
                    )
            if set(kind.terms) != set(module.terms):
                raise LossError(
                    f"after step {self.index}, microbatch {place}: the loss has terms {kind.terms}"
                    f" and had {module.terms} before; it must have the same terms for every"
                    " microbatch: for one that does not apply, return (output * 0).sum()"
                )

    def _number_of(self, optimizer: Any) -> int:
        if optimizer is None and len(self._modules) == 1:
            return 0
        for number, module in enumerate(self._modules):
            if optimizer is module.optimizers or any(
                optimizer is each for each in module.optimizers
            ):
                return number
        given = (
            "no optimizer"
            if optimizer is None
            else f"an optimizer ({type(optimizer).__name__}) that this session did not prepare"
        )
        raise LossError(
            f"after step {self.index}: {given}, with {len(self._modules)} models prepared; name one"
            " that session.prepare returned: step.backward(loss, optimizer), step.commit(optimizer)"
        )


def _percent(means: Sequence[tuple[float, bool]]) -> str:
    return ", ".join(f"{counted:.1%}" for counted, _ in means)


def _marks(parameters: Sequence[nn.Parameter]) -> list[Any]:
    """Return values that change with each change of a parameter or of its gradient."""
    of_parameters = [(version(each), each.data_ptr()) for each in parameters]
    return [of_parameters, gradient_versions(parameters)]


def _check_loop(
    module: TrainModule,
    what: str = "step.microbatches or step.backward",
    remedy: str = "call step.compute(inputs, loss), with inputs and loss as in a Recipe",
) -> None:
    if (why := module.executor.why_no_loop) is not None:
        raise RecipeError(f"{what} with {why}; {remedy}")
