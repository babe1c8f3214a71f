"""`lockstep export --format huggingface` and `ls.export_pretrained`: folders for `from_pretrained`,
from any plan."""

from __future__ import annotations

import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import forked
import pytest
import torch

import lockstep as ls
from lockstep.base.errors import CheckpointError
from lockstep.testing.pool import WorkerPool

pytestmark = [
    pytest.mark.command,
    pytest.mark.timeout(300),  # importing transformers takes half a minute on a busy machine
    pytest.mark.skipif(find_spec("transformers") is None, reason="pip install -e .[dev]"),
    pytest.mark.usefixtures("transformers_in_pool"),
]
PLANS = ["replicate=2", "shard=2", "tensor=2"]
CONFIG: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2, "use_cache": False, "tie_word_embeddings": True,
}  # fmt: skip


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**CONFIG))


def read(folder: Path) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder)


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


def loss(output: Any, batch: Any) -> Any:
    return torch.nn.functional.cross_entropy(
        output.logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten()
    )


def train(run_dir: str, plan: str, build: Any, *, saving: bool = False) -> str:
    words = torch.randint(32, (32, 6), generator=torch.Generator().manual_seed(0))
    recipe = ls.Recipe(
        model=build,
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
    return ls.train(
        recipe, run_dir=run_dir, plan=plan, saving=ls.Saving(every=2) if saving else None
    ).fingerprint


def train_each(folder: str) -> dict[str, str]:
    found = {plan: train(f"{folder}/{plan}", plan, llama, saving=True) for plan in PLANS}
    if find_spec("peft"):
        found["adapters"] = train(f"{folder}/adapters", "shard=2", adapted)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def fingerprints(pool: WorkerPool, runs: Path) -> dict[str, str]:
    """The fingerprint of each run, of two processes."""
    first, second = pool.run(2, train_each, str(runs), timeout_seconds=200)
    assert first == second
    return first


def export(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return forked.lockstep("export", "--format", "huggingface", *arguments)


@pytest.mark.parametrize("plan", PLANS)
def test_a_folder_that_from_pretrained_loads(
    fingerprints: dict[str, str], runs: Path, tmp_path: Path, plan: str
) -> None:
    made = export(runs / plan, tmp_path / "llama")
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith(f"{tmp_path / 'llama'}: ")
    assert ls.fingerprint(read(tmp_path / "llama")) == fingerprints[plan]


@pytest.mark.usefixtures("fingerprints")
def test_a_checkpoint_is_exported_too_and_nothing_is_overwritten(
    runs: Path, tmp_path: Path
) -> None:
    (checkpoint,) = (runs / "shard=2" / "checkpoints").iterdir()
    assert export(checkpoint, tmp_path / "earlier").returncode == 0
    read(tmp_path / "earlier")
    again = export(runs / "shard=2", tmp_path / "earlier")
    assert (again.returncode, "is there already; nothing is overwritten" in again.stderr) == (
        2,
        True,
    )


def test_a_model_without_a_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in ("run.json", "result.json"):
        (tmp_path / "run" / name).write_text("{}")
    refused = export(tmp_path / "run", tmp_path / "model")
    assert refused.returncode == 2
    assert "has no folder huggingface" in refused.stderr
    assert not (tmp_path / "model").exists()


def test_by_the_models_own_save_pretrained(
    fingerprints: dict[str, str], runs: Path, tmp_path: Path
) -> None:
    run = str(runs / "shard=2")
    ls.export_pretrained(run, str(tmp_path / "llama"), llama)
    assert ls.fingerprint(read(tmp_path / "llama")) == fingerprints["shard=2"]
    with pytest.raises(CheckpointError, match="nothing is overwritten"):
        ls.export_pretrained(run, str(tmp_path / "llama"), llama)
    with pytest.raises(CheckpointError, match="a Linear, without save_pretrained"):
        ls.export_pretrained(run, str(tmp_path / "other"), lambda: torch.nn.Linear(2, 2))


@pytest.mark.usefixtures("fingerprints")
def test_adapters_of_peft_are_written_alone(runs: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    ls.export_pretrained(str(runs / "adapters"), str(tmp_path / "adapters"), adapted)
    assert {path.name for path in (tmp_path / "adapters").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert not (tmp_path / "adapters" / "model.safetensors").exists()
    from safetensors.torch import load_file

    trained = load_file(runs / "adapters" / "model.safetensors")
    loaded = peft.PeftModel.from_pretrained(llama(), str(tmp_path / "adapters")).state_dict()
    adapters = {name for name in trained if "lora_" in name}
    assert adapters
    assert all(torch.equal(loaded[name], trained[name]) for name in adapters)
