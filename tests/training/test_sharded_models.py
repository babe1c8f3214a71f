"""Models that sharding cannot train, or not as they are: the error says so, and what it recommends
is what one process trains."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiers import tier
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from training.subjects import FEATURES, OUTPUTS, recipe, sgd, squared_error

import lockstep as ls
from lockstep.base.errors import RecipeError, UserError
from lockstep.testing.pool import WorkerPool


class HalfPrecise(nn.Module):
    """A trained bf16 layer beside fp32 ones."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.norm = (
            nn.Linear(FEATURES, FEATURES, dtype=torch.bfloat16),
            nn.LayerNorm(FEATURES),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.base(x.bfloat16()).float())


class Waves(nn.Module):
    """Complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES // 2 + 1, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=FEATURES)


class RealWaves(Waves):
    """The same as real numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.view_as_real(self.weight.detach()).clone())

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.weight), n=FEATURES)


class Fourier(nn.Module):
    """A layer in the space of frequencies beside one in that of samples."""

    def __init__(self, spectral: nn.Module) -> None:
        super().__init__()
        self.spectral, self.skip = spectral, nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.spectral(x) + self.skip(x))


class Network(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(FEATURES, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.head(x)
        return output


class Gate(nn.Linear):
    """Computes in the precision of its own weights."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Routed(nn.Module):
    """A layer that is left out of autocast, as routers are."""

    def __init__(self, layer: type[nn.Linear]) -> None:
        super().__init__()
        self.gate, self.value = layer(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            weights = torch.sigmoid(self.gate(x.float()))
        return x + weights * self.value(x)


class Experts(nn.Module):
    """Has a router, which is left out of autocast, and is small beside the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = (
            nn.Linear(FEATURES, 2),
            nn.ModuleList(nn.Linear(FEATURES, 120 * FEATURES) for _ in range(2)),
        )

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            weights = torch.softmax(self.gate(x.float()), dim=1)
        values = torch.stack(
            [expert(x).view(len(x), FEATURES, -1).mean(dim=2) for expert in self.experts], dim=2
        )
        return x + (weights[:, None] * values).sum(dim=2)


class Normalised(nn.Module):
    """A layer with a weight that other code uses too."""

    def __init__(self, layer: type[nn.Linear]) -> None:
        super().__init__()
        self.layer = layer(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x) / self.layer.weight.float().norm()
        return output


class Twice(nn.Module):
    """A layer, and a weight of its own, that are used twice in each forward, as in siamese
    networks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weight = nn.Linear(FEATURES, FEATURES), nn.Parameter(torch.eye(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        once = torch.tanh(self.layer(x)) @ self.weight
        return x + self.layer(once) @ self.weight  # type: ignore[no-any-return]


class Gated(nn.Module):
    """Uses its input twice."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.value(x) * torch.sigmoid(self.gate(x))
        return output


class Skipping(Network):
    """Uses the inputs of its blocks beside them."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        output: Tensor = self.head(x)
        return output


class InPlace(nn.Module):
    """Changes its input."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.activation, self.layer = nn.ReLU(inplace=in_place), nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(self.activation(x))
        return output


class AfterALayer(Network):
    def __init__(self, *, in_place: bool) -> None:
        super().__init__(InPlace(in_place=in_place), InPlace(in_place=in_place))
        self.first = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x))


class Returning(Network):
    """Returns a parameter beside its output."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, FEATURES))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.scale


class LayerDrop(Network):
    """Skips a block by chance, unless it sees that FSDP2 gathers it, as Wav2Vec2 of transformers
    does."""

    def forward(self, x: Tensor) -> Tensor:
        is_marked = getattr(self, "_is_fsdp_managed_module", False)
        x = self.blocks[0](x)
        if is_marked or not self.training or torch.rand([]) > 0.5:
            x = self.blocks[1](x)
        output: Tensor = self.head(x)
        return output


def dropping() -> nn.Module:
    return LayerDrop(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES))


def twice() -> nn.Module:
    return Network(Twice(), Twice())


def skipping() -> nn.Module:
    return Skipping(Gated(), Gated())


def fingerprint_of(model: Callable[[], nn.Module], precision: str, plan: str, run_dir: str) -> str:
    given = recipe(model=model, loss=squared_error, optimizer=sgd, precision=precision)
    return ls.train(given, plan=f"{plan},numerics=bitwise", run_dir=run_dir).fingerprint


TWICE: list[tuple[Callable[[], nn.Module], str]] = [
    (twice, "bf16"),
    (skipping, "fp32"),
    (skipping, "bf16"),
    (dropping, "fp32"),
]
"""Models, with their precision: of which a sum of three gradients has an order, and one that looks
for FSDP2."""


def fingerprints(run_dir: str, plans: Sequence[str]) -> list[list[str]]:
    """Of each plan, those of `TWICE`."""
    return [
        [
            fingerprint_of(model, precision, plan, f"{run_dir}/{plan}/{place}")
            for place, (model, precision) in enumerate(TWICE)
        ]
        for plan in plans
    ]


def test_in_bitwise_what_is_used_twice_has_the_bits_of_one_process(
    pool: WorkerPool, tmp_path: Path
) -> None:
    """Weights that are used twice, and inputs of a block, in it and beside it; and a block may
    change its input where it is not sharded."""
    (alone,) = fingerprints(str(tmp_path / "alone"), ["replicate=1"])
    plans = ["shard=2", "replicate=2,checkpointing=full"]
    assert pool.run(2, fingerprints, str(tmp_path), plans) == [[alone] * 2] * 2
    changed, instead = (
        fingerprint_of(
            partial(AfterALayer, in_place=in_place),
            "fp32",
            "replicate=1",
            str(tmp_path / str(in_place)),
        )
        for in_place in (True, False)
    )
    assert changed == instead


def experts() -> nn.Module:
    return Network(Experts(), Experts())


def routed(layer: type[nn.Linear]) -> nn.Module:
    return Network(Routed(layer), Routed(layer))


def normalised(layer: type[nn.Linear]) -> nn.Module:
    return Network(Normalised(layer), Normalised(layer))


def half_precise() -> nn.Module:
    return Network(HalfPrecise(), HalfPrecise())


def waves() -> nn.Module:
    return Network(Fourier(Waves()), Fourier(Waves()))


def real_waves() -> nn.Module:
    return Network(Fourier(RealWaves()), Fourier(RealWaves()))


def adapted(model: Any, batch: Sequence[Tensor]) -> Tensor:
    """The loss after a step on the loss (MAML)."""
    _, x, y = batch
    named = dict(model.named_parameters())
    first = F.mse_loss(functional_call(model, named, (x,)), y)
    gradients = torch.autograd.grad(first, list(named.values()), create_graph=True)
    fast = {
        name: value - 0.1 * gradient
        for (name, value), gradient in zip(named.items(), gradients, strict=True)
    }
    return F.mse_loss(functional_call(model, fast, (x,)), y)


def shifted(model: Any, batch: Sequence[Tensor]) -> Tensor:
    """The loss at weights that are not the model's."""
    weights = {name: value + 0.01 for name, value in model.named_parameters()}
    return F.mse_loss(functional_call(model, weights, (batch[1],)), batch[2])


def outside(model: Any, batch: Sequence[Tensor]) -> Tensor:
    """The loss of a layer's weight that is used outside of its forward."""
    return F.mse_loss(
        model[2](torch.tanh(F.linear(batch[1], model[0].weight, model[0].bias))), batch[2]
    )


def jacobian(model: Any, batch: Sequence[Tensor]) -> Tensor:
    """A loss of the derivative by the input, by forward-mode differentiation."""
    _, derivative = torch.func.jvp(model, (batch[1],), (torch.ones_like(batch[1]),))
    return derivative.square().mean()


def of_its_output(model: Any, batch: Sequence[Tensor]) -> Tensor:
    """Calls the model alone, and takes from its output."""
    output = model(batch[1])
    return F.mse_loss(output, batch[2] + output.detach().mean())


def part_first(model: Any, batch: Sequence[Tensor]) -> Tensor:
    """Calls a part of the model before the model itself, as `agent.value(x)` does."""
    with torch.no_grad():
        baseline = model.blocks[0](batch[1]).mean()
    return F.mse_loss(model(batch[1]), batch[2] + baseline)


def penalised(model: Any, batch: Sequence[Tensor]) -> Tensor:
    x = batch[1].clone().requires_grad_()
    output = model(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return F.mse_loss(output, batch[2]) + 0.1 * gradient.pow(2).mean()


def checkpointed(reentrant: bool, model: Any, batch: Sequence[Tensor]) -> Tensor:
    recomputed = checkpoint(model, batch[1].clone().requires_grad_(), use_reentrant=reentrant)
    return F.mse_loss(recomputed, batch[2]) + F.mse_loss(model(batch[1] + 1.0), batch[2])


def with_a_penalty(model: Any, batch: Sequence[Tensor]) -> Tensor:
    output, scale = model(batch[1])
    return F.mse_loss(output * scale.mean(), batch[2]) + 0.1 * scale.square().mean()


def backward_in_the_loss(model: Any, batch: Sequence[Tensor]) -> Tensor:
    model(batch[1]).pow(2).mean().backward()
    return F.mse_loss(model(batch[1]), batch[2])


def added_to_the_loss(model: Any, batch: Sequence[Tensor]) -> Tensor:
    output = model(batch[1])
    return F.mse_loss(output, batch[2]) + output.pow(2).mean()


def attempt(run_dir: str, plan: str, changes: dict[str, Any]) -> tuple[float, str]:
    try:
        result = ls.train(
            recipe(**{"loss": squared_error, "optimizer": sgd, **changes}),
            plan=plan,
            run_dir=run_dir,
        )
    except UserError as error:
        return 0.0, f"{type(error).__name__}: {error}"
    return result.loss, ""


def attempts(
    run_dir: str, plan: str, cases: dict[str, dict[str, Any]]
) -> dict[str, tuple[float, str]]:
    return {
        name: attempt(f"{run_dir}/{place}", plan, changes)
        for place, (name, changes) in enumerate(cases.items())
    }


DTYPES = (
    r"RecipeError: the parameter '.*' is torch\.\w+ and '.*' is torch\.\w+; .* name modules of one"
    r" dtype in Recipe\.blocks that every forward calls, "
)
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "two dtypes": ({"model": half_precise}, DTYPES),
    "complex beside real": ({"model": waves}, DTYPES),
    "MAML": (
        {"loss": adapted},
        r"PlanError: .*not have been used in the graph; parameters are sharded \(DTensors\)"
        r" outside of their module's forward.* use replicate$",
    ),
    "other weights": (
        {"loss": shifted},
        r"PlanError: the shard axis, and this forward replaces '0\.weight' by another tensor, .* use"
        r" replicate",
    ),
    "weights elsewhere": (
        {"loss": outside},
        r"PlanError: .*mixed torch\.Tensor and DTensor; parameters are sharded .* use replicate$",
    ),
    "forward-mode derivatives": (
        {"loss": jacobian},
        r"PlanError: .*Cannot access data pointer.*; parameters are sharded .* use replicate$",
    ),
    "a part before the model": (
        {"model": partial(AfterALayer, in_place=False), "loss": part_first},
        r"PlanError: .*shard=2.*: a part of the model was called before the model itself .*; call"
        r" the model, model\(x\), and take from its output what you need; or use replicate$",
    ),
    "an input that is changed": (
        {"model": partial(AfterALayer, in_place=True)},
        r"PlanError: .*shard=2.*: a block changes its input in place, as with nn\.ReLU.*; leave"
        r" inplace out, or use replicate$",
    ),
    "a gradient penalty": (
        {"loss": penalised},
        r"PlanError: the shard axis with a gradient that is itself differentiated .* use replicate",
    ),
    "a layer outside of autocast": (
        {"model": partial(routed, nn.Linear), "precision": "bf16"},
        r"PlanError: .*shard=2.*: (expected|self).* the same dtype, but got.* been called"
        r" without it; .* with a forward of its own",
    ),
    "a weight outside of products": (
        {"model": partial(normalised, nn.Linear), "precision": "bf16"},
        r"PlanError: under shard the weight 'blocks\.\d\.layer\.weight' is gathered .* and"
        r" ToCopy uses it too, .* with a forward of its",
    ),
}
MENDED: dict[str, dict[str, Any]] = {
    "blocks of one dtype": {"model": half_precise, "blocks": ["*.base"]},
    "complex blocks": {"model": waves, "blocks": ["*.spectral"]},
    "complex as real": {"model": real_waves},
    "the model before its part": {
        "model": partial(AfterALayer, in_place=False),
        "loss": of_its_output,
    },
    "an input that is not changed": {"model": partial(AfterALayer, in_place=False)},
    "a parameter that the forward returns": {"model": Returning, "loss": with_a_penalty},
    "a router outside of autocast": {"model": experts, "precision": "bf16"},
    "a layer of its own outside of autocast": {"model": partial(routed, Gate), "precision": "bf16"},
    "a weight of its own outside of products": {
        "model": partial(normalised, Gate),
        "precision": "bf16",
    },
}


def caught_in_each_step(run_dir: str) -> list[str]:
    """Return what a loop of the script's own, which goes on after an error, is told in each of its
    two steps."""
    data, said = torch.utils.data.TensorDataset(torch.randn(8, FEATURES)), []
    with ls.Session(run_dir=run_dir, plan="shard=2", precision="bf16") as session:
        model, optimizer = session.prepare(partial(normalised, nn.Linear), sgd)
        for step in session.steps(data, global_batch=4, microbatch=2, steps=2):
            for (x,) in step.microbatches():
                try:
                    with session.autocast():
                        loss = model(x).float().pow(2).mean()
                    step.backward(loss)
                except UserError as error:
                    said.append(str(error))
            step.commit(optimizer)
    return said


def features(batch: Sequence[Tensor]) -> Tensor:
    return batch[1]


def of_output(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
    return F.mse_loss(output, batch[2])


@tier(4)
def test_a_stage_whose_weight_is_used_outside_of_products_is_refused(tmp_path: Path) -> None:
    """The backwards are the schedule's. An error between a forward and its backward leaves the
    graph behind."""
    with WorkerPool(max_workers=4, check_leaks=False) as workers:
        for layer in (nn.Linear, Gate):
            changes: dict[str, Any] = {
                "model": partial(normalised, layer),
                "precision": "bf16",
                "stages": ["blocks.*", "head"],
            }
            changes |= {"inputs": features, "loss": of_output}
            for loss, said in workers.run(
                4, attempt, str(tmp_path / layer.__name__), "shard=2,pipeline=2", changes
            ):
                assert ("is gathered in the precision of autocast" in said) is (
                    layer is nn.Linear
                ), said
                assert (loss > 0) is (layer is Gate)


BACKWARDS = {
    "a backward in the loss": {"loss": backward_in_the_loss},
    "reentrant checkpoints": {"loss": partial(checkpointed, True)},
}
INSTEAD = {
    "one loss": {"loss": added_to_the_loss},
    "checkpoints": {"loss": partial(checkpointed, False)},
}
SAID = {
    "a backward in the loss": (
        r"^LossError: after step 0: the forward or the loss has called backward, .*; add to the"
        r" loss what it was"
    ),
    "reentrant checkpoints": (
        r"^RecipeError: a parameter's gradient was ready twice in one backward, .* pass"
        r" use_reentrant=False to torch"
    ),
}


ALONE = {name: changes for name, (changes, _) in MISTAKES.items()}
BACKWARD_PLANS = ("replicate=2", "replicate=2,transport=torch", "shard=2")


def all_attempts(run_dir: str) -> dict[str, Any]:
    """What each of two ranks is told or trains."""
    both = BACKWARDS | INSTEAD
    return {
        "mistakes": attempts(f"{run_dir}/mistakes", "shard=2", ALONE),
        "replicas": attempts(f"{run_dir}/replicas", "replicate=2", ALONE),
        "mended": attempts(f"{run_dir}/mended", "shard=2", MENDED),
        "loop": caught_in_each_step(f"{run_dir}/loop"),
        **{plan: attempts(f"{run_dir}/{plan}", plan, both) for plan in BACKWARD_PLANS},
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[float, str]]:
    cases = ALONE | MENDED | BACKWARDS | INSTEAD
    return attempts(str(tmp_path_factory.mktemp("alone")), "replicate=1", cases)


@pytest.fixture(scope="module")
def two(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return pool.run(2, all_attempts, str(tmp_path_factory.mktemp("two")), timeout_seconds=50)


def test_what_sharding_cannot_train_is_refused_in_its_words(two: list[dict[str, Any]]) -> None:
    for found in two:
        for name, (_, pattern) in MISTAKES.items():
            assert re.search(pattern, found["mistakes"][name][1]), (name, found["mistakes"][name])


def test_a_loop_that_goes_on_is_refused_in_each_step(two: list[dict[str, Any]]) -> None:
    for found in two:
        assert ["is gathered in the precision of autocast" in each for each in found["loop"]] == [
            True,
            True,
        ]


def test_what_the_errors_recommend_is_what_one_process_trains(
    alone: dict[str, tuple[float, str]], two: list[dict[str, Any]]
) -> None:
    for found in two:
        for name, (loss, said) in (found["replicas"] | found["mended"]).items():
            assert not said, name
            assert loss == pytest.approx(alone[name][0], rel=1e-3 if "dtype" in name else 1e-4), (
                name
            )


def test_other_backwards_are_right_or_refused_alike(
    alone: dict[str, tuple[float, str]], two: list[dict[str, Any]]
) -> None:
    for rank in two:
        for plan in BACKWARD_PLANS:
            for name, (loss, said) in rank[plan].items():
                if said:
                    assert re.search(SAID[name], said), (plan, name, said)
                else:
                    assert loss == pytest.approx(alone[name][0], rel=1e-4), (plan, name)
            refused = {name for name, (_, said) in rank[plan].items() if said}
            assert refused == (
                BACKWARDS.keys() if plan != "replicate=2" else {"a backward in the loss"}
            )


class Fails(Network):
    """Its forward fails after the third step, between two layers, with the parameters that it has
    gathered."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, FEATURES))
        self.is_late = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        if self.is_late:
            raise RuntimeError("in the forward")
        output: Tensor = self.head(x)
        return output


class FailAfter(ls.Hook):
    def after_step(self, run: ls.Run) -> None:
        run.model.is_late = run.step == 3


def fail_in_a_forward(run_dir: str) -> list[str]:
    given = recipe(
        model=Fails, inputs=features, loss=of_output, optimizer=sgd, steps=6, blocks=["blocks.*"]
    )
    with pytest.raises(RuntimeError, match="in the forward"):
        ls.train(given, plan="shard=2", run_dir=run_dir, hooks=[FailAfter()])
    return [path.name.rpartition("-")[0] for path in (Path(run_dir) / "checkpoints").glob("step-*")]


def test_a_forward_that_fails_leaves_a_checkpoint_of_the_last_step(tmp_path: Path) -> None:
    with WorkerPool(max_workers=2, check_leaks=False) as workers:
        found = workers.run(2, fail_in_a_forward, str(tmp_path / "run"))
    assert ["step-00000003"] in found


class Branching(nn.Module):
    """Calls layers in another way for some microbatches, or on the first rank. Layers have one
    size, so that exchanges of different ones would fit."""

    def __init__(self, how: str = "branch", *, requires: bool = False) -> None:
        super().__init__()
        layers = (nn.Linear(FEATURES, FEATURES) for _ in range(4))
        self.first, self.branch, self.middle, self.last = layers
        self.how, self.requires = how, requires

    def forward(self, x: Tensor) -> Tensor:
        if self.requires:
            x = x.detach().requires_grad_()
        hidden = torch.tanh(self.first(x))
        is_first = dist.get_rank() == 0
        if self.how == "unused":
            branch = self.branch(hidden)
            return self._end(hidden + branch if is_first else hidden)
        if self.how == "order":
            two = (self.branch, self.middle) if is_first else (self.middle, self.branch)
            return self.last(two[0](two[1](hidden)))[:, :OUTPUTS]  # type: ignore[no-any-return]
        if self.how == "twice":
            return self._end(self.branch(self.branch(hidden) if is_first else hidden))
        if is_first if self.how == "always" else x.sum() > 0:
            hidden = hidden + self.branch(x)
        return self._end(hidden)

    def _end(self, hidden: Tensor) -> Tensor:
        return self.last(hidden + self.middle(hidden))[:, :OUTPUTS]  # type: ignore[no-any-return]


REDUCES = {"reduces block 'branch'", "reduces the parameters outside of blocks"}
NAMED = {
    "branch": REDUCES,
    "always": REDUCES,
    "unused": REDUCES,
    "order": {"gathers block 'branch'", "ends a forward"},
    "twice": {"gathers block 'branch'", "ends a forward"},
}
"""Calls of blocks that differ between ranks -> what the ranks do."""
OVER_GLOO = ("branch", "always", "unused")
"""Those in which all ranks make equally many exchanges. Gloo waits for ever for others."""


def branch_otherwise(run_dir: str, plan: str, hows: Sequence[str]) -> list[str]:
    errors = []
    for how in hows:
        blocks = ["first", "branch", "middle"]
        subject = recipe(model=partial(Branching, how), blocks=blocks, microbatch=2, steps=1)
        with pytest.raises(RecipeError) as error:
            ls.train(subject, plan=plan, run_dir=f"{run_dir}/{how}")
        errors.append(str(error.value))
    return errors


@pytest.mark.parametrize(
    ("plan", "hows"),
    [
        ("shard=2", NAMED),
        ("shard=2,numerics=bitwise", NAMED),
        ("shard=2,transport=torch", OVER_GLOO),
        ("shard=2,numerics=bitwise,transport=torch", OVER_GLOO),
    ],
)
def test_ranks_that_call_blocks_in_different_ways_are_refused(
    pool: WorkerPool, tmp_path: Path, plan: str, hows: Sequence[str]
) -> None:
    """FSDP2 would add gradients of different blocks, in the first step on."""
    found, other = pool.run(2, branch_otherwise, str(tmp_path), plan, list(hows))
    assert found == other
    for how, text in zip(hows, found, strict=True):
        said = re.findall(
            "rank . (.+?)(?: in the (?:for|back)ward of microbatch .)?(?: and|;)", text
        )
        assert set(said) == NAMED[how]
        assert "all ranks must call the same blocks in the same order" in text


def branch(run_dir: str, plan: str) -> list[str | None]:
    """The fingerprints with the remedies."""
    return [
        ls.train(
            recipe(
                model=partial(Branching, how, requires=requires),
                blocks=blocks,
                microbatch=2,
                steps=3,
            ),
            plan=plan,
            run_dir=f"{run_dir}/{number}",
        ).fingerprint
        for number, (how, requires, blocks) in enumerate(
            [
                ("branch", False, ["first", "middle"]),
                ("branch", True, ["first", "branch", "middle"]),
            ]
        )
    ]


def test_the_remedies_for_a_branch_that_gets_the_data_train_the_model_of_one_process(
    pool: WorkerPool, tmp_path: Path
) -> None:
    (expected,) = pool.run(1, branch, f"{tmp_path}/1", "replicate=1,numerics=bitwise")
    found, other = pool.run(2, branch, f"{tmp_path}/2", "shard=2,numerics=bitwise")
    assert found == other == expected
