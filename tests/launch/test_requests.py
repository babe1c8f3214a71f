"""A request is a typed file that a variable names; a damaged one is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ran

from lockstep.audit.request import AuditRequest
from lockstep.base.errors import LaunchError
from lockstep.evaluation import EvaluateRequest
from lockstep.planner.prediction import PlanRequest
from lockstep.scripts.request import ScriptRequest, answered_by
from lockstep.search.request import TrialRequest
from lockstep.verify.jobs import TraceRequest

REQUESTS: list[ScriptRequest] = [
    AuditRequest(folder=Path("/tmp/a folder"), steps=3, roots=("/a:b", "/c"), runner=7),
    EvaluateRequest(weights="model.safetensors"),
    PlanRequest(
        target="this", plans=("shard=2",), memory_bytes=None, slots=2, folder="/f", is_here=True
    ),
    TrialRequest(calls="train", metric="loss", can_be_pruned=False, until=3, channel=4),
    TraceRequest(folder=Path("/f"), steps=3, noise_seed=0, float64=True, microbatch=2),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda each: type(each).__name__)
def test_what_is_asked_is_what_is_read(request_: ScriptRequest, tmp_path: Path) -> None:
    environ = request_.write(tmp_path)
    assert list(environ) == ["LOCKSTEP_REQUEST"]
    for kind in map(type, REQUESTS):
        assert kind.read(environ) == (request_ if kind is type(request_) else None)
    assert type(request_).read({}) is None
    assert answered_by(environ, request_.calls) == request_.answered_by
    assert answered_by(environ, "another") is None
    assert answered_by({}, request_.calls) is None


WHOLE = TraceRequest(folder=Path("/f")).as_json()
DAMAGED = {
    "no file": (None, "No such file or directory"),
    "torn": ('{"calls', "Unterminated string"),
    "a list": ("[]", "it is a list, and not an object"),
    "of nobody": ("{}", "it does not name the module that answers it"),
    "lacks a field": (
        json.dumps(
            {**AuditRequest(folder=Path(), steps=1, roots=()).as_json(), "steps": ...}, default=str
        ),
        "'steps' is 'Ellipsis'",
    ),
    "a number as text": (json.dumps({**WHOLE, "steps": "3"}, default=str), "'steps' is '3'"),
    "a flag as number": (json.dumps({**WHOLE, "float64": 1}, default=str), "'float64' is 1"),
    "of a later version": (json.dumps({**WHOLE, "more": 1}, default=str), "no field 'more'"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_request_is_refused(name: str, tmp_path: Path) -> None:
    text, why = DAMAGED[name]
    if text is not None:
        (tmp_path / "request.json").write_text(text)
    environ = {"LOCKSTEP_REQUEST": str(tmp_path / "request.json")}
    kind = AuditRequest if name == "lacks a field" else TraceRequest
    with pytest.raises(LaunchError) as refused:
        kind.read(environ)
    said = str(refused.value)
    assert f"{environ['LOCKSTEP_REQUEST']} is no request (" in said
    assert why in said
    assert said.endswith("or unset LOCKSTEP_REQUEST")


@pytest.mark.forks
@pytest.mark.parametrize("line", ["ls.train(recipe)", "ls.Session().__enter__()"])
def test_a_script_with_a_damaged_request_ends_with_one_line_and_status_2(
    line: str, tmp_path: Path
) -> None:
    script = (
        "import lockstep as ls, torch\n"
        "recipe = ls.Recipe(model=lambda: torch.nn.Linear(1, 1), data=[torch.ones(1)] * 2,\n"
        "    loss=lambda model, batch: model(batch).sum(), global_batch=1, steps=1,\n"
        "    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))\n" + line
    )
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "request.json").write_text("{")
    environ = {**os.environ, "LOCKSTEP_REQUEST": str(tmp_path / "request.json")}
    ended = ran([sys.executable, "train.py"], cwd=tmp_path, env=environ)
    assert ended.returncode == 2
    assert ended.stderr.startswith("lockstep: LaunchError: LOCKSTEP_REQUEST=")
    assert ended.stderr.count("\n") == 1
    del environ["LOCKSTEP_REQUEST"]
    (tmp_path / "request.json").unlink()
    again = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=environ, check=False)
    assert again.returncode == 0, "the remedy"
