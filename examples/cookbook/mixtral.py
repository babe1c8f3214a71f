"""A mixture of experts by Mixtral's configuration, with its load-balancing loss.

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
    num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, use_cache=False,
)  # fmt: skip
words = torch.randint(64, (96, 12), generator=torch.Generator().manual_seed(0))
words[:, 1::2] = words[:, ::2]  # something to learn
data = [{"input_ids": row} for row in words]


def losses(output: Any, batch: Any) -> dict[str, Any]:
    """transformers computes the balance as a product of means over one microbatch's tokens. So it
    depends on the microbatch, which lockstep says once, and not on the number of processes. (A
    balance over the global batch is another loss: Megatron-LM's global_aux_loss.)"""
    entropy = F.cross_entropy(
        output.logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten()
    )
    return {"words": entropy, "balance": 0.02 * output.aux_loss}


recipe = ls.Recipe(
    model=lambda: MixtralForCausalLM(config),
    data=data,
    inputs=dict,
    loss=losses,
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
