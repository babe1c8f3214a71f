"""python models.py NAME [bf16]: the models that tests/matrix.py verifies under every plan.

Seven microbatches per step, the last one short; texts and images with different weights; clipped
gradients.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import lockstep as ls

TESTS = Path(__file__).parents[1]
EXAMPLES = TESTS.parent / "examples"
WORDS, LENGTH, WIDTH, HEADS = 48, 12, 32, 4
SAMPLES = 128


class Texts(Dataset[dict[str, Tensor]]):
    """Texts of 2 to 12 words, with a mask and labels; the label of padding is -100."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.words = torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator)
        self.lengths = torch.randint(2, LENGTH + 1, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        there, words = torch.arange(LENGTH) < self.lengths[index], self.words[index]
        return {
            "input_ids": words * there,
            "attention_mask": there.long(),
            "labels": words.masked_fill(~there, -100),
        }


def tokens(batch: dict[str, Tensor]) -> Tensor:
    """Return the number of words to predict."""
    return (batch["labels"][:, 1:] != -100).sum()


def of_words(logits: Tensor, batch: dict[str, Tensor]) -> ls.Sum:
    return ls.Sum(
        F.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
        )
    )


def images() -> TensorDataset:
    """Images, labels, and a weight of 1 to 8 for each image."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 1, 8, 8, generator=generator)
    label = torch.randint(0, 10, (SAMPLES,), generator=generator)
    return TensorDataset(x, label, torch.randint(1, 9, (SAMPLES,), generator=generator))


def of_images(logits: Tensor, batch: list[Tensor]) -> ls.Sum:
    return ls.Sum((F.cross_entropy(logits, batch[1], reduction="none") * batch[2]).sum())


class Layer(nn.Module):
    """An MLP block. Its norm is where a tensor axis leaves activations whole."""

    def __init__(self, norm: type[nn.Module], dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            norm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.relu(self.up(self.norm(x)))))


def perceptron(norm: type[nn.Module], dropout: float) -> nn.Module:
    """(batch, 1, 8, 8) images -> (batch, 10) logits. A Sequential, which needs no list of
    stages."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, WIDTH),
        *(Layer(norm, dropout) for _ in range(3)),
        nn.Linear(WIDTH, 10),
    )


class Convolution(nn.Module):
    """Halves the image. The gradient of the bias before a BatchNorm is nothing but rounding."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convolution, self.norm = (
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(self.norm(self.convolution(x))), 2)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x.flatten(1))))


class Convolutions(nn.Module):
    """(batch, 1, 8, 8) images -> (batch, 10) logits."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.features = nn.ModuleList([Convolution(4, 8), Convolution(8, 16)])
        self.classifier = Classifier()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for feature in self.features:
            x = feature(x)
        return self.classifier(x)


def gpt(dropout: float) -> nn.Module:
    """The GPT of examples/gpt.py, with bytes as words and tied embeddings."""
    sys.path.append(str(EXAMPLES))
    from gpt import GPT

    return GPT(layers=2, width=WIDTH, heads=HEADS, context=LENGTH, dropout=dropout)


def gpt2() -> nn.Module:
    """GPT-2 from transformers, with its dropout of 0.1."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=2,
        n_head=HEADS,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


class Embedding(nn.Module):
    """The first stage of a GPT-2: embeddings of words and positions."""

    def __init__(self, transformer: Any) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = transformer.wte, transformer.wpe, transformer.drop

    def forward(self, words: Tensor) -> Tensor:
        return self.drop(
            self.wte(words) + self.wpe(torch.arange(words.shape[1], device=words.device))
        )


class Rotated(nn.Module):
    """A layer of a Llama with its own rotary position embedding."""

    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.layer, self.rotary = layer, deepcopy(rotary)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)[None]
        return self.layer(x, position_embeddings=self.rotary(x, places))


def in_stages(
    words: nn.Module, layers: Iterable[nn.Module], norm: nn.Module, head: nn.Module
) -> nn.Module:
    """(batch, length) words -> logits.

    Texts are padded on the right, so no word attends to padding and no mask is needed.
    """
    return nn.Sequential(
        OrderedDict(words=words, layers=nn.Sequential(*layers), head=nn.Sequential(norm, head))
    )


def gpt2_in_stages() -> nn.Module:
    whole: Any = gpt2()
    return in_stages(
        Embedding(whole.transformer), whole.transformer.h, whole.transformer.ln_f, whole.lm_head
    )


def llama_in_stages() -> nn.Module:
    whole: Any = llama()
    layers = (Rotated(layer, whole.model.rotary_emb) for layer in whole.model.layers)
    return in_stages(whole.model.embed_tokens, layers, whole.model.norm, whole.lm_head)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(*heads.chunk(3, 1), is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Stacked experts: MLPs."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, WIDTH, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(experts, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros_like(tokens)
        for expert in range(len(self.up)):
            row, choice = (index == expert).nonzero(as_tuple=True)
            computed = F.relu(tokens[row] @ self.up[expert]) @ self.down[expert]
            output = output.index_add(0, row, computed * weights[row, choice, None])
        return output


class MixtureLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(WIDTH)
        self.router, self.experts = nn.Linear(WIDTH, 4, bias=False), Experts()

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        tokens = self.norm(x).flatten(0, 1)
        weights, index = self.router(tokens).softmax(-1).topk(2)
        return x + self.experts(tokens, index, weights).view_as(x)


def mixture() -> nn.Module:
    """A GPT whose MLPs are mixtures of experts. Without positions."""
    layers = (MixtureLayer() for _ in range(2))
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers, nn.Linear(WIDTH, WORDS))


def mixture_of(family: str) -> nn.Module:
    """A mixture of experts of transformers. Its name ends in `-eager` for experts that run in
    float64."""
    sys.path.append(str(TESTS))
    from model.expert.families import mixture_of_experts

    name = family.removesuffix("-eager")
    return mixture_of_experts(name, "grouped_mm" if name == family else "eager")


TEXTS: dict[str, Any] = {
    "data": Texts(),
    "inputs": lambda batch: batch["input_ids"],
    "loss": of_words,
    "weight": tokens,
}
IMAGES: dict[str, Any] = {
    "data": images(),
    "inputs": lambda batch: batch[0],
    "loss": of_images,
    "weight": lambda batch: batch[2].sum(),
    "tensor": {"*.up": "colwise", "*.down": "rowwise"},
}
HUGGING_FACE: dict[str, Any] = {
    **TEXTS,
    "inputs": lambda batch: {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
    },
    "loss": lambda output, batch: of_words(output.logits, batch),
}
GPT: dict[str, Any] = {
    **TEXTS,
    "stages": ["embedding", "blocks.*", "head"],
    "tensor": {
        "blocks.*.query_key_value": "colwise_gathered",
        "blocks.*.projection": "rowwise_split",
        "blocks.*.perceptron.1": "colwise",
        "blocks.*.perceptron.3": "rowwise",
    },
}
STAGED: dict[str, Any] = {**TEXTS, "stages": ["words", "layers.*", "head"]}
GPT2_TENSOR = {
    "*.attn.c_attn": "colwise_gathered",
    "*.attn.c_proj": "rowwise_split",
    "*.mlp.c_fc": "colwise",
    "*.mlp.c_proj": "rowwise",
}
LLAMA_TENSOR = {
    **dict.fromkeys(["*.q_proj", "*.k_proj", "*.v_proj", "*.gate_proj", "*.up_proj"], "colwise"),
    **dict.fromkeys(["*.o_proj", "*.down_proj"], "rowwise"),
}
FAMILIES = ("mixtral", "qwen3-moe", "gpt-oss", "deepseek-v3")
BALANCE = ls.Balance(
    coefficient=0.01, over="step", tokens=lambda batch: batch["attention_mask"] != 0
)
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {**GPT, "model": lambda: gpt(0.0)},
    "gpt-dropout": {**GPT, "model": lambda: gpt(0.1)},
    "perceptron-batchnorm": {**IMAGES, "model": lambda: perceptron(nn.BatchNorm1d, 0.1)},
    # Each slice draws its own dropout masks, so they depend on the number of ranks (an exception,
    # see docs/plans.md).
    "perceptron-syncbatchnorm": {**IMAGES, "model": lambda: perceptron(nn.SyncBatchNorm, 0.0)},
    "convolutions": {
        **IMAGES,
        "model": Convolutions,
        "stages": ["stem", "features.*", "classifier"],
    },
    "gpt2": {
        **HUGGING_FACE,
        "model": gpt2,
        "tensor": {**GPT2_TENSOR, "transformer.wte": "embedding"},
    },
    "gpt2-in-stages": {**STAGED, "model": gpt2_in_stages, "tensor": GPT2_TENSOR},
    "llama": {**HUGGING_FACE, "model": llama},
    "llama-in-stages": {**STAGED, "model": llama_in_stages, "tensor": LLAMA_TENSOR},
    "mixture": {**TEXTS, "model": mixture, "balance": BALANCE},
    **{
        family: {**HUGGING_FACE, "model": partial(mixture_of, family), "balance": BALANCE}
        for name in FAMILIES
        for family in (name, f"{name}-eager")
    },
}
"""The models' parts of a recipe, by name."""


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


if __name__ == "__main__":
    name, *precision = sys.argv[1:]
    recipe = ls.Recipe(
        **MODELS[name],
        optimizer=adamw,
        # The last microbatch has 3: of 2, BatchNorm makes signs, which rounding to bf16 flips.
        global_batch=27,
        microbatch=4,
        steps=100,
        clip_norm=0.5,
        precision=precision[0] if precision else "fp32",
    )
    ls.train(recipe)
