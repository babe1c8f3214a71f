"""Trains 30 steps with numerics=bitwise, twice if asked to: `in_place.py CASE [RANK STEP]`. On the
first start RANK is killed after STEP. Each step is a line: its process, rank and number.

Cases: "once"; "counts", "counts deep": a hook counts steps, and has no state_dict; "measures": it
evaluates before; "twice": the second training loses the worker; "evaluates": the worker is lost in
an evaluation; "stops": it is stopped instead of killed; "sleeps": it does not go on; "all": all
workers are killed; "slow": the script takes 3 s before it trains; "edits": the script is edited
first; "wrong": from then on the worker computes wrong products; "compiles": a line at the end of
each start says how many functions have been compiled.
"""

import math
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._dynamo import utils  # its counters are no state of the hook that reads them
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.options import WatchdogTimeouts
from lockstep.training.run import Run

case, *killed = sys.argv[1:]
trainings = 0


def almost(layer: nn.Linear, rows: Tensor) -> Tensor:
    return nn.functional.linear(rows, layer.weight, layer.bias) * (1 + 2**-20)


def limit_seconds(timeouts: WatchdogTimeouts, phase: str, usual_seconds: float | None) -> float:
    """As given while a process hangs. Before that, and once it is replaced, a busy machine may be
    slow."""
    hanging = (path.name.partition("-")[2] for path in Path().glob("hangs-*"))
    if not any(os.path.exists(f"/proc/{process}") for process in hanging):
        return math.inf
    return _limit_seconds(timeouts, phase, usual_seconds)


_limit_seconds = WatchdogTimeouts.limit_seconds
if case in ("stops", "sleeps"):
    WatchdogTimeouts.limit_seconds = limit_seconds  # type: ignore[method-assign]


def die_at(run: Run) -> None:
    is_due = (
        trainings == (2 if case == "twice" else 1)
        and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    )
    rank = killed[0] if case == "all" and killed else str(run.rank)
    if is_due and [rank, str(run.step)] == killed:
        if case == "wrong":
            nn.Linear.forward = almost  # type: ignore[method-assign]
            return
        if case == "edits":
            while not list(Path("run/checkpoints").glob("step-*")):  # its recipe will be compared
                time.sleep(0.01)
            text = Path(__file__).read_text()
            Path(__file__).write_text(
                text.replace("return nn.functional", "return 2 * nn.functional")
            )
        if case in ("stops", "sleeps"):
            Path(f"hangs-{os.getpid()}").touch()
        if case == "sleeps":
            time.sleep(1000)
        os.kill(os.getpid(), signal.SIGSTOP if case == "stops" else signal.SIGKILL)


class Watched(ls.Hook):
    count = 0

    def __init__(self) -> None:
        self.counts = {"all": {"steps": 0}}

    def after_step(self, run: Run) -> None:
        time.sleep(0.4 if case == "slow" else 0.0)
        print(f"process {os.getpid()} rank {run.rank} did {run.step}", flush=True)
        if case == "counts":
            self.count += 1
        if case == "counts deep":
            self.counts["all"]["steps"] += 1
        if case != "evaluates":
            die_at(run)

    def before_evaluation(self, run: Run) -> None:
        if case == "evaluates":
            die_at(run)

    def on_end(self, run: Run) -> None:
        if case == "compiles":
            print(
                f"process {os.getpid()} compiled {utils.counters['frames']['total']} functions",
                flush=True,
            )


class Steps(ls.Hook):
    """Counts steps, which the loss reads."""

    def __init__(self) -> None:
        self.count = 0
        self.lock: threading.Lock | None = None

    def on_start(self, run: Run) -> None:
        self.lock = threading.Lock()

    def after_step(self, run: Run) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


steps = Steps()


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(output, batch[1]) * (1 + steps.count / 30)


if case == "slow":
    time.sleep(3)
torch.manual_seed(0)
data = TensorDataset(torch.randn(97, 8), torch.randn(97, 1))
recipe = ls.Recipe(
    model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 1)),
    data=data,
    inputs=lambda batch: batch[0],
    loss=loss,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    global_batch=12,
    microbatch=2,
    steps=30,
    evaluation=None if case == "compiles" else ls.Evaluation(data=data, every=7),
)
if case == "measures":
    ls.evaluate(recipe, plan="numerics=bitwise")
for _ in range(2 if case == "twice" else 1):
    trainings += 1
    steps.count = 0
    ls.train(recipe, plan="numerics=bitwise", hooks=[Watched(), steps])
