from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from lockstep.base.torch_private import own_parameters


def place_parameters(
    module: nn.Module, mesh: DeviceMesh, placement_of: Callable[[str], Placement]
) -> None:
    """Replace the parameters of the module by DTensors, but not the parameters of its submodules.
    The values of the parameters must already be equal on all ranks."""
    for name, parameter in list(own_parameters(module).items()):
        if parameter is None or isinstance(parameter, DTensor):
            continue
        placement = placement_of(name)
        part = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        held = part.to_local()
        if not held.is_meta and held.untyped_storage().nbytes() > held.nbytes:
            part = DTensor.from_local(held.clone(), mesh, [placement], run_check=False)
        made = nn.Parameter(part, requires_grad=parameter.requires_grad)
        made.__dict__.update(vars(parameter))
        module.register_parameter(name, made)
