"""The example for Kubernetes against the fields that it uses of the operator's API, and its command
against ours. No cluster."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from lockstep.cli.run import command
from lockstep.launch.machines import Machines
from lockstep.options import LaunchOptions

JOB = Path(__file__).resolve().parents[2] / "examples" / "kubernetes" / "pytorchjob.yaml"
TOLD = {"PET_NNODES": "2:4", "PET_RDZV_ENDPOINT": "gpt-worker-0:23456"}
"""By the operator (1.8), to the containers of a job whose `elasticPolicy` asks for two to four
workers."""

TEXT, NUMBER = {"type": "string"}, {"type": "integer", "minimum": 0}


def fields(*required: str, **kinds: Any) -> dict[str, Any]:
    """An object of these fields and no other; a name may end in _, which is not part of it."""
    properties = {name.removesuffix("_"): kind for name, kind in kinds.items()}
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def many(kind: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": kind, "minItems": 1}


CONTAINER = fields(
    "name",
    "image",
    name={"const": "pytorch"},
    image=TEXT,
    command=many(TEXT),
    args=many(TEXT),
    ports=many(
        fields("name", "containerPort", name={"const": "pytorchjob-port"}, containerPort=NUMBER)
    ),
    resources=fields(
        limits={
            "type": "object",
            "additionalProperties": {"type": "string", "pattern": r"^\d+([KMGT]i)?$"},
        }
    ),
    volumeMounts=many(fields("name", "mountPath", name=TEXT, mountPath=TEXT)),
)
VOLUME = fields(
    "name",
    name=TEXT,
    persistentVolumeClaim=fields("claimName", claimName=TEXT),
    emptyDir=fields(medium={"enum": ["", "Memory"]}, sizeLimit=TEXT),
)
POD = fields(
    "containers",
    containers=many(CONTAINER),
    volumes=many(VOLUME),
    terminationGracePeriodSeconds=NUMBER,
)
REPLICAS = fields(
    "template",
    replicas=NUMBER,
    restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
    template=fields("spec", spec=POD),
)
SCHEMA = fields(
    "apiVersion",
    "kind",
    "metadata",
    "spec",
    apiVersion={"const": "kubeflow.org/v1"},
    kind={"const": "PyTorchJob"},
    metadata=fields("name", name={"type": "string", "pattern": "^[a-z][a-z0-9-]*$"}),
    spec=fields(
        "pytorchReplicaSpecs",
        elasticPolicy=fields(
            rdzvBackend={"enum": ["c10d", "etcd", "etcd-v2"]},
            minReplicas=NUMBER,
            maxReplicas=NUMBER,
            maxRestarts=NUMBER,
            rdzvPort=NUMBER,
        ),
        runPolicy=fields(
            backoffLimit=NUMBER, cleanPodPolicy={"enum": ["", "All", "Running", "None"]}
        ),
        pytorchReplicaSpecs=fields(Master=REPLICAS, Worker=REPLICAS),
    ),
)


@pytest.fixture
def job() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(JOB.read_text(encoding="utf-8"))
    return found


def test_the_example_has_the_fields_of_the_api(job: dict[str, Any]) -> None:
    jsonschema.validate(job, SCHEMA)
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0][
        "arguments"
    ] = []
    with pytest.raises(jsonschema.ValidationError, match="'arguments' was unexpected"):
        jsonschema.validate(job, SCHEMA)


def test_its_command_is_one_of_ours_and_its_volumes_are_there(job: dict[str, Any]) -> None:
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    (container,) = pod["containers"]
    line = [
        re.sub(r"\$\((\w+)\)", lambda found: TOLD[found[1]], word)
        for word in (*container["command"], *container["args"])
    ]
    assert line[:2] == ["lockstep", "run"]
    given = command.make_context("lockstep run", line[2:]).params
    host, _, port = TOLD["PET_RDZV_ENDPOINT"].partition(":")
    assert Machines.parse(LaunchOptions(nnodes=given["nnodes"], rdzv=given["rdzv"])) == Machines(
        2, 4, host, int(port)
    )
    assert host == f"{job['metadata']['name']}-worker-0"
    assert container["ports"][0]["containerPort"] == int(port)
    elastic = job["spec"]["elasticPolicy"]
    assert TOLD["PET_NNODES"] == f"{elastic['minReplicas']}:{elastic['maxReplicas']}"
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    assert given["run_dir"].startswith(
        tuple(mount["mountPath"] for mount in container["volumeMounts"])
    )
