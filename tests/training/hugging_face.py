"""Models of transformers, tiny and random, and what trains them. Apart from the tests, because
importing transformers is slow."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset
from training.subjects import state_of
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import lockstep as ls

WORDS, LENGTH = 32, 9
GPT2 = {
    "*.attn.c_attn": "colwise_gathered",
    "*.attn.c_proj": "rowwise_split",
    "*.mlp.c_fc": "colwise",
    "*.mlp.c_proj": "rowwise",
    "transformer.wte": "embedding",
}
LLAMA = {
    **{f"*.{name}_proj": "colwise" for name in ("q", "k", "v", "gate", "up")},
    "*.o_proj": "rowwise",
    "*.down_proj": "rowwise",
    "model.embed_tokens": "embedding",
    "lm_head": "loss",
}


def gpt2(dropout: float = 0.0, **changes: Any) -> GPT2LMHeadModel:
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    sizes = {
        "vocab_size": WORDS,
        "n_positions": 16,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops, **changes))


def llama(**changes: Any) -> LlamaForCausalLM:
    sizes = {
        "vocab_size": WORDS,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "max_position_embeddings": 16,
    }
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, **changes)
    )


class Texts(Dataset):  # type: ignore[type-arg]
    """Texts of 2 to 9 words."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.words = torch.randint(WORDS, (48, LENGTH), generator=generator)
        self.lengths = torch.randint(2, LENGTH + 1, (48,), generator=generator)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        there, words = torch.arange(LENGTH) < self.lengths[index], self.words[index]
        return {
            "input_ids": words * there,
            "attention_mask": there.long(),
            "labels": words.masked_fill(~there, -100),
        }


def tokens(batch: Any) -> Tensor:
    counted: Tensor = (batch["labels"][:, 1:] != -100).sum()
    return counted


def of_logits(output: Any, batch: Any) -> ls.Sum:
    return ls.Sum(
        F.cross_entropy(
            output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
        )
    )


def of_the_model(output: Any, batch: Any) -> ls.Sum:
    """The model has computed a mean over tokens, from the labels that it was given."""
    return ls.Sum(output.loss * tokens(batch))


def without_labels(batch: Any) -> dict[str, Tensor]:
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


CASES: dict[str, dict[str, Any]] = {
    "gpt2": {"model": gpt2, "tensor": GPT2},
    "gpt2 with dropout": {"model": partial(gpt2, 0.1), "tensor": GPT2},
    "gpt2, attention step by step": {
        "model": partial(gpt2, 0.1, attn_implementation="eager"),
        "tensor": GPT2,
    },
    "gpt2 in bf16": {"model": gpt2, "tensor": GPT2, "precision": "bf16"},
    "gpt2's own loss, of cut logits": {
        "model": gpt2,
        "tensor": {**GPT2, "lm_head": "loss"},
        "inputs": dict,
        "loss": of_the_model,
    },
    "llama": {"model": llama},
    "llama's own loss": {"model": llama, "inputs": dict, "loss": of_the_model},
    "llama, tied": {"model": partial(llama, tie_word_embeddings=True)},
    "llama, tied, with cut logits": {
        "model": partial(llama, tie_word_embeddings=True),
        "tensor": LLAMA,
    },
    "llama with dropout": {"model": partial(llama, attention_dropout=0.1)},
    "llama in bf16": {"model": llama, "precision": "bf16"},
}


class Losses(ls.Hook):
    """Of each step, and the whole parameters after the last."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def after_step(self, run: Any) -> None:
        self.seen.append(run.loss)

    def on_finish(self, run: Any) -> None:
        self.state = state_of(run.model)


Found = tuple[list[float], dict[str, Tensor], list[str]]


def train(name: str, plan: str, run_dir: str) -> Found:
    """Three steps of uneven microbatches. Returns losses, state and the names of events."""
    given: dict[str, Any] = {"inputs": without_labels, "loss": of_logits, **CASES[name]}
    recipe = ls.Recipe(
        data=Texts(),
        weight=tokens,
        optimizer=sgd,
        clip_norm=0.5,
        global_batch=10,
        microbatch=4,
        steps=3,
        **given,
    )
    losses = Losses()
    result = ls.train(recipe, plan=plan, run_dir=run_dir, hooks=[losses])
    return losses.seen, losses.state, [event.name for event in result.events]


def train_all(names: Sequence[str], plan: str, folder: str) -> list[Found]:
    return [train(name, plan, str(Path(folder) / name)) for name in names]
