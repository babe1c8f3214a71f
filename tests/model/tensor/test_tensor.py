"""The `tensor` axis computes what one process computes: outputs, gradients, norms, updates, dropout
masks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import cache
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model.tensor.models import (
    GATHERED,
    LAYERS,
    SEQUENCE,
    TIED,
    WIDTH,
    WORDS,
    Attention,
    FullCount,
    Fused,
    HalfDepth,
    Model,
    mesh_of,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lockstep.assignment import MicrobatchAssignment
from lockstep.base.errors import RecipeError
from lockstep.comm.mesh import Mesh, full_tensor
from lockstep.model.initialization.deferred_init import build
from lockstep.model.initialization.initial_model import InitialModel
from lockstep.model.shard import shard
from lockstep.model.tensor.apply import reduce_partial_gradients, tensor_parallel
from lockstep.model.tensor.styles import tensor_styles
from lockstep.testing.pool import WorkerPool
from lockstep.training.optim.gradient_norm import clip
from lockstep.training.optim.optimizers import separate_meshes
from lockstep.training.reducers.agreement import StepAgreement
from lockstep.training.reducers.fsdp import FsdpReducer
from lockstep.training.reducers.post_backward import PostBackwardReducer

MICROBATCHES = 3
SUBJECTS: dict[str, tuple[dict[str, Any], Mapping[str, str]]] = {
    "a tied output layer": ({}, TIED),
    "a tie in a function": ({"functional_tie": True}, {**LAYERS, "words": "embedding"}),
    "sharded along the sequence": ({}, SEQUENCE),
    "logits sharded for the loss": ({}, {**SEQUENCE, "head": "loss"}),
    "a fused layer, gathered": ({"attention": Fused}, GATHERED),
    "dropout": ({"dropout": 0.2}, TIED),
    "dropout, sharded along the sequence": ({"dropout": 0.2}, SEQUENCE),
}
MIXED = ["a tied output layer", "sharded along the sequence", "dropout"]
"""What is also tried with a data axis."""
Found = dict[str, Any]


def built(subject: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(7)
    return Model(**SUBJECTS[subject][0]).to(dtype)


def keep(_: nn.Module) -> None:
    """The values are there already."""


def text(microbatch: int) -> Tensor:
    """Microbatches of 2, 1 and 2 sequences; of 7 words, which no axis divides."""
    return torch.randint(
        WORDS, (2 - microbatch % 2, 7), generator=torch.Generator().manual_seed(microbatch)
    )


def total(model: nn.Module, microbatch: int) -> Tensor:
    """A sum over tokens, under this microbatch's own generator."""
    words = text(microbatch)
    torch.default_generator.manual_seed(100 + microbatch)
    return F.cross_entropy(model(words).flatten(0, 1), words.roll(1).flatten(), reduction="sum")


def norm_of(gradients: list[Tensor], mesh: Mesh) -> float:
    """The global norm, each number of each gradient counted once: by the ranks with rank 0 on every
    axis along which it is not cut."""
    squares = torch.zeros((), dtype=torch.float64)
    for gradient in gradients:
        cut = {}
        if isinstance(gradient, DTensor):
            names = gradient.device_mesh.mesh_dim_names or ()
            cut = {
                name: not placement.is_replicate()
                for name, placement in zip(names, gradient.placements, strict=True)
            }
        if all(cut.get(axis, False) or mesh.axis(axis).rank == 0 for axis in ("shard", "tensor")):
            held = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            squares += held.double().square().sum()
    for axis in ("shard", "tensor"):
        if mesh.axis(axis).size > 1:
            dist.all_reduce(squares, group=mesh.axis(axis).group)
    return math.sqrt(squares)


def one_step(subject: str, dtype: torch.dtype, sizes: dict[str, int]) -> Found:
    """A step on a mesh. Returns the whole gradients, their norm, the whole parameters after the
    update, and what this rank held."""
    mesh = mesh_of(**sizes)
    model = built(subject, dtype)
    assert mesh.torch_mesh is not None
    styles = tensor_styles(model, SUBJECTS[subject][1], sizes["tensor"])
    tensor_parallel(model, mesh.torch_mesh["tensor"], styles, materialize=keep)
    if sizes.get("shard", 1) > 1:
        shard(
            model,
            mesh,
            [f"blocks.{place}" for place in range(2)],
            free_after_forward=True,
            offload=False,
            materialize=keep,
            short=None,
            keep_casts=True,
        )
    parameters = list(model.parameters())
    agreement = StepAgreement(mesh.summed())
    reducer: Any = (
        FsdpReducer(
            model,
            parameters,
            mesh,
            bitwise=False,
            max_microbatches=MICROBATCHES,
            agreement=agreement,
        )
        if sizes.get("shard", 1) > 1
        else PostBackwardReducer(
            parameters,
            mesh,
            max_microbatches=MICROBATCHES,
            complete=reduce_partial_gradients,
            agreement=agreement,
        )
    )
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, foreach=True)
    separate_meshes(optimizer)
    assigned = MicrobatchAssignment(mesh.data.size, round_robin=sizes.get("shard", 1) > 1)
    reducer.begin_step(MICROBATCHES, assigned)
    share = list(assigned.indices(MICROBATCHES, mesh.data.rank))
    rounds = -(-MICROBATCHES // assigned.ranks) if sizes.get("shard", 1) > 1 else len(share)
    values = []
    for turn in range(rounds):
        is_dummy = turn >= len(share)
        loss = total(model, 0 if is_dummy else share[turn])
        reducer.backward(
            loss, torch.ones((), dtype=dtype), own_parameters_only=False, is_dummy=is_dummy
        )
        values += [] if is_dummy else [loss.detach()]
    stats = reducer.reduce(values, None, flag=False)
    gradients = [parameter.grad for parameter in parameters]
    norm = norm_of(gradients, mesh)
    found: Found = {
        "loss": torch.as_tensor(stats.values, dtype=torch.float64).sum().item(),
        "norm": norm,
    }
    found["gradients"] = {
        name: full_tensor(parameter.grad).clone() for name, parameter in model.named_parameters()
    }
    clip(gradients, norm, norm / 2)
    optimizer.step()
    found["parameters"] = {
        name: full_tensor(parameter.detach()).clone()
        for name, parameter in model.named_parameters()
    }
    found["held"] = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)
    reducer.close()
    mesh.close()
    return found


@cache
def by_hand(subject: str, dtype: torch.dtype) -> Found:
    model = built(subject, dtype)
    loss = sum(total(model, microbatch) for microbatch in range(MICROBATCHES))
    assert isinstance(loss, Tensor)
    loss.backward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.cat([gradient.reshape(-1) for gradient in gradients.values()]).norm().item()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)
    optimizer.step()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return {"loss": loss.item(), "norm": norm, "gradients": gradients, "parameters": parameters}


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1).double() for tensor in tensors.values()])


def check(found: Found, subject: str, dtype: torch.dtype) -> None:
    exact, own = by_hand(subject, torch.float64), by_hand(subject, dtype)
    assert list(found["gradients"]) == list(exact["gradients"])
    truth = flat(exact["gradients"])
    error, own_error = (
        (flat(one["gradients"]) - truth).norm() / truth.norm() for one in (found, own)
    )
    least = torch.finfo(dtype).eps
    assert error <= max(8 * own_error, 8 * least), f"{error:.2e} and {own_error:.2e}"
    assert found["loss"] == pytest.approx(exact["loss"], rel=64 * least)
    assert found["norm"] == pytest.approx(exact["norm"], rel=64 * least)
    # AdamW's first update is a sign, which rounding of a gradient near zero turns
    if dtype is torch.float64:
        torch.testing.assert_close(
            flat(found["parameters"]), flat(exact["parameters"]), rtol=1e-6, atol=1e-6
        )


TENSOR, REPLICATE, SHARD = {"tensor": 2}, {"replicate": 2, "tensor": 2}, {"shard": 2, "tensor": 2}
CASES = {
    2: [(subject, torch.float64, TENSOR) for subject in SUBJECTS],
    4: [
        *((subject, torch.float64, sizes) for subject in MIXED for sizes in (REPLICATE, SHARD)),
        *((MIXED[0], torch.float32, sizes) for sizes in ({"tensor": 4}, REPLICATE, SHARD)),
    ],
}
"""By the number of ranks, for which one run of the pool does all."""


def all_steps(ranks: int) -> list[Found]:
    return [one_step(*case) for case in CASES[ranks]]


@pytest.fixture(scope="module")
def steps(pool: WorkerPool) -> Callable[..., list[Found]]:
    run = cache(lambda ranks: pool.run(ranks, all_steps, ranks))

    def of(subject: str, dtype: torch.dtype, sizes: dict[str, int]) -> list[Found]:
        ranks = math.prod(sizes.values())
        place = CASES[ranks].index((subject, dtype, sizes))
        return [found[place] for found in run(ranks)]

    return of


@pytest.mark.parametrize("subject", SUBJECTS)
def test_two_ranks_take_the_step_of_one(steps: Callable[..., list[Found]], subject: str) -> None:
    ranks = steps(subject, torch.float64, TENSOR)
    whole_size = sum(parameter.numel() for parameter in built(subject, torch.float32).parameters())
    for found in ranks:
        check(found, subject, torch.float64)
        assert found["held"] < 0.65 * whole_size
    assert all(
        torch.equal(ranks[0][kind][name], ranks[1][kind][name])
        for kind in ("gradients", "parameters")
        for name in ranks[0][kind]
    )


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [REPLICATE, SHARD], ids=str)
@pytest.mark.parametrize("subject", MIXED)
def test_with_a_data_axis(
    steps: Callable[..., list[Found]], subject: str, sizes: dict[str, int]
) -> None:
    for found in steps(subject, torch.float64, sizes):
        check(found, subject, torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tensor": 4}, REPLICATE, SHARD], ids=str)
def test_in_float32_the_error_is_float32s_own(
    steps: Callable[..., list[Found]], sizes: dict[str, int]
) -> None:
    for found in steps(MIXED[0], torch.float32, sizes):
        check(found, MIXED[0], torch.float32)


def filled() -> list[Any]:
    """A model whose values are computed one layer after another."""
    mesh = mesh_of(tensor=2)
    assert mesh.torch_mesh is not None
    made, values = InitialModel.build(Model, 7, mesh), build(Model, 7)
    device = torch.device("cpu")
    tensor_parallel(
        made.module,
        mesh.torch_mesh["tensor"],
        tensor_styles(made.module, TIED, 2),
        materialize=lambda layer: made.materialize(layer, device),
    )
    made.materialize(made.module, device)
    parameters = dict(made.module.named_parameters())
    same = all(
        torch.equal(full_tensor(parameters[name]), parameter)
        for name, parameter in values.named_parameters()
    )
    words, held = made.module.words.weight, parameters["blocks.1.perceptron.3.weight"]
    storages = [parameter.to_local().untyped_storage().nbytes() // 4 for parameter in (words, held)]
    return [made.reason, same, made.module.head.weight is words, storages]


def test_a_model_without_values_is_filled_and_cut_layer_by_layer(pool: WorkerPool) -> None:
    assert pool.run(2, filled) == [[None, True, True, [WORDS * WIDTH // 2, 32 * WIDTH // 2]]] * 2


def first_forward(model: nn.Module, styles: dict[str, str], ranks: int) -> None:
    mesh = mesh_of(tensor=ranks)
    assert mesh.torch_mesh is not None
    tensor_parallel(model, mesh.torch_mesh["tensor"], styles, materialize=keep)
    model(text(0))


@pytest.mark.parametrize(
    ("attention", "changed", "message"),
    [
        (
            FullCount,
            {},
            (
                r"forward of blocks.0.attention failed .* sharded over the tensor axis:"
                r" .*view\(batch, length, -1, head_dim\)"
            ),
        ),
        (
            HalfDepth,
            {},
            (
                r"blocks.0.attention computes something else with its layers query.* sharded .*with"
                r" -1 for the heads"
            ),
        ),
        (
            Attention,
            {"*.projection": "rowwise_split"},
            r"projection has the style 'rowwise_split', which takes an unsharded input",
        ),
        (Attention, {"*.projection": "replicated"}, r"forward of blocks.0.attention failed"),
        (
            Attention,
            {"head": "colwise", "words": "embedding"},
            r"an output of Model, of shape \(2, 7, 12\) on each rank, is sharded",
        ),
        (
            Fused,
            {"*.projection": "rowwise"},
            r"has the style 'rowwise' and 16 inputs.*got 16; give it 'rowwise_split'",
        ),
    ],
    ids=[
        "the full number of heads",
        "heads of half the depth",
        "a sharded input taken for whole",
        "no rowwise layer",
        "a sharded output",
        "a whole input taken for sharded",
    ],
)
def test_code_that_does_not_fit_is_told_what_to_write(
    pool: WorkerPool, attention: type[nn.Module], changed: dict[str, str], message: str
) -> None:
    model = Model(attention)
    given = {**(GATHERED if attention is Fused else LAYERS), **changed}
    with pytest.raises(RecipeError, match=message):
        pool.run(2, first_forward, model, tensor_styles(model, given, 2), 2)


def llama(dtype: torch.dtype, **changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, **changes)).to(dtype)


def llama_gradients(ranks: int, **changes: Any) -> list[tuple[str, Tensor]]:
    model = llama(torch.float64, **changes)
    if ranks > 1:
        mesh = mesh_of(tensor=ranks)
        assert mesh.torch_mesh is not None
        tensor_parallel(
            model, mesh.torch_mesh["tensor"], tensor_styles(model, None, ranks), materialize=keep
        )
        assert isinstance(model.model.layers[1].self_attn.q_proj.weight, DTensor)
    torch.manual_seed(3)
    words = torch.randint(32, (2, 7), generator=torch.Generator().manual_seed(2))
    model.train()(input_ids=words, labels=words).loss.backward()
    return [(name, full_tensor(parameter.grad)) for name, parameter in model.named_parameters()]


HUGGING_FACE: list[dict[str, Any]] = [{}, {"tie_word_embeddings": True, "attention_dropout": 0.1}]


def both_llamas(ranks: int) -> list[list[tuple[str, Tensor]]]:
    return [llama_gradients(ranks, **changes) for changes in HUGGING_FACE]


def test_a_hugging_face_model_brings_its_own_map(
    pool: WorkerPool, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("transformers")
    request.getfixturevalue("transformers_in_pool")
    exact = both_llamas(1)
    for found in pool.run(2, both_llamas, 2):
        for (name, gradient), (other, truth) in zip(chain(*found), chain(*exact), strict=True):
            assert name == other
            torch.testing.assert_close(gradient, truth, rtol=1e-9, atol=1e-12)


class Noisy(nn.Module):
    """Computes something random between its layers."""

    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.compute = nn.Linear(4, 8), nn.Linear(8, 4), compute
        self.scale = nn.Parameter(torch.full((1,), 1.1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.down(self.compute(hidden) if self.training else hidden)


def channels(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


RANDOM: list[Callable[[Tensor], Tensor]] = [
    lambda x: F.alpha_dropout(channels(x), 0.4, True).transpose(1, 2),
    lambda x: F.feature_alpha_dropout(channels(x), 0.4, True).transpose(1, 2),
    lambda x: F.dropout1d(channels(x), 0.4).transpose(1, 2),
    lambda x: F.rrelu(x, 0.1, 0.4, True),
    lambda x: x * torch.rand_like(channels(x)).transpose(1, 2) + torch.randn_like(x),
    lambda x: x * torch.ones_like(x).bernoulli_(0.5) * torch.bernoulli(x.sigmoid().detach()),
    lambda x: x * torch.poisson(x.detach().abs()),
    lambda x: F.gumbel_softmax(x.unflatten(-1, (-1, 2)), dim=-1).flatten(-2),
    lambda x: F.gumbel_softmax(x, dim=-1),
    lambda x: F.alpha_dropout(x * 1, 0.4, True, True),
]
"""Functions that draw the random numbers of the full tensor. Also a softmax over all features."""
ANSWERS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x * sum(bool((x > at / 8).any()) for at in range(16)),
    lambda x: x * sum(bool(torch.all(x > -at / 8)) for at in range(16)),
]
"""Functions that decide by all features."""


def noisy_gradients(ranks: int) -> list[list[Tensor]]:
    """For each function: the output, the gradients, and a random number that is drawn after."""
    mesh = mesh_of(tensor=ranks).torch_mesh
    found = []
    for compute in RANDOM + ANSWERS:
        torch.manual_seed(5)
        model, x = Noisy(compute).double(), torch.randn(3, 2, 4).double()
        if ranks > 1:
            assert mesh is not None
            styles = tensor_styles(model, {"up": "colwise", "down": "rowwise"}, ranks)
            tensor_parallel(model, mesh["tensor"], styles, materialize=keep)
        out = model(x)
        out.square().sum().backward()
        gradients = [full_tensor(each.grad) for each in model.parameters() if each.grad is not None]
        found.append([out.detach(), *gradients, torch.rand(1)])
    return found


def test_random_numbers_and_answers_are_those_of_one_process(pool: WorkerPool) -> None:
    (one,) = pool.run(1, noisy_gradients, 1)
    for rank in pool.run(2, noisy_gradients, 2):
        for found, truth in zip(rank, one, strict=True):
            torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, scale = ctx.saved_tensors
        return gradients[0] * scale, (gradients[0] * x).sum().view(1)


class Between(Noisy):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.compute(self, self.up(x)))  # type: ignore[call-arg]


UNSEEN: list[tuple[Any, str]] = [
    (
        lambda model, x: x - x.mean(-1, keepdim=True) if model.training else x,
        "Between computes something else",
    ),
    (
        lambda model, x: x if model.training else x - x.mean(-1, keepdim=True),
        "Between computes something else",
    ),
    (
        lambda model, x: Scaled.apply(x, model.scale),
        r"a parameter of shape \(1,\), in the input of",
    ),
    (
        lambda model, x: torch.func.vmap(lambda each: each * model.scale)(x),
        r"a parameter of shape \(1,\), in the input of down, whose gradient",
    ),
    (
        lambda model, x: checkpoint(lambda each: each * model.scale, x, use_reentrant=True),
        "use_reentrant=True, before down",
    ),
]
"""Code between sharded layers that would train another model, and the words of its refusal."""


def in_both_modes(model: nn.Module) -> None:
    model(torch.randn(3, 2, 4))
    model.eval()(torch.randn(3, 2, 4))


def errors_of_unseen() -> list[str]:
    mesh = mesh_of(tensor=2).torch_mesh
    assert mesh is not None
    said = []
    for compute, _ in UNSEEN:
        model = Between(compute)
        styles = tensor_styles(model, {"up": "colwise", "down": "rowwise"}, 2)
        tensor_parallel(model, mesh["tensor"], styles, materialize=keep)
        with pytest.raises(RecipeError) as raised:
            in_both_modes(model)
        said.append(str(raised.value))
    return said


def test_code_of_one_mode_and_unseen_functions_are_refused(pool: WorkerPool) -> None:
    for rank in pool.run(2, errors_of_unseen):
        for said, (_, words) in zip(rank, UNSEEN, strict=True):
            assert re.search(words, said)


def copied() -> bool:
    mesh = mesh_of(tensor=2)
    assert mesh.torch_mesh is not None
    model = Model()
    tensor_parallel(
        model, mesh.torch_mesh["tensor"], tensor_styles(model, TIED, 2), materialize=keep
    )
    before = model(text(0))
    average = deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return torch.equal(average(text(0)), before) and not torch.equal(model(text(0)), before)


def test_a_copy_computes_with_its_own_parameters(pool: WorkerPool) -> None:
    assert pool.run(2, copied) == [True, True]
