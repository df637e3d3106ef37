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
from zerolite.zero.stage3.partition_parameters import partition
from zerolite.zero.stage3.partitioned_parameter import handle_of


class Skeleton:
    """A copy of ``model``: modules of the same classes and names, parameters and buffers of the same shapes without
    memory, partitioned where they are. Attributes that are neither are shared with the model; hooks are left out.
    Scripted and traced modules, which refer to themselves, become plain ones. Made inside a dry run and a
    FakeTensorMode."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._device = default_device(0)
        self._comm = create_communicator(self._device)
        self._tensors: dict[int, Any] = {}  # by the id of the original
        self._modules: dict[int, torch.nn.Module] = {}
        self.model = self._copy(model)

    def _copy(self, module: torch.nn.Module) -> torch.nn.Module:
        known = self._modules.get(id(module))
        if known is not None:
            return known
        scripted = isinstance(module, torch.jit.ScriptModule)
        copied: torch.nn.Module = object.__new__(torch.nn.Module if scripted else type(module))
        self._modules[id(module)] = copied
        fresh = vars(torch.nn.Module())  # its dicts of hooks, empty
        vars(copied).update(fresh if scripted else _without_graphs(vars(module)) | fresh)
        vars(copied)["training"] = module.training
        for name, child in module._modules.items():
            copied._modules[name] = None if child is None else self._copy(child)
        for name, parameter in module._parameters.items():
            copied._parameters[name] = None if parameter is None else self._parameter(parameter, name)
        for name, buffer in module._buffers.items():
            copied._buffers[name] = None if buffer is None else self._buffer(buffer)
        return copied

    def _parameter(self, parameter: torch.nn.Parameter, name: str) -> torch.nn.Parameter:
        made = self._tensors.get(id(parameter))
        if made is None:
            handle = handle_of(parameter)
            shape = parameter.shape if handle is None else handle.shape
            strides = parameter.stride() if handle is None else handle.strides
            values = torch.empty_strided(shape, strides, dtype=parameter.dtype, device="cpu")
            made = torch.nn.Parameter(values, parameter.requires_grad)
            if hasattr(parameter, "use_muon"):
                made.use_muon = parameter.use_muon  # type: ignore[attr-defined]
            if handle is not None:
                del values
                partition(made, name, self._comm, self._device)
            self._tensors[id(parameter)] = made
        return made

    def _buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        made = self._tensors.get(id(buffer))
        if made is None:
            made = self._tensors[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
        return made

    def arguments(self, model: torch.nn.Module, given: Arguments) -> Arguments:
        """``given``, which speaks of ``model``'s parameters, for the copy."""
        groups = [
            {**group, "params": [self._tensors[id(parameter)] for parameter in group["params"]]}
            for group in param_groups_of(model, given.optimizer, given.model_parameters)
        ]
        if isinstance(given.optimizer, torch.optim.Optimizer):
            return Arguments(optimizer=_with_groups(given.optimizer, groups))
        chosen = None if given.model_parameters is None else groups
        return Arguments(optimizer=given.optimizer, model_parameters=chosen)


def _without_graphs(attributes: dict[str, Any]) -> dict[str, Any]:
    """``attributes`` without tensors that come from parameters: the engine puts hooks on those."""
    return {
        name: value
        for name, value in attributes.items()
        if not (isinstance(value, torch.Tensor) and value.grad_fn is not None)
    }


def _with_groups(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """A copy without states and hooks, which shares nothing that its ``step`` may change."""
    copied: torch.optim.Optimizer = object.__new__(type(optimizer))
    containers = (dict, list, set, collections.deque)
    own = {
        name: copy.copy(value) if isinstance(value, containers) else value for name, value in vars(optimizer).items()
    }
    own.pop("step", None)  # of a learning rate schedule, bound to the original
    for name, value in own.items():
        if name.endswith("_hooks") and isinstance(value, dict):
            value.clear()
    vars(copied).update(own)
    copied.param_groups = groups
    copied.state = collections.defaultdict(dict)
    return copied
