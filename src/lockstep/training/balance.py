"""Counts the tokens that each expert of a model gets, and computes loss terms that balance the
counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.base.errors import LossError, PlanError, RecipeError
from lockstep.base.nested import tensors_in
from lockstep.comm.mesh import Mesh
from lockstep.model.expert.balance import (
    MORE,
    averaged_over_layers,
    balance_loss,
    bias_step,
    chosen_per_token,
    loads_of_samples,
    probabilities,
    summed_probabilities,
    widened,
    z_loss,
)
from lockstep.model.expert.routers import (
    Choices,
    RoutedLayer,
    RoutingRecorder,
    find_routers,
)
from lockstep.model.pipeline.stages import Stages
from lockstep.plan import Plan
from lockstep.recipe.balance import Balance
from lockstep.recipe.checks import in_words
from lockstep.recipe.recipe import Loss, Sum
from lockstep.training.loss import SINGLE, Weights

BALANCE_TERMS = BALANCE, ROUTER_Z = "balance", "router_z"


@dataclass(slots=True)
class Routed:
    """The experts that this rank's routers chose for the tokens of one microbatch."""

    microbatch: int
    choices: list[Choices]
    samples: int
    counted: Tensor | None
    """Mask of shape (tokens,): True for tokens that count in the balance loss. None if every token
    counts."""
    loads: Tensor | None = None


class ExpertBalance:
    """Balances the experts of one model. In each step, every rank calls `begin`, then `count` and
    `terms` for each microbatch, then `reduce` and `commit`."""

    def __init__(
        self,
        balance: Balance,
        recorder: RoutingRecorder,
        biases: Sequence[Tensor | None],
        mesh: Mesh,
        inputs: Callable[[Any], Any] | None,
        *,
        counts_first: bool,
    ) -> None:
        self.balance = balance
        self.counts_first = counts_first
        self.recorder = recorder
        self.layers: Sequence[RoutedLayer] = recorder.layers
        self._biases = biases
        self._mesh = mesh
        self._inputs = inputs
        self._widths = [layer.experts.count + MORE for layer in self.layers]
        self.loads = self._zeros()
        """Number of tokens of each expert in the latest global batch, layer by layer."""
        self._own_loads = self._zeros()
        # of the latest step that updated the model
        self._previous_loads = self._zeros()
        self._idle_steps = self._zeros()
        self._global_loads: Tensor | None = None
        self._microbatch_loads: dict[int, Tensor] = {}
        self._has_seen_logits = False
        self.is_watched = False
        self._of_f: dict[int, dict[str, Tensor]] = {}

    def check_recomputation(self, every: int) -> None:
        over = self.balance.over
        if every and self.counts_first and over != "step":
            raise RecipeError(
                f"--recompute-every {every} with Balance(over={over!r}) in a pipeline, where a loss"
                " is of layers in several stages (per_layer=False, or shared experts); stages"
                " exchange the loads of their own replica's microbatches alone; use over='step' or"
                " over='previous', or a plan without pipeline, or leave --recompute-every out"
            )

    def counts_of_f(self, microbatch: int) -> dict[str, list[int]]:
        """Return each layer's token counts in the balance loss of the microbatch. Waits for the
        device."""
        loads = self._of_f.get(microbatch, {})
        return {name: load[:-MORE].tolist() for name, load in loads.items()}

    def of_layers(self, loads: Tensor) -> list[Tensor]:
        return list(torch.split(loads, self._widths, dim=-1))

    def joined_weight(self, weight: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
        return partial(self._weight, weight) if self.balance.has_terms else weight

    def _weight(self, weight: Callable[[Any], Any] | None, batch: Any) -> dict[str, Any]:
        own = {} if weight is None else weight(batch)
        named = dict(own) if isinstance(own, Mapping) else {SINGLE: own}
        return _joined(named, self._denominators(batch))

    def _denominators(self, batch: Any) -> dict[str, float]:
        samples, tokens, counted = self._shape(batch)
        number = float(samples * tokens if counted is None else counted.sum())
        denominators = {}
        if self.balance.coefficient:
            denominators[BALANCE] = float(samples) if self.balance.over == "sample" else number
        if self.balance.z:
            denominators[ROUTER_Z] = number
        return denominators

    def _shape(self, batch: Any) -> tuple[int, int, Tensor | None]:
        """Return the number of samples, the number of tokens per sample, and a mask of shape
        (samples, tokens). The mask is None if all tokens count."""
        arguments = None if self._inputs is None else self._inputs(batch)
        counted = None
        if self.balance.tokens is not None:
            counted = self.balance.tokens(batch)
            if not isinstance(counted, Tensor) or counted.dim() != 2:
                kind = (
                    f"a tensor of shape {tuple(counted.shape)}"
                    if isinstance(counted, Tensor)
                    else f"a {type(counted).__name__}"
                )
                raise RecipeError(
                    f"Balance.tokens returned {kind}; return a tensor of shape (samples, tokens),"
                    " True for each token that counts"
                )
        elif isinstance(arguments, Mapping):
            if arguments.get("output_router_logits"):
                raise _own_balance("a model that Recipe.inputs calls with")
            mask = arguments.get("attention_mask")
            counted = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        if counted is not None:
            return len(counted), counted.shape[1], counted.bool()
        first = next((each for each in tensors_in(arguments) if each.dim()), None)
        if first is None:
            raise RecipeError(
                "Recipe.balance: Recipe.inputs returned no tensor, so the tokens of a batch are not"
                " known; give ls.Balance(tokens=lambda batch: mask), of shape (samples, tokens)"
            )
        has_tokens = first.dim() > (2 if first.is_floating_point() else 1)
        return len(first), first.shape[1] if has_tokens else 1, None

    @property
    def term_names(self) -> list[str]:
        sizes = zip(BALANCE_TERMS, (self.balance.coefficient, self.balance.z), strict=True)
        return [name for name, size in sizes if size]

    def begin(self) -> None:
        self._own_loads, self._global_loads = self._zeros(), None
        self._microbatch_loads, self._of_f = {}, {}

    def routed(self, microbatch: int, batch: Any) -> Routed:
        choices = self.recorder.take()
        samples, counted = self._counted(batch, choices)
        return Routed(microbatch, choices, samples, counted)

    def count(self, routed: Routed) -> None:
        if self._global_loads is not None:
            return
        loads = self._loads_of(routed)
        self._own_loads += loads.sum(0)
        if self.counts_first and self.balance.over != "step":
            # loads that earlier stages of this rank have counted for the microbatch
            before = self._microbatch_loads.get(routed.microbatch, 0)
            self._microbatch_loads[routed.microbatch] = loads + before

    def know_loads(self) -> None:
        """Every rank must call this method before the first backward."""
        self._global_loads = self._summed()
        if self._microbatch_loads:
            summed = torch.cat(list(self._microbatch_loads.values()))
            self._mesh.stages.all_reduce(summed)
            self._mesh.tokens.all_reduce(summed)
            sizes = [len(each) for each in self._microbatch_loads.values()]
            parts = torch.split(summed, sizes)
            self._microbatch_loads = dict(zip(self._microbatch_loads, parts, strict=True))

    def terms(self, loss: Any, routed: Routed) -> Any:
        """Every rank that computes a part of the microbatch must call this method."""
        self.check_own(loss)
        if not self.balance.has_terms:
            return loss
        own = dict(loss) if isinstance(loss, Mapping) else {SINGLE: loss}
        return {**own, **self.terms_of(routed)}

    def check_own(self, loss: Any) -> None:
        if self.balance.has_terms and isinstance(loss, Loss):
            raise LossError(
                "Recipe.balance with an ls.Loss, whose denominator is known only after the forward;"
                " the terms of the balance have others; return ls.Sum(total) and give"
                " Recipe.weight = batch -> its denominator"
            )
        if isinstance(loss, Mapping):
            _joined(loss, dict.fromkeys(self.term_names))

    def _counted(self, batch: Any, choices: Sequence[Choices]) -> tuple[int, Tensor | None]:
        samples, tokens, counted = self._shape(batch)
        places = next((each.places for each in choices if each.places is not None), None)
        if places is not None:
            tokens = places.shape[-1]
            if counted is not None:
                every = places.expand(samples, -1).to(counted.device)
                counted = counted.gather(1, every)
        for layer, each in zip(self.layers, choices, strict=True):
            self._check_tokens(layer, each, samples, tokens)
        device = self._mesh.world.device
        return samples, None if counted is None else counted.reshape(-1).to(device)

    def _check_tokens(
        self, layer: RoutedLayer, choices: Choices, samples: int, tokens: int
    ) -> None:
        routed = [len(each) for each in choices.index]
        scored = [len(each) for each in choices.logits]
        if routed != scored:
            raise RecipeError(
                f"the router {layer.router!r} scored {scored} tokens in the calls of a forward, and"
                f" the experts {layer.name!r} computed {routed}; the balance is between the two"
                " of one layer; name the layers' routers in their order in Balance.routers"
            )
        for number in routed:
            if number != samples * tokens:
                raise RecipeError(
                    f"the experts {layer.name!r} were called with {number} tokens in a microbatch"
                    f" of {samples} x {tokens}, as Recipe.inputs shows; the balance loss is a mean"
                    " over the tokens of the global batch, which must be known before the"
                    " forward; give ls.Balance(tokens=lambda batch: mask), of shape (samples,"
                    " tokens), for the tokens that the experts get"
                )

    def _loads_of(self, routed: Routed) -> Tensor:
        if routed.loads is not None:
            return routed.loads
        device, columns = self._mesh.world.device, []
        for layer, each in zip(self.layers, routed.choices, strict=True):
            shape = routed.samples, layer.experts.count + MORE
            load = torch.zeros(shape, dtype=torch.int64, device=device)
            for index, logits in zip(each.index, each.logits, strict=True):
                # a router may mask some experts by -inf
                finite = torch.isfinite(widened(logits.detach()).logsumexp(-1))
                load += loads_of_samples(
                    index, finite, routed.counted, layer.experts.count, samples=routed.samples
                )
            columns.append(load)
        routed.loads = torch.cat(columns, dim=1)
        return routed.loads

    def terms_of(self, routed: Routed) -> dict[str, Sum]:
        """Every rank that computes a part of the microbatch must call this method."""
        self._check_logits(routed.choices)
        terms = {}
        if self.balance.coefficient:
            terms[BALANCE] = Sum(self._balance_term(routed))
        if self.balance.z:
            logits = [each for layer in routed.choices for each in layer.logits]
            of_each = [z_loss(each, routed.counted) for each in logits]
            terms[ROUTER_Z] = Sum(self.balance.z * _sum(of_each))
        return terms

    def _balance_term(self, routed: Routed) -> Tensor:
        by_sample = self.balance.over == "sample"
        loads = self.of_layers(self._loads_of_f(routed))
        if self.is_watched:
            kept = self._of_f.setdefault(routed.microbatch, {})
            for named, load, each in zip(self.layers, loads, routed.choices, strict=True):
                if each.logits:
                    kept[named.name] = load.sum(0) if by_sample else load
        if not self.balance.per_layer:
            loads = [averaged_over_layers(loads)] * len(loads)
        parts = []
        for load, layer in zip(loads, routed.choices, strict=True):
            for logits in layer.logits:
                given = probabilities(logits, self.balance.scores)
                summed = summed_probabilities(given, routed.counted, samples=routed.samples)
                if by_sample:  # each sample's P is a mean over its own tokens
                    summed = summed / load[:, -MORE, None].clamp(min=1).to(summed.dtype)
                else:
                    summed = summed.sum(0)
                parts.append(balance_loss(chosen_per_token(load), summed))
        # a sample's load summed over layers has the token count of all layers, so P is already
        # their mean
        is_mean = self.balance.per_layer or by_sample
        share = 1.0 if is_mean else 1.0 / len(self.layers)
        return self.balance.coefficient * share * _sum(parts)

    def _loads_of_f(self, routed: Routed) -> Tensor:
        if self.balance.over == "previous":
            return self._previous_loads
        if self.balance.over == "step":
            assert self._global_loads is not None, "counted before the first backward"
            return self._global_loads
        is_known = self.counts_first and routed.microbatch in self._microbatch_loads
        loads = self._microbatch_loads[routed.microbatch] if is_known else self._loads_of(routed)
        summed = loads.clone() if self.balance.over == "sample" else loads.sum(0)
        if not is_known:
            self._mesh.tokens.all_reduce(summed)
        return summed

    def _check_logits(self, choices: Sequence[Choices]) -> None:
        if self._has_seen_logits:
            return
        self._has_seen_logits = True
        for layer, each in zip(self.layers, choices, strict=True):
            for logits in each.logits:
                if not logits.requires_grad:
                    raise RecipeError(
                        f"the logits of the router {layer.router!r} have no gradient, so no term"
                        " can change what it chooses; leave no_grad() and reentrant checkpointing"
                        " out, do not freeze it, or leave Balance.coefficient and Balance.z out"
                    )
                values = widened(logits.detach())
                if bool((values >= 0).all()) and bool(((values.sum(-1) - 1).abs() < 1e-2).all()):
                    raise RecipeError(
                        f"the router {layer.router!r} returned probabilities: each row adds up to"
                        " 1; the balance takes the logits; return them, or name the module that"
                        " computes them in Balance.routers"
                    )

    def reduce(self) -> None:
        """Every rank must call this method."""
        self.loads = self._summed() if self._global_loads is None else self._global_loads

    def _summed(self) -> Tensor:
        summed = self._own_loads.clone()
        for ranks in (self._mesh.data, self._mesh.tokens, self._mesh.stages):
            ranks.all_reduce(summed)
        return summed

    def check(self, step: int) -> None:
        """Waits for the device."""
        for layer, load in zip(self.layers, self.of_layers(self.loads.cpu()), strict=True):
            _, out_of_range, not_finite = load[-MORE:].tolist()
            if not_finite:
                raise LossError(
                    f"after step {step}: the router {layer.router!r} returned logits that are not"
                    f" finite for {not_finite} tokens; its choices mean nothing; the model was not"
                    " changed by this step: check the learning rate, and divisions and roots"
                    " before this layer"
                )
            if out_of_range:
                raise LossError(
                    f"after step {step}: {out_of_range} choices of the experts {layer.name!r} are"
                    f" not in 0 to {layer.experts.count - 1}; the model was not changed by this"
                    " step; correct the index that the router returns"
                )

    def commit(self, *, applied: bool | Tensor) -> None:
        gate = torch.as_tensor(applied, device=self.loads.device)
        self._idle_steps = torch.where(self.loads > 0, 0, self._idle_steps + 1)
        self._previous_loads = torch.where(gate, self.loads, self._previous_loads)
        for bias, load in zip(self._biases, self.of_layers(self.loads), strict=True):
            if bias is not None:
                change = self.balance.bias_rate * bias_step(load).to(bias.dtype) * gate
                with torch.no_grad():
                    bias += change.to(bias.device)

    def state_dict(self) -> dict[str, Any]:
        return {"previous": self._previous_loads, "idle": self._idle_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        device = self._mesh.world.device
        self._previous_loads = state["previous"].to(device)
        self._idle_steps = state["idle"].to(device)

    def idle_steps(self) -> list[list[int]]:
        """Waits for the device."""
        return [each[:-MORE].tolist() for each in self.of_layers(self._idle_steps.cpu())]

    def close(self) -> None:
        self.recorder.close()

    def _zeros(self) -> Tensor:
        return torch.zeros(sum(self._widths), dtype=torch.int64, device=self._mesh.world.device)


def check_balance(
    balance: Balance,
    plan: Plan,
    inputs: Callable[[Any], Any] | None,
    *,
    others: Sequence[ExpertBalance],
) -> None:
    if not isinstance(balance, Balance):
        raise RecipeError(
            f"balance is {in_words(balance)}; give ls.Balance(coefficient=0.01), or None"
        )
    if others:
        raise RecipeError(
            "balance in a second session.prepare; the terms of both would have one name; leave it"
            " out in one of the two"
        )
    if inputs is None and balance.tokens is None:
        raise RecipeError(
            "session.prepare(balance=...) without tokens; the tokens of a batch must be known"
            " before the forward; give ls.Balance(tokens=lambda batch: mask), of shape (samples,"
            " tokens)"
        )
    if plan.data_parallel != 1:
        said = f"data_parallel={plan.data_parallel}"
        raise PlanError(
            f"{said} with Recipe.balance; its threads call copies of the routers; leave {said} or"
            " balance out"
        )


def routed_layers(
    model: nn.Module, balance: Balance, experts: Sequence[str] | None
) -> list[RoutedLayer]:
    """Return the layers of experts with their routers. Call this function before the model is
    parallelized."""
    _refuse_own_balance(model)
    layers = find_routers(model, experts, balance.routers, with_bias=balance.bias_rate > 0)
    counts = {layer.experts.count for layer in layers}
    if not balance.per_layer and len(counts) > 1:
        raise RecipeError(
            f"Balance.per_layer=False, and layers have {sorted(counts)} experts; means over layers"
            " need the same number in each; leave per_layer out"
        )
    return layers


def balance_experts(
    model: nn.Module,
    balance: Balance,
    layers: Sequence[RoutedLayer],
    mesh: Mesh,
    inputs: Callable[[Any], Any] | None,
    stages: Stages | None,
) -> ExpertBalance:
    buffers = dict(model.named_buffers(remove_duplicate=False))
    biases = [None if layer.bias is None else buffers.get(layer.bias) for layer in layers]
    needs_all_stages = stages is not None and (
        not balance.per_layer or _is_on_several_stages(model, layers, stages)
    )
    is_of_loads = balance.over == "step" or (needs_all_stages and balance.over != "previous")
    return ExpertBalance(
        balance,
        RoutingRecorder(model, layers),
        biases,
        mesh,
        inputs,
        counts_first=balance.coefficient > 0 and is_of_loads,
    )


def _is_on_several_stages(model: nn.Module, layers: Sequence[RoutedLayer], stages: Stages) -> bool:
    held = [
        {
            id(each)
            for place in places
            for each in model.get_submodule(stages.parts[place]).modules()
        }
        for places in stages.ranges
    ]
    return any(sum(id(layer.experts.module) in of for of in held) > 1 for layer in layers)


def own_weights(weights: Weights | None) -> Weights | None:
    if weights is None:
        return None
    own = {name: each for name, each in weights.items() if name not in BALANCE_TERMS}
    return own or None


def balance_weights(weights: Weights | None) -> Weights:
    assert weights is not None, "a balance has some"
    return {name: weights[name] for name in BALANCE_TERMS if name in weights}


def _joined(own: Mapping[str, Any], terms: Mapping[str, Any]) -> dict[str, Any]:
    for name in own.keys() & terms.keys():
        raise LossError(
            f"the loss has a term {name!r}, and Recipe.balance adds one of that name; rename the"
            " recipe's, or leave it out if it is the balance"
        )
    return {**own, **terms}


def _sum(parts: Sequence[Tensor]) -> Tensor:
    if not parts:
        raise LossError(
            "Recipe.balance: a forward called no router, so the balance of its tokens has no"
            " gradient; call one layer of experts at least in each forward"
        )
    first = parts[0]
    return torch.stack([part.to(first.device) for part in parts]).sum()


def _own_balance(what: str) -> RecipeError:
    return RecipeError(
        f"Recipe.balance with {what} output_router_logits=True; it adds a balance loss of its own,"
        " over one microbatch and all layers together, so the balance would be counted twice; give"
        " output_router_logits=False, or leave balance out"
    )


def _refuse_own_balance(model: nn.Module) -> None:
    config = getattr(model, "config", None)
    if getattr(config, "output_router_logits", False) and getattr(
        config, "router_aux_loss_coef", 0
    ):
        raise _own_balance(f"a {type(model).__name__} whose config has")
