"""What is learned. A recipe never names a rank, a world size, a device or a host; how it is executed is a `lockstep.plan.Plan`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Literal, get_args

from lockstep.base.errors import DataError, RecipeError

if TYPE_CHECKING:
    from torch import Tensor

Precision = Literal["fp32", "bf16", "fp16"]
COMPRESSIONS = ("none", "bf16", "fp16", "int8")
"""And `powersgd:RANK`."""


@dataclass(frozen=True, slots=True)
class Sum:
    """A term of a loss: the sum over whatever `weight` counts, in one microbatch. Its denominator is `Recipe.weight`."""

    total: Tensor
    """Scalar tensor with a gradient."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss whose denominator only the forward knows. The step minimises Σ total / Σ weight over all microbatches of all ranks."""

    total: Tensor
    """Scalar tensor with a gradient: the sum over this microbatch."""
    weight: Tensor | float
    """Scalar, not negative, no gradient: how many of what was summed (tokens, say) this microbatch holds."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A metric that adds up: Σ values / number of values, over all samples of the evaluation data, each counted once."""

    values: Callable[[Any, Any], Tensor]
    """(output, batch) -> tensor of one value a sample (or a token); with a shorthand loss, (model, batch)."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """A metric that does not add up (AUC, F1): computed over the predictions of all samples, in the order of the data."""

    collect: Callable[[Any, Any], tuple[Tensor, ...]]
    """(output, batch) -> tensors whose first dim is this microbatch's samples; with a shorthand loss, (model, batch)."""
    compute: Callable[..., float]
    """Called on every rank alike with those tensors of the whole evaluation data, on the CPU."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Data without a length or without random access, in logical shards, which are the same however many processes read them.

    A shard is read by the processes that compute its microbatches, from beginning to end, then again as the next epoch: each of its
    samples is seen exactly once in each of its epochs. With M microbatches in a global batch, microbatch i of step s reads from shard
    i + M * (s mod (shards / M)). A resumed run goes on at each shard's position, and reads at most `window` samples of it again.

    Before each sample is asked for, python's, numpy's and torch's default generators are seeded by (seed, epoch, shard, sample).
    Raises `RecipeError`.
    """

    open: Callable[[int, int, int], Iterable[Any]]
    """(shard, epoch, start) -> an iterator over the samples of that shard in that epoch, beginning with its sample number `start`. What it
    gives must follow from shard and epoch alone: with `start`, the same samples but for the first `start`. A source that cannot seek
    reads those and throws them away. `start` is a multiple of `window`, 0 unless a run is resumed, and perhaps the shard's end."""
    shards: int = field(kw_only=True)
    """Logical shards: a multiple of the microbatches in a global batch. `open` is called with 0 to shards - 1."""
    window: int = field(kw_only=True, default=1)
    """Samples of one shard that are read at a time and shuffled among themselves; so many are in memory for each shard that a process
    reads. 1: no shuffle."""

    def __post_init__(self) -> None:
        _check_callable("Stream.open", self.open, optional=False)
        check_count("Stream.shards", self.shards, "shards")
        check_count("Stream.window", self.window, "samples")


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """How the model is measured on data that it does not learn from. Every sample counts exactly once at any world size."""

    data: Any
    """A map-style dataset. Collated as the training data are, in its own order, without seeds of its own."""
    every: int | None = None
    """Steps between evaluations. None: only after the last step (where there is always one)."""
    metrics: Mapping[str, Mean | Gathered] = field(default_factory=dict)
    """Name -> metric. The loss is always measured, as `loss`."""
    microbatch: int | None = None
    """Samples in one forward. None: the recipe's microbatch."""

    def __post_init__(self) -> None:
        if isinstance(self.data, Stream):
            raise DataError(
                "Evaluation.data is an ls.Stream; an evaluation counts each sample of its data exactly once, so the data have an end; "
                "read the samples to measure with into a list"
            )
        check_dataset("Evaluation.data", self.data)
        if self.every is not None:
            check_count("Evaluation.every", self.every, "steps")
        if self.microbatch is not None:
            check_count("Evaluation.microbatch", self.microbatch, "samples")
        for name, metric in self.metrics.items():
            if not isinstance(metric, Mean | Gathered):
                raise RecipeError(
                    f"Evaluation.metrics[{name!r}] is {_kind(metric)}; a metric is ls.Mean(values) where it adds up over samples "
                    "(accuracy), or ls.Gathered(collect, compute) where it does not (AUC, F1)"
                )
            if not isinstance(name, str):
                raise RecipeError(f"Evaluation.metrics has a metric named {_kind(name)}; a name is text; name it {str(name)!r}")
            if name == "loss" or name.startswith("loss/"):
                raise RecipeError(
                    f"Evaluation.metrics has a metric named {name!r}; that name is the recipe's own loss, or a term of it; choose another"
                )


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's first values, from a file of tensors by name, in place of those that its factory gives. Raises `RecipeError`."""

    path: str
    """A .safetensors file; a folder as Hugging Face has it, with model.safetensors or model.safetensors.index.json, or that index; a file
    of torch.save (.pt, .pth, .bin, .ckpt) that holds a state dict, or dicts of them, whose names are joined by dots."""
    names: Mapping[str, str | None] = field(default_factory=dict)
    """Names in the file -> names in the model, `*` for any text, once on each side: {"module.*": "*"}; None leaves a tensor out. The first
    that matches counts; a name that none matches is the same in both."""
    missing: Literal["refuse", "keep"] = "refuse"
    """What the file has no values for is an error, or keeps the factory's."""

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise RecipeError(f"Weights({self.path!r}); it takes the path of a file, or of a folder of Hugging Face, as text")
        if self.missing not in ("refuse", "keep"):
            raise RecipeError(f"Weights(missing={self.missing!r}); it is 'refuse', or 'keep' for the values that the factory gives")
        if not isinstance(self.names, Mapping):
            raise RecipeError(f"Weights(names={self.names!r}); it maps names in the file to names in the model: {{'module.*': '*'}}")
        for theirs, ours in self.names.items():
            if not isinstance(theirs, str) or not isinstance(ours, str | None):
                raise RecipeError(f"Weights.names has {theirs!r}: {ours!r}; a name is text, and None leaves a tensor out")
            if theirs.count("*") > 1 or (ours is not None and theirs.count("*") != ours.count("*")):
                raise RecipeError(
                    f"Weights.names has {theirs!r}: {ours!r}; `*` is any text, the same on both sides; write it once on each, or on neither"
                )

    @classmethod
    def of(cls, given: Any) -> Weights | None:
        """From what `Recipe.weights` may be. Raises `RecipeError`."""
        if given is None or isinstance(given, cls):
            return given
        if not isinstance(given, str | PathLike):
            raise RecipeError(f"weights is {_kind(given)}; it is a path, ls.Weights(path, names=..., missing=...), or None")
        return cls(fspath(given))


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What is learned: model, loss, data, batch, optimizer, precision, seed, length, evaluation.

    Checked when made; what only a model or a batch can show is checked when training starts. Raises `RecipeError` and `DataError`.
    """

    model: Callable[[], Any]
    """() -> torch.nn.Module. Called on every process after seeding, so that it is the same on all."""
    data: Any
    """A map-style dataset: `len(data)` and `data[i]`; or `data.__getitems__(indices)`, which fetches a microbatch at once:
    a list of samples, to be collated, or anything else, taken as the batch. Or a `Stream`, with `microbatch` and `steps`."""
    loss: Callable[[Any, Any], Any]
    """With `inputs`: (output, batch) -> a scalar, a `Sum` or a dict of them. Without (shorthand): (model, batch) -> the same, or a `Loss`.
    A scalar means the mean over this microbatch's samples."""
    optimizer: Callable[[Any], Any]
    """(model) -> a torch optimizer, or a list of them that share out the trainable parameters."""
    global_batch: int
    """Samples in one optimizer step, over all ranks."""
    microbatch: int | Literal["auto"] | None = None
    """Samples in one forward and backward. None: one microbatch a rank, so that dropout depends on the plan. `auto`: the size with which a
    step takes the least time, measured at the start of a run; one that goes on keeps it."""
    steps: int | None = None
    """Optimizer steps; batches straddle epochs. Give this or `epochs`."""
    epochs: int | None = None
    """Passes over the data; the last batch of each is short where it must be. Give this or `steps`."""
    inputs: Callable[[Any], Any] | None = None
    """(batch) -> what the model is called with: a tuple of arguments, a dict of keywords, or one tensor."""
    weight: Callable[[Any], Any] | None = None
    """(batch as collated, on the CPU) -> the denominator that goes with `Sum`: a number, or a dict with the loss's names."""
    collate: Callable[[list[Any]], Any] | None = None
    """(samples) -> batch. None: torch's default collate."""
    schedule: Callable[[Any], Any] | None = None
    """(step) -> multiplier of every learning rate, pure; or (optimizer) -> a torch LRScheduler, stepped once a step. None: constant."""
    clip_norm: float | None = None
    """Largest global norm of the gradient; above it the gradient is scaled down. None: no clipping."""
    precision: Precision | Literal["auto"] = "fp32"
    """What the forward computes in: `fp32`, or autocast to `bf16` or `fp16` (with loss scaling). Parameters stay as the model made them.
    `auto`: `fp32`, or what this device computes in hardware where that is measured to be faster; a run that goes on keeps it."""
    gradient_compression: str = "none"
    """How replicas send gradients: `exact`, or for slow links in fewer bytes: `bf16`, `fp16`, `int8`, `powersgd:RANK`. It changes what is
    learned, on more than one process."""
    seed: int = 0
    """0 to 2**63 - 1. Keys everything random: initial weights, order, augmentation, dropout."""
    blocks: Sequence[str] | None = None
    """Names of the modules that a plan gathers, frees, checkpoints or compiles one at a time; `*` is any text: `["blocks.*"]`. None: they
    are found: the members of lists of alike modules."""
    tensor: Mapping[str, str] | None = None
    """How the `tensor` axis cuts layers: patterns of module names, `*` is any text, and a style for each, as in
    docs/plans/tensor.md. None: the model's own `tensor_plan`, or that of a Hugging Face model."""
    stages: Sequence[str] | None = None
    """Names of the modules that the model's forward calls one after another, each with what the one before it returned, as the `pipeline`
    axis cuts them; `*` is any text: `["embedding", "blocks.*", "head"]`. Each draws its random numbers from a stream of its own. None: the
    members of a model that is an `nn.Sequential`; others have no pipeline."""
    weights: Weights | str | PathLike[str] | None = None
    """What the model starts from: `Weights`, or its path alone. None: the values that its factory gives."""
    evaluation: Evaluation | None = None
    """How it is measured. None: it is not."""

    def __post_init__(self) -> None:
        for name in ("model", "loss", "optimizer"):
            _check_callable(f"Recipe.{name}", getattr(self, name), optional=False)
        for name in ("inputs", "weight", "collate", "schedule"):
            _check_callable(f"Recipe.{name}", getattr(self, name), optional=True)
        microbatch = None if self.microbatch == "auto" else self.microbatch
        if isinstance(microbatch, str):
            raise RecipeError(f"Recipe.microbatch={microbatch!r}; give a number of samples, 'auto' to have it measured, or None")
        check_batch(self.global_batch, microbatch, of="Recipe.")
        check_length(self.steps, self.epochs, of="Recipe.")
        check_data("Recipe.data", self.data, global_batch=self.global_batch, microbatch=self.microbatch, epochs=self.epochs)
        check_clip_norm(self.clip_norm)
        if self.precision != "auto":
            check_precision(self.precision)
        check_compression(self.gradient_compression)
        check_seed(self.seed)
        for kind, names in (("blocks", self.blocks), ("stages", self.stages)):
            if names is not None and (isinstance(names, str) or not all(isinstance(name, str) for name in names)):
                raise RecipeError(f"{kind}={names!r}; it is a list of module names or patterns, such as ['blocks.*'], or None")
        if self.tensor is not None and not isinstance(self.tensor, Mapping):
            raise RecipeError(f"tensor is {_kind(self.tensor)}; it maps patterns of module names to styles: {{'*.up': 'colwise'}}")
        Weights.of(self.weights)
        if self.evaluation is not None and not isinstance(self.evaluation, Evaluation):
            raise RecipeError(f"evaluation is {_kind(self.evaluation)}; give ls.Evaluation(data=..., every=..., metrics=...) or None")

    def describe(self) -> dict[str, Any]:
        """The recipe as JSON: numbers as they are, callables and datasets by their names and lengths."""
        described = {name: _describe(getattr(self, name)) for name in self.__slots__} | {"weights": _describe(Weights.of(self.weights))}
        return {**described, "blocks": self.blocks and list(self.blocks), "stages": self.stages and list(self.stages)}


def _describe(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Evaluation | Stream | Weights):
        return {name: _describe(getattr(value, name)) for name in value.__slots__}
    if isinstance(value, Mapping):
        return {str(key): _describe(item) for key, item in value.items()}
    name = getattr(value, "__qualname__", type(value).__qualname__)
    module = getattr(value, "__module__", type(value).__module__)
    module = "__main__" if module == "__mp_main__" else module  # what a script is called in processes that `ls.spawn` started
    return f"{module}.{name}" + (f"[{len(value)}]" if isinstance(value, Sized) and not isinstance(value, type) else "")


def _kind(value: Any) -> str:
    return f"{value!r} (a {type(value).__name__})"


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_count(name: str, value: Any, unit: str) -> None:
    """Raises `RecipeError` unless `value` is a whole number of at least 1."""
    if not _is_int(value) or value < 1:
        raise RecipeError(f"{name}={value!r}; it counts {unit} and must be a whole number of at least 1")


def check_batch(global_batch: Any, microbatch: Any, *, of: str = "") -> None:
    """Raises `RecipeError` unless both are numbers of samples, the second one no larger than the first, or None. `of`: whose they are."""
    check_count(f"{of}global_batch", global_batch, "samples")
    if microbatch is None:
        return
    check_count(f"{of}microbatch", microbatch, "samples")
    if microbatch > global_batch:
        raise RecipeError(
            f"microbatch={microbatch} is larger than global_batch={global_batch}; a global batch is made of whole "
            f"microbatches; give microbatch={global_batch} or less, or a larger global_batch"
        )


def check_length(steps: Any, epochs: Any, *, of: str = "") -> None:
    """Raises `RecipeError` unless exactly one of the two is a whole number of at least 1, and the other None."""
    if (steps is None) == (epochs is None):
        raise RecipeError(f"steps={steps} and epochs={epochs}; a recipe has one length; give exactly one of the two")
    if steps is not None:
        check_count(f"{of}steps", steps, "steps")
    if epochs is not None:
        check_count(f"{of}epochs", epochs, "epochs")


def check_clip_norm(value: Any) -> None:
    """Raises `RecipeError` unless `value` is positive and finite, or None."""
    if value is not None and not (_is_number(value) and 0 < value < math.inf):
        raise RecipeError(f"clip_norm={value!r}; a norm to clip at is positive and finite; None does not clip")


def check_precision(value: Any) -> None:
    """Raises `RecipeError` unless `value` is one of `Precision`."""
    if value == "auto":
        raise RecipeError("precision='auto' in a loop of your own; only ls.train has a loss to measure with; give a precision: 'fp32'")
    if value not in get_args(Precision):
        raise RecipeError(f"precision={value!r}; known are {', '.join(get_args(Precision))}, and with ls.train auto")


def check_compression(value: Any) -> None:
    """Raises `RecipeError` unless `value` is one of `COMPRESSIONS`, or `powersgd:` and a rank."""
    if value in COMPRESSIONS:
        return
    if not isinstance(value, str) or value.partition(":")[0] != "powersgd":
        raise RecipeError(f"gradient_compression={value!r}; known are {', '.join(COMPRESSIONS)} and powersgd:RANK, such as powersgd:4")
    if powersgd_rank(value) is None:
        raise RecipeError(
            f"gradient_compression={value!r}; the rank of powersgd is a whole number of at least 1, behind a colon: the more, the closer to exact and the "
            "more bytes; write for example gradient_compression='powersgd:4'"
        )


def powersgd_rank(gradient_compression: str) -> int | None:
    """The rank in `powersgd:RANK`; None where there is none, or it is another word."""
    word, _, rank = gradient_compression.partition(":")
    return int(rank) if word == "powersgd" and rank.isascii() and rank.isdecimal() and int(rank) else None


def keeps_rest(gradient_compression: str) -> bool:
    """Whether what is not sent in one step is kept for the next."""
    return gradient_compression == "int8" or gradient_compression.startswith("powersgd")


def check_seed(value: Any) -> None:
    """Raises `RecipeError` unless `value` is a whole number from 0 to 2**63 - 1."""
    if not _is_int(value) or not 0 <= value < 2**63:
        raise RecipeError(f"seed={value!r}; a seed is a whole number from 0 to 2**63 - 1")


def _check_callable(name: str, value: Any, *, optional: bool) -> None:
    if not callable(value) and not (optional and value is None):
        raise RecipeError(f"{name} is {_kind(value)}; it must be a function{' or None' if optional else ''}")


def check_data(name: str, value: Any, *, global_batch: int, microbatch: int | Literal["auto"] | None, epochs: int | None) -> None:
    """Raises `DataError` and `RecipeError` unless `value` can be trained on: a map-style dataset, or a stream that fits the batches."""
    if not isinstance(value, Stream):
        check_dataset(name, value)
        return
    if epochs is not None:
        raise RecipeError(f"epochs={epochs} with an ls.Stream; a stream has no length to count epochs of; give steps=")
    if microbatch is None or microbatch == "auto":
        raise RecipeError(
            f"microbatch={microbatch} with an ls.Stream; each microbatch reads from shards of its own, so their number must not depend "
            f"on the number of processes or on measurement; give a microbatch, for example microbatch={max(1, global_batch // 8)}"
        )
    count = -(-global_batch // microbatch)
    if value.shards % count:
        raise RecipeError(
            f"an ls.Stream of shards={value.shards} with {count} microbatches in a global batch (global_batch={global_batch}, "
            f"microbatch={microbatch}); each microbatch reads from shards of its own, as many as every other, so shards is a multiple of "
            f"{count}; write shards={-(-value.shards // count) * count}"
        )


def check_dataset(name: str, value: Any) -> None:
    """Raises `DataError` unless `value` is a map-style dataset with a sample in it."""
    if not hasattr(value, "__len__") or not (hasattr(value, "__getitem__") or hasattr(value, "__getitems__")):
        raise DataError(
            f"{name} is a {type(value).__name__}; it must be a map-style dataset, with len(data) and data[i]; "
            "where data have no length or no random access, give an ls.Stream"
        )
    if len(value) == 0:
        raise DataError(f"{name} is empty (its len() is 0); training needs at least one sample; check the path or the filter that made it")
