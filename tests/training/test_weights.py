"""Others' weights: the file's values are the model's, under every plan, each rank reading its own
parts; and what does not fit is said."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiers import tiered
from torch import nn
from training.kept import MODELS, PLANS
from training.started import (
    computed_each,
    read_bytes,
    started,
    started_apart,
    started_each,
    theirs,
    tied,
    trained_each,
    values,
    write,
)
from training.subjects import sgd

import lockstep as ls
from lockstep.base.errors import RecipeError
from lockstep.testing.pool import WorkerPool
from lockstep.verify.jobs import TraceRequest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights in files of every kind."""
    folder = tmp_path_factory.mktemp("weights")
    state = theirs().state_dict()
    write(folder / "one.safetensors", state)
    names = sorted(state)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    (folder / "several").mkdir()
    for file, own in parts.items():
        write(folder / "several" / file, {name: state[name] for name in own})
    index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
    (folder / "several" / "model.safetensors.index.json").write_text(json.dumps(index))
    torch.save(state, folder / "tutorial.pt")
    return folder


@pytest.mark.parametrize(
    "plan",
    tiered(
        {**PLANS, "split=2": 1}, always=["replicate=2", "shard=2,tensor=2", "pipeline=2"], most=1
    ),
)
def test_the_model_has_the_files_values_under_every_plan(
    pool: WorkerPool, tmp_path: Path, folder: Path, plan: str
) -> None:
    files = "one.safetensors", "several", "tutorial.pt"
    if plan not in ("replicate=1", "replicate=2"):
        files = files[:2]
    for found in pool.run(
        {**PLANS, "split=2": 1}[plan],
        started_each,
        plan,
        str(tmp_path),
        [str(folder / file) for file in files],
    ):
        for file, (fingerprint, said) in zip(files, found, strict=True):
            assert fingerprint == ls.fingerprint(theirs()), (file, said)
            assert (said["converted"], said["kept"]) == ({}, []), file


@pytest.mark.parametrize("plan", ["shard=3", "tensor=2", "pipeline=2"])
def test_each_rank_reads_what_it_holds_and_no_more(
    pool: WorkerPool, tmp_path: Path, folder: Path, plan: str
) -> None:
    weights = ls.Weights(str(folder / "one.safetensors"), {tied()[1]: None})
    for read, held in pool.run(PLANS[plan], read_bytes, plan, str(tmp_path / "run"), weights):
        assert read == held
        assert held < sum(tensor.nbytes for tensor in theirs().parameters())


def test_initial_values_are_not_computed_where_they_would_be_replaced(
    pool: WorkerPool, tmp_path: Path, folder: Path
) -> None:
    path = str(folder / "one.safetensors")
    kept = ls.Weights(path, {"blocks.0.*": None}, missing="keep")
    for none, some in pool.run(2, computed_each, "shard=2", str(tmp_path), [path, kept]):
        assert none == []
        assert some
        assert all(name.startswith("blocks.0.") for name in some)


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2", "pipeline=2"])
def test_what_fits_is_taken_and_what_does_not_is_said_on_every_rank(
    pool: WorkerPool, tmp_path: Path, folder: Path, plan: str
) -> None:
    """What the file lacks is refused, or keeps the factory's values; a tied parameter may be in it
    under one of its names, and not with two values; a wrapper is named and not guessed."""
    path, state, lacking = (
        str(folder / "one.safetensors"),
        theirs().state_dict(),
        {"blocks.1.*": None},
    )
    first, second = tied()
    for name in (first, second):
        rest = {key: value for key, value in state.items() if key != name}
        write(tmp_path / f"without {name}.safetensors", rest)
    two = {**state, second: state[second].clone()}
    two[second][-1, -1] += 1
    write(tmp_path / "two.safetensors", two)
    training = {"model": state, "optimizer": {"state": {0: torch.ones(3)}}, "epoch": 3}
    torch.save(training, tmp_path / "training.pt")
    torch.save({f"module.{name}": each for name, each in state.items()}, tmp_path / "ddp.pt")
    wrappers = {
        str(tmp_path / "training.pt"): {"model.*": "*", "optimizer.*": None},
        str(tmp_path / "ddp.pt"): {"module.*": "*"},
    }
    fresh = values(str(tmp_path / "fresh"))
    whole = ls.fingerprint(theirs())
    kept = {
        name: fresh[name] if name.startswith("blocks.1.") else tensor
        for name, tensor in state.items()
    }
    table: list[tuple[Any, tuple[str, ...] | str]] = [
        (
            ls.Weights(path, lacking),
            (
                f"weights {path!r} are not this model's: not in the file: blocks.1.",
                "missing='keep' keeps the factory's values",
            ),
        ),
        (ls.Weights(path, lacking, missing="keep"), ls.fingerprint(kept)),
        *((str(tmp_path / f"without {name}.safetensors"), whole) for name in (first, second)),
        (
            str(tmp_path / "two.safetensors"),
            ("have different values for", repr(first), repr(second)),
        ),
        *(
            (path, (f"; the names would fit with ls.Weights(path, names={names})",))
            for path, names in wrappers.items()
        ),
        *((ls.Weights(path, names), whole) for path, names in wrappers.items()),
    ]
    given = [weights for weights, _ in table]
    for found in pool.run(2, started_each, plan, str(tmp_path / "run"), given):
        for (weights, expected), (fingerprint, said) in zip(table, found, strict=True):
            if isinstance(expected, str):
                assert fingerprint == expected, (weights, said)
            else:
                assert fingerprint == "refused", weights
                assert all(words in said for words in expected), (weights, said)
        assert all(name.startswith("blocks.1.") for name in found[1][1]["kept"])


def test_other_floating_point_types_are_converted_and_said(tmp_path: Path) -> None:
    short = {name: value.to(torch.bfloat16) for name, value in theirs().state_dict().items()}
    write(tmp_path / "short.safetensors", short)
    found, said = started("replicate=1", str(tmp_path / "run"), str(tmp_path / "short.safetensors"))
    assert found == ls.fingerprint({name: value.float() for name, value in short.items()})
    assert said["converted"] == {"bfloat16 to float32": said["tensors"]}


class Counted(nn.Module):
    """With a buffer of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))


def refused(folder: Path, weights: Any) -> str:
    with ls.Session(run_dir=str(folder / "runs")) as session, pytest.raises(RecipeError) as raised:
        session.prepare(Counted, sgd, weights=weights)
    return str(raised.value)


@pytest.mark.parametrize(
    ("state", "given", "text"),
    [
        (
            {"fc.weight": torch.ones(2, 4), "fc.bias": torch.ones(2), "seen": torch.ones(2)},
            {},
            "different: fc.weight float32(2, 3), in the file float32(2, 4), seen int64(2,), in"
            " the file float32(2,); map names with",
        ),
        (
            {"weight": torch.ones(2, 3), "bias": torch.ones(2)},
            {"missing": "keep"},
            "only in the file: bias, weight; the names would fit with ls.Weights(path,"
            " names={'*': 'fc.*'})",
        ),
        (
            {"weight": torch.ones(2, 3), "bias": torch.ones(2)},
            {},
            "not this model's: not in the file: fc.bias, fc.weight, seen; only in the file",
        ),
        (
            {"a": torch.ones(2), "b": torch.ones(2)},
            {"names": {"a": "seen", "b": "seen"}},
            "'a' and 'b' are both mapped to 'seen'",
        ),
        (
            {"a": torch.ones(2)},
            {"names": {"c.*": "*"}},
            "Weights.names has 'c.*', which matches no name in",
        ),
    ],
)
def test_what_does_not_fit_is_said(tmp_path: Path, state: Any, given: Any, text: str) -> None:
    save_file(state, tmp_path / "w.safetensors")
    assert text in refused(tmp_path, ls.Weights(str(tmp_path / "w.safetensors"), **given))


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize(
    "state",
    [lambda evil: {"fc.weight": torch.ones(2, 3), "more": evil}, lambda evil: evil],
    ids=["beside", "alone"],
)
def test_a_file_that_brings_code_along_executes_nothing(tmp_path: Path, state: Any) -> None:
    torch.save(state(Evil(tmp_path / "executed")), tmp_path / "evil.pt")
    with ls.Session(run_dir=str(tmp_path / "run")) as session, pytest.raises(RecipeError) as raised:
        session.prepare(Counted, sgd, weights=str(tmp_path / "evil.pt"))
    assert (
        "cannot be read without running code that the file names (posix.mkdir); only tensors are"
        " loaded" in str(raised.value)
    )
    assert not (tmp_path / "executed").exists()


def damaged(folder: Path, kind: str) -> str:
    torch.save(Counted().state_dict(), folder / "old.pt", _use_new_zipfile_serialization=False)
    save_file(Counted().state_dict(), folder / "short.safetensors")
    (folder / "short.safetensors").write_bytes((folder / "short.safetensors").read_bytes()[:-4])
    (folder / "text.pt").write_text("not a file of torch.save")
    (folder / "text.txt").write_text("")
    (folder / "empty").mkdir()
    (folder / "index").mkdir()
    (folder / "index" / "model.safetensors.index.json").write_text(
        '{"weight_map": {"fc.weight": "missing.safetensors"}}'
    )
    (folder / "outside").mkdir()
    (folder / "outside" / "model.safetensors.index.json").write_text(
        '{"weight_map": {"fc.weight": "../a.safetensors"}}'
    )
    os.mkfifo(folder / "fifo.safetensors")
    (folder / "run" / "checkpoints").mkdir(parents=True)
    return kind if "://" in kind else str(folder / kind)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("missing.pt", "does not exist; weights are a .safetensors file"),
        (
            "old.pt",
            "is not a torch.save file, or has the format from before torch 1.6, which cannot be"
            " memory-mapped; save it again: torch.save(",
        ),
        (
            "short.safetensors",
            "cannot be read as safetensors (Error while deserializing header: incomplete metadata",
        ),
        ("text.pt", "is not a torch.save file, or has the format from before torch 1.6, which"),
        ("text.txt", "has an unsupported format"),
        (
            "empty",
            "is a folder that holds neither model.safetensors nor model.safetensors.index.json",
        ),
        ("outside", "it names '../a.safetensors', which is not a file in the same folder"),
        ("fifo.safetensors", "is neither a file nor a folder"),
        ("index", "missing.safetensors' cannot be read as safetensors (No such file or directory"),
        ("run", "is a run that has not ended"),
        ("s3://bucket/w.safetensors", "is a URL; weights are read from a path"),
    ],
)
def test_a_file_that_cannot_be_read_is_a_users_mistake(
    tmp_path: Path, kind: str, text: str
) -> None:
    assert text in refused(tmp_path, damaged(tmp_path, kind))


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2"])
def test_ranks_that_read_other_files_are_found_out(
    pool: WorkerPool, tmp_path: Path, plan: str
) -> None:
    state = {name: value.clone() for name, value in theirs().state_dict().items()}
    write(tmp_path / "0.safetensors", state)
    write(tmp_path / "2.safetensors", {**state, "more": torch.ones(1)})
    state["blocks.0.projection.weight"][0, 0] += 1
    write(tmp_path / "1.safetensors", state)
    said = pool.run(2, started_apart, plan, str(tmp_path / "run"), str(tmp_path), 2)
    if plan == "replicate=2":
        said += pool.run(2, started_apart, plan, str(tmp_path / "again"), str(tmp_path), 1)
    for kind, text in said:
        assert kind == "refused"
        assert "is not the same file on all processes" in text or "only in the file: more" in text


def test_a_run_that_goes_on_takes_the_checkpoint(
    pool: WorkerPool, tmp_path: Path, folder: Path
) -> None:
    path = str(folder / "one.safetensors")
    given = [("whole", None, path), ("run", 3, path), ("run", None, path), ("other", None, None)]
    ((whole, stopped, ended, other),) = pool.run(1, trained_each, str(tmp_path), given)
    assert "preempted" in stopped
    assert ended == whole
    assert other != whole


@pytest.mark.timeout(300)  # on a busy machine, importing transformers alone takes half a minute
def test_a_folder_of_hugging_face_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(
        "transformers", reason="transformers is not installed (pip install -e .[dev])"
    )
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # a thread that would stay
    torch.manual_seed(7)
    model: Any = MODELS["gpt2"]["model"]()
    model.save_pretrained(tmp_path / "hub", max_shard_size="20KB")
    assert len(list((tmp_path / "hub").glob("model-*.safetensors"))) > 1
    with ls.Session(run_dir=str(tmp_path / "run")) as session:
        made, _ = session.prepare(MODELS["gpt2"]["model"], sgd, weights=str(tmp_path / "hub"))
        assert ls.fingerprint(made) == ls.fingerprint(model)


def test_the_perturbed_run_of_a_run_that_starts_from_weights_is_near_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`lockstep verify` compares runs whose parameters differ by one unit in the last place."""
    state = Counted().state_dict()
    save_file(state, tmp_path / "w.safetensors")
    (tmp_path / "trace").mkdir()
    for name, value in (
        TraceRequest(folder=tmp_path / "trace", noise_seed=0).write(tmp_path).items()
    ):
        monkeypatch.setenv(name, value)
    with ls.Session(run_dir=str(tmp_path / "run")) as session:
        model, _ = session.prepare(Counted, sgd, weights=tmp_path / "w.safetensors")
    for parameter, given in (
        (model.fc.weight, state["fc.weight"]),
        (model.fc.bias, state["fc.bias"]),
    ):
        up, down = (
            torch.nextafter(given, torch.full_like(given, way)) for way in (torch.inf, -torch.inf)
        )
        assert bool(((parameter == up) | (parameter == down)).all())
