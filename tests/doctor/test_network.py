"""Examinations of three hosts with network stacks of their own, one of which is worse off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from doctor.network import Network, network, on_hosts


def examined(hosts: Network, folder: Path) -> list[dict[str, Any]]:
    """The lines, which all hosts agree on."""
    place = f"{hosts.address(2)}:29400"
    line = ["-m", "lockstep", "doctor", "--nproc", "1", "--nnodes", "3", "--rdzv", place, "--run-dir", str(folder), "--json"]
    ended = on_hosts(hosts, line, cwd=folder)
    assert [each.returncode for each in ended] == [1] * 3, ended[0].stderr
    said = [json.loads(each.stdout)["lines"] for each in ended]
    assert said[0] == said[1] == said[2]
    assert [line["verdict"] for line in said[0] if line["section"] in ("collectives", "meeting")].count("wrong") == 0
    assert [line["verdict"] for line in said[0] if line["check"] == "shared"] == ["ok"]
    lines: list[dict[str, Any]] = said[0]
    return lines


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_link_of_less_than_a_tenth_of_the_bandwidth_is_named(tmp_path: Path) -> None:
    with network(3) as hosts:
        hosts.limit(1, 3, megabits=200)
        lines = examined(hosts, tmp_path)
    (line,) = [line for line in lines if line["section"] == "links" and line["verdict"] == "slow"]
    assert line["check"] == "host1 to host3"
    assert line["found"].startswith("bandwidth ")
    assert "ethtool" in line["remedy"]


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_host_with_added_delay_is_named(tmp_path: Path) -> None:
    with network(3) as hosts:
        hosts.delay(3, milliseconds=2)
        lines = examined(hosts, tmp_path)
    found = [line for line in lines if line["section"] == "links" and line["verdict"] == "slow"]
    assert {line["check"] for line in found} == {"host3"}
    assert any(line["found"].startswith("all its links: latency ") for line in found)
