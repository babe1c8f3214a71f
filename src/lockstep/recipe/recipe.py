"""The recipe: everything that decides what is learned. A recipe never names a rank, a world size, a
device or a host. `lockstep.plan.Plan` decides how a recipe is executed."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Literal

from lockstep.base.errors import DataError, RecipeError
from lockstep.base.field_docs import with_field_docs
from lockstep.recipe import parameters
from lockstep.recipe.balance import Balance
from lockstep.recipe.checks import (
    Precision,
    check_batch,
    check_callable,
    check_clip_norm,
    check_compression,
    check_count,
    check_drop_last,
    check_factory,
    check_length,
    check_precision,
    check_seed,
    in_words,
)
from lockstep.recipe.data import (
    Stream,
    StreamOfStreams,
    check_data,
    check_dataset,
    check_samplers,
)
from lockstep.recipe.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor


@with_field_docs
@dataclass(frozen=True, slots=True)
class Sum:
    """A loss term that is a sum over one microbatch. `Recipe.weight` returns the denominator of the
    sum. If the loss is a dict of terms, `weight` returns a dict with the denominator of each `Sum`,
    by its name."""

    total: Tensor
    """Scalar tensor with a gradient."""


@with_field_docs
@dataclass(frozen=True, slots=True)
class Loss:
    """A loss whose denominator is known only after the forward. The step minimises Σ `total` / Σ
    `weight`. Both sums run over all microbatches of a step on all ranks."""

    total: Tensor
    """Scalar tensor with a gradient: the sum over this microbatch."""
    weight: Tensor | float
    """Scalar without a gradient, at least 0: the number of items (tokens, for example) that `total`
    sums over."""


@with_field_docs
@dataclass(frozen=True, slots=True)
class Mean:
    """A metric that is the mean of `values` over the evaluation data: Σ values / number of values.
    Every sample of the evaluation data counts once."""

    values: Callable[[Any, Any], Tensor]
    """Function of (output, batch) that returns a tensor with a value per sample or token. Without
    `Recipe.inputs`, its arguments are (model, batch)."""


@with_field_docs
@dataclass(frozen=True, slots=True)
class Gathered:
    """A metric that is not a mean over samples (AUC, F1), or a `Recipe.batch_loss`. The value is
    computed from tensors collected for all samples, in the order of the samples."""

    collect: Callable[[Any, Any], tuple[Tensor, ...]]
    """Function of (output, batch) that returns tensors whose first dim is the samples of this
    microbatch. Without `Recipe.inputs`, its arguments are (model, batch)."""
    compute: Callable[..., Any]
    """Called on every rank with the collected tensors of all samples. Returns the value of the
    metric or of the loss. A metric gets tensors of the evaluation data, on the CPU. A `batch_loss`
    gets tensors of the global batch, on the rank's device."""


@with_field_docs
@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """An evaluation on data that the model does not learn from. Every sample counts exactly once at
    any world size.

    Raises `RecipeError` and `DataError`.
    """

    data: Any
    """A map-style dataset. An evaluation reads the dataset in order. Random augmentation is the
    same in every evaluation."""
    every: int | Literal["epoch"] | None = None
    """Number of steps between evaluations, or "epoch" for an evaluation after each epoch. None:
    only after the last step. The last step is always evaluated."""
    metrics: Mapping[str, Mean | Gathered] = field(default_factory=dict)
    """Maps names to metrics. A metric's functions get (output, batch), or (model, batch) if the
    recipe has no `inputs`. The loss is always measured, as `loss`."""
    microbatch: int | None = None
    """Number of samples in one forward. None: `Recipe.microbatch`, or 1 with a `batch_sampler`."""
    collate: Callable[[list[Any]], Any] | None = None
    """Function of a list of samples that returns a batch. None: torch's `default_collate`.
    `Recipe.collate` is not used, because it may augment. Training and evaluation can share a
    collate function that only pads."""
    loss: Callable[[Any, Any], Any] | None = None
    """The loss to measure, with the arguments of `Recipe.loss`. The function returns a scalar, an
    `ls.Loss`, or a dict of scalars. An evaluation does not use `Recipe.weight`. None:
    `Recipe.loss`."""
    weights: Literal["current", "average"] = "current"
    """The weights to measure: the model's weights, or the moving average of the run's
    `ls.ExponentialMovingAverage`."""

    def __post_init__(self) -> None:
        if isinstance(self.data, Stream):
            raise DataError(
                "Evaluation.data is an ls.Stream; an evaluation counts each sample exactly once, so"
                " its data must have a length; read the samples into a list"
            )
        check_dataset("Evaluation.data", self.data)
        if isinstance(self.every, str) and self.every != "epoch":
            raise RecipeError(
                f"Evaluation.every={self.every!r}; give a number of steps, 'epoch', or None for one"
                " evaluation at the end"
            )
        if self.every is not None and self.every != "epoch":
            check_count("Evaluation.every", self.every, "steps")
        if self.microbatch is not None:
            check_count("Evaluation.microbatch", self.microbatch, "samples")
        check_callable("Evaluation.collate", self.collate, optional=True)
        check_callable("Evaluation.loss", self.loss, optional=True)
        if self.weights not in ("current", "average"):
            raise RecipeError(
                f"Evaluation.weights={self.weights!r}; it must be 'current', or 'average' with an"
                " ls.ExponentialMovingAverage"
            )
        for name, metric in self.metrics.items():
            if not isinstance(metric, Mean | Gathered):
                raise RecipeError(
                    f"Evaluation.metrics[{name!r}] is {in_words(metric)}; a metric is"
                    " ls.Mean(values) if it is a mean over samples (accuracy), or"
                    " ls.Gathered(collect, compute) if it is not (AUC, F1)"
                )
            if not isinstance(name, str):
                raise RecipeError(
                    f"Evaluation.metrics has a metric named {in_words(name)}; a name is a str; name"
                    f" it {str(name)!r}"
                )
            if name == "loss" or name.startswith("loss/"):
                raise RecipeError(
                    f"Evaluation.metrics has a metric named {name!r}; that name belongs to the"
                    " recipe's loss or a term; choose another"
                )


@with_field_docs
@dataclass(frozen=True, slots=True)
class Weights:
    """Pretrained weights that replace the initial values of a model. Raises `RecipeError`."""

    path: str
    """A .safetensors file, a Hugging Face folder, or a torch.save file (.pt, .pth, .bin, .ckpt). A
    Hugging Face folder has model.safetensors or model.safetensors.index.json; the path of the index
    is also accepted. A torch.save file has a state dict, or nested dicts, whose keys are joined by
    dots."""
    names: Mapping[str, str | None] = field(default_factory=dict)
    """Maps tensor names in the file to names in the model; None skips the tensor. `*` stands for
    any text, once in each name: {"module.*": "*"}. The first matching pattern is used. A name
    without a match is unchanged."""
    missing: Literal["refuse", "keep"] = "refuse"
    """Action for tensors of the model that the file lacks: `refuse` raises an error, `keep` keeps
    their initial values."""

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise RecipeError(
                f"Weights({self.path!r}); it takes the path of a file or of a Hugging Face folder"
                " as a str"
            )
        if self.missing not in ("refuse", "keep"):
            raise RecipeError(
                f"Weights(missing={self.missing!r}); it must be 'refuse', or 'keep' to keep the"
                " model's initial values"
            )
        if not isinstance(self.names, Mapping):
            raise RecipeError(
                f"Weights(names={self.names!r}); it maps names in the file to names in the model:"
                " {'module.*': '*'}"
            )
        for theirs, ours in self.names.items():
            if not isinstance(theirs, str) or not isinstance(ours, str | None):
                raise RecipeError(
                    f"Weights.names has {theirs!r}: {ours!r}; a name is a str, and None skips a"
                    " tensor"
                )
            if theirs.count("*") > 1 or (ours is not None and theirs.count("*") != ours.count("*")):
                raise RecipeError(
                    f"Weights.names has {theirs!r}: {ours!r}; `*` is the same text on both sides;"
                    " write it once on each, or on neither"
                )

    @classmethod
    def of(cls, given: Any) -> Weights | None:
        """Convert the value of `Recipe.weights`. Raises `RecipeError`."""
        if given is None or isinstance(given, cls):
            return given
        if not isinstance(given, str | PathLike):
            raise RecipeError(
                f"weights is {in_words(given)}; it must be a path, ls.Weights(path, names=...,"
                " missing=...), or None"
            )
        return cls(fspath(given))


@with_field_docs
@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Everything that decides what is learned: model, loss, data, batches, optimizer, precision,
    seed, length, evaluation. Values are checked when the recipe is created. Checks that need a
    model or a batch run when training starts. Raises `RecipeError` and `DataError`."""

    model: Callable[[], Any]
    """Function that returns a torch.nn.Module. Called on every rank after seeding: all ranks start
    with the same values."""
    data: Any
    """A map-style dataset, with `len(data)` and `data[i]`, or a `Stream`. A `Stream` needs
    `microbatch` and `steps`. If the dataset has `__getitems__(indices)`, the method is called once
    for each microbatch. A list that it returns is collated. If it returns another type than a list,
    the value is used as the batch."""
    loss: Callable[[Any, Any], Any] | None = None
    """Function of (output, batch) that returns a scalar tensor, a `Sum`, or a dict of them. Without
    `inputs`, its arguments are (model, batch), and it may also return a `Loss`. A scalar is the
    mean over this microbatch's samples. A recipe has either `loss` or `batch_loss`."""
    batch_loss: Gathered | None = None
    """A loss that compares samples with each other. `collect` returns rows for each microbatch.
    `compute` gets the rows of the whole global batch and returns a scalar tensor. Each microbatch
    is computed twice: only one microbatch's activations are in memory."""
    optimizer: Callable[[Any], Any]
    """Function of the model that returns a torch optimizer, or a list of optimizers. Each trainable
    parameter must belong to exactly one optimizer."""
    global_batch: int | None = None
    """Number of samples in one optimizer step, over all ranks. None is allowed only with
    `batch_sampler`."""
    microbatch: int | Literal["auto"] | None = None
    """Number of samples in one forward and backward. With None, each rank computes one microbatch,
    and dropout depends on the plan. `auto`: the fastest size, measured at the start of the run. A
    resumed run keeps the measured size."""
    steps: int | None = None
    """Number of optimizer steps. Batches may span two epochs. A recipe has either `steps` or
    `epochs`."""
    epochs: int | None = None
    """Number of passes over the data. The last batch of each pass may be short. A recipe has either
    `epochs` or `steps`."""
    drop_last: bool = False
    """With `epochs`, leave out the last batch of each epoch if it is short. Each epoch leaves out
    different samples, because of the shuffle."""
    sampler: Callable[[int, int], Any] | None = None
    """Function of (epoch, seed) that returns the indices of an epoch's samples, in order: weighted,
    balanced, a curriculum. All epochs must have the same length. The function must be pure. The
    default random generators are seeded with (epoch, seed) before each call. None: each sample once
    per epoch, in a shuffled order that follows from the seed. See `ls.samplers`."""
    batch_sampler: Callable[[int, int], Any] | None = None
    """Function of (epoch, seed) that returns the global batches of an epoch. A global batch is a
    list of microbatches, and a microbatch a list of indices. The function must be pure, like
    `Recipe.sampler`. `batch_sampler` replaces `global_batch` and `microbatch`. All epochs must have
    the same number of batches."""
    inputs: Callable[[Any], Any] | None = None
    """Function of the batch that returns the model's arguments: a tuple, a dict of keyword
    arguments, or one tensor."""
    weight: Callable[[Any], Any] | None = None
    """Function of the collated batch on the CPU that returns the denominator of a `Sum`, a number.
    If the loss is a dict, `weight` returns a dict of the denominators of its `Sum`s, by name. Terms
    that are plain scalars have no denominator."""
    collate: Callable[[list[Any]], Any] | None = None
    """Function of a list of samples that returns a batch, used for training only. For evaluations,
    see `Evaluation.collate`. None: torch's `default_collate`."""
    schedule: Callable[[Any], Any] | None = None
    """Pure function of the step that returns a multiplier of all learning rates, or function of the
    optimizer that returns a torch LRScheduler. A ReduceLROnPlateau follows the evaluations' `loss`,
    or the metric of `ls.OnMetric`. None: constant rates."""
    clip_norm: float | None = None
    """Maximum norm of the gradient of all parameters together. A gradient with a larger norm is
    scaled down to `clip_norm`. None: no clipping."""
    precision: Precision | Literal["auto"] = "fp32"
    """Precision of the forward: `fp32`, or autocast to `bf16` or `fp16` (with loss scaling).
    Parameters keep their dtype. `auto`: the fastest precision with hardware support, measured at
    the start of the run. A resumed run keeps the measured precision."""
    gradient_compression: str = "none"
    """Compression of gradients between replicas, for slow networks: `none`, `bf16`, `fp16`, `int8`
    or `powersgd:RANK`. On more than one process, compression changes what is learned."""
    seed: int = 0
    """Seed of all random numbers (initial weights, sample order, augmentation, dropout): 0 to 2**63
    - 1."""
    blocks: abc.Sequence[str] | None = None
    """Names of the modules that a plan wraps one by one for FSDP2, activation checkpointing or
    compilation. `*` stands for any text: `["blocks.*"]`. None: the members of every `ModuleList` or
    `Sequential` whose members have one class."""
    tensor: Mapping[str, str] | None = None
    """Tensor-parallel plan: maps module names to styles, such as `colwise` or `rowwise`. `*` in a
    name stands for any text. None: the model's `tensor_plan`, or the plan of a Hugging Face
    model."""
    stages: abc.Sequence[str] | None = None
    """Names of the modules between which a pipeline may be cut. `*` stands for any text:
    `["embedding", "blocks.*", "head"]`. The forward must call the modules in this order, each with
    the output of the module before it. Each named module draws from a separate random stream. None:
    the members of an `nn.Sequential`; other models cannot be pipelined."""
    experts: abc.Sequence[str] | None = None
    """Names of the modules that hold a layer's experts, in stacked parameters. `*` stands for any
    text: `["blocks.*.experts"]`. The forward of the modules takes tokens (S, D), the chosen experts
    (S, k) and their weights (S, k). With None, lockstep finds the modules that have stacked
    parameters and a forward of three arguments."""
    sequence: Sequence | None = None
    """The sequences that context parallelism (the plan's `context`) divides among ranks, their
    documents and positions. None: `ls.Sequence()`. A model whose sequences are divided must not
    draw random numbers."""
    balance: Balance | None = None
    """Balances the load of a mixture of experts, and measures it. None: the load is neither
    balanced nor measured."""
    head: str | None = None
    """Name of the `nn.Linear` that computes the logits, for `logits=chunked`. None: the head of a
    Hugging Face model."""
    weights: Weights | str | PathLike[str] | None = None
    """Pretrained weights to start from, or only their path. None: the initial values that `model`
    sets."""
    evaluation: Evaluation | Mapping[str, Evaluation] | None = None
    """An evaluation during and after training, or a dict of several evaluations by name. The
    metrics of a dict are called `name/loss` and so on. None: no evaluation."""

    def __post_init__(self) -> None:
        check_factory("Recipe.model", self.model, remedy="model=lambda: Net()")
        check_factory(
            "Recipe.optimizer",
            self.optimizer,
            remedy="optimizer=lambda model: torch.optim.AdamW(model.parameters())",
        )
        self._check_loss()
        for name in ("inputs", "weight", "collate", "schedule"):
            check_callable(f"Recipe.{name}", getattr(self, name), optional=True)
        microbatch = None if self.microbatch == "auto" else self.microbatch
        if isinstance(microbatch, str):
            raise RecipeError(
                f"Recipe.microbatch={microbatch!r}; give a number of samples, 'auto' to have it"
                " measured, or None"
            )
        check_samplers(
            self.sampler, self.batch_sampler, self.data, self.global_batch, self.microbatch
        )
        check_length(self.steps, self.epochs, of="Recipe.")
        if self.global_batch is None:
            check_dataset("Recipe.data", self.data)
        else:
            check_batch(self.global_batch, microbatch, of="Recipe.")
            check_data(
                "Recipe.data",
                self.data,
                global_batch=self.global_batch,
                microbatch=self.microbatch,
                epochs=self.epochs,
            )
            is_counted = self.sampler is None and not isinstance(self.data, Stream)
            check_drop_last(
                self.drop_last,
                self.epochs,
                len(self.data) if is_counted else None,
                self.global_batch,
            )
        check_clip_norm(self.clip_norm)
        if self.precision != "auto":
            check_precision(self.precision)
        check_compression(self.gradient_compression)
        check_seed(self.seed)
        self._check_modules()
        if not isinstance(self.sequence, Sequence | None):
            raise RecipeError(
                f"sequence is {in_words(self.sequence)}; give ls.Sequence(dim=1, chunks=16), or"
                " None"
            )
        self._check_balance()
        Weights.of(self.weights)
        self._check_evaluation()
        parameters.declared.close()

    def _check_modules(self) -> None:
        for kind, names in (
            ("blocks", self.blocks),
            ("stages", self.stages),
            ("experts", self.experts),
        ):
            if names is not None and (
                isinstance(names, str) or not all(isinstance(name, str) for name in names)
            ):
                raise RecipeError(
                    f"{kind}={names!r}; it must be a list of module names or patterns, such as"
                    " ['blocks.*'], or None"
                )
        if not isinstance(self.head, str | None):
            raise RecipeError(
                f"head={self.head!r}; it is the name of one module, such as 'lm_head', or None"
            )
        if self.tensor is not None and not isinstance(self.tensor, Mapping):
            raise RecipeError(
                f"tensor is {in_words(self.tensor)}; it maps patterns of module names to styles:"
                " {'*.up': 'colwise'}"
            )

    def _check_evaluation(self) -> None:
        if not isinstance(self.evaluation, Evaluation | Mapping | None):
            raise RecipeError(
                f"evaluation is {in_words(self.evaluation)}; give ls.Evaluation(data=...,"
                " every=..., metrics=...), several by name {'valid': ls.Evaluation(...)}, or"
                " None"
            )
        for name, evaluation in (
            self.evaluation.items() if isinstance(self.evaluation, Mapping) else ()
        ):
            if not isinstance(evaluation, Evaluation):
                raise RecipeError(
                    f"evaluation[{name!r}] is {in_words(evaluation)}; give an ls.Evaluation under"
                    " each name"
                )
            if not isinstance(name, str) or not name or "/" in name or name == "loss":
                raise RecipeError(
                    f"evaluation has the name {name!r}; its metrics are called name/loss and so on;"
                    " a name is a str without a slash, and not 'loss'; choose another"
                )

    def _check_loss(self) -> None:
        if self.batch_loss is None:
            check_callable("Recipe.loss", self.loss, optional=False)
            return
        if not isinstance(self.batch_loss, Gathered):
            raise RecipeError(
                f"batch_loss is {in_words(self.batch_loss)}; give ls.Gathered(collect, compute), or"
                " a loss instead"
            )
        for name in ("loss", "weight"):
            if getattr(self, name) is not None:
                raise RecipeError(
                    f"batch_loss and {name}; a batch loss is one number for all samples of the"
                    f" global batch; leave out {name}"
                )

    def _check_balance(self) -> None:
        if self.balance is None:
            return
        if not isinstance(self.balance, Balance):
            raise RecipeError(
                f"balance is {in_words(self.balance)}; give ls.Balance(coefficient=0.01), or None"
            )
        if self.balance.has_terms and self.batch_loss is not None:
            raise RecipeError(
                "Balance with a coefficient or z, and batch_loss; a batch loss is one number for"
                " all samples of the global batch, and has no other terms; give"
                " ls.Balance(bias_rate=...), or a loss instead of batch_loss"
            )
        if self.inputs is None and self.balance.tokens is None:
            raise RecipeError(
                "balance on a recipe in shorthand form (no inputs; the loss calls the model); the"
                " tokens of a batch are counted in what inputs returns; give inputs, or"
                " ls.Balance(tokens=lambda batch: mask), of shape (samples, tokens)"
            )

    @property
    def objective(self) -> Callable[[Any, Any], Any] | Gathered:
        objective = self.loss or self.batch_loss
        assert objective is not None, "checked"
        return objective

    @property
    def evaluations(self) -> dict[str, Evaluation]:
        """All evaluations, by the prefix of their metrics' names, such as "valid/". A single
        evaluation has an empty prefix."""
        if isinstance(self.evaluation, Mapping):
            return {f"{name}/": evaluation for name, evaluation in self.evaluation.items()}
        return {} if self.evaluation is None else {"": self.evaluation}

    def describe(self) -> dict[str, Any]:
        """Return the recipe as JSON, with the names of functions, and the names and lengths of
        datasets."""
        described = {name: _describe(getattr(self, name)) for name in self.__slots__} | {
            "weights": _describe(Weights.of(self.weights))
        }
        patterns = {
            "blocks": self.blocks and list(self.blocks),
            "stages": self.stages and list(self.stages),
            "experts": self.experts and list(self.experts),
        }
        return {
            **described,
            **patterns,
            **({"parameters": dict(values)} if (values := parameters.declared.values) else {}),
        }


def _describe(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(
        value, Balance | Evaluation | Gathered | Sequence | Stream | StreamOfStreams | Weights
    ):
        described = {name: _describe(getattr(value, name)) for name in value.__slots__}
        if isinstance(value, Balance):
            described["routers"] = value.routers and list(value.routers)
        return described
    if isinstance(value, Mapping):
        return {str(key): _describe(item) for key, item in value.items()}
    name = getattr(value, "__qualname__", type(value).__qualname__)
    module = getattr(value, "__module__", type(value).__module__)
    # in processes that `ls.spawn` started, the script is `__mp_main__`
    module = "__main__" if module == "__mp_main__" else module
    return f"{module}.{name}" + (
        f"[{len(value)}]" if isinstance(value, Sized) and not isinstance(value, type) else ""
    )
