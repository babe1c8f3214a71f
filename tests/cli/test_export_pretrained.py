"""`lockstep export --format huggingface` and `ls.export_pretrained`: folders for `from_pretrained`,
from any plan."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep as ls
from lockstep.base.errors import CheckpointError
from lockstep.testing.pool import WorkerPool

pytestmark = [
    pytest.mark.command,
    pytest.mark.timeout(300),  # importing transformers takes half a minute on a busy machine
    pytest.mark.skipif(find_spec("transformers") is None, reason="pip install -e .[dev]"),
]
LOCKSTEP = str(Path(sys.executable).parent / "lockstep")
CONFIG: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2, "use_cache": False, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def quiet() -> None:
    """Import transformers before the first test. End its progress bar, which leaves a thread."""
    import transformers

    transformers.utils.logging.disable_progress_bar()


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


def train(run_dir: str, plan: str, build: Any, saving: bool = False) -> str:
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


def export(*arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [LOCKSTEP, "export", "--format", "huggingface", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2", "tensor=2"])
def test_a_folder_that_from_pretrained_loads(pool: WorkerPool, tmp_path: Path, plan: str) -> None:
    fingerprints = set(
        pool.run(2, train, str(tmp_path / "run"), plan, llama, True, timeout_seconds=200)
    )
    made = export(tmp_path / "run", tmp_path / "llama")
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith(f"{tmp_path / 'llama'}: ")
    assert {ls.fingerprint(read(tmp_path / "llama"))} == fingerprints
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert export(checkpoint, tmp_path / "earlier").returncode == 0
    read(tmp_path / "earlier")
    again = export(tmp_path / "run", tmp_path / "llama")
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


def test_by_the_models_own_save_pretrained(pool: WorkerPool, tmp_path: Path) -> None:
    fingerprint, _ = pool.run(
        2, train, str(tmp_path / "run"), "shard=2", llama, timeout_seconds=200
    )
    ls.export_pretrained(str(tmp_path / "run"), str(tmp_path / "llama"), llama)
    assert ls.fingerprint(read(tmp_path / "llama")) == fingerprint
    with pytest.raises(CheckpointError, match="nothing is overwritten"):
        ls.export_pretrained(str(tmp_path / "run"), str(tmp_path / "llama"), llama)
    with pytest.raises(CheckpointError, match="a Linear, without save_pretrained"):
        ls.export_pretrained(
            str(tmp_path / "run"), str(tmp_path / "other"), lambda: torch.nn.Linear(2, 2)
        )


def test_adapters_of_peft_are_written_alone(pool: WorkerPool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    pool.run(2, train, str(tmp_path / "run"), "shard=2", adapted, timeout_seconds=200)
    ls.export_pretrained(str(tmp_path / "run"), str(tmp_path / "adapters"), adapted)
    assert {path.name for path in (tmp_path / "adapters").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert not (tmp_path / "adapters" / "model.safetensors").exists()
    from safetensors.torch import load_file

    trained = load_file(tmp_path / "run" / "model.safetensors")
    loaded = peft.PeftModel.from_pretrained(llama(), str(tmp_path / "adapters")).state_dict()
    adapters = {name for name in trained if "lora_" in name}
    assert adapters
    assert all(torch.equal(loaded[name], trained[name]) for name in adapters)
