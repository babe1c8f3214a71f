"""Torch's operations as kernels: shapes and floating-point operations of convolutions."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.base.torch_private import TorchDispatchMode
from lockstep.planner.trace import Operation
from lockstep.planner.tracing.kernels import kernel
from lockstep.planner.tracing.torch_fakes import flop_registry

SAMPLES, INPUTS, OUTPUTS = 2, 6, 12
PLAIN: list[dict[str, Any]] = [{}, {"stride": 2, "padding": 1}, {"dilation": 2}, {"kernel_size": 1}]


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the convolutions that are computed, each with what torch counts of it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[Operation, int]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if "convolution" in function.overloadpacket.__name__:
            operation = kernel(function, args, kwargs or {}, result, "forward")
            assert operation is not None
            self.found.append(
                (operation, flop_registry[function.overloadpacket](*args, out_val=result))
            )
        return result


def computed(
    kind: type[nn.Module], changes: dict[str, Any], *, dims: int = 2, reads_data: bool = False
) -> list[tuple[Operation, int]]:
    """The convolutions of a layer's forward and backward. `reads_data`: its input needs no
    gradient."""
    layer = kind(INPUTS, OUTPUTS, **{"kernel_size": 3, **changes})
    read = torch.ones(SAMPLES, INPUTS, *[9, 8, 7][:dims], requires_grad=not reads_data)
    with Kernels() as kernels:
        layer(read).sum().backward()
    return kernels.found


@pytest.mark.parametrize("changes", PLAIN)
@pytest.mark.parametrize(
    ("kind", "dims"), [(nn.Conv1d, 1), (nn.Conv2d, 2), (nn.Conv3d, 3), (nn.ConvTranspose2d, 2)]
)
def test_a_convolution_is_the_matrix_product_whose_flops_torch_counts(
    kind: type[nn.Module], dims: int, changes: dict[str, Any]
) -> None:
    (forward, counted), (backward, counted_backward) = computed(kind, changes, dims=dims)
    assert 2 * prod(forward.shape) == forward.flops == counted
    assert backward.shape == forward.shape
    assert backward.flops == counted_backward == 2 * forward.flops


def test_rows_are_positions_columns_outputs_and_sums_over_inputs_and_the_kernel() -> None:
    (forward, _), _ = computed(nn.Conv2d, {"stride": 2})
    assert forward.shape == (1, SAMPLES * 4 * 3, OUTPUTS, INPUTS * 9)
    (transposed, _), _ = computed(nn.ConvTranspose2d, {})
    assert transposed.shape == (1, SAMPLES * 9 * 8, OUTPUTS * 9, INPUTS)


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_groups_have_a_product_each_and_none_between_them(kind: type[nn.Module]) -> None:
    (whole, _), (whole_backward, _) = computed(kind, {})
    (forward, _), (backward, _) = computed(kind, {"groups": 3})
    assert forward.shape[0] == 3
    assert (forward.flops, backward.flops) == (whole.flops // 3, whole_backward.flops // 3)


def test_the_first_layer_computes_no_gradient_of_the_data() -> None:
    (forward, _), (backward, counted) = computed(nn.Conv2d, {}, reads_data=True)
    assert backward.flops == counted == forward.flops
