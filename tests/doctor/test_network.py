"""Examinations of three hosts with network stacks of their own, one of which is worse off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from doctor.network import Network, network, on_hosts


def diagnosed(hosts: Network, folder: Path) -> list[dict[str, Any]]:
    """Run the doctor on all hosts. Returns the checks, on which all hosts must agree."""
    place = f"{hosts.address(2)}:29400"
    line = [
        "-m",
        "lockstep",
        "doctor",
        "--nproc",
        "1",
        "--nnodes",
        "3",
        "--rdzv",
        place,
        "--run-dir",
        str(folder),
        "--json",
    ]
    ended = on_hosts(hosts, line, cwd=folder)
    assert [each.returncode for each in ended] == [1] * 3, ended[0].stderr
    said = [json.loads(each.stdout)["checks"] for each in ended]
    assert said[0] == said[1] == said[2]
    assert [
        check["verdict"] for check in said[0] if check["section"] in ("collectives", "rendezvous")
    ].count("failed") == 0
    assert [check["verdict"] for check in said[0] if check["check"] == "shared"] == ["ok"]
    checks: list[dict[str, Any]] = said[0]
    return checks


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_link_of_less_than_a_tenth_of_the_bandwidth_is_named(tmp_path: Path) -> None:
    with network(3) as hosts:
        hosts.limit(1, 3, megabits=200)
        checks = diagnosed(hosts, tmp_path)
    (check,) = [
        check
        for check in checks
        if check["section"] == "point-to-point" and check["verdict"] == "slow"
    ]
    assert check["check"] == "host1 to host3"
    assert check["found"].startswith("bandwidth ")
    assert "ethtool" in check["remedy"]


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_host_with_added_delay_is_named(tmp_path: Path) -> None:
    with network(3) as hosts:
        hosts.delay(3, milliseconds=2)
        checks = diagnosed(hosts, tmp_path)
    found = [
        check
        for check in checks
        if check["section"] == "point-to-point" and check["verdict"] == "slow"
    ]
    assert {check["check"] for check in found} == {"host3"}
    assert any(check["found"].startswith("all its links: latency ") for check in found)
