"""Optimizers: that they share out the model, that their state is there before the first step, and
their learning rates."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import run_files
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook
from training.subjects import (
    FEATURES,
    OUTPUTS,
    each_of,
    network,
    recipe,
    rows,
    same,
    samples_at,
    sgd,
    squared_error,
    state_of,
)

import lockstep as ls
from lockstep.base.errors import LockstepError, RecipeError
from lockstep.testing.pool import WorkerPool
from lockstep.training.optim.optimizers import (
    STATE_IS_ZERO_AT_FIRST,
    allocate_state,
    build_optimizers,
    check_reducible,
    trainable,
    unfuse,
)
from lockstep.training.optim.schedule import Schedule
from lockstep.training.train_module import step_optimizer

VARIANTS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": partial(torch.optim.Adam, weight_decay=0.1),
    "Adam, foreach": partial(torch.optim.Adam, foreach=True, amsgrad=True),
    "Adam, fused": partial(torch.optim.Adam, fused=True, weight_decay=0.1),
    "AdamW": partial(torch.optim.AdamW, weight_decay=0.1),
    "AdamW, one by one": partial(torch.optim.AdamW, foreach=False, maximize=True),
    "AdamW, fused": partial(torch.optim.AdamW, fused=True, amsgrad=True, weight_decay=0.1),
    "AdamW, a tensor as rate": lambda parameters: torch.optim.AdamW(
        parameters, lr=torch.tensor(1e-2), fused=True
    ),
    "Adamax": partial(torch.optim.Adamax, weight_decay=0.1),
    "RMSprop": partial(torch.optim.RMSprop, weight_decay=0.1),
    "RMSprop, centered, with momentum": partial(torch.optim.RMSprop, centered=True, momentum=0.9),
    "Adadelta": partial(torch.optim.Adadelta, weight_decay=0.1),
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD, momentum": partial(
        torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1
    ),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adagrad": torch.optim.Adagrad,
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
}


def train_three_steps(
    variant: Callable[[Any], torch.optim.Optimizer], allocate: bool
) -> tuple[dict[str, Tensor], Any]:
    torch.manual_seed(2)
    model = network()
    optimizer = variant(model.parameters())
    before = state_of(model)
    if allocate:
        allocate_state(optimizer)
        assert same(state_of(model), before)
        assert all(p.grad is None for p in model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        batch = [tensor[4 * step : 4 * step + 4] for tensor in rows(12).tensors]
        squared_error(model, batch).backward()
        optimizer.step()
    return state_of(model), copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize("name", VARIANTS)
def test_state_made_beforehand_is_the_state_that_the_first_step_makes(name: str) -> None:
    assert same(
        train_three_steps(VARIANTS[name], allocate=True),
        train_three_steps(VARIANTS[name], allocate=False),
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_state_is_there_before_the_first_step_where_it_starts_at_zero(name: str) -> None:
    model = network()
    optimizer = VARIANTS[name](model.parameters())
    allocate_state(optimizer)
    if type(optimizer) in STATE_IS_ZERO_AT_FIRST:
        numbers = {
            id(value)
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        }
        assert all(optimizer.state[parameter] for parameter in model.parameters())
        squared_error(model, rows(4).tensors).backward()
        optimizer.step()
        assert {
            id(value)
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        } == numbers


def test_every_optimizer_whose_state_starts_at_zero_is_tried_here() -> None:
    tried = {type(variant(network().parameters())) for variant in VARIANTS.values()}
    assert set(STATE_IS_ZERO_AT_FIRST) <= tried


def frozen_in_part() -> nn.Module:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    model["c"].requires_grad_(False)
    return model


class Lookahead(torch.optim.Optimizer):
    """A wrapper of another optimizer that leaves its own base class out."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizer = torch.optim.SGD(model.parameters())
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state


STRANGER = nn.Parameter(torch.zeros(1))
Factory = Callable[[Any], Any]
REFUSED: dict[str, tuple[Factory, str]] = {
    "nothing": (
        lambda model: None,
        "the optimizer factory returned None (a NoneType); it must return a"
        " torch.optim.Optimizer, or a list of them",
    ),
    "a class": (
        lambda model: torch.optim.SGD,
        "the optimizer factory returned <class 'torch.optim.sgd.SGD'> (a type); it must return",
    ),
    "a class that is called with the model": (
        partial(torch.optim.SGD, lr=0.1),
        "Recipe.optimizer is the class SGD; it is called with the model, and the class takes"
        " parameters (optimizer can only optimize Tensors, but one of the params is ",
    ),
    "a list with something else": (
        lambda model: [torch.optim.SGD(model.parameters()), "more"],
        "the optimizer factory returned 'more' (a str); it must return a torch.optim.Optimizer,"
        " or a list of them",
    ),
    "one that is not initialized": (
        Lookahead,
        "Lookahead.__init__ does not call torch.optim.Optimizer.__init__, without which",
    ),
    "an empty list": (
        lambda model: [],
        "the optimizer factory returned an empty list; it must return at least one",
    ),
    "parameters left out": (
        lambda model: torch.optim.SGD([model["a"].weight]),
        "the optimizer leaves out a.bias, b.weight, b.bias; every trainable parameter must be"
        " in exactly one optimizer: add them, or freeze them with requires_grad_(False)",
    ),
    "parameters twice": (
        lambda model: [
            torch.optim.SGD(model.parameters()),
            torch.optim.SGD(model["a"].parameters()),
        ],
        "a.weight, a.bias are in two optimizers, and both would update them; give every"
        " parameter to exactly one",
    ),
    "parameters of another model": (
        lambda model: torch.optim.SGD([*model.parameters(), STRANGER]),
        "the optimizer holds 1 parameters that do not belong to the model; build it from the model that"
        " the function gets",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_do_not_share_out_the_model_are_refused(name: str) -> None:
    factory, message = REFUSED[name]
    with pytest.raises(RecipeError) as caught:
        build_optimizers(factory, frozen_in_part())
    assert str(caught.value).startswith(message)


class InitializedLookahead(torch.optim.Optimizer):
    """`Lookahead` by its error's remedy: every second step, the weights go half of the way."""

    def __init__(self, other: torch.optim.Optimizer) -> None:
        super().__init__(other.param_groups, {})
        self.other = other
        self.param_groups = other.param_groups

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.other.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                slow = state.setdefault("slow", parameter.clone())
                state["count"] = state.get("count", 0) + 1
                if state["count"] % 2 == 0:
                    parameter.copy_(slow.lerp_(parameter, 0.5))


def by_lookahead(folder: str) -> str | None:
    return ls.train(
        recipe(optimizer=lambda model: InitializedLookahead(sgd(model)), steps=5),
        run_dir=f"{folder}/run-{torch.distributed.get_world_size()}",
        plan="replicate=auto,numerics=bitwise",
    ).fingerprint


def test_a_wrapper_of_an_optimizer_trains_by_its_remedy(pool: WorkerPool, tmp_path: Path) -> None:
    one, *two = (
        fingerprint
        for size in (1, 2)
        for fingerprint in pool.run(size, by_lookahead, str(tmp_path))
    )
    assert one is not None
    assert set(two) <= {one, None}


def test_the_remedy_for_an_optimizer_class_makes_the_optimizer() -> None:
    with pytest.raises(RecipeError) as caught:
        build_optimizers(partial(torch.optim.SGD, lr=0.5, momentum=0.9), nn.Linear(2, 2))
    remedy = str(caught.value).partition("write optimizer=")[2]
    factory = eval(remedy, {"SGD": torch.optim.SGD})
    [optimizer] = build_optimizers(factory, nn.Linear(2, 2))
    assert optimizer.defaults["lr"] == 0.5
    assert optimizer.defaults["momentum"] == 0.9


def test_many_parameters_that_are_left_out_are_named_in_part() -> None:
    model = nn.ModuleList([nn.Linear(1, 1) for _ in range(5)])
    with pytest.raises(
        RecipeError, match=r"leaves out 0\.bias, 1\.weight, 1\.bias, 2\.weight, 2\.bias and 4 more;"
    ):
        build_optimizers(lambda model: torch.optim.SGD([model[0].weight]), model)


def test_a_frozen_parameter_may_be_held_or_left_out() -> None:
    model = frozen_in_part()
    assert len(build_optimizers(lambda model: torch.optim.AdamW(model.parameters()), model)) == 1
    assert (
        len(
            build_optimizers(
                lambda model: torch.optim.AdamW(
                    [*model["a"].parameters(), *model["b"].parameters()]
                ),
                model,
            )
        )
        == 1
    )
    assert list(trainable(model)) == ["a.weight", "a.bias", "b.weight", "b.bias"]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            nn.Linear(1, 1).requires_grad_(False),
            "the model (Linear) has no trainable parameter; training needs at least one: check",
        ),
        (nn.Tanh(), "the model (Tanh) has no trainable parameter; training needs at least one"),
        (
            nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 1)),
            "the model has lazy parameters without a shape (0.weight, 0.bias); the optimizer"
            " needs them before the first batch; run",
        ),
        ("model", "the model factory returned 'model' (a str); it must return a torch.nn.Module"),
        (
            nn.Linear,
            "the model factory returned <class 'torch.nn.modules.linear.Linear'> (a type); it"
            " must return a torch.nn.Module",
        ),
    ],
)
def test_a_model_with_nothing_to_train_is_refused(model: Any, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        trainable(model)
    assert str(caught.value).startswith(message)


def test_gradients_that_cannot_be_summed_are_refused_by_name() -> None:
    sparse = nn.Sequential(nn.Linear(1, 1), nn.Embedding(2, 2, sparse=True))
    with pytest.raises(
        RecipeError,
        match=(
            r"^the model's '1' has sparse=True; gradients are summed over ranks and clipped as"
            r" dense tensors; "
        ),
    ):
        check_reducible(sparse, trainable(sparse), bitwise=False)
    waves = nn.ParameterDict(
        {"wave": torch.zeros(2, dtype=torch.complex64), "rest": torch.zeros(2)}
    )
    check_reducible(waves, trainable(waves), bitwise=False)
    with pytest.raises(
        RecipeError,
        match=(
            r"^numerics=bitwise with complex parameters \(wave\); it sums real numbers; keep them"
            r" as real"
        ),
    ):
        check_reducible(waves, trainable(waves), bitwise=True)


def two_sets(model: nn.Sequential) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.AdamW(
            [{"params": [model[0].weight]}, {"params": [model[0].bias], "lr": 3e-2}], lr=1e-2
        ),
        torch.optim.SGD(model[2].parameters(), lr=0.3, momentum=0.9),
    ]


def a_schedule(step: int) -> float:
    return 1.0 / (1 + step)


def a_scheduler(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, a_schedule)


class Rates(ls.Hook):
    def __init__(self) -> None:
        self.states: list[dict[str, Tensor]] = []
        self.norms: list[float] = []

    def on_start(self, run: Any) -> None:
        self.states.append(state_of(run.model))

    def after_step(self, run: Any) -> None:
        self.states.append(state_of(run.model))
        self.norms.append(
            math.sqrt(sum(float(p.grad.double().square().sum()) for p in run.model.parameters()))
        )


STEPS, CLIP_NORM = 4, 0.2


def train_two_sets(run_dir: str) -> list[tuple[list[dict[str, Tensor]], list[float]]]:
    found = []
    for name, schedule in {"pure": a_schedule, "scheduler": a_scheduler}.items():
        rates = Rates()
        given = recipe(optimizer=two_sets, schedule=schedule, clip_norm=CLIP_NORM, steps=STEPS)
        ls.train(given, run_dir=f"{run_dir}/{name}", hooks=[rates], log_every=1)
        found.append((rates.states, rates.norms))
    return found


def two_sets_by_hand(first: dict[str, Tensor]) -> tuple[list[dict[str, Tensor]], list[float]]:
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, OUTPUTS))
    model.load_state_dict(first)
    optimizers = two_sets(model)
    schedulers = [a_scheduler(optimizer) for optimizer in optimizers]
    states, norms = [state_of(model)], []
    for step in range(STEPS):
        chosen = samples_at(16 * step, 16 * step + 16, of=48)
        model.zero_grad()
        squared_error(model, [tensor[chosen] for tensor in rows(48).tensors]).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)))
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        states.append(state_of(model))
    return states, norms


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_two_optimizers_a_schedule_and_clipping_do_what_they_do_in_plain_torch(
    pool: WorkerPool, tmp_path: Path, world_size: int
) -> None:
    everyone = pool.run(world_size, train_two_sets, str(tmp_path))
    states, norms = two_sets_by_hand(everyone[0][0][0][0])
    assert min(norms) > CLIP_NORM
    for pure, scheduler in everyone:
        assert same(pure[0], scheduler[0])
        assert same(pure[0], everyone[0][0][0])
        for found, expected in zip(pure[0], states, strict=True):
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
        assert pure[1] == pytest.approx([CLIP_NORM] * STEPS, rel=1e-4)
    for name in ("pure", "scheduler"):
        lines = run_files.metrics(tmp_path / name)
        assert [line["lr"] for line in lines] == pytest.approx(
            [1e-2 * a_schedule(step) for step in range(STEPS)]
        )
        assert [line["gradient_norm"] for line in lines] == pytest.approx(norms, rel=1e-4)


def clipped(
    kind: Callable[..., torch.optim.Optimizer], fused: bool, precision: Any, run_dir: Path
) -> tuple[dict[str, Tensor], list[float]]:
    made: list[torch.optim.Optimizer] = []

    def build(model: nn.Module) -> torch.optim.Optimizer:
        made.append(
            kind(
                model.parameters(),
                lr=0.01,
                weight_decay=0.1,
                **({"fused": True} if fused else {"foreach": True}),
            )
        )
        return made[0]

    rates = Rates()
    given = recipe(optimizer=build, precision=precision, clip_norm=CLIP_NORM, steps=STEPS)
    ls.train(given, run_dir=str(run_dir), hooks=[rates], log_every=1)
    assert not hasattr(made[0], "grad_scale")
    norms = [row["gradient_norm"] for row in run_files.metrics(run_dir)]
    assert min(norms) > CLIP_NORM
    return rates.states[-1], norms


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad]
)
def test_a_fused_optimizer_scales_and_clips_as_it_steps(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: Callable[..., torch.optim.Optimizer],
    precision: str,
) -> None:
    state, norms = clipped(kind, False, precision, tmp_path / "foreach")

    def pass_over(*_: Any) -> None:
        raise AssertionError("a pass over the gradient")

    monkeypatch.setattr("lockstep.training.optim.gradient_norm.clip", pass_over)
    monkeypatch.setattr("lockstep.training.precision.LossScale.unscale", pass_over)
    fused, fused_norms = clipped(kind, True, precision, tmp_path / "fused")
    assert fused_norms == pytest.approx(norms, rel=1e-4)
    for name, value in state.items():
        torch.testing.assert_close(fused[name], value, rtol=1e-4, atol=1e-5)


def an_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)


def test_an_optimizer_is_applied_with_what_waits_for_its_step() -> None:
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    layer.bias.grad = torch.ones(1)
    called: list[str] = []

    def moved() -> float:
        before = float(layer.bias.detach())
        step_optimizer(optimizer)
        return before - float(layer.bias.detach())

    assert moved() == pytest.approx(1.0)
    with torch.profiler.profile() as profile:
        assert moved() == pytest.approx(1.0)
    assert "Optimizer.step#SGD.step" in {event.key for event in profile.key_averages()}
    for register in (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        register_optimizer_step_post_hook,
    ):
        handle = register(lambda *_: called.append("hook"))
        assert moved() == pytest.approx(1.0)
        assert called.pop() == "hook"
        handle.remove()
    # which gives the optimizer a step of its own, to tell whether it was called
    scheduler = StepLR(optimizer, 1)
    assert moved() == pytest.approx(1.0)
    with warnings.catch_warnings(action="error"):
        scheduler.step()
    assert scheduler.get_last_lr() == [pytest.approx(0.1)]


def test_a_pure_schedule_multiplies_the_rate_of_every_group_of_every_optimizer() -> None:
    one = torch.optim.SGD(
        [
            {"params": [nn.Parameter(torch.zeros(1))], "lr": 1.0},
            {"params": [nn.Parameter(torch.zeros(1))]},
        ],
        lr=0.5,
    )
    other = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.25))
    schedule = Schedule(a_schedule, [one, other])
    for step in (0, 1, 3, 1):
        schedule.before_step(step)
        schedule.after_step()
        rates = [
            float(group["lr"]) for optimizer in (one, other) for group in optimizer.param_groups
        ]
        assert rates == [1.0 / (1 + step), 0.5 / (1 + step), 0.25 / (1 + step)]
    assert isinstance(other.param_groups[0]["lr"], Tensor)


def test_the_rate_is_that_of_the_last_step_for_either_kind_of_schedule() -> None:
    for given in (a_schedule, lambda optimizer: StepLR(optimizer, 1, gamma=0.5)):
        optimizer = an_optimizer()
        schedule = Schedule(given, [optimizer])
        for step, rate in enumerate((0.5, 0.25)):
            schedule.before_step(step)
            assert float(optimizer.param_groups[0]["lr"]) == rate
            optimizer.step()
            schedule.after_step()
            assert schedule.rates() == {"lr": rate}


class ByItself(torch.optim.Optimizer):
    """Chooses its steps by itself: one group without a rate, one with None, as Adafactor of
    transformers, and one with a rate."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        first, second, *others = parameters
        groups = [
            {"params": [first]},
            {"params": [second], "lr": None},
            {"params": others, "lr": 0.1},
        ]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group.get("lr") or 0.01)


def test_an_optimizer_without_a_learning_rate_trains_and_logs_none(tmp_path: Path) -> None:
    ls.train(
        recipe(optimizer=lambda model: ByItself([*model.parameters()])),
        run_dir=str(tmp_path),
        log_every=1,
    )
    lines = run_files.rows(tmp_path / "metrics.jsonl")
    assert lines
    for line in lines:
        assert "lr" not in line
        assert line["lr/2"] == 0.1


def test_a_schedule_of_an_optimizer_without_a_learning_rate_is_refused() -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    with pytest.raises(
        RecipeError, match=r"^schedule with an optimizer whose group 0 has no learning rate; a "
    ):
        Schedule(a_schedule, [ByItself(parameters)])


def test_a_multiplier_that_is_not_finite_is_refused_before_the_step() -> None:
    optimizer = an_optimizer()
    schedule = Schedule(lambda step: 1.0 if step < 2 else math.nan, [optimizer])
    schedule.before_step(1)
    with pytest.raises(
        RecipeError,
        match=r"^schedule\(2\) returned nan; a multiplier of the learning rate must be finite; correct",
    ):
        schedule.before_step(2)
    assert optimizer.param_groups[0]["lr"] == 0.5


def failing_schedule(step: int) -> float:
    raise ValueError("no rate today")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            lambda step: "fast",
            "schedule(0) returned 'fast' (a str); a schedule is step -> multiplier of the"
            " learning rate, a number; or",
        ),
        (
            lambda step: None,
            "schedule(0) returned None (a NoneType); a schedule is step -> multiplier",
        ),
        (lambda step: True, "schedule(0) returned True (a bool); a schedule is step -> multiplier"),
        (
            failing_schedule,
            "schedule is neither step -> multiplier (schedule(0) raised ValueError: no rate"
            " today) nor optimizer -> torch LRScheduler (that raised ValueError: no rate today)",
        ),
        (lambda optimizer: optimizer.param_groups, "schedule(optimizer) returned [{"),
    ],
)
def test_what_makes_no_schedule_is_refused(given: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        Schedule(given, [an_optimizer()])
    assert str(caught.value).startswith(message)


def train_with(run_dir: str, changes: dict[str, Any]) -> str:
    try:
        ls.train(recipe(**changes), run_dir=run_dir)
    except LockstepError as error:
        return f"{type(error).__name__}: {error}"
    return "it trained"


def test_a_bad_optimizer_is_told_to_all_ranks_alike_before_the_first_step(
    pool: WorkerPool, tmp_path: Path
) -> None:
    everyone = pool.run(3, train_with, str(tmp_path / "run"), {"optimizer": leaving_out})
    assert everyone == [everyone[0]] * 3
    assert everyone[0].startswith(
        "RecipeError: the optimizer leaves out 2.weight, 2.bias; every trainable parameter"
    )
    assert not (tmp_path / "run" / "model.safetensors").exists()


def leaving_out(model: nn.Sequential) -> torch.optim.Optimizer:
    return torch.optim.SGD(model[0].parameters())


def test_a_group_that_is_added_after_the_unfusing_is_not_fused() -> None:
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.AdamW([{"params": [first], "fused": False}], fused=True)
    assert unfuse([optimizer])
    optimizer.add_param_group({"params": [second]})
    assert [(group["fused"], group["foreach"]) for group in optimizer.param_groups] == [
        (False, None),
        (False, True),
    ]


class Phases(nn.Module):
    """A complex weight, as it is or as real numbers. Torch conjugates its gradient lazily."""

    def __init__(self, as_real: bool) -> None:
        super().__init__()
        value = torch.complex(torch.ones(OUTPUTS), torch.arange(OUTPUTS).float())
        self.inner = nn.Linear(FEATURES, OUTPUTS)
        self.weight = nn.Parameter(torch.view_as_real(value) if as_real else value)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if not weight.is_complex():
            weight = torch.view_as_complex(weight)
        found: Tensor = (self.inner(x).to(torch.complex64) @ weight.conj()).abs()
        return found[:, None]


def phases(folder: str, plan: str, as_real: bool) -> None:
    ls.train(recipe(model=lambda: Phases(as_real), optimizer=sgd), plan=plan, run_dir=folder)


def all_phases(folder: str, cases: Sequence[tuple[str, bool]]) -> None:
    each_of(phases, folder, cases, may_refuse=False)


def test_gradients_that_torch_conjugates_lazily_are_summed(
    pool: WorkerPool, tmp_path: Path
) -> None:
    pool.run(1, all_phases, str(tmp_path / "1"), [("replicate=1", True), ("replicate=1", False)])
    pool.run(2, all_phases, str(tmp_path / "2"), [("replicate=2", False), ("shard=2", False)])
    truth, *weights = (
        load_file(tmp_path / run / "model.safetensors")["weight"]
        for run in ("1/0", "1/1", "2/0", "2/1")
    )
    for weight in weights:
        torch.testing.assert_close(torch.view_as_real(weight), truth)
