"""python gpt2.py [fp32|bf16]: a GPT-2 of transformers on texts of uneven lengths, its loss computed here."""

import sys

import torch
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import lockstep as ls

WORDS, LENGTH = 48, 12
CONFIG = GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
# Query, key and value are one layer in GPT-2: it is gathered.
TENSOR = {
    "*.attn.c_attn": "colwise_gathered",
    "*.attn.c_proj": "rowwise_split",
    "*.mlp.c_fc": "colwise",
    "*.mlp.c_proj": "rowwise",
    "transformer.wte": "embedding",
}


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


if __name__ == "__main__":
    ls.train(
        ls.Recipe(
            model=lambda: GPT2LMHeadModel(CONFIG),
            data=Texts(256),
            inputs=lambda batch: {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]},
            loss=lambda output, batch: ls.Sum(
                F.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
            ),
            weight=lambda batch: (batch["labels"][:, 1:] != -100).sum(),
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
            tensor=TENSOR,
            global_batch=28,
            microbatch=4,
            steps=100,
            clip_norm=1.0,
            precision=sys.argv[1] if len(sys.argv) > 1 else "fp32",
        )
    )
