"""Trainings that people reported to learn something else on several processes: right here, or
refused with a remedy that is right on one process and on two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import default_collate
from training.subjects import FEATURES, OUTPUTS, each_of, recipe

import lockstep as ls
from lockstep.base.errors import DataError
from lockstep.testing.pool import WorkerPool

BITWISE = {
    "replicate=1,numerics=bitwise": 1,
    "replicate=2,numerics=bitwise": 2,
    "shard=2,numerics=bitwise": 2,
}


def train(run_dir: str, plan: str, make: Callable[[], dict[str, Any]]) -> str:
    changes = make()
    hooks = changes.pop("hooks", [])
    return ls.train(recipe(steps=4, **changes), run_dir=run_dir, plan=plan, hooks=hooks).fingerprint


class PerLayer(ls.Hook):
    """Clips each gradient by its own norm, and bounds each parameter by its mean, as numbers."""

    def after_backward(self, run: Any, model: nn.Module) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            norm = parameter.grad.norm().item()
            if norm > 0.05:
                parameter.grad.mul_(0.05 / norm)

    @torch.no_grad()
    def after_step(self, run: Any) -> None:
        for parameter in run.model.parameters():
            mean = float(parameter.abs().mean())
            if parameter.abs().sum() > 4.0:
                parameter.mul_(1.0 - 0.1 * mean)


def clipped() -> dict[str, Any]:
    return {
        "hooks": [PerLayer()],
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.5),
    }


def test_a_number_from_a_sharded_tensor_is_that_of_the_whole(
    pool: WorkerPool, tmp_path: Path
) -> None:
    train(str(tmp_path / "one"), "replicate=1", clipped)
    expected = load_file(tmp_path / "one" / "model.safetensors")
    for plan in ("shard=2", "tensor=2"):
        pool.run(2, train, str(tmp_path / plan), plan, cut if plan == "tensor=2" else clipped)
        for name, value in load_file(tmp_path / plan / "model.safetensors").items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)


def cut() -> dict[str, Any]:
    return {**clipped(), "tensor": {"0": "colwise", "2": "rowwise"}}


class Table(nn.Module):
    def __init__(self, max_norm: float | None = 0.5) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(48, 8, max_norm=max_norm), nn.Linear(8, OUTPUTS)

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.table(index))


def inputs(batch: Sequence[Tensor]) -> Tensor:
    return batch[0]


def loss(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
    return (output - batch[2]).square().mean()


def renormalized_in_the_forward() -> dict[str, Any]:
    return {"model": Table, "inputs": inputs, "loss": loss}


class Renormalize(ls.Hook):
    def on_start(self, run: Any) -> None:
        self.after_step(run)

    @torch.no_grad()
    def after_step(self, run: Any) -> None:
        weight = run.model.table.weight
        weight.mul_((0.5 / weight.norm(dim=1, keepdim=True)).clamp(max=1.0))


def renormalized_in_a_hook() -> dict[str, Any]:
    return {"model": lambda: Table(None), "inputs": inputs, "loss": loss, "hooks": [Renormalize()]}


class Estimating(torch.optim.Optimizer):
    """Estimates its step size from all gradients, in the way of D-Adaptation and Prodigy."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0, "size": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        moved, seen = 0.0, 0.0
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["start"], state["sum"] = parameter.clone(), torch.zeros_like(parameter)
                state["sum"].add_(parameter.grad)
                moved += (parameter.grad * (state["start"] - parameter)).sum().item()
                seen += state["sum"].abs().sum().item()
        for group in self.param_groups:
            group["size"] = max(group["size"], 2.0 * moved / seen if seen else 0.0)
            for parameter in group["params"]:
                parameter.sub_(parameter.grad.sign(), alpha=group["size"])


def estimated() -> dict[str, Any]:
    return {"optimizer": lambda model: Estimating(model.parameters())}


class Masking:
    """Masks with a generator of its own, or with torch's default one."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator

    def __call__(self, samples: Sequence[Any]) -> list[Tensor]:
        index, features, target = default_collate(list(samples))
        kept = torch.rand(len(index), FEATURES, generator=self.generator) > 0.3
        return [index, features * kept, target]


def masked_by_its_own() -> dict[str, Any]:
    return {"collate": Masking(torch.Generator().manual_seed(0))}


class Unsupported(torch.optim.SGD):
    """Uses an operation that torch does not have for DTensors, as Adan of pytorch_optimizer
    does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                torch._foreach_copy_([torch.empty_like(parameter.grad)], [parameter.grad])
        return super().step(closure)


def unsupported() -> dict[str, Any]:
    return {"optimizer": lambda model: Unsupported(model.parameters(), lr=0.1)}


def masked() -> dict[str, Any]:
    return {"collate": Masking(None)}


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], tuple[str, ...], set[str]]] = {
    "max_norm": (
        renormalized_in_the_forward,
        (
            "RecipeError: the model's forward",
            " changed its parameter 'table.weight'",
            " in a hook's after_step",
        ),
        set(BITWISE),
    ),
    "all gradients": (
        estimated,
        (
            "RecipeError: Estimating with shard=2; its update of a tensor depends on other tensors",
            " use replicate",
        ),
        {"shard=2,numerics=bitwise"},
    ),
    "an operation": (
        unsupported,
        (
            "RecipeError: Unsupported.step() with sharded parameters (DTensors) raises"
            " NotImplementedError: Operator aten._foreach_copy_.default does not have",
            " use replicate",
        ),
        {"shard=2,numerics=bitwise"},
    ),
    "its own generator": (
        masked_by_its_own,
        (
            "DataError: data: the batch of collate[1] on rank 0 has other bits each time",
            " draw from these generators",
        ),
        set(BITWISE),
    ),
}
REMEDIES = {
    "max_norm": (renormalized_in_a_hook, set(BITWISE)),
    "all gradients": (estimated, set(BITWISE) - {"shard=2,numerics=bitwise"}),
    "an operation": (unsupported, set(BITWISE) - {"shard=2,numerics=bitwise"}),
    "its own generator": (masked, set(BITWISE)),
}


def in_stages() -> dict[str, Any]:
    return {**estimated(), "inputs": lambda batch: batch[1], "loss": loss}


def trained(run_dir: str, processes: int) -> dict[str, list[str]]:
    """What refused trainings say and what mended ones give, by name; and of the pipeline."""
    found: dict[str, list[str]] = {}
    for kind, table in (
        ("refused", {name: (row[0], row[2]) for name, row in REFUSED.items()}),
        ("mended", REMEDIES),
    ):
        for name, (make, plans) in table.items():
            mine = [(plan, make) for plan in sorted(plans) if BITWISE[plan] == processes]
            found[f"{kind}: {name}"] = each_of(
                train, f"{run_dir}/{kind}/{name}", mine, may_refuse=kind == "refused"
            )
    if processes == 2:
        found["pipeline"] = each_of(train, f"{run_dir}/pipeline", [("pipeline=2", in_stages)])
    return found


def test_what_would_be_another_model_is_refused_and_the_remedy_is_one_model(
    pool: WorkerPool, tmp_path: Path
) -> None:
    ranks = [trained(str(tmp_path / "1"), 1), *pool.run(2, trained, str(tmp_path / "2"), 2)]
    for name, (_, words, _) in REFUSED.items():
        for said in (each for rank in ranks for each in rank[f"refused: {name}"]):
            assert said.startswith(words[0]), (name, said)
            assert all(each in said for each in words), (name, said)
        assert len({each for rank in ranks for each in rank[f"mended: {name}"]}) == 1, name
    for rank in ranks[1:]:
        assert rank["pipeline"][0].startswith(
            "RecipeError: Estimating with pipeline=2; its update of a tensor depends on other"
        )


class Labels(torch.utils.data.Dataset[Any]):
    """The rows of `recipe`, with targets that a hook may change."""

    def __init__(self) -> None:
        self.rows = recipe().data
        self.targets = self.rows.tensors[2].clone()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return (*self.rows[index][:2], self.targets[index])


class Relabels(ls.Hook):
    """Makes the model's outputs the targets after step 2, and fails after step 3 if it is asked
    to."""

    def __init__(self, data: Labels, fails: bool) -> None:
        self.data, self.fails = data, fails

    @torch.no_grad()
    def after_step(self, run: Any) -> None:
        if run.step == 2:
            self.data.targets = run.model(self.data.rows.tensors[1]).clone()
        if run.step == 3 and self.fails:
            raise RuntimeError("on purpose")


class KeepsLabels(Relabels):
    def state_dict(self) -> dict[str, Any]:
        return {"targets": self.data.targets}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.data.targets = state["targets"]


def relabelled(run_dir: str, plan: str, kind: type[Relabels], fails: bool) -> str:
    data = Labels()
    saving = ls.Saving(every=2)
    return ls.train(
        recipe(steps=6, data=data),
        run_dir=run_dir,
        plan=plan,
        hooks=[kind(data, fails)],
        saving=saving,
    ).fingerprint


def relabelled_each(run_dir: str, plan: str) -> list[str]:
    """Whole, failed and resumed, with a hook that keeps the labels and with one that does not."""
    found = []
    for kind in (Relabels, KeepsLabels):
        found.append(relabelled(f"{run_dir}/whole-{kind.__name__}", plan, kind, False))
        with pytest.raises(RuntimeError, match="on purpose"):
            relabelled(f"{run_dir}/{kind.__name__}", plan, kind, True)
        try:
            found.append(relabelled(f"{run_dir}/{kind.__name__}", plan, kind, False))
        except DataError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("plan", ["replicate=1,numerics=bitwise", "replicate=2,numerics=bitwise"])
def test_a_dataset_that_a_hook_has_changed_is_resumed_as_it_was_saved(
    pool: WorkerPool, tmp_path: Path, plan: str
) -> None:
    size = BITWISE[plan]
    for _, refused, whole, resumed in (
        [relabelled_each(str(tmp_path), plan)]
        if size == 1
        else pool.run(size, relabelled_each, str(tmp_path), plan)
    ):
        assert refused.startswith("data: sample 0[2] has changed since the checkpoint was saved")
        assert "state_dict" in refused
        assert resumed == whole
