"""LoRA by peft on a Llama: under every data plan and `tensor`, with adapters in peft's own
format."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

import lockstep as ls
from lockstep.testing.pool import WorkerPool

pytestmark = [
    pytest.mark.command,
    pytest.mark.timeout(300),  # importing transformers takes half a minute on a busy machine
    pytest.mark.skipif(find_spec("peft") is None, reason="pip install -e .[dev]"),
    pytest.mark.usefixtures("transformers_in_pool"),
]

BITWISE = ["replicate=2,numerics=bitwise", "shard=2,numerics=bitwise"]
PLANS = [BITWISE[0], "shard=2", "tensor=2"]
Losses = dict[str, tuple[float, str]]
"""Plan -> the loss and the fingerprint of a training."""
CONFIG: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2, "use_cache": False,
}  # fmt: skip
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class SaveAdapters(ls.Hook):
    def on_finish(self, run: Any) -> None:
        state = run.full_state_dict()
        if run.rank == 0:
            run.model.save_pretrained(str(run.dir / "adapters"), state_dict=state)


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    base = LlamaForCausalLM(LlamaConfig(**CONFIG))
    return get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=ALL))


def loss(output: Any, batch: Any) -> Any:
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def train(run_dir: str, plan: str) -> tuple[float, str]:
    words = torch.randint(32, (32, 6), generator=torch.Generator().manual_seed(0))
    recipe = ls.Recipe(
        model=adapted,
        data=[{"input_ids": row} for row in words],
        inputs=dict,
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad], lr=1e-2
        ),
        global_batch=8,
        microbatch=2,
        steps=3,
    )
    result = ls.train(recipe, run_dir=run_dir, plan=plan, hooks=[SaveAdapters()])
    return result.loss, result.fingerprint


def train_each(folder: str, plans: Sequence[str]) -> Losses:
    return {plan: train(f"{folder}/{plan}", plan) for plan in plans}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def alone(pool: WorkerPool, folder: Path) -> Losses:
    plans = ["replicate=1", "numerics=bitwise"]
    (found,) = pool.run(1, train_each, str(folder), plans, timeout_seconds=200)
    return found


@pytest.fixture(scope="module")
def ranks(pool: WorkerPool, folder: Path) -> list[Losses]:
    """The losses and fingerprints of each plan, on each of two processes: each has to import
    transformers."""
    return pool.run(2, train_each, str(folder), [*{*PLANS, *BITWISE}], timeout_seconds=200)


@pytest.mark.parametrize("plan", PLANS)
def test_it_trains_as_on_one_process_and_saves_the_adapters(
    alone: Losses, ranks: list[Losses], folder: Path, plan: str
) -> None:
    from peft import PeftModel
    from transformers import LlamaConfig, LlamaForCausalLM

    for found in ranks:
        assert found[plan][0] == pytest.approx(alone["replicate=1"][0], rel=1e-5)
    expected, trained = (
        load_file(folder / name / "model.safetensors") for name in ("replicate=1", plan)
    )
    adapters = {name for name in trained if "lora_" in name}
    assert len(adapters) == 2 * 2 * len(ALL)
    assert all(torch.allclose(trained[name], expected[name], atol=1e-4) for name in trained)
    base = LlamaForCausalLM(LlamaConfig(**CONFIG))
    loaded = PeftModel.from_pretrained(base, str(folder / plan / "adapters")).state_dict()
    assert all(torch.equal(loaded[name], trained[name]) for name in adapters)
    assert any(trained[name].any() for name in adapters if "lora_B" in name), (
        "they are zero before training"
    )


@pytest.mark.parametrize("plan", BITWISE)
def test_the_bits_are_those_of_one_process(alone: Losses, ranks: list[Losses], plan: str) -> None:
    assert {found[plan][1] for found in ranks} == {alone["numerics=bitwise"][1]}
