"""Mixtures of experts of transformers, tiny and random. Apart from the tests, because importing
transformers is slow."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

WORDS = 64
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "use_cache": False,
}
CONFIGS: dict[str, Any] = {
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **SIZES, head_dim=8, moe_intermediate_size=24, num_experts=8
    ),
    "gpt-oss": lambda: GptOssConfig(**SIZES, head_dim=8, num_local_experts=4),
    "deepseek-v3": lambda: DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4},
        moe_intermediate_size=24,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
        n_shared_experts=1,
    ),
}


def family(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model with random weights. In float64, for which there is no `grouped_mm`, its experts are
    `eager`."""
    torch.manual_seed(0)
    return mixture_of_experts(name, "eager" if dtype == torch.float64 else "grouped_mm").to(dtype)


def mixture_of_experts(name: str, implementation: str) -> nn.Module:
    """A model with random weights. `implementation`: that of its experts."""
    attention = "eager" if name == "gpt-oss" else "sdpa"
    model: nn.Module = AutoModelForCausalLM.from_config(
        CONFIGS[name](), attn_implementation=attention, experts_implementation=implementation
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1)
    return model
