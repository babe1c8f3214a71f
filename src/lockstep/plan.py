"""The plan: how a recipe is executed (mesh, numerics, memory, data loading). No setting of a plan
changes what is learned."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal, get_args

from lockstep.base.errors import PlanError, did_you_mean
from lockstep.base.field_docs import with_field_docs

Numerics = Literal["fast", "bitwise"]
Sharding = Literal["full", "gradients"]
Checkpointing = Literal["none", "selective", "full"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
Transport = Literal["auto", "torch"]
Assignment = Literal["equal", "measured"]
Exchange = Literal["auto", "keys", "heads"]
Logits = Literal["whole", "chunked"]
Size = int | Literal["auto"]
Split = int | tuple[int, ...]
Divided = Literal["microbatches", "parameters", "features", "layers", "tokens", "experts"]

WORDS: dict[str, tuple[str, ...]] = {
    "numerics": get_args(Numerics),
    "sharding": get_args(Sharding),
    "checkpointing": get_args(Checkpointing),
    "schedule": get_args(Schedule),
    "transport": get_args(Transport),
    "assignment": get_args(Assignment),
    "exchange": get_args(Exchange),
    "logits": get_args(Logits),
}
SETTINGS = (
    *(
        "sharding",
        "offload",
        "checkpointing",
        "microbatch_splits",
        "slices",
        "logits",
        "schedule",
        "exchange",
        "compile",
        "split",
        "data_parallel",
        "transport",
    ),
    "assignment",
    *("threads", "workers", "prefetch"),
)
"""Settings that a plan's text contains only if they differ from their default."""
TOGETHER = "its ranks compute each microbatch together"
PACED_BY: dict[Divided, str] = {
    "parameters": "its ranks compute in rounds of one microbatch each, since each forward gathers"
    " parameters",
    "experts": "its ranks compute in rounds of one microbatch each, since each forward sends tokens"
    " to the experts of other ranks",
    "features": "its ranks wait for each other inside each layer, so each takes as long as the"
    " slowest",
    "layers": "each microbatch passes through all of its ranks, however fast they are",
}
"""The reason why the ranks of an axis cannot each compute at a different speed, by the last thing
that the axis divides."""
NOT_IN_SLICES = {
    "context": "chunks of a sequence are computed in threads, and layers in slices are not",
    "expert": "layers are not computed in slices beside experts yet",
}
"""The reason why a plan with an axis refuses `slices` (layers computed in a fixed number of parts),
by axis."""
FIXED_IN_BITWISE = ("slices",)
"""Settings that a resumed run in bitwise numerics cannot change."""
MEASURED = ("threads", "workers", "prefetch")
"""Settings whose `auto` is measured at the start of a run."""
MOST = 1024
"""Maximum of `threads`, `workers` and `prefetch`. A larger value would exhaust memory, so it counts
as a typing error."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A mesh axis: what its ranks divide (such as parameters or microbatches), and when they
    communicate. A field of `Plan` with an axis in its metadata adds the axis to the mesh."""

    name: str
    divides: tuple[Divided, ...]
    same_state: bool
    """True if all ranks of the axis hold the same parameters, buffers and optimizer state.
    `Plan.larger` sets this field to False for an axis over which the plan shards parameters."""
    in_forward: bool
    """True if the forward communicates over the axis. If True, the ranks of the axis must compute
    at the same time."""
    sums: Literal["all", "partial", "shared"]
    """Parameters whose gradients are summed over the axis after the backward. `all`: all
    parameters, except experts that the axis divides. `partial`: parameters whose gradient a layer
    leaves partial. `shared`: parameters that several stages share."""

    @property
    def shards_parameters(self) -> bool:
        """True if the plan shards parameters over this axis in addition to `shard`. The ranks of
        the axis compute together, and the gradient is summed over them. Experts are not sharded
        over the axis that divides them."""
        return self.in_forward and self.sums == "all"


def axis(*divides: Divided, same_state: bool, in_forward: bool, sums: str) -> dict[str, Any]:
    row = {"divides": divides, "same_state": same_state, "in_forward": in_forward, "sums": sums}
    return {"axis": row}


@with_field_docs
@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The mesh axes, whose sizes multiply to the world size, and how each process computes. Raises
    `PlanError`.

    `Plan()` is `replicate=auto`. If any axis is given, the other axes have size 1 by default. At
    most one axis may be `auto`: the axis gets the remaining processes.
    """

    replicate: Size | None = field(
        default=None, metadata=axis("microbatches", same_state=True, in_forward=False, sums="all")
    )
    """Number of replicas. Each replica holds the whole model and computes some of the microbatches
    (DDP)."""
    shard: Size | None = field(
        default=None,
        metadata=axis("microbatches", "parameters", same_state=False, in_forward=True, sums="all"),
    )
    """Number of processes over which parameters are sharded. Each process computes some of the
    microbatches (FSDP2)."""
    expert: Size | None = field(
        default=None,
        metadata=axis("microbatches", "experts", same_state=False, in_forward=True, sums="all"),
    )
    """Number of processes over which the experts of each mixture of experts are distributed. Each
    process computes some of the microbatches (expert parallelism)."""
    context: Size | None = field(
        default=None, metadata=axis("tokens", same_state=True, in_forward=True, sums="all")
    )
    """Number of processes that divide the tokens of each sequence of a microbatch (context
    parallelism)."""
    tensor: Size | None = field(
        default=None, metadata=axis("features", same_state=False, in_forward=True, sums="partial")
    )
    """Number of processes that each compute a part of each layer for the same microbatch (tensor
    parallelism)."""
    pipeline: Size | None = field(
        default=None, metadata=axis("layers", same_state=False, in_forward=True, sums="shared")
    )
    """Number of processes that each hold some of the layers and take microbatches in turn (pipeline
    parallelism)."""
    numerics: Numerics = "fast"
    """`bitwise`: gradients are summed in a canonical order, and the final model has the same bits
    at any world size."""
    sharding: Sharding = "full"
    """Under `shard`, `full` frees a block's gathered parameters after its forward and gathers them
    again for its backward (ZeRO-3). `gradients` keeps a block's gathered parameters until its
    backward (ZeRO-2). ZeRO-2 uses more memory than ZeRO-3, and has one all-gather less."""
    offload: bool = False
    """CPU offload, under `shard` on GPUs. Parameters, gradients and optimizer state stay in CPU
    memory, and the optimizer runs on the CPU. Each all-gather copies a block's parameters to the
    GPU."""
    checkpointing: Checkpointing = "none"
    """Activation checkpointing. `full` keeps only the inputs of each block and recomputes its
    activations in the backward. `selective` also keeps the results of matrix products, convolutions
    and attention."""
    microbatch_splits: int = 0
    """Number of times that each microbatch is halved, to save memory. A part has at least one
    sample. Each part of a microbatch draws from a separate random stream. Without random numbers in
    the forward, the result is the same up to rounding. Models with BatchNorm are refused, because
    each part would have its own batch statistics."""
    slices: int = 1
    """Under `numerics=bitwise`, the number of slices in which layers of `Recipe.tensor` compute,
    even on one process. `slices` must be a multiple of `tensor`. Runs with the same `slices` give
    the model the same bits."""
    logits: Logits = "whole"
    """With `chunked`, the model's head (`Recipe.head`) computes no logits. `F.cross_entropy` of the
    head's output computes the logits, their loss and their gradient for some tokens at a time.
    Chunks save the memory of the full logits. Only the loss can use the logits."""
    schedule: Schedule = "1f1b"
    """Pipeline schedule. `gpipe`: all forwards, then all backwards. `1f1b`: each backward as early
    as possible, which keeps fewer activations. `interleaved`: two stages per process, with less
    waiting and more communication. `zero-bubble`: gradients of weights are computed when a process
    would otherwise wait."""
    exchange: Exchange = "auto"
    """Attention's exchange under `context`. `keys`: each rank gathers all keys and values, for its
    tokens. `heads`: each rank gets all tokens of some of the heads. `auto`: the exchange that sends
    fewer bytes."""
    compile: bool = False
    """Compile each block's forward with torch.compile, once for each shape."""
    split: Split = 1
    """Number of devices of one process over which the layers are distributed, with similar bytes on
    each. On a CPU, every device is the CPU. A tuple gives the number of layers on each device, in
    the model's order: `(3, 5)`, as text `3+5`."""
    data_parallel: int = 1
    """Number of GPUs over which one process splits each microbatch (`torch.nn.DataParallel`).
    `replicate` is faster than `data_parallel`."""
    transport: Transport = "auto"
    """Backend of collectives between processes on CPUs. `auto`: shared memory if all processes are
    on one host, else Gloo. `torch`: always Gloo."""
    assignment: Assignment = "equal"
    """Number of microbatches of each replica. `equal`: equal numbers, or numbers that differ by
    one. `measured`: in proportion to the replica's measured speed, so that a slow machine does not
    hold up the run."""
    threads: Size | None = None
    """Intra-op threads per process. With None, OMP_NUM_THREADS if set, else cores ÷ processes
    (`bitwise` on CPUs: 1)."""
    workers: Size = 0
    """Number of data loader workers per rank. With 0, the training process loads the data. With
    `auto`, the number is measured."""
    prefetch: Size = 2
    """Number of microbatches that each loader worker prefetches. `auto` is chosen from the spread
    of measured loading times."""

    def __post_init__(self) -> None:
        given = {name: size for name, size in self.axis_sizes.items() if size is not None}
        for name, size in given.items():
            if size != "auto" and not _counts(size, 1):
                raise PlanError(
                    f"{name}={size}; the size of a mesh axis is a whole number of at least 1, or"
                    " auto"
                )
        if list(given.values()).count("auto") > 1:
            raise PlanError(
                f"{self._text(given)}; only one axis can be auto; give the others a size"
            )
        for name, known in WORDS.items():
            if getattr(self, name) not in known:
                raise PlanError(
                    f"{name}={getattr(self, name)}; the known values are"
                    f" {', '.join(known)}{did_you_mean(str(getattr(self, name)), known)}"
                )
        for name in ("compile", "offload"):
            if not isinstance(getattr(self, name), bool):
                raise PlanError(
                    f"{name}={getattr(self, name)}; it must be yes or no (in Python True or False)"
                )
        if self.offload and given.get("shard", 1) == 1:
            raise PlanError(
                f"offload=yes with shard={given.get('shard', 1)}; CPU offload applies to sharded"
                " parameters; give shard two processes or more, or leave offload=yes out"
            )
        if self.offload and self.numerics == "bitwise" and self.threads not in (None, "auto", 1):
            raise PlanError(
                f"threads={self.threads} with offload=yes and numerics=bitwise; the optimizer then"
                " computes on the CPU, where the number of threads changes bits, so it is 1; leave"
                " threads out"
            )
        if not _counts(self.microbatch_splits, 0, 32):
            raise PlanError(
                f"microbatch_splits={self.microbatch_splits}; it counts how often each microbatch"
                " is halved and is 0 to 32"
            )
        if self.workers != "auto" and not _counts(self.workers, 0, MOST):
            raise PlanError(
                f"workers={self.workers}; it counts loader processes a rank and is 0 to {MOST}, or"
                " auto"
            )
        if self.threads not in ("auto", None) and not _counts(self.threads, 1, MOST):
            raise PlanError(
                f"threads={self.threads}; it counts intra-op threads a process and is 1 to {MOST},"
                " or auto"
            )
        if self.prefetch != "auto" and not _counts(self.prefetch, 1, MOST):
            raise PlanError(
                f"prefetch={self.prefetch}; it counts microbatches that a loader process makes"
                f" ahead, 1 to {MOST}, or auto"
            )
        if not _counts(self.slices, 1, MOST) or self.slices & (self.slices - 1):
            raise PlanError(
                f"slices={self.slices}; it counts the slices of each sharded layer and is a power"
                f" of two, 1 to {MOST}"
            )
        if given.get("tensor", 1) != 1 or self.slices != 1:
            self._check_tensor(given)
        if given.get("pipeline", 1) != 1:
            self._check_pipeline(given)
        if given.get("context", 1) != 1:
            self._check_context()
        if given.get("expert", 1) != 1:
            self._check_expert(given)
        self._check_one_process(given)
        if self.assignment == "measured":
            self._check_measured_assignment(given)
        alone = bool(given) or self.split != 1 or self.data_parallel != 1
        for name in self.axis_sizes.keys() - given:
            object.__setattr__(self, name, 1 if alone or name != "replicate" else "auto")

    def _check_tensor(self, given: dict[str, Any]) -> None:
        ranks = given.get("tensor", 1)
        what, instead = f"tensor={ranks}", "use replicate and shard"
        if ranks == 1:
            what, instead = f"slices={self.slices}", "leave slices out"
        for name, value, why in (
            (
                "compile",
                True,
                (
                    "its layers inspect their tensors while they run, which a compiled forward"
                    " cannot do"
                ),
            ),
            (
                "logits",
                "chunked",
                (
                    "its style 'loss' shards the logits over the ranks, and the head's weight is"
                    " sharded"
                ),
            ),
        ):
            if getattr(self, name) == value:
                said = "yes" if value is True else value
                raise PlanError(
                    f"{what} with {name}={said}; {why}; leave {name}={said} out, or {instead}"
                )
        if self.slices != 1:
            self._check_slices(given)
        if self.numerics == "bitwise" and ranks != "auto" and self.slices % ranks:
            fitting = 1 << (ranks - 1).bit_length()
            remedy = f"tensor={ranks},slices={ranks}"
            if fitting != ranks:
                remedy = f"tensor={fitting // 2},slices={max(self.slices, fitting // 2)}"
            given_slices = f"slices={self.slices}" if self.slices != 1 else "no slices"
            raise PlanError(
                f"tensor={ranks} with numerics=bitwise and {given_slices}; it needs slices, a power"
                " of two and a multiple of tensor: then the sums inside a layer add the same parts"
                f" on any number of ranks; write {remedy},numerics=bitwise, with the same slices in"
                " each plan whose bits you compare, or leave numerics=bitwise out"
            )

    def _check_slices(self, given: dict[str, Any]) -> None:
        if self.numerics != "bitwise":
            raise PlanError(
                f"slices={self.slices} with numerics={self.numerics}; slices give the bits that"
                " numerics=bitwise is about, and cost time; add numerics=bitwise, or leave slices"
                " out"
            )
        for name, why in NOT_IN_SLICES.items():
            if (size := given.get(name, 1)) != 1:
                raise PlanError(
                    f"slices={self.slices} with {name}={size}; {why}; leave slices out, or use"
                    f" replicate instead of {name}"
                )

    def _check_pipeline(self, given: dict[str, Any]) -> None:
        if self.schedule == "zero-bubble" and self.checkpointing == "selective":
            raise PlanError(
                "schedule=zero-bubble with checkpointing=selective; it computes the gradients of"
                " inputs and those of weights in two backwards, but results that selective"
                " checkpointing keeps can be used in one backward only; choose"
                " checkpointing=full, or schedule=1f1b"
            )
        if self.schedule == "gpipe" and self.logits == "chunked":
            raise PlanError(
                "schedule=gpipe with logits=chunked; the forward of a loss computes the gradients"
                " of the head, and gpipe would keep these gradients of every microbatch until the"
                " backwards; choose schedule=1f1b"
            )

    def _check_context(self) -> None:
        if self.numerics == "bitwise" and self.exchange == "heads":
            raise PlanError(
                f"context={self.context} with numerics=bitwise and exchange=heads; each chunk"
                " attends with all heads, so that its bits do not depend on the number of"
                " processes; leave exchange=heads out, or numerics=bitwise"
            )
        self._refuse_with(
            "context",
            (
                "compile",
                self.compile,
                False,
                "attention is replaced while the forward runs, which a compiled forward does not"
                " see",
            ),
        )

    def _check_expert(self, given: dict[str, Any]) -> None:
        if self.checkpointing == "selective" and 1 not in (
            given.get("shard", 1),
            given.get("pipeline", 1),
        ):
            raise PlanError(
                f"checkpointing=selective with expert={self.expert}, shard={self.shard} and"
                f" pipeline={self.pipeline}; FSDP2 gathers experts inside of a block's forward, or"
                " has gathered them in another microbatch's backward, and selective checkpointing"
                " recomputes only what is alike; choose checkpointing=full"
            )

    def _refuse_with(self, axis: str, *refused: tuple[str, Any, Any, str]) -> None:
        for name, value, default, why in refused:
            if value != default:
                said = f"{name}={_text_of(value)}"
                raise PlanError(
                    f"{axis}={getattr(self, axis)} with {said}; {why}; leave {said} out, or {axis}"
                )

    def _check_measured_assignment(self, given: dict[str, Any]) -> None:
        paced = [
            (axis.name, given.get(axis.name, 1), PACED_BY.get(axis.divides[-1], TOGETHER))
            for axis in self.axes()
            if axis.in_forward
        ]
        for name, value, why in (
            *paced,
            ("split", self.split, "one process computes all microbatches"),
            ("data_parallel", self.data_parallel, "one process computes all microbatches"),
        ):
            if value != 1:
                raise PlanError(
                    f"assignment=measured with {name}={_text_of(value)}; {why}; leave"
                    " assignment=measured out, or use replicate only"
                )

    def _check_one_process(self, given: dict[str, Any]) -> None:
        layers = self.split if isinstance(self.split, tuple) else ()
        if not (
            _counts(self.split, 1)
            or (len(layers) > 1 and any(layers) and all(_counts(number, 0) for number in layers))
        ):
            raise PlanError(
                f"split={self.split}; it must be a number of devices, at least 1, or the layers on"
                " each device, such as 3+5"
            )
        if not _counts(self.data_parallel, 1):
            raise PlanError(
                f"data_parallel={self.data_parallel}; it counts GPUs of one process and is at"
                " least 1"
            )
        for name, instead in (("split", "pipeline"), ("data_parallel", "replicate")):
            value, axes = getattr(self, name), [each for each, size in given.items() if size != 1]
            if value != 1 and axes:
                raise PlanError(
                    f"{name}={_text_of(value)} with {axes[0]}={given[axes[0]]}; {name} is for one"
                    " process with several devices, and axes are for several processes; leave one"
                    f" of the two out; over processes, {instead} does what {name} does"
                )
        if self.data_parallel != 1:
            for name in ("split", "numerics", "checkpointing", "logits", "compile"):
                if getattr(self, name) != _default(name):
                    said = _text_of(getattr(self, name))
                    raise PlanError(
                        f"data_parallel={self.data_parallel} with {name}={said}; it computes each"
                        f" microbatch in parts, on copies of the model; leave {name} out, or use"
                        f" replicate={self.data_parallel}, which goes with everything"
                    )

        if self.split != 1 and self.logits == "chunked":
            raise PlanError(
                f"split={_text_of(self.split)} with logits=chunked; a loss of chunks uses the"
                " head's weight on the device of the loss; leave one of the two out"
            )

    @classmethod
    def axes(cls) -> tuple[Axis, ...]:
        """All axes, in the order of the plan's text."""
        return _axes_of(cls)  # type: ignore[arg-type]  # a class is hashable

    @property
    def axis_sizes(self) -> dict[str, Size]:
        """The size of each axis, by name."""
        return {axis.name: getattr(self, axis.name) for axis in self.axes()}

    def size(self, axis: Axis) -> int:
        """Return the number of ranks along an axis of a resolved plan."""
        return int(getattr(self, axis.name))

    @property
    def larger(self) -> list[Axis]:
        """The axes that may have more than one rank, in the order of the mesh. Pipeline stages come
        first, because they communicate least of all axes."""
        larger = [axis for axis in self.axes() if getattr(self, axis.name) != 1]
        if any("parameters" in axis.divides for axis in larger):
            larger = [
                replace(axis, same_state=axis.same_state and not axis.shards_parameters)
                for axis in larger
            ]
        return sorted(larger, key=lambda axis: "layers" not in axis.divides)

    def divides(self, what: Divided) -> bool:
        """True if an axis of more than one rank divides `what`, such as the parameters or the
        microbatches."""
        return any(what in axis.divides for axis in self.larger)

    @property
    def state_divided(self) -> list[str]:
        """The axes whose ranks hold different state, as text such as `shard=2`."""
        divided = {axis.name for axis in self.larger if not axis.same_state}
        return [f"{name}={size}" for name, size in self.axis_sizes.items() if name in divided]

    @property
    def data_ranks(self) -> int:
        """The number of ranks that compute different microbatches. The plan must be resolved."""
        return math.prod(self.size(axis) for axis in self.larger if "microbatches" in axis.divides)

    @property
    def has_rounds(self) -> bool:
        """True if the data ranks compute in rounds of one microbatch each, because their forwards
        have collectives."""
        return any(axis.in_forward and "microbatches" in axis.divides for axis in self.larger)

    @property
    def split_devices(self) -> int:
        """Number of devices over which the process distributes the layers."""
        return len(self.split) if isinstance(self.split, tuple) else self.split

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Parse the text of `--plan`: comma-separated `name=value` pairs, as in
        `"replicate=2,numerics=bitwise"`."""
        values: dict[str, Any] = {}
        known = [field.name for field in fields(cls)]
        for item in filter(None, (part.strip() for part in text.split(","))):
            name, equals, value = (part.strip() for part in item.partition("="))
            if not equals or not value or "=" in value:
                raise PlanError(
                    f"{item!r} in plan {text!r}; a plan is made of name=value pairs with commas"
                    " between them, such as replicate=2,numerics=bitwise"
                )
            if name in values:
                raise PlanError(f"{name!r} is given twice in plan {text!r}; give it once")
            if name not in known:
                raise PlanError(
                    f"{name!r} in plan {text!r} is unknown; the known keys are"
                    f" {', '.join(known)}{did_you_mean(name, known)}"
                )
            values[name] = _read(name, value, text)
        return cls(**values)

    def resolve(self, world_size: int) -> Plan:
        """Return the plan with `auto` replaced for `world_size` processes. Raises `PlanError` if
        the product of the axes differs from `world_size`."""
        sizes: dict[str, Any] = self.axis_sizes
        fixed = self._fixed
        if "auto" in sizes.values() and world_size % fixed == 0:
            rest = world_size // fixed
            sizes = {name: rest if size == "auto" else size for name, size in sizes.items()}
        elif fixed != world_size:
            raise PlanError(
                f"plan {str(self)!r} with {world_size} processes; the axes multiply to {fixed}, and"
                f" must {'divide' if 'auto' in sizes.values() else 'multiply to'} the number of"
                f" processes; change the plan, or the number of processes to {fixed}"
            )
        return replace(self, **sizes)

    @property
    def _fixed(self) -> int:
        return math.prod(size for size in self.axis_sizes.values() if size != "auto")

    @property
    def fits_several_sizes(self) -> bool:
        """True if the plan fits several world sizes, because an axis is `auto`."""
        return "auto" in self.axis_sizes.values()

    def sizes(self, most: int) -> list[int]:
        """The world sizes up to `most` that the plan fits, in ascending order."""
        fixed = self._fixed
        sizes = range(fixed, most + 1, fixed)
        return list(sizes if self.fits_several_sizes else sizes[:1])

    def __str__(self) -> str:
        sizes = self.axis_sizes.items()
        text = self._text({name: size for name, size in sizes if name == "replicate" or size != 1})
        settings = {name: getattr(self, name) for name in SETTINGS}
        pairs = [
            f"{name}={_text_of(value)}"
            for name, value in settings.items()
            if value != _default(name)
        ]
        return ",".join([text, f"numerics={self.numerics}", *pairs])

    @staticmethod
    def _text(axes: dict[str, Any]) -> str:
        return ",".join(f"{axis}={size}" for axis, size in axes.items())


def changed_bits(saved: Plan, now: Plan) -> list[str]:
    """Describe the differences between two plans that change the bits of a run in bitwise
    numerics."""
    if saved.numerics == now.numerics == "bitwise" and saved.slices != now.slices:
        return [f"slices (of the plan): {saved.slices}, now {now.slices}"]
    return []


@cache
def _axes_of(plan: type[Plan]) -> tuple[Axis, ...]:
    rows = [(each.name, each.metadata["axis"]) for each in fields(plan) if "axis" in each.metadata]
    return tuple(Axis(name, **row) for name, row in rows)


def _may_be_auto(name: str) -> bool:
    return name in MEASURED or any(axis.name == name for axis in Plan.axes())


def _read(name: str, value: str, text: str) -> Any:
    if name == "split" and "+" in value:
        return tuple(_whole_number(name, part, text) for part in value.split("+"))
    if name in ("compile", "offload"):
        return {"yes": True, "no": False}.get(value, value)
    is_word = name in WORDS or (value == "auto" and _may_be_auto(name))
    return value if is_word else _whole_number(name, value, text)


def _counts(value: Any, least: int, most: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _text_of(value: Any) -> str:
    return (
        "yes"
        if value is True
        else "+".join(map(str, value))
        if isinstance(value, tuple)
        else str(value)
    )


@cache
def _default(name: str) -> Any:
    return next(field.default for field in fields(Plan) if field.name == name)


def _whole_number(name: str, value: str, text: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise PlanError(
            f"{name}={value!r} in plan {text!r}; the value is a whole"
            f" number{' or auto' if _may_be_auto(name) else ''}"
        ) from None
