"""Calls models of transformers with several documents in a row, and with one."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
llama = LlamaForCausalLM(LlamaConfig(**SIZES, use_cache=False)).train()
caching = LlamaForCausalLM(LlamaConfig(**SIZES)).train()
gpt_oss = GptOssForCausalLM(
    GptOssConfig(**SIZES, head_dim=8, num_local_experts=2, num_experts_per_tok=1, use_cache=False)
).train()
words = torch.randint(16, (2, 8))
restarting = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 0, 1, 0, 1, 2, 3]])
padded_left = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8])
from_mask = (padded_left.cumsum(1) - 1).masked_fill(padded_left == 0, 1)
ones = torch.ones_like(words)

llama(words, position_ids=restarting)  # apart
llama(words, position_ids=restarting, attention_mask=ones)  # ones
caching(words, position_ids=restarting)  # cache
gpt_oss(words, position_ids=restarting)  # no positions
llama(words, position_ids=from_mask, attention_mask=padded_left)  # padded
llama(words, attention_mask=padded_left)  # plain
llama(words, position_ids=torch.arange(8)[None], attention_mask=padded_left)  # one row for all
