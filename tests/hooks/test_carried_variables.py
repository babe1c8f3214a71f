"""Values that a loop of one's own carries in a variable from one step into the loss of a later
one."""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import run_files
import torch
from torch import nn
from training.subjects import each_of, rows, sgd

import lockstep as ls
from lockstep.base.loop_flow import flow_of_methods
from lockstep.hooks.carried_variables import code_of
from lockstep.hooks.loop_variables import Helpers
from lockstep.testing.pool import WorkerPool


class Baseline:
    """A running value that is saved."""

    def __init__(self) -> None:
        self.value = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: Ema) -> None:
        self.value = state["value"]


class Pool:
    """Images of earlier steps: each rank puts in those of its own microbatches."""

    def __init__(self) -> None:
        self.images: list[torch.Tensor] = []

    def query(self, images: torch.Tensor) -> torch.Tensor:
        self.images.append(images.detach())
        return self.images[int(torch.randint(len(self.images), ()))]


class GatheredPool(Pool):
    """Images that are the same on every rank, in the order of their samples."""

    def query(self, images: torch.Tensor) -> torch.Tensor:
        return self.images[0][: len(images)] if self.images else images.detach()

    def add(self, images: torch.Tensor, places: torch.Tensor) -> None:
        self.images = [*self.images, images[places.argsort()]][-2:]

    def state_dict(self) -> dict[str, Any]:
        return {"images": self.images}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.images = state["images"]


class Criterion:
    """Keeps numbers for a log, a cache, what each step sets, and the latest output by name."""

    def __init__(self) -> None:
        self.calls, self.last, self.losses, self.weight = 0, 0.0, list[float](), 0.0
        self.cache: dict[int, float] = {}
        self.outputs: dict[str, torch.Tensor] = {}

    def set_step(self, index: int) -> None:
        self.weight = index / 8

    def __call__(self, output: torch.Tensor, y: torch.Tensor, index: int) -> torch.Tensor:
        loss = ((output - y) ** 2).mean() * (1.0 + self.weight)
        self.calls, self.last = self.calls + 1, loss.item()
        self.losses.append(self.last)
        self.cache[index] = float(index)
        self.outputs["last"] = output
        return loss + self.cache[index] + self.outputs["last"].square().mean()

    def mean(self) -> float:
        return sum(self.losses) / len(self.losses)


def with_objects(run_dir: str, kind: str, plan: str) -> list[Any]:
    """The names of the events, the variables that they name, and the model's fingerprint."""
    pool = {"pool": Pool, "gathered": GatheredPool}.get(kind, Pool)()
    criterion, scale, latest = Criterion(), torch.ones(1, requires_grad=True), 0.0
    scaled = torch.optim.SGD([scale], lr=0.1)
    steps = 17 if kind == "each fourth step" else 5
    with ls.Session(run_dir=run_dir, plan=plan) as session:
        model, optimizer = session.prepare(lambda: nn.Linear(6, 3), sgd)
        factor, factored = session.prepare(Factor, sgd)
        session.include("pool", pool if kind == "gathered" else GatheredPool())
        for step in session.steps(rows(48), global_batch=8, microbatch=2, steps=steps):
            criterion.set_step(step.index)
            outputs, places, errors = [], [], []
            with torch.no_grad():
                known = factor().item()
            for place, x, y in step.microbatches():
                output = model(x)
                outputs.append(output.detach())
                places.append(place)
                errors.append(((output - y) ** 2).mean().detach())
                if kind in ("pool", "gathered"):
                    loss = ((output - pool.query(output)) ** 2).mean()
                elif kind == "scale":
                    loss = (scale.detach() * (output - y) ** 2).mean()
                elif kind == "prepared":
                    loss = known * errors[-1] + ((output - y) ** 2).mean() * known
                elif kind == "each fourth step":
                    loss = ((output - y - latest) ** 2).mean()
                else:
                    loss = criterion(output, y, step.index)
                step.backward(loss, optimizer)
                if kind == "scale":
                    scaled.zero_grad()
                    (scale * errors[-1]).sum().backward()
                    scaled.step()
            step.commit(optimizer)
            for error in zipped(step.microbatches(), errors):
                step.backward((factor() * error).mean(), factored)
            step.commit(factored)
            if kind == "gathered":
                pool.add(session.gather(torch.cat(outputs)), session.gather(torch.cat(places)))
            if kind == "each fourth step" and step.index % 4 == 0:
                latest = 0.9 * latest + 0.1 * session.mean(torch.stack(errors))
            step.log({"mean": criterion.mean() if kind == "criterion" else 0.0})
        fingerprint = ls.fingerprint(model)
    told = run_files.events(Path(run_dir), "loss-keeps-state", "variables-not-saved")
    return [*[[each["event"], each.get("variables")] for each in told], fingerprint]


class Factor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(1))

    def forward(self) -> torch.Tensor:
        return self.value.exp()


class Ema:
    def __init__(self) -> None:
        self.value = 0.0


class Statistics:
    """Holds a running value in an object of its own, and a count for a log."""

    def __init__(self) -> None:
        self.ema, self.calls = Ema(), Ema()

    def update(self, value: float) -> None:
        self.calls.value += 1
        self.ema.value = 0.9 * self.ema.value + 0.1 * value


class Recent:
    """Keeps the latest few tables that it has made."""

    def __init__(self) -> None:
        self.tables: OrderedDict[int, torch.Tensor] = OrderedDict()

    def table(self, number: int) -> torch.Tensor:
        if number in self.tables:
            self.tables.move_to_end(number)
        else:
            self.tables[number] = torch.full((3,), number / 48)
            if len(self.tables) > 3:
                self.tables.popitem(last=False)
        return self.tables[number]


class Previous:
    """Keeps the latest loss alone, under the number of its sample."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def scaled(self, loss: torch.Tensor, number: int) -> torch.Tensor:
        scaled = loss * (1.0 + sum(self.losses.values()))
        self.losses = {number: 0.1 * scaled.item()}
        return scaled


class Linked:
    """One of several objects that hold and call each other."""

    def __init__(self) -> None:
        self.calls = 0

    def link(self, others: list[Linked]) -> None:
        self.a, self.b, self.c, self.d = others

    def total(self, depth: int) -> int:
        self.a.count()
        self.b.count()
        self.c.count()
        self.d.count()
        if depth == 0:
            return self.calls
        inner = depth - 1
        return self.a.total(inner) + self.b.total(inner) + self.c.total(inner) + self.d.total(inner)

    def count(self) -> None:
        self.calls += 1


class Staging:
    def __init__(self) -> None:
        self.buffer = torch.zeros(8, 6)

    def staged(self, x: torch.Tensor) -> torch.Tensor:
        self.buffer[: len(x)] = x
        return self.buffer[: len(x)].clone()


class Logging:
    """Returns the loss, and a running value for a log."""

    def __init__(self) -> None:
        self.running = 0.0

    def __call__(self, output: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, float]:
        loss = ((output - y) ** 2).mean()
        self.running = 0.9 * self.running + 0.1 * loss.item()
        return loss, self.running


class Environment:
    def __init__(self) -> None:
        self.state = torch.zeros(6)

    def reset(self) -> torch.Tensor:
        self.state = torch.ones(6)
        return self.state

    def step(self, action: torch.Tensor) -> tuple[torch.Tensor, bool]:
        self.state = 0.9 * self.state + action.mean()
        return self.state, float(self.state.sum()) > 3


def train_step(step: ls.Step, model: nn.Module, state: Ema) -> float:
    latest = 0.0
    for _, x, y in step.microbatches():
        loss = ((model(x) - y) ** 2).mean() * (1.0 + state.value)
        latest = loss.item()
        step.backward(loss)
    return latest


def train_and_keep(step: ls.Step, model: nn.Module, state: Ema) -> None:
    state.value = 0.9 * state.value + 0.1 * train_step(step, model, state)


def train_alone(step: ls.Step, model: nn.Module) -> float:
    return train_step(step, model, Ema())


class Trainer:
    """Trains a step, and returns a running loss for a log."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.running, self.scale = model, 0.0, 0.0

    def __call__(self, step: ls.Step, *, scales: bool) -> float:
        for _, x, y in step.microbatches():
            loss = self.loss(x, y)
            self.running = 0.9 * self.running + 0.1 * loss.item()
            if scales:
                self.scale = 0.9 * self.scale + 0.1 * loss.item()
            step.backward(loss)
        return self.running

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = ((self.model(x) - y) ** 2).mean() * (1.0 + self.scale)
        return loss

    @staticmethod
    def scaled(step: ls.Step, model: nn.Module, state: Ema) -> None:
        train_and_keep(step, model, state)


RUNNING = 0.0


def logged(loss: torch.Tensor, log: list[float]) -> torch.Tensor:
    log.append(loss.item())
    return loss


def keep_running(loss: torch.Tensor) -> None:
    global RUNNING
    RUNNING = 0.9 * RUNNING + 0.1 * loss.item()


def times_running(loss: torch.Tensor) -> torch.Tensor:
    return loss * (1.0 + RUNNING)


class Schedule:
    """A weight that the loop sets, and the loss reads through a method."""

    def __init__(self) -> None:
        self.value = 0.0

    def weight(self) -> float:
        return 1.0 + self.value


class RunningScale(nn.Module):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.zeros(()))

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        scaled = loss * (1.0 + self.scale.item())
        self.scale = 0.9 * self.scale + 0.1 * loss.detach()
        return scaled


class InPlace:
    def __init__(self) -> None:
        self.scales = torch.zeros(2)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        scaled = loss * (1.0 + self.scales[0].item())
        self.scales[0] = 0.9 * self.scales[0].item() + 0.1 * loss.item()
        return scaled


def with_functions(run_dir: str, kind: str, plan: str) -> list[Any]:
    """The names of the events, and the variables that they name."""
    state, schedule, anew = Ema(), Schedule(), Schedule()
    module, tensor, log = RunningScale(), InPlace(), list[float]()
    with ls.Session(run_dir=run_dir, plan=plan) as session:
        model, optimizer = session.prepare(lambda: nn.Linear(6, 3), sgd)
        trainer = Trainer(model)
        for step in session.steps(rows(48), global_batch=8, microbatch=2, steps=17):
            if kind == "called":
                step.log({"running": trainer(step, scales=True)})
            elif kind == "called for a log":
                step.log({"running": trainer(step, scales=False)})
            elif kind == "static":
                Trainer.scaled(step, model, state)
            elif kind == "helper of a helper":
                step.log({"latest": train_alone(step, model)})
            else:
                anew.value = step.index / 17
                for _, x, y in step.microbatches():
                    loss = ((model(x) - y) ** 2).mean()
                    loss = logged(loss, log)
                    if kind == "function":
                        loss = times_running(loss)
                        keep_running(loss)
                    if kind == "set anew":
                        loss = loss * anew.weight()
                    if kind == "buffer":
                        loss = module(loss)
                    if kind == "in place":
                        loss = tensor.scaled(loss)
                    if kind == "method":
                        loss = loss * schedule.weight()
                        schedule.value = 0.9 * schedule.value + 0.1 * loss.item()
                    step.backward(loss)
                step.log({"mean": sum(log) / len(log)})
            step.commit(optimizer)
    told = run_files.events(Path(run_dir), "loss-keeps-state", "variables-not-saved")
    return [[each["event"], each.get("variables")] for each in told]


FUNCTIONS = {
    "called": ["trainer.scale"],
    "static": ["state.value"],
    "function": ["RUNNING"],
    "method": ["schedule.value"],
    "buffer": ["module.scale"],
    "in place": ["tensor.scales"],
    "called for a log": [],
    "helper of a helper": [],
    "set anew": [],
    "none": [],
}


def each_function(run_dir: str, plan: str) -> list[Any]:
    return each_of(with_functions, run_dir, [(kind, plan) for kind in FUNCTIONS])


def test_functions_methods_and_buffers_are_followed(pool: WorkerPool, tmp_path: Path) -> None:
    alone = each_function(str(tmp_path / "one"), "replicate=1")
    assert alone == [[[LOST, names]] if names else [] for names in FUNCTIONS.values()]
    several = pool.run(2, each_function, str(tmp_path / "two"), "replicate=2,numerics=bitwise")[0]
    for names, told in zip(FUNCTIONS.values(), several, strict=True):
        expected = f"LossError: the loss uses {names[0]}, which the loop carries" if names else []
        assert told[: len(expected)] == expected


def with_code_of_ones_own(run_dir: str, kind: str, plan: str) -> list[Any]:
    """The names of the events, and the variables that they name."""
    statistics, recent, staging, criterion = Statistics(), Recent(), Staging(), Logging()
    environment, buffer = Environment(), torch.zeros(8, 6)
    state, previous, linked = Ema(), Previous(), [Linked() for _ in range(5)]
    for each in linked:
        each.link([one for one in linked if one is not each])
    first, losses = linked[0], dict[int, float]()
    with ls.Session(run_dir=run_dir, plan=plan) as session:
        model, optimizer = session.prepare(lambda: nn.Linear(6, 3), sgd)
        for step in session.steps(rows(48), global_batch=8, microbatch=2, steps=17):
            if kind == "helper":
                train_and_keep(step, model, state)
            elif kind == "helper for a log":
                train_step(step, model, Ema())
            else:
                for place, x, y in step.microbatches():
                    if kind == "staging":
                        buffer[: len(x)] = staging.staged(x)
                        x = buffer[: len(x)].clone()
                    if kind == "environment":
                        done = True
                        for _ in range(3):
                            x = environment.reset() if done else x
                            x, done = environment.step(x)
                    loss, running = criterion(model(x), y)
                    if kind == "cache":
                        loss = loss + recent.table(int(place[0])).mean()
                    if kind == "nested":
                        loss = loss * (1.0 + statistics.ema.value)
                        statistics.update(loss.item())
                    if kind == "previous":
                        loss = previous.scaled(loss, int(place[0]))
                    if kind == "dict":
                        loss = loss * (1.0 + sum(losses.values()))
                        losses = {int(place[0]): 0.1 * loss.item()}
                    if kind == "linked":
                        loss = loss * (1.0 + 0.0 * first.total(1))
                    step.backward(loss)
                step.log({"running": running})
            step.commit(optimizer)
    told = run_files.events(Path(run_dir), "loss-keeps-state", "variables-not-saved")
    return [[each["event"], each.get("variables")] for each in told]


CODE = (
    *("nested", "helper", "previous", "dict"),
    *("cache", "staging", "environment", "helper for a log"),
)


def each_code(run_dir: str, plan: str) -> list[Any]:
    return each_of(with_code_of_ones_own, run_dir, [(kind, plan) for kind in CODE])


def test_only_what_goes_on_in_objects_and_helpers_is_named(
    pool: WorkerPool, tmp_path: Path
) -> None:
    alone = each_code(str(tmp_path / "one"), "replicate=1,numerics=bitwise")
    lost = [
        [[LOST, [name]]]
        for name in ("statistics.ema.value", "state.value", "previous.losses", "losses")
    ]
    assert alone == [*lost, [], [], [], []]
    several = pool.run(2, each_code, str(tmp_path / "bits"), "replicate=2,numerics=bitwise")[0]
    nested, helper, previous, *others = several
    assert nested.startswith("LossError: the loss uses statistics.ema.value, which the loop")
    assert helper.startswith("LossError: the loss uses state.value, which the loop carries")
    assert previous.startswith("LossError: the loss uses previous.losses, which the loop")
    assert others == [[[LOST, ["losses"]]], [], [], [], []]


def test_no_path_leads_twice_through_one_of_several_objects(tmp_path: Path) -> None:
    [[event, names]] = with_code_of_ones_own(str(tmp_path), "linked", "replicate=1")
    assert event == LOST
    assert len(names) == 1 + 4 * (1 + 3 * (1 + 2 * (1 + 1)))


def zipped(microbatches: Any, values: list[Any]) -> Any:
    return (value for _, value in zip(microbatches, values, strict=True))


def trained(run_dir: str, kind: str, plan: str) -> list[Any]:
    """The names of the events, and the variables that they name."""
    own, mean, logged, cached = 0.0, 0.0, 0.0, None
    saved = Baseline()
    with ls.Session(run_dir=run_dir, plan=plan) as session:
        model, optimizer = session.prepare(lambda: nn.Linear(6, 3), sgd)
        session.include("saved", saved)
        for step in session.steps(rows(48), global_batch=8, microbatch=2, steps=5):
            losses = []
            if cached is None:
                cached = torch.ones(3)
            for _, x, y in step.microbatches():
                loss = ((model(x) * cached - y) ** 2).mean()
                losses.append(loss.item())
                used = {"own": own, "mean": mean, "saved": saved.value}.get(kind, 0.0)
                step.backward(loss * (1.0 + used))
            step.commit(optimizer)
            new = 0.1 * session.mean(torch.tensor(losses))
            if kind == "own":
                own = 0.9 * own + 0.1 * sum(losses)
            elif kind == "mean":
                mean = 0.9 * mean + new
            elif kind == "saved":
                saved.value = 0.9 * saved.value + new
            logged += sum(losses)
            step.log({"total": logged})
    told = run_files.events(Path(run_dir), "loss-keeps-state", "variables-not-saved")
    return [[each["event"], each.get("variables")] for each in told]


KINDS = ("own", "mean", "saved", "none")


def each(run_dir: str, plan: str) -> list[Any]:
    return each_of(trained, run_dir, [(kind, plan) for kind in KINDS])


LOST = "variables-not-saved"


def test_a_value_that_a_later_loss_uses_is_named(pool: WorkerPool, tmp_path: Path) -> None:
    assert each(str(tmp_path / "one"), "replicate=1") == [
        [[LOST, ["own"]]],
        [[LOST, ["mean"]]],
        [],
        [],
    ]
    fast = pool.run(2, each, str(tmp_path / "two"), "replicate=2")[0]
    assert fast == [[["loss-keeps-state", None]], [[LOST, ["mean"]]], [], []]
    refused, *others = pool.run(2, each, str(tmp_path / "bits"), "shard=2,numerics=bitwise")[0]
    assert others == fast[1:]
    assert refused.startswith("LossError: the loss uses own, which the loop carries from one step")
    assert "on rank 1: what is learned depends on the number of processes" in refused


OBJECTS = ("pool", "gathered", "scale", "prepared", "each fourth step", "criterion")


def each_object(run_dir: str, plan: str) -> list[Any]:
    return each_of(with_objects, run_dir, [(kind, plan) for kind in OBJECTS])


def test_what_an_object_or_an_optimizer_of_ones_own_carries_is_named(
    pool: WorkerPool, tmp_path: Path
) -> None:
    bits = "numerics=bitwise"
    alone = each_object(str(tmp_path / "one"), f"replicate=1,{bits}")
    told = [found[:-1] for found in alone]
    assert told == [
        [[LOST, ["pool.images"]]],
        [],
        [[LOST, ["scale"]]],
        [],
        [[LOST, ["latest"]]],
        [],
    ]
    fast = pool.run(2, each_object, str(tmp_path / "two"), "replicate=2")[0]
    assert [found[:-1] for found in fast] == [
        [["loss-keeps-state", None]],
        [],
        [["loss-keeps-state", None], [LOST, ["scale"]]],
        [],
        [[LOST, ["latest"]]],
        [],
    ]
    several = pool.run(2, each_object, str(tmp_path / "bits"), f"shard=2,{bits}")[0]
    assert several[0].startswith("LossError: the loss uses pool.images, which the loop carries")
    assert several[2].startswith("LossError: the loss uses scale, which the loop carries from one")
    assert [several[place] for place in (1, 3, 4, 5)] == [alone[place] for place in (1, 3, 4, 5)]


def test_a_class_whose_file_is_being_edited_has_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "being_edited.py"
    file.write_text("class Pool:\n    def add(self):\n        self.n += 1\n        return self.n\n")
    spec = importlib.util.spec_from_file_location("being_edited", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "being_edited", module)
    spec.loader.exec_module(module)
    assert flow_of_methods(code_of(module.Pool), {"add"}).kept == {"n": False}
    file.write_text("class Pool(:\n    def add(self\n")
    assert flow_of_methods(code_of(module.Pool), {"add"}).kept == {}


class Slots:
    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)

    def put(self, value: float) -> float:
        return value


def wrapped(value: float) -> float:
    return value


def of_a_lost_module(value: float) -> float:
    return value


def test_looking_for_helpers_runs_no_code_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    around = functools.wraps(wrapped)(lambda value: value)
    vars(wrapped)["__wrapped__"] = around
    monkeypatch.setattr(of_a_lost_module, "__module__", "lost")
    monkeypatch.setitem(sys.modules, "lost", None)
    variables = {"slots": Slots(), "around": around, "of_a_lost_module": of_a_lost_module}
    body = ast.parse("slots.put(step), around(step), of_a_lost_module(step)")
    found = Helpers(sys._getframe()).used_by(body, {"step"}, variables)
    assert [(path, each.is_method) for path, each in found.items()] == [("slots.put", True)]
