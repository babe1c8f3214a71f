"""LoRA on a Llama by peft: the base model is frozen, and the adapters are saved in peft's own
format.

lockstep run --nproc 2 examples/cookbook/lora.py
"""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import lockstep as ls

config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2,
    use_cache=False,
)  # fmt: skip
adapters = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
words = torch.randint(64, (96, 12), generator=torch.Generator().manual_seed(0))
words[:, 1::2] = words[:, ::2]
data = [{"input_ids": row} for row in words]


def build() -> Any:
    # in life: weights="folder" in the recipe, or from_pretrained here
    base = LlamaForCausalLM(config)
    return get_peft_model(base, adapters)


recipe = ls.Recipe(
    model=build,
    data=data,
    inputs=dict,
    loss=lambda output, batch: F.cross_entropy(
        output.logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten()
    ),
    optimizer=lambda model: torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2
    ),
    global_batch=16,
    microbatch=4,
    steps=10,
)


class SaveAdapters(ls.Hook):
    def on_finish(self, run: Any) -> None:
        state = run.full_state_dict()  # every rank calls it, under every plan
        if run.rank == 0:
            run.model.save_pretrained(str(run.dir / "adapters"), state_dict=state)


def train(**options: Any) -> str:
    return ls.train(recipe, **{"hooks": [SaveAdapters()], **options}).fingerprint


if __name__ == "__main__":
    train()
