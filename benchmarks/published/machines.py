"""The devices and networks that published rows were measured on, as the planner's data sheets know
them."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from lockstep.planner.machines.hardware import Cluster, Device, load_device, load_link
from published.rows import DATA, Row

NO_SHEET = re.compile(r"PCIE|NVL(?!INK|\d)|MIG\b", re.IGNORECASE)
"""Variants of a device with another power, clock or link than that of the data sheet of this
name."""
SHEETS = (
    (r"H100.*(HBM2E|9[456] ?GI?B)", "H100-HBM2e"),
    (r"A100.*40 ?GI?B", "A100-40GB"),
    (r"G?B300", "GB200"),
    (r"BLACKWELL.*18[4-9] ?GI?B", "GB200"),
    (r"BLACKWELL", "B200"),
    ("A100", "A100-80GB"),
    ("RTX ?[45]090|RTX ?A6000", ""),
    ("H100|H200|GB200|B200|V100|A6000|A10G|L40S|L4|T4|A800|H800|H20|MI300X|MI325X", ""),
)
"""The first pattern found as a word of the text, and the device's name in the data sheets; empty:
the text found."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is published of the machines of a source, and its rows do not say."""

    source: str
    gpus: str
    """Part of the text of the device in the rows that these facts are about."""
    evidence: str
    device: str = ""
    link: str = ""
    """Name of the link between nodes."""
    network_gbit_per_node: float | None = None


@cache
def known_facts(path: Path = DATA / "clusters.toml") -> tuple[Facts, ...]:
    """Return the facts in the file."""
    return tuple(
        Facts(**table) for table in tomllib.loads(path.read_text(encoding="utf-8"))["clusters"]
    )


def facts_of(source: str, gpu: str) -> Facts | None:
    """Return what is known of the machines of a source's rows with this device."""
    return next(
        (each for each in known_facts() if source.startswith(each.source) and each.gpus in gpu),
        None,
    )


def device_name(source: str, gpu: str) -> str | None:
    """Return the data sheet of the device that a row's text names; None if there is none."""
    facts = facts_of(source, gpu)
    if facts and facts.device:
        return facts.device
    text = re.sub(r"[\s_-]+", " ", re.sub(r"^\s*\d+\s*[x×*]\s*", "", gpu).upper())
    if NO_SHEET.search(text):
        return None
    for pattern, sheet in SHEETS:
        if found := re.search(rf"(?<![A-Z0-9])({pattern})(?![A-Z0-9]*[0-9])", text):
            return sheet or re.sub("RTX A", "A", found[1]).replace(" ", "")
    return None


def device_of(row: Row) -> Device:
    """Return the row's device."""
    name = device_name(row.source, row.gpu)
    assert name, "rows with other devices are excluded"
    return load_device(name)


@cache
def cluster_of(row: Row) -> Cluster:
    """Return the row's cluster: with its network where that is stated, else that of the vendor's
    systems."""
    device, facts = device_of(row), facts_of(row.source, row.gpu)
    between = load_link(facts.link if facts and facts.link else device.between)
    stated = row.node_bytes_per_second
    if stated is None and facts and facts.network_gbit_per_node:
        stated = facts.network_gbit_per_node / 8 * 1e9
    if stated:
        between = replace(between, bytes_per_second=stated / device.devices_per_node)
    return Cluster(
        device,
        row.world,
        min(row.world, device.devices_per_node),
        load_link(device.inside),
        between,
    )
