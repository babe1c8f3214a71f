"""Sheets of measured accelerators: what is written is read back, and costs what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from lockstep.planner.machines.costs import collective_seconds
from lockstep.planner.machines.hardware import (
    Cluster,
    Device,
    Link,
    load_device,
    load_link,
    parse_target,
)
from lockstep.planner.machines.measuring_gpu import GpuReadings, as_toml, link_of, link_path
from lockstep.planner.trace import Collective, CollectiveKind

READINGS = GpuReadings(
    name='My "GPU"',
    generation="Hopper",
    memory_bytes=80 * 10**9,
    multiprocessors=132,
    matmul={"bfloat16": 8e14, "float32": 5e13, "tf32": 4e14},
    attention={"flash": 4e14},
    attention_dtype="bfloat16",
    copied_bytes_per_second=3e12,
    launch_seconds=2e-6,
)
COLLECTIVES: dict[str, CollectiveKind] = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
}
SIZES = (2**10, 2**20, 2**28)


def written(path: Path, sheet: Device | Link) -> str:
    path.write_text(as_toml(sheet), encoding="utf-8")
    return str(path)


def test_a_written_device_is_read_back(tmp_path: Path) -> None:
    device = READINGS.device(devices_per_node=8, inside="NVLink4")
    assert load_device(written(tmp_path / "mine.toml", device)) == device


def test_rates_are_what_was_reached_and_a_kernel_that_is_missing_is_as_fast_as_the_one_that_is_there() -> (
    None
):
    device = READINGS.device(devices_per_node=1, inside="PCIe4")
    assert device.peak_flops["bfloat16"] * device.matmul_fraction == 8e14
    assert device.attention_fraction == {"flash": 0.5, "cudnn": 0.5}
    assert device.memory_bytes_per_second * device.memory_fraction == 3e12
    faster = replace(READINGS, attention={"flash": 2e14, "cudnn": 4e14}).device(
        devices_per_node=1, inside="PCIe4"
    )
    assert faster.attention_fraction == {"flash": 0.25, "cudnn": 0.5}


def test_a_target_names_the_device_and_its_link_by_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("mine.toml")
    link = link_of("mine link", {2: rows(2, load_link("NVLink4"))})
    written(link_path(path), link)
    written(path, READINGS.device(devices_per_node=8, inside=str(link_path(path))))
    cluster = parse_target("16 x mine.toml over Ethernet")
    assert (cluster.count, cluster.devices_per_node, cluster.inside) == (16, 8, link)


# Links


def rows(ranks: int, link: Link) -> list[dict[str, Any]]:
    """What the doctor would measure on this link."""
    cluster = Cluster(
        READINGS.device(devices_per_node=ranks, inside="PCIe4"), ranks, ranks, link, link
    )
    barrier = {"collective": "barrier", "size_bytes": 0, "seconds": 1e-5}
    timed = [
        {
            "collective": name,
            "size_bytes": size,
            "seconds": collective_seconds(Collective(kind, ranks, 1, size), cluster),
        }
        for name, kind in COLLECTIVES.items()
        for size in SIZES
    ]
    return [barrier, *timed]


LINKS = st.builds(
    Link,
    name=st.just("any"),
    bytes_per_second=st.floats(1e9, 1e12),
    fraction=st.just(1.0),
    latency_seconds=st.floats(1e-6, 1e-4),
    hop_seconds=st.floats(0, 1e-5),
    few_ranks=st.floats(0, 1),
    all_reduce_gain=st.floats(0.8, 2),
    source=st.just("nowhere"),
)


@given(LINKS, st.sampled_from([(2,), (2, 4), (2, 8)]), st.sampled_from(list(COLLECTIVES.values())))
def test_a_measured_link_costs_what_was_measured(
    link: Link, measured: Sequence[int], kind: CollectiveKind
) -> None:
    found = link_of("found", {ranks: rows(ranks, link) for ranks in measured})
    for ranks in measured:
        for size in (2**22, 2**26, 2**28):
            cluster = Cluster(
                READINGS.device(devices_per_node=8, inside="PCIe4"), ranks, ranks, link, link
            )
            expected = collective_seconds(Collective(kind, ranks, 1, size), cluster)
            assert collective_seconds(
                Collective(kind, ranks, 1, size), replace(cluster, inside=found)
            ) == pytest.approx(expected, rel=0.15)


def test_a_small_group_that_is_faster_than_a_large_one_has_no_penalty() -> None:
    link = replace(load_link("NVLink4"), few_ranks=0.0)
    slower = [{**row, "seconds": 1.5 * row["seconds"]} for row in rows(8, link)]
    found = link_of("found", {2: rows(2, link), 8: slower})
    assert found.few_ranks == 0
    assert found.bytes_per_second * found.fraction == pytest.approx(
        link.bytes_per_second * link.fraction / 1.5, rel=0.02
    )
