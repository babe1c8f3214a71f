"""A script's source says how it is to be started, without being run."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.audit.runner import AuditOptions, command_line, launcher_of
from lockstep.audit.source import ScriptSource, StartCall, lines_of_files, module_path
from lockstep.scripts.line import ScriptLine

OWN = {
    "the alias of the tutorials": (
        "import torch.multiprocessing as mp\nmp.spawn(main, nprocs=2)",
        "torch.multiprocessing.spawn",
    ),
    "the name alone": (
        "from torch.multiprocessing import spawn\nspawn(main)",
        "torch.multiprocessing.spawn",
    ),
    "another alias": (
        "from torch import multiprocessing as m\nm.spawn(main)",
        "torch.multiprocessing.spawn",
    ),
    "in full": (
        "import torch.multiprocessing\ntorch.multiprocessing.spawn(main)",
        "torch.multiprocessing.spawn",
    ),
    "torch's import": (
        "import torch\ntorch.multiprocessing.spawn(main)",
        "torch.multiprocessing.spawn",
    ),
    "start_processes": (
        "from torch.multiprocessing import start_processes as go\ngo(main)",
        "torch.multiprocessing.start_processes",
    ),
    "a notebook's": (
        "from accelerate import notebook_launcher\nnotebook_launcher(main)",
        "accelerate.notebook_launcher",
    ),
    "processes with a rank each": (
        (
            "import torch.multiprocessing as mp; from torch import distributed as dist\n"
            "p = mp.Process(target=f, args=(0, 2)); dist.init_process_group('gloo', rank=rank,"
            " world_size=2)"
        ),
        "torch.multiprocessing.Process",
    ),
    "it sets RANK": (
        "import os; import torch.multiprocessing as mp; os.environ['RANK'] = '0'\nmp.spawn(main)",
        "torch.multiprocessing.spawn",
    ),
}
TORCHRUN = {
    "none": "print('train')",
    "not Python": "def (",
    "a null byte": "a\0b",
    "it reads RANK": (
        "import os; import torch.multiprocessing as mp\nr = os.environ['RANK']\nmp.spawn(main)"
    ),
    "it asks for LOCAL_RANK": (
        "import os; import torch.multiprocessing as mp\n"
        "r = int(os.environ.get('LOCAL_RANK', 0))\n"
        "mp.spawn(main)"
    ),
    "it asks with getenv": (
        "from os import getenv; import torch.multiprocessing as mp\n"
        "r = getenv('RANK')\n"
        "mp.spawn(main)"
    ),
    "it looks whether RANK is there": (
        "import os; import torch.multiprocessing as mp\nif 'RANK' not in os.environ: mp.spawn(main)"
    ),
    "a process of another kind": "import multiprocessing as mp\nmp.Process(target=log).start()",
    "another spawn": "import os\nos.spawn(main)\nself.spawn()\nspawn()",
}


@pytest.mark.parametrize("name", OWN)
def test_a_script_that_starts_its_processes_is_told(name: str) -> None:
    text, call = OWN[name]
    assert ScriptSource(text).start_call() == StartCall(call, 2)


@pytest.mark.parametrize("name", TORCHRUN)
def test_every_other_script_is_torchruns(name: str) -> None:
    assert ScriptSource(TORCHRUN[name]).start_call() is None


def test_the_launcher_follows_the_source_and_a_note_says_so(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(OWN["the alias of the tutorials"][0])
    torchrun, note = launcher_of(AuditOptions(line=ScriptLine(str(script), ["--lr", "1"])))
    assert not torchrun
    assert note.startswith(
        f"{script}:2 starts the processes itself (torch.multiprocessing.spawn), so it was run as"
        f" python {script}"
    )
    assert launcher_of(AuditOptions(line=ScriptLine(str(script)), launcher="torchrun")) == (
        True,
        "",
    )
    assert command_line(
        AuditOptions(line=ScriptLine("train.py", ["--lr", "1"])), tmp_path, torchrun=False
    )[1:] == ["train.py", "--lr", "1"]
    log = ["--log-dir", str(tmp_path / "torchrun")]
    line = command_line(
        AuditOptions(line=ScriptLine("a.train", is_module=True), processes=3),
        tmp_path,
        torchrun=True,
    )
    assert line[1:] == [
        "-P",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "3",
        *log,
        "-m",
        "a.train",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "import lockstep as ls",
        "def f():\n    from lockstep.plan import Plan",
        "import lockstep.run",
    ],
)
def test_a_script_that_uses_lockstep_is_told(text: str) -> None:
    assert ScriptSource(text).uses_lockstep()
    assert not ScriptSource(text.replace("lockstep", "lockstepper")).uses_lockstep()


def test_the_source_of_a_module_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "project" / "inner"
    package.mkdir(parents=True)
    (tmp_path / "project" / "__init__.py").write_text("raise RuntimeError('imported')")
    for name in ("__init__", "train", "__main__"):
        (package / f"{name}.py").touch()
    monkeypatch.chdir(tmp_path)
    assert module_path("project.inner.train") == package / "train.py"
    assert module_path("project.inner") == package / "__main__.py"
    assert module_path("project.missing") is None
    assert module_path("missing.train") is None


def test_the_lines_of_files_are_found_by_the_names_in_findings(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("one\ntwo\n")
    places = ["train.py:2", f"{tmp_path / 'train.py'}:1", "missing.py:1", ""]
    assert lines_of_files(places, [str(tmp_path)]) == {
        "train.py": ["one", "two"],
        str(tmp_path / "train.py"): ["one", "two"],
    }
