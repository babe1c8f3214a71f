"""The published rows as values: which of them a model of a plain dense step can be held against, and their times."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).resolve().parent.parent / "planner_data"
OTHER_STEPS = re.compile(r"LoRA|Muon|memory-saving|unpacked|optimizer-in-bwd|offload|8bit|unclear|fwd\+loss\+bwd ONLY", re.IGNORECASE)
SAME = {"yes": "full", "true": "full", "no": "none", "false": "none"}
SPARSE = re.compile(r"MoE|\bEP=|DeepSeek|A3B|A22B|Mixtral|Grok|GPT.?OSS", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published configuration."""

    source: str
    model: str
    notes: str
    gpu: str
    world: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    gated: bool
    tied: bool
    """The output layer is the embedding."""
    seq: int
    replicas: int
    """Ranks that hold the same shard: data parallelism outside of FSDP."""
    shards: int
    """Size of FSDP's group."""
    tp: int
    pp: int
    cp: int
    virtual: int
    """Chunks of layers that a pipeline's stage has."""
    microbatch: int
    """Sequences."""
    batch: int
    """Sequences of the whole step."""
    checkpointing: str
    compiled: str
    dtype: str
    seconds: float | None
    memory_gib: float | None
    out_of_memory: bool
    node_bytes_per_second: float | None
    """Bandwidth of a node's network, where a row says it."""

    @property
    def repository(self) -> str:
        """The source as the fits are split: its repository, or paper."""
        return self.source.split(":")[0].split(" arXiv")[0]

    @property
    def data(self) -> int:
        """Ranks that get microbatches of their own."""
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def microbatches(self) -> int:
        return max(1, round(self.batch / (self.data * self.microbatch)))

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on one rank."""
        return self.microbatch * self.seq // self.cp

    @property
    def head(self) -> int:
        return self.hidden // self.heads


def load(path: Path = DATA / "published.csv") -> tuple[list[Row], dict[str, int]]:
    """Return the rows that can be used, and the number of the others by the reason."""
    rows, others = [], dict[str, int]()
    with path.open(encoding="utf-8", newline="") as file:
        for cells in csv.DictReader(file):
            reason = excluded(cells)
            if reason:
                others[reason] = others.get(reason, 0) + 1
            else:
                rows.append(_row(cells))
    return rows, others


def excluded(cells: dict[str, str]) -> str:
    """Return why a row cannot be used, by its own fields; empty if it can."""
    text = cells["model"] + " " + cells["notes"]
    lacking = [key for key in ("hidden", "seq_len", "gpu_count", "micro_batch") if not cells[key]]
    if not re.match("bf16|fp16|bfloat16|float16", cells["precision"].lower()):
        return "not bf16 or fp16"
    if SPARSE.search(text):
        return "mixture of experts"
    if OTHER_STEPS.search(text):
        return "not a plain step (LoRA, Muon, 8-bit optimizers, offload, forward and backward only, an unclear unit)"
    if lacking or not (cells["layers"] or cells["params_b"]):
        return "incomplete: hidden size, layers, sequence, GPUs or microbatch not stated"
    if not _out_of_memory(cells) and not cells["tokens_per_s_per_gpu"] and "4x fwd formula" not in cells["notes"]:
        return "incomplete: no step time"
    mesh = 1
    for key in ("dp", "fsdp", "tp", "pp", "cp"):
        mesh *= _int(cells[key], 1)
    if mesh != int(cells["gpu_count"]):
        return "inconsistent: the mesh's sizes do not multiply to the GPUs"
    return ""


def _row(cells: dict[str, str]) -> Row:
    hidden, seq, world = (int(cells[key]) for key in ("hidden", "seq_len", "gpu_count"))
    vocab = _vocab(cells)
    gated = not re.search(r"GPT|Nemotron|BLOOM|MPT|OPT", cells["model"], re.IGNORECASE)
    ffn = _int(cells["ffn"], 4 * hidden)
    pp, microbatch = _int(cells["pp"], 1), int(float(cells["micro_batch"]))
    layers = _int(cells["layers"], 0) or _layers(float(cells["params_b"]) * 1e9, hidden, ffn, vocab, gated, pp)
    heads = _int(cells["heads"], _heads(hidden))
    data = world // (_int(cells["tp"], 1) * pp * _int(cells["cp"], 1))
    batch = int(float(cells["global_batch"])) if cells["global_batch"] else data * microbatch
    return Row(
        source=cells["source"], model=cells["model"], notes=cells["notes"], gpu=cells["gpu"], world=world, layers=layers, hidden=hidden,
        heads=heads, kv_heads=_int(cells["kv_heads"], heads), ffn=ffn, vocab=vocab, gated=gated, seq=seq,
        tied=_tied(cells, layers, hidden, heads, ffn, vocab, gated),
        replicas=_int(cells["dp"], 1), shards=_int(cells["fsdp"], 1), tp=_int(cells["tp"], 1), pp=pp, cp=_int(cells["cp"], 1),
        virtual=_virtual(cells, layers, pp), microbatch=microbatch, batch=batch,
        checkpointing=SAME.get(cells["act_ckpt"].lower(), cells["act_ckpt"]),
        compiled=cells["compile"], dtype="float16" if re.match("fp16|float16", cells["precision"].lower()) else "bfloat16",
        seconds=_seconds(cells, layers, hidden, vocab, batch), memory_gib=float(cells["mem_gib"]) if cells["mem_gib"] else None,
        out_of_memory=_out_of_memory(cells), node_bytes_per_second=_network(cells),
    )  # fmt: skip


def _int(text: str, otherwise: int) -> int:
    return int(float(text)) if text else otherwise


def _out_of_memory(cells: dict[str, str]) -> bool:
    return cells["notes"].startswith("OOM")


def _vocab(cells: dict[str, str]) -> int:
    about = re.search(r"vocab ~(\d+)k", cells["notes"])
    return _int(cells["vocab"], 250880 if (about and about[1] == "250") or "BLOOM" in cells["model"] else 51200)


def _heads(hidden: int) -> int:
    """The number of heads nearest to one for each 128 that divides the hidden size."""
    return min((n for n in range(1, hidden + 1) if hidden % n == 0), key=lambda n: abs(n - hidden / 128))


def _layers(parameters: float, hidden: int, ffn: int, vocab: int, gated: bool, pp: int) -> int:
    layer = 4 * hidden**2 + hidden * ffn * (3 if gated else 2)
    return max(1, round((parameters - vocab * hidden) / layer / pp)) * pp


def _tied(cells: dict[str, str], layers: int, hidden: int, heads: int, ffn: int, vocab: int, gated: bool) -> bool:
    """A GPT's embedding is tied; another model's, where that agrees better with the parameters that the row states."""
    if not gated or not cells["params_b"]:
        return not gated
    shared = 2 * hidden * hidden // heads * _int(cells["kv_heads"], heads)
    once = layers * (2 * hidden**2 + shared + 3 * hidden * ffn) + vocab * hidden
    return float(cells["params_b"]) * 1e9 < once + vocab * hidden / 2


def _network(cells: dict[str, str]) -> float | None:
    """Bytes/s of a node's network: a column, or what the notes say of a GPU, of 8 in a node, or of a node."""
    if stated := cells.get("network_gbit_per_node"):
        return float(stated) / 8 * 1e9
    if found := re.search(r"(\d+)\s*Gb/s(?: RDMA)? per GPU", cells["notes"]):
        return float(found[1]) * 1e9
    found = re.search(r"[AH]\d00: (\d+)Gbps", cells["notes"])
    return float(found[1]) / 8 * 1e9 if found else None


def _virtual(cells: dict[str, str], layers: int, pp: int) -> int:
    if found := re.search(r"VP=(\d+)|interleave v=(\d+)", cells["notes"]):
        return int(found[1] or found[2])
    found = re.search(r"layers_per_virtual_stage=(\d+)", cells["notes"])
    return max(1, layers // pp // int(found[1])) if found else 1


def _seconds(cells: dict[str, str], layers: int, hidden: int, vocab: int, batch: int) -> float | None:
    """Step time from tokens/s, or from TFLOPs by the formula that arXiv:2104.04473 counts them with."""
    seq, world = int(cells["seq_len"]), int(cells["gpu_count"])
    if cells["tokens_per_s_per_gpu"]:
        return batch * seq / world / float(cells["tokens_per_s_per_gpu"])
    if cells["tflops_per_gpu"]:
        shape = 1 + seq / (6 * hidden) + vocab / (16 * layers * hidden)
        return 96 * batch * seq * layers * hidden**2 * shape / world / (float(cells["tflops_per_gpu"]) * 1e12)
    return None
