"""A model built one tensor at a time has the values of the model built whole, and needs the memory
of one tensor at a time."""

from __future__ import annotations

import copy
import importlib.util
import random
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache, reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.keys import key as key_of
from lockstep.model.initialization.deferred_init import CannotDefer, DeferredModel, KeyedInit, build

pytestmark = pytest.mark.usefixtures("nothing_is_frozen")

KEY = 2**63 + 11
EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt.py"


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: t
        for named in (module.named_parameters, module.named_buffers)
        for name, t in named(remove_duplicate=False)
    }


def check(factory: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Every tensor of a deferred model is what it is in the whole one. Returns both models."""
    whole, deferred = build(factory, KEY), DeferredModel.build(factory, KEY)
    there, here = tensors_of(whole), tensors_of(deferred.module)
    assert list(here) == list(there)
    assert [type(m).__qualname__ for m in deferred.module.modules()] == [
        type(m).__qualname__ for m in whole.modules()
    ]
    for name in reversed(there):
        expected, meta, value = there[name], here[name], deferred.materialize(name)
        assert meta.is_meta
        assert (type(meta), meta.requires_grad) == (type(expected), expected.requires_grad), name
        assert (meta.dtype, meta.shape, meta.stride()) == (
            expected.dtype,
            expected.shape,
            expected.stride(),
        ), name
        assert (value.dtype, type(value), value.device.type) == (expected.dtype, Tensor, "cpu")
        assert torch.equal(value, expected), name
        assert torch.equal(deferred.materialize(meta), expected), name
    assert [[k for k, t in here.items() if t is one] for one in here.values()] == [
        [k for k, t in there.items() if t is one] for one in there.values()
    ]
    return whole, deferred.module


def initialised(
    make: Callable[[], nn.Module], initialise: Callable[[Any], object]
) -> Callable[[], nn.Module]:
    def factory() -> nn.Module:
        module = make()
        initialise(module)
        return module

    return factory


def linear() -> nn.Linear:
    return nn.Linear(24, 40)


def with_weight(
    function: Callable[[Tensor], object], make: Callable[[], nn.Module] = linear
) -> Callable[[], nn.Module]:
    def initialise(module: Any) -> None:
        with torch.no_grad():
            function(module.weight)

    return initialised(make, initialise)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, bias=False), nn.BatchNorm2d(channels), nn.ReLU()
        )
        self.last = nn.BatchNorm2d(channels)


def resnet() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), Residual(8), Residual(8), nn.Flatten(), nn.Linear(8, 10)
    )
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if isinstance(module, Residual):
            nn.init.zeros_(module.last.weight)
    return model


class Rotary(nn.Module):
    """Buffers made of arange, one kept out of the state dict; and tensors that are neither
    parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        inverse = 1.0 / (10000.0 ** (torch.arange(0, 8, 2).float() / 8))
        angles = torch.outer(torch.arange(16), inverse)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin())
        self.register_buffer("table", torch.tensor([[1.0, 2.0], [3.0, 4.0]]).mul(3))
        self.scale = nn.Parameter(torch.randn(4) * 0.02)
        self.plain = torch.rand(3)
        self.nested = {"list": [torch.rand(2), "text"]}
        self.function = (lambda bias: lambda x: x + bias)(torch.rand(5))
        self.rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]


def edited() -> nn.Module:
    """Writes through views and `.data`, and values taken from other parameters before those change
    again."""
    model: Any = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Embedding(9, 6, padding_idx=2))
    model[0].weight.data.mul_(0.5)
    model[1].weight.data.copy_(model[0].weight)
    with torch.no_grad():
        model[0].weight[2:4].normal_(0, 3)
        model[0].weight[:, 1] = model[1].bias
        model[1].bias.data = torch.ones(6, dtype=torch.float64).float().cumsum(0)
        nn.init.uniform_(model[2].weight[3:5])
        model[2].weight[2].fill_(7)
        model[0].bias.copy_(model[0].bias.flip(0))
        model[1].weight.t().triu_()
    return model


def tied() -> nn.Module:
    model: Any = nn.ModuleDict(
        {"embedding": nn.Embedding(11, 6, padding_idx=3), "head": nn.Linear(6, 11, bias=False)}
    )
    model["head"].weight = model["embedding"].weight
    return model.half()  # type: ignore[no-any-return]


def from_numpy() -> nn.Module:
    model: Any = nn.Linear(3, 4)
    model.weight.data.copy_(torch.from_numpy(np.random.randn(4, 3)))
    model.bias = nn.Parameter(torch.from_numpy(np.random.rand(4).astype(np.float32)))
    model.bias.data.mul_(torch.rand(4)).add_(random.random())
    model.register_buffer("chosen", torch.tensor(random.sample(range(100), 5)))
    return model  # type: ignore[no-any-return]


def in_double() -> nn.Module:
    torch.set_default_dtype(torch.float64)
    try:
        model = nn.Sequential(linear(), nn.LayerNorm(40))
        model.register_parameter("noise", nn.Parameter(torch.randn(5)))
        return model
    finally:
        torch.set_default_dtype(torch.float32)


def own_generator() -> nn.Module:
    model, generator = linear(), torch.Generator().manual_seed(3)
    nn.init.normal_(model.weight, generator=generator)
    nn.init.normal_(model.bias, generator=generator)
    return model


class Special(nn.Parameter):
    def __init__(self, *_: object) -> None:
        super().__init__()
        self.made = "yes"


def special() -> nn.Module:
    model: Any = nn.Module()
    model.one, model.two = Special(torch.randn(3)), nn.Parameter(torch.ones(2), requires_grad=False)
    assert isinstance(model.one, Special)
    model.two.decay = False
    return model.to(torch.bfloat16)  # type: ignore[no-any-return]


def random_operations() -> nn.Module:
    made = [
        torch.randperm(9),
        torch.randint(5, (6,)),
        torch.bernoulli(torch.full((7,), 0.5)),
        torch.empty(5).exponential_(),
    ]
    made += [
        torch.multinomial(torch.arange(1.0, 6), 3),
        torch.rand_like(made[2]),
        torch.normal(torch.zeros(3), torch.ones(3)),
    ]
    made += [
        torch.randn(4)[torch.randperm(4)],
        torch.empty(3).cauchy_(),
        nn.functional.dropout(torch.ones(20)),
    ]
    model = nn.Module()
    for number, tensor in enumerate(made):
        model.register_buffer(f"made{number}", tensor)
    return model


@cache
def example() -> Any:
    spec = importlib.util.spec_from_file_location("example_gpt", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FACTORIES: dict[str, Callable[[], nn.Module]] = {
    "linear": linear,
    "convolution": lambda: nn.Conv2d(3, 5, 3),
    "batch_norm": lambda: nn.BatchNorm1d(5),
    "layer_norm": lambda: nn.LayerNorm(5),
    "embedding": lambda: nn.Embedding(7, 3, padding_idx=2),
    "lstm": lambda: nn.LSTM(3, 4, 2, bidirectional=True),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "encoder": encoder,
    "resnet": resnet,
    "rotary": Rotary,
    "edited": edited,
    "tied": tied,
    "numpy": from_numpy,
    "double": in_double,
    "own_generator": own_generator,
    "special": special,
    "random_operations": random_operations,
    "example": lambda: example().GPT(layers=2, width=16, heads=2, context=8, dropout=0.1),
    "deepcopy": lambda: nn.ModuleList(
        [copy.deepcopy(module) for module in (linear(), nn.BatchNorm1d(3), tied())]
    ),
    "bfloat16": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to("cpu", torch.bfloat16)
    ),
    "orthogonal": with_weight(nn.init.orthogonal_),
    "truncated": with_weight(lambda weight: nn.init.trunc_normal_(weight, std=0.02)),
    "truncated_close": with_weight(lambda weight: nn.init.trunc_normal_(weight, a=-0.5, b=0.7)),
    "truncated_tail": with_weight(lambda weight: nn.init.trunc_normal_(weight, a=1.5, b=2.0)),
    "kaiming": with_weight(nn.init.kaiming_normal_),
    "xavier": with_weight(nn.init.xavier_uniform_),
    "sparse": with_weight(lambda weight: nn.init.sparse_(weight, 0.3)),
    "eye": with_weight(nn.init.eye_),
    "dirac": with_weight(nn.init.dirac_, lambda: nn.Conv2d(3, 5, 3)),
    "dependent": with_weight(
        lambda weight: weight.mul_(weight[weight > 0.1].sum()) if weight.sum() > -99 else None
    ),
    "spectral_norm": lambda: parametrizations.spectral_norm(linear()),
    "weight_norm": lambda: parametrizations.weight_norm(linear()),
    "orthogonal_parametrization": lambda: parametrizations.orthogonal(linear()),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_each_tensor_alone_is_that_of_the_whole_model(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(FACTORIES[name])


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_hugging_face_models(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=16
        )
        check(lambda: transformers.GPT2LMHeadModel(config))
    else:
        sizes = {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "vocab_size": 50,
        }
        check(lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)))


STEPS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "normal": lambda a, b: a.normal_(),
    "half_uniform": lambda a, b: a[1:].uniform_(),
    "column": lambda a, b: a[:, 2].fill_(3),
    "scale": lambda a, b: a.mul_(0.5),
    "copy": lambda a, b: a.copy_(b),
    "copy_part": lambda a, b: a[:2].copy_(b[1:3].clone()),
    "add_random": lambda a, b: a.add_(torch.randn(3, 4)),
    "permute": lambda a, b: a.copy_(b[torch.randperm(3)]),
    "branch": lambda a, b: a.zero_() if a.sum() > b.sum() else b.neg_(),
    "swap": lambda a, b: setattr(a, "data", b.data.flip(0)),
    "transposed": lambda a, b: a.t().copy_(b.t().cumsum(0)),
    "own_part": lambda a, b: a[0].copy_(a[2]),
    "itself": lambda a, b: a.copy_(a),
}


@settings(max_examples=40)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 2), st.integers(0, 2)), max_size=12
    )
)
def test_any_sequence_of_writes(steps: list[tuple[str, int, int]]) -> None:
    def factory() -> nn.Module:
        parameters = nn.ParameterList([nn.Parameter(torch.randn(3, 4)) for _ in range(3)])
        with torch.no_grad():
            for step, one, other in steps:
                STEPS[step](parameters[one], parameters[other])
        return parameters

    check(factory)


def test_a_draw_does_not_depend_on_the_draws_before_it() -> None:
    with KeyedInit(KEY):
        torch.randn(1000)
        second = torch.randn(5)
    with KeyedInit(KEY):
        torch.rand(3)
        again = torch.randn(5)
    assert torch.equal(second, again)
    torch.default_generator.manual_seed(key_of(KEY, 1))
    assert torch.equal(second, torch.randn(5))


def test_pythons_generators_are_started() -> None:
    values = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        values.append(build(from_numpy, KEY))
    assert all(
        torch.equal(getattr(values[0], name), getattr(values[1], name))
        for name in ("weight", "chosen")
    )


def test_another_key_gives_other_values() -> None:
    assert not torch.equal(build(linear, 1).weight, build(linear, 2).weight)
    assert not torch.equal(
        DeferredModel.build(linear, 1).materialize("weight"),
        DeferredModel.build(linear, 2).materialize("weight"),
    )


def generators() -> tuple[float, float, Tensor]:
    return random.random(), float(np.random.rand()), torch.rand(1)


def test_the_generators_stand_alike_after_either_way_of_building() -> None:
    build(from_numpy, KEY)
    after_whole = generators()
    DeferredModel.build(from_numpy, KEY)
    assert generators() == after_whole


def test_computing_a_tensor_leaves_the_generator_as_it_was() -> None:
    deferred, state = DeferredModel.build(linear, KEY), torch.default_generator.get_state()
    deferred.materialize("bias")
    assert torch.equal(torch.default_generator.get_state(), state)


def test_what_is_neither_parameter_nor_buffer_has_its_values() -> None:
    whole, module = check(Rotary)
    assert torch.equal(module.plain, whole.plain)
    assert type(module.plain) is Tensor
    assert torch.equal(module.nested["list"][0], whole.nested["list"][0])
    assert torch.equal(module.function(torch.zeros(5)), whole.function(torch.zeros(5)))
    assert module.rates == whole.rates
    assert "cosine" not in module.state_dict()


def test_parameters_keep_what_was_set_on_them() -> None:
    whole, module = check(special)
    assert vars(module.one) == vars(whole.one) == {"made": "yes"}
    assert vars(module.two) == vars(whole.two) == {"decay": False}


def test_the_meta_module_can_be_given_storage_and_used() -> None:
    deferred = DeferredModel.build(FACTORIES["lstm"], KEY)
    for name, parameter in list(deferred.module.named_parameters()):
        setattr(deferred.module, name, nn.Parameter(deferred.materialize(parameter)))
    x = torch.ones(2, 1, 3)
    assert torch.equal(deferred.module(x)[0], build(FACTORIES["lstm"], KEY)(x)[0])


class Peak(TorchDispatchMode):
    """The bytes of the storages that live at the same time within it, at most, as seen after each
    operation."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._live: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, out)):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().device.type == "cpu":
                self._live[StorageWeakRef(tensor.untyped_storage())] = (
                    tensor.untyped_storage().nbytes()
                )
        self._live = {
            storage: size for storage, size in self._live.items() if not storage.expired()
        }
        self.bytes = max(self.bytes, sum(self._live.values()))
        return out


LAYER_BYTES = 4 * 64 * 64
LAYERS = 12

INITIALISERS: dict[str, tuple[Callable[[Tensor], object], float]] = {
    "kaiming": (nn.init.kaiming_uniform_, 1),
    "orthogonal": (nn.init.orthogonal_, 4),
    "truncated": (lambda weight: nn.init.trunc_normal_(weight, std=0.5), 4),
    "scaled": (lambda weight: setattr(weight, "data", torch.randn(64, 64) * 0.02), 2),
    "chain": (
        lambda weight: setattr(weight, "data", reduce(torch.mul, range(1, 9), torch.randn(64, 64))),
        2,
    ),
}


def layers(initialise: Callable[[Tensor], object]) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(LAYERS)))
    for parameter in model.parameters():
        initialise(parameter)
    return model


@pytest.mark.parametrize("name", INITIALISERS)
def test_memory_is_that_of_one_tensor(name: str) -> None:
    initialise, most = INITIALISERS[name]
    with Peak() as whole:
        build(lambda: layers(initialise), KEY)
    assert whole.bytes >= LAYERS * LAYER_BYTES
    with Peak() as peak:
        deferred = DeferredModel.build(lambda: layers(initialise), KEY)
        for parameter in deferred.module.parameters():
            assert deferred.materialize(parameter).untyped_storage().nbytes() == LAYER_BYTES
    assert LAYER_BYTES <= peak.bytes <= (most + 0.1) * LAYER_BYTES


def test_a_value_that_is_overwritten_is_not_drawn() -> None:
    deferred = DeferredModel.build(with_weight(nn.init.normal_), KEY)
    with Operations() as operations:
        deferred.materialize("weight")
    assert [name for name in operations.names if "uniform" in name or "normal" in name] == [
        "aten::normal_"
    ]


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_values_from_a_file(tmp_path: Path) -> None:
    torch.save(nn.Linear(3, 4).state_dict(), tmp_path / "state.pt")
    factory = initialised(
        lambda: nn.Linear(3, 4),
        lambda model: model.load_state_dict(torch.load(tmp_path / "state.pt")),
    )
    check(factory)


def changed_after() -> nn.Module:
    array = np.ones(3, dtype=np.float32)
    model = nn.ParameterList([nn.Parameter(torch.zeros(3))])
    model[0].data.copy_(torch.from_numpy(array))
    array[:] = 5
    return model


def test_a_change_by_numpy_after_the_copy_is_not_seen() -> None:
    check(changed_after)


def asks_numpy() -> nn.Module:
    model = linear()
    model.values = model.weight.detach().numpy()  # the line
    return model


def falls_back() -> nn.Module:
    model = linear()
    with suppress(Exception):
        torch.zeros(3, device="meta")
    return model


def shares_memory() -> nn.Module:
    model = linear()
    model.part = nn.Parameter(model.weight.data[:2])
    return model


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "numpy": (asks_numpy, "RuntimeError: .numpy() is not supported"),
    "caught": (falls_back, "aten.zeros.default: it makes a tensor on the device meta"),
    "meta": (
        lambda: nn.Linear(3, 4, device="meta"),
        "aten.empty.memory_format: it makes a tensor on the device meta",
    ),
    "lazy": (lambda: nn.LazyLinear(3), "weight has no shape before the first forward"),
    "fails": (lambda: nn.Linear(3, "four"), "TypeError"),
    "shares": (shares_memory, "part and weight are two tensors that share memory"),
    "graph": (
        initialised(linear, lambda model: setattr(model, "doubled", model.weight * 2)),
        "a tensor outside its parameters and buffers is part of a graph of gradients",
    ),
    "hook": (
        initialised(linear, lambda model: model.weight.register_hook(abs)),
        "weight has hooks on its gradient",
    ),
    "mixed": (
        lambda: torch._foreach_mul_([torch.tensor(3.0), torch.rand(2)], 2),
        "aten._foreach_mul_.Scalar: it writes both to",
    ),
    "conjugate": (
        lambda: torch.rand(2, dtype=torch.cfloat).conj(),
        "aten._conj.default: it makes a tensor that is",
    ),
    "no_module": (lambda: [linear()], "the function returned a list, not a torch.nn.Module"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_deferred_is_said(name: str) -> None:
    factory, text = REFUSED[name]
    make, swap = nn.Parameter.__new__, torch.utils.swap_tensors
    with pytest.raises(CannotDefer) as raised:
        DeferredModel.build(factory, KEY)
    assert text in str(raised.value)
    assert (nn.Parameter.__new__, torch.utils.swap_tensors) == (make, swap)


def test_the_line_is_named() -> None:
    with pytest.raises(CannotDefer) as raised:
        DeferredModel.build(asks_numpy, KEY)
    file, line, _ = str(raised.value).split(":", 2)
    assert Path(file) == Path(__file__)
    assert Path(file).read_text().splitlines()[int(line) - 1].endswith("# the line")


def test_the_default_dtype_is_as_it_was_afterwards() -> None:
    assert DeferredModel.build(in_double, KEY).materialize("noise").dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32
