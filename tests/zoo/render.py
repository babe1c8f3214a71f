"""Renders the specimens of the zoo: one file holds a training script with one fault, and its clean
twin.

What nearly all scripts have is here, not in the files: imports of the names that they use, the
options behind `args = arguments(epochs=3, batch_size=8)`, and the call of `main`. A line that ends
in `# fault` is only in the faulty script, and one that ends in `# clean` only in
the clean twin. The lines of a fault, and those that end in `# here`, are the places that a finding
may name. A file may hold several faults, `Faults: one = cause, other = cause`, whose marks have
their names, as `# fault one`: each is a specimen of its own. Pure, but for `specimens`.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

_MARK = re.compile(r"(?P<code>.*?)\s*# (?P<marks>(?:fault|clean|here)(?:, here)?)$")
_NAMED = re.compile(r"(?P<code>.*?)\s*# (?P<marks>(?:fault|clean|here) \w+(?:, here \w+)*)$")
_FIELD = re.compile(r"(?P<field>Cause|Source|Launch|Faults): (?P<value>.+)$")

_ARGUMENTS = re.compile(r"^(?P<indent> *)args = (?P<call>arguments\(.*\))$", re.MULTILINE)
_FROM = {
    "collections.abc": "Iterator",
    "contextlib": "nullcontext",
    "dataclasses": "dataclass",
    "datetime": "timedelta",
    "pathlib": "Path",
    "accelerate": "Accelerator DataLoaderConfiguration PartialState",
    "accelerate.utils": "broadcast_object_list",
    "lightning.fabric": "Fabric",
    "torch.distributed.device_mesh": "init_device_mesh",
    "torch.distributed.fsdp": "fully_shard",
    "torch.distributed.nn.functional": "all_gather",
    "torch.nn.parallel": "DistributedDataParallel",
    "torch.nn.utils.rnn": "pad_sequence",
    "torch.utils.data": "DataLoader Dataset DistributedSampler IterableDataset Sampler Subset"
    " TensorDataset get_worker_info random_split",
    "transformers": "BertConfig BertForSequenceClassification GPT2Config GPT2LMHeadModel LlamaConfig LlamaForCausalLM"
    " MixtralConfig MixtralForCausalLM Trainer TrainerCallback TrainingArguments ViTConfig ViTForImageClassification"
    " get_linear_schedule_with_warmup set_seed",
    "torch": "nn",
}
IMPORTS = {
    **{
        name: f"import {name}"
        for name in ("argparse", "contextlib", "os", "shutil", "socket", "tempfile", "torch")
    },
    **{
        name: f"from {module} import {name}"
        for module, names in _FROM.items()
        for name in names.split()
    },
    "np": "import numpy as np",
    "pl": "import lightning.pytorch as pl",
    "dist": "import torch.distributed as dist",
    "mp": "import torch.multiprocessing as mp",
    "F": "import torch.nn.functional as F",
    "DDP": "from torch.nn.parallel import DistributedDataParallel as DDP",
}
"""The statement that imports each name."""


@dataclass(frozen=True, slots=True)
class Header:
    """The facts in the docstring of a specimen."""

    source: str
    """The public issue, or the habit of tutorials, that the fault is taken from."""
    cause: str = ""
    """Value of a `lockstep.audit.finding.Cause`."""
    launch: str = "torchrun"
    """`python` if the script starts its own processes."""
    faults: str = ""
    """The names and causes of several faults."""


@dataclass(frozen=True, slots=True)
class Specimen:
    """One file of the zoo."""

    path: Path
    family: str
    """Name of its folder: the library that the script is written with."""
    name: str
    text: str
    """The whole script, with the lines of the fault and those of the clean twin."""
    cause: str
    source: str
    launch: str = "torchrun"


def expand(text: str) -> str:
    """Return the whole script of a file: with imports, options and the call of `main`."""
    end = text.index('"""', 3) + 4  # of the docstring
    body = _ARGUMENTS.sub(_options, text[end:])
    if "def main(" in body:
        body = f'{body.rstrip()}\n\n\nif __name__ == "__main__":\n    main()\n'
    nodes = [
        node
        for faulty in (True, False)
        for node in ast.walk(ast.parse(render(body, faulty=faulty)))
    ]
    used = {node.id for node in nodes if isinstance(node, ast.Name)} - _defined(nodes)
    imports = sorted(line for name, line in IMPORTS.items() if name in used)
    return "\n".join([text[:end], *imports, "", body.lstrip("\n")])


def _options(line: re.Match[str]) -> str:
    call = ast.parse(line["call"], mode="eval").body
    assert isinstance(call, ast.Call)
    options = [
        f'parser.add_argument("--{word.arg.replace("_", "-")}",'
        f" type={type(ast.literal_eval(word.value)).__name__},"
        f" default={ast.get_source_segment(line['call'], word.value)})"
        for word in call.keywords
        if word.arg is not None
    ]
    lines = ["parser = argparse.ArgumentParser()", *options, "args = parser.parse_args()"]
    return "\n".join(line["indent"] + each for each in lines)


def _defined(nodes: list[ast.AST]) -> set[str]:
    """Return the names of a script's own classes, and those that it imports itself."""
    imported = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    classes = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    return classes | {name.asname or name.name for node in imported for name in node.names}


def _split(line: str) -> tuple[str, set[str]]:
    """Return a line without its marks, and the marks."""
    found = _MARK.match(line)
    return (found["code"], set(found["marks"].split(", "))) if found else (line, set())


def render(text: str, *, faulty: bool) -> str:
    """Return the faulty script, or its clean twin. Both have as many lines as the text."""
    dropped = "clean" if faulty else "fault"
    lines = [_split(line) for line in text.split("\n")]
    return "\n".join("" if dropped in marks else code for code, marks in lines)


def places(text: str) -> set[int]:
    """Return the numbers of the lines, from 1, at which a finding may point."""
    return {
        number
        for number, line in enumerate(text.split("\n"), start=1)
        if _split(line)[1] & {"fault", "here"}
    }


def header(text: str) -> Header:
    """Return the facts in the docstring. A value may go on in the next lines."""
    fields: dict[str, str] = {}
    field = ""
    for line in (ast.get_docstring(ast.parse(render(text, faulty=True))) or "").split("\n"):
        if found := _FIELD.match(line):
            field = found["field"].lower()
            fields[field] = found["value"].strip()
        elif field and line.strip():
            fields[field] += f" {line.strip()}"
    return Header(**fields)


def specimens(folder: Path) -> list[Specimen]:
    """Return all specimens in the folders of a folder, by family and name."""
    found = []
    for path in sorted(folder.glob("*/[a-z]*.py")):
        written = path.read_text(encoding="utf-8")
        facts = header(written)
        pairs = [each.partition("=")[::2] for each in facts.faults.split(",") if each.strip()]
        for name, cause in pairs or [("", facts.cause)]:
            fault = name.strip()
            text = expand(with_one_fault(written, fault) if fault else written)
            named = f"{path.stem}_{fault}" if fault else path.stem
            found.append(
                Specimen(
                    path, path.parent.name, named, text, cause.strip(), facts.source, facts.launch
                )
            )
    return found


def with_one_fault(text: str, fault: str) -> str:
    """Return the text of a specimen with one of the faults of a file."""
    lines = []
    for line in text.split("\n"):
        found = _NAMED.match(line)
        code, marks = (found["code"], found["marks"].split(", ")) if found else (line, [])
        chosen = [mark.partition(" ")[0] for mark in marks if mark.endswith(f" {fault}")]
        dropped = any(mark.startswith("fault") for mark in marks) and "fault" not in chosen
        lines.append("" if dropped else f"{code}  # {', '.join(chosen)}" if chosen else code)
    return "\n".join(lines)
