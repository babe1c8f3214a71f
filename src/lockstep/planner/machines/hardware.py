"""Reads the data sheets of devices and links from TOML files."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from lockstep.base.errors import PlanError, say
from lockstep.base.torch_import import importing_torch

FOLDER = Path(__file__).parent
MAY_BE_ZERO = ("launch_seconds", "latency_seconds", "hop_seconds", "few_ranks")
NEEDED: Mapping[str, frozenset[str]] = {
    "peak_flops": frozenset({"float32"}),
    "attention_fraction": frozenset({"flash", "cudnn"}),
}
TARGET = re.compile(r"\s*(?:(\d+)\s*[x×*]\s*)?(\S.*?)(?:\s+over\s+(\S.*?))?\s*")
THIS = re.compile(r"\s*(?:(\d+)\s*[x×*]\s*)?this\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one core of a CPU."""

    name: str
    generation: str
    peak_flops: Mapping[str, float] = field(hash=False)
    """FLOP/s of dense matrix products by dtype."""
    matmul_fraction: float
    """Fraction of the peak that the best matrix product reaches."""
    attention_fraction: Mapping[str, float] = field(hash=False)
    """Fraction of the peak that attention on long sequences reaches, by kernel (`flash`,
    `cudnn`)."""
    memory_bytes: int
    memory_bytes_per_second: float
    memory_fraction: float
    launch_seconds: float
    multiprocessors: int
    devices_per_node: int
    inside: str
    between: str
    aliases: tuple[str, ...] = ()
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    name: str
    bytes_per_second: float
    fraction: float
    """Fraction of the bandwidth that large collectives reach."""
    latency_seconds: float
    hop_seconds: float
    """Latency that each rank after the second adds. Between nodes, latency that each doubling of
    the number of nodes adds."""
    few_ranks: float = 0.0
    """Collectives of n ranks take 1 + few_ranks / n times as long, because small groups use fewer
    channels."""
    all_reduce_gain: float = 1.0
    """Rate of an all-reduce inside a node, relative to other collectives. The rate exceeds 1 if the
    switches compute sums."""
    aliases: tuple[str, ...] = ()
    source: str

    @property
    def bandwidth(self) -> float:
        return self.bytes_per_second * self.fraction


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of equal devices, with one kind of link inside nodes and one kind between nodes."""

    device: Device
    count: int
    devices_per_node: int
    inside: Link
    between: Link

    def of(self, count: int) -> Cluster:
        return replace(self, count=count, devices_per_node=min(count, self.devices_per_node))


T = TypeVar("T", Device, Link)


def parse_target(text: str) -> Cluster:
    """Parse a text such as `64 x H100` or `16 x B200 over Ethernet`. A name may be the path of a
    TOML file."""
    match = TARGET.fullmatch(text)
    if not match:
        raise PlanError(
            f"target {text!r}: it must be a count and a device, such as `64 x H100`; devices:"
            f" {', '.join(known_devices())}"
        )
    count, name, link = int(match[1] or 1), match[2], match[3]
    if count < 1:
        raise PlanError(
            f"target {text!r}: the number of devices is {count}, and must be at least 1"
        )
    if match[1] is None and (counted := re.fullmatch(r"(\d+)\s+(\S.*)", name)):
        if is_known_device(counted[2]):
            raise PlanError(
                f"target {text!r}: between a count and its device is an x; write `{counted[1]} x"
                f" {counted[2]}`"
            )
        raise PlanError(
            f"target {text!r}: {counted[2]!r} is not a known device; write a count, an x and a"
            f" device, such as `{counted[1]} x H100`; devices: {', '.join(known_devices())}"
        )
    counted = re.fullmatch(r"(.*\S)\s*x\s*(\d+)", name)
    if counted and is_known_device(counted[1]):
        raise PlanError(
            f"target {text!r}: the count comes first; write `{counted[2]} x {counted[1]}`"
        )
    device = load_device(name)
    inside, between = load_link(device.inside), load_link(link or device.between)
    return Cluster(device, count, min(count, device.devices_per_node), inside, between)


def known_devices() -> list[str]:
    return _names("devices")


def _names(folder: str) -> list[str]:
    return sorted(each["name"] for each in _sheets(folder))


def load_device(name: str) -> Device:
    return _built(Device, _sheet("devices", "device", name), name)


def load_link(name: str) -> Link:
    return _built(Link, _sheet("links", "link", name), name)


def _sheet(folder: str, kind: str, name: str) -> dict[str, Any]:
    if not name.endswith(".toml"):
        if (sheet := _sheet_of(folder, name)) is not None:
            return sheet
        raise PlanError(
            f"{kind} {name!r} is not known; known: {', '.join(_names(folder))}; or give the path of"
            " a .toml file with its figures"
        )
    try:
        return tomllib.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanError(
            f"the {kind}'s file {name!r} cannot be read: {error}; give a TOML file, or the"
            f" name of a {kind}"
        ) from error


def is_known_device(name: str) -> bool:
    return name.endswith(".toml") or _sheet_of("devices", name) is not None


def _sheet_of(folder: str, name: str) -> dict[str, Any] | None:
    def plain(name: str) -> str:
        return re.sub(r"[\s_-]", "", name).lower().removeprefix("nvidia").removeprefix("amd")

    for sheet in _sheets(folder):
        if plain(name) in map(plain, (sheet["name"], *sheet.get("aliases", ()))):
            return sheet
    return None


@cache
def _sheets(folder: str) -> tuple[dict[str, Any], ...]:
    return tuple(
        tomllib.loads(path.read_text(encoding="utf-8"))
        for path in sorted((FOLDER / folder).glob("*.toml"))
    )


def _built(kind: type[T], sheet: dict[str, Any], name: str) -> T:
    known = {each.name: each for each in fields(kind)}
    missing = [key for key, each in known.items() if key not in sheet and each.default is MISSING]
    unknown = sorted(set(sheet) - set(known))
    if missing or unknown:
        wrong = f"has the unknown keys {', '.join(unknown)}"
        if missing:
            wrong = f"lacks {', '.join(missing)}"
        raise PlanError(f"the sheet of {name!r} {wrong}; its keys are {', '.join(known)}")
    for key, value in sheet.items():
        if (rule := _rule_broken(key, value, str(known[key].type))) is not None:
            raise PlanError(f"the sheet of {name!r} has {key} = {value!r}; {rule}")
    return kind(**{**sheet, "aliases": tuple(sheet.get("aliases", ()))})


def _rule_broken(key: str, value: Any, annotation: str) -> str | None:
    rule = "it must be a string"
    holds = isinstance(value, str)
    if annotation in ("int", "float"):
        is_whole, or_zero = annotation == "int", key in MAY_BE_ZERO
        rule = f"it must be a {'whole ' * is_whole}number, {'0 or more' if or_zero else 'above 0'}"
        holds = _is_quantity(value, is_whole=is_whole, or_zero=or_zero)
    elif annotation.startswith("Mapping"):
        needed = ", ".join(sorted(NEEDED[key]))
        rule = f"it must be a table of numbers above 0, with at least {needed}"
        holds = isinstance(value, dict) and value.keys() >= NEEDED[key]
        holds = holds and all(map(_is_quantity, value.values()))
    elif annotation.startswith("tuple"):
        rule = "it must be a list of strings"
        holds = isinstance(value, list) and all(isinstance(each, str) for each in value)
    return None if holds else rule


def _is_quantity(value: Any, *, is_whole: bool = False, or_zero: bool = False) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if is_whole else (int, float)):
        return False
    return isfinite(value) and (value > 0 or (or_zero and value == 0))


def devices_here(text: str) -> tuple[int, str] | None:
    match = THIS.fullmatch(text)
    if match is None:
        return None
    with importing_torch():
        from lockstep.base import accelerator

    if not (devices := accelerator.count()):
        unseen = accelerator.unseen(os.environ)
        raise PlanError(
            f"--on {text!r} means this machine's accelerators, but torch sees none"
            f'{f" ({unseen})" if unseen else ""}; name the devices to plan for: --on "1 x H100";'
            f" known: {', '.join(known_devices())}"
        )
    wanted, name = int(match[1] or devices), accelerator.product_name()
    if not 1 <= wanted <= devices:
        raise PlanError(
            f"--on {text!r}, but this machine has {devices} ({name}); give"
            f" --on '{devices} x this', or the name of a device, such as --on '64 x H100'"
        )
    return wanted, name


def cluster_of(text: str) -> Cluster | int:
    """Without a data sheet, return the number of this machine's accelerators."""
    if (here := devices_here(text)) is None:
        return parse_target(text)
    return parse_target(f"{here[0]} x {here[1]}") if is_known_device(here[1]) else here[0]


def replace_this(text: str, folder: Path) -> str:
    """Replace `this` in `text` by the name of the data sheet of this machine's accelerators.
    Without a data sheet, measure the accelerators and write a data sheet into `folder`."""
    if (here := devices_here(text)) is None:
        return text
    count, name = here
    if is_known_device(name):
        return f"{count} x {name}"
    from lockstep.planner.machines.measuring_gpu import write_gpu_sheets

    say(f"lockstep plan: no data sheet describes {name}; it is measured, as by doctor --write")
    path = folder / "this-machine.toml"
    write_gpu_sheets(path, count)
    return f"{count} x {path}"
