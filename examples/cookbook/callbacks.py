"""Hooks: what is logged, evaluated, kept and stopped, beside the recipe.

lockstep run --nproc 2 examples/cookbook/callbacks.py
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep as ls

generator = torch.Generator().manual_seed(0)
x = torch.randn(256, 6, generator=generator)
y = (x[:, :1] * x[:, 1:2]).tanh()
probe = x[:4]


class Watch(ls.Hook):
    """Logs the largest gradient, evaluates when the training loss has halved, and writes some
    outputs."""

    def __init__(self) -> None:
        self.halved_at: float | None = None

    def after_backward(self, run: Any, model: nn.Module) -> None:
        if run.is_logging_step:
            norms = run.gradient_norms(model)
            run.log({"largest_gradient": max(norms.values())})

    def after_step(self, run: Any) -> None:
        if self.halved_at is None:
            self.halved_at = run.loss
        if run.loss < self.halved_at / 2:
            self.halved_at = run.loss
            run.event("loss-halved", loss=run.loss, valid=run.evaluate()["loss"])

    def after_evaluation(self, run: Any, metrics: dict[str, float]) -> None:
        # a metric of one's own, for Saving(best=) too
        metrics["loss_squared"] = metrics["loss"] ** 2
        run.model.eval()
        with torch.no_grad():
            outputs = run.model(probe)  # on every rank: under shard the forward has collectives
        run.model.train()
        if run.rank == 0:
            (run.dir / f"outputs-{run.step}.json").write_text(
                json.dumps(outputs.flatten().tolist())
            )

    def state_dict(self) -> dict[str, Any]:
        return {"halved_at": self.halved_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.halved_at = state["halved_at"]


recipe = ls.Recipe(
    model=lambda: nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 1)),
    data=TensorDataset(x[:192], y[:192]),
    inputs=lambda batch: batch[0],
    loss=lambda output, batch: F.mse_loss(output, batch[1]),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    global_batch=32,
    microbatch=8,
    steps=60,
    evaluation=ls.Evaluation(data=TensorDataset(x[192:], y[192:]), every=10),
)


def train(**options: Any) -> str:
    hooks = [Watch(), ls.EarlyStopping("loss", patience=3), ls.ExponentialMovingAverage(0.95)]
    options = {"hooks": hooks, "saving": ls.Saving(best="loss_squared"), **options}
    return ls.train(recipe, **options).fingerprint


if __name__ == "__main__":
    train()
