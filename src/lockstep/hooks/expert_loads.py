"""The hook that records how many tokens each expert of a mixture-of-experts layer gets."""

from __future__ import annotations

from lockstep.logging.metrics import StepRows
from lockstep.logging.run_files import EXPERTS
from lockstep.model.expert.balance import relative_load
from lockstep.training.balance import ExpertBalance
from lockstep.training.hook import ControlHook
from lockstep.training.run import Run

DEAD_AFTER_STEPS = 100
"""Number of consecutive global batches without a token after which an expert counts as dead."""
PREFIX = "load/"


class ExpertLoads(ControlHook):
    """Records the number of tokens of each expert without a collective. Every rank has the numbers
    of the global batch."""

    def __init__(self) -> None:
        self._rows: StepRows | None = None
        self._dead: set[tuple[str, int]] = set()

    def before_steps(self, run: Run) -> None:
        balance = run.training.modules[0].balance
        if balance is None:
            return
        pairs = {layer.name: layer.router for layer in balance.layers}
        run.event("experts-watched", routers=pairs)
        self._rows = self._rows or StepRows(run.dir / EXPERTS)
        if run.rank == 0:
            self._rows.resume(run.step)

    def between_steps(self, run: Run) -> None:
        balance = run.training.modules[0].balance
        if balance is None or not run.is_logging_step:
            return
        loads = balance.of_layers(balance.loads.cpu())
        rows = {
            layer.name: relative_load(load).tolist()
            for layer, load in zip(balance.layers, loads, strict=True)
        }
        for name, row in rows.items():
            run.training.measured[f"{PREFIX}{name}"] = max(row)
        if run.rank == 0 and self._rows is not None:
            rounded = {name: [round(each, 4) for each in row] for name, row in rows.items()}
            self._rows.write(run.step, loads=rounded)
        self._report_dead(run, balance)

    def on_end(self, run: Run) -> None:
        if self._rows is not None:
            self._rows.close()

    def _report_dead(self, run: Run, balance: ExpertBalance) -> None:
        dead = {
            (layer.name, expert)
            for layer, steps in zip(balance.layers, balance.idle_steps(), strict=True)
            for expert, idle in enumerate(steps)
            if idle >= DEAD_AFTER_STEPS
        }
        newly_dead = dead - self._dead
        self._dead = dead
        if newly_dead:
            layers = {layer.name: [] for layer in balance.layers}  # type: dict[str, list[int]]
            for name, expert in sorted(newly_dead):
                layers[name].append(expert)
            run.event(
                "experts-dead",
                steps=DEAD_AFTER_STEPS,
                experts={name: each for name, each in layers.items() if each},
                reason="no token chose them; a higher Balance.coefficient, or bias_rate, helps",
            )
