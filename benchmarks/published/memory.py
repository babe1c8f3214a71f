"""Peak memory of a published step on one rank: state, activations by checkpointing, logits, and
slack."""

from __future__ import annotations

from published import transformer
from published.rows import Row
from published.software import Software

HALF = transformer.HALF
FRAGMENTATION = 1.04
"""Reserved to allocated memory. An estimate."""


def local_parameters(row: Row) -> float:
    """The parameters of the fullest pipeline stage on one tensor parallel rank."""
    layer, embedding = transformer.layer_parameters(row), row.vocab * row.hidden
    ends = embedding * (2 if not row.tied and row.pp == 1 else 1)
    own = row.layers % row.pp != 0 and (row.layers + 2) % row.pp == 0
    layers = (row.layers + 2) / row.pp - own if own else -(-row.layers // row.pp)
    return (layers * layer + ends) / row.tp


def state_bytes(row: Row, software: Software) -> tuple[float, float]:
    """Parameters and the optimizer's state, and gradients, on the fullest pipeline stage."""
    local = local_parameters(row)
    if software.sharding < 3:
        share = row.data * row.cp if software.sharding == 1 else 1
        return (
            local * (HALF + software.master_bytes / share) + software.buffer_bytes,
            local * software.gradient_bytes,
        )
    held = local * (software.master_bytes + software.weight_bytes) / row.shards
    largest = max(transformer.layer_parameters(row), row.vocab * row.hidden) / row.tp
    gathered = 2 * largest * HALF if row.shards > 1 and row.pp == 1 else HALF * local
    return (
        held + gathered,
        local * software.gradient_bytes / row.shards + largest * software.reduce_bytes,
    )


def token_bytes(row: Row, software: Software) -> float:
    """What one layer keeps of a token for its backward pass, without checkpointing."""
    h, tp = row.hidden, row.tp
    spread = 1 / tp if software.sequence_parallel else 1.0
    qkv = row.head * (row.heads + 2 * row.kv_heads)
    norms = (4 if software.fused else 8) * h * HALF * spread
    attention = (qkv + h) * HALF / tp
    if software.attention == "unfused":
        attention += row.heads * row.seq * (2 * HALF + software.dropout) / tp
    act = row.ffn * HALF * (3 if row.gated else 2) / tp
    eager = 0 if software.fused or not row.gated else (row.ffn + 2 * qkv) * HALF / tp
    return norms + attention + act + eager + 2 * h * software.dropout * spread


def activation_bytes(row: Row, software: Software, checkpointing: str) -> tuple[float, float]:
    """Activations of all the microbatches that the fullest stage has in flight, and of the layer in
    work."""
    whole = token_bytes(row, software) * row.tokens
    boundary = HALF * row.hidden * row.tokens / (row.tp if software.sequence_parallel else 1)
    if checkpointing.startswith("part:"):
        part = float(checkpointing[5:])
        kept = part * boundary + (1 - part) * whole
    elif checkpointing.startswith(("full", "none")):
        kept = boundary if checkpointing.startswith("full") else whole
    else:
        kept = _selective(row, software, checkpointing, whole, boundary)
    sent = boundary if row.pp > 1 else 0.0
    return flights(row) * (row.layers / row.pp * kept + sent), whole if kept < whole else 0.0


def flights(row: Row) -> float:
    """Microbatches whose activations the first stage holds at once; interleaving adds part of a
    round."""
    extra = (row.pp - 1) / row.virtual if row.virtual > 1 else 0.0
    return min(float(row.microbatches), row.pp + extra)


def memory_bytes(row: Row, software: Software, checkpointing: str | None = None) -> float:
    """Return the peak that the allocator reserves: at the loss, or at the backward pass's end.

    Gradients that no earlier microbatch and no buffer holds come to be while activations go.
    """
    held, gradients = state_bytes(row, software)
    kept, working = activation_bytes(
        row, software, checkpointing if checkpointing is not None else row.checkpointing
    )
    scores = row.tokens * row.vocab / row.tp * software.logits_bytes
    lasting = row.microbatches > 1 or software.sharding == 1
    at_loss = held + kept + max(scores, working) + (gradients if lasting else 0.0)
    return max(at_loss, held + gradients + working) * FRAGMENTATION + software.outside_bytes


def fitting_checkpointing(row: Row, software: Software, limit: float) -> str:
    """Return the least checkpointing that fits, for rows that state none: `none`, or a part of the
    layers."""
    for part in range(11):
        kind = f"part:{part / 10}" if part else "none"
        if memory_bytes(row, software, kind) <= 0.95 * limit:
            return kind
    return "full"


def _selective(
    row: Row, software: Software, checkpointing: str, whole: float, boundary: float
) -> float:
    kind = (
        checkpointing
        if "op" in checkpointing or "layer" in checkpointing
        else software.half_checkpointing
    )
    if kind == "attention":
        scores = (
            row.heads * row.seq * (2 * HALF + software.dropout) / row.tp * row.tokens
            if software.attention == "unfused"
            else 0.0
        )
        return whole - scores
    if "layer" in kind:
        return (whole + boundary) / 2
    qkv = row.head * (row.heads + 2 * row.kv_heads)
    products = (
        (qkv + row.hidden * 2 + row.ffn * (2 if row.gated else 1)) * HALF / row.tp * row.tokens
    )
    return boundary + products / 2 + row.hidden * HALF / row.tp * row.tokens
