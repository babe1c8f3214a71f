"""The probes see collectives, schedules, seeds, files and modes, and change nothing of a script."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from audit.watched import Watched, added, applied, problems, run, watch, watched
from torch import nn
from torch.optim import lr_scheduler

from lockstep.audit.probes import begin
from lockstep.audit.probes.events import horizon
from lockstep.audit.probes.models import plain
from lockstep.audit.request import AuditRequest
from lockstep.audit.runner import SITE
from lockstep.evidence.rows import Row

pytestmark = [pytest.mark.timeout(180), pytest.mark.forks("watched")]


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    return watched("everything.py", tmp_path_factory.mktemp("records"))


def test_no_probe_fails(everything: Watched) -> None:
    assert problems(everything) == []


def test_parameters_and_states_are_noted_before_and_after(everything: Watched) -> None:
    first, second, third = everything.rows("step", "step")
    assert first["before"].keys() == first["parameters"].keys() == first["applied"].keys()
    assert set(first["parameters"]) == {
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
        "3.weight",
        "3.bias",
    }
    assert first["before"]["0.weight"] != first["parameters"]["0.weight"]
    assert second["before"] == third["before"] == {}
    assert "0.weight/exp_avg" in first["states"]
    assert set(first["buffers"]) == {"1.running_mean", "1.running_var"}
    assert first["made_at"] == everything.line("made")


def test_names_are_without_what_wrappers_add() -> None:
    assert plain("module._orig_mod.layers.0.weight") == "layers.0.weight"


def test_names_keep_what_is_their_own() -> None:
    assert plain("my_module.weight") == "my_module.weight"
    assert plain("_fsdp_wrapped_module.a._checkpoint_wrapped_module.b") == "a.b"


def test_the_rank_and_its_collectives_are_noted(everything: Watched) -> None:
    (rank,) = everything.rows("rank")
    assert (rank["rank"], rank["world_size"]) == (0, 1)
    (reduced,) = everything.rows("collective", "all_reduce")
    assert (reduced["name"], reduced["shape"], reduced["operation"], reduced["ranks"]) == (
        "all_reduce",
        [[2, 3], "float32"],
        "MAX",
        [0],
    )
    assert [row["name"] for row in everything.rows("collective", "object")] == [
        "all_gather_object"
    ], "not those that it is made of"
    assert [(row["name"], row["shape"]) for row in everything.rows("collective", "barrier")] == [
        ("barrier", [])
    ]


def test_a_wrapped_model_is_noted_with_its_reductions(everything: Watched) -> None:
    (wrapped,) = everything.rows("ddp", "wrapped")
    assert wrapped["broadcast_buffers"]
    assert [row["reduces"] for row in everything.rows("ddp_forward")][:4] == [
        True,
        False,
        True,
        True,
    ]


def test_schedules_are_counted_once(everything: Watched) -> None:
    """Not the schedules inside of one, nor the steps that a schedule takes while it is made."""
    rows = everything.rows("schedule", "schedule")
    assert [row["type"] for row in rows] == ["SequentialLR"] * 3
    assert {row["by"] for row in rows} == {"__main__"}
    (adam,) = {row["optimizer"] for row in rows}
    assert adam == everything.rows("step", "step")[0]["optimizer"]
    assert [(row["type"], row["optimizer"]) for row in everything.rows("schedule", "plateau")] == [
        ("ReduceLROnPlateau", adam)
    ]
    (own,) = everything.rows("schedule", "own schedule's step")
    assert (own["type"], own["optimizer"] != adam) == ("Own", True)
    assert len(everything.rows("schedule")) == 5


def test_the_end_of_a_schedule_is_known_where_it_has_one() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    assert horizon(lr_scheduler.CosineAnnealingLR(optimizer, T_max=9)) == 9
    assert horizon(lr_scheduler.LinearLR(optimizer, total_iters=7)) == 7
    assert horizon(lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=5)) == 5
    assert horizon(lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)) is None


def test_seeds_are_noted_with_their_step(everything: Watched) -> None:
    assert [(row["seed"], row["step"]) for row in everything.rows("seed", "seed")] == [(7, 0)]
    assert [(row["seed"], row["step"]) for row in everything.rows("seed", "seed again")] == [(8, 2)]


def test_forwards_that_draw_random_numbers_have_states(everything: Watched) -> None:
    states = [row["state"] for row in everything.rows("backward")]
    assert len(set(states[:4])) == 4
    assert all(row["state_at_batch"] == "" for row in everything.rows("backward", "backward")), (
        "no batch of a loader came"
    )


def test_files_are_noted_with_their_keys(everything: Watched) -> None:
    (save,) = everything.rows("save", "save")
    assert (Path(save["path"]).name, save["step"]) == ("a.pt", 3)
    assert Path(save["path"]).is_absolute()
    assert [Path(row["path"]).name for row in everything.rows("save", "save to a file")] == ["b.pt"]
    assert len(everything.rows("load", "load")) == 1


def counted(row: Row) -> tuple[int, int, int]:
    return row["train"], row["eval"], row["off"]


def test_a_backward_counts_the_modes_of_what_it_comes_to(everything: Watched) -> None:
    assert [counted(row) for row in everything.rows("modes", "backward")] == [(2, 0, 0)] * 3
    (evaluation,) = everything.rows("modes", "backward in eval mode")
    assert counted(evaluation) == (0, 2, 1)
    modes = everything.rows("mode", "evaluation")
    assert [(row["what"], row["training"], row["grad"]) for row in modes] == [
        ("batch_norm", False, False),
        ("dropout", False, False),
    ]


def test_dropout_of_a_frozen_model_is_not_off(everything: Watched) -> None:
    (row,) = everything.rows("modes", "backward through a frozen model")
    assert (row["eval"] > 0, row["off"]) == (True, 0)


def test_a_forward_before_the_next_batch_is_its_backwards(everything: Watched) -> None:
    """An evaluation has come to its end before it: the forward is not of its last batch."""
    assert [
        row["loader"]
        for row in everything.rows("mode", "forward ahead")
        if row["loader"] is not None
    ] == []
    assert [counted(row) for row in everything.rows("modes", "backward of the batch before")] == [
        (1, 0, 0)
    ]
    first = next(
        row for row in everything.rows("mode") if row["training"] and row["what"] == "dropout"
    )
    assert first["mode"] in [row["mode"] for row in everything.rows("mode_reached")]
    (trained,) = everything.rows("backward", "backward of the batch before")
    assert trained["drawn"] != ""
    assert trained["passes"] == [[trained["loader"], trained["pass_number"]]]


def test_what_a_forward_draws_is_told_from_other_draws(everything: Watched) -> None:
    """A recomputation draws the same numbers again: not those of the next forward."""
    (recomputed,), (nothing,), (other,) = [
        everything.rows("backward", mark)
        for mark in ("recomputed", "draws nothing", "after a draw")
    ]
    assert (recomputed["drawn"] != "", nothing["drawn"], nothing["other_draws"]) == (
        True,
        "",
        False,
    )
    assert (other["drawn"], other["other_draws"]) == ("", True)


def test_a_forward_that_is_recomputed_is_no_evaluation(everything: Watched) -> None:
    assert everything.rows("mode", "reentrant") == []
    assert [counted(row) for row in everything.rows("modes", "reentrant")] == [(1, 0, 0), (0, 1, 1)]


def test_the_forward_of_a_wrapped_model_broadcasts_buffers_in_any_mode(everything: Watched) -> None:
    broadcasts = [
        row for row in everything.rows("collective") if "broadcast of buffers" in row["name"]
    ]
    assert [row["line"] for row in broadcasts][:3] == [
        everything.line("backward"),
        everything.rows("backward")[1]["line"],
        everything.line("backward"),
    ]
    assert everything.line("evaluation") in {row["line"] for row in broadcasts}
    assert not any(row["in_backward"] for row in broadcasts)


def test_update_bn_is_no_evaluation(everything: Watched) -> None:
    assert everything.rows("mode", "update_bn") == everything.rows("statistics", "update_bn") == []


def test_a_backward_is_of_all_loaders_of_its_step(everything: Watched) -> None:
    first, second = everything.rows("backward", "backward of two loaders")
    assert len(first["passes"]) == len(second["passes"]) == 2
    assert [
        len(row["passes"]) for row in everything.rows("backward", "backward after an evaluation")
    ] == [1, 1]


def test_running_statistics_are_noted_before_they_are_used(everything: Watched) -> None:
    rows = everything.rows("statistics")
    assert rows[0]["training"]
    assert rows[0]["sketches"][0][-1] == 0.0, "a mean of 0 at first"
    assert rows[1]["sketches"] != rows[0]["sketches"]
    (evaluation,) = everything.rows("statistics", "evaluation")
    assert (evaluation["training"], evaluation["grad"]) == (False, False)


def test_functions_that_the_script_replaces_are_its_own(everything: Watched) -> None:
    assert everything.printed["calls"] == ["save", "step", "loss"]
    assert [Path(row["path"]).name for row in everything.rows("save")][-1] == "c.pt"
    assert len(everything.rows("backward", "loss replaced")) == 1


@pytest.mark.forks
def test_a_sitecustomize_of_the_users_own_is_run_and_torch_is_watched(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine')")
    (tmp_path / "script.py").write_text(
        "import torch\ntorch.ones(1, requires_grad=True).sum().backward()"
    )
    environ = AuditRequest(folder=tmp_path, steps=1, roots=(str(tmp_path),)).write(tmp_path)
    paths = os.pathsep.join([str(SITE), str(tmp_path)])
    done = run(tmp_path / "script.py", tmp_path, {**environ, "PYTHONPATH": paths})
    assert done.stdout.startswith("mine\n"), done.stderr
    assert list(tmp_path.glob("process-*.jsonl"))


KEYWORDS = """
import os, torch
from torch import distributed, nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x, original, wrapper, function):
        return self.layer(x) + original + wrapper + function

class Own(torch.optim.SGD):
    def step(self, closure=None, *, original, scaler, function):
        return super().step(closure)

distributed.init_process_group(
    "gloo", init_method=f"file://{os.environ['FOLDER']}/meeting", rank=0, world_size=1
)
model = nn.parallel.DistributedDataParallel(Model())
optimizer, scaler = Own(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
scaler.scale(model(torch.ones(1, 2), original=1, wrapper=2, function=3).sum()).backward()
scaler.step(optimizer=optimizer, original=1, scaler=2, function=3)
distributed.destroy_process_group()
"""


def test_keywords_of_models_and_optimizers_may_have_any_names(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(KEYWORDS)
    environ = AuditRequest(folder=tmp_path, steps=9, roots=(str(tmp_path),)).write(tmp_path)
    done = run(tmp_path / "script.py", tmp_path, {**environ, "PYTHONPATH": str(SITE)})
    assert done.returncode == 0, done.stderr
    (record,) = tmp_path.glob("process-*.jsonl")
    kinds = [json.loads(line)["kind"] for line in record.read_text().splitlines()]
    assert {"ddp_forward", "step"} <= set(kinds)
    assert "problem" not in kinds


def test_functions_keep_their_defaults(everything: Watched) -> None:
    assert everything.printed["defaults"] == ["dropout"]


def test_torchscript_compiles_what_it_compiles_without_probes(everything: Watched) -> None:
    assert everything.printed["errors"] == []


def test_a_compiled_step_has_no_graph_break_and_its_gradients_are_seen(tmp_path: Path) -> None:
    """`fullgraph=True` raises if a probe breaks the graph."""
    found = watch("compiled.py", tmp_path)
    assert found.status == 0, found.errors
    first, second = found.rows("step", "step")
    assert set(first["applied"]) == {
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
        "3.weight",
        "3.bias",
    }
    for row in (first, second, found.step("step of a compiled model")):
        assert added(row) == pytest.approx(applied(row), rel=1e-4)
    assert len(found.step("step of a compiled model")["losses"]) == 1
    assert problems(found) == []


def test_a_probe_that_fails_is_noted_and_the_script_ends_after_its_steps(tmp_path: Path) -> None:
    found = watch("broken.py", tmp_path, steps=3)
    assert (found.status, found.errors) == (0, "")
    assert found.output.splitlines() == ["before the step"] * 4
    assert len(found.rows("step")) == 3
    assert [row["reason"] for row in found.rows("end")] == ["steps"]
    places = [row["where"] for row in found.rows("problem")]
    assert len(places) == len(set(places)) >= 3, "each probe once"
    texts = problems(found)
    assert all("ZeroDivisionError: a fault of a probe" in text for text in texts)
    assert children_of(found.processes[0][0]["pid"]) == []


def children_of(pid: int) -> list[int]:
    """The processes that run and were started by one that has ended."""
    return list(_started_by(pid))


def _started_by(pid: int) -> Iterator[int]:
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        try:
            parent = int(Path(f"/proc/{entry}/stat").read_bytes().rpartition(b")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            yield int(entry)


def test_the_modules_after_which_probes_are_installed_exist() -> None:
    modules = [name for name in begin.AFTER if not name.startswith("accelerate")]
    assert all(find_spec(name) is not None for name in modules)
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    assert callable(_fsdp_param_group.foreach_reduce)
