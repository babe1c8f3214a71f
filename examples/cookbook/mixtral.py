"""A mixture of experts by Mixtral's configuration, balanced over the whole global batch.

lockstep run --nproc 2 --plan shard=2 examples/cookbook/mixtral.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from transformers import MixtralConfig, MixtralForCausalLM

import lockstep as ls

config = MixtralConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2,
    num_local_experts=4, num_experts_per_tok=2, use_cache=False,
)  # fmt: skip
words = torch.randint(64, (96, 12), generator=torch.Generator().manual_seed(0))
words[:, 1::2] = words[:, ::2]  # something to learn
data = [{"input_ids": row} for row in words]


def loss(output: Any, batch: Any) -> Any:
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


recipe = ls.Recipe(
    model=lambda: MixtralForCausalLM(config),
    data=data,
    inputs=dict,
    loss=loss,
    # instead of output_router_logits=True, whose balance depends on the microbatch
    balance=ls.Balance(coefficient=0.02, over="step"),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
    global_batch=16,
    microbatch=4,
    steps=10,
    clip_norm=1.0,
)


def train(**options: Any) -> str:
    return ls.train(recipe, **options).fingerprint


if __name__ == "__main__":
    train()
