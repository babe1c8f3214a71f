"""`lockstep export`: writes the model of a checkpoint as a file of weights."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from lockstep.base.errors import CheckpointError, say
from lockstep.base.files import MOST_BYTES, read_below, replace_atomically
from lockstep.base.foreign_text import show
from lockstep.base.temporary_folder import locked_folder
from lockstep.checkpoint.manifest import DamagedError, UnreadableError, check, read_manifest
from lockstep.checkpoint.saved_model import (
    CONFIGURATION,
    MODEL,
    StateDictReader,
    StoredCheckpoint,
    read_final_model,
)
from lockstep.checkpoint.storage import CheckpointName
from lockstep.checkpoint.tensor_shards import FileLayout, TensorShard
from lockstep.cli.arguments import model_option
from lockstep.cli.target import Target, best_of, checkpoint_readable, fingerprint_of_saved


@click.command("export")
@model_option
@click.option(
    "--format",
    "form",
    type=click.Choice(["safetensors", "huggingface"]),
    default="safetensors",
    help="huggingface: OUT is a folder for from_pretrained, with the model's configuration.",
)
@click.option(
    "--best",
    is_flag=True,
    help="The model of the best evaluation by ls.Saving(best=...), instead of the last one.",
)
@click.argument("source", metavar="CHECKPOINT|RUN_DIR|URL")
@click.argument("out", metavar="OUT.safetensors|FOLDER")
def command(module: int | None, form: str, best: bool, source: str, out: str) -> int:
    """Write the model in a checkpoint as a plain state dict, in the safetensors format.

    OUT has parameters and buffers under the model's names, in the dtypes of the training. A tied
    parameter appears under each of its names. A run directory gives its final model, or its newest
    intact checkpoint if the run has not ended. The command checks every byte first, holds one
    tensor in memory at a time, and overwrites nothing.

    \b
    Examples:
      lockstep export runs/a model.safetensors
      lockstep export runs/a/checkpoints/step-00000500-1c9e02d4 model.safetensors
      lockstep export --best runs/a model.safetensors
      lockstep export --format huggingface runs/llama llama
      lockstep export --model 1 runs/gan critic.safetensors

    In Python: model.load_state_dict(safetensors.torch.load_file("model.safetensors")). There is no
    export to .pt: loading a pickle runs code.
    """
    if form == "huggingface":
        show(_export_folder(source, Path(out), module=module, best=best))
    else:
        show(export(source, Path(out), module=module, best=best))
    return 0


def _export_folder(source: str, folder: Path, *, module: int | None, best: bool) -> str:
    run = Target.find(source).run or Path(os.path.realpath(source)).parent.parent
    if not (run / CONFIGURATION).is_dir():
        raise CheckpointError(
            f"--format huggingface, but {run} has no folder {CONFIGURATION}; ls.train saves the"
            " configuration of models that have one, such as those of transformers; leave --format"
            " out, or call ls.export_pretrained with the model"
        )
    _check_new(folder)
    parent = folder.absolute().parent
    with tempfile.TemporaryDirectory(dir=parent, prefix=f".{folder.name}-") as temporary:
        made = Path(temporary, "made")
        made.mkdir()
        with checkpoint_readable(str(run / CONFIGURATION)):
            for name in sorted(os.listdir(run / CONFIGURATION)):
                (made / name).write_bytes(read_below(run, f"{CONFIGURATION}/{name}", MOST_BYTES))
        said = export(source, made / MODEL, module=module, best=best)
        made.rename(folder)
    return said.replace(str(made / MODEL), str(folder), 1)


def load(source: str, *, best: bool = False, model: int | None = None) -> dict[str, Any]:
    """Return the weights of a run, or of a checkpoint saved under any plan, as a state dict on the
    CPU. Any process may call this function.

    `source` is a run directory, a checkpoint, or a URL. A run directory gives the final model, or
    the newest intact checkpoint if the run has not ended. `best=True` loads the model of the best
    evaluation by `Saving.best`. If a session prepared several models, `model` is the number of one
    of them. Every byte is checked. Raises `CheckpointError`.
    """
    from lockstep.checkpoint.pretrained_files import as_tensor  # imports torch

    with checkpoint_readable(source):
        reader, _ = _open_model(source, module=model, best=best)
        try:
            return {name: as_tensor(reader, name) for name in reader.specs}
        except UnreadableError as error:
            raise CheckpointError(
                f"{source} is damaged, or has changed while it was read: {error}; load another"
            ) from error


def _open_model(source: str, *, module: int | None, best: bool) -> tuple[StateDictReader, str]:
    at = Target.find(source)
    name = _best(at) if best else None
    if name is not None:
        at = replace(at, names=[name])
    return (final_model(at, module) if name is None else None) or saved_model(at, module)


def export(source: str, path: Path, *, module: int | None = None, best: bool = False) -> str:
    check_out(path)
    with checkpoint_readable(source):
        model, what = _open_model(source, module=module, best=best)
        tensors, size = write_model(model, path)
    return f"{path}: {tensors} tensors, {size:,} bytes, of {what}"


def export_pretrained(source: str, folder: str, model: Any, *, best: bool = False) -> None:
    """Write the model of a run with the model's `save_pretrained`, for `from_pretrained`. One
    process calls this function.

    `source` is a run directory, or a checkpoint saved under any plan. `folder` is the folder to
    create. `model` is a module like the trained one, or a function that builds one, from
    transformers, peft or diffusers. The values of the parameters of `model` are not used. A peft
    model writes only its adapters. `best=True` uses the checkpoint of the best evaluation. Raises
    `CheckpointError`.
    """
    from safetensors.torch import load_file  # imports torch

    built = model if hasattr(model, "save_pretrained") else model()
    if not hasattr(built, "save_pretrained"):
        raise CheckpointError(
            f"export_pretrained of a {type(built).__name__}, without save_pretrained; lockstep"
            " export writes its weights"
        )
    _check_new(Path(folder))
    with locked_folder() as temporary:
        path = temporary / MODEL
        export(source, path, best=best)
        built.save_pretrained(folder, state_dict=load_file(path))


def _check_new(path: Path) -> None:
    if os.path.exists(path):  # also False if the name is too long
        raise CheckpointError(
            f"{path} is there already; nothing is overwritten; name another, or remove it"
        )


def check_out(path: Path) -> None:
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"OUT is {str(path)!r}; models are exported as safetensors; name it"
            f" {path.stem or 'model'}.safetensors"
        )
    _check_new(path)
    if not path.absolute().parent.is_dir():
        raise CheckpointError(f"{path}: its folder does not exist; name a file in an existing one")


def _best(at: Target) -> CheckpointName | None:
    known = (at.result() or {}).get("best")
    if known is not None:
        named = known.get("checkpoint")
        if named is not None and CheckpointName.parse(named) not in at.names:
            raise CheckpointError(
                f"--best is checkpoint {named}, by result.json, but it does not exist:"
                f" {at.none_there}"
            )
        return named and CheckpointName.parse(named)
    scores = {}
    for name in at.names:
        with suppress(UnreadableError):
            scores[name] = read_manifest(at.storage, name).metadata.get("score")
    if (found := best_of(scores)) is None:
        raise CheckpointError(
            f"--best: no checkpoint of {at.run or at.storage} has a score; a run with"
            " ls.Saving(best=...) saves scores; leave --best out for the last model"
        )
    return found


def final_model(at: Target, module: int | None) -> tuple[StateDictReader, str] | None:
    result = at.result()
    if at.run is None or result is None or "fingerprint" not in result:
        return None
    _choose([0], module)
    try:
        model = read_final_model(at.run)
        if fingerprint_of_saved(model) != result["fingerprint"]:
            raise DamagedError("its fingerprint differs from the one in result.json")
    except DamagedError as error:
        raise CheckpointError(
            f"{at.run / MODEL} is damaged: {error}; export a checkpoint of the run by name"
        ) from None
    return model, f"step {result.get('steps')}, the end of the run"


def saved_model(at: Target, module: int | None) -> tuple[StateDictReader, str]:
    for name in reversed(at.names):
        try:
            stored = StoredCheckpoint(at.storage, name)
            if not (damage := check(at.storage, name)):
                return (
                    stored.model(_choose(stored.modules, module)),
                    f"step {name.step}, checkpoint {name}",
                )
        except DamagedError as error:
            damage = [str(error)]
        except UnreadableError as error:
            raise CheckpointError(f"checkpoint {name}: {error}") from error
        say(f"warning: checkpoint {name} is damaged: {damage[0]}")
    raise CheckpointError(f"{at.run or at.storage} has no checkpoint to export: {at.none_there}")


def _choose(modules: list[int], module: int | None) -> int:
    if module is None and len(modules) == 1:
        return modules[0]
    if module not in modules:
        said = f"--model {module}" if module is not None else "no --model"
        raise CheckpointError(
            f"{said}; the models are {', '.join(map(str, modules))}, and one of them is exported;"
            " give its number"
        )
    return module


def write_model(
    model: StateDictReader, path: Path, metadata: Mapping[str, str] | None = None
) -> tuple[int, int]:
    shards = [
        TensorShard(name, dtype, shape, (0,) * len(shape), shape)
        for name, (dtype, shape) in model.specs.items()
    ]
    layout = FileLayout(shards, metadata)
    try:
        with replace_atomically(path) as temporary:
            with temporary.open("wb") as file:
                file.write(layout.header)
                for shard in sorted(shards, key=layout.span):
                    file.write(model.read(shard.name))
            check_out(path)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror}; make room, or name another place"
        ) from error
    except UnreadableError as error:
        raise CheckpointError(
            f"the checkpoint is damaged, or has changed while it was read: {error}; export another"
        ) from error
    return len(shards), layout.bytes
