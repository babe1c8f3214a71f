"""Reads published rows: which of them a model of a plain dense step can be held against, and why
the others cannot."""

from __future__ import annotations

import csv
import math
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from lockstep.planner.machines.hardware import load_device
from published.machines import device_name
from published.rows import DATA, Row

NUMBERS = (
    "params_b", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len", "gpu_count",
    "dp", "fsdp", "tp", "pp", "cp",
    "micro_batch", "global_batch", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "hfu",
    "network_gbit_per_node",
)  # fmt: skip
COLUMNS = (
    "source",
    "model",
    "gpu",
    "act_ckpt",
    "compile",
    "precision",
    "notes",
    "mem_gib",
    *NUMBERS,
)
OTHER_STEPS = re.compile(r"LoRA|memory-saving|unpacked|offload|8-?bit|unclear", re.IGNORECASE)
SAME = {"yes": "full", "true": "full", "no": "none", "false": "none"}
SPARSE = re.compile(r"MoE|\bEP=|DeepSeek|A3B|A22B|Mixtral|Grok|GPT.?OSS", re.IGNORECASE)
NARROW = re.compile(r"fp8|float8|fp4|mxfp|int8", re.IGNORECASE)
HALF = re.compile(r"bf16|bfloat16|fp16|float16|half", re.IGNORECASE)
UNGATED = re.compile(r"GPT|Nemotron|BLOOM|MPT|\bOPT|NeoX|Pythia|Falcon|BERT", re.IGNORECASE)
MOST_DOUBT = 0.15
"""Part of a step's operations that the two ways of counting attention may differ by, where only
TFLOP/s are stated."""


def load(path: Path = DATA / "published.csv") -> tuple[list[Row], dict[str, int]]:
    """Return the rows that can be used, and the number of the others by the reason."""
    rows, others = [], dict[str, int]()
    with path.open(encoding="utf-8", newline="") as file:
        for given in csv.DictReader(file):
            cells = complete({key: (given.get(key) or "").strip() for key in COLUMNS})
            reason = excluded(cells)
            if reason:
                others[reason] = others.get(reason, 0) + 1
            else:
                rows.append(row_of(cells))
    return rows, others


def complete(cells: Mapping[str, str]) -> dict[str, str]:
    """Return a row's cells with the shape of its model, where that is well known, and what follows
    from other cells."""
    shape = (
        next((shape for name, shape in _architectures() if name.search(cells["model"])), {})
        if not cells["hidden"]
        else {}
    )
    found = {**cells, **{key: value for key, value in shape.items() if not cells[key]}}
    stated = [found[key] for key in ("dp", "fsdp", "tp", "pp", "cp")]
    if not all(map(_is_number, filter(None, [*stated, found["gpu_count"]]))):
        return found
    product = math.prod(_int(text, 1) for text in stated)
    if not found["gpu_count"] and any(stated):
        found["gpu_count"] = str(product)
    elif not found["dp"] and not found["fsdp"] and (any(stated) or found["gpu_count"] == "1"):
        found["dp"] = str(max(1, _int(found["gpu_count"], 1) // max(1, product)))
    return found


def excluded(cells: Mapping[str, str]) -> str:
    """Return why a row cannot be used, by its own cells; empty if it can."""
    text = cells["model"] + " " + cells["notes"]
    if NARROW.search(cells["precision"]) or not HALF.search(cells["precision"]):
        return "not bf16 or fp16" if cells["precision"] else "precision not stated"
    if SPARSE.search(text):
        return "mixture of experts"
    if OTHER_STEPS.search(text):
        return "not a plain step (LoRA, 8-bit optimizers, offload, padding, an unclear unit)"
    return _wrong(cells) or _unknown(cells)


def row_of(cells: Mapping[str, str]) -> Row:
    """Return the row of cells that are not excluded."""
    hidden, world, pp = (_int(cells[key], 1) for key in ("hidden", "gpu_count", "pp"))
    tp, cp, microbatch = _int(cells["tp"], 1), _int(cells["cp"], 1), _int(cells["micro_batch"], 0)
    heads = _int(cells["heads"], _heads(hidden))
    shape = {
        "layers": _layers(cells), "heads": heads, "kv_heads": _int(cells["kv_heads"], heads),
        "ffn": _ffn(cells),
        "vocab": _vocab(cells), "batch": _int(cells["global_batch"],
        world // (tp * pp * cp) * microbatch),
    }  # fmt: skip
    return Row(
        **shape, source=cells["source"], model=cells["model"], notes=cells["notes"],
        gpu=cells["gpu"], world=world, hidden=hidden,
        gated=_gated(cells), tied=_tied(cells, shape), seq=_int(cells["seq_len"], 0),
        replicas=_int(cells["dp"], 1),
        shards=_int(cells["fsdp"], 1), tp=tp, pp=pp, cp=cp, virtual=_virtual(cells,
        shape["layers"], pp), microbatch=microbatch,
        checkpointing=SAME.get(cells["act_ckpt"].lower(), cells["act_ckpt"]),
        compiled=cells["compile"], dtype=_dtype(cells),
        updates="no optimizer" not in cells["notes"], seconds=_seconds(cells, shape),
        memory_gib=float(cells["mem_gib"]) if _is_number(cells["mem_gib"]) else None,
        out_of_memory=_out_of_memory(cells), node_bytes_per_second=_network(cells),
    )  # fmt: skip


def _wrong(cells: Mapping[str, str]) -> str:
    """Why the cells say no configuration: some are missing, are no numbers or contradict each
    other."""
    needed = [key for key in ("hidden", "seq_len", "gpu_count") if not cells[key]]
    needed += ["layers"] if not cells["layers"] and not cells["params_b"] else []
    needed += ["micro_batch"] if not cells["micro_batch"] and not cells["global_batch"] else []
    needed += ["layout"] if not any(cells[key] for key in ("dp", "fsdp", "tp", "pp", "cp")) else []
    if needed:
        return f"not stated: {', '.join(needed)}"
    texts = [key for key in NUMBERS if cells[key] and not _is_number(cells[key])]
    if texts:
        return f"not a number: {', '.join(texts)}"
    if below := [key for key in NUMBERS if cells[key] and _too_small(key, cells[key])]:
        return f"too small: {', '.join(below)}"
    if math.prod(_int(cells[key], 1) for key in ("dp", "fsdp", "tp", "pp", "cp")) != _int(
        cells["gpu_count"], 0
    ):
        return "inconsistent: the mesh's sizes do not multiply to the devices"
    return ""


def _unknown(cells: Mapping[str, str]) -> str:
    """Why a complete configuration cannot be held against a time: its device is not known, or its
    time."""
    name = device_name(cells["source"], cells["gpu"])
    if name is None:
        return f"no data sheet of the device {cells['gpu'] or '(none stated)'}"
    if _out_of_memory(cells) or cells["tokens_per_s_per_gpu"] or "4x fwd formula" in cells["notes"]:
        return ""
    if not cells["tflops_per_gpu"] and not cells["mfu"]:
        return "neither step time nor out of memory"
    hidden, seq = _int(cells["hidden"], 0), _int(cells["seq_len"], 0)
    if seq / (12 * hidden) / (1 + seq / (6 * hidden)) > MOST_DOUBT:
        return (
            "a time in TFLOP/s alone, of so long a sequence that it matters how attention was"
            " counted, which is not stated"
        )
    return ""


@cache
def _architectures(
    path: Path = DATA / "architectures.toml",
) -> tuple[tuple[re.Pattern[str], dict[str, str]], ...]:
    tables = tomllib.loads(path.read_text(encoding="utf-8"))["architectures"]
    return tuple(
        (
            re.compile(each["name"], re.IGNORECASE),
            {key: str(value) for key, value in each["shape"].items()},
        )
        for each in tables
    )


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _too_small(key: str, text: str) -> bool:
    fractions = ("params_b", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "hfu")
    return float(text) <= 0 if key in fractions else float(text) < 1


def _int(text: str, otherwise: int) -> int:
    return int(float(text)) if text else otherwise


def _out_of_memory(cells: Mapping[str, str]) -> bool:
    said = re.search(
        r"\bOOM\b|out of memory|ran out", f"{cells['mem_gib']} {cells['notes']}", re.IGNORECASE
    )
    return bool(said) and not any(
        cells[key] for key in ("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "hfu")
    )


def _dtype(cells: Mapping[str, str]) -> str:
    return "float16" if re.match("fp16|float16|half", cells["precision"].lower()) else "bfloat16"


def _vocab(cells: Mapping[str, str]) -> int:
    about = re.search(r"vocab ~(\d+)k", cells["notes"])
    return _int(
        cells["vocab"],
        250880 if (about and about[1] == "250") or "BLOOM" in cells["model"] else 51200,
    )


def _gated(cells: Mapping[str, str]) -> bool:
    return not UNGATED.search(cells["model"])


def _ffn(cells: Mapping[str, str]) -> int:
    """A row's own width, or 4 times the hidden size, or as many parameters in three matrices
    instead of two."""
    hidden = _int(cells["hidden"], 0)
    return _int(cells["ffn"], -(-8 * hidden // 3 // 256) * 256 if _gated(cells) else 4 * hidden)


def _heads(hidden: int) -> int:
    """The number of heads nearest to one for each 128 that divides the hidden size."""
    return min(
        (n for n in range(1, hidden + 1) if hidden % n == 0), key=lambda n: abs(n - hidden / 128)
    )


def _layers(cells: Mapping[str, str]) -> int:
    if cells["layers"]:
        return _int(cells["layers"], 0)
    hidden, pp = _int(cells["hidden"], 0), _int(cells["pp"], 1)
    layer = 4 * hidden**2 + hidden * _ffn(cells) * (3 if _gated(cells) else 2)
    return (
        max(1, round((float(cells["params_b"]) * 1e9 - _vocab(cells) * hidden) / layer / pp)) * pp
    )


def _tied(cells: Mapping[str, str], shape: Mapping[str, int]) -> bool:
    """A GPT's embedding is tied; another model's, where that agrees better with the parameters that
    the row states."""
    if not _gated(cells) or not cells["params_b"]:
        return not _gated(cells)
    hidden, embedding = _int(cells["hidden"], 0), shape["vocab"] * _int(cells["hidden"], 0)
    layer = (
        2 * hidden**2
        + 2 * hidden * hidden // shape["heads"] * shape["kv_heads"]
        + 3 * hidden * shape["ffn"]
    )
    return float(cells["params_b"]) * 1e9 < shape["layers"] * layer + 1.5 * embedding


def _network(cells: Mapping[str, str]) -> float | None:
    """Bytes/s of a node's network: a column, or what the notes say of a GPU, of 8 in a node, or of
    a node."""
    if stated := cells["network_gbit_per_node"]:
        return float(stated) / 8 * 1e9
    if found := re.search(r"(\d+)\s*Gb/s(?: RDMA)? per GPU", cells["notes"]):
        return float(found[1]) * 1e9
    found = re.search(r"[AH]\d00: (\d+)Gbps", cells["notes"])
    return float(found[1]) / 8 * 1e9 if found else None


def _virtual(cells: Mapping[str, str], layers: int, pp: int) -> int:
    if found := re.search(r"VP=(\d+)|interleave v=(\d+)", cells["notes"]):
        return int(found[1] or found[2])
    found = re.search(r"layers_per_virtual_stage=(\d+)", cells["notes"])
    return max(1, layers // pp // int(found[1])) if found else 1


def _seconds(cells: Mapping[str, str], shape: Mapping[str, int]) -> float | None:
    """Step time from tokens/s; else from TFLOP/s or MFU, as arXiv:2104.04473 counts: the whole of
    attention."""
    tokens = shape["batch"] * _int(cells["seq_len"], 0) / _int(cells["gpu_count"], 0)
    if cells["tokens_per_s_per_gpu"]:
        return tokens / float(cells["tokens_per_s_per_gpu"])
    if not cells["tflops_per_gpu"] and not cells["mfu"]:
        return None
    layers, hidden = shape["layers"], _int(cells["hidden"], 0)
    again = "4x fwd formula" in cells["notes"] or bool(cells["hfu"] and not cells["mfu"])
    layer = 2 * hidden**2 * (1 + shape["kv_heads"] / shape["heads"]) + hidden * shape["ffn"] * (
        3 if _gated(cells) else 2
    )
    flops = (8 if again else 6) * layers * (
        layer + 2 * hidden * _int(cells["seq_len"], 0)
    ) + 6 * shape["vocab"] * hidden
    if cells["tflops_per_gpu"]:
        return tokens * flops / (float(cells["tflops_per_gpu"]) * 1e12)
    device = load_device(device_name(cells["source"], cells["gpu"]) or "")
    return tokens * flops / (float(cells["mfu"]) * device.peak_flops[_dtype(cells)])
