"""Mistakes that errors of the training answer, each with the same training as its error recommends
it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, TensorDataset
from training.subjects import FEATURES, OUTPUTS, network, recipe, rows, sgd, squared_error

import lockstep as ls

ROWS, HELD_OUT = rows(48), rows(8, seed=9)


class Training(Protocol):
    """Trains in a folder under a plan, and returns the fingerprint of the model and its last
    loss."""

    def __call__(
        self, folder: str, plan: str, allow_change: Sequence[str] = ()
    ) -> tuple[str, float]: ...


@dataclass(frozen=True)
class Remedy:
    """A mistake, what is said about it, and the same training as the error recommends it."""

    mistake: Training
    says: str
    """The words of the error that name the remedy, as they stand in the source."""
    remedy: Training
    _: KW_ONLY
    plan: str = "replicate=2"
    """The plan of two processes."""
    alone: bool = True
    """True if one process refuses the mistake, too."""
    bitwise: bool = True
    """False where a part of it cannot be bitwise: the losses are close then."""
    by_one_rank: bool = False
    """True where the rank that has the microbatch finds the mistake, and others wait: made on one
    process alone."""
    allow: Sequence[str] = ()
    """Fields in which the recipe with the remedy differs from the one that has trained the
    checkpoint: the mistake is found amid the training."""


def trains(
    *hooks: Callable[[], ls.Hook], late: Callable[[], Mapping[str, Any]] = dict, **changes: Any
) -> Training:
    """`ls.train` of the recipe of `subjects` with changes. `late`: changes whose making is the
    mistake."""

    def train(folder: str, plan: str, allow_change: Sequence[str] = ()) -> tuple[str, float]:
        changed = {"optimizer": sgd, **changes, **late()}
        if changed.keys().isdisjoint({"steps", "epochs"}):
            changed["steps"] = 2
        made = [each() for each in hooks]
        result = ls.train(
            recipe(**changed), hooks=made, run_dir=folder, plan=plan, allow_change=allow_change
        )
        assert all(each.has_acted for each in made if isinstance(each, At))
        return result.fingerprint, result.loss

    return train


def loops(body: Callable[[Any, Any, Any], object], models: int = 1, **changes: Any) -> Training:
    """A loop of one's own. `body(step, model, optimizer)`; of lists, if there are several
    models."""

    def train(folder: str, plan: str, allow_change: Sequence[str] = ()) -> tuple[str, float]:
        given = {"data": rows(48), "global_batch": 16, "microbatch": 4, "steps": 2, **changes}
        with ls.Session(run_dir=folder, plan=plan, allow_change=allow_change) as session:
            made = [session.prepare(network, sgd) for _ in range(models)]
            model, optimizer = zip(*made, strict=True) if models > 1 else made[0]
            for step in session.steps(given.pop("data"), **given):
                body(step, model, optimizer)
            state = session.full_state_dict()
            return ls.fingerprint(state), sum(float(value.abs().sum()) for value in state.values())

    return train


def at(act: Callable[[Any], object], step: int = 1) -> Callable[[], ls.Hook]:
    """A hook that calls `act(run)` after a step."""
    return lambda: At(act, step)


class At(ls.Hook):
    def __init__(self, act: Callable[[Any], object], step: int) -> None:
        self.act, self.at, self.has_acted = act, step, False

    def after_step(self, run: Any) -> None:
        if run.step == self.at:
            self.act(run)
            self.has_acted = True


class AtStart(ls.Hook):
    def __init__(self, act: Callable[[Any], object]) -> None:
        self.act = act

    def on_start(self, run: Any) -> None:
        self.act(run)


def each_step(act: Callable[[Any], object]) -> Callable[[], ls.Hook]:
    return lambda: EachStep(act)


class EachStep(ls.Hook):
    def __init__(self, act: Callable[[Any], object]) -> None:
        self.act = act

    def after_step(self, run: Any) -> None:
        self.act(run)


# Losses


def outputs_squared(output: Tensor, batch: Any) -> Tensor:
    return ((output - batch[2]) ** 2).mean()


def features(batch: Any) -> Tensor:
    return batch[1]  # type: ignore[no-any-return]


def errors(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return (model(batch[1]) - batch[2]).pow(2).mean(1)


def sums(model: nn.Module, batch: Sequence[Tensor]) -> dict[str, Any]:
    return {"error": ls.Sum(errors(model, batch).sum())}


def samples(batch: Sequence[Tensor]) -> dict[str, int]:
    return {"error": len(batch[0])}


def one_sum(model: nn.Module, batch: Sequence[Tensor]) -> Any:
    return ls.Sum(errors(model, batch).sum())


def number(batch: Sequence[Tensor]) -> int:
    return len(batch[0])


def one_loss(model: nn.Module, batch: Sequence[Tensor]) -> Any:
    return ls.Loss(errors(model, batch).sum(), len(batch[0]))


def is_first(batch: Sequence[Tensor]) -> bool:
    return bool((batch[0] == FIRST).any())


FIRST = 7
"""A sample that is in one microbatch of the first batches, and in no other."""


def sometimes(model: nn.Module, batch: Sequence[Tensor]) -> dict[str, Tensor]:
    output = model(batch[1])
    loss = {"error": (output - batch[2]).pow(2).mean()}
    return loss | ({"size": output.pow(2).mean()} if is_first(batch) else {})


def lacking(model: nn.Module, batch: Sequence[Tensor]) -> dict[str, Tensor]:
    """Has all terms in training, and in the evaluation those of one microbatch alone."""
    return always(model, batch) if model.training else sometimes(model, batch)


def always(model: nn.Module, batch: Sequence[Tensor]) -> dict[str, Tensor]:
    output = model(batch[1])
    return {
        "error": (output - batch[2]).pow(2).mean(),
        "size": output.pow(2).mean() if is_first(batch) else (output * 0).sum(),
    }


def sometimes_a_loss(model: nn.Module, batch: Sequence[Tensor]) -> Any:
    return one_loss(model, batch) if is_first(batch) else squared_error(model, batch)


def labelled(samples: int = 48) -> TensorDataset:
    """Features and labels, every third of which is to be ignored."""
    _, x, _ = rows(samples).tensors
    labels = torch.arange(samples) % OUTPUTS
    labels[::3] = -100
    return TensorDataset(torch.arange(samples), x, labels)


def entropy(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[1]), batch[2])


def entropy_sum(model: nn.Module, batch: Sequence[Tensor]) -> Any:
    return ls.Sum(F.cross_entropy(model(batch[1]), batch[2], reduction="sum"))


def entropy_loss(model: nn.Module, batch: Sequence[Tensor]) -> Any:
    return ls.Loss(entropy_sum(model, batch).total, (batch[2] != -100).sum())


def own_labels(batch: Sequence[Tensor]) -> Tensor:
    return batch[2].argmax(1).masked_fill(batch[1][:, 0] > 0, -100)


def own_entropy(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[1]), own_labels(batch))


def own_entropy_sum(model: nn.Module, batch: Sequence[Tensor]) -> Any:
    return ls.Sum(F.cross_entropy(model(batch[1]), own_labels(batch), reduction="sum"))


def own_labels_counted(batch: Sequence[Tensor]) -> Tensor:
    return (own_labels(batch) != -100).sum()


def own_entropy_loss(model: nn.Module, batch: Sequence[Tensor]) -> Any:
    return ls.Loss(own_entropy_sum(model, batch).total, own_labels_counted(batch))


class ByAttribute:
    """The loss over samples, as an object that raises an error for attributes it lacks."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __call__(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return squared_error(model, batch)

    def __getattr__(self, name: str) -> Any:
        raise self.error(name)


def labels_counted(batch: Sequence[Tensor]) -> Tensor:
    return (batch[2] != -100).sum()


def no_label(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """A loss over samples, where the batch holds an integer that happens to be -100."""
    return model(batch[1]).pow(2).mean()  # type: ignore[no-any-return]


def without_unreadable(items: Sequence[Any]) -> list[Tensor]:
    return [
        torch.stack([torch.as_tensor(item[part]) for item in items if item[0] % 3])
        for part in range(3)
    ]


def in_complex(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return torch.complex(model(batch[1]) - batch[2], torch.ones(())).pow(2).mean()


def detached(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return (model(batch[1]).detach() - batch[2]).pow(2).mean()


def collected(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    output: Tensor = model(batch[1])
    return output


def collected_twice(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    output: Tensor = model(batch[1])
    return torch.cat([output, output])


def collected_of_widths(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    output: Tensor = model(batch[1])
    return torch.cat([output, output], dim=1) if is_first(batch) else output


def collected_padded(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    output: Tensor = model(batch[1])
    return torch.cat([output, output if is_first(batch) else torch.zeros_like(output)], dim=1)


def mean_square(rows: Tensor) -> Tensor:
    return rows.pow(2).mean()


GATHERED = ls.Gathered(collected, mean_square)

MEAN, SUM = trains(), trains(loss=one_sum, weight=number)
SUMS, LOSS = trains(loss=sums, weight=samples), trains(loss=one_loss)
GATHER = trains(loss=None, batch_loss=GATHERED)

LOSSES = [
    Remedy(
        trains(loss=sums, weight=lambda batch: {"errors": len(batch[0])}),
        "a weight goes with each ls.Sum of the loss, by the same name",
        SUMS,
    ),
    Remedy(
        trains(loss=lambda model, batch: {"error": one_loss(model, batch)}),
        "return {name: ls.Sum(total)} and give Recipe.weight = batch -> {name: denominator}",
        SUMS,
    ),
    Remedy(
        trains(loss=one_sum),
        "give Recipe.weight = batch -> its denominator",
        SUM,
    ),
    Remedy(trains(loss=one_sum), "or return ls.Loss(total, weight)", LOSS),
    Remedy(
        trains(weight=number),
        "return ls.Sum(total), the sum over what",
        SUM,
    ),
    Remedy(trains(weight=number), "the sum over what the weight counts, or drop the weight", MEAN),
    Remedy(
        trains(data=labelled(), loss=entropy),
        "return ls.Sum(total) with Recipe.weight = batch -> (",
        trains(data=labelled(), loss=entropy_sum, weight=labels_counted),
    ),
    Remedy(
        trains(data=labelled(), loss=entropy),
        "or ls.Loss(total, weight)",
        trains(data=labelled(), loss=entropy_loss),
    ),
    Remedy(
        trains(loss=own_entropy),
        "return ls.Sum(total) with Recipe.weight = batch -> the number of these labels",
        trains(loss=own_entropy_sum, weight=own_labels_counted),
        by_one_rank=True,
        allow=["loss", "weight"],
    ),
    Remedy(
        trains(loss=own_entropy),
        "the number of these labels, or ls.Loss(total, weight)",
        trains(loss=own_entropy_loss),
        by_one_rank=True,
        allow=["loss"],
    ),
    Remedy(
        trains(late=lambda: {"loss": ByAttribute(RuntimeError)}),
        "raise AttributeError(name) there",
        trains(loss=ByAttribute(AttributeError)),
    ),
    Remedy(
        trains(data=labelled(), loss=no_label),
        "no label, return ls.Sum(loss * n) with Recipe.weight = batch -> n, the samples of the"
        " microbatch",
        trains(
            data=labelled(),
            loss=lambda model, batch: ls.Sum(no_label(model, batch) * len(batch[0])),
            weight=number,
        ),
    ),
    Remedy(
        trains(loss=one_loss, weight=number),
        "is given too; return ls.Sum",
        SUM,
    ),
    Remedy(
        trains(loss=one_loss, weight=number),
        "return ls.Sum, or drop the weight",
        LOSS,
    ),
    Remedy(
        trains(loss=lambda model, batch: squared_error(model, batch).item()),
        "do not call .item()",
        MEAN,
    ),
    Remedy(trains(loss=errors), "take its mean()", MEAN),
    Remedy(
        trains(loss=errors),
        "or return ls.Sum of its sum() with Recipe.weight",
        SUM,
    ),
    Remedy(
        trains(loss=in_complex),
        "take its .abs() or its .real",
        trains(loss=lambda model, batch: in_complex(model, batch).real),
    ),
    Remedy(trains(loss=detached), "look for .detach()", MEAN),
    Remedy(trains(loss=lambda model, batch: {}), "give it one term at least", MEAN),
    Remedy(
        trains(
            loss=lambda model, batch: {1: one_sum(model, batch)},
            weight=lambda batch: {1: len(batch[0])},
        ),
        ", in the loss and in the weight",
        trains(
            loss=lambda model, batch: {"1": one_sum(model, batch)},
            weight=lambda batch: {"1": len(batch[0])},
        ),
    ),
    Remedy(
        trains(loss=sometimes),
        "for one that does not apply, return (output * 0).sum()",
        trains(loss=always),
        by_one_rank=True,
        allow=["loss"],
    ),
    Remedy(
        trains(loss=sometimes_a_loss),
        "return ls.Loss(total, weight) always, or never",
        LOSS,
        by_one_rank=True,
        allow=["loss"],
    ),
    Remedy(
        trains(collate=without_unreadable),
        "return ls.Sum(loss * n) with Recipe.weight = batch -> n",
        trains(collate=without_unreadable, loss=one_sum, weight=number),
    ),
    Remedy(
        trains(collate=without_unreadable),
        "or ls.Loss(loss * n, n)",
        trains(collate=without_unreadable, loss=one_loss),
    ),
    Remedy(
        trains(loss=None, batch_loss=GATHERED, weight=number),
        "one number for all samples of the global batch; leave out",
        GATHER,
    ),
    Remedy(
        trains(loss=None, batch_loss=ls.Gathered(collected, lambda rows: rows.pow(2))),
        "take its mean() or sum()",
        GATHER,
    ),
    Remedy(
        trains(loss=None, batch_loss=ls.Gathered(collected_twice, mean_square)),
        "each tensor has one row per sample",
        GATHER,
    ),
    Remedy(
        trains(loss=None, batch_loss=ls.Gathered(collected_of_widths, mean_square)),
        "pad them to one width for all microbatches",
        trains(loss=None, batch_loss=ls.Gathered(collected_padded, mean_square)),
        by_one_rank=True,
        allow=["batch_loss"],
    ),
    Remedy(
        trains(inputs=lambda batch: batch[1:2], loss=outputs_squared),
        "return batch[0], or (batch[0], batch[1])",
        trains(inputs=features, loss=outputs_squared),
    ),
]


# Data


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(ROWS)


class AtOnce(Dataset[Any]):
    """Returns a whole microbatch, as a list of its parts or as a tuple."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        return ROWS[index]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        return self.kind(part[list(indices)] for part in ROWS.tensors)


class Unequal(Dataset[Any]):
    """Samples of several lengths."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        return index, torch.full((index % 3 + 1, FEATURES), float(index % 5)), torch.ones(OUTPUTS)


def padded(items: Sequence[Any]) -> Any:
    x = nn.utils.rnn.pad_sequence([item[1] for item in items], batch_first=True)
    return (
        torch.tensor([item[0] for item in items]),
        x.sum(1),
        torch.stack([item[2] for item in items]),
    )


class OtherTypes(Unequal):
    """Most samples as float32, one as float64."""

    kinds = (torch.float32, torch.float64)

    def __getitem__(self, index: int) -> Any:
        index, x, y = ROWS[index]
        return index, x.to(self.kinds[int(index) == FIRST]), y


class OneType(OtherTypes):
    kinds = (torch.float32, torch.float32)


def every_other(epoch: int, seed: int) -> Any:
    return list(range(0, 48, 2))


def stream(*, shards: int = 4) -> ls.Stream:
    return ls.Stream.of(Endless(), shards=shards)


def opened(shard: int, epoch: int, start: int) -> Any:
    return (ROWS[index] for index in range(start, 12))


def not_opened(shard: int, epoch: int, start: int) -> Any:
    opened(shard, epoch, start)


LOADER: Any = DataLoader(rows(48), batch_size=16)
STREAMED = trains(data=stream())

DATA = [
    Remedy(
        trains(late=lambda: {"data": LOADER}),
        "give data=loader.dataset",
        MEAN,
    ),
    Remedy(
        trains(late=lambda: {"data": Endless()}),
        "or without random access, give an ls.Stream",
        STREAMED,
    ),
    Remedy(
        trains(late=lambda: {"data": ls.Stream.of(rows(48))}),
        "give it as data itself",
        MEAN,
    ),
    Remedy(
        trains(late=lambda: {"data": stream(), "epochs": 1}),
        "so epochs cannot be counted; give steps=",
        trains(data=stream(), steps=2),
    ),
    Remedy(
        trains(late=lambda: {"data": stream(), "microbatch": None}),
        "give a microbatch, for example microbatch=",
        trains(data=stream(shards=8), microbatch=2),
    ),
    Remedy(trains(data=stream(shards=1)), "write shards=", STREAMED),
    Remedy(
        trains(data=ls.Stream(not_opened, shards=4)),
        "or return iter(...)",
        trains(data=ls.Stream(opened, shards=4)),
    ),
    Remedy(
        trains(late=lambda: {"data": stream(), "sampler": every_other}),
        "leave it out, and sample in Stream.open",
        STREAMED,
    ),
    Remedy(
        trains(late=lambda: {"steps": 2, "epochs": 1}),
        "give exactly one of the two",
        trains(epochs=1),
    ),
    Remedy(
        trains(late=lambda: {"steps": 2, "drop_last": True}),
        "so none is short; leave it out",
        MEAN,
    ),
    Remedy(trains(microbatch=32), "or less, or a larger global_batch", trains(microbatch=16)),
    Remedy(
        trains(batch_sampler=lambda epoch, seed: [[[0, 1], [2, 3]]]),
        "it makes the batches and the microbatches; leave these out",
        trains(
            batch_sampler=lambda epoch, seed: [[[0, 1], [2, 3]]], global_batch=None, microbatch=None
        ),
    ),
    Remedy(
        trains(sampler=lambda epoch, seed: np.random.default_rng().permutation(48)),
        "draw from torch's or NumPy's default generators",
        trains(sampler=lambda epoch, seed: torch.randperm(48)),
    ),
    Remedy(
        trains(data=AtOnce(list)),
        "return a tuple, a dict or a tensor for a batch made already",
        trains(data=AtOnce(tuple)),
    ),
    Remedy(trains(data=Unequal()), "give Recipe.collate", trains(data=Unequal(), collate=padded)),
    Remedy(
        trains(data=OtherTypes()),
        "make them so in the dataset or in the collate function",
        trains(data=OneType()),
        by_one_rank=True,
        allow=["data"],
    ),
]


# Evaluations and hooks


def with_plateau(**given: Any) -> dict[str, Any]:
    return {
        "schedule": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        **given,
    }


def on_metric(name: str) -> ls.OnMetric:
    return ls.OnMetric(
        name, lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    )


def measuring(**metrics: Any) -> dict[str, Any]:
    return {"evaluation": ls.Evaluation(data=HELD_OUT, every=1, metrics=metrics)}


class Kept:
    """What a hook keeps, without a way to save it."""

    def __init__(self) -> None:
        self.total = 0.0


class Saved(Kept):
    def state_dict(self) -> dict[str, float]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.total = state["total"]


class Includes(ls.Hook):
    def __init__(self, *names: str, kind: type = Saved) -> None:
        self.names, self.kind = names, kind

    def on_start(self, run: Any) -> None:
        for name in self.names:
            run.include(name, self.kind())


class Misspelled(ls.Hook):
    def on_step(self, run: Any) -> None: ...


class Spelled(ls.Hook):
    def after_step(self, run: Any) -> None: ...


WATCHED = trains(
    partial(ls.ExponentialMovingAverage, 0.9),
    partial(ls.EarlyStopping, patience=1),
    at(lambda run: run.evaluate()),
    at(lambda run: run.log({"their loss": 1.0})),
    partial(Includes, "kept", "other"),
    Spelled,
    **with_plateau(
        evaluation=ls.Evaluation(
            data=HELD_OUT,
            every=1,
            weights="average",
            metrics={"error": ls.Gathered(errors, lambda rows: rows.mean())},
        )
    ),
)
MEASURED = trains(schedule=on_metric("loss"), **measuring(error=ls.Mean(errors)))
FROZEN = trains(at(lambda run: run.freeze("0.*")))
EVALUATIONS = [
    Remedy(trains(**with_plateau()), "give ls.Evaluation(every=...), or another schedule", WATCHED),
    Remedy(trains(schedule=on_metric("accuracy"), **measuring()), "choose one of these", MEASURED),
    Remedy(
        trains(evaluation=ls.Evaluation(data=HELD_OUT, every=1, weights="average")),
        "give hooks=[ls.ExponentialMovingAverage(decay=0.999)]",
        WATCHED,
    ),
    Remedy(
        trains(late=lambda: measuring(loss=ls.Mean(errors))),
        "that name belongs to the recipe's loss or a term; choose another",
        MEASURED,
    ),
    Remedy(trains(late=lambda: measuring(error=errors)), "a metric is ls.Mean(values)", MEASURED),
    Remedy(
        trains(**measuring(error=ls.Gathered(errors, lambda rows: rows))),
        "a metric is one number; reduce it to one",
        WATCHED,
    ),
    Remedy(
        trains(**measuring(error=ls.Mean(squared_error))),
        "leave out .mean() (or .sum())",
        MEASURED,
    ),
    Remedy(
        trains(loss=lacking, **measuring()),
        "give one that does not apply as a zero, (output * 0).sum()",
        trains(loss=always, **measuring()),
    ),
    Remedy(
        trains(late=lambda: {"evaluation": ls.Evaluation(data=stream())}),
        "read the samples into a list",
        trains(evaluation=ls.Evaluation(data=list(Endless()))),
    ),
    Remedy(
        trains(partial(ls.EarlyStopping, patience=1)),
        "it watches evaluations; give ls.Evaluation(every=...)",
        WATCHED,
    ),
    Remedy(
        trains(at(lambda run: run.evaluate())),
        "it measures the recipe's evaluations; give ls.Evaluation(data=...)",
        WATCHED,
    ),
    Remedy(trains(at(lambda run: run.log({"loss": 1.0}))), "choose another name", WATCHED),
    Remedy(
        trains(at(lambda run: run.freeze("backbone.*"))),
        "the optimizer holds no such parameter; it holds",
        FROZEN,
    ),
    Remedy(trains(at(lambda run: run.freeze("*"))), "a step needs one; freeze fewer", FROZEN),
    Remedy(
        trains(partial(Includes, "kept", kind=Kept)),
        "it has no state_dict and load_state_dict; add both",
        WATCHED,
    ),
    Remedy(trains(partial(Includes, "kept", "kept")), "names are unique; choose another", WATCHED),
    Remedy(trains(Misspelled), "use one of them, or a name with another beginning", WATCHED),
]


# Models and optimizers


class Moving(nn.Module):
    """A buffer that its forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, OUTPUTS)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1.0
        return self.layer(x) + 0.01 * self.seen


class Named(Moving):
    self_updating_buffers = ("seen",)


class Misnamed(Moving):
    self_updating_buffers = ("counts",)


class Moved(Moving):
    """The same, moved by a hook."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 0.01 * self.seen


def moves(run: Any) -> None:
    run.model.seen += 1.0


class Observed(nn.Module):
    """The largest output of each feature, as an observer of quantization keeps it: empty before the
    first forward."""

    self_updating_buffers = ("largest",)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, OUTPUTS)
        self.register_buffer("largest", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        if self.training:
            found = output.detach().abs().amax(0)
            self.largest = torch.maximum(self.largest, found) if len(self.largest) else found
        return output / (1.0 + self.largest if len(self.largest) else 1.0)


def observed_before() -> nn.Module:
    model = Observed()
    model(torch.zeros(1, FEATURES))
    return model


class Growing(nn.Module):
    """A codebook that gets a row in each step."""

    self_updating_buffers = ("codes",)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, OUTPUTS)
        self.register_buffer("codes", torch.zeros(1, OUTPUTS))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        if self.training:
            self.codes = torch.cat([self.codes, output.detach().mean(0, keepdim=True)])
        return output - 0.1 * self.codes.sum(0)


class OfOneSize(Growing):
    """The same in a buffer of its largest size."""

    self_updating_buffers = ("codes", "used")

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(8, OUTPUTS))
        self.register_buffer("used", torch.ones((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        if self.training:
            self.codes[self.used] = output.detach().mean(0)
            self.used += 1
        return output - 0.1 * self.codes.sum(0)


class Gated(nn.Module):
    """A parameter that is a scalar, or has one dim."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(FEATURES, OUTPUTS), nn.Parameter(torch.ones(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.gate * self.layer(x)  # type: ignore[no-any-return]


class Quantized(nn.Module):
    """A weight of which the cast is quantized, through `.data` or as autograd sees it."""

    def __init__(self, *, by_data: bool) -> None:
        super().__init__()
        self.layer, self.by_data = nn.Linear(FEATURES, FEATURES), by_data
        self.weight = nn.Parameter(torch.randn(FEATURES, OUTPUTS))

    def forward(self, x: Tensor) -> Tensor:
        cast = self.weight.to(torch.bfloat16)
        with torch.no_grad():
            (cast.data if self.by_data else cast).copy_((8 * cast).round() / 8)
        return self.layer(x) @ cast  # type: ignore[no-any-return]


class Turned(nn.Module):
    """A weight that is the transpose of what it was made from."""

    def __init__(self, is_contiguous: bool) -> None:
        super().__init__()
        value = torch.linspace(-1, 1, FEATURES * OUTPUTS).view(OUTPUTS, FEATURES).t()
        self.weight = nn.Parameter(value.contiguous() if is_contiguous else value)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Chain(nn.Module):
    """Blocks, of which a forward may leave out the first."""

    def __init__(self, *, starts: int = 0, shared: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3))
        self.head, self.starts = nn.Linear(FEATURES, OUTPUTS), starts
        if shared:
            self.head = nn.Linear(FEATURES, FEATURES)
            self.head.weight = self.blocks[2].weight  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[self.starts :]:
            x = torch.tanh(block(x))
        return self.head(x)[:, :OUTPUTS]  # type: ignore[no-any-return]


class Skips(Chain):
    """Calls its first block with weight 0 where it does not count."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.0 * self.blocks[0](x))


class Listed(nn.Module):
    """Layers in a plain list."""

    make: Any = list

    def __init__(self) -> None:
        super().__init__()
        self.layers = self.make([nn.Linear(FEATURES, OUTPUTS)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)  # type: ignore[no-any-return]


class Registered(Listed):
    make = nn.ModuleList


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(OUTPUTS))


def run_once() -> nn.Module:
    model = lazy()
    model(torch.zeros(1, FEATURES))
    return model


class Waves(nn.Module):
    """A complex weight, as it is or as real numbers."""

    def __init__(self, as_real: bool) -> None:
        super().__init__()
        self.as_real, value = as_real, torch.ones(FEATURES // 2 + 1, dtype=torch.cfloat)
        self.weight, self.head = (
            nn.Parameter(torch.view_as_real(value).clone() if as_real else value),
            nn.Linear(FEATURES, OUTPUTS),
        )

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.view_as_complex(self.weight) if self.as_real else self.weight
        return self.head(torch.fft.irfft(torch.fft.rfft(x) * weight, n=FEATURES))  # type: ignore[no-any-return]


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(48, 8, sparse=sparse), nn.Linear(8, OUTPUTS)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.words(words))  # type: ignore[no-any-return]


def of_words(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return (model(batch[0]) - batch[2]).pow(2).mean()


def normalised(norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), norm(16), nn.Linear(16, OUTPUTS))


def grouped() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 16),
        nn.SyncBatchNorm(16, process_group=object()),
        nn.Linear(16, OUTPUTS),
    )


def rows64() -> TensorDataset:
    index, x, y = ROWS.tensors
    return TensorDataset(index, x.double(), y.double())


class Learned(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return squared_error(model, batch) * torch.exp(-self.scale) + self.scale


def with_the_name_loss() -> nn.Module:
    model = network()
    model.loss_module = nn.Identity()
    return model


def with_another_name() -> nn.Module:
    model = network()
    model.their_loss_module = nn.Identity()
    return model


def half_converted() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 16), nn.SyncBatchNorm(16), nn.BatchNorm1d(16), nn.Linear(16, OUTPUTS)
    )


def converted() -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(half_converted())


class ListedDescent(torch.optim.Optimizer):
    """Updates the parameters that it keeps in a list of its own."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.listed = params

    def parameters(self) -> list[nn.Parameter]:
        return self.listed

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.parameters():
            parameter.sub_(0.1 * parameter.grad)  # type: ignore[operator]


class GroupedDescent(ListedDescent):
    def parameters(self) -> list[nn.Parameter]:
        return self.param_groups[0]["params"]  # type: ignore[no-any-return]


def of_a_list(kind: type[ListedDescent], model: nn.Module) -> torch.optim.Optimizer:
    return kind(list(model.parameters()))


def without_its_bias(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [each for name, each in model.named_parameters() if name != "2.bias"], lr=0.1
    )


def frozen_bias() -> nn.Module:
    model = network()
    model[2].bias.requires_grad_(False)  # type: ignore[index]
    return model


def in_two(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [sgd(model), sgd(model[2])]  # type: ignore[index]


def each_in_one(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [sgd(model[0]), sgd(model[2])]  # type: ignore[index]


def head_alone(model: nn.Module) -> torch.optim.Optimizer:
    """All parameters, of which the first layer's are frozen."""
    model[0].requires_grad_(False)  # type: ignore[index]
    return sgd(model)


def replaced(run: Any) -> None:
    run.model[2] = nn.Linear(16, OUTPUTS)


def overwritten(run: Any) -> None:
    with torch.no_grad():
        run.model[2].weight.copy_(torch.full_like(run.model[2].weight, 0.5))


def added(run: Any) -> None:
    run.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def rate(run: Any) -> None:
    run.optimizers[0].param_groups[0]["lr"] = 0.5 ** (run.step + 1)


def half(run: Any) -> None:
    run.model[2].weight.requires_grad_(False)


def hooked() -> nn.Module:
    model = network()
    model[0].weight.register_post_accumulate_grad_hook(
        lambda parameter: parameter.grad.clamp_(-0.1, 0.1)
    )  # type: ignore[index]
    return model


class Clamps(ls.Hook):
    def after_backward(self, run: Any, model: Any) -> None:
        model[0].weight.grad.clamp_(-0.1, 0.1)


def clamped() -> nn.Module:
    model = network()
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))  # type: ignore[index]
    return model


NAMED = trains(model=Named)

MODELS = [
    Remedy(
        trains(model=Moving),
        "name a buffer in self_updating_buffers of its module",
        NAMED,
    ),
    Remedy(
        trains(model=Moving),
        "update it outside the forward, between steps, in a hook's after_step",
        trains(each_step(moves), model=Moved),
    ),
    Remedy(
        trains(model=Observed),
        "run the model once on an example in its factory",
        trains(model=observed_before),
    ),
    Remedy(
        trains(model=Growing),
        "and count the rows in use in another buffer",
        trains(model=OfOneSize),
    ),
    Remedy(
        trains(late=lambda: {"model": network()}),
        "as the plan lays it out; give a function",
        MEAN,
    ),
    Remedy(trains(model=Listed), "nn.ModuleList is", trains(model=Registered)),
    Remedy(
        trains(model=lazy),
        "run the model once on an example in the model's factory",
        trains(model=run_once),
    ),
    Remedy(
        trains(model=partial(Words, True), loss=of_words),
        "build it with sparse=False",
        trains(model=partial(Words, False), loss=of_words),
    ),
    Remedy(
        trains(model=partial(Waves, False)),
        "use torch.view_as_complex in the forward",
        trains(model=partial(Waves, True)),
    ),
    Remedy(
        trains(optimizer=without_its_bias),
        "must be in exactly one optimizer: add them",
        MEAN,
    ),
    Remedy(
        trains(optimizer=without_its_bias),
        "or freeze them with requires_grad_(False)",
        trains(model=frozen_bias, optimizer=without_its_bias),
    ),
    Remedy(
        trains(optimizer=in_two),
        "give every parameter to exactly one",
        trains(optimizer=each_in_one),
    ),
    Remedy(
        trains(optimizer=lambda model: torch.optim.SGD(network().parameters(), lr=0.1)),
        "build it from the model that the function gets",
        MEAN,
    ),
    Remedy(
        trains(at(added)),
        "to train some later, call run.freeze and run.unfreeze in a hook",
        trains(at(lambda run: run.unfreeze("0.*")), optimizer=head_alone),
    ),
    Remedy(trains(at(replaced)), "change values in place", trains(at(overwritten))),
    Remedy(
        trains(at(half), steps=3),  # refused after its step 1, from which the remedy goes on
        "call run.freeze(name)",
        trains(at(lambda run: run.freeze("2.weight"), step=2), steps=3),
    ),
    Remedy(
        trains(at(lambda run: run.freeze(f"{2 * run.rank}.*"))),
        "all train the same parameters; call it on every rank",
        FROZEN,
        alone=False,
    ),
    Remedy(
        trains(partial(AtStart, lambda run: run.rank == 0 and run.model.eval())),
        "call train() or eval() on every rank",
        trains(partial(AtStart, lambda run: run.model.eval())),
        alone=False,
    ),
    Remedy(trains(model=Misnamed), "name buffers that it registers", NAMED),
    Remedy(
        trains(each_step(rate), schedule=lambda step: 1.0),
        "leave the schedule out",
        trains(each_step(rate)),
    ),
    Remedy(
        trains(model=hooked),
        "change .grad in after_backward of an ls.Hook, or with parameter.register_hook",
        trains(Clamps),
    ),
    Remedy(trains(model=hooked), "or with parameter.register_hook", trains(model=clamped)),
]
CHAINED = trains(model=Chain, blocks=["blocks.*"])

LAYERS = [
    Remedy(
        trains(model=normalised, data=rows(17), epochs=1),
        "use drop_last=True",
        trains(model=normalised, data=rows(17), epochs=1, drop_last=True),
    ),
    Remedy(
        trains(model=normalised, data=rows(17), epochs=1),
        "or another global_batch or microbatch",
        trains(model=normalised, data=rows(17), epochs=1, global_batch=15, microbatch=5),
    ),
    Remedy(trains(gradient_compression="bf16"), "use gradient_compression='none'", MEAN),
    Remedy(
        trains(microbatch=None), "give a microbatch, for example microbatch=", trains(microbatch=2)
    ),
    Remedy(
        trains(optimizer=partial(of_a_list, ListedDescent)),
        "let step() take parameters from self.param_groups",
        trains(optimizer=partial(of_a_list, GroupedDescent)),
        plan="shard=2",
        alone=False,
    ),
    Remedy(
        trains(model=Gated),
        "give it one dim, torch.zeros(1)",
        trains(model=partial(Gated, 1)),
        plan="shard=2",
        alone=False,
    ),
    Remedy(
        trains(model=partial(Quantized, by_data=True), precision="bf16"),
        "change it within torch.no_grad() and without .data, which keeps the cast",
        trains(model=partial(Quantized, by_data=False), precision="bf16"),
        plan="shard=2",
        alone=False,
    ),
    Remedy(
        trains(model=partial(Turned, False)),
        "nn.Parameter(value.contiguous())",
        trains(model=partial(Turned, True)),
        plan="shard=2",
        alone=False,
    ),
    Remedy(
        trains(model=partial(Chain, starts=1), blocks=["blocks.*"]),
        "call the first block in every forward",
        trains(model=partial(Skips, starts=1), blocks=["blocks.*"]),
        plan="shard=2",
        alone=False,
    ),
    Remedy(
        trains(model=partial(Chain, starts=1), blocks=["blocks.*"]),
        "or name other blocks in Recipe.blocks",
        trains(model=partial(Chain, starts=1), blocks=["blocks.1", "blocks.2"]),
        plan="shard=2",
        alone=False,
    ),
    Remedy(
        trains(model=partial(Chain, shared=True), blocks=["blocks.*"]),
        "leave it out of Recipe.blocks",
        trains(model=partial(Chain, shared=True), blocks=["blocks.0", "blocks.1"]),
        plan="shard=2",
    ),
    Remedy(
        trains(model=Chain, blocks=["blocks", "blocks.0"]),
        "give the outer or the inner ones",
        CHAINED,
        plan="shard=2",
    ),
    Remedy(
        trains(model=Chain, blocks=["layers.*"]),
        "give names or patterns such as",
        CHAINED,
        plan="shard=2",
    ),
    Remedy(
        trains(model=partial(normalised, nn.SyncBatchNorm)),
        "or plain BatchNorm",
        trains(model=normalised),
        alone=False,
    ),
    Remedy(
        trains(model=partial(normalised, nn.SyncBatchNorm), data=rows(17), epochs=1),
        "choose a microbatch size that leaves no remainder of one sample",
        trains(
            model=partial(normalised, nn.SyncBatchNorm),
            data=rows(17),
            epochs=1,
            global_batch=15,
            microbatch=5,
        ),
        alone=False,
        bitwise=False,
        allow=["global_batch", "microbatch"],
    ),
    Remedy(
        trains(model=grouped),
        "leave process_group out",
        trains(model=partial(normalised, nn.SyncBatchNorm)),
        alone=False,
        bitwise=False,
    ),
    Remedy(
        trains(
            model=lambda: nn.Sequential(nn.Linear(FEATURES, OUTPUTS).double()),
            data=rows64(),
            gradient_compression="bf16",
        ),
        "make the model float32 (precision='bf16' computes in bf16 all the same), or leave"
        " gradient_compression='none'",
        trains(model=lambda: nn.Sequential(nn.Linear(FEATURES, OUTPUTS).double()), data=rows64()),
        bitwise=False,
    ),
    Remedy(
        trains(model=partial(normalised, nn.SyncBatchNorm), data=stream()),
        "use plain BatchNorm, with statistics of one microbatch, or a map-style dataset",
        trains(model=normalised, data=stream()),
        alone=False,
        bitwise=False,
    ),
    Remedy(
        trains(gradient_compression="bf16"),
        "use a plan with replicate only, or gradient_compression='none'",
        MEAN,
        plan="shard=2",
        alone=False,
        bitwise=False,
    ),
    Remedy(
        trains(model=with_the_name_loss, loss=Learned()),
        "rename that attribute",
        trains(model=with_another_name, loss=Learned()),
    ),
    Remedy(
        trains(model=half_converted),
        "convert all with nn.SyncBatchNorm.convert_sync_batchnorm(model)",
        trains(model=converted),
        alone=False,
        bitwise=False,
    ),
]


# Loops of one's own


def plain(step: Any, model: Any, optimizer: Any) -> None:
    for batch in step.microbatches():
        step.backward(squared_error(model, batch))
    step.commit(optimizer)


def two_backwards(step: Any, model: Any, optimizer: Any) -> None:
    for batch in step.microbatches():
        step.backward(squared_error(model, batch))
        step.backward(0.1 * model(batch[1]).pow(2).mean())
    step.commit(optimizer)


def one_backward(step: Any, model: Any, optimizer: Any) -> None:
    for batch in step.microbatches():
        step.backward(squared_error(model, batch) + 0.1 * model(batch[1]).pow(2).mean())
    step.commit(optimizer)


def accumulated(step: Any, model: Any, optimizer: Any) -> None:
    for batch in step.microbatches():
        step.accumulate(squared_error(model, batch))
    step.commit(optimizer)


def one_left_out(step: Any, model: Any, optimizer: Any) -> None:
    for batch in step.microbatches():
        if not is_first(batch):
            step.backward(squared_error(model, batch))
    step.commit(optimizer)


def one_of_weight_0(step: Any, model: Any, optimizer: Any) -> None:
    for batch in step.microbatches():
        step.backward(squared_error(model, batch) * (0 if is_first(batch) else 1))
    step.commit(optimizer)


def no_commit(step: Any, model: Any, optimizer: Any) -> None:
    for batch in step.microbatches():
        step.backward(squared_error(model[0], batch), optimizer[0])
    step.commit(optimizer[0])


def a_skip(step: Any, model: Any, optimizer: Any) -> None:
    no_commit(step, model, optimizer)
    step.skip(optimizer[1])


def both(step: Any, model: Any, optimizer: Any) -> None:
    for batch in step.microbatches():
        for each, its in zip(model, optimizer, strict=True):
            step.backward(squared_error(each, batch), its)
    for its in optimizer:
        step.commit(its)


def one_by_one(step: Any, model: Any, optimizer: Any) -> None:
    for each, its in zip(model, optimizer, strict=True):
        for batch in step.microbatches():
            step.backward(squared_error(each, batch), its)
        step.commit(its)


def unnamed(step: Any, model: Any, optimizer: Any) -> None:
    for batch in step.microbatches():
        step.backward(squared_error(model[0], batch))


def computed_twice(step: Any, model: Any, optimizer: Any) -> None:
    step.compute(features, outputs_squared)
    step.compute(features, lambda output, batch: 0.1 * output.pow(2).mean())
    step.commit(optimizer)


def computed_once(step: Any, model: Any, optimizer: Any) -> None:
    step.compute(
        features, lambda output, batch: outputs_squared(output, batch) + 0.1 * output.pow(2).mean()
    )
    step.commit(optimizer)


def outside(step: Any, model: Any, optimizer: Any) -> None:
    step.backward(squared_error(model, rows(4)[:]))


def committed_twice(step: Any, model: Any, optimizer: Any) -> None:
    plain(step, model, optimizer)
    step.commit(optimizer)


def skips_late(step: Any, model: Any, optimizer: Any) -> None:
    for batch in step.microbatches():
        step.backward(squared_error(model, batch))
    step.skip(optimizer)


def skips(step: Any, model: Any, optimizer: Any) -> None:
    if step.index == 0:
        step.skip(optimizer)
    else:
        plain(step, model, optimizer)


def backward_in_loop(step: Any, model: Any, optimizer: Any) -> None:
    for batch in step.microbatches():
        model(batch[1]).pow(2).mean().backward()
        step.backward(squared_error(model, batch))
    step.commit(optimizer)


PLAIN, ONE_BACKWARD = loops(plain), loops(one_backward)
ONE_BY_ONE = loops(one_by_one, models=2)

LOOPS = [
    Remedy(loops(two_backwards), "add the losses and call it on their sum", ONE_BACKWARD),
    Remedy(loops(accumulated), "call step.backward(loss)", PLAIN),
    Remedy(loops(one_left_out), "multiply its loss by 0", loops(one_of_weight_0), by_one_rank=True),
    Remedy(
        loops(no_commit, models=2),
        "or step.skip(optimizer) for one that is not to change",
        loops(a_skip, models=2),
    ),
    Remedy(
        loops(both, models=2),
        "loop over step.microbatches() and commit for one model, then for the next",
        ONE_BY_ONE,
    ),
    Remedy(
        loops(unnamed, models=2),
        "name one that session.prepare returned",
        ONE_BY_ONE,
    ),
    Remedy(
        loops(computed_twice), "let its loss return the sum of both losses", loops(computed_once)
    ),
    Remedy(loops(outside), "call it inside the loop", PLAIN),
    Remedy(loops(committed_twice), "each model has one per step", PLAIN),
    Remedy(loops(skips_late), "commit it, or call skip before", loops(skips)),
    Remedy(loops(backward_in_loop), "add to the loss what it was called on", ONE_BACKWARD),
]

# Models on several processes each


class Attention(nn.Module):
    """Of 6 features, in 2 or 3 heads; written for all heads, or for those of its rank."""

    def __init__(self, heads: int, *, written: int | None = None) -> None:
        super().__init__()
        self.heads, self.written = heads, written if written is not None else heads
        self.query, self.projection, self.last = (
            nn.Linear(6, 6),
            nn.Linear(6, 6),
            nn.Linear(6, OUTPUTS),
        )

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).view(len(x), self.written, 6 // self.heads)
        return self.last(self.projection((query.softmax(-1) * query).reshape(len(x), -1)))  # type: ignore[no-any-return]


class Normed(nn.Module):
    """A norm, or a softmax, over the features between two layers."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(FEATURES, 8), norm(), nn.Linear(8, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)))  # type: ignore[no-any-return]


class Fused(nn.Module):
    """A layer of two matrices one below the other, as it is or as two layers."""

    def __init__(self, is_one: bool) -> None:
        super().__init__()
        both = nn.Linear(FEATURES, 16)
        self.down, self.is_one = nn.Linear(8, OUTPUTS), is_one
        if is_one:
            self.gate_up_proj = both
        else:
            self.gate, self.up = nn.Linear(FEATURES, 8), nn.Linear(FEATURES, 8)
            self.gate.load_state_dict({"weight": both.weight[:8], "bias": both.bias[:8]})
            self.up.load_state_dict({"weight": both.weight[8:], "bias": both.bias[8:]})

    def forward(self, x: Tensor) -> Tensor:
        gate, up = (
            self.gate_up_proj(x).chunk(2, dim=-1) if self.is_one else (self.gate(x), self.up(x))
        )
        return self.down(gate.sigmoid() * up)  # type: ignore[no-any-return]


class Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, width), nn.Linear(width, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


def of_four() -> nn.Module:
    """With one output more than there are targets."""
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, OUTPUTS + 1))


def of_three(output: Tensor, batch: Any) -> Tensor:
    return outputs_squared(output[:, :OUTPUTS], batch)


class Lists(nn.Module):
    """Hands on a list, or a tensor."""

    def __init__(self, is_list: bool) -> None:
        super().__init__()
        self.inner, self.is_list = nn.Linear(FEATURES, FEATURES), is_list

    def forward(self, x: Any) -> Any:
        output = torch.tanh(self.inner(x[0] if isinstance(x, list) else x))
        return [output] if self.is_list else output


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, OUTPUTS)

    def forward(self, x: Any) -> Any:
        return self.inner(x[0] if isinstance(x, list) else x)


class Named3(nn.Module):
    """Parts that are called one after another, with something between the first two or as a part of
    one."""

    def __init__(self, *, between: bool = False, extra: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.head = (
            nn.Linear(FEATURES, 8),
            nn.Linear(8, 8),
            nn.Linear(8, OUTPUTS),
        )
        self.act, self.between = nn.Tanh(), between

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = torch.tanh(x) if self.between else self.act(x)
        return self.head(self.second(x))  # type: ignore[no-any-return]


def chain_of(*norms: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 8), norms[0], nn.Linear(8, 8), norms[-1], nn.Linear(8, OUTPUTS)
    )


def one_norm() -> nn.Module:
    return chain_of(nn.BatchNorm1d(8))


def two_norms() -> nn.Module:
    return chain_of(nn.BatchNorm1d(8), nn.BatchNorm1d(8))


def cut_off() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 8), Detached(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, OUTPUTS)
    )


def frozen_before() -> nn.Module:
    model = cut_off()
    model[0].requires_grad_(False)  # type: ignore[index]
    return model


class Detached(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


def frozen_out(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)


def staged(**changes: Any) -> Training:
    return trains(inputs=features, loss=outputs_squared, **changes)


def on_several(plan: str, mistake: Training, says: str, remedy: Training) -> Remedy:
    return Remedy(mistake=mistake, says=says, remedy=remedy, plan=plan, alone=False, bitwise=False)


HEADS = {"query": "colwise", "projection": "rowwise"}
STYLES = {"up": "colwise", "down": "rowwise"}
TENSOR = "tensor=2"
PIPELINE = "pipeline=2"
IN_STAGES = staged(model=Named3, stages=["first", "act", "second", "head"])
WIDE = trains(model=partial(Wide, 8), tensor=STYLES)

PARTS = [
    on_several(
        TENSOR,
        trains(model=partial(Wide, 8)),
        "set `tensor_plan` on the model",
        WIDE,
    ),
    on_several(
        TENSOR,
        trains(model=partial(Attention, 2), tensor=HEADS),
        "query.view(batch, length, -1, head_dim) and mixed.reshape(batch, length, -1)",
        trains(model=partial(Attention, 2, written=-1), tensor=HEADS),
    ),
    on_several(
        TENSOR,
        trains(model=partial(Attention, 3, written=-1), tensor=HEADS),
        "or leave this attention whole",
        trains(model=partial(Attention, 3, written=-1), tensor={"last": "rowwise_split"}),
    ),
    on_several(
        TENSOR,
        trains(model=partial(Wide, 7), tensor=STYLES),
        "(a vocabulary may be padded), or leave the layer whole",
        WIDE,
    ),
    on_several(
        TENSOR,
        trains(model=partial(Normed, partial(nn.LayerNorm, 8)), tensor=STYLES),
        "or give the first layer 'colwise_gathered' and the second 'rowwise_split', which leave "
        "the code between them unsharded",
        trains(
            model=partial(Normed, partial(nn.LayerNorm, 8)),
            tensor={"up": "colwise_gathered", "down": "rowwise_split"},
        ),
    ),
    on_several(
        TENSOR,
        trains(model=partial(Normed, partial(nn.Softmax, -1)), tensor=STYLES),
        "or give these layers 'colwise_gathered' and 'rowwise_split'",
        trains(
            model=partial(Normed, partial(nn.Softmax, -1)),
            tensor={"up": "colwise_gathered", "down": "rowwise_split"},
        ),
    ),
    on_several(
        TENSOR,
        trains(model=partial(Fused, True), tensor={"gate_up_proj": "colwise", "down": "rowwise"}),
        "or give this one 'colwise_gathered' and the next 'rowwise_split'",
        trains(
            model=partial(Fused, True),
            tensor={"gate_up_proj": "colwise_gathered", "down": "rowwise_split"},
        ),
    ),
    on_several(
        TENSOR,
        trains(model=partial(Fused, True), tensor={"gate_up_proj": "colwise", "down": "rowwise"}),
        "make separate layers (query, key and value)",
        trains(
            model=partial(Fused, False),
            tensor={"gate": "colwise", "up": "colwise", "down": "rowwise"},
        ),
    ),
    on_several(
        TENSOR,
        trains(model=of_four, inputs=features, loss=of_three, tensor={"2": "colwise"}),
        "or give the output layer the style 'vocabulary' or 'colwise_gathered'",
        trains(model=of_four, inputs=features, loss=of_three, tensor={"2": "colwise_gathered"}),
    ),
    on_several(
        TENSOR,
        trains(model=of_four, inputs=features, loss=of_three, tensor={"2": "colwise"}),
        "end with a 'rowwise' layer",
        trains(
            model=of_four, inputs=features, loss=of_three, tensor={"0": "colwise", "2": "rowwise"}
        ),
    ),
    on_several(
        PIPELINE,
        trains(),
        "give Recipe(inputs=lambda batch: ..., loss=lambda output, batch: ...)",
        staged(),
    ),
    on_several(
        PIPELINE,
        staged(model=Named3),
        "name them, as in Recipe.stages=[",
        IN_STAGES,
    ),
    on_several(
        PIPELINE,
        staged(model=partial(Named3, between=True), stages=["first", "second", "head"]),
        "move other code into a part",
        IN_STAGES,
    ),
    on_several(
        PIPELINE,
        staged(model=Named3, stages=["first", "act", "second"]),
        "name the modules that hold these too, or move them into one",
        IN_STAGES,
    ),
    on_several(
        PIPELINE,
        staged(model=Named3, stages=["first", "act", "first", "second", "head"]),
        "drop a pattern",
        IN_STAGES,
    ),
    on_several(
        PIPELINE,
        staged(model=lambda: nn.Sequential(Wide(8))),
        "use a smaller pipeline, or name smaller parts in Recipe.stages",
        staged(
            model=lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, OUTPUTS))
        ),
    ),
    on_several(
        PIPELINE,
        staged(microbatch=16),
        "choose a smaller microbatch, so that a step has",
        staged(microbatch=8),
    ),
    on_several(
        PIPELINE,
        staged(model=lambda: nn.Sequential(Lists(True), Lists(True), Last())),
        "return those, or put both parts into one module",
        staged(model=lambda: nn.Sequential(Lists(False), Lists(False), Last())),
    ),
    on_several(
        PIPELINE,
        staged(model=lambda: nn.Sequential(Lists(True), Last(), nn.Linear(OUTPUTS, OUTPUTS))),
        "or put both parts into one module",
        staged(
            model=lambda: nn.Sequential(
                nn.Sequential(Lists(True), Last()), nn.Linear(OUTPUTS, OUTPUTS)
            )
        ),
    ),
    on_several(
        PIPELINE, staged(model=one_norm), "give each its own BatchNorm", staged(model=two_norms)
    ),
    on_several(
        PIPELINE,
        staged(model=cut_off),
        "freeze them (requires_grad_(False)), or pass on a tensor with a gradient",
        staged(model=frozen_before, optimizer=frozen_out),
    ),
    on_several(
        PIPELINE,
        loops(plain),
        "call step.compute(inputs, loss), with inputs and loss as in a Recipe",
        loops(
            lambda step, model, optimizer: (
                step.compute(features, outputs_squared),
                step.commit(optimizer),
            )
        ),
    ),
]


class Successors(nn.Module):
    """A language model that sees one token."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.words(tokens))
        return logits


DOCUMENTS = [torch.arange(1 + index % 7) for index in range(96)]
COUNTED = [1 + index % 7 for index in range(96)]
CLASSES = [{"input_ids": document, "labels": document} for document in DOCUMENTS]


def successors(data: Callable[[], Any], **changes: Any) -> Training:
    """Trains on packed documents."""

    def loss(model: nn.Module, batch: Any) -> Any:
        logits = model(batch["input_ids"])[:, :-1].flatten(0, 1)
        return ls.Sum(F.cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="sum"))

    return trains(
        late=lambda: {"data": data()},
        **{
            "model": Successors,
            "loss": loss,
            "weight": lambda batch: (batch["labels"][:, 1:] != -100).sum(),
            **changes,
        },
    )


def packs(given: Any, length: int = 8, **options: Any) -> Training:
    return successors(lambda: ls.pack(given, length, **options))


def mixes(streams: Any, **weights: Any) -> Training:
    return trains(late=lambda: {"data": ls.Stream.mix(streams, weights=weights)})


def texts(shard: int, epoch: int, start: int) -> Any:
    return iter(DOCUMENTS[start:])


def empty_texts(shard: int, epoch: int, start: int) -> Any:
    return (document[:0] for document in DOCUMENTS[start:])


MIXED, MIXED_ROWS = {"all": stream(), "few": ls.Stream(opened, shards=4)}, rows(48)
PACKED, PACKED_CLASSES = packs(DOCUMENTS), packs(CLASSES)
PACKED_COUNTED = packs(DOCUMENTS, lengths=COUNTED)
PACKED_STREAM = packs(ls.Stream(texts, shards=4))

PACKING = [
    Remedy(
        trains(
            late=lambda: {
                "data": list(ls.Stream.mix(MIXED, weights={"all": 1, "few": 1}).open(0, 0, 0))
            }
        ),
        "open the streams that it was made of",
        trains(data=list(MIXED["few"].open(0, 0, 0))),
    ),
    Remedy(mixes(list(MIXED)), "give a dict of them, such as", mixes(MIXED, all=1, few=2)),
    Remedy(
        trains(late=lambda: {"data": ls.Stream.mix({1: stream()}, weights={1: 1})}),
        "a name is a str; name it",
        mixes({"1": stream()}, **{"1": 1}),
    ),
    Remedy(
        mixes({"all": MIXED_ROWS, "few": MIXED_ROWS}, all=1, few=1),
        "or mix datasets by ls.samplers.mixture",
        trains(
            data=ConcatDataset([MIXED_ROWS, MIXED_ROWS]),
            sampler=ls.samplers.mixture([48, 48], [1, 1], samples=96),
        ),
    ),
    Remedy(
        mixes(MIXED, all=1, other=1),
        "each stream has one weight, under its name; give weights=",
        mixes(MIXED, all=1, few=1),
    ),
    Remedy(
        mixes(MIXED, all=1, few=0),
        "leave out a stream that is not to be read",
        mixes({"all": MIXED["all"]}, all=1),
    ),
    Remedy(
        mixes({"all": stream(shards=8), "few": MIXED["few"]}, all=1, few=1),
        "so all have equally many; give each shards=",
        mixes({"all": stream(shards=8), "few": ls.Stream(opened, shards=8)}, all=1, few=1),
    ),
    Remedy(packs(DOCUMENTS, 1), "give at least 2", packs(DOCUMENTS, 2)),
    Remedy(packs(ls.pack(DOCUMENTS, 8), 16), "pack the documents themselves", packs(DOCUMENTS, 16)),
    Remedy(
        packs([{"text": "a"}]), "tokenize it", packs([{"input_ids": each} for each in DOCUMENTS])
    ),
    Remedy(packs(["a", "b"]), "tokenize it before it is packed", PACKED),
    Remedy(
        packs([{**each, "attention_mask": 0 * each["input_ids"]} for each in CLASSES]),
        "tokenize without padding",
        PACKED_CLASSES,
    ),
    Remedy(
        packs([{**each, "labels": each["labels"][1:]} for each in CLASSES]),
        "if it is not to be predicted; correct them",
        PACKED_CLASSES,
    ),
    Remedy(
        packs(DOCUMENTS, lengths=[2] * 96),
        "correct lengths, and leave out what changes the number of tokens",
        PACKED_COUNTED,
        by_one_rank=True,
    ),
    Remedy(
        packs(DOCUMENTS, lengths=COUNTED[1:]),
        "it has the number of tokens of each document",
        PACKED_COUNTED,
    ),
    Remedy(
        packs([document[:0] for document in DOCUMENTS]),
        "documents without a token; a row has at least one; check what tokenizes them",
        PACKED,
    ),
    Remedy(
        packs(ls.Stream(texts, shards=4), lengths=COUNTED),
        "which is read in any case; leave them out",
        PACKED_STREAM,
    ),
    Remedy(
        packs(ls.Stream(empty_texts, shards=4)),
        "a row has at least one; check what tokenizes them",
        PACKED_STREAM,
        by_one_rank=True,
    ),
]

SECTIONS = {
    "losses": LOSSES,
    "data": DATA,
    "evaluations and hooks": EVALUATIONS,
    "models and optimizers": MODELS,
    "layers and gradients": LAYERS,
    "loops": LOOPS,
    "parts of models": PARTS,
    "mixtures and packing": PACKING,
}

PLACES = (
    "comm/devices.py",
    "plan.py",
    "data/fetch.py",
    "data/loader.py",
    "data/packing.py",
    "data/streams.py",
    "hooks/loss_check.py",
    "model/*.py",
    "model/context/*.py",
    "recipe/data.py",
    "recipe/sequence.py",
    "training/evaluate.py",
    "training/hook.py",
    "training/loop.py",
    "training/loss.py",
    "training/batch_loss.py",
    "training/optim/*.py",
    "training/reducers/*.py",
    "training/run.py",
    "training/set_up.py",
    "training/step.py",
)
"""The files of the package whose errors are of the plan, the recipe and the step."""

SHARDED = (
    "training/test_sharded_models.py::test_what_the_errors_recommend_is_what_one_process_trains"
)
BRANCHES = (
    "training/test_sharded_models.py"
    "::test_the_remedies_for_a_branch_that_gets_the_data_train_the_model_of_one_process"
)
BACKWARDS = "training/test_sharded_models.py::test_other_backwards_are_right_or_refused_alike"
GRADIENT_HOOKS = "training/test_gradient_hooks.py::test_the_remedies_are_the_same_under_every_plan"
OPTIMIZER_STATE = "training/test_optimizer_state.py::test_what_cannot_be_saved_is_refused_in_the_first_step_and_the_remedy_works"
COLLECTIVES = "training/test_collectives.py::test_what_synchronises_where_there_are_several_processes_is_right"
REPORTS = "training/test_reports.py::test_what_would_be_another_model_is_refused_and_the_remedy_is_one_model"
CHUNKED = "training/test_chunked_logits.py::test_what_the_errors_recommend_trains"
CHUNKED_PLANS = "training/test_chunked_logits.py::test_every_plan_trains_the_model_of_whole_logits"
PLANS = "device/test_plan_remedies.py::test_the_plans_that_an_error_recommends_train_the_model_of_one_process"
RECOMPUTED = "training/test_recomputation.py::test_what_cannot_be_recomputed_is_refused_and_the_remedies_work"
CONTEXT = "training/test_context_axis.py::test_what_cannot_be_cut_is_refused_on_all_ranks_and_the_remedies_train_the_model_of_one_process"
ELSEWHERE = {
    "decide for each token by itself (torch.where)": (
        "training/test_host_reads.py::test_ranks_that_would_decide_differently_refuse_it"
    ),
    "leave {said} out, or {axis}": CONTEXT,
    "give Recipe(sequence=ls.Sequence(chunks={least})), or a smaller context": CONTEXT,
    "leave {said} or sequence out": CONTEXT,
    "sum in float32: output.float()": CONTEXT,
    "leave exchange=heads out, or numerics=bitwise": CONTEXT,
    "any number of processes if the recipe has them; give Recipe(sequence=ls.Sequence())": CONTEXT,
    "give each part its own module, and share the parameters": (
        "training/test_bitwise_pipeline.py::test_one_module_that_is_two_parts_is_refused"
    ),
    "choose colwise and rowwise in": "training/test_context_axis.py::test_ranks_that_share_out_tokens_train_the_model_of_one_process",
    "use machines of one kind, or numerics=fast": (
        "device/test_sharing_devices.py::test_unequal_devices_are_refused_under_bitwise_and_said_otherwise"
    ),
    "functional_call and weights of one module in another, ": SHARDED,
    "leave inplace out, or use replicate": SHARDED,
    "take from its output what you need; or use replicate": SHARDED,
    "name modules of one dtype in Recipe.blocks": SHARDED,
    "leave blocks whose calls depend on the data out of Recipe.blocks": BRANCHES,
    "an input with a gradient, input.requires_grad_(); or choose replicate": BRANCHES,
    "with a gradient that is itself differentiated": SHARDED,
    "give the layer a class with a forward of its own": SHARDED,
    "by another tensor, as torch.func.functional_call does": SHARDED,
    "pass use_reentrant=False to torch.utils.checkpoint.checkpoint": BACKWARDS,
    "that the factory made; ": GRADIENT_HOOKS,
    "where parameter and gradient are sharded alike": GRADIENT_HOOKS,
    "or use parameter.register_hook for each parameter, whose hooks are called once per step": (
        GRADIENT_HOOKS
    ),
    "and let a hook return None where it should not change the gradient": GRADIENT_HOOKS,
    "and a load_state_dict() that loads it": OPTIMIZER_STATE,
    "write optimizer=lambda model": (
        "training/test_optimizers.py::test_the_remedy_for_an_optimizer_class_makes_the_optimizer"
    ),
    "code of your own can ask torch.distributed.is_initialized()": COLLECTIVES,
    "so these would be counted once per rank; leave it out": COLLECTIVES,
    "to compare samples of all ranks, give Recipe.batch_loss": (
        "training/test_collectives.py::test_the_remedy_of_a_loss_that_sums_its_denominator_over_ranks"
    ),
    "in a wrapper of another optimizer, super().__init__(other.param_groups, {})": (
        "training/test_optimizers.py::test_a_wrapper_of_an_optimizer_trains_by_its_remedy"
    ),
    "for averaged weights, give ls.ExponentialMovingAverage as a hook": (
        "training/test_sharded.py::test_what_comes_out_is_what_one_process_gives"
    ),
    "draw them for the full tensor, torch.randn_like(parameter)": (
        "training/test_own_draws.py::test_they_are_those_of_one_process"
    ),
    "its own generator, seeded by run.step and the parameter's name": (
        "training/test_own_draws.py::test_a_pipeline_refuses_what_each_stage_would_draw_for_itself"
    ),
    "{text}; or drop numerics=bitwise": (
        "training/test_loss_check.py::test_a_loss_is_named_or_refused_if_it_depends_on_the_cut_or_keeps_a_value"
    ),
    "{text}{remedy}, or drop numerics=bitwise": (
        "training/test_ordinary_mistakes.py::test_other_data_on_each_rank_is_refused_or_an_event"
    ),
    "for a line that one rank prints or logs": (
        "training/test_ordinary_mistakes.py::test_what_a_loss_asks_for_itself_and_what_hooks_keep_may_depend_on_the_rank"
    ),
    "write step.microbatches(dummies=True)": (
        "training/test_session.py::test_a_loop_that_would_count_dummies_is_refused_and_the_remedies_work"
    ),
    "give commit(closure=...) a function": (
        "training/test_closure.py::test_a_loop_of_ones_own_gives_the_closure"
    ),
    "and gradients that are neither scaled nor compressed; use replicate, without these": (
        "training/test_closure.py::test_the_bits_are_those_of_one_process"
    ),
    "or an optimizer that updates each element by itself, such as AdamW": (
        "training/test_element_wise.py::test_each_tensor_is_updated_as_a_whole"
    ),
    "the factory must build the same model in every process": (
        "training/test_alike.py::test_a_model_of_its_own_on_each_rank_is_refused_on_all_alike"
    ),
    "leave assignment=measured out, or": (
        "training/test_measured_assignment.py::test_in_fast_numerics_the_loss_is_the_same_to_rounding"
    ),
    "on a CPU the number of threads changes bits": (
        "training/test_autotune.py::test_bitwise_numerics_keep_one_thread"
    ),
    "call the model without past_key_values and with use_cache=False": (
        "training/test_hugging_face.py::test_models_of_transformers_train_as_on_one_process"
    ),
    "another copy; all processes of a run execute the same code": (
        "training/test_ordinary_mistakes.py::test_what_a_loss_asks_for_itself_and_what_hooks_keep_may_depend_on_the_rank"
    ),
    "or an optimizer that updates each tensor by itself, such as AdamW": REPORTS,
    "and dropped; change it between steps, in a hook's after_step": REPORTS,
    "leave compile=yes out": (
        "training/test_compiled.py::test_a_gradient_that_is_differentiated_is_refused"
    ),
    "/dev/shm), or plan workers=0": "data/test_workers.py",
    "it moves them from a GPU; leave offload=yes out": (
        "device/test_plan_remedies.py::test_offload_on_a_cpu_is_left_out"
    ),
    "use replicate={count}, which works ": PLANS,
    "each device needs its own GPU; split over {there}": PLANS,
    "correct the plan, or name the layers in Recipe.blocks": PLANS,
    "only one axis can be auto; give the others a size": PLANS,
    "give shard two processes or more, or leave offload=yes out": PLANS,
    "the number of threads changes bits, so it is 1; leave threads out": PLANS,
    "leave {name}={said} out, or {instead}": PLANS,
    "write {remedy},numerics=bitwise, with the same slices in each plan": PLANS,
    "add numerics=bitwise, or leave slices out": PLANS,
    "leave slices out, or use replicate instead of {name}": PLANS,
    "choose checkpointing=full, or schedule=1f1b": PLANS,
    "recomputes only what is alike; choose checkpointing=full": (
        "training/test_expert_pipeline.py::test_sharded_stages_with_experts_recompute_all"
    ),
    "use a map-style dataset, or leave --recompute-every out": RECOMPUTED,
    "is wrong; give numerics=bitwise, or leave --recompute-every out": RECOMPUTED,
    "use replicate or shard, or leave --recompute-every out": RECOMPUTED,
    "itself; use {instead}, or leave --recompute-every out": RECOMPUTED,
    "only the samples of a dataset have an index; replay the step with all samples": (
        "replay/test_replay_probe.py::test_a_step_of_a_stream_is_made_again_with_all_samples"
    ),
    "of every microbatch until the backwards; choose schedule=1f1b": CHUNKED_PLANS,
    "the head's weight on the device of the loss; leave one of the two out": CHUNKED_PLANS,
    "give the logits to F.cross_entropy, which computes them in chunks": CHUNKED,
    "name the nn.Linear that computes the logits": CHUNKED,
    "name such a layer in Recipe.head": CHUNKED,
    "choose bf16 or fp32 as the precision": CHUNKED,
    "leave logits=chunked out for a soft cap (torch.tanh)": CHUNKED,
    "compute each loss before the backward": CHUNKED,
    'give reduction="mean", "sum" or "none"': CHUNKED,
    "give the index of a class for each token": CHUNKED,
    "call it with logits.flatten(0, -2) and target.flatten()": CHUNKED,
    "leave one of the two out; over processes, {instead}": PLANS,
    "or use replicate={self.data_parallel}, which goes with everything": PLANS,
    "change the plan, or the number of processes to {fixed}": PLANS,
    "for replicate only; leave --backend": (
        "device/test_sharing_devices.py::test_gloo_on_a_device_is_refused_for_shards_and_the_remedies_train"
    ),
}
"""Words of the remedies that other tests follow, on one and on two processes."""

RIGHT_VALUES = (
    "the size of a mesh axis is a whole number of at least 1",
    "the known values are {', '.join(known)}",
    "the known keys are {', '.join(known)}",
    "it must be yes or no (in Python",
    "it counts how often each microbatch is halved",
    "it counts the slices of each sharded layer and is a power of two",
    "it counts loader processes a rank",
    "it counts intra-op threads a process",
    "it counts microbatches that a loader process makes ahead",
    "it must be a number of devices, at least 1, or the layers",
    "it counts GPUs of one process and is at least 1",
    "a plan is made of name=value pairs",
    "in plan {text}; give it once",
    "in plan {text}; the value is a whole number",
    "session.steps before session.prepare",
    "which makes the microbatches; leave them as they are",
    "and so contain other samples; leave the microbatch as it is",
    "of samples: microbatch=8",
    "=auto {why}",
    "a Mean's values are a tensor, one a sample",
    "it must be a list of hooks",
    "a hook is an object of a subclass of ls.Hook; make it one",
    "it must return a torch LRScheduler",
    "or optimizer -> torch LRScheduler",
    "nor optimizer -> torch LRScheduler",
    "resume with the schedule that it was saved with",
    "a multiplier of the learning rate must be finite; correct the schedule",
    "with the keys state and param_groups, as torch's is",
    "it must return at least one torch.optim.Optimizer",
    "it must return a torch.nn.Module",
    "it must return a torch.optim.Optimizer, or a list of them",
    "it must be a number or a scalar tensor",
    "it counts what the term sums over and is finite and not negative",
    "return a tensor like it, or None",
    "register the same hooks on every rank",
    "check the path or the filter that made it",
    "correct the counts, or give fewer shards",
    "only the proportions count; divide each by the largest",
    "it must be the name of a keyword argument of the model's forward",
    "give an iterable dataset",
    "give one, or a batch_sampler",
    "each shard has equally many; give a divisor of",
    "give the shards that the run began with",
    "reads, or give fewer shards",
    "give data whose len() stays the same",
)
"""Words of errors that ask for a right value, such as those of all other trainings here."""

HANDED_ON = (
    "another rank failed: {cause.described}",
    "{no_weight(name, value)}",
    "{self._world.size} ranks: {failure}",
    "{what} with {why}; {remedy}",
    "{_explanation(cut, whole, differences, ranks)}",
)
"""Texts whose remedies are made elsewhere."""

UNTRIED = (
    "leave out branches that depend on the tokens, or leave numerics=bitwise out",
    "give sequences of at least {processes.size} tokens, or a smaller context",
    "without Recipe.sequence and context",
    "so its attention of the kind {own} is not known",
    "return tensor[:, None], and let the model take its [:, 0]",
    "name blocks without the head in Recipe.blocks",
    "put both into one module, or choose another schedule or size of the pipeline",
    "besides 'state'; their shards are saved by parameter",
    "it splits each microbatch over the GPUs of one process; use replicate={count}",
    "and only the first GPU's would be kept; use replicate={len(gpus)}",
    "each device needs at least one; use fewer devices",
    "give each its own buffer, or place them together: split=3+5",
    "so the change would be lost; return the additions instead",
    "write other.to(x.device) where the two are combined",
)
"""Words of remedies that no test follows."""
