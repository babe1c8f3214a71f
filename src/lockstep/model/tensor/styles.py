"""The styles of the `tensor` axis (tensor parallelism). A plan maps patterns of module names to
styles. Layers with peft's LoRA adapters are also sharded."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn

from lockstep.base.errors import RecipeError
from lockstep.base.torch_private import own_parameters
from lockstep.model.blocks import matching_names


@dataclass(frozen=True, slots=True)
class Style:
    """The way in which a layer's weight, input and output are sharded over the ranks of the
    `tensor` axis. A *sharded* input or output holds only this rank's features or heads."""

    kinds: tuple[str, ...]
    shards: Literal["outputs", "inputs", "nothing"]
    """The dim along which the weight is sharded: the layer's outputs, or its inputs (an embedding's
    vocabulary)."""
    input_layout: Literal["replicated", "sharded", "sequence"]
    """The layout `replicated` has equal full tensors on all ranks. The layout `sharded` has this
    rank's shard of the last dim, the features. The layout `sequence` has this rank's shard of dim
    1, the tokens."""
    output_layout: Literal["replicated", "sharded", "sequence", "classes"]
    """A layout of `input_layout`, or `classes`, this rank's shard of the logits. The outputs
    `sequence` and `classes` are DTensors, sharded along dim 1 and along the last dim."""
    slices_input: bool = False
    """True if the user's code gives the layer a full tensor. If True, the layer takes this rank's
    shard of the features from the full tensor."""

    @property
    def exposes_shards(self) -> bool:
        return self.output_layout == "sharded" or (
            self.input_layout == "sharded" and not self.slices_input
        )


STYLES = {
    "colwise": Style(("linear", "embedding"), "outputs", "replicated", "sharded"),
    "colwise_gathered": Style(("linear", "embedding"), "outputs", "replicated", "replicated"),
    "rowwise": Style(("linear",), "inputs", "sharded", "replicated"),
    "rowwise_split": Style(("linear",), "inputs", "sharded", "replicated", slices_input=True),
    "rowwise_sequence": Style(("linear",), "inputs", "sharded", "sequence"),
    "embedding": Style(("embedding",), "inputs", "replicated", "replicated"),
    "embedding_sequence": Style(("embedding",), "inputs", "replicated", "sequence"),
    "sequence": Style(("any",), "nothing", "sequence", "sequence"),
    "vocabulary": Style(("linear",), "outputs", "replicated", "replicated"),
    "loss": Style(("linear",), "outputs", "replicated", "classes"),
    "replicated": Style(("any",), "nothing", "replicated", "replicated"),
}

HUGGING_FACE = {
    "colwise": "colwise",
    "colwise_rep": "colwise_gathered",
    "colwise_gather_output": "colwise_gathered",
    "rowwise": "rowwise",
    "rowwise_rep": "rowwise_split",
    "rowwise_split_input": "rowwise_split",
    "embedding_rowwise": "embedding",
    "embedding_colwise": "colwise_gathered",
    "sequence_parallel": "sequence",
    "replicated": "replicated",
    "replicated_with_grad_allreduce": "replicated",
}

SAME_SHARDS: Mapping[str, Mapping[int | None, str]] = {
    "embedding": {0: "embedding", 1: "colwise_gathered"},
    "linear": {0: "vocabulary", 1: "rowwise_split"},
}
"""For each kind of a layer that shares a sharded weight, maps the weight's sharded dim to the
layer's style."""
HEADS = re.compile(r"(n|num|number_of)?_?((attention|key_value|kv|q|query)_)?n?heads?")
FUSED = re.compile(
    r"(^|[._])(qkv|w?qkv_?proj|query_key_value|c_attn|in_proj|gate_up(_proj)?)$", re.IGNORECASE
)
"""Names of layers whose weight stacks several matrices, such as query, key and value."""


def tensor_styles(
    model: nn.Module,
    given: Mapping[str, str] | None,
    size: int,
    slices: int = 1,
    *,
    experts: Collection[str] = (),
) -> dict[str, str]:
    """Return the style of each sharded module, in the order of the model's modules. The last
    pattern of `Recipe.tensor` that matches is used. If `given` is None, the model's `tensor_plan`
    is used, or the tensor-parallel plan of a Hugging Face model. A layer that shares its weight
    with a sharded layer gets the matching style."""
    source, patterns = _source(model, given, experts)
    matched = _styles_of(model, source, patterns)
    if not source:
        matched = {name: style for name, style in matched.items() if not _expert_of(name, experts)}
    chosen = styles_with_adapters(model, matched)
    _add_layers_with_shared_weights(model, chosen)
    for name, style in chosen.items():
        if style != "replicated":
            _check_not_expert(name, style, experts)
        _check(model, name, style, size)
        if slices != 1:
            _check_slices(model, name, style, slices)
        # in transformers' own plans, these layers are correct
        if source and STYLES[style].output_layout == "sharded" and FUSED.search(name):
            raise RecipeError(
                f"the style {style!r} for {name!r}, which by its name stacks several matrices; a "
                "shard would hold parts of some and none of others; make separate layers (query, "
                "key and value), or give this one 'colwise_gathered' and the next 'rowwise_split'"
            )
    for name, module in model.named_modules():
        _check_heads(name, module, chosen, size)
    return {
        name: chosen[name]
        for name, _ in model.named_modules()
        if chosen.get(name, "replicated") != "replicated"
    }


def check_stage_parts(styles: Mapping[str, str], stages: Sequence[str]) -> None:
    """Raise `RecipeError` if `stages` names a layer with a sharded input or output. A pipeline
    could put a sharded layer and the next layer into different stages."""
    for name, style in styles.items():
        if name in stages and STYLES[style].exposes_shards:
            raise RecipeError(
                f"the layer {name!r} is sharded {style!r}, and is a stage's part by itself; a "
                "layer with a sharded output and the layer that takes it must be in one part; put "
                "both into one module, and name it in Recipe.stages"
            )


def _source(
    model: nn.Module, given: Mapping[str, str] | None, experts: Collection[str]
) -> tuple[str, Mapping[str, str]]:
    """Return the name of the source of the patterns, for errors, and the patterns with their
    styles."""
    if given is not None:
        return "Recipe.tensor", given
    own = getattr(model, "tensor_plan", None)
    if own is not None:
        return f"{type(model).__name__}.tensor_plan", own
    theirs = _without_experts(model, _hugging_face(model), experts)
    if not theirs:
        raise RecipeError(
            "tensor or slices on a model without a map of its layers; both are for mapped layers "
            "only; give "
            "Recipe(tensor={'blocks.*.query': 'colwise', 'blocks.*.projection': 'rowwise', ...}), "
            "set `tensor_plan` on the model, or leave tensor and slices out"
        )
    for pattern, style in theirs.items():
        if style not in HUGGING_FACE:
            raise RecipeError(
                f"the plan of {type(model).__name__} has {pattern!r}: {style!r}, an unknown style; "
                f"the known styles are {', '.join(HUGGING_FACE)}; give Recipe.tensor a map, which "
                "may leave these layers unsharded"
            )
    return "", {pattern: HUGGING_FACE[style] for pattern, style in theirs.items()}


def _hugging_face(model: nn.Module) -> dict[str, str]:
    name, model = without_adapters(model)
    complete = getattr(model, "_tp_plan", None)
    prefix = getattr(model, "base_model_prefix", "")
    prefix = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    inner = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    plan = {**{prefix + pattern: style for pattern, style in inner.items()}, **(complete or {})}
    return {f"{name}.{pattern}" if name else pattern: style for pattern, style in plan.items()}


def _without_experts(
    model: nn.Module, plan: Mapping[str, str], experts: Collection[str]
) -> dict[str, str]:
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    kept = {}
    for pattern, style in plan.items():
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching or not all(_expert_of(name, experts) for name in matching):
            kept[pattern] = style
    return kept


def _expert_of(name: str, experts: Collection[str]) -> str | None:
    return next((each for each in experts if f"{name}.".startswith(f"{each}.")), None)


def _check_not_expert(name: str, style: str, experts: Collection[str]) -> None:
    if (expert := _expert_of(name, experts)) is not None:
        around, _, last = expert.rpartition(".")
        pattern = f"*.{last}*" if around else f"{last}*"
        raise RecipeError(
            f"the style {style!r} for {name!r}, a module of experts; experts stay whole on the"
            " ranks of the axis tensor, and the axis expert divides them; end the map with"
            f" {pattern!r}: 'replicated'"
        )


def _styles_of(model: nn.Module, source: str, patterns: Mapping[str, str]) -> dict[str, str]:
    names = [name for name, _ in model.named_modules() if name]
    chosen: dict[str, str] = {}
    for pattern, style in patterns.items():
        if style not in STYLES:
            raise RecipeError(
                f"{source} has {pattern!r}: {style!r}, an unknown style; the known styles are"
                f" {', '.join(STYLES)}"
            )
        # transformers' plans may name layers that this model lacks
        if source or any(fnmatchcase(name, pattern) for name in names):
            matching = matching_names(names, pattern, f"{source} has", "blocks.*.query")
            chosen |= dict.fromkeys(matching, style)
    if not chosen:
        raise RecipeError(
            f"the plan of {type(model).__name__} matches none of its modules; give Recipe.tensor a"
            " map of names to styles"
        )
    return chosen


def _add_layers_with_shared_weights(model: nn.Module, chosen: dict[str, str]) -> None:
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for parameter in own_parameters(module).values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(name)
    for names in owners.values():
        mapped = [
            name for name in names if name in chosen and STYLES[chosen[name]].shards != "nothing"
        ]
        if not mapped or len(names) == 1:
            continue
        dims = {shard_dim(model.get_submodule(name), "weight", chosen[name]) for name in mapped}
        for name in names:
            if name in chosen:
                continue
            kind = kind_of(model.get_submodule(name))
            style = SAME_SHARDS.get(kind, {})
            if len(dims) == 1 and (dim := next(iter(dims))) in style:
                chosen[name] = style[dim]
        dims = {
            shard_dim(model.get_submodule(name), "weight", chosen[name]) if name in chosen else None
            for name in names
        }
        if len(dims) > 1:
            raise RecipeError(
                f"modules {', '.join(map(repr, names))} share a weight, and the styles"
                f" {[chosen.get(name) for name in names]} would shard it in different ways; give an"
                " embedding 'embedding' and the output layer tied to it 'vocabulary'"
            )


def _check(model: nn.Module, name: str, style: str, size: int) -> None:
    module = model.get_submodule(name)
    kind = kind_of(module)
    parent = model.get_submodule(name.rpartition(".")[0])
    if isinstance(parent, nn.MultiheadAttention):
        raise RecipeError(
            f"the style {style!r} for {name!r}, which is inside a torch.nn.MultiheadAttention; that"
            " module computes with its parameters and does not call its layers; write the"
            " attention with four torch.nn.Linear, and shard those"
        )
    wanted = STYLES[style].kinds
    if style == "replicated":
        return
    if style == "sequence" and (any(module.children()) or list(module.buffers())):
        raise RecipeError(
            f"the style 'sequence' for {name!r} ({type(module).__name__}), with modules or buffers"
            " inside; it is for layers that treat all positions of the sequence the same; name a"
            " norm or a dropout"
        )
    if "any" not in wanted and (
        kind not in wanted
        or set(own_parameters(module)) - {"weight", "bias"}
        or any(module.children())
    ):
        raise RecipeError(
            f"the style {style!r} for {name!r} ({type(module).__name__}); it is for"
            f" {' or '.join(wanted)} layers; map the layers inside of it, or leave it whole"
        )
    if isinstance(module, nn.Embedding) and (
        module.max_norm is not None or module.sparse or module.scale_grad_by_freq
    ):
        raise RecipeError(
            f"the style {style!r} for {name!r}, an embedding with max_norm, sparse or"
            " scale_grad_by_freq; leave it whole"
        )
    for parameter, tensor in own_parameters(module).items():
        dim = shard_dim(module, parameter, style)
        if tensor is not None and dim is not None and tensor.shape[dim] % size:
            raise RecipeError(
                f"{name}.{parameter} of shape {tuple(tensor.shape)} with tensor={size}; the style"
                f" {style!r} shards its dim {dim}, and {tensor.shape[dim]} is not a multiple of"
                f" {size}; choose a tensor axis that divides it (a vocabulary may be padded), or"
                " leave the layer whole"
            )


def _check_slices(model: nn.Module, name: str, style: str, slices: int) -> None:
    if "sequence" in style:
        raise RecipeError(
            f"slices={slices} with the style {style!r} of {name!r}; it sums the gradients of a"
            " norm's weight over a shard of the tokens, in an order that depends on the number of"
            " ranks; choose 'colwise', 'rowwise' and 'embedding' in Recipe.tensor, or leave slices"
            " and numerics=bitwise out"
        )
    module = model.get_submodule(name)
    weight = own_parameters(module).get("weight")
    if kind_of(module) != "linear" or weight is None:
        return
    dim = shard_dim(module, "weight", style)
    if dim is not None and weight.shape[dim] % slices:
        size = weight.shape[dim]
        fitting = math.gcd(size, slices)
        remedy = f"choose slices={fitting}, or leave" if fitting > 1 else "leave"
        raise RecipeError(
            f"{name}.weight of shape {tuple(weight.shape)} with slices={slices}; the style"
            f" {style!r} computes its dim {dim} in slices of equal size, and {size} is not a"
            f" multiple of {slices}; {remedy} the layer whole (a vocabulary may be padded)"
        )


def _check_heads(name: str, module: nn.Module, chosen: Mapping[str, str], size: int) -> None:
    children = [
        child
        for own, child in module.named_children()
        if chosen.get(f"{name}.{own}".lstrip(".")) == "colwise" and kind_of(child) == "linear"
    ]
    for attribute, heads in _head_counts(module) if children else ():
        depth = getattr(module, "head_dim", None)
        for child in children:
            outputs, inputs = sizes_of(child)
            if heads % size and (
                outputs == heads * depth
                if isinstance(depth, int)
                else outputs in (inputs, 3 * inputs)
            ):
                raise RecipeError(
                    f"{name or type(module).__name__} has {attribute}={heads} with tensor={size};"
                    f" each rank computes whole heads, and {heads} is not a multiple of {size};"
                    " choose a tensor axis that divides the heads, or leave this attention whole"
                )


def _head_counts(module: nn.Module) -> Iterator[tuple[str, int]]:
    config = getattr(module, "config", None)
    for where in (vars(module), vars(config) if hasattr(config, "__dict__") else {}):
        for attribute, value in where.items():
            if (
                isinstance(value, int)
                and not isinstance(value, bool)
                and value > 0
                and HEADS.fullmatch(attribute)
            ):
                yield attribute, value


def kind_of(module: nn.Module) -> str:
    if isinstance(module, nn.Linear) or is_transposed(module):
        return "linear"
    return "embedding" if isinstance(module, nn.Embedding) else type(module).__name__


def is_transposed(module: nn.Module) -> bool:
    """Return True for GPT-2's linear layer in transformers, whose weight has the shape (inputs,
    outputs)."""
    # FSDP2 derives a class for a layer that it gathers separately
    kinds = type(module).__mro__
    return any(kind.__name__ == "Conv1D" for kind in kinds) and hasattr(module, "nf")


def sizes_of(module: Any) -> tuple[int, int]:
    shape = tuple(module.weight.shape)
    return (shape[1], shape[0]) if is_transposed(module) else (shape[0], shape[1])


def shard_dim(module: nn.Module, parameter: str, style: str) -> int | None:
    shards = STYLES[style].shards
    if shards == "nothing" or (parameter == "bias" and shards == "inputs"):
        return None
    if parameter == "bias":
        return 0
    transposed = is_transposed(module) or isinstance(module, nn.Embedding)
    return int((shards == "inputs") != transposed)


_ADAPTER_STYLES = {
    "colwise": ("", "colwise"),
    "colwise_gathered": ("", ""),
    "rowwise": ("rowwise", ""),
    "rowwise_split": ("", ""),
}
"""Maps a layer's style to the styles of the two matrices of its LoRA adapter. Matrix A maps
features to the LoRA rank, and matrix B maps the LoRA rank to features. An empty style leaves the
matrix unsharded."""


def without_adapters(model: Any) -> tuple[str, Any]:
    if not hasattr(model, "peft_config") or not hasattr(model, "get_base_model"):
        return "", model
    inner = model.get_base_model()
    return next(name for name, module in model.named_modules() if module is inner), inner


def styles_with_adapters(model: nn.Module, chosen: Mapping[str, str]) -> dict[str, str]:
    styles: dict[str, str] = {}
    for name, style in chosen.items():
        module: Any = model.get_submodule(name)
        if not all(hasattr(module, part) for part in ("base_layer", "lora_A", "lora_B")):
            styles[name] = style
            continue
        if style not in _ADAPTER_STYLES:
            raise RecipeError(
                f"the style {style!r} for {name!r}, a layer with LoRA adapters; they can be sharded"
                f" with {', '.join(_ADAPTER_STYLES)}; leave the layer out of the plan, by a map in"
                " Recipe.tensor, or out of LoraConfig.target_modules"
            )
        styles[f"{name}.base_layer"] = style
        for part, adapter_style in zip(("lora_A", "lora_B"), _ADAPTER_STYLES[style], strict=True):
            if adapter_style:
                styles |= {
                    f"{name}.{part}.{adapter}": adapter_style for adapter in getattr(module, part)
                }
    return styles
