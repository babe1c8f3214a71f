"""Models of transformers, tiny and random, of the families that attend differently. Transformers,
whose import takes a second, is imported for the first of them."""

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
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
WINDOW = 5
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SIZES),
    "qwen3": ("Qwen3Config", SIZES | {"head_dim": 8}),
    "mistral": ("MistralConfig", SIZES | {"sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2Config",
        SIZES | {"head_dim": 8, "sliding_window": WINDOW, "attn_logit_softcapping": 5.0},
    ),
    "qwen3-moe": ("Qwen3MoeConfig", SIZES | EXPERTS | {"head_dim": 8}),
    "gpt-oss": (
        "GptOssConfig",
        SIZES
        | {"head_dim": 8, "sliding_window": WINDOW}
        | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": WORDS, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
        | {"bos_token_id": 0, "eos_token_id": 0},
    ),
}
"""Name -> its class in transformers, and what that is given."""


def family(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    import transformers

    kind, given = CONFIGS[name]
    config = getattr(transformers, kind)(**given)
    for key, value in changes.items():
        setattr(config, key, value)
    how = "eager" if name in ("gpt-oss", "gemma2") else "sdpa"
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=how
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    return model.to(dtype).eval()
