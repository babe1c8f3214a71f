"""Mixtures of experts of transformers, tiny and random. Transformers, whose import takes a second,
is imported for the first of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

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
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", SIZES | {"num_local_experts": 4}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        SIZES | {"head_dim": 8, "moe_intermediate_size": 24, "num_experts": 8},
    ),
    "gpt-oss": ("GptOssConfig", SIZES | {"head_dim": 8, "num_local_experts": 4}),
    "deepseek-v3": (
        "DeepseekV3Config",
        SIZES
        | {"num_key_value_heads": 4, "moe_intermediate_size": 24, "n_routed_experts": 8}
        | {"n_group": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16}
        | {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
        | {"first_k_dense_replace": 1, "n_shared_experts": 1},
    ),
}
"""Name -> its class in transformers, and what that is given."""


def family(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model with random weights. In float64, for which there is no `grouped_mm`, its experts are
    `eager`."""
    torch.manual_seed(0)
    return mixture_of_experts(name, "eager" if dtype == torch.float64 else "grouped_mm").to(dtype)


def mixture_of_experts(name: str, implementation: str) -> nn.Module:
    """A model with random weights. `implementation`: that of its experts."""
    import transformers

    kind, given = CONFIGS[name]
    attention = "eager" if name == "gpt-oss" else "sdpa"
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, kind)(**given),
        attn_implementation=attention,
        experts_implementation=implementation,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1)
    return model
