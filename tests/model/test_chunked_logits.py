"""Logits that only their loss computes: its value and gradients are those of whole logits, no
tensor of tokens × classes is made, and whatever else is done with them is refused."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lockstep.base.errors import PlanError, RecipeError
from lockstep.model.chunked_logits import ChunkedLogits, chunk_logits, head_name

FEATURES, CLASSES, ROWS, TOKENS = 8, 50, 2, 12
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2e-2}


def head(*, chunked: bool, bias: bool = False, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    model = nn.ModuleDict({"head": nn.Linear(FEATURES, CLASSES, bias=bias, dtype=dtype)})
    if chunked:
        chunk_logits(model, "head")
    return model["head"]


def hidden(dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(ROWS, TOKENS, FEATURES, dtype=dtype, requires_grad=True)


def targets(ignored: int = -100) -> Tensor:
    torch.manual_seed(3)
    labels = torch.randint(CLASSES, (ROWS, TOKENS))
    labels[0, :4] = ignored
    return labels


def labels_for(how: dict[str, Any]) -> Tensor:
    return targets(how.get("ignore_index", -100))


def shifted(logits: Tensor, **how: Any) -> Tensor:
    return F.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]), labels_for(how)[:, 1:].flatten(), **how
    )


def as_transformers(logits: Tensor, **how: Any) -> Tensor:
    labels = (
        F.pad(labels_for(how), (0, 1), value=how.get("ignore_index", -100))[..., 1:]
        .contiguous()
        .view(-1)
    )
    return F.cross_entropy(logits.float().contiguous().view(-1, CLASSES), labels, **how)


def classes_in_dim_1(logits: Tensor, **how: Any) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels_for(how), **how)


def of_labelled_tokens(logits: Tensor, **how: Any) -> Tensor:
    counts = labels_for(how) != -100
    return F.cross_entropy(logits[counts], labels_for(how)[counts], **how)


def as_module(logits: Tensor, **how: Any) -> Tensor:
    return nn.CrossEntropyLoss(**how)(logits.flatten(0, 1)[5:], labels_for(how).flatten()[5:])  # type: ignore[no-any-return]


LOSSES = [shifted, as_transformers, classes_in_dim_1, of_labelled_tokens, as_module]


def gradients(
    loss: Callable[..., Tensor], *, chunked: bool, dtype: torch.dtype, bias: bool, **how: Any
) -> list[Tensor]:
    layer, x = head(chunked=chunked, bias=bias, dtype=dtype), hidden(dtype)
    value = loss(layer(x), **how)
    weights = torch.linspace(1, 2, value.numel(), dtype=torch.float64).reshape(value.shape)
    (value * weights).sum().backward()
    return [value.detach(), *(each.grad for each in (x, *layer.parameters()))]


def assert_same(found: list[Tensor], whole: list[Tensor], dtype: torch.dtype) -> None:
    for one, other in zip(found, whole, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert (one - other).double().norm() <= TOLERANCE[dtype] * other.double().norm()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_value_and_gradients_are_those_of_whole_logits(
    loss: Callable[..., Tensor], reduction: str
) -> None:
    for dtype, bias in [(torch.float64, False), (torch.float32, True), (torch.bfloat16, True)]:
        if loss is as_transformers and dtype is torch.float64:
            continue
        kind = torch.float32 if loss is as_transformers else dtype
        for how in (
            {},
            {"ignore_index": 3},
            {"label_smoothing": 0.1},
            {"weight": torch.linspace(0.5, 1, CLASSES, dtype=kind), "label_smoothing": 0.1},
        ):
            found, whole = (
                gradients(loss, chunked=each, dtype=dtype, bias=bias, reduction=reduction, **how)
                for each in (True, False)
            )
            assert_same(found, whole, dtype)


def test_autocast_has_the_loss_in_float32() -> None:
    for reduction in ("sum", "mean", "none"):
        with torch.autocast("cpu", torch.bfloat16):
            found, whole = (
                gradients(
                    shifted, chunked=each, dtype=torch.float32, bias=True, reduction=reduction
                )
                for each in (True, False)
            )
        assert found[0].dtype is torch.float32
        assert_same(found[:1], whole[:1], torch.float32)
        assert_same(found, whole, torch.bfloat16)


def test_a_frozen_head_and_a_frozen_trunk() -> None:
    for freezes_head in (True, False):
        found = []
        for chunked in (True, False):
            layer, x = head(chunked=chunked, bias=True), hidden()
            (layer if freezes_head else x).requires_grad_(False)
            logits = layer(x)
            assert logits.requires_grad
            shifted(logits).backward()
            found.append([each.grad for each in (x, *layer.parameters())])
        assert [each is None for each in found[0]] == [each is None for each in found[1]]
        chunks, whole = ([each for each in one if each is not None] for one in found)
        assert_same(chunks, whole, torch.float32)


def test_a_trace_without_values_runs() -> None:
    with FakeTensorMode():
        layer, x = head(chunked=True), hidden()
        logits = layer(x)
        labels = torch.zeros(ROWS * TOKENS, dtype=torch.long)
        F.cross_entropy(logits.float().view(-1, CLASSES), labels).backward()
        F.cross_entropy(logits.transpose(1, 2), labels.view(ROWS, TOKENS), reduction="sum")
    assert layer.weight.grad.shape == layer.weight.shape


class Largest(TorchDispatchMode):
    """The number of elements of the largest memory that an operation's result lies in."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, Tensor):
                bytes_held = each.untyped_storage().nbytes()
                self.elements = max(self.elements, bytes_held // each.element_size())
        return made


def test_no_tensor_of_tokens_times_classes_is_made() -> None:
    for reduction in ("sum", "mean", "none"):
        largest = {}
        for chunked in (True, False):
            layer, x = head(chunked=chunked), hidden()
            with Largest() as made:
                F.cross_entropy(
                    layer(x).flatten(0, 1), targets().flatten(), reduction=reduction
                ).sum().backward()
            largest[chunked] = made.elements
        assert largest == {True: ROWS * TOKENS * CLASSES // 2, False: ROWS * TOKENS * CLASSES}


@pytest.mark.parametrize("trains", [True, False])
def test_the_flops_of_a_forward_are_those_of_whole_logits(trains: bool) -> None:
    layer, x = head(chunked=True), hidden()
    with torch.set_grad_enabled(trains), FlopCounterMode(display=False) as counter:
        loss = shifted(layer(x))
    assert loss.requires_grad is trains
    assert counter.get_total_flops() == 2 * ROWS * (TOKENS - 1) * FEATURES * CLASSES


def test_a_backward_that_keeps_the_graph_can_be_repeated() -> None:
    layer, x = head(chunked=True), hidden()
    loss = shifted(layer(x))
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, x)


def test_hooks_on_the_output_run_before_the_gradients_of_the_weights() -> None:
    layer, x = head(chunked=True), hidden()
    seen: list[str] = []

    def before(gradient: Tensor) -> None:
        seen.append("output")

    before.__module__ = "torch.distributed.fsdp"
    layer.weight.register_post_accumulate_grad_hook(lambda _: seen.append("weight"))
    logits = layer(x)
    logits.register_hook(before)
    shifted(logits).backward()
    assert seen == ["output", "weight"]


def test_what_needs_no_value_is_known() -> None:
    logits = head(chunked=True)(hidden())
    assert isinstance(logits, ChunkedLogits)
    assert logits.shape == (ROWS, TOKENS, CLASSES)
    assert (logits.dtype, logits.device) == (torch.float32, torch.device("cpu"))
    assert logits.detach().requires_grad is False
    assert logits.to("cpu", torch.bfloat16).dtype is torch.bfloat16
    assert logits[0, 2:, ...].unsqueeze(0).squeeze(0).shape == (TOKENS - 2, CLASSES)
    assert "(2, 12, 50)" in repr(logits)


OTHER_USES: dict[str, Callable[[Tensor], Any]] = {
    "argmax": lambda logits: logits.argmax(-1),
    "log_softmax": lambda logits: F.log_softmax(logits, -1),
    "div": lambda logits: logits / 30,
    "cat": lambda logits: torch.cat([logits, logits]),
    "mul_": lambda logits: logits.mul_(2),
    "__setitem__": lambda logits: logits.__setitem__(0, 1.0),
    "item": lambda logits: logits.item(),
    "data": lambda logits: logits.data,
    "numpy": lambda logits: logits.numpy(),
    "__deepcopy__": lambda logits: copy.deepcopy(logits),
    "register_hook": lambda logits: logits.register_hook(lambda gradient: gradient * 2),
    "flatten": lambda logits: logits.flatten(),
    "view": lambda logits: logits.view(-1, CLASSES // 2),
    "half": lambda logits: logits.half(),
    "to(torch.float16)": lambda logits: logits.to(torch.float16),
    "to(device)": lambda logits: logits.to("meta"),
    "cross_entropy, as its target,": lambda logits: F.cross_entropy(torch.ones(2, 3), logits),
}
SOME_CLASSES: list[Any] = [
    (..., slice(0, 3)),
    (slice(None), slice(None), 0),
    (..., None),
    (0, 0, 0),
    (..., slice(None, None, 2)),
    (True,),
    torch.ones(ROWS, TOKENS, CLASSES, dtype=torch.bool),
]


def test_any_other_use_is_refused_by_name() -> None:
    logits = head(chunked=True)(hidden())
    with Largest() as made:
        for name, use in OTHER_USES.items():
            with pytest.raises(PlanError, match=re.escape(f"torch's {name} is called on the")):
                use(logits)
        for index in SOME_CLASSES:
            with pytest.raises(PlanError, match="torch's __getitem__ is called on the logits"):
                logits[index]
    assert made.elements < ROWS * TOKENS * CLASSES


def test_a_target_of_another_shape_is_refused() -> None:
    logits = head(chunked=True)(hidden())
    with pytest.raises(PlanError, match=r"classes in dim 2, and a target of shape \(2, 12\)"):
        F.cross_entropy(logits, targets())
    with pytest.raises(PlanError, match=r"a target of shape \(3,\)"):
        F.cross_entropy(logits.flatten(0, 1), torch.zeros(3, dtype=torch.long))
    with pytest.raises(IndexError):
        F.cross_entropy(logits.flatten(0, 1), targets().flatten() + CLASSES + 200)


class WithEmbeddings(nn.Module):
    """As transformers' models say which layer is their head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.lm_head = nn.Linear(2, 2), nn.Linear(2, 3)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


class Adapted(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


def test_the_head_is_found_or_asked_for() -> None:
    assert head_name(WithEmbeddings(), None, None) == "lm_head"
    assert head_name(WithEmbeddings(), "first", None) == "first"
    for model, given, says in (
        (nn.Sequential(nn.Linear(2, 3)), None, "does not say which of its layers is the head"),
        (nn.Sequential(nn.Linear(2, 3)), "1", "the recipe's head '1' is no module of the model"),
        (nn.Sequential(nn.Tanh()), "0", "the head '0', a Tanh"),
        (nn.Sequential(Adapted(2, 3)), "0", "the head '0', a Adapted"),
    ):
        with pytest.raises(RecipeError, match=re.escape(says)):
            head_name(model, given, None)
