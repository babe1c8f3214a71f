"""The operations of a transformer's step on one rank, from a published row."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import gcd

from lockstep.planner.trace import ALIGNED, Operation
from published.rows import Row
from published.software import Software

HALF = 2
"""Bytes of a number in bf16 or fp16."""


ACTIVATION = {
    (True, True): (6, 10),
    (True, False): (10, 18),
    (False, True): (4, 6),
    (False, False): (4, 6),
}
"""Bytes an activation function's kernels move for a number, forward and backward, by gated and
fused."""
COMPOSED_ACTIVATION = (36, 52)
"""The same for a GELU by its formula: nine kernels, such as x ** 3 and tanh, and the gradients of
each."""
COMPOSED_SOFTMAX = (28, 32)
"""Bytes for a score: scaled and masked in half precision, cast to fp32 as autocast does, softmax,
and cast back."""


def layer_parameters(row: Row) -> int:
    """The parameters of one layer on all tensor parallel ranks together."""
    attention = row.hidden * row.head * (row.heads + 2 * row.kv_heads) + row.hidden**2
    return attention + row.hidden * row.ffn * (3 if row.gated else 2)


def parameters(row: Row) -> int:
    """The parameters of the model."""
    return layer_parameters(row) * row.layers + row.vocab * row.hidden * (1 if row.tied else 2)


@cache
def forward(row: Row, software: Software) -> list[Operation]:
    """The forward pass of one layer."""
    t, h, tp = row.tokens, row.hidden, row.tp
    products = [
        _product(row, "qkv", t, row.head * (row.heads + 2 * row.kv_heads) // tp, h),
        _product(row, "out", t, h, row.head * row.heads // tp),
        _product(row, "up", t, row.ffn * (2 if row.gated else 1) // tp, h),
        _product(row, "down", t, h, row.ffn // tp),
    ]
    return products + _attention(row, software, "forward") + _element_wise(row, software, "forward")


@cache
def backward(row: Row, software: Software) -> list[Operation]:
    """The backward pass of one layer, without what checkpointing computes again."""
    products = [
        each
        for each in forward(row, software)
        if each.kind == "matmul" and not each.name.startswith("attention")
    ]
    both = [half for each in products for half in gradients(each)]
    if software.sharding < 3:
        both.append(
            _memory(
                "accumulate",
                2 * software.gradient_bytes * layer_parameters(row) // row.tp,
                "backward",
            )
        )
    return both + _attention(row, software, "backward") + _element_wise(row, software, "backward")


@cache
def recomputed(row: Row, software: Software, checkpointing: str) -> list[tuple[Operation, float]]:
    """What the backward pass of one layer computes again, and how often on average."""
    kind = checkpointing
    if kind.startswith("selective") and "op" not in kind and "layer" not in kind:
        kind = software.half_checkpointing
    again = [replace(each, phase="recompute") for each in forward(row, software)]
    if kind.startswith("full"):
        return [(each, 1.0) for each in again]
    if kind.startswith("part:"):
        return [(each, float(kind[5:])) for each in again]
    if "op" in kind or kind == "matmuls":
        return [
            (each, 0.5 if each.kind == "matmul" else 1.0)
            for each in again
            if each.kind != "attention"
        ]
    if "layer" in kind:
        return [(each, 0.5) for each in again]
    if kind == "attention":
        return [
            (each, 1.0)
            for each in again
            if each.name.startswith("attention") and software.attention == "unfused"
        ]
    return []


def head(row: Row, software: Software) -> list[Operation]:
    """The output layer and the loss, forward and backward."""
    product = _product(row, "logits", row.tokens, row.vocab // row.tp, row.hidden)
    each = 14 if software.fused_loss else 32
    return [
        product,
        *gradients(product),
        _memory("loss", each * row.tokens * row.vocab // row.tp, "forward"),
    ]


def update(row: Row, software: Software) -> list[Operation]:
    """The optimizer's step: gradients' norm, and Adam in fp32."""
    share = {0: 1, 1: row.data * row.cp, 3: row.shards}[software.sharding]
    local = parameters(row) // (row.tp * row.pp * share)
    return [_memory("norm", 4 * local, "update"), _memory("adam", 30 * local, "update")]


def gradients(product: Operation) -> list[Operation]:
    """The two products that a product's backward pass is made of."""
    batch, m, n, k = product.shape
    of_input = replace(product, shape=(batch, m, k, n), phase="backward")
    return [of_input, replace(product, shape=(batch, k, n, m), phase="backward")]


def _product(row: Row, name: str, m: int, n: int, k: int, batch: int = 1) -> Operation:
    moved = HALF * batch * (m * k + k * n + m * n)
    aligned = gcd(HALF * n, HALF * k, ALIGNED)
    return Operation(
        "matmul",
        row.dtype,
        2 * batch * m * n * k,
        moved,
        (batch, m, n, k),
        "forward",
        name,
        aligned,
    )


def _memory(name: str, moved: int, phase: str) -> Operation:
    return Operation("memory", "float32", 0, moved, (), phase, name)  # type: ignore[arg-type]


def _attention(row: Row, software: Software, phase: str) -> list[Operation]:
    batch, queries = row.microbatch * row.heads // row.tp, row.seq // row.cp
    if software.attention != "unfused":
        flops = 2 * batch * queries * row.seq * row.head  # causal: half of the scores
        moved = HALF * 4 * batch * queries * row.head
        times, scale = (1.0, 1) if phase == "forward" else (2.5, 2)
        shape = (batch, queries, row.seq, row.head)
        return [
            Operation(
                "attention",
                row.dtype,
                int(flops * times),
                moved * scale,
                shape,
                phase,
                software.attention,
            )
        ]  # type: ignore[arg-type]
    scores = _product(row, "attention scores", queries, row.seq, row.head, batch)
    values = _product(row, "attention values", queries, row.head, row.seq, batch)
    ahead = 4 + (5 if software.dropout else 0)
    moved = COMPOSED_SOFTMAX if software.composed and not software.fused else (ahead, ahead * 3 / 2)
    softmax = _memory(
        "attention softmax", int(batch * queries * row.seq * moved[phase != "forward"]), phase
    )
    if phase == "forward":
        return [scores, values, softmax]
    return [*gradients(scores), *gradients(values), softmax]


def _element_wise(row: Row, software: Software, phase: str) -> list[Operation]:
    """Norms and residual sums, rotation and activation. Bytes a token, counted kernel by kernel."""
    # LayerNorm and GELU are one kernel each
    fused, ahead = software.fused or not row.gated, phase == "forward"
    t, h = row.tokens // (row.tp if software.sequence_parallel else 1), row.hidden
    norm = (4 if fused else 34) if ahead else (8 if fused else 50)
    dropout = (1 if ahead else 5) * software.dropout
    rotated = row.head * (row.heads + row.kv_heads) * (4 if fused else 20) if row.gated else 0
    plain = software.composed and not software.fused and not row.gated
    act = (COMPOSED_ACTIVATION if plain else ACTIVATION[row.gated, fused])[0 if ahead else 1]
    kind = "" if fused else "eager "
    return [
        _memory(kind + "norm", norm * t * h, phase),
        _memory(kind + "norm", norm * t * h, phase),
        _memory("residual", (6 + dropout) * t * h, phase),
        _memory("residual", (6 + dropout) * t * h, phase),
        _memory(kind + "rotation", rotated * row.tokens // row.tp, phase),
        _memory(kind + "activation", act * row.tokens * row.ffn // row.tp, phase),
    ]
