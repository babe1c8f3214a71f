"""python llama.py [fp32|bf16] [tied]: a Llama of transformers with its own plan of layers; the model computes its loss from labels."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lockstep as ls

WORDS, LENGTH = 48, 12
CONFIG = LlamaConfig(
    vocab_size=WORDS,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=LENGTH,
    tie_word_embeddings="tied" in sys.argv,
)


class Texts(torch.utils.data.Dataset):
    """Words with a mask and with labels, -100 where there is no word."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.words = torch.randint(WORDS, (count, LENGTH), generator=generator)
        self.lengths = torch.randint(2, LENGTH + 1, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        there = torch.arange(LENGTH) < self.lengths[index]
        words = self.words[index]
        return {"input_ids": words * there, "attention_mask": there.long(), "labels": words.masked_fill(~there, -100)}


def tokens(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the model takes the mean over."""
    return (batch["labels"][:, 1:] != -100).sum()


if __name__ == "__main__":
    ls.train(
        ls.Recipe(
            model=lambda: LlamaForCausalLM(CONFIG),
            data=Texts(256),
            inputs=dict,
            loss=lambda output, batch: ls.Sum(output.loss * tokens(batch)),
            weight=tokens,
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
            global_batch=28,
            microbatch=4,
            steps=100,
            clip_norm=1.0,
            precision="bf16" if "bf16" in sys.argv else "fp32",
        )
    )
