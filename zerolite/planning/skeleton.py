"""Copy of a live model without its memory, for the dry run at ``zerolite.initialize``."""

from __future__ import annotations

import collections
import copy
from typing import Any

import torch

from zerolite.comm import create_communicator
from zerolite.engine.arguments import param_groups_of
from zerolite.engine.build import Arguments
from zerolite.utils.accelerator import default_device
from zerolite.utils.skeleton import Skeleton
from zerolite.zero.groups import RankGroups
from zerolite.zero.stage3.comm_context import CommContext
from zerolite.zero.stage3.partition_parameters import partition
from zerolite.zero.stage3.partitioned_parameter import handle_of


class DrySkeleton(Skeleton):
    """Copy of a model with fake tensors, partitioned where the model's are. Made inside a dry run."""

    device = "cpu"

    def __init__(self, model: torch.nn.Module) -> None:
        device = default_device(0)  # that of the DryPlatform: the CPU
        self._context = CommContext(RankGroups.over(create_communicator(device)), device)
        super().__init__(model)
        # Tensors computed from parameters, as by weight_norm, are the original's, and the engine would hook them.
        for module in self.model.modules():
            for name, value in list(vars(module).items()):
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    del vars(module)[name]

    def make(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return the copy of a parameter or buffer."""
        handle = handle_of(tensor)
        if handle is None:
            copied = super().make(tensor, name)
        else:
            values = torch.empty_strided(handle.shape, handle.strides, dtype=tensor.dtype, device=self.device)
            copied = torch.nn.Parameter(values, tensor.requires_grad)
            del values
            partition(copied, name, self._context)
        if hasattr(tensor, "use_muon"):
            vars(copied)["use_muon"] = tensor.use_muon
        return copied

    def arguments(self, model: torch.nn.Module, given: Arguments) -> Arguments:
        """Return ``given`` with the copy's parameters in place of those of ``model``."""
        groups = [
            {**group, "params": [self.tensors[id(parameter)] for parameter in group["params"]]}
            for group in param_groups_of(model, given.optimizer, given.model_parameters)
        ]
        if isinstance(given.optimizer, torch.optim.Optimizer):
            return Arguments(optimizer=_copy_optimizer(given.optimizer, groups))
        chosen = None if given.model_parameters is None else groups
        return Arguments(optimizer=given.optimizer, model_parameters=chosen)


def _copy_optimizer(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return a copy of ``optimizer`` with other groups, without states and hooks.

    It shares no container that ``step`` may change.
    """
    # Made by object.__new__, because the constructor and copy.copy may run the user's code.
    copied: torch.optim.Optimizer = object.__new__(type(optimizer))
    containers = (dict, list, set, collections.deque)
    own = {
        name: copy.copy(value) if isinstance(value, containers) else value for name, value in vars(optimizer).items()
    }
    own.pop("step", None)  # a learning rate schedule has wrapped it, bound to the original
    for name, value in own.items():
        if name.endswith("_hooks") and isinstance(value, dict):
            value.clear()
    vars(copied).update(own, param_groups=groups, state=collections.defaultdict(dict))
    return copied
