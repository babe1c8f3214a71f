"""Lets lockstep train with a torch before 2.13. Python runs this file as it starts if its folder is
on PYTHONPATH.

For benchmarks/gpu alone, which may find nothing newer on a borrowed machine. The newer names get
the older functions that do the same. What an older torch cannot do (FSDP2 with parameters that a
rank does not use, a missing gradient in a pipeline) stays wrong or fails: docs/compatibility.md.
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, _common_utils
from torch.utils._pytree import tree_leaves, tree_map

from lockstep.training import set_up

if not hasattr(_common_utils, "collect_grad_tensors"):

    def collect(structure):
        return [
            leaf for leaf in tree_leaves(structure) if torch.is_tensor(leaf) and leaf.requires_grad
        ]

    def replace(structure, tensors):
        return tree_map(
            lambda leaf: next(tensors) if torch.is_tensor(leaf) and leaf.requires_grad else leaf,
            structure,
        )

    _common_utils.collect_grad_tensors, _common_utils.replace_grad_tensors = collect, replace
set_up.OLDEST_TORCH = (2, 0)
for new, old in {
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}.items():
    if not hasattr(dist, new):
        setattr(dist, new, getattr(dist, old))
for name in ("set_reduce_scatter_unused_params", "reset_iter_state"):
    if not hasattr(FSDPModule, name):
        setattr(FSDPModule, name, lambda self, *_: None)
