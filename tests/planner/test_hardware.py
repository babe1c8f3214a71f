"""Data sheets of devices and links, and the text that names a cluster. Pure."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from lockstep.base.errors import PlanError
from lockstep.planner.machines import hardware
from lockstep.planner.machines.hardware import (
    known_devices,
    load_device,
    load_link,
    parse_target,
)

FOLDER = Path(hardware.__file__).parent
SHEETS = sorted(FOLDER.glob("devices/*.toml")) + sorted(FOLDER.glob("links/*.toml"))
LINKS = [path.stem for path in SHEETS if path.parent.name == "links"]


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
    fractions = (
        device.matmul_fraction,
        device.memory_fraction,
        *device.attention_fraction.values(),
    )
    assert all(0 < each <= 1 for each in fractions)
    assert device.memory_bytes > 2**31
    assert device.memory_bytes_per_second > 1e9
    assert {device.inside.lower(), device.between.lower()} <= set(LINKS)


@pytest.mark.parametrize("name", LINKS)
def test_a_links_figures_are_possible(name: str) -> None:
    link = load_link(name)
    assert 0 < link.fraction <= 1
    assert 0 < link.latency_seconds < 1e-3
    assert link.all_reduce_gain >= 1


def test_every_name_and_alias_is_one_sheets() -> None:
    for paths in (FOLDER.glob("devices/*.toml"), FOLDER.glob("links/*.toml")):
        sheets = [tomllib.loads(path.read_text(encoding="utf-8")) for path in paths]
        names = [
            re.sub(r"[\s_-]", "", name).lower()
            for sheet in sheets
            for name in [sheet["name"], *sheet["aliases"]]
        ]
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
def test_a_text_names_a_cluster(
    text: str, device: str, count: int, in_node: int, between: str
) -> None:
    cluster = parse_target(text)
    assert (cluster.device.name, cluster.count, cluster.devices_per_node, cluster.between.name) == (
        device,
        count,
        in_node,
        between,
    )


def test_an_unknown_device_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        PlanError,
        match=r"device 'H1000' is not known; known: .*H100.*; or give the path of a \.toml file",
    ):
        parse_target("8 x H1000")


def test_an_unknown_link_is_answered_with_the_known_ones() -> None:
    with pytest.raises(PlanError, match=r"link 'string' is not known; known: .*InfiniBand-NDR"):
        parse_target("8 x H100 over string")


@pytest.mark.parametrize("text", ["", "  ", "8 x ", "0 x H100"])
def test_a_text_that_is_no_target(text: str) -> None:
    with pytest.raises(PlanError):
        parse_target(text)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    text = (
        (FOLDER / "devices" / "h100.toml")
        .read_text(encoding="utf-8")
        .replace('name = "H100"', 'name = "Mine"')
    )
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    assert parse_target(f"16 x {path}").device.name == "Mine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "cannot be read"),
        ('name = "Mine"', "lacks generation"),
        (
            (FOLDER / "links" / "nvlink4.toml").read_text(encoding="utf-8") + "speed = 1\n",
            "unknown keys speed",
        ),
    ],
)
def test_a_file_with_a_fault(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    load = load_link if "unknown" in message else load_device
    with pytest.raises(PlanError, match=message):
        load(str(path))


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("launch_seconds", '"fast"', "it must be a number, 0 or more"),
        ("launch_seconds", "-1e-6", "it must be a number, 0 or more"),
        ("memory_bytes", "-5", "it must be a whole number, above 0"),
        ("memory_bytes", "1.5", "it must be a whole number, above 0"),
        ("multiprocessors", "true", "it must be a whole number, above 0"),
        ("memory_fraction", "nan", "it must be a number, above 0"),
        ("memory_fraction", "inf", "it must be a number, above 0"),
        ("memory_bytes_per_second", "0", "it must be a number, above 0"),
        (
            "attention_fraction",
            '{flash = 0.5, cudnn = 0.5, colour = "red"}',
            "it must be a table of numbers above 0, with at least cudnn, flash",
        ),
        (
            "peak_flops",
            "{bfloat16 = 1e15}",
            "it must be a table of numbers above 0, with at least float32",
        ),
        ("inside", "3", "it must be a string"),
        ("aliases", '"mine"', "it must be a list of strings"),
    ],
)
def test_a_value_that_is_not_possible(tmp_path: Path, key: str, value: str, rule: str) -> None:
    sheet = tomllib.loads((FOLDER / "devices" / "h100.toml").read_text(encoding="utf-8"))
    del sheet[key]
    told = [f"{name} = {_toml(each)}" for name, each in sheet.items()]
    path = tmp_path / "mine.toml"
    path.write_text("\n".join([*told, f"{key} = {value}"]), encoding="utf-8")
    with pytest.raises(PlanError, match=f"{key} = .*; {re.escape(rule)}"):
        load_device(str(path))


def test_a_latency_may_be_zero(tmp_path: Path) -> None:
    text = (FOLDER / "links" / "nvlink4.toml").read_text(encoding="utf-8")
    path = tmp_path / "mine.toml"
    path.write_text(re.sub(r"hop_seconds = .*", "hop_seconds = 0", text), encoding="utf-8")
    assert load_link(str(path)).hop_seconds == 0


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_toml(each)}" for name, each in value.items()) + "}"
    return json.dumps(value)


def test_a_count_after_the_device() -> None:
    with pytest.raises(PlanError, match="the count comes first; write `64 x H100`"):
        parse_target("H100 x 64")


def test_a_count_without_an_x() -> None:
    with pytest.raises(
        PlanError, match="between a count and its device is an x; write `8 x A100-80GB`"
    ):
        parse_target("8 A100-80GB")


def test_a_count_of_what_is_no_device_is_answered_with_one_that_exists() -> None:
    with pytest.raises(
        PlanError,
        match=r"'GPUs' is not a known device; write .* such as `8 x H100`; devices: .*MI300X",
    ):
        parse_target("8 GPUs")


def test_a_cluster_of_fewer_devices_has_smaller_nodes() -> None:
    assert parse_target("64 x H100").of(4) == parse_target("4 x H100")
    assert parse_target("64 x H100").of(16) == parse_target("16 x H100")


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(PlanError, match=r"the device's file 'none\.toml' cannot be read"):
        parse_target("8 x none.toml")
