"""The models of benchmarks/gpu.py at their published sizes: GPT-2 models, and a Llama of about a billion parameters.

Called with tokens and targets, int64 tensors of shape (batch, length), they return the mean cross-entropy. With
`chunked=True` they never hold the logits of all tokens in memory together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Size:
    layers: int
    heads: int
    width: int
    context: int
    vocabulary: int
    key_heads: int = 0
    """Heads of keys and values in a Llama. 0: a GPT-2."""
    inner: int = 0
    """Width of a Llama's MLP."""
    batch: int = 16
    """Sequences in a microbatch."""


SIZES = {
    "gpt2-124m": Size(12, 12, 768, 1024, 50304, batch=32),
    "gpt2-350m": Size(24, 16, 1024, 1024, 50304, batch=16),
    "llama-1b": Size(16, 32, 2048, 2048, 128256, key_heads=8, inner=8192, batch=4),
    "tiny": Size(2, 2, 32, 64, 256, batch=2),
    "tiny-llama": Size(2, 4, 32, 64, 256, key_heads=2, inner=64, batch=2),
}


class GptBlock(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.query_key_value = nn.Linear(size.width, 3 * size.width)
        self.projection = nn.Linear(size.width, size.width)
        self.perceptron = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(approximate="tanh"), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.query_key_value(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.perceptron(self.norm_2(x))


class LlamaBlock(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.key_heads = size.heads, size.key_heads
        head = size.width // size.heads
        self.norm_1, self.norm_2 = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.query = nn.Linear(size.width, size.width, bias=False)
        self.key_value = nn.Linear(size.width, 2 * size.key_heads * head, bias=False)
        self.projection = nn.Linear(size.width, size.width, bias=False)
        self.gate_up = nn.Linear(size.width, 2 * size.inner, bias=False)
        self.down = nn.Linear(size.inner, size.width, bias=False)
        angles = torch.outer(torch.arange(size.context), 500_000.0 ** (-torch.arange(0, head, 2) / head))
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        normed = self.norm_1(x)
        query = self._rotated(self.query(normed).view(batch, length, self.heads, -1)).transpose(1, 2)
        key, value = self.key_value(normed).view(batch, length, 2, self.key_heads, -1).unbind(2)
        mixed = F.scaled_dot_product_attention(
            query, self._rotated(key).transpose(1, 2), value.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)

    def _rotated(self, x: Tensor) -> Tensor:
        """Apply rotary position embeddings (Su et al., 2021) to a tensor of shape (batch, length, heads, head)."""
        first, second = x.float().chunk(2, dim=-1)
        cosine, sine = self.cosine[: x.shape[1], None], self.sine[: x.shape[1], None]
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).type_as(x)


class LanguageModel(nn.Module):
    def __init__(self, size: Size, *, chunked: bool) -> None:
        super().__init__()
        self.chunked = chunked
        is_llama = size.key_heads > 0
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = None if is_llama else nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(LlamaBlock(size) if is_llama else GptBlock(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width) if is_llama else nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x).flatten(0, 1)
        if not self.chunked:
            return F.cross_entropy(self.head(x).float(), targets.flatten())
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        options = nn.LinearCrossEntropyOptions()
        return F.linear_cross_entropy(x, self.head.weight.to(x.dtype), targets.flatten(), options=options)


def flops_a_token(model: LanguageModel, size: Size) -> float:
    """Return the FLOPs per token of a forward and a backward: 6 N + 12 L H Q T.

    The formula is that of Chowdhery et al. (PaLM, 2022, appendix B) and of nanoGPT.

    N: parameters, without the embedding of positions (a tied embedding of tokens counts once, for the head). L, H, Q,
    T: layers, heads, width of a head, context; attention counts as if nothing were masked.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if model.positions is not None:
        parameters -= model.positions.weight.numel()
    return 6 * parameters + 12 * size.layers * size.width * size.context
