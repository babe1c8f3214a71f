"""Data sheets of devices and links, and the text that names a cluster. Pure."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from lockstep.base.errors import PlanError
from lockstep.planner.machines import hardware
from lockstep.planner.machines.hardware import known_devices, known_links, load_device, load_link, parse_target

FOLDER = Path(hardware.__file__).parent
SHEETS = sorted(FOLDER.glob("devices/*.toml")) + sorted(FOLDER.glob("links/*.toml"))


@pytest.mark.parametrize("path", SHEETS, ids=lambda path: path.stem)
def test_a_sheet_loads_and_names_its_source(path: Path) -> None:
    load = load_device if path.parent.name == "devices" else load_link
    sheet = load(str(path))
    assert len(sheet.source.strip()) > 20
    assert path.stem == sheet.name.lower()


@pytest.mark.parametrize("name", known_devices())
def test_a_devices_figures_are_possible(name: str) -> None:
    device = load_device(name)
    assert {"bfloat16", "float16", "float32", "float64"} <= set(device.peak_flops)
    assert set(device.attention_fraction) == {"flash", "cudnn"}
    fractions = (device.matmul_fraction, device.memory_fraction, *device.attention_fraction.values())
    assert all(0 < each <= 1 for each in fractions)
    assert device.memory_bytes > 2**31
    assert device.memory_bytes_per_second > 1e9
    assert {device.inside, device.between} <= set(known_links())


@pytest.mark.parametrize("name", known_links())
def test_a_links_figures_are_possible(name: str) -> None:
    link = load_link(name)
    assert 0 < link.fraction <= 1
    assert 0 < link.latency_seconds < 1e-3
    assert link.all_reduce_gain >= 1


def test_every_name_and_alias_is_one_sheets() -> None:
    for paths in (FOLDER.glob("devices/*.toml"), FOLDER.glob("links/*.toml")):
        sheets = [tomllib.loads(path.read_text(encoding="utf-8")) for path in paths]
        names = [re.sub(r"[\s_-]", "", name).lower() for sheet in sheets for name in [sheet["name"], *sheet["aliases"]]]
        assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("text", "device", "count", "in_node", "between"),
    [
        ("64 x H100", "H100", 64, 8, "InfiniBand-NDR"),
        ("8 x A100-80GB", "A100-80GB", 8, 8, "InfiniBand-HDR"),
        ("8xa100", "A100-80GB", 8, 8, "InfiniBand-HDR"),
        ("16 × B200 over Ethernet", "B200", 16, 8, "Ethernet-100G"),
        ("H200", "H200", 1, 1, "InfiniBand-NDR"),
        ("4*h100 sxm", "H100", 4, 4, "InfiniBand-NDR"),
        ("144 x GB200", "GB200", 144, 72, "InfiniBand-NDR"),
    ],
)
def test_a_text_names_a_cluster(text: str, device: str, count: int, in_node: int, between: str) -> None:
    cluster = parse_target(text)
    assert (cluster.device.name, cluster.count, cluster.devices_per_node, cluster.between.name) == (device, count, in_node, between)


def test_an_unknown_device_is_answered_with_the_known_ones() -> None:
    with pytest.raises(PlanError, match=r"device 'H1000' is not known; known: .*H100.*; or give the path of a \.toml file"):
        parse_target("8 x H1000")


def test_an_unknown_link_is_answered_with_the_known_ones() -> None:
    with pytest.raises(PlanError, match=r"link 'string' is not known; known: .*InfiniBand-NDR"):
        parse_target("8 x H100 over string")


@pytest.mark.parametrize("text", ["", "  ", "8 x ", "0 x H100"])
def test_a_text_that_is_no_target(text: str) -> None:
    with pytest.raises(PlanError):
        parse_target(text)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    text = (FOLDER / "devices" / "h100.toml").read_text(encoding="utf-8").replace('name = "H100"', 'name = "Mine"')
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    assert parse_target(f"16 x {path}").device.name == "Mine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "cannot be read"),
        ('name = "Mine"', "lacks generation"),
        ((FOLDER / "links" / "nvlink4.toml").read_text(encoding="utf-8") + "speed = 1\n", "unknown keys speed"),
    ],
)
def test_a_file_with_a_fault(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    load = load_link if "unknown" in message else load_device
    with pytest.raises(PlanError, match=message):
        load(str(path))


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(PlanError, match=r"the device's file 'none\.toml' cannot be read"):
        parse_target("8 x none.toml")
