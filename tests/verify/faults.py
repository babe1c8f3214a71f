"""Faulty engines, each with the one mistake that its name says, as people make them in training
loops of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from verify.engine import Engine, Gradients, added, total_norm

from lockstep.assignment import contiguous_range


class MeanOfMeans(Engine):
    """Each rank divides by its own weight; then the ranks' gradients are averaged."""

    def factor(self, step: int, index: int, rank: int) -> float:
        mask = self.data[2]
        mine = [
            sample
            for i in contiguous_range(self.count, rank, self.size)
            for sample in self.samples(step, i)
        ]
        return self.weight / float(mask[mine].sum()) / self.size


class SlightlyOther(Engine):
    """A value that the loss keeps changes gradients by little."""

    def factor(self, step: int, index: int, rank: int) -> float:
        return super().factor(step, index, rank) * (1 + 1e-4 * rank)


class MeanOfMeansInTheSum(MeanOfMeans):
    """The same mistake in the reduction: each microbatch's own gradient is right."""

    def factor(self, step: int, index: int, rank: int) -> float:
        return 1.0

    def reduce(self, step: int, locals_: list[Gradients]) -> list[Gradients]:
        factors = [MeanOfMeans.factor(self, step, 0, rank) for rank in range(self.size)]
        scaled = [
            {name: gradient * factor for name, gradient in part.items()}
            for part, factor in zip(locals_, factors, strict=True)
        ]
        return [added(scaled)] * self.size


class NotReduced(Engine):
    """One parameter is missing from the buckets."""

    left_out = "first.weight"

    def reduce(self, step: int, locals_: list[Gradients]) -> list[Gradients]:
        whole = added(locals_)
        return [{**whole, self.left_out: local[self.left_out]} for local in locals_]


class NothingReduced(Engine):
    def reduce(self, step: int, locals_: list[Gradients]) -> list[Gradients]:
        return locals_


class DividedTwice(Engine):
    """The loss is divided by the weight of the whole batch, and the all-reduce averages."""

    def reduce(self, step: int, locals_: list[Gradients]) -> list[Gradients]:
        return [
            {name: gradient / self.size for name, gradient in added(locals_).items()}
        ] * self.size


class OneBiasTimesTwo(Engine):
    """Every rank adds the gradient of a bias, like a replicated bias under tensor parallelism."""

    def reduce(self, step: int, locals_: list[Gradients]) -> list[Gradients]:
        whole = added(locals_)
        return [{**whole, "last.bias": whole["last.bias"] * self.size}] * self.size


class StatisticsOfOneRank(Engine):
    """BatchNorm's running statistics are updated from the rank's own microbatches."""

    def running(self, rank: int) -> list[int]:
        return list(contiguous_range(self.count, rank, self.size))


class BatchNormInEvalMode(Engine):
    """BatchNorm is left in eval mode on all ranks but the first."""

    def start(self, model: nn.Module, rank: int) -> nn.Module:
        if rank:
            model.get_submodule("norm").train = lambda mode=True: model.get_submodule("norm")  # type: ignore[method-assign]
            model.get_submodule("norm").training = False
        return model


class SameDropoutMask(Engine):
    """Every rank counts its own microbatches from 0."""

    def stream(self, step: int, index: int, rank: int) -> int:
        return self.key(3, step, index - contiguous_range(self.count, rank, self.size).start)


class MaskOfTheRank(Engine):
    def stream(self, step: int, index: int, rank: int) -> int:
        return self.key(3, step, index, rank)


class SampleSeenTwice(Engine):
    """A rank's first sample is replaced by the first sample of the batch, as padding repeats it."""

    def samples(self, step: int, index: int) -> list[int]:
        samples = super().samples(step, index)
        if step == 1 and self.size > 1 and index == 3:
            samples[0] = super().samples(step, 0)[0]
        return samples


class OtherLabels(Engine):
    """A rank makes its labels from a generator that nobody has seeded."""

    def data_of(self, rank: int) -> list[Tensor]:
        x, y, mask = self.data
        return [x, y.flip(0) if rank else y, mask]


class LocalNorm(Engine):
    """Clips by the norm of the rank's own gradient."""

    def norm(self, step: int, rank: int, reduced: Gradients, local: Gradients) -> float:
        return total_norm(local)


class NormOfAShard(Engine):
    """Clips by the norm of half the parameters, like the norm of a shard that is not summed over
    ranks."""

    def norm(self, step: int, rank: int, reduced: Gradients, local: Gradients) -> float:
        names = sorted(reduced)
        return total_norm({name: reduced[name] for name in names[: len(names) // 2]})


class BufferOutOfStep(Engine):
    """A buffer depends on what its rank has seen."""

    def finish(self, step: int, rank: int) -> None:
        buffer: Tensor = self.models[rank].get_buffer("scale")
        if step == 1:
            buffer += 0.01 * rank


class AnotherSeed(Engine):
    """Each rank draws its own initial weights."""

    def start(self, model: nn.Module, rank: int) -> nn.Module:
        if rank:
            with torch.no_grad():
                nn.init.normal_(model.get_parameter("last.weight"))
        return model


class ScheduleStepsTwice(Engine):
    """The schedule is stepped once per rank."""

    def rate(self, step: int, rank: int) -> float:
        return super().rate(step * self.size, rank)


class StateReset(Engine):
    """The optimizer loses its state before step 2."""

    def update(self, step: int, rank: int) -> None:
        if step == 2 and self.size > 1:
            self.optimizers[rank].state.clear()
        super().update(step, rank)


class UpdateOfAShard(Engine):
    """The optimizer divides by a norm that it takes over what the rank holds: once, and by a
    little."""

    def update(self, step: int, rank: int) -> None:
        before = [parameter.detach().clone() for parameter in self.models[rank].parameters()]
        super().update(step, rank)
        if step == 1 and self.size > 1:
            with torch.no_grad():
                for parameter, old in zip(self.models[rank].parameters(), before, strict=True):
                    parameter += 0.1 * (parameter - old)


class NotCleared(Engine):
    """zero_grad is forgotten."""

    def reduce(self, step: int, locals_: list[Gradients]) -> list[Gradients]:
        whole = added([*locals_, *([self.before] if step and self.size > 1 else [])])
        self.before = whole
        return [whole] * self.size


class MicrobatchLeftOut(Engine):
    """With no_sync, the last microbatch but one is not added to the gradient."""

    def accumulate(self, step: int, rank: int, parts: list[Gradients]) -> Gradients:
        return added(parts if rank == 0 or self.size == 1 else [*parts[:-2], parts[-1]])


class MicrobatchTwice(Engine):
    def accumulate(self, step: int, rank: int, parts: list[Gradients]) -> Gradients:
        return added(parts if rank == 0 or self.size == 1 else [*parts, parts[0]])


class UnusedIsLost(Engine):
    """A parameter that one rank did not use keeps no gradient there (DDP without
    find_unused_parameters)."""

    def reduce(self, step: int, locals_: list[Gradients]) -> list[Gradients]:
        whole = added(locals_)
        return [{name: whole[name] for name in whole if name in local} for local in locals_]


class LossOfOneRank(Engine):
    """Rank 0 logs its own loss."""

    def loss(self, rank: int, parts: dict[int, float]) -> float:
        mine = contiguous_range(self.count, rank, self.size)
        return sum(parts[index] for index in mine) * self.size


class NotApplied(Engine):
    """Rank 1 skips a step on its own, as if its loss scale had overflowed."""

    def update(self, step: int, rank: int) -> None:
        if not (step == 1 and rank == 1):
            super().update(step, rank)


class ShortTypeSum(Engine):
    """Gradients are added in bfloat16."""

    def reduce(self, step: int, locals_: list[Gradients]) -> list[Gradients]:
        short = [{name: gradient.bfloat16() for name, gradient in part.items()} for part in locals_]
        return [
            {name: gradient.to(torch.float32) for name, gradient in added(short).items()}
        ] * self.size


class OneElement(Engine):
    """One element of one gradient is lost, as can happen at the edge of a shard."""

    def reduce(self, step: int, locals_: list[Gradients]) -> list[Gradients]:
        whole = added(locals_)
        if self.size > 1:
            whole["odd.weight"] = whole["odd.weight"].clone()
            whole["odd.weight"][3, 5] = 0.0
        return [whole] * self.size


class WeightDecayOnARank(Engine):
    """Parameter groups differ: rank 1 decays more."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        made = getattr(self, "made", 0)
        self.made = made + 1
        return torch.optim.AdamW(
            model.parameters(), lr=1e-2, weight_decay=0.01 if made == 0 else 0.1
        )
