"""Published rows as values: which are left out and why, what is assumed of the others, and what
their parts cost."""

from __future__ import annotations

import csv
import math
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from published import transformer
from published.evaluation import Pair, coverage, interval, memories, out_of_memory, quantiles, times
from published.machines import cluster_of, device_name
from published.reading import COLUMNS, load
from published.rows import DATA, Row
from published.software import is_known, software_of
from published.step import layer_seconds, pipeline_seconds, predict, sharded_seconds, tensor_seconds
from published.unstated import with_schedule

from lockstep.planner.machines.costs import FITTED, INTERVALS, Fitted

# its modules have names of folders of tests
sys.path.remove(str(Path(__file__).parents[2] / "benchmarks"))

LLAMA = {
    "source": "someone/else:README.md", "model": "Llama-3-8B", "gpu": "H100-80GB",
    "gpu_count": "8", "fsdp": "8", "seq_len": "8192",
    "micro_batch": "1", "global_batch": "8", "precision": "bf16", "tokens_per_s_per_gpu": "6000",
}  # fmt: skip


def read(
    folder: Path, *rows: dict[str, str], columns: list[str] | None = None
) -> tuple[list[Row], dict[str, int]]:
    path = folder / "rows.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(
            file, columns or [each for each in COLUMNS if each != "network_gbit_per_node"]
        )
        writer.writeheader()
        writer.writerows(rows)
    return load(path)


def one(folder: Path, **cells: str) -> Row:
    (row,), others = read(folder, LLAMA | cells)
    assert not others
    return row


def test_a_well_known_model_has_its_shape(tmp_path: Path) -> None:
    row = one(tmp_path)
    assert (row.layers, row.hidden, row.ffn, row.kv_heads, row.vocab, row.gated) == (
        32,
        4096,
        14336,
        8,
        128256,
        True,
    )
    assert row.seconds == pytest.approx(8 * 8192 / 8 / 6000)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"gpu": "MI250X"}, "no data sheet of the device MI250X"),
        ({"gpu": "A100-PCIE-40GB"}, "no data sheet of the device A100-PCIE-40GB"),
        ({"gpu": ""}, "no data sheet of the device (none stated)"),
        ({"precision": ""}, "precision not stated"),
        ({"precision": "nvfp4+bf16tail"}, "not bf16 or fp16"),
        ({"model": "nobody's"}, "not stated: hidden, layers"),
        (
            {"micro_batch": "", "global_batch": "", "fsdp": "", "gpu_count": "16"},
            "not stated: micro_batch, layout",
        ),
        ({"seq_len": "long"}, "not a number: seq_len"),
        ({"tokens_per_s_per_gpu": "0"}, "too small: tokens_per_s_per_gpu"),
        ({"tokens_per_s_per_gpu": ""}, "neither step time nor out of memory"),
        ({"tp": "2"}, "inconsistent: the mesh's sizes do not multiply to the devices"),
        (
            {"notes": "LoRA r=8"},
            "not a plain step (LoRA, 8-bit optimizers, offload, padding, an unclear unit)",
        ),
        (
            {"tokens_per_s_per_gpu": "", "tflops_per_gpu": "400", "seq_len": "131072"},
            (
                "a time in TFLOP/s alone, of so long a sequence that it matters how attention was"
                " counted, which is not stated"
            ),
        ),
    ],
)
def test_a_row_that_is_left_out_says_why(
    tmp_path: Path, cells: dict[str, str], reason: str
) -> None:
    assert read(tmp_path, LLAMA | cells) == ([], {reason: 1})


def test_columns_may_be_absent(tmp_path: Path) -> None:
    (row,), others = read(tmp_path, LLAMA, columns=list(LLAMA))
    assert not others
    assert predict(row).seconds > 0


@given(st.dictionaries(st.sampled_from(COLUMNS), st.text(max_size=6)))
def test_no_cell_is_a_crash(
    tmp_path_factory: pytest.TempPathFactory, cells: dict[str, str]
) -> None:
    rows, others = read(tmp_path_factory.mktemp("rows"), LLAMA | cells, columns=list(COLUMNS))
    assert len(rows) + sum(others.values()) == 1


@pytest.mark.parametrize(
    "cells",
    [
        {"mem_gib": "OOM"},
        {"notes": "ran out of memory"},
        {"notes": "ZeRO-1; OOM at the first step"},
    ],
)
def test_a_row_without_a_time_ran_out_of_memory_where_it_says_so(
    tmp_path: Path, cells: dict[str, str]
) -> None:
    assert one(tmp_path, tokens_per_s_per_gpu="", **cells).out_of_memory
    row = one(tmp_path, **cells)
    assert not row.out_of_memory
    assert memories([row]) == [] == out_of_memory([row])


def test_tflops_are_counted_with_the_whole_of_attention(tmp_path: Path) -> None:
    row = one(tmp_path, tokens_per_s_per_gpu="", tflops_per_gpu="400")
    flops = (
        6 * transformer.layer_parameters(row) * 32 + 12 * 32 * 4096 * 8192 + 6 * row.vocab * 4096
    )
    assert row.seconds == pytest.approx(8192 * flops / 400e12)


@pytest.mark.parametrize(
    ("text", "sheet"),
    [
        ("8xH100 SXM5", "H100"), ("H100-95GB", "H100-HBM2e"), ("NVIDIA A100-SXM4-40GB", "A100-40GB"), ("A100", "A100-80GB"),
        ("RTX 4090", "RTX4090"), ("RTX A6000", "A6000"), ("GB200 NVL72", "GB200"), ("Blackwell, 184 GiB", "GB200"),
        ("H800", "H800"), ("GH200", None), ("H100 NVL", None), ("8 x L40S", "L40S"), ("NVIDIA L4", "L4"), ("RTX 5090", "RTX5090"),
        ("MI300X", "MI300X"), ("H20", "H20"), ("L40", None), ("TPU v4", None),
    ],
)  # fmt: skip
def test_a_device_is_named_or_not_known(text: str, sheet: str | None) -> None:
    assert device_name("someone/else", text) == sheet


def test_a_source_whose_part_is_another_than_it_says_has_that_parts_sheet() -> None:
    assert device_name("pytorch/torchtitan:docs/performance.md", "H100-SXM") == "H100-HBM2e"
    assert device_name("pytorch/torchtitan:docs/performance.md", "A100-80GB") == "A100-80GB"


def test_the_machines_of_a_source_are_as_published(tmp_path: Path) -> None:
    """Jean Zay's 4 links of 100 Gbit/s are shared by 8 devices, and NCCL reaches 135 of 400."""
    row = one(tmp_path, gpu="A100-80GB", gpu_count="16", fsdp="16")
    known = replace(row, source="bigscience-workshop/bigscience:chronicles.md")
    link = cluster_of(known).between
    assert link.bytes_per_second * link.fraction == pytest.approx(135e9 / 8 / 8, rel=0.01)
    assert cluster_of(row).between.name == "InfiniBand-HDR"


def test_software_that_is_not_known_is_taken_by_the_layout(tmp_path: Path) -> None:
    sharded, split = one(tmp_path), one(tmp_path, fsdp="1", tp="8")
    assert [is_known(each) for each in (sharded, split)] == [False, False]
    assert [software_of(each).name for each in (sharded, split)] == ["FSDP2", "Megatron Core"]
    assert is_known(one(tmp_path, notes="torchtitan"))


def test_a_microbatch_that_is_not_stated_is_the_fastest_that_fits(tmp_path: Path) -> None:
    cells = {"micro_batch": "", "global_batch": "128", "act_ckpt": "none"}
    assert with_schedule(one(tmp_path, **cells)).microbatch == 1
    row = with_schedule(one(tmp_path, **cells | {"act_ckpt": "full"}))
    assert row.microbatch > 1
    assert predict(row).seconds < predict(replace(row, microbatch=1)).seconds
    assert with_schedule(row) is row


def test_a_pipeline_that_states_no_schedule_is_interleaved(tmp_path: Path) -> None:
    cells = {
        "micro_batch": "",
        "gpu_count": "64",
        "fsdp": "2",
        "tp": "8",
        "pp": "4",
        "global_batch": "16",
    }
    assert with_schedule(one(tmp_path, **cells)).virtual > 1
    assert with_schedule(one(tmp_path, **cells | {"micro_batch": "1"})).virtual == 1


def test_a_step_without_an_optimizer_has_no_update(tmp_path: Path) -> None:
    assert (
        predict(one(tmp_path, notes="fwd+loss+bwd ONLY (no optimizer)")).update
        == 0
        < predict(one(tmp_path)).update
    )


def test_attention_in_elementary_operations_moves_its_scores_often(tmp_path: Path) -> None:
    cells = {
        "model": "GPT-2-124M",
        "gpu": "A100",
        "gpu_count": "1",
        "fsdp": "1",
        "seq_len": "1024",
        "global_batch": "1",
    }
    eager = one(tmp_path, source="karpathy/nanoGPT:README.md", **cells)
    compiled = replace(eager, compiled="yes")
    moved = [
        sum(
            each.bytes
            for each in transformer.forward(row, software_of(row))
            if "softmax" in each.name
        )
        for row in (eager, compiled)
    ]
    assert moved[0] == 28 * 12 * 1024 * 1024 == 7 * moved[1]


def test_a_vocabulary_of_50257_costs_a_quarter_of_a_step_of_gpt2(tmp_path: Path) -> None:
    """Karpathy, 3 February 2023: 50,304 instead makes nanoGPT's step on an A100, compiled, about
    25% faster."""
    cells = {
        "model": "GPT-2-124M",
        "gpu": "A100",
        "gpu_count": "1",
        "fsdp": "1",
        "seq_len": "1024",
        "global_batch": "12",
    }
    row = one(
        tmp_path,
        source="karpathy/nanoGPT:README.md",
        **cells,
        micro_batch="12",
        compile="yes",
        notes="flash",
    )
    odd, padded = (predict(replace(row, vocab=vocab)).seconds for vocab in (50257, 50304))
    assert 1.2 < odd / padded < 1.4


def test_small_layers_wait_for_their_host(tmp_path: Path) -> None:
    cells = {
        "model": "GPT-2-124M",
        "gpu": "A100",
        "gpu_count": "1",
        "fsdp": "1",
        "seq_len": "128",
        "global_batch": "1",
    }
    row = one(tmp_path, source="karpathy/nanoGPT:README.md", **cells)
    parts = predict(row)
    assert parts.launches > parts.compute
    assert predict(replace(row, compiled="CUDA graphs")).launches == 0
    assert predict(replace(row, seq=4096, microbatch=16, batch=16)).launches == 0


def test_an_interval_holds_most_rows_of_a_source_that_it_was_made_without(tmp_path: Path) -> None:
    """Rows of four sources lie close together, each source elsewhere: the others' quantiles hold
    too few of one's."""
    row = one(tmp_path)
    places = {"a": 0.8, "b": 1.0, "c": 1.1, "d": 1.3}
    pairs = [
        Pair(replace(row, source=name), 1.0, place + step / 100)
        for name, place in places.items()
        for step in range(10)
    ]
    assert min(coverage(pairs, 1.0)) < 0.8
    low, high = interval(pairs)
    narrow = quantiles(pairs)
    assert low < narrow[0] < narrow[1] < high
    assert (
        min(coverage(pairs, math.log(high / low) / math.log(narrow[1] / narrow[0]) + 1e-9)) >= 0.8
    )


def test_the_planners_interval_is_that_of_the_published_rows() -> None:
    tables = tomllib.loads((DATA / "held_out.toml").read_text(encoding="utf-8"))
    rows = [with_schedule(row) for row in load()[0]]
    pairs = times(rows, lambda source: Fitted(**tables[source]))
    assert interval(pairs) == pytest.approx(
        (INTERVALS["seconds"].low, INTERVALS["seconds"].high), abs=0.01
    )


def test_keeping_some_operations_gathers_inputs_again(tmp_path: Path) -> None:
    def tensor(**cells: str) -> float:
        row = one(tmp_path, source="pytorch/torchtitan:x", tp="8", fsdp="1", **cells)
        return tensor_seconds(row, software_of(row), cluster_of(row), FITTED, rounds=2)

    assert tensor(act_ckpt="selective-op") == pytest.approx(
        1.25 * tensor(act_ckpt="none"), rel=0.02
    )
    assert tensor(act_ckpt="selective-layer") == tensor(act_ckpt="none")


def test_a_pipelines_stage_gathers_its_parameters_once_a_step(tmp_path: Path) -> None:
    def data(pp: str) -> float:
        row = one(tmp_path, fsdp="8", pp=pp, gpu_count=str(8 * int(pp)), global_batch="512")
        cluster = cluster_of(row)
        layer = replace(
            layer_seconds(row, software_of(row), cluster, FITTED), forward=0.0, backward=0.0
        )
        return sharded_seconds(row, software_of(row), cluster, layer, FITTED)

    assert data("1") > 32 * data("2")


def test_tensor_parallel_ranks_share_the_messages_of_deepspeeds_pipeline(tmp_path: Path) -> None:
    def pipeline(tp: str) -> float:
        cells = {
            "gpu_count": str(2 * int(tp)),
            "fsdp": "1",
            "pp": "2",
            "precision": "fp16",
            "micro_batch": "8",
        }
        row = one(
            tmp_path, source="bigscience-workshop/bigscience:x", gpu="A100-80GB", tp=tp, **cells
        )
        return pipeline_seconds(
            replace(row, world=16), software_of(row), cluster_of(replace(row, world=16)), FITTED
        )

    assert pipeline("1") > 4 * pipeline("8")
