"""Threads of one process, each with a microbatch on a replica of the model: what they compute, and what they are refused for."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lockstep.base.errors import RecipeError
from lockstep.model.threads import Threads

WIDTH, SAMPLES = 4, 6


class Tied(nn.Module):
    """Modules and parameters that stand twice, a recurrent one with a list of its own, one frozen, one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.again = self.first
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.last.bias.requires_grad_(False)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.empty = None
        self.register_parameter("none", None)
        self.register_buffer("scale", torch.full((WIDTH,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.again(self.first(x)).unsqueeze(1))
        found: Tensor = self.last(hidden.squeeze(1)) * self.scale
        return found


@contextmanager
def threads_of(model: nn.Module, count: int) -> Iterator[Threads]:
    threads = Threads(model, count)
    try:
        yield threads
    finally:
        threads.close()


def learn(model: nn.Module, x: Tensor) -> float:
    loss = model(x).square().sum()
    loss.backward()
    return float(loss.detach())


def in_threads(model: nn.Module, count: int, batches: list[Tensor], compute: Callable[..., Any] = learn) -> list[Any]:
    """What each batch came to; the model has the gradients afterwards."""
    found = []
    with threads_of(model, count) as threads:
        replicas = threads.replicate()
        for group in threads.groups((batch,) for batch in batches):
            found += replicas.run(compute, group)
        replicas.collect()
    return found


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("count", "microbatches"), [(2, 2), (2, 5), (3, 2), (3, 6)])
def test_losses_and_gradients_are_those_of_one_after_another(count: int, microbatches: int) -> None:
    torch.manual_seed(0)
    model = Tied().double()
    batches = [torch.randn(SAMPLES, WIDTH, dtype=torch.float64) for _ in range(microbatches)]
    losses = [learn(model, batch) for batch in batches]
    expected = gradients(model)
    model.zero_grad()

    assert in_threads(model, count, batches) == losses
    found = gradients(model)
    assert {name for name, gradient in found.items() if gradient is None} == {"last.bias", "unused.weight", "unused.bias"}
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-13, atol=1e-13)


def test_the_sum_has_the_same_bits_each_time() -> None:
    torch.manual_seed(0)
    model, batches = Tied(), [torch.randn(SAMPLES, WIDTH) for _ in range(9)]

    def summed() -> dict[str, Tensor | None]:
        model.zero_grad()
        in_threads(model, 3, batches)
        return gradients(model)

    first, second = summed(), summed()
    assert all(one is second[name] is None or torch.equal(one, second[name]) for name, one in first.items())  # type: ignore[arg-type]


def test_they_compute_at_the_same_time_each_with_the_threads_of_the_process() -> None:
    meet = threading.Barrier(3, timeout=30)

    def compute(model: nn.Module, x: Tensor) -> tuple[int, int]:
        meet.wait()
        learn(model, x)
        return threading.get_ident(), torch.get_num_threads()

    found = in_threads(Tied(), 3, [torch.ones(SAMPLES, WIDTH)] * 3, compute)
    assert len({thread for thread, _ in found}) == 3
    assert {number for _, number in found} == {torch.get_num_threads()}


def test_a_replica_has_the_values_and_the_mode_of_the_model_as_it_is_now() -> None:
    model = Tied()
    with threads_of(model, 2) as threads:
        for training, value in ((True, 0.25), (False, 0.5)):
            model.train(training)
            with torch.no_grad():
                model.first.weight.fill_(value)
            (replica, *_) = threads.replicate().each
            assert replica.model.first.training is training
            assert replica.model.last.weight.flatten()[0] == value
            assert replica.model.last.weight is not model.last.weight


def test_hooks_on_a_gradient_are_called_for_each_microbatch() -> None:
    model = nn.Linear(WIDTH, 1)
    model.weight.register_hook(lambda gradient: gradient * 3)
    batches = [torch.full((SAMPLES, WIDTH), float(number)) for number in range(5)]
    for batch in batches:
        learn(model, batch)
    expected = gradients(model)
    model.zero_grad()
    in_threads(model, 2, batches)
    torch.testing.assert_close(gradients(model), expected)


def test_hooks_on_an_accumulated_gradient_are_refused() -> None:
    model = nn.Linear(WIDTH, 1)
    model.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(RecipeError, match=r"data_parallel=2 and a hook of register_post_accumulate_grad_hook on 'weight'"):
        Threads(model, 2)


def test_replicas_are_kept_from_step_to_step_as_long_as_the_model_is_what_it_was() -> None:
    model = Tied()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def halve() -> None:
        model.first.weight.data = model.first.weight.data / 2

    between: list[tuple[Callable[[], Any], bool]] = [
        (lambda: torch.optim.SGD(parameters, lr=0.1).step(), True),
        (halve, False),
        (model.eval, False),
        (lambda: setattr(model.recurrent, "own", 1), False),
        (lambda: setattr(model, "unused", nn.Linear(WIDTH, 1)), False),
        (lambda: setattr(model, "scale", torch.ones(WIDTH)), False),
        (lambda: model.first.weight.register_hook(lambda gradient: gradient * 2), False),
    ]
    with threads_of(model, 2) as threads:
        for change, kept in between:
            batches = [(torch.ones(SAMPLES, WIDTH),), (torch.full((SAMPLES, WIDTH), 2.0),)]
            before = threads.replicate()
            before.run(learn, batches)
            before.collect()
            change()
            after = threads.replicate()
            assert (after.each[1] is before.each[1]) is kept
            model.zero_grad()
            after.run(learn, batches)
            after.collect()
            found = gradients(model)
            model.zero_grad()
            for (batch,) in batches:
                learn(model, batch)
            torch.testing.assert_close(found, gradients(model))
            model.zero_grad()


class Drawing(nn.Module):
    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        self.draw()
        found: Tensor = self.linear(x)
        return found


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), lambda: np.random.random(), random.random], ids=["torch", "numpy", "python"])
def test_random_numbers_are_refused(draw: Callable[[], Any]) -> None:
    with pytest.raises(RecipeError, match=r"data_parallel=2, and the model's forward or the loss draws random numbers.* use replicate=2"):
        in_threads(Drawing(draw), 2, [torch.ones(SAMPLES, WIDTH)] * 2)


class Setting(nn.Module):
    """It does something to itself in its forward."""

    def __init__(self, change: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 1)
        self.register_buffer("mean", torch.zeros(1))
        self.change, self.calls, self.seen, self.kept = change, 0, list[Tensor](), dict[str, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.change(self, x)
        found: Tensor = self.inner(x)
        return found


def replace_weight(module: Setting, x: Tensor) -> None:
    module.inner.weight = nn.Parameter(module.inner.weight.detach() / 2)


def replace_values(module: Setting, x: Tensor) -> None:
    module.inner.weight.data = module.inner.weight.data.clamp(-0.1, 0.1)


CHANGES: dict[str, tuple[str, Callable[[Any, Tensor], Any]]] = {
    "a number": ("'calls' of 0", lambda module, x: setattr(module, "calls", module.calls + 1)),
    "a new attribute": ("'auxiliary' of 0", lambda module, x: setattr(module, "auxiliary", x.mean())),
    "a buffer": ("'mean' of 0", lambda module, x: setattr(module, "mean", x.mean())),
    "a member of a list": ("'seen' of 0", lambda module, x: module.seen.append(x)),
    "a member of a dict": ("'kept' of 0", lambda module, x: module.kept.update(x=x)),
    "a parameter": ("'weight' of 0.inner", replace_weight),
    "a parameter's values": ("'weight' of 0.inner", replace_values),
    "an attribute of one of torch's modules": ("'mean' of 0.inner", lambda module, x: setattr(module.inner, "mean", x.mean())),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_a_forward_sets_on_a_module_is_refused(case: str) -> None:
    where, change = CHANGES[case]
    with pytest.raises(RecipeError, match=f"data_parallel=2, and the model's forward sets {where}; .* use replicate=2"):
        in_threads(nn.Sequential(Setting(change)), 2, [torch.ones(SAMPLES, WIDTH)] * 2)


def test_what_was_there_already_may_be_set_again() -> None:
    def again(module: Setting, x: Tensor) -> None:
        module.calls, module.seen = int("0"), list(module.seen)

    in_threads(Setting(again), 2, [torch.ones(SAMPLES, WIDTH)] * 2)


class Scaled(nn.Parameter):
    """Of a class of its own, with an attribute."""


def test_a_parameter_is_of_its_class_and_has_its_attributes() -> None:
    model = nn.Linear(WIDTH, 1)
    weight = Scaled(model.weight.detach())
    weight.scale = 3.0  # type: ignore[attr-defined]
    model.weight = weight
    seen = in_threads(model, 2, [torch.ones(SAMPLES, WIDTH)] * 2, lambda model, x: (type(model.weight), model.weight.scale))
    assert seen == [(Scaled, 3.0)] * 2


def test_a_module_that_stands_twice_is_one() -> None:
    assert in_threads(Tied(), 2, [torch.ones(SAMPLES, WIDTH)] * 2, lambda model, x: model.again is model.first) == [True, True]


def test_context_variables_are_the_callers() -> None:
    variable = ContextVar("variable", default=0)
    token = variable.set(5)
    try:
        assert in_threads(nn.Linear(WIDTH, 1), 2, [torch.ones(SAMPLES, WIDTH)] * 2, lambda model, x: variable.get()) == [5, 5]
    finally:
        variable.reset(token)


def test_a_frozen_parameter_may_have_a_gradient_from_before() -> None:
    model = nn.Linear(WIDTH, 1)
    model.bias.requires_grad_(False)
    model.bias.grad = torch.ones(1)
    in_threads(model, 2, [torch.ones(SAMPLES, WIDTH)] * 2)
    assert model.bias.grad == 1.0


@pytest.mark.parametrize("compiled", [lambda module: torch.compile(module, backend="eager"), lambda module: module.compile() or module])
def test_compiled_modules_are_refused(compiled: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(RecipeError, match=r"data_parallel=2 and a compiled module \('0'\)"):
        Threads(nn.Sequential(compiled(nn.Linear(WIDTH, 1))), 2)


class Listed(nn.Module):
    """It finds its module in a list, where the replicas find the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.order = [self.second]

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.order[0](self.first(x))
        return found


def test_a_forward_that_does_not_keep_to_its_replica_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"'second\.weight' of the model itself was reached, by the forward"):
        in_threads(Listed(), 2, [torch.ones(SAMPLES, WIDTH)] * 2)


def test_an_error_in_a_thread_is_raised_when_all_have_ended() -> None:
    ended = []

    def compute(model: nn.Module, x: Tensor) -> None:
        try:
            model(x)
        finally:
            time.sleep(0.1 * len(x))
            ended.append(len(x))

    batches = [(torch.ones(1, WIDTH),), (torch.ones(2, WIDTH + 1),), (torch.ones(3, WIDTH),)]
    with threads_of(nn.Linear(WIDTH, 1), 3) as threads:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
            threads.replicate().run(compute, batches)
        assert caught.value.__notes__ == [
            "raised in a thread, on a replica of the model (data_parallel=3); replicate=3 has processes instead"
        ]
        assert ended == [1, 2, 3]


def test_batchnorm_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"data_parallel=2 and a model with BatchNorm \('1'\); each copy of the model would take"):
        Threads(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), 2)
