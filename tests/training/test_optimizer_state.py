"""State of optimizers beside tensors by parameter: saved by a pair of their own, or refused in the
first step.

Also optimizers with a training and an evaluation mode, and changes of an optimizer that are
refused."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training.subjects import recipe, rows, same, sgd

import lockstep as ls
from lockstep.base.errors import CheckpointError, UserError
from lockstep.comm.mesh import full_tensor
from lockstep.launch.termination import Preempted
from lockstep.testing.pool import WorkerPool
from lockstep.training.optim.modes import OptimizerModes

STEPS, STOPPED_AT = 4, 2


class Projector:
    """An object of a user's, such as GaLore keeps for each matrix."""

    def __init__(self, basis: Tensor) -> None:
        self.basis = basis


class GaLore(torch.optim.Optimizer):
    """Moments of the gradient in a subspace that is found in the first step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            state, grad = self.state[p], p.grad
            if p.dim() == 2:
                if "projector" not in state:
                    state["projector"] = Projector(
                        torch.linalg.svd(grad, full_matrices=False)[2][:2]
                    )
                grad = grad @ state["projector"].basis.T
            state.setdefault("momentum", torch.zeros_like(grad)).lerp_(grad, 0.5)
            p.sub_(
                self.param_groups[0]["lr"]
                * (
                    state["momentum"] @ state["projector"].basis
                    if p.dim() == 2
                    else state["momentum"]
                )
            )


class SavedGaLore(GaLore):
    """With the remedy, as one writes it: the dicts of torch's state dict are those of the
    optimizer."""

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        for state in saved["state"].values():
            if "projector" in state:
                state["projector"] = {"basis": state["projector"].basis, "kind": "right"}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            if "projector" in state:
                state["projector"] = Projector(state["projector"]["basis"])


class Wrapping(torch.optim.Optimizer):
    """One that keeps another optimizer, as SAM and Lookahead do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})
        self.inner = torch.optim.SGD(self.param_groups, lr=1e-2, momentum=0.9)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class SavedWrapping(Wrapping):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "inner": self.inner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({name: state_dict[name] for name in ("state", "param_groups")})
        self.inner.param_groups = self.param_groups
        self.inner.load_state_dict(state_dict["inner"])


class Nested(torch.optim.Optimizer):
    """Tensors in lists, and state of no one parameter. It needs whole tensors."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["steps"] = self.state.get("steps", 0) + 1
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            pair = state.setdefault("pair", [torch.zeros_like(p), torch.zeros(())])
            pair[0].lerp_(p.grad, 0.5)
            pair[1].lerp_(p.grad.norm(), 0.5)
            p.sub_(self.param_groups[0]["lr"] * pair[0] / (pair[1] + self.state["steps"]))


class ByParameter(Nested):
    """The same without the state of no one parameter, which a copy of the optimizer for one tensor
    would not have."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["steps"] = 0
        super().step()
        del self.state["steps"]


class Aggregated(torch.optim.Optimizer):
    """A dict of momenta, as AggMo has, and a number that is a tensor of the group, which the first
    step makes, as Prodigy's estimate in pytorch_optimizer. It updates each element by itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            steps = group.setdefault("steps", torch.zeros(1))
            steps.add_(1)
            for p in group["params"]:
                if p.grad is None:
                    continue
                momenta = self.state[p].setdefault(
                    "momenta", {beta: torch.zeros_like(p) for beta in (0.0, 0.5, 0.9)}
                )
                for beta, momentum in momenta.items():
                    momentum.mul_(beta).add_(p.grad)
                    p.sub_(momentum, alpha=group["lr"] / steps.item())


class Widened(torch.optim.Optimizer):
    """float64 moments of float32 parameters, and a pair that relies on torch's, which casts
    them."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            moment = self.state[p].setdefault("moment", torch.zeros_like(p, dtype=torch.float64))
            moment.lerp_(p.grad.double(), 0.3)
            p.sub_((1e-2 * moment).float())

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)


class ScheduleFree(torch.optim.Optimizer):
    """SGD without a schedule (Defazio et al., 2024): trains at y, between z and the average x,
    which is the model."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "train_mode": False, "k": 0})

    @torch.no_grad()
    def _move(self, weight: float, train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not train:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight)
                group["train_mode"] = train

    def train(self) -> None:
        self._move(0.1, True)

    def eval(self) -> None:
        self._move(1 - 1 / 0.9, False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("not in train mode")
            group["k"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 / group["k"])
                p.sub_(group["lr"] * (0.9 * (1 - 1 / group["k"])) * p.grad)
                z.sub_(group["lr"] * p.grad)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    each.__name__: each
    for each in (
        GaLore,
        SavedGaLore,
        Wrapping,
        SavedWrapping,
        Nested,
        ByParameter,
        Aggregated,
        Widened,
        ScheduleFree,
    )
}


class Asked(ls.Hook):
    def __init__(self, at: int | None) -> None:
        self.at = at

    def after_step(self, run: Any) -> None:
        if run.step == self.at:
            os.kill(os.getpid(), signal.SIGUSR1)


def train(optimizer: str, run_dir: str, plan: str, at: int | None, every: int) -> str:
    given = recipe(optimizer=lambda model: OPTIMIZERS[optimizer](model.parameters()), steps=STEPS)
    return ls.train(
        given,
        hooks=[Asked(at)],
        run_dir=run_dir,
        plan=plan,
        saving=ls.Saving(every=every),
        log_every=1,
    ).fingerprint


def trained(
    optimizer: str, run_dir: str, plan: str, at: int | None = None, every: int = 100
) -> str:
    """Returns the fingerprint; empty if the run was asked to end; the error, if it was refused."""
    try:
        return train(optimizer, run_dir, plan, at, every)
    except Preempted:
        return ""
    except CheckpointError as error:
        return str(error)


def resumed(folder: str, plan: str, names: list[str]) -> dict[str, tuple[str, str]]:
    """For each optimizer the fingerprint of a whole run, and of one that was asked to end and goes
    on."""
    found = {}
    for name in names:
        expected = trained(name, f"{folder}/{name}-whole", plan)
        assert trained(name, f"{folder}/{name}-cut", plan, STOPPED_AT) == ""
        found[name] = expected, trained(name, f"{folder}/{name}-cut", plan)
    return found


@pytest.mark.parametrize(
    ("plan", "names"),
    [
        ("replicate=1", ["Aggregated"]),
        ("replicate=2", ["SavedGaLore", "SavedWrapping", "Nested", "ScheduleFree"]),
        ("shard=2", ["ByParameter", "Aggregated", "Widened", "ScheduleFree"]),
    ],
)
def test_a_resumed_run_ends_as_a_whole_one(
    pool: WorkerPool, tmp_path: Path, plan: str, names: list[str]
) -> None:
    alone = plan == "replicate=1"
    everyone = (
        [resumed(str(tmp_path), plan, names)]
        if alone
        else pool.run(2, resumed, str(tmp_path), plan, names)
    )
    for found in everyone:
        for name, (whole, after) in found.items():
            assert after == whole, name


def refused_and_mended(run_dir: str, plan: str) -> dict[str, tuple[str, list[Any], str]]:
    """By the optimizer: the error, what was written then, and the fingerprint with the remedy; in
    two processes also an object under shard."""
    found = {}
    for name in ("GaLore", "Wrapping"):
        path = Path(run_dir, name)
        error = trained(name, str(path), plan)
        metrics = path / "metrics.jsonl"
        written = list((path / "checkpoints").glob("step-*"))
        if metrics.exists():
            written += metrics.read_text().splitlines()[1:]
        found[name] = error, written, trained(f"Saved{name}", str(path), plan)
    if plan != "replicate=1":
        found["shard"] = trained("SavedGaLore", f"{run_dir}/shard", "shard=2"), [], ""
    return found


@pytest.mark.parametrize("processes", [1, 2])
def test_what_cannot_be_saved_is_refused_in_the_first_step_and_the_remedy_works(
    pool: WorkerPool, tmp_path: Path, processes: int
) -> None:
    for found in (
        [refused_and_mended(str(tmp_path), "replicate=1")]
        if processes == 1
        else pool.run(2, refused_and_mended, str(tmp_path), "replicate=2")
    ):
        for name, words in {
            "GaLore": "is a Projector",
            "Wrapping": "Wrapping.inner is another optimizer",
        }.items():
            error, written, fingerprint = found[name]
            assert words in error
            assert f"give {name} both a state_dict()" in error
            assert written == [], name
            assert len(fingerprint) == 64, fingerprint
        if processes == 2:
            assert "is a Projector" in found["shard"][0]
            assert found["shard"][0].endswith("use replicate")


class Noted(ls.Hook):
    """The metrics of each evaluation, and what is exported after it; and if that was ever what is
    trained."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.exported: dict[int, dict[str, Tensor]] = {}
        self.is_trained = False

    def after_evaluation(self, run: Any, metrics: dict[str, float]) -> None:
        self.losses[run.step], self.exported[run.step] = metrics["loss"], run.full_state_dict()
        self.is_trained |= same(
            self.exported[run.step]["0.bias"], full_tensor(run.model[0].bias.detach())
        )


def averaged(run_dir: str, plan: str) -> tuple[Noted, dict[str, float], str, str]:
    """Returns what was noted; the losses of the files of the end, of the best checkpoint and of the
    one after step 2, measured anew; and the fingerprints of this run and of one without
    evaluations."""
    given: dict[str, Any] = {
        "optimizer": lambda model: ScheduleFree(model.parameters()),
        "steps": STEPS,
    }
    evaluated = {**given, "evaluation": ls.Evaluation(data=rows(16, seed=9), every=2)}
    noted, saving = Noted(), ls.Saving(every=1, best="loss", keep_every=2)
    result = ls.train(recipe(**evaluated), run_dir=run_dir, plan=plan, hooks=[noted], saving=saving)
    assert result.best is not None
    (second,) = Path(run_dir, "checkpoints").glob("step-00000002-*")
    files = {
        "model": f"{run_dir}/model.safetensors",
        "best": result.best.weights,
        "second": str(second),
    }
    losses = {
        name: ls.evaluate(recipe(**evaluated), file, plan=plan, run_dir=f"{run_dir}-{name}")["loss"]
        for name, file in files.items()
    }
    losses["best-in-training"] = result.best.value
    plain = ls.train(recipe(**given), run_dir=f"{run_dir}-plain", plan=plan)
    return noted, losses, result.fingerprint, plain.fingerprint


@pytest.mark.parametrize(("plan", "processes"), [("replicate=1", 1), ("shard=2", 2)])
def test_the_weights_of_evaluation_mode_are_measured_saved_and_loaded(
    pool: WorkerPool, tmp_path: Path, plan: str, processes: int
) -> None:
    path = tmp_path / "run"
    for noted, losses, fingerprint, plain in (
        [averaged(str(path), plan)]
        if processes == 1
        else pool.run(processes, averaged, str(path), plan)
    ):
        assert not noted.is_trained
        assert losses["model"] == pytest.approx(noted.losses[STEPS], rel=1e-6)
        assert losses["second"] == pytest.approx(noted.losses[2], rel=1e-6)
        assert losses["best"] == pytest.approx(losses["best-in-training"], rel=1e-6)
        assert noted.losses[2] != noted.losses[STEPS]
        assert fingerprint == plain
        assert same(ls.load(str(path)), noted.exported[STEPS])
        assert same(
            ls.load(str(next((path / "checkpoints").glob("step-00000002-*")))), noted.exported[2]
        )
        assert same(
            ls.load(str(path), best=True),
            noted.exported[min(noted.losses, key=noted.losses.__getitem__)],
        )


def test_in_evaluation_mode_the_groups_of_training_mode_are_known() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = ScheduleFree([parameter])
    optimizer.train()
    modes = OptimizerModes([optimizer], {"weight": parameter})
    with modes.evaluating():
        assert optimizer.param_groups[0]["train_mode"] is False
        assert modes.groups_of(optimizer)[0]["train_mode"] is True
    assert modes.groups_of(optimizer) is optimizer.param_groups
    assert optimizer.param_groups[0]["train_mode"] is True


class Adds(ls.Hook):
    def __init__(self, change: str) -> None:
        self.change = change

    def after_step(self, run: Any) -> None:
        if run.step == 3 and self.change == "group":
            run.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        elif run.step == 3 and self.change == "module":
            run.model[2] = nn.Linear(16, 3)


def changed(run_dir: str, change: str, every: int) -> str:
    given = recipe(optimizer=sgd, steps=STEPS)
    try:
        return ls.train(
            given, run_dir=run_dir, hooks=[Adds(change)], saving=ls.Saving(every=every)
        ).fingerprint
    except UserError as error:
        return str(error)


CHANGED = [("group", 1), ("group", 100), ("module", 1)]
"""What a hook changes, and how often it is saved."""


def changed_each(folder: str) -> list[str]:
    found = [changed(f"{folder}/whole", "", 100)]
    for place, (change, every) in enumerate(CHANGED):
        found += [
            changed(f"{folder}/{place}", change, every),
            changed(f"{folder}/{place}", "", every),
        ]
    return found


@pytest.mark.parametrize("processes", [1, 2])
def test_a_change_that_is_refused_is_not_saved(
    pool: WorkerPool, tmp_path: Path, processes: int
) -> None:
    for whole, *others in (
        [changed_each(str(tmp_path))]
        if processes == 1
        else pool.run(2, changed_each, str(tmp_path))
    ):
        for case, refused, ended in zip(CHANGED, others[::2], others[1::2], strict=True):
            assert re.search("ranks sum (only )?the gradients of", refused), case
            assert ended == whole, case
