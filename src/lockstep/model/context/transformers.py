"""Lets models of transformers compute sequences that are divided among ranks, and rows of several
documents. The module uses the registries of attention functions and of mask functions in
transformers.

transformers describes every mask as a function of indices (sample, head, query, key). lockstep
evaluates each mask function at the positions of tokens in their documents, and masks tokens of
other documents. The model's code is unchanged. Outside of `SequenceMode`, the model computes the
same as without this module.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.base.errors import PlanError, RecipeError
from lockstep.model.context.active import ActiveSequence, active, handled
from lockstep.model.context.attention import ChunkedAttention
from lockstep.model.context.chunk_axis import ChunkAxis
from lockstep.model.context.exchange import (
    TokenLayout,
    attend_by_heads,
    attend_by_keys,
    chosen_exchange,
    gather_tokens,
)
from lockstep.model.context.flex import Allowed, block_mask, flex_attention, places_of
from lockstep.model.context.kernels import Kernel, computed_dtype, facts
from lockstep.model.context.recomputed_tensors import RecomputedTensors
from lockstep.model.context.varlen import varlen_attention

ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers, in configurations of transformers, that mix tokens by attention."""
READS_LARGEST_POSITION = ("dynamic", "longrope")
"""Kinds of rotary embeddings whose frequencies depend on the largest position of a batch."""
OWN = ("sdpa", "eager")
"""Implementations of attention in transformers that take a dense mask."""
OWN_SOFTMAX = ("softcap", "s_aux", "position_bias")
"""Keywords with which an attention of transformers computes a different softmax than sdpa."""
PREFIX = "lockstep_"


def pretrained_models(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the outermost `PreTrainedModel`s of transformers in `model`."""
    library = sys.modules.get("transformers.modeling_utils")
    models: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules() if library is not None else ():
        inside = any(f"{name}.".startswith(f"{outer}.") or not outer for outer, _ in models)
        if not inside and isinstance(module, library.PreTrainedModel):  # type: ignore[union-attr]  # of a module that is there
            models.append((name, module))
    return models


def open_transformers(model: nn.Module) -> bool:
    """Register attention functions with transformers that keep attention within documents and get
    the keys of all ranks. The functions act only in `SequenceMode`. Call `open_transformers` once,
    before the first forward. Returns False if `model` has no models of transformers."""
    models = pretrained_models(model)
    for _, each in models:
        own = _checked_implementation(each)
        library = import_module("transformers")
        library.AttentionInterface.register(PREFIX + own, partial(_attention, own))
        library.AttentionMaskInterface.register(PREFIX + own, partial(_mask, own))
        each.set_attn_implementation(PREFIX + own)  # type: ignore[operator]  # of a PreTrainedModel
        complete = partial(_complete_call, inspect.signature(each.forward))
        each.register_forward_pre_hook(complete, prepend=True, with_kwargs=True)
    return bool(models)


def _checked_implementation(model: nn.Module) -> str:
    """Raise `RecipeError` for models in which tokens of other documents would change the output."""
    name = type(model).__name__
    kind = sys.modules["transformers.modeling_utils"].PreTrainedModel
    configs = {id(each.config): each.config for each in model.modules() if isinstance(each, kind)}
    for config in configs.values():
        for rope in {*_rope_kinds(config)} & {*READS_LARGEST_POSITION}:
            raise RecipeError(
                f"{name} has a rotary embedding of the type {rope!r}; its frequencies follow the"
                " largest position in the batch, so documents, and ranks of context, change each"
                " other; choose a type with fixed frequencies in the configuration, such as 'yarn'"
            )
        others = sorted({*(getattr(config, "layer_types", None) or ())} - {*ATTENTION})
        if others:
            raise RecipeError(
                f"{name} has layers of the kind {others[0]!r}, which mix tokens without attention,"
                " across documents and ranks of context; train it on a document in each row,"
                " without Recipe.sequence and context"
            )
    implementations = {
        str(config._attn_implementation).removeprefix(PREFIX) for config in configs.values()
    }
    own = min(implementations)
    if len(implementations) > 1 or own not in OWN:
        raise RecipeError(
            f"{name} attends by {', '.join(sorted(implementations))}; a sequence needs one that"
            " takes a dense mask; make the model with attn_implementation='sdpa', or 'eager' where"
            " the family needs it (GPT-OSS, Gemma 2)"
        )
    if not model._can_set_attn_implementation():  # type: ignore[operator]  # a PreTrainedModel's
        raise RecipeError(
            f"{name} does not take its attention from transformers' AttentionInterface; train it on"
            " a document in each row, without Recipe.sequence and context"
        )
    return own


def _rope_kinds(config: Any) -> Iterator[str]:
    parameters = getattr(config, "rope_parameters", None)
    if isinstance(parameters, dict):
        for each in (
            parameters,
            *(value for value in parameters.values() if isinstance(value, dict)),
        ):
            yield str(each.get("rope_type"))


def check_call(model: nn.Module, arguments: tuple[Any, ...], given: dict[str, Any]) -> None:
    if any(not name for name, _ in pretrained_models(model)):
        bound = inspect.signature(model.forward).bind(*arguments, **given)
        _checked_call(type(model).__name__, bound)


def _checked_call(name: str, bound: inspect.BoundArguments) -> dict[str, Any]:
    call = {**bound.arguments, **bound.arguments.get("kwargs", {})}
    if call.get("labels") is not None:
        raise RecipeError(
            f"{name} is called with labels; its loss is a mean over the tokens of one call, and"
            " pairs a token with the next one, even of another document or rank; leave labels out"
            " of inputs, and compute the loss from output.logits in Recipe.loss"
        )
    if call.get("past_key_values") is not None or call.get("use_cache"):
        raise RecipeError(
            f"{name} is called with a cache of keys, which belong to no token of this batch; leave"
            " past_key_values and use_cache out of inputs"
        )
    mask = call.get("attention_mask")
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        shape = f"of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(type(mask))
        raise RecipeError(
            f"{name} is called with an attention_mask {shape}; lockstep makes the mask of a"
            " sequence; give one of shape (samples, tokens), 0 at padding, or none"
        )
    return call


def _complete_call(
    signature: inspect.Signature,
    model: nn.Module,
    arguments: tuple[Any, ...],
    given: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of a call of a transformers model, with the positions of this rank's
    tokens and a padding mask of the full row, but without a KV cache. Returns None outside of
    `SequenceMode`."""
    if (sequence := active()) is None:
        return None
    bound = signature.bind(*arguments, **given)
    call = _checked_call(type(model).__name__, bound)
    mask = call.get("attention_mask")
    layout, documents = sequence.layout, sequence.documents
    first = next(value for value in call.values() if isinstance(value, Tensor))
    samples, device = len(first), first.device
    if mask is None:
        # without a mask, transformers infers documents from positions
        mask = torch.ones(samples, layout.tokens, dtype=torch.long, device=device)
    elif mask.shape[1] == layout.local:
        mask = gather_tokens(layout, mask, 1)
    places = layout.places.to(device)
    positions = places.expand(samples, -1) if documents is None else documents.positions[:, places]
    own = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
    for key, value in own.items():
        if key in signature.parameters and (key == "attention_mask" or call.get(key) is None):
            bound.arguments[key] = value
    return bound.args, bound.kwargs


class SequenceMask:
    """The attention mask of one kind of layers in a forward. The mask is evaluated for the queries
    of this rank, of one document, or of all tokens."""

    def __init__(
        self,
        own: str,
        sequence: ActiveSequence,
        function: Callable[..., Tensor],
        padding: Tensor | None,
        samples: int,
        device: torch.device,
    ) -> None:
        self.sequence = sequence
        self._function = function
        self._padding = None if padding is None or padding.all() else padding
        self._samples, self._device = samples, device
        causal = import_module("transformers.masking_utils").causal_mask_function
        # other implementations, without a mask, attend to all tokens
        self.is_causal = function is causal and self._padding is None
        """True if a token attends to exactly the tokens of its document up to its position."""
        self._needs_none = own == "sdpa" and self.is_causal
        self._made: dict[Any, Tensor] = {}
        self._block_masks: dict[tuple[range, ...], Any] = {}

    def without_masks(self) -> SequenceMask:
        mask = copy.copy(self)
        mask._made = {}
        return mask

    def of_rank(self, dtype: torch.dtype) -> Tensor:
        """Return the mask of this rank's queries and the keys of all tokens, of shape (samples, 1,
        queries, keys)."""
        places = self.sequence.layout.places.to(self._device)
        return self._cached_mask(
            "rank", lambda: self._allowed(slice(None), places, self._every), dtype
        )

    def of_all(self, dtype: torch.dtype) -> Tensor | None:
        if self._needs_none and self.sequence.documents is None:
            return None
        every = self._every
        return self._cached_mask("all", lambda: self._allowed(slice(None), every, every), dtype)

    def of_document(self, row: int, first: int, tokens: int, dtype: torch.dtype) -> Tensor | None:
        """Return a mask of shape (1, 1, tokens, tokens), or None if sdpa needs no mask."""
        if self._needs_none:
            return None
        rows, own = slice(row, row + 1), self._every[first : first + tokens]
        return self._cached_mask((row, first), lambda: self._allowed(rows, own, own), dtype)

    def lengths(self) -> list[list[int]]:
        documents = self.sequence.documents
        if documents is None:
            return [[self.sequence.layout.tokens]] * self._samples
        return documents.lengths

    def of_blocks(self, spans: Sequence[range]) -> Any:
        kind = (*spans,)
        if kind not in self._block_masks:
            places = places_of(spans, self._device)
            self._block_masks[kind] = block_mask(
                self._allowed_token(places),
                self._samples,
                len(places),
                self.sequence.layout.tokens,
                self._device,
            )
        return self._block_masks[kind]

    def _allowed_token(self, places: Tensor) -> Allowed:
        documents, padding, function = self.sequence.documents, self._padding, self._function

        def allowed(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            place = places[query]
            if documents is None:
                is_allowed = function(sample, head, place, key)
            else:
                positions, ids = documents.positions, documents.ids
                is_allowed = function(
                    sample, head, positions[sample, place], positions[sample, key]
                )
                is_allowed = is_allowed & (ids[sample, place] == ids[sample, key])
            if padding is not None:
                is_allowed = (is_allowed & padding[sample, key].bool()) | (place == key)
            return is_allowed

        return allowed

    @property
    def _every(self) -> Tensor:
        return torch.arange(self.sequence.layout.tokens, device=self._device)

    def _cached_mask(self, name: Any, allowed: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
        if (name, dtype) not in self._made:
            zero = torch.zeros((), dtype=dtype, device=self._device)
            self._made[name, dtype] = zero.where(allowed(), torch.finfo(dtype).min)
        return self._made[name, dtype]

    def _allowed(self, rows: slice, queries: Tensor, keys: Tensor) -> Tensor:
        documents = self.sequence.documents
        of_query, of_key = queries[None, None, :, None], keys[None, None, None, :]
        same = of_query == of_key
        if documents is not None:
            of_query = documents.positions[rows, None, queries, None]
            of_key = documents.positions[rows, None, None, keys]
        sample = torch.arange(self._samples, device=self._device)[rows, None, None, None]
        allowed = self._function(sample, torch.zeros_like(sample[:1]), of_query, of_key)
        if documents is not None:
            allowed = allowed & documents.allowed(queries, keys)[rows]
        if self._padding is not None:
            # a padding token attends to itself, because a softmax over nothing is NaN
            allowed = (allowed & self._padding[rows, None, None, keys].bool()) | same
        return allowed.expand(len(sample), 1, len(queries), len(keys))


def _mask(
    own: str,
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device,
    **given: Any,
) -> Any:
    if (sequence := active()) is None:
        masks = import_module("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS
        return masks[own](
            batch_size,
            q_length,
            kv_length,
            mask_function=mask_function,
            attention_mask=attention_mask,
            use_vmap=use_vmap,
            device=device,
            **given,
        )
    layout = sequence.layout
    if use_vmap or (q_length, kv_length) != (layout.local, layout.tokens):
        why = (
            "adds a mask function of its own"
            if use_vmap
            else f"attends with {q_length} tokens to {kv_length}"
        )
        raise RecipeError(
            f"the model {why}, and a row has {layout.tokens} tokens, {layout.local} of them on this"
            " rank; only the attention of a row's tokens to the same row can be kept to documents,"
            " or cut; train it on a document in each row, without Recipe.sequence and context"
        )
    where = torch.device(device)
    return SequenceMask(own, sequence, mask_function, attention_mask, batch_size, where)


def _attention(
    own: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **given: Any,
) -> Any:
    compute = _own_attention(own, type(module))
    if not isinstance(attention_mask, SequenceMask):
        if active() is not None:
            raise RecipeError(
                f"{type(module).__name__} attends without a mask of transformers' mask functions;"
                " train it on a document in each row, without Recipe.sequence and context"
            )
        return compute(module, query, key, value, attention_mask, **given)
    sequence = attention_mask.sequence
    layout, dropout = sequence.layout, given.get("dropout") or 0.0
    ranks = layout.world.size
    heads, key_heads = query.shape[1], key.shape[1]
    exchange = chosen_exchange(sequence.exchange, heads=heads, key_heads=key_heads, ranks=ranks)
    if exchange == "heads" and key_heads % ranks:
        raise PlanError(
            f"context={ranks} with exchange=heads and {type(module).__name__} with {key_heads} key"
            " heads; each rank computes equally many; use exchange=keys, or a context that divides"
            " the key heads"
        )
    options: Any = {
        "dropout": dropout,
        "own_rule": not attention_mask.is_causal,
        "own_softmax": own != "sdpa" or any(given.get(name) is not None for name in OWN_SOFTMAX),
    }
    is_plain = not options["own_rule"] and not options["own_softmax"]
    draws_by_chunk = is_plain and (ranks == 1 or isinstance(layout.world, ChunkAxis))
    if dropout and ranks > 1 and not draws_by_chunk:
        raise PlanError(
            f"{layout.cut_by} and {type(module).__name__} with attention dropout {dropout}; its"
            " random numbers would depend on the plan; set attention_dropout=0.0 in the"
            f" configuration, or {layout.otherwise}"
        )
    if (ranks > 1 and exchange == "keys") or (dropout and draws_by_chunk):
        kernel: Kernel = "own"
        if is_plain and sequence.documents is None:
            sequence.chosen.why.setdefault(kernel, "")
        else:
            kernel = sequence.chosen.add(facts(query, value, whole_rows=False, **options))
        sdpa = partial(
            F.scaled_dot_product_attention,
            scale=given.get("scaling"),
            enable_gqa=heads != key_heads,
        )
        chunked = ChunkedAttention(sdpa, sequence, None, dropout, is_causal=True)
        recomputed = chunked.recomputed

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            with handled():
                if kernel in ("varlen", "flex"):
                    spans = layout.own_spans
                    return _by(kernel, attention_mask, spans, query, key, value, given)
                if is_plain:
                    return chunked.of_own_chunks(query, key, value)
                mask = attention_mask.of_rank(query.dtype)
                recomputed.add(mask, partial(attention_mask.without_masks().of_rank, query.dtype))
                output: Tensor = compute(module, query, key, value, mask, **given)[0]
            return output.transpose(1, 2)

        output = attend_by_keys(layout, query, key, value, attend, recomputed)
    else:
        whole_rows = sequence.documents is not None
        kernel = sequence.chosen.add(facts(query, value, whole_rows=whole_rows, **options))
        part = _HeadsOf(module, heads, layout)
        compute_part = partial(compute, part)
        given = {name: part.cut(each) for name, each in given.items()}

        def attend_whole(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            with handled():
                if kernel in ("varlen", "flex"):
                    spans = [range(layout.tokens)]
                    return _by(kernel, attention_mask, spans, query, key, value, given)
                if kernel == "documents":
                    return _by_document(compute_part, attention_mask, query, key, value, given)
                mask = attention_mask.of_all(query.dtype)
                output: Tensor = compute_part(query, key, value, mask, **given)[0]
                return output.transpose(1, 2)

        output = attend_by_heads(layout, query, key, value, attend_whole, RecomputedTensors())
    return output.transpose(1, 2).contiguous(), None


def _by(
    kernel: Kernel,
    mask: SequenceMask,
    spans: Sequence[range],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    given: dict[str, Any],
) -> Tensor:
    dtype = computed_dtype(query)
    query, key, value = (each.to(dtype) for each in (query, key, value))
    options: Any = {
        "scale": given.get("scaling"),
        "enable_gqa": query.shape[1] != key.shape[1],
    }
    if kernel == "varlen":
        lengths = mask.lengths()
        return varlen_attention(query, key, value, lengths, spans, is_causal=True, **options)
    return flex_attention(query, key, value, mask.of_blocks(spans), **options)


def _by_document(
    compute: Callable[..., Any],
    mask: SequenceMask,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    given: dict[str, Any],
) -> Tensor:
    documents = mask.sequence.documents
    assert documents is not None, "a kernel is chosen for documents"

    def alone(row: int, first: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        own = mask.of_document(row, first, query.shape[2], query.dtype)
        output: Tensor = compute(query, key, value, own, **given)[0]
        return output.transpose(1, 2)

    return documents.by_document(alone, query, key, value)


class _HeadsOf:
    """Replaces an attention module in a call that computes only this rank's heads. Parameters with
    one value per head have only the values of this rank's heads."""

    def __init__(self, module: nn.Module, heads: int, layout: TokenLayout) -> None:
        self._module, self._heads, self._world = module, heads, layout.world

    def __getattr__(self, name: str) -> Any:
        return self.cut(getattr(self._module, name))

    def cut(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.shape == (self._heads,):
            return value.chunk(self._world.size)[self._world.rank]
        return value


def _own_attention(own: str, kind: type) -> Callable[..., Any]:
    """Return the attention function that a class of attention modules calls by default."""
    name = "eager_attention_forward" if own == "eager" else "ALL_ATTENTION_FUNCTIONS"
    for each in kind.__mro__:
        attention: Any = getattr(sys.modules.get(each.__module__), name, None)
        if attention is not None:
            return attention if own == "eager" else attention[own]  # type: ignore[no-any-return]  # of transformers
    raise RecipeError(
        f"{kind.__name__} has no {name}, so its attention of the kind {own!r} is not known; make"
        " the model with attn_implementation='sdpa'"
    )
