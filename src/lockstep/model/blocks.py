"""Finds a model's blocks, such as the layers of a transformer, and its shared parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.base.errors import RecipeError, first_few

LARGE_FRACTION = 1 / 8


def blocks_of(model: nn.Module, patterns: Sequence[str] | None) -> list[str]:
    """Return the names of the model's blocks, or an empty list. If `patterns` is None, the blocks
    are the members of the outermost lists (`nn.ModuleList`, `nn.Sequential`) whose members have one
    class. In a model without lists, the blocks are modules with at least an eighth of all
    parameters. A block shares no parameter with modules outside the block."""
    if patterns is None:
        candidates = list(_repeated(model, "")) or list(
            _large(model, "", numel(model) * LARGE_FRACTION)
        )
        shared = blocks_with_shared_parameters(model, candidates)
        return [name for name in candidates if name not in shared]
    blocks = _blocks_matching(model, patterns)
    if shared := blocks_with_shared_parameters(model, blocks):
        raise RecipeError(
            f"the recipe's block {min(shared)!r} shares a parameter with a module outside of it; a"
            " block's parameters are gathered only for this block; leave it out of Recipe.blocks,"
            " or name a module that contains both"
        )
    return blocks


def _blocks_matching(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    names = [name for name, _ in model.named_modules() if name]
    by_pattern = [
        outermost(matching_names(names, pattern, "the recipe's blocks have"))
        for pattern in patterns
    ]
    matching = [name for name in names if any(name in matches for matches in by_pattern)]
    check_not_nested(matching, "blocks")
    return matching


def matching_names(
    names: Sequence[str], pattern: str, source: str, example: str = "blocks.*"
) -> list[str]:
    matching = [name for name in names if fnmatchcase(name, pattern)]
    if not matching:
        raise RecipeError(
            f"{source} {pattern!r}, which matches no module of the model; modules are"
            f" {first_few(names)}; give names or patterns"
            f" such as {example!r}"
        )
    return matching


def check_not_nested(names: Sequence[str], field: str) -> None:
    for name in names:
        if outer := next((other for other in names if name.startswith(f"{other}.")), None):
            raise RecipeError(
                f"the recipe's {field} {outer!r} and {name!r} are nested; give the outer or the "
                "inner ones"
            )


def blocks_with_shared_parameters(model: nn.Module, blocks: Sequence[str]) -> set[str]:
    owners: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = next((block for block in blocks if name.startswith(f"{block}.")), "")
        owners.setdefault(id(parameter), set()).add(owner)
    return {name for names in owners.values() if len(names) > 1 for name in names if name}


def is_within(name: str, outer: str) -> bool:
    """Return True if the module `name` is the module `outer` or one of its submodules. The empty
    name stands for the whole model."""
    return not outer or f"{name}.".startswith(f"{outer}.")


def outermost(names: list[str]) -> list[str]:
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def _repeated(module: nn.Module, prefix: str) -> Iterator[str]:
    if isinstance(module, nn.ModuleList | nn.Sequential):
        members = [(name, child) for name, child in module.named_children() if numel(child)]
        if len(members) > 1 and len({type(child) for _, child in members}) == 1:
            yield from (prefix + name for name, _ in members)
            return
    for name, child in module.named_children():
        yield from _repeated(child, f"{prefix}{name}.")


def _large(module: nn.Module, prefix: str, least: float) -> Iterator[str]:
    for name, child in module.named_children():
        inner = list(_large(child, f"{prefix}{name}.", least))
        if inner:
            yield from inner
        elif numel(child) >= least and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield prefix + name


def numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def module_tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def shared_names(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [several for several in names.values() if len(several) > 1]


def share_parameter(model: nn.Module, names: Sequence[str]) -> None:
    """Tie the parameters with these names again after one of the parameters was replaced."""
    copies = [model.get_parameter(name) for name in names]
    one = next((parameter for parameter in copies if isinstance(parameter, DTensor)), copies[0])
    for name in names:
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner).register_parameter(attribute, one)


def pass_through(value: Tensor) -> Tensor:
    return value.view_as(value)


def is_passing_through(block: nn.Module) -> bool:
    return block.__dict__.get("forward") is pass_through
