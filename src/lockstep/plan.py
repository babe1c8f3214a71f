"""How a recipe is executed: the mesh, the numerics, the loader. Nothing here changes what is learned."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from lockstep.base.errors import PlanError

Numerics = Literal["fast", "bitwise"]
Sharding = Literal["full", "gradients"]
Checkpointing = Literal["none", "selective", "full"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
Transport = Literal["auto", "torch"]
Size = int | Literal["auto"]
Split = int | tuple[int, ...]

WORDS: dict[str, tuple[str, ...]] = {
    "numerics": get_args(Numerics),
    "sharding": get_args(Sharding),
    "checkpointing": get_args(Checkpointing),
    "schedule": get_args(Schedule),
    "transport": get_args(Transport),
}
"""The settings whose value is a word."""
SETTINGS = (
    *("sharding", "offload", "checkpointing", "microbatch_splits", "schedule", "compile", "split", "data_parallel", "transport"),
    *("threads", "workers", "prefetch"),
)
"""Those that a plan's text has only where they are not the default."""
AXES = ("replicate", "shard", "tensor", "pipeline")
MEASURED = ("threads", "workers", "prefetch")
"""The settings whose `auto` is chosen by measurement at the start of a run, see `lockstep.autotune.autotune`."""
MOST = 1024
"""Threads, loader processes or microbatches ahead: more are a slip of the pen, which would take all memory before it failed."""
NOT_BUILT_YET = ("context",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The mesh axes, whose sizes multiply to the world size, and how each process computes. Raises `PlanError`.

    `Plan()` is `replicate=auto`. Where an axis is given, the ones that are not are 1. At most one axis is `auto`: it fills what is left.
    """

    replicate: Size | None = None
    """Processes that hold the whole model each and share out the microbatches (DDP)."""
    shard: Size | None = None
    """Processes that share out the model's parameters and the microbatches (FSDP2)."""
    tensor: Size | None = None
    """Processes that share out each layer of the same microbatch (tensor parallel)."""
    pipeline: Size | None = None
    """Processes that share out the layers; microbatches go through them one behind another (pipeline stages)."""
    numerics: Numerics = "fast"
    """`bitwise`: gradients are summed in one canonical order, so that the model has the same bits at any world size."""
    sharding: Sharding = "full"
    """Under `shard`: `full` frees a block's gathered parameters after its forward and gathers them again for its backward (ZeRO-3);
    `gradients` keeps them until then: more memory, one exchange less (ZeRO-2)."""
    offload: bool = False
    """Under `shard`, on GPUs: parameters, gradients and the optimizer's state are kept in the CPU's memory, where the optimizer computes;
    each block's parameters are copied to the GPU when they are gathered."""
    checkpointing: Checkpointing = "none"
    """Activations: `full` keeps each block's inputs and computes the rest again in its backward; `selective` also keeps the results of
    matrix products, convolutions and attention."""
    microbatch_splits: int = 0
    """How often each microbatch of the recipe is halved, for memory; a part has at least one sample. The model is the same to rounding, as
    far as no random numbers are drawn: random streams belong to what is computed at once. Refused with BatchNorm, whose statistics do."""
    schedule: Schedule = "1f1b"
    """Under `pipeline`, when which microbatch is computed. `gpipe`: all forwards, then all backwards; `1f1b`: a backward as soon as there
    can be one, so that fewer activations are kept; `interleaved`: two stages a process, which wait less and send more; `zero-bubble`:
    the gradients of weights are computed where a process would wait."""
    compile: bool = False
    """Compile each block's forward (torch.compile), once for each shape."""
    split: Split = 1
    """Devices of this one process that share out the layers, balanced by bytes; on a CPU all of them are the CPU. Or how many layers each
    of them has, in the model's order: `(3, 5)`, as text `3+5`."""
    data_parallel: int = 1
    """GPUs of this one process that share out each microbatch (`torch.nn.DataParallel`). `replicate`, a process a GPU, is faster."""
    transport: Transport = "auto"
    """What carries gradients between processes on CPUs. `auto`: shared memory where all are on one host, else torch's own (Gloo); `torch`:
    always torch's own."""
    threads: Size | None = None
    """Intra-op threads a process. None: what OMP_NUM_THREADS says, else cores ÷ processes; 1 in `bitwise` on a CPU. `auto`: measured."""
    workers: Size = 0
    """Loader processes a rank. 0: the data are fetched in the training process. `auto`: measured."""
    prefetch: Size = 2
    """Microbatches that each loader process makes ahead of time. `auto`: by how much measured times of fetching differ."""

    def __post_init__(self) -> None:
        given = {axis: getattr(self, axis) for axis in AXES if getattr(self, axis) is not None}
        for axis, size in given.items():
            if size != "auto" and not _counts(size, 1):
                raise PlanError(f"{axis}={size}; the size of a mesh axis is a whole number of at least 1, or auto")
        if list(given.values()).count("auto") > 1:
            raise PlanError(f"{self._text(given)}; only one axis can fill what is left; give the others a size")
        for name, known in WORDS.items():
            if getattr(self, name) not in known:
                raise PlanError(f"{name}={getattr(self, name)}; known are {', '.join(known)}")
        for name in ("compile", "offload"):
            if not isinstance(getattr(self, name), bool):
                raise PlanError(f"{name}={getattr(self, name)}; it is yes or no (in Python True or False)")
        if self.offload and given.get("shard", 1) == 1:
            raise PlanError(
                f"offload=yes with shard={given.get('shard', 1)}; what is kept on the CPU is what the shard axis cuts; give shard two "
                "processes or more, or leave offload=yes out"
            )
        if not _counts(self.microbatch_splits, 0, 32):
            raise PlanError(f"microbatch_splits={self.microbatch_splits}; it counts how often each microbatch is halved and is 0 to 32")
        if self.workers != "auto" and not _counts(self.workers, 0, MOST):
            raise PlanError(f"workers={self.workers}; it counts loader processes a rank and is 0 to {MOST}, or auto")
        if self.threads not in ("auto", None) and not _counts(self.threads, 1, MOST):
            raise PlanError(f"threads={self.threads}; it counts intra-op threads a process and is 1 to {MOST}, or auto")
        if self.prefetch != "auto" and not _counts(self.prefetch, 1, MOST):
            raise PlanError(f"prefetch={self.prefetch}; it counts microbatches that a loader process makes ahead, 1 to {MOST}, or auto")
        if given.get("tensor", 1) != 1:
            self._check_tensor()
        if given.get("pipeline", 1) != 1:
            self._check_pipeline(given)
        self._check_one_process(given)
        for axis in AXES:
            if axis not in given:
                alone = bool(given) or self.split != 1 or self.data_parallel != 1
                object.__setattr__(self, axis, 1 if alone or axis != "replicate" else "auto")

    def _check_tensor(self) -> None:
        for name, value, why in (
            ("numerics", "bitwise", "it cuts the sums inside of a layer, and adds the parts in another order than one process does"),
            ("compile", True, "its layers look at each other's tensors while they run, which a compiled forward does not do"),
        ):
            if getattr(self, name) == value:
                said = "yes" if value is True else value
                raise PlanError(f"tensor={self.tensor} with {name}={said}; {why}; leave {name}={said} out, or use replicate and shard")

    def _check_pipeline(self, given: dict[str, Any]) -> None:
        if self.numerics == "bitwise":
            raise PlanError(
                f"pipeline={self.pipeline} with numerics=bitwise; a stage adds up its microbatches' gradients as they come, not in the "
                "canonical order; leave numerics=bitwise out, or use replicate and shard"
            )
        if self.schedule == "zero-bubble" and given.get("shard", 1) != 1:
            raise PlanError(
                f"schedule=zero-bubble with shard={self.shard}; it computes the gradients of weights apart from the backward that FSDP2 "
                "waits for, which then loses them; choose schedule=1f1b or interleaved"
            )

    def _check_one_process(self, given: dict[str, Any]) -> None:
        layers = self.split if isinstance(self.split, tuple) else ()
        if not (_counts(self.split, 1) or (len(layers) > 1 and any(layers) and all(_counts(number, 0) for number in layers))):
            raise PlanError(f"split={self.split}; it is a number of devices, at least 1, or how many layers each device has, such as 3+5")
        if not _counts(self.data_parallel, 1):
            raise PlanError(f"data_parallel={self.data_parallel}; it counts GPUs of one process and is at least 1")
        for name, instead in (("split", "pipeline"), ("data_parallel", "replicate")):
            value, axes = getattr(self, name), [axis for axis, size in given.items() if size != 1]
            if value != 1 and axes:
                raise PlanError(
                    f"{name}={_text_of(value)} with {axes[0]}={given[axes[0]]}; {name} is for one process with several devices, and axes "
                    f"are for several processes; leave one of the two out; over processes, {instead} does what {name} does"
                )
        if self.data_parallel != 1:
            for name in ("split", "numerics", "checkpointing", "compile"):
                if getattr(self, name) != _default(name):
                    said = _text_of(getattr(self, name))
                    raise PlanError(
                        f"data_parallel={self.data_parallel} with {name}={said}; it computes each microbatch in parts, on copies of the "
                        f"model; leave {name} out, or use replicate={self.data_parallel}, which goes with everything"
                    )

    @property
    def split_devices(self) -> int:
        """How many devices of the process share out the layers."""
        return len(self.split) if isinstance(self.split, tuple) else self.split

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Read the mini-language of `--plan`: `name=value` pairs with commas between, as in `"replicate=2,numerics=bitwise"`."""
        values: dict[str, Any] = {}
        known = [field.name for field in fields(cls)]
        for item in filter(None, (part.strip() for part in text.split(","))):
            name, equals, value = (part.strip() for part in item.partition("="))
            if not equals or not value:
                raise PlanError(f"{item!r} in plan {text!r}; a plan is made of name=value pairs, such as replicate=2,numerics=bitwise")
            if name in values:
                raise PlanError(f"{name!r} stands twice in plan {text!r}; give it once")
            if name not in known:
                if name in NOT_BUILT_YET:
                    raise PlanError(f"{item!r} in plan {text!r}; {name!r} is not built yet; this version knows {', '.join(known)}")
                raise PlanError(f"{name!r} in plan {text!r} is unknown; known are {', '.join(known)}")
            values[name] = _read(name, value, text)
        return cls(**values)

    def resolve(self, world_size: int) -> Plan:
        """The same plan with `auto` filled in for `world_size` processes. Raises `PlanError` where the axes do not multiply to it."""
        sizes: dict[str, Any] = {axis: getattr(self, axis) for axis in AXES}
        fixed = math.prod(size for size in sizes.values() if size != "auto")
        if "auto" in sizes.values() and world_size % fixed == 0:
            sizes = {axis: world_size // fixed if size == "auto" else size for axis, size in sizes.items()}
        elif fixed != world_size:
            raise PlanError(
                f"plan {str(self)!r} with {world_size} processes; the axes multiply to {fixed}, and must "
                f"{'divide' if 'auto' in sizes.values() else 'multiply to'} the number of processes; "
                f"change the plan, or start {fixed} processes"
            )
        return replace(self, **sizes)

    def __str__(self) -> str:
        text = self._text({axis: getattr(self, axis) for axis in AXES if axis == "replicate" or getattr(self, axis) != 1})
        settings = {name: getattr(self, name) for name in SETTINGS}
        told = [f"{name}={_text_of(value)}" for name, value in settings.items() if value != _default(name)]
        return ",".join([text, f"numerics={self.numerics}", *told])

    @staticmethod
    def _text(axes: dict[str, Any]) -> str:
        return ",".join(f"{axis}={size}" for axis, size in axes.items())


def _read(name: str, value: str, text: str) -> Any:
    if name == "split" and "+" in value:
        return tuple(_whole(name, part, text) for part in value.split("+"))
    if name in ("compile", "offload"):
        return {"yes": True, "no": False}.get(value, value)
    return value if name in WORDS or (value == "auto" and name in (*AXES, *MEASURED)) else _whole(name, value, text)


def _counts(value: Any, least: int, most: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _text_of(value: Any) -> str:
    return "yes" if value is True else "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _default(name: str) -> Any:
    return next(field.default for field in fields(Plan) if field.name == name)


def _whole(name: str, value: str, text: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise PlanError(
            f"{name}={value!r} in plan {text!r}; the value is a whole number{' or auto' if name in (*AXES, *MEASURED) else ''}"
        ) from None
