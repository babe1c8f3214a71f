"""`--on this`: the accelerators of this machine, here pretended ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from device.test_measuring import write

from lockstep.base import accelerator
from lockstep.base.errors import PlanError
from lockstep.planner.machines import measuring_gpu
from lockstep.planner.machines.hardware import Cluster, cluster_of, parse_target, replace_this


def pretend(monkeypatch: pytest.MonkeyPatch, count: int, name: str) -> None:
    monkeypatch.setattr(accelerator, "count", lambda: count)
    monkeypatch.setattr(accelerator, "product_name", lambda: name)


@pytest.mark.parametrize(
    ("product", "sheet"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA RTX A6000", "A6000"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_a_known_product_is_planned_for_by_its_data_sheet(
    product: str, sheet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, 4, product)
    for text, count in (("this", 4), ("2 x this", 2)):
        cluster = cluster_of(text)
        assert isinstance(cluster, Cluster)
        assert (cluster.device.name, cluster.count) == (sheet, count)
        assert parse_target(replace_this(text, tmp_path)) == cluster
    assert list(tmp_path.iterdir()) == []


def test_a_product_without_a_data_sheet_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, 2, "NVIDIA A100-PCIE-40GB")
    monkeypatch.setattr(measuring_gpu, "write_gpu_sheets", write)
    assert cluster_of("this") == 2
    cluster = parse_target(replace_this("this", tmp_path))
    assert (cluster.device.name, cluster.count, cluster.inside.name) == (
        "Stand-in",
        2,
        "Stand-in link",
    )
    assert "no data sheet describes NVIDIA A100-PCIE-40GB" in capsys.readouterr().err


def test_without_an_accelerator_it_names_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 0, "")
    monkeypatch.setattr(accelerator, "unseen", lambda environ: "no driver")
    with pytest.raises(PlanError) as refused:
        cluster_of("2 x this")
    text = str(refused.value)
    assert "--on '2 x this'" in text
    assert "no driver" in text
    assert "\n" not in text
    assert cluster_of(text.partition('--on "')[2].partition('"')[0]) == parse_target("1 x H100")


@pytest.mark.parametrize("text", ["3 x this", "0 x this"])
def test_other_numbers_than_the_machine_has_are_refused(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, 2, "NVIDIA H100 80GB HBM3")
    with pytest.raises(PlanError, match="this machine has 2") as refused:
        cluster_of(text)
    remedies = str(refused.value).split("give --on ")[1].split("'")
    assert cluster_of(remedies[1]) == parse_target("2 x H100")
    assert cluster_of(remedies[3]) == parse_target("64 x H100")
